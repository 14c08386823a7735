"""Which run `--resume` means, and what may change when it is resumed.

- `--resume FOLDER` is the run in that folder, which must be of the same stage.
- `--resume` is the run in `--output_dir`, else the newest unfinished run that was started with all options named now;
  `--resume auto` is that or, where there is none, a new run.
- A resumed run keeps its settings. Options that change the data or the mathematics cannot be changed.
- Options that were chosen automatically when the run began (epochs by --hours, those that were auto) stay.
- A finished run cannot be resumed.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from livt_hf.cli.inherit import INHERIT, CommandLine, Resolved, find_pretraining, inherit_plugin, settings_from_run
from livt_hf.cli.options import CONFIGS, parse_words
from livt_hf.cli.publish import check_publishing
from livt_hf.cli.training_settings import FinetuneSettings, TrainingSettings
from livt_hf.errors import LiVTError
from livt_hf.runs import ARGUMENTS, PLAN, Run, new_run, runs_folder
from livt_hf.text import shell_line

logger = logging.getLogger(__name__)
# Options of training by gradient steps, which the exact solution of a classifier on frozen features does without.
_STEP_OPTIONS = (
    "epochs", "hours", "max_steps", "warmup_epochs", "batch_size", "accumulation", "base_lr", "min_lr", "weight_decay",
    "adam_beta2", "clip_grad", "ema_decay", "optimizer",
)  # fmt: skip


def resolve_training(
    cls: type[TrainingSettings], argv: CommandLine = None, configs: Path = CONFIGS
) -> tuple[Any, Run | None]:
    """Return the settings of a stage, and the run that is resumed with them, if any."""
    if isinstance(argv, Resolved):
        return argv.settings, argv.run
    words = argv if isinstance(argv, Mapping) else parse_words(cls, argv)
    explicit = cls.explicit_options(words)
    run = find_run_to_resume(cls, explicit) if "resume" in explicit else None
    inherited = INHERIT[cls.stage](explicit) if run is None else settings_from_run(cls, run)
    if run is not None and "plugin" not in explicit:
        inherited["plugin"] = inherit_plugin(run.folder)
    settings = cls.resolve(explicit, configs, inherited)
    hours, epochs = settings.optimization.hours, words.get("epochs")
    if hours is not None and epochs is not None:
        raise LiVTError(f"--hours {hours:g} chooses the epochs; leave --epochs {epochs} out.", argument="epochs")
    warn_about_ignored_options(settings, explicit)
    if run is not None:
        check_resumable(run, settings)
        settings = keep_automatic_options(settings, run)
    if isinstance(settings, FinetuneSettings):
        settings = settings.replace(pretrained=find_pretraining(settings))
        if holds_nothing_out(settings):
            settings = settings.replace(validation_fraction=0.0)
    check_publishing(settings)
    return settings, run


def warn_about_ignored_options(settings: Any, explicit: Mapping[str, Any]) -> None:
    """Warn about options that were named although an exact solution ignores them."""
    named = [f"--{name} {explicit[name]}" for name in _STEP_OPTIONS if name in explicit]
    if isinstance(settings, FinetuneSettings) and settings.solvable and named:
        logger.warning(
            "%s is ignored: --tune head solves loss %s exactly, without gradient steps; --solver loop trains it by "
            "them.",
            ", ".join(named),
            settings.loss.loss,
        )


def holds_nothing_out(settings: TrainingSettings) -> bool:
    """Return True if by default no image is held out: an exact solution calibrates on out-of-fold logits."""
    return settings.solvable and settings.data.validation_fraction is None


def start_run(settings: TrainingSettings) -> Run:
    """Create the folder of a new run and write its arguments."""
    run = new_run(settings.run_name, settings.output_dir)
    run.begin(settings.to_dict())
    return run


def find_run_to_resume(cls: type[TrainingSettings], explicit: dict) -> Run | None:
    """Return the run that `--resume` means; None where `auto` starts a new one."""
    options = {name: value for name, value in explicit.items() if name != "config"}
    settings = cls.build(**options)
    if settings.resume not in ("auto", "newest"):
        run = Run(Path(str(settings.resume)))
        if run.started:
            return _check_stage(settings.stage, run)
        if (run.folder / PLAN).exists():
            command = shell_line(["livt", "train", "--resume", run.folder])
            raise LiVTError(f"{run.folder} is the folder of a whole training; resume it with: {command}")
        raise LiVTError(f"{run.folder} is not a run: it has no {ARGUMENTS}; give the folder a run was started in.")
    if settings.output_dir is not None:
        run = Run(Path(settings.output_dir))
        return _check_stage(settings.stage, run) if run.started else None
    values = settings.to_dict()
    changeable = {*settings.names("may_change_on_resume"), *automatic_options(settings)}
    wanted = {name: values[name] for name in sorted(options.keys() - changeable)}
    started = (Run(path.parent) for path in runs_folder().glob(f"{settings.stage}-*/*/{ARGUMENTS}"))
    unfinished = [run for run in started if not run.finished and wanted.items() <= settings_from_run(cls, run).items()]
    if not unfinished and settings.resume == "newest":
        which = f" with {', '.join(f'{name} {value}' for name, value in wanted.items())}" if wanted else ""
        raise LiVTError(
            f"there is no unfinished {settings.stage} run{which} under {runs_folder()}; start one without resume.",
            argument="resume",
        )
    return max(unfinished, key=lambda run: (run.folder / ARGUMENTS).stat().st_mtime_ns, default=None)


def _check_stage(stage: str, run: Run) -> Run:
    if run.stage != stage:
        command = shell_line(["livt", run.stage, "--resume", run.folder])
        raise LiVTError(f"{run.folder} is a {run.stage} run; resume it with: {command}")
    return run


def check_resumable(run: Run, settings: TrainingSettings) -> None:
    """Raise an error if a run is finished or was started with other settings."""
    if run.finished:
        raise LiVTError(f"{run.folder} is finished; there is nothing to resume.")
    check_same_settings(run, settings)


def check_same_settings(run: Run, settings: TrainingSettings) -> None:
    """Raise an error if settings differ from those of a run in options that may not change, naming them."""
    saved = settings_from_run(type(settings), run)
    changeable = {*settings.names("may_change_on_resume"), *automatic_options(settings)}
    differing = [
        f"{name} was {saved[name]!r} and is now {value!r}"
        for name, value in settings.to_dict().items()
        if name not in changeable and saved[name] != value
    ]
    if differing:
        raise LiVTError(
            f"{run.folder} was started with other settings: {'; '.join(differing)}. Leave them as they were, or start "
            "a new run with another output_dir.",
            argument="output_dir",
        )


def automatic_options(settings: TrainingSettings) -> list[str]:
    """Return the options that these settings leave to be chosen when a run begins."""
    optimization = settings.optimization
    limited = optimization.hours is not None or optimization.max_steps is not None
    automatic = [name for name in ("compile", "mixed_precision") if getattr(optimization, name) == "auto"]
    automatic += [name for name in ("framing", "precision") if getattr(settings.model, name, None) == "auto"]
    return ["epochs"] * limited + ["validation_fraction"] * holds_nothing_out(settings) + automatic


def keep_automatic_options(settings: Any, run: Run) -> Any:
    """Return the settings with the options that were chosen when the run began."""
    saved = settings_from_run(type(settings), run)
    return settings.replace(**{name: saved[name] for name in automatic_options(settings)})
