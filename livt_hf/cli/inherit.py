"""What a command takes over from an earlier run: its data, its model size, its plugin."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from livt_hf.cli.options import CONFIGS, Argv, CommandSettings
from livt_hf.cli.settings import settings_class
from livt_hf.data.benchmarks import BENCHMARKS, locate_dataset
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError, did_you_mean
from livt_hf.files import read_record, replace_text
from livt_hf.plugins import find_module
from livt_hf.runs import Run, finished_runs, runs_folder
from livt_hf.specs import REQUIRED
from livt_hf.text import shell_line

WITHOUT_PRETRAINING = (
    "run `livt pretrain` first, name a checkpoint with --pretrained, or train from scratch with --pretrained none."
)


@dataclass(frozen=True)
class Resolved:
    """The settings of a launched command with everything merged, and the run that is resumed with them, if any."""

    settings: Any
    run: Run | None = None

    def write(self, path: Path) -> None:
        """Write the settings for a launched process."""
        folder = None if self.run is None else str(self.run.folder)
        record = {"stage": self.settings.stage, "run": folder, "settings": self.settings.to_dict()}
        replace_text(path, yaml.safe_dump(record))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the settings in a launched process."""
        record = read_record(path)
        settings = settings_class(record["stage"]).resolve(record["settings"])
        return cls(settings, None if record["run"] is None else Run(Path(record["run"])))


CommandLine = Argv | Resolved


def resolve_settings(cls: type[CommandSettings], argv: CommandLine = None) -> Any:
    """Return the settings of a command that does not train: explicit options over those of the run it is about."""
    return argv.settings if isinstance(argv, Resolved) else cls.parse(argv, CONFIGS, INHERIT.get(cls.stage))


def settings_from_run(cls: type[CommandSettings], run: Run) -> dict[str, Any]:
    """Return all options a run was started with; an option that did not exist then has its default of that time."""
    defaults = {}
    for name, declared in cls.options().items():
        legacy = declared.facts["legacy_default"]
        defaults[name] = declared.default if legacy is REQUIRED else legacy
    return defaults | {name: value for name, value in run.arguments.items() if name in defaults}


def newest_finished(cls: type[CommandSettings], **settings: Any) -> Run | None:
    """Return the run of a stage, with these settings, that was finished last."""
    runs = finished_runs(cls.stage)
    return next((run for run in runs if settings.items() <= settings_from_run(cls, run).items()), None)


def inherit_from_pretraining(explicit: dict) -> dict:
    """Return what fine-tuning takes over from its pretraining: data, unless others are named, plugin and size.

    Where neither a pretraining nor a dataset is named, that is the newest finished pretraining.
    """
    from livt_hf.cli.training_settings import PretrainSettings

    pretrained = explicit.get("pretrained")
    if pretrained is None and "dataset" in explicit:
        return {}  # the newest pretraining of that data is looked for when all settings are known
    run = newest_finished(PretrainSettings) if pretrained is None else Run(Path(pretrained))
    if run is None:
        raise LiVTError(f"there is no finished pretraining under {runs_folder()}; {WITHOUT_PRETRAINING}")
    if not run.finished:
        return {}
    saved = settings_from_run(PretrainSettings, run)
    inherited = inherit_data(run, explicit) | {name: saved[name] for name in ("model_size", "patch_size")}
    if saved["validation_fraction"] == DataSpec.validation_fraction:
        inherited.pop("validation_fraction", None)  # nothing was held out: fine-tuning does by its own default
    if "folds" in explicit:
        inherited.pop("fold", None)
    return inherited if "plugin" in explicit else inherited | {"plugin": inherit_plugin(run.folder)}


def inherit_from_checkpoint(explicit: dict) -> dict:
    """Return what fine-tuning takes over from its start: the model size and, of a run, its data too."""
    inherited, start = inherit_from_pretraining(explicit), explicit.get("pretrained", "none")
    if start == "none" or inherited and Run(Path(start)).stage == "pretrain":
        return inherited
    from livt_hf.configuration_livit import get_size_name  # these import torch
    from livt_hf.pretrained import read_config
    from livt_hf.training.start import is_livit_compatible

    config = read_config(start)
    if is_livit_compatible(config):
        return inherited or {"model_size": get_size_name(config), "patch_size": config["patch_size"]}
    family = config.get("architecture") or config.get("model_type")
    fixed = {"model_size": family, "patch_size": None, "pooling": "mean"}
    for name in fixed.keys() & explicit.keys():
        if explicit[name] != fixed[name]:
            raise LiVTError(f"{start} is a {family}, whose {name} cannot be changed; leave {name} out.", argument=name)
    # The configs of datasets are for a LiViT; `tune` names that of a pretrained backbone.
    return inherited | {"model_size": family, "patch_size": None, "tune": "full"}


