"""A run on disk: its folder and number, its log, its results, and where to find the newest one."""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_type_hints

from filelock import FileLock, Timeout

from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.errors import LiVTError
from livt_hf.files import read_record, read_records, replace_text
from livt_hf.options import command_line, save_settings
from livt_hf.plugins import find_module
from livt_hf.results import Results
from livt_hf.settings import DataSettings, FinetuneSettings, PretrainSettings, TrainingSettings
from livt_hf.specs import REQUIRED
from livt_hf.text import shell_line

ARGUMENTS, LOG, RESULTS, CHECKPOINTS = "arguments.yaml", "log.jsonl", "results.json", "checkpoints"
LOCK, PLAN = ".lock", "plan.json"  # the plan of `livt train` lies beside the runs of its stages
SECONDS_FOR_THE_LAST = 15  # data loading workers outlive a process that was killed by some seconds, and hold its lock
_HELD: dict[str, FileLock] = {}  # by folder
FOLD = "fold-"
# What the commands put into the folder of runs.
_IN_RUNS = re.compile(r"(pretrain|finetune|train|data|report|slurm)-.+|compare|comparison(-\d+)?|sweeps|features")
WITHOUT_PRETRAINING = (
    "run `livt pretrain` first, name a checkpoint with --pretrained, or train from scratch with --pretrained none."
)


def runs_folder() -> Path:
    """Return the folder of runs: `runs` here, or the environment variable LIVT_RUNS."""
    return Path(os.environ.get("LIVT_RUNS", "runs"))


def is_in_runs_folder(path: str | Path, root: str | Path) -> bool:
    """Return True if a path below `root` belongs to runs and not to the data, where both share a folder."""
    path, root, runs = (Path(os.path.realpath(one)) for one in (path, root, runs_folder()))
    if path.is_relative_to(runs) and not root.is_relative_to(runs):
        return True
    earlier = root / "runs"
    return path.is_relative_to(earlier) and all(_IN_RUNS.fullmatch(entry.name) for entry in earlier.iterdir())


