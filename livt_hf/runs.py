"""A run on disk: its folder and number, its arguments, log and results. Nothing here imports torch."""

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from filelock import FileLock, Timeout

from livt_hf.errors import LiVTError
from livt_hf.files import read_log, read_record, replace_text
from livt_hf.results import Results

ARGUMENTS, LOG, RESULTS, CHECKPOINTS = "arguments.yaml", "log.jsonl", "results.json", "checkpoints"
LOCK, PLAN = ".lock", "plan.json"  # the plan of `livt train` lies beside the runs of its stages
LOCK_TIMEOUT = 15  # data loading workers outlive a killed process by some seconds and hold its lock
FOLD = "fold-"
_LOCKS: dict[str, FileLock] = {}  # by folder
# Tables and lists that say nothing of what they are about.
_COMMON_NAME = re.compile(
    r"_?((train|val|test|instances|image)[ _-]?)?"
    r"(labels?|meta(data)?|data(set)?|annotations?|images?|index|list|train|val|test|default|coco|boxes|detections?)"
    r"(20\d\d)?",
    re.IGNORECASE,
)
# What the commands put into the folder of runs.
_IN_RUNS = re.compile(r"(pretrain|finetune|train|data|report|slurm)-.+|compare|comparison(-\d+)?|sweeps|features")


def runs_folder() -> Path:
    """Return the folder of runs: `runs` here, or the environment variable LIVT_RUNS."""
    return Path(os.environ.get("LIVT_RUNS", "runs"))


def dataset_name(dataset: str) -> str:
    """Return the name of a dataset in the names of run folders: of a table such as labels.csv, that of its folder.

    Of data/parts/annotations/instances_train.json it is `parts`, of `.` the name of the folder.
    """
    path = Path(os.path.abspath(dataset) if Path(dataset).name in ("", "..") else dataset)
    if path.suffix and _COMMON_NAME.fullmatch(path.name.partition(".")[0]):
        folders = [folder.name for folder in Path(os.path.abspath(path)).parents]
        return next((name for name in folders if name and not _COMMON_NAME.fullmatch(name)), path.name)
    return path.name


def data_folder(dataset: str) -> Path:
    """Return the folder of the pictures of a dataset."""
    return runs_folder() / f"data-{dataset_name(dataset)}"


def is_in_runs_folder(path: str | Path, root: str | Path) -> bool:
    """Return True if a path below `root` belongs to runs and not to the data, where both share a folder."""
    path, root, runs = (Path(os.path.realpath(one)) for one in (path, root, runs_folder()))
    if path.is_relative_to(runs) and not root.is_relative_to(runs):
        return True
    earlier = root / "runs"
    return path.is_relative_to(earlier) and all(_IN_RUNS.fullmatch(entry.name) for entry in earlier.iterdir())


@dataclass
class Run:
    """The folder of one run."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the resumable states."""
        return self.folder / CHECKPOINTS

    @property
    def started(self) -> bool:
        """Return True if a training was started in the folder."""
        return (self.folder / ARGUMENTS).exists()

    @property
    def finished(self) -> bool:
        """Return True if the run has results, which are written last."""
        return (self.folder / RESULTS).exists()

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the options the run was started with."""
        return read_record(self.folder / ARGUMENTS, _argument_types())

    @property
    def plugin(self) -> str | None:
        """Return the plugin the run was started with."""
        return read_record(self.folder / ARGUMENTS, {"plugin": str | None}).get("plugin") if self.started else None

    @property
    def results(self) -> Results:
        """Return the results of a finished run."""
        return Results.read(self.folder / RESULTS)

    @property
    def stage(self) -> str:
        """Return the stage of the run; only a fine-tuning has a loss."""
        return "finetune" if "loss" in self.arguments else "pretrain"

    @property
    def cross_validation(self) -> "Run":
        """Return the run to resume: of a fold, the cross-validation that it belongs to; else the run itself."""
        parent = Run(self.folder.parent)
        return parent if self.folder.name.startswith(FOLD) and parent.started else self

    def fold(self, number: int) -> "Run":
        """Return the run of one fold of a cross-validation."""
        return Run(self.folder / f"{FOLD}{number}")

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Write the arguments of a new run."""
        with claim_file(self.folder / ARGUMENTS):
            self.update(arguments)

    def update(self, arguments: Mapping[str, Any]) -> None:
        """Replace the arguments of a run whose next part has others."""
        replace_text(self.folder / ARGUMENTS, yaml.safe_dump(dict(arguments), sort_keys=False))

    def lock(self) -> None:
        """Raise an error if another process works in the folder; the system unlocks it when this process ends."""
        folder = str(self.folder.resolve())
        if folder in _LOCKS:
            return
        lock = FileLock(self.folder / LOCK)
        try:
            lock.acquire(timeout=LOCK_TIMEOUT)
        except Timeout as error:
            raise LiVTError(f"another process is at work in {self.folder}; wait until it ends, or stop it.") from error
        except (NotImplementedError, OSError):  # a file system without locks
            return
        _LOCKS[folder] = lock

    def log(self, line: dict) -> None:
        """Append a line to the log."""
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def rewind_log(self, update: int) -> None:
        """Drop what was logged after a checkpoint, so that a resumed run has neither gaps nor repeats."""
        path = self.folder / LOG
        if path.exists():
            kept = [line for line in read_log(path) if line["update"] <= update]
            replace_text(path, "".join(f"{json.dumps(line)}\n" for line in kept))

    def write_results(self, results: Results) -> None:
        """Write the results, last of all: a run with results is a finished run."""
        replace_text(self.folder / RESULTS, results.to_json())


