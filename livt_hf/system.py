"""Files that are whole or absent, shell lines, signals and the folder of runs."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from livt_hf.errors import LiVTError

# What the commands put into the folder of runs.
_IN_RUNS = re.compile(r"(pretrain|finetune|train|data|report|slurm)-.+|compare|comparison(-\d+)?|sweeps|features")


def flush(*paths: Path) -> None:
    """Ask the disk to keep files and folders before anything relies on them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Around writing to another place, which it gives, what is then renamed: a file or folder is whole or absent."""
    writing = path.with_name(f".writing-{path.name}")
    try:
        yield writing
        os.replace(writing, path)
    except Exception:  # a full disk, for which every library has its own
        if writing.is_dir():
            shutil.rmtree(writing, ignore_errors=True)
        else:
            writing.unlink(missing_ok=True)
        raise


def shell_line(words: Iterable[str | Path]) -> str:
    """Join words to a line for the shell, quoted where needed."""
    return shlex.join(map(str, words))


def shell_words(line: str) -> list[str]:
    """Split a shell line into its words."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise LiVTError(f"{line!r} cannot be read as options: {error}; close what is quoted.") from error


def outlive_signals(_worker: int) -> None:
    """For data loading workers: the process they work for decides when to stop, and may need them until then.

    Who stops a run may signal all its processes, and SIGTERM would end torch's workers at once.
    """
    outlive_ctrl_c()
    if hasattr(signal, "sigwaitinfo"):  # macOS does not tell who sends a signal
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