def inherit_from_run(explicit: dict) -> dict:
    """Return what an evaluation takes over from a run: the model, its data, its plugin.

    Named or not, the run's own data are split as they were in training.
    """
    from livt_hf.cli.training_settings import FinetuneSettings
    from livt_hf.predictions.logit_files import is_logit_file  # imports torch

    if "compare" in explicit or is_logit_file(explicit.get("model", "auto")):
        return {}
    inherited: dict[str, Any] = {}
    if explicit.get("model", "auto") == "auto":
        newest = newest_finished(FinetuneSettings, folds=None)  # a cross-validation has no model of its own
        if newest is None:
            raise LiVTError(f"there is no finished fine-tuning under {runs_folder()}; name a model.", argument="model")
        run, inherited["model"] = newest, str(newest.folder)
    else:
        run = Run(Path(explicit["model"]))
    if "dataset" not in explicit:
        if not run.folder.exists():
            raise LiVTError(
                f"there is no run or checkpoint {run.folder} here; correct the path, or pass --dataset to measure a "
                f"model of the Hub.{did_you_mean(run.folder)}",
                argument="model",
            )
        if run.folder.is_dir() and not run.started and not (run.folder / "config.json").exists():
            raise LiVTError(f"{run.folder} holds no model: it has no config.json; name a run or a checkpoint.")
        if not run.finished:
            raise LiVTError(
                f"{run.folder} is not a finished run here; name the dataset to measure it on.", argument="dataset"
            )
    if "dataset" not in explicit or run.started:
        inherited |= inherit_data(run, explicit)
    if "plugin" not in explicit:
        inherited["plugin"] = inherit_plugin(run.folder)
    return inherited


def inherit_data(run: Run, explicit: dict) -> dict:
    """Return the data options of a run, where no dataset is named or the run's own.

    Split otherwise, images would be tested on that the run was trained on. Explicit options still take precedence.
    """
    saved = run.arguments
    if "dataset" in explicit and locate_dataset(explicit["dataset"]) != locate_dataset(
        saved.get("dataset", DataSpec.dataset)
    ):
        return {}
    return {name: saved[name] for name in DataSpec.names() if name in saved}


def inherit_plugin(folder: Path) -> str | None:
    """Return the plugin a run was trained with, if the run is below the folder of runs and the plugin not in it.

    Anything else may be a download, and code that comes with a model must not run without being asked for.
    """
    return check_plugin(folder, Run(folder).plugin)


def check_plugin(folder: Path, plugin: str | None) -> str | None:
    """Return the plugin that the files of a folder name, or raise an error where it must not run unasked."""
    if plugin is None:
        return None
    if not folder.resolve().is_relative_to(runs_folder().resolve()) or _lies_in(plugin, folder):
        raise LiVTError(
            f"{folder} was trained with the plugin {plugin}, and code that comes with a model is not run unasked: "
            f"read it, then pass --plugin {shell_line([plugin])}",
        )
    return plugin


def inherit_plugin_of(name: str) -> Callable[[dict], dict]:
    """Return a function that takes over the plugin of the run which the option `name` names."""
    return lambda explicit: {} if "plugin" in explicit else {"plugin": inherit_plugin(Path(explicit.get(name, "")))}


def inherit_for_prediction(explicit: dict) -> dict:
    """Return what a prediction takes over from a run: its plugin, and the margin around boxes."""
    run = Run(Path(explicit.get("model", "")))
    margin = {name: value for name, value in run.arguments.items() if name == "box_margin"} if run.started else {}
    return inherit_plugin_of("model")(explicit) | margin


def _lies_in(plugin: str, folder: Path) -> bool:
    if plugin.endswith(".py"):
        paths: list[str | None] = [plugin]
    else:  # of a module `a.b` the package `a` is looked for, for importing it would already run its code
        spec = find_module(plugin.split(".")[0])
        paths = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(Path(path).expanduser().resolve().is_relative_to(folder.resolve()) for path in paths if path)


def find_pretraining(settings: Any) -> str:
    """Return the checkpoint to start from: the one named, or the newest finished pretraining of the same images.

    A pretraining of another split may have seen what is now the test set, and so may one of a stream.
    """
    from livt_hf.cli.training_settings import PretrainSettings

    if settings.model.pretrained is not None:
        return settings.model.pretrained
    size = settings.model.model_size
    same = {name: getattr(settings.data, name) for name in DataSpec.split_options()}
    run = newest_finished(PretrainSettings, streaming=False, model_size=size, **same)
    if run is not None:
        return str(run.folder)
    defaults = PretrainSettings.options()
    chosen = {name: value for name, value in same.items() if value != defaults[name].default}
    wanted = ", ".join(f"{name} {value}" for name, value in (chosen | {"model_size": size}).items())
    other = newest_finished(PretrainSettings, streaming=False, **same)
    if other is None and not Path(settings.data.dataset).exists() and settings.data.dataset not in BENCHMARKS:
        from livt_hf.data.readers.source import read_source  # imports `datasets`

        read_source(settings.data, {}, streaming=True)  # raises an error for a dataset that does not exist
    way_out = WITHOUT_PRETRAINING
    if other is not None:
        size = settings_from_run(PretrainSettings, other)["model_size"]
        way_out = f"there is one of size {size}: pass --pretrained {shell_line([other.folder])}"
    raise LiVTError(f"there is no finished pretraining with {wanted} under {runs_folder()}; {way_out}")


# Functions from explicit to inherited options, by command.
INHERIT: dict[str, Callable[[dict], dict]] = {
    "pretrain": lambda _: {},
    "finetune": inherit_from_checkpoint,
    "eval": inherit_from_run,
    "calibrate": inherit_from_run,
    "predict": inherit_for_prediction,
    "publish": inherit_plugin_of("run"),
    "convert": inherit_plugin_of("source"),
}