@dataclasses.dataclass
class Run:
    """The folder of one run."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def started(self) -> bool:
        return (self.folder / ARGUMENTS).exists()

    @property
    def finished(self) -> bool:
        return (self.folder / RESULTS).exists()

    @property
    def arguments(self) -> dict:
        hints = get_type_hints(PretrainSettings) | get_type_hints(FinetuneSettings)
        return read_record(self.folder / ARGUMENTS, hints)

    @property
    def results(self) -> Results:
        return Results.read(self.folder / RESULTS)

    @property
    def stage(self) -> str:
        return FinetuneSettings.stage if "loss" in self.arguments else PretrainSettings.stage

    @property
    def whole(self) -> "Run":
        """The run to resume: of a fold, the cross-validation that it belongs to."""
        around = Run(self.folder.parent)
        return around if self.folder.name.startswith(FOLD) and around.started else self

    def fold(self, number: int) -> "Run":
        """The run of one fold of a cross-validation."""
        return Run(self.folder / f"{FOLD}{number}")

    def begin(self, settings: TrainingSettings) -> None:
        with claiming(self.folder / ARGUMENTS) as path:
            save_settings(settings, path)

    def hold(self) -> None:
        """Refuse to work in the folder while another process does. The system lets go of it when this one ends."""
        place = str(self.folder.resolve())
        if place in _HELD:
            return
        lock = FileLock(self.folder / LOCK)
        try:
            lock.acquire(timeout=SECONDS_FOR_THE_LAST)
        except Timeout as error:
            raise LiVTError(f"another process is at work in {self.folder}; wait until it ends, or stop it.") from error
        except (NotImplementedError, OSError):  # a file system without locks
            return
        _HELD[place] = lock

    def log(self, line: dict) -> None:
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def rewind_log(self, update: int) -> None:
        """Drop what was logged after a checkpoint, so that going on leaves neither gap nor repeat."""
        path = self.folder / LOG
        if path.exists():
            kept = [line for line in read_log(path) if line["update"] <= update]
            replace_text(path, "".join(f"{json.dumps(line)}\n" for line in kept))

    def reports(self, name: str) -> list[Path]:
        """The files of this name in the reports on the run, the newest first."""
        return sorted(self.folder.glob(f"report*/{name}"), key=lambda path: path.stat().st_mtime, reverse=True)

    def write_results(self, results: Results) -> None:
        """Last of all: a run with results is a finished run."""
        replace_text(self.folder / RESULTS, results.to_json())

    def settings_of(self, cls: type[TrainingSettings]) -> dict:
        """All settings the run was started with; an option that came later had its default."""
        defaults = {}
        for field in dataclasses.fields(cls):
            legacy = field.metadata["legacy_default"]
            defaults[field.name] = field.default if legacy is REQUIRED else legacy
        return defaults | {name: value for name, value in self.arguments.items() if name in defaults}


def read_log(path: str | Path) -> list[dict]:
    """The lines of a log.jsonl, without a last line that a killed process left unfinished."""
    number = float | None
    hints = {"update": int, "epoch": float, "loss": number, "lr": number, "eval": dict[str, number]}
    return read_records(Path(path), hints, required=["update"])


def new_run(settings: TrainingSettings) -> Run:
    """A folder for a new run: the one asked for, if it holds no other run, or the next number."""
    if settings.output_dir is None:
        factor = f"-{settings.imbalance_factor:g}" if settings.imbalance_factor else ""
        group = f"{settings.stage}-{Path(settings.dataset).name}{factor}-{settings.model_size}"
        return next_number(runs_folder() / group)
    run = Run(Path(settings.output_dir))
    if run.folder.exists() and any(run.folder.iterdir()):
        raise _holds_another(run.folder)
    return run


def start_run(settings: TrainingSettings) -> Run:
    """Create the folder of a new run and write its arguments."""
    run = new_run(settings)
    run.begin(settings)
    return run


def next_number(group: Path) -> Run:
    """The next run of a group. Making its folder is what takes the number: another job may be counting just now."""
    group.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(entry.name) for entry in group.iterdir() if entry.name.isdigit()), default=0)
    while True:
        try:
            (group / str(number)).mkdir()
            return Run(group / str(number))
        except FileExistsError:
            number += 1


@contextlib.contextmanager
def claiming(path: Path) -> Iterator[Path]:
    """Around writing the first file of a folder: of two jobs that were given the folder, one gets it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise _holds_another(path.parent) from error
    try:
        yield path
    except OSError:  # a full disk: the folder is as good as new
        path.unlink()
        raise


def _holds_another(folder: Path) -> LiVTError:
    return LiVTError(
        f"{folder} holds another run; pass --resume {shell_line([folder])} to go on, or a new --output_dir."
    )


def unfinished_run(settings: TrainingSettings, asked: dict) -> Run | None:
    """What --resume means: the run named, else the one in output_dir, or the newest unfinished one.

    That is one which was started with all that is asked for now. Where there is none, "auto" is a new run.
    """
    if settings.resume not in ("auto", "newest"):
        run = Run(Path(str(settings.resume)))
        if run.started:
            return _of_stage(settings.stage, run)
        if (run.folder / PLAN).exists():
            whole = f"livt train --resume {shell_line([run.folder])}"
            raise LiVTError(f"{run.folder} is the folder of a whole training; go on with: {whole}")
        raise LiVTError(f"{run.folder} is not a run: it has no {ARGUMENTS}; give the folder a run was started in.")
    if settings.output_dir is not None:
        run = Run(Path(settings.output_dir))
        return _of_stage(settings.stage, run) if run.started else None
    fixed = asked.keys() & set(settings.names()) - {*settings.names("may_change_on_resume"), *_settled(settings)}
    wanted = {name: getattr(settings, name) for name in sorted(fixed)}
    found = (Run(path.parent) for path in runs_folder().glob(f"{settings.stage}-*/*/{ARGUMENTS}"))
    unfinished = [
        run for run in found if not run.finished and wanted.items() <= run.settings_of(type(settings)).items()
    ]
    if not unfinished and settings.resume == "newest":
        which = f" with {', '.join(f'{name} {value}' for name, value in wanted.items())}" if wanted else ""
        raise LiVTError(
            f"there is no unfinished {settings.stage} run{which} under {runs_folder()}; start one without --resume."
        )
    return max(unfinished, key=lambda run: (run.folder / ARGUMENTS).stat().st_mtime_ns, default=None)