@functools.cache
def _argument_types() -> dict[str, Any]:
    """Return the types of all options of both stages."""
    from livt_hf.data.spec import DataSpec, FinetuneAugmentationSpec
    from livt_hf.hub.spec import HubSpec
    from livt_hf.long_tail.spec import LossSpec
    from livt_hf.training.spec import (
        FinetuneCheckpointSpec,
        FinetuneModelSpec,
        FinetuneOptimizationSpec,
        PretrainModelSpec,
    )

    types: dict[str, Any] = {"plugin": str | None, "output_dir": str | None, "resume": str | None}
    types |= {"streaming": bool, "folds": int | None, "epochs": int}
    for spec in (
        PretrainModelSpec, FinetuneModelSpec, DataSpec, FinetuneOptimizationSpec, LossSpec, FinetuneAugmentationSpec,
        FinetuneCheckpointSpec, HubSpec,
    ):  # fmt: skip
        types |= get_type_hints(spec)
    return types


def new_run(name: str, output_dir: str | Path | None = None) -> Run:
    """Return a folder for a new run: `output_dir`, if it holds no other run, or the next number below `name`."""
    if output_dir is None:
        return next_run(runs_folder() / name)
    run = Run(Path(output_dir))
    if run.folder.exists() and any(run.folder.iterdir()):
        raise _holds_another(run.folder)
    return run


def next_run(group: Path) -> Run:
    """Make the folder of the next run of a group; making it reserves the number against other jobs."""
    group.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(entry.name) for entry in group.iterdir() if entry.name.isdecimal()), default=0)
    while True:
        try:
            (group / str(number)).mkdir()
            return Run(group / str(number))
        except FileExistsError:
            number += 1


@contextlib.contextmanager
def claim_file(path: Path) -> Iterator[Path]:
    """Create the first file of a folder around writing it, so that of two jobs only one gets the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise _holds_another(path.parent) from error
    try:
        yield path
    except BaseException:  # a full disk, or Ctrl-C: leave the folder as it was
        path.unlink(missing_ok=True)
        raise


def _holds_another(folder: Path) -> LiVTError:
    return LiVTError(f"{folder} holds another run; resume it, or choose a new output_dir.", argument="output_dir")


def finished_runs(stage: str) -> list[Run]:
    """Return the finished runs of a stage below the folder of runs, the newest first."""
    results = [
        *runs_folder().glob(f"{stage}-*/*/{RESULTS}"),
        *runs_folder().glob(f"train-*/*/{stage}/{RESULTS}"),
    ]
    results.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [Run(path.parent) for path in results]


def check_same_images(run: Run, before: str | None, now: str | None) -> None:
    """Raise an error if a run would be resumed on other training images, by their digests; None is not known."""
    if before is not None and before != now:
        raise LiVTError(
            f"{run.folder} was trained on other images than its dataset now gives it: put them back as they were, or "
            "start a new run with another output_dir.",
            argument="output_dir",
        )
