"""How commands start, print and end: logging, exit codes, and errors as one sentence with the names of flags."""

import errno
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from livt_hf.errors import Interrupted, LiVTError
from livt_hf.text import escape_controls, shell_line

# Conventional for "failed for now, try again": what a scheduler may requeue.
EXIT_UNFINISHED = 75
# As shells have it, plus the number of the signal that has ended a process.
SIGNALLED = 128
# Conditions of the machine that are neither bugs nor known before.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
NOT_ALLOWED = {errno.EACCES, errno.EPERM}
BAD_PATH = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
# What gloo and NCCL say where another process was killed.
_PEER_GONE = re.compile(r"Connection (closed|reset)|Broken pipe|remote process|Socket closed|Timed out waiting", re.I)
# Messages that nobody can act on: implementation of timm processors, processes of an upload, weights of a font.
SILENCED = (
    "transformers.models.auto.image_processing_auto",
    "transformers.models.timm_wrapper.image_processing_timm_wrapper",
    "datasets.arrow_dataset",
    "matplotlib.font_manager",
)
# These print their own messages; propagated to the handler of the command, each would be printed twice.
SELF_PRINTING = ("datasets", "huggingface_hub")
# In the environment of the commands that `livt train` runs, which itself prints about the data and the next command.
WITHIN_TRAIN = "LIVT_WITHIN_TRAIN"
_MOVES = re.compile(r"(\n|\x1b\[A)*")  # of the cursor, by which tqdm writes several bars
# Two processes that raise the same error should print it once: the launcher ends the others when the first is gone.
FIRST_PROCESS_TIMEOUT = 60  # seconds; on a busy machine the first may be much later


class EscapingStream:
    """A stream whose text cannot steer the terminal, as names of files and classes may try to."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if _MOVES.fullmatch(text):  # of several progress bars
            return self._stream.write(text)
        start = "\r" * text.startswith("\r")  # of a progress bar
        return self._stream.write(start + escape_controls(text.removeprefix(start)))


def protect_terminal() -> None:
    """Escape control characters in all that is written to standard output and error."""
    os.environ.setdefault("PYTHON_COLORS", "0")  # of tracebacks, which would be escaped
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), EscapingStream):
            setattr(sys, name, EscapingStream(getattr(sys, name)))


def run_command(main: Callable[[], None]) -> None:
    """Run a command. Errors of the package are printed as a sentence; any other is a bug and keeps its traceback."""
    is_first = not int(os.environ.get("RANK", 0))  # all processes raise the same errors
    _configure_output(is_first)
    try:
        main()
    except Interrupted as stopped:
        if is_first and stopped.args and WITHIN_TRAIN not in os.environ:
            print("Stopped and saved." + format_next_command("To resume", *stopped.args))
        sys.exit(EXIT_UNFINISHED)
    except (LiVTError, OSError) as error:
        if isinstance(error, OSError) and not _is_of_machine(error):
            raise
        if not is_first:
            time.sleep(FIRST_PROCESS_TIMEOUT)
        exit_with(error)
    except RuntimeError as error:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1 or not _PEER_GONE.search(str(error)):
            raise
        time.sleep(FIRST_PROCESS_TIMEOUT)  # the launcher ends this process too, and says what ended the other
        exit_with(
            LiVTError("another process of this command has ended; --resume continues a training that has begun.")
        )


def _is_of_machine(error: OSError) -> bool:
    """Return True for conditions of the machine; in /proc and /sys there is no folder to make anything in."""
    virtual = os.path.realpath(os.fsdecode(error.filename or ".")).startswith(("/proc/", "/sys/"))
    return virtual or error.errno in DISK_FULL | NOT_ALLOWED | BAD_PATH


def exit_with(error: LiVTError | OSError) -> NoReturn:
    """End the process with an error as one sentence."""
    sys.exit(f"error: {render_flags(error) if isinstance(error, LiVTError) else format_os_error(error)}")


def render_flags(error: LiVTError) -> str:
    """Return the message of an error with the argument it is about as a flag: `group_column` as `--group_column`.

    A name that is also an ordinary word is a flag at the start of the sentence only.
    """
    message, name = str(error), error.argument
    if name is None:
        return message
    return spell_flags(message, name) if "_" in name else re.sub(rf"^{name}\b", f"--{name}", message)


def spell_flags(message: str, *names: str) -> str:
    """Return a message with these options in it as flags."""
    for name in names:
        message = re.sub(rf"(?<![\w./'\"-]){name}(?![\w/'\"]|\.\w)", f"--{name}", message)
    return message


class _FlagFormatter(logging.Formatter):
    """A formatter that shows the options that a warning is about, its `arguments`, as flags."""

    def format(self, record: logging.LogRecord) -> str:
        return spell_flags(super().format(record), *getattr(record, "arguments", ()))


def _configure_output(is_first: bool) -> None:
    """Show messages of this package, and those of libraries that somebody can act on."""
    for stream in (sys.stdout, sys.stderr):
        if stream.encoding.lower() != "utf-8":  # a pipe in a C locale, which lacks letters of class names
            stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    protect_terminal()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_FlagFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for package in ("livt_hf", "__main__"):  # a recipe that is run as a script is the latter
        logging.getLogger(package).setLevel(logging.INFO if is_first else logging.ERROR)
    if WITHIN_TRAIN in os.environ:
        logging.getLogger("livt_hf.data").setLevel(logging.ERROR)
    for library in SELF_PRINTING:
        logging.getLogger(library).propagate = False
    for library in SILENCED:
        logging.getLogger(library).setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # a log file gets plain lines
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from datasets import disable_progress_bars
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bars()
        disable_progress_bar()


def exit_as(status: int) -> NoReturn:
    """End as a child process did, which has printed why unless a signal ended it."""
    if status < 0:
        name = signal.Signals(-status).name
        why = ", by the system if memory ran out" if name == "SIGKILL" else ""
        print(f"error: a process was ended by {name}{why}.", file=sys.stderr)
    sys.exit(SIGNALLED - status if status < 0 else status)


def format_os_error(error: OSError) -> str:
    """Format a full disk, or a path that cannot be used, as a sentence."""
    path = "" if error.filename is None else f" {error.filename}"
    if error.errno in BAD_PATH | {errno.ENOENT}:
        return f"there can be no file or folder{path}: {error.strerror}; choose another path."
    if error.errno in DISK_FULL:
        message = f"could not write{path}: {error.strerror}; make room or choose another folder"
    else:
        message = f"may not read or write{path}: {error.strerror}; change its permissions or choose another path"
    return f"{message}. A training that has begun can be resumed with --resume."


def format_next_command(title: str, *words: str | Path) -> str:
    """Return a command to copy on lines of its own; nothing within `livt train`, which continues by itself."""
    return "" if WITHIN_TRAIN in os.environ else f"\n{title}:\n  {shell_line(['livt', *words])}"