def _of_stage(stage: str, run: Run) -> Run:
    if run.stage != stage:
        words = shell_line(["livt", run.stage, "--resume", run.folder])
        raise LiVTError(f"{run.folder} is a {run.stage} run; go on with: {words}")
    return run


def parse_training(
    cls: type[TrainingSettings],
    argv: Sequence[str] | None = None,
    configs: Path | None = None,
    inherit: Callable[[dict], dict] = lambda _: {},
) -> tuple[TrainingSettings, Run | None]:
    """The settings of a stage, and the run that goes on with them where one is resumed."""
    asked, named = cls.asked(argv), command_line(cls, sys.argv[1:] if argv is None else argv)
    run = unfinished_run(cls.merged(asked, configs), asked) if "resume" in asked else None
    settings = cls.merged(asked, configs, inherit(asked) if run is None else run.settings_of(cls))
    kept = None if run is None else run.settings_of(cls)["epochs"]
    if settings.hours is not None and named.get("epochs") not in (None, kept):  # those of a config are a default
        raise LiVTError(f"--hours {settings.hours:g} chooses the epochs; leave --epochs {settings.epochs} out.")
    if run is not None:
        check_resumable(run, settings)
        settings = keep_settled(settings, run)
    if settings.push_to_hub and not settings.hub_model_id:
        raise LiVTError("--push_to_hub needs --hub_model_id organisation/name.")
    return settings, run


def check_resumable(run: Run, settings: TrainingSettings) -> None:
    """Refuse to go on with a finished run, or under other settings, naming those that differ."""
    if run.finished:
        raise LiVTError(f"{run.folder} is finished; there is nothing to resume.")
    check_same_settings(run, settings)


def check_same_settings(run: Run, settings: TrainingSettings) -> None:
    saved, free = run.settings_of(type(settings)), [*settings.names("may_change_on_resume"), *_settled(settings)]
    differing = [
        f"{name} was {saved[name]!r} and is now {value!r}"
        for name, value in dataclasses.asdict(settings).items()
        if name not in free and saved[name] != value
    ]
    if differing:
        raise LiVTError(
            f"{run.folder} was started with other settings: {'; '.join(differing)}. "
            "Leave them as they were, or start a new run with another --output_dir."
        )


def check_same_images(run: Run, before: str | None, now: str | None) -> None:
    """Refuse to go on with a run on other training images than before, by their digests; None is not known."""
    if before is not None and before != now:
        raise LiVTError(
            f"{run.folder} was trained on other images than its dataset now gives it: put them back as they were, or "
            "start a new run with another --output_dir."
        )


def keep_settled(settings: TrainingSettings, run: Run) -> TrainingSettings:
    """Return the settings with the values that were chosen automatically when a run began."""
    saved = run.settings_of(type(settings))
    return settings.replace(**{name: saved[name] for name in _settled(settings)})


def _settled(settings: TrainingSettings) -> list[str]:
    """What these settings leave open: it was chosen when the run began, and stays (see training/autotune.py)."""
    limited = settings.hours is not None or settings.max_steps is not None
    return ["epochs"] * limited + ["compile"] * (settings.compile == "auto")


def newest_finished(cls: type[TrainingSettings], **settings) -> Run | None:
    """The run of a stage, with these settings, that was finished last."""
    by_itself, of_train = f"{cls.stage}-*/*/{RESULTS}", f"train-*/*/{cls.stage}/{RESULTS}"
    found = [*runs_folder().glob(by_itself), *runs_folder().glob(of_train)]
    found.sort(key=lambda path: path.stat().st_mtime)
    runs = (Run(path.parent) for path in reversed(found))
    return next((run for run in runs if settings.items() <= run.settings_of(cls).items()), None)


