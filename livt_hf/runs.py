"""A run on disk: its folder and number, its log, its results, and where to find the newest one."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import yaml

from livt_hf.errors import LiVTError
from livt_hf.settings import save_settings as save_yaml
from livt_hf.version import __version__

ARGUMENTS, LOG, RESULTS, CHECKPOINTS = "arguments.yaml", "log.jsonl", "results.json", "checkpoints"
# Options that may change when a run goes on: they touch neither the data nor the mathematics. `source` and `lists` are
# where the data lies, which may have moved.
_FREE = {
    "resume", "output_dir", "max_hours", "num_workers", "save_steps", "save_minutes", "save_total_limit", "threads",
    "trackers", "push_to_hub", "hub_model_id", "hub_private", "hub_license", "source", "lists",
}  # fmt: skip


@dataclasses.dataclass
class Run:
    """The folder of one run."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def finished(self) -> bool:
        return (self.folder / RESULTS).exists()

    @property
    def arguments(self) -> dict:
        return yaml.safe_load((self.folder / ARGUMENTS).read_text())

    @property
    def results(self) -> dict:
        return json.loads((self.folder / RESULTS).read_text())

    def begin(self, arguments) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            (self.folder / ARGUMENTS).touch(exist_ok=False)  # of two jobs that were given one folder, one gets it
        except FileExistsError as error:
            raise _holds_another(self.folder) from error
        save_yaml(arguments, self.folder / ARGUMENTS)

    def log(self, line: dict) -> None:
        with (self.folder / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def rewind_log(self, update: int) -> None:
        """Drop what was logged after a checkpoint, so that going on leaves neither gap nor repeat."""
        path = self.folder / LOG
        if path.exists():
            complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            replace_text(path, "".join(line for line in complete if json.loads(line)["update"] <= update))

    def write_results(self, results: dict) -> None:
        """Last of all: a run with results is a finished run."""
        replace_text(self.folder / RESULTS, json.dumps(results, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is either the old or the new one, whatever happens meanwhile."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def runs_folder() -> Path:
    """Where runs go by default: `runs` here, or the folder in the environment variable LIVT_RUNS."""
    return Path(os.environ.get("LIVT_RUNS", "runs"))


def group_folder(arguments) -> Path:
    dataset = Path(arguments.dataset.rstrip("/")).name
    if arguments.imbalance_factor:
        dataset += f"-{arguments.imbalance_factor:g}"
    return runs_folder() / f"{arguments.stage}-{dataset}-{arguments.model_size}"


def numbered_runs(folder: Path) -> list[Run]:
    """The runs of a group, oldest first."""
    if not folder.is_dir():
        return []
    found = [entry for entry in folder.iterdir() if entry.name.isdigit() and (entry / ARGUMENTS).exists()]
    return [Run(entry) for entry in sorted(found, key=lambda entry: int(entry.name))]


def new_run(arguments) -> Run:
    """A folder for a new run: the one asked for, if it holds no other run, or the next number."""
    if arguments.output_dir is None:
        return _next_number(group_folder(arguments))
    run = Run(Path(arguments.output_dir))
    if run.folder.exists() and any(run.folder.iterdir()):
        raise _holds_another(run.folder)
    return run


def _next_number(group: Path) -> Run:
    """The next run of a group. Making its folder is what takes the number: another job may be counting just now."""
    group.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(entry.name) for entry in group.iterdir() if entry.name.isdigit()), default=0)
    while True:
        try:
            (group / str(number)).mkdir()
            return Run(group / str(number))
        except FileExistsError:
            number += 1


def _holds_another(folder: Path) -> LiVTError:
    return LiVTError(
        f"{folder} holds another run; pass --resume {shlex.quote(str(folder))} to go on, or a new --output_dir."
    )


def unfinished_run(arguments) -> Run | None:
    """What --resume means: the run named; for "auto" the one in output_dir, or the newest unfinished of its group."""
    if arguments.resume != "auto":
        run = Run(Path(arguments.resume))
        if not (run.folder / ARGUMENTS).exists():
            raise LiVTError(f"{run.folder} is not a run: it has no {ARGUMENTS}; give the folder a run was started in.")
        return run
    if arguments.output_dir is not None:
        run = Run(Path(arguments.output_dir))
        return run if (run.folder / ARGUMENTS).exists() else None
    return next((run for run in reversed(numbered_runs(group_folder(arguments))) if not run.finished), None)


def parse_training(cls, argv: list[str] | None = None, configs: Path | None = None):
    """`parse`, with the settings of the run itself underneath where one is resumed."""
    arguments = parse(cls, argv, configs)
    run = unfinished_run(arguments) if arguments.resume else None
    if run is not None:
        arguments = parse(cls, argv, underneath=run.folder / ARGUMENTS)
    if arguments.push_to_hub and not arguments.hub_model_id:
        raise LiVTError("--push_to_hub needs --hub_model_id organisation/name.")
    return arguments


def check_same_settings(run: Run, arguments) -> None:
    """Refuse to go on with a run under other settings, naming those that differ.

    A run from before an option existed was started with its default.
    """
    saved, asked = dataclasses.asdict(type(arguments)()) | run.arguments, dataclasses.asdict(arguments)
    differing = [
        f"{name} was {saved[name]!r} and is now {value!r}"
        for name, value in asked.items()
        if name not in _FREE and saved[name] != value
    ]
    if differing:
        raise LiVTError(
            f"{run.folder} was started with other settings: {'; '.join(differing)}. "
            "Leave them as they were, or start a new run."
        )


def newest_finished(stage: str, **settings) -> Run | None:
    """The run of a stage, with these settings, that was finished last."""
    found = sorted(runs_folder().glob(f"{stage}-*/*/{RESULTS}"), key=lambda path: path.stat().st_mtime)
    runs = (Run(path.parent) for path in reversed(found))
    return next((run for run in runs if settings.items() <= run.arguments.items()), None)


def provenance() -> dict:
    """Versions and, where there is one, the revision of the code."""
    packages = ("torch", "torchvision", "transformers", "datasets", "accelerate", "timm")
    versions = {"python": platform.python_version(), "livt-hf": __version__}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    return {"versions": versions, "git_revision": _git_revision(Path(__file__).resolve().parents[1])}


def _git_revision(checkout: Path) -> str | None:
    """The commit of a folder that is the root of a repository; None for any other, or without git."""
    git = shutil.which("git")
    if git is None:
        return None
    # An installed package may lie in somebody else's repository: the root has to be the folder itself.
    asked = [git, "rev-parse", "--show-toplevel", "HEAD"]
    answer = subprocess.run(asked, cwd=checkout, capture_output=True, text=True)
    if answer.returncode != 0:
        return None
    root, revision = answer.stdout.splitlines()
    return revision if Path(root).resolve() == checkout else None
