"""How commands begin, speak and end."""

import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from livt_hf.errors import Interrupted, LiVTError
from livt_hf.results import Results
from livt_hf.runs import Run
from livt_hf.settings import TrainingSettings
from livt_hf.text import shell_line

# Conventional for "failed for now, try again": what a scheduler may requeue.
EXIT_UNFINISHED = 75
# As shells have it, plus the number of the signal that has ended a process.
SIGNALLED = 128
# Not a bug, and nothing that could be known before.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
NOT_ALLOWED = {errno.EACCES, errno.EPERM}
NO_PLACE = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
# These tell of every timm model that its image processor has one implementation and is saved in config.json, of every
# small dataset that one process uploads it, and of a font which weights it has: nobody needs to do a thing about it.
MEANINGLESS = (
    "transformers.models.auto.image_processing_auto",
    "transformers.models.timm_wrapper.image_processing_timm_wrapper",
    "datasets.arrow_dataset",
    "matplotlib.font_manager",
)
# These print their own messages; passed on to the handler of the command, each would be printed twice.
SPEAK_FOR_THEMSELVES = ("datasets", "huggingface_hub")
# In the environment of the commands that `livt train` runs: what they would say of the data, and which command comes
# next, is its own to say.
WITHIN_TRAIN = "LIVT_WITHIN_TRAIN"
# Two processes that refuse the same thing should say it once: the launcher ends the others when the first is gone.
SECONDS_FOR_THE_FIRST = 60  # on a machine that is busy, the first may be much later


def run_command(main: Callable[[], None]) -> None:
    """Run a command. What the package refuses is a sentence; anything else is a bug and keeps its traceback."""
    first = not int(os.environ.get("RANK", 0))  # of several processes, which all find the same
    _prepare_to_speak(first)
    try:
        main()
    except Interrupted as stopped:
        if first and stopped.args and WITHIN_TRAIN not in os.environ:
            print("Stopped and saved." + what_next("To go on", *stopped.args))
        sys.exit(EXIT_UNFINISHED)
    except (LiVTError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NO_ROOM | NOT_ALLOWED | NO_PLACE:
            raise
        if not first:
            time.sleep(SECONDS_FOR_THE_FIRST)
        sys.exit(f"error: {error if isinstance(error, LiVTError) else refused_by_the_machine(error)}")


def _prepare_to_speak(first: bool) -> None:
    """Have our own messages shown, and of the libraries' those that somebody can do something about."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for ours in ("livt_hf", "__main__"):  # a recipe that is run as a script is the latter
        logging.getLogger(ours).setLevel(logging.INFO if first else logging.ERROR)
    if WITHIN_TRAIN in os.environ:
        logging.getLogger("livt_hf.data").setLevel(logging.ERROR)
    for library in SPEAK_FOR_THEMSELVES:
        logging.getLogger(library).propagate = False
    for meaningless in MEANINGLESS:
        logging.getLogger(meaningless).setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # a log file gets plain lines
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from datasets import disable_progress_bars
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bars()
        disable_progress_bar()


def exit_as(status: int) -> NoReturn:
    """End as a process did that this command ran. It has said why, unless a signal ended it."""
    if status < 0:
        name = signal.Signals(-status).name
        why = ", by the system if memory ran out" if name == "SIGKILL" else ""
        print(f"error: a process was ended by {name}{why}.", file=sys.stderr)
    sys.exit(SIGNALLED - status if status < 0 else status)


def refused_by_the_machine(error: OSError) -> str:
    """A disk that is full, or a place that cannot be or may not be read or written, as a sentence."""
    place = "" if error.filename is None else f" {error.filename}"
    if error.errno in NO_PLACE:
        return f"there can be no file or folder{place}: {error.strerror}; choose another place."
    if error.errno in NO_ROOM:
        said = f"could not write{place}: {error.strerror}; make room or choose another folder"
    else:
        said = f"may not read or write{place}: {error.strerror}; change its permissions or choose another place"
    return f"{said}. A training that has begun goes on with --resume."


def what_next(what: str, *words: str | Path) -> str:
    """A command to copy, on lines of their own; within `livt train`, which goes on by itself, nothing."""
    return "" if WITHIN_TRAIN in os.environ else f"\n{what}:\n  {shell_line(['livt', *words])}"


def check_publishing(settings: TrainingSettings) -> None:
    """Of `--push_to_hub`: what would be refused after days of training is refused before."""
    if settings.push_to_hub:
        from livt_hf.hub import Publication
        from livt_hf.training.results import is_local, is_own

        start = getattr(settings, "pretrained", None)
        said = Results(stage=settings.stage, dataset=settings.dataset, pretrained=start)
        said.pretrained_local, said.pretrained_own = start in (None, "none") or is_local(start), is_own(start)
        Publication(settings.hub_model_id, license=settings.hub_license).licensed(said)


def publish_if_asked(settings: TrainingSettings, run: Run) -> None:
    """Of `--push_to_hub`. A Hub that cannot be reached leaves the run complete and a command to publish it later."""
    if settings.push_to_hub:
        from livt_hf.hub import Publication, publish

        publication = Publication(settings.hub_model_id, license=settings.hub_license, public=settings.hub_public)
        commit = publish(run.folder, publication)
        logging.getLogger(__name__).info("published: %s", commit.repo_url)