def lent_by_pretraining(asked: dict) -> dict:
    """What fine-tuning takes over from its pretraining: its data, unless others are named, and its plugin and size.

    Without a word about either, that is the newest finished pretraining.
    """
    named = asked.get("pretrained")
    if named is None and "dataset" in asked:
        return {}  # the newest pretraining of that data is looked for when all settings are known
    run = newest_finished(PretrainSettings) if named is None else Run(Path(named))
    if run is None:
        raise LiVTError(f"there is no finished pretraining under {runs_folder()}; {WITHOUT_PRETRAINING}")
    if not run.finished:
        return {}
    saved = run.settings_of(PretrainSettings)
    lent = lent_data(run, asked) | {name: saved[name] for name in ("model_size", "patch_size")}
    if saved["validation_fraction"] == PretrainSettings.validation_fraction:
        lent.pop("validation_fraction", None)  # nothing was held out: fine-tuning does by its own default
    if "folds" in asked:
        lent.pop("fold", None)
    return lent if "plugin" in asked else lent | {"plugin": lent_plugin(run.folder)}


def lent_data(run: Run, asked: dict) -> dict:
    """The images of a run and how they were divided, where no dataset is asked for or the run's own.

    Divided otherwise, its own images would be tested on that were trained on. What is asked for still counts more.
    """
    saved = run.arguments
    if "dataset" in asked and place_of(asked["dataset"]) != place_of(saved.get("dataset", DataSettings.dataset)):
        return {}
    return {name: saved[name] for name in DataSettings.names() if name in saved and name != "plugin"}


def place_of(dataset: str) -> Path | str:
    """Where a dataset lies on this machine, however that is written; a benchmark or one of the Hub is its name."""
    path = Path(dataset).expanduser()
    return dataset if dataset in BENCHMARKS or not path.exists() else path.resolve()


def lent_plugin(folder: Path) -> str | None:
    """The plugin a run was trained with, if the run is one's own and the plugin not a part of it.

    Anything else may be a download, and code that comes with a model is not run unasked.
    """
    run = Run(folder)
    plugin = run.arguments.get("plugin") if run.started else None
    if plugin is None:
        return None
    if not folder.resolve().is_relative_to(runs_folder().resolve()) or _lies_in(plugin, folder):
        raise LiVTError(
            f"{folder} was trained with the plugin {plugin}, and code that comes with a model is not run unasked: "
            f"read it, then pass --plugin {shell_line([plugin])}"
        )
    return plugin


def lent_plugin_of(name: str) -> Callable[[dict], dict]:
    """What a command takes over from the run that its option `name` names: its plugin, unless one is asked for."""
    return lambda asked: {} if "plugin" in asked else {"plugin": lent_plugin(Path(asked.get(name, "")))}


def _lies_in(plugin: str, folder: Path) -> bool:
    if plugin.endswith(".py"):
        places: list[str | None] = [plugin]
    else:  # of a module `a.b` the package `a` is looked for, for importing it would already run its code
        spec = find_module(plugin.split(".")[0])
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(Path(place).expanduser().resolve().is_relative_to(folder.resolve()) for place in places if place)


def find_pretraining(settings: FinetuneSettings) -> str:
    """The checkpoint to start from: the one named, or the newest finished pretraining of the same images and size.

    A pretraining of another split may have seen what is now the test set, and so may one of a stream.
    """
    if settings.pretrained is not None:
        return settings.pretrained
    same = {name: getattr(settings, name) for name in settings.split_options()}
    run = newest_finished(PretrainSettings, streaming=False, model_size=settings.model_size, **same)
    if run is not None:
        return str(run.folder)
    chosen = {name: value for name, value in same.items() if value != getattr(PretrainSettings, name)}
    wanted = ", ".join(f"{name} {value}" for name, value in (chosen | {"model_size": settings.model_size}).items())
    other = newest_finished(PretrainSettings, streaming=False, **same)
    way_out = WITHOUT_PRETRAINING
    if other is not None:
        size = other.settings_of(PretrainSettings)["model_size"]
        way_out = f"there is one of size {size}: pass --pretrained {shell_line([other.folder])}"
    raise LiVTError(f"there is no finished pretraining with {wanted} under {runs_folder()}; {way_out}")
