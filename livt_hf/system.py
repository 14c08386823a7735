"""What Linux, macOS and Windows do differently: asked of the system as what it can do, here and nowhere else."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from livt_hf.errors import LiVTError

# Windows has no signals between processes: Ctrl-C reaches every process of a console by itself.
SENDS_SIGNALS = hasattr(os, "killpg")
# torch for Windows comes without libuv, which torch's launcher of several processes wants.
LAUNCHES_SEVERAL = hasattr(os, "fork")
# Seconds after which a file that another program holds open is tried again.
_PATIENCE = 0.1, 0.3, 1.0, 3.0
# What the commands put into the folder of runs.
_IN_RUNS = re.compile(r"(pretrain|finetune|train|data|report|slurm)-.+|compare|comparison(-\d+)?|sweeps|features")


def flush(*paths: Path) -> None:
    """Ask the disk to keep files and folders before anything relies on them.

    Windows flushes only what is open for writing, and opens no folders.
    """
    for path in paths:
        folder = path.is_dir()
        if not folder or hasattr(os, "O_DIRECTORY"):
            descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
            os.fsync(descriptor)
            os.close(descriptor)


def rename(path: Path, target: Path) -> Path:
    """Rename a file or a folder, in the place of a file of that name.

    On Windows a scanner or an indexer that has just opened a new file keeps it and its folder from being renamed.
    """
    for seconds in () if hasattr(os, "O_DIRECTORY") else _PATIENCE:
        try:
            os.replace(path, target)
            return target
        except PermissionError:
            time.sleep(seconds)
    os.replace(path, target)
    return target


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Around writing to another place, which it gives, what is then renamed: a file or folder is whole or absent."""
    writing = path.with_name(f".writing-{path.name}")
    try:
        yield writing
        rename(writing, path)
    except Exception:  # a full disk, for which every library has its own
        if writing.is_dir():
            shutil.rmtree(writing, ignore_errors=True)
        else:
            writing.unlink(missing_ok=True)
        raise


def shell_line(words: Iterable[str | Path]) -> str:
    """Words as a line for the shell of this system: what it would not leave as it is, is quoted."""
    words = list(map(str, words))
    return shlex.join(words) if os.sep == "/" else " ".join(map(_quoted_for_windows, words))


def _quoted_for_windows(word: str) -> str:
    """Programs there take a quote after a backslash for a letter, and the backslashes before a quote by twos."""
    if re.fullmatch(r"[\w.:\\/=,+@-]+", word):
        return word
    return '"' + re.sub(r"(\\*)$", r"\1\1", re.sub(r'(\\*)"', r'\1\1\\"', word)) + '"'


def shell_words(line: str) -> list[str]:
    """The words of such a line. A backslash is a part of a path where it separates folders."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    if os.sep != "/":
        lexer.escape, lexer.quotes = "", '"'
    try:
        return list(lexer)
    except ValueError as error:
        raise LiVTError(f"{line!r} cannot be read as options: {error}; close what is quoted.") from error


def outlive_signals(_worker: int) -> None:
    """For data loading workers: the process they work for decides when to stop, and may need them until then.

    Who stops a run may signal all its processes, and SIGTERM would end torch's workers at once.
    """
    outlive_ctrl_c()
    if hasattr(signal, "sigwaitinfo"):  # macOS and Windows do not tell who sends a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_own_process, daemon=True).start()


def outlive_ctrl_c() -> None:
    """Forked in a training, workers have its handler; where they are started afresh, Python's, which ends them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _wait_for_own_process() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def runs_folder() -> Path:
    """Where runs go by default: `runs` here, or the folder in the environment variable LIVT_RUNS."""
    return Path(os.environ.get("LIVT_RUNS", "runs"))


def is_of_runs(path: str | Path, root: str | Path) -> bool:
    """Whether what lies below `root` is of runs: no data, also where one works or worked in the folder of images."""
    path, root, runs = (Path(os.path.realpath(place)) for place in (path, root, runs_folder()))
    if path.is_relative_to(runs) and not root.is_relative_to(runs):
        return True
    earlier = root / "runs"
    return path.is_relative_to(earlier) and all(_IN_RUNS.fullmatch(entry.name) for entry in earlier.iterdir())
