"""The paper's ablations, one command each, over the configs of a dataset.

    livt sweep losses --dataset glyphs
    livt sweep losses --dataset cifar100-lt --source FOLDER --seeds 0 1 2
    livt sweep tau --dataset cifar100-lt --source FOLDER --finetune "--epochs 20" --jobs 2
    livt sweep transfer --dataset inat18 --source FOLDER --pretrain "--source IMAGENET"
    livt sweep tau --dataset cifar100-lt --source FOLDER --pretrained facebook/vit-mae-base
    livt sweep losses --plugin my_loss.py --only my_loss bal_bce       # a loss of your own beside them

Variants that share a pretraining share one MGP run. The same command resumes a sweep that was stopped and skips
finished runs. It ends with a table, a plot and sweep.json in the output folder. `livt sweep` lists the ablations.
"""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm.auto import tqdm

from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import INHERIT, inherit_from_checkpoint, settings_from_run
from livt_hf.cli.options import CONFIGS, format_words, parse_words
from livt_hf.cli.resume import check_same_settings
from livt_hf.cli.training_settings import STAGES, SweepSettings, TrainingSettings
from livt_hf.errors import Interrupted, LiVTError
from livt_hf.files import write_values
from livt_hf.long_tail.loss_table import LOSSES
from livt_hf.recipes.ablations import (
    REPORTED,
    SWEEPS,
    Sweep,
    Variant,
    loss_variant,
    paper_rows,
    summarise,
    table_rows,
)
from livt_hf.reports import markdown_table, sweep_plot
from livt_hf.results import Results
from livt_hf.runs import Run
from livt_hf.text import shell_line, shell_words
from livt_hf.threads import available_cores


@dataclass
class Planned:
    """A run of a sweep: the options it names, and the run of the same sweep that it starts from."""

    stage: str
    options: dict[str, Any]
    start: Path | None = None

    @property
    def settings(self) -> TrainingSettings:
        return STAGES[self.stage].parse(self.options, CONFIGS)

    def words(self, folder: Path, threads: int | None = None, resume: str | None = None) -> list[str]:
        """Return the words of its command; the number of threads is a default."""
        options = {"threads": threads} | self.options | {"output_dir": folder, "resume": resume}
        return [self.stage, *format_words(options)]


class Plan:
    """The runs of a sweep by their folders, and which belong to which variant.

    A run is named by what it changes, so equal runs of different sweeps are one. `further` are options of all runs of
    a stage.
    """

    def __init__(self, settings: SweepSettings, variants: list[Variant], further: dict[str, dict] | None = None):
        self.settings, self.runs = settings, {}
        self.further = further or {
            stage: parse_words(cls, shell_words(getattr(settings, stage))) for stage, cls in STAGES.items()
        }
        self.explicit = {stage: cls.explicit_options(self.further[stage]) for stage, cls in STAGES.items()}
        seeds = settings.seeds or [0]
        self.runs_of = {variant.label: [self.finetuning(variant, seed) for seed in seeds] for variant in variants}

    def options(self, stage: str, own: dict) -> dict[str, Any]:
        """Return the options of a run: those of all runs on its dataset, then those of its stage, then its own."""
        settings, explicit = self.settings, self.explicit
        dataset = own.get("dataset", explicit[stage].get("dataset", settings.dataset))
        shared = {"dataset": dataset, "plugin": settings.plugin}
        if dataset == settings.dataset:
            shared |= {"source": settings.source, "imbalance_factor": settings.imbalance_factor}
        elif stage == "finetune":  # on the data of the first stage
            shared |= {name: explicit["pretrain"].get(name) for name in ("source", "lists")}
        if settings.model_size is not None:
            of_this_size = CONFIGS / f"{stage}-{dataset}-{settings.model_size}.yaml"
            exists = of_this_size.exists() and "tune" not in own  # what is tuned has a config of its own
            shared |= {"config": of_this_size if exists else None, "model_size": settings.model_size}
        layers = shared, self.further[stage], own
        return {name: value for layer in layers for name, value in layer.items() if value is not None}

    def finetuning(self, variant: Variant, seed: int) -> Path:
        """Plan a run of a variant and, before it, what it starts from."""
        start, name = self.find_start(variant, seed)
        config = variant.configs.get(variant.finetune.get("dataset", self.settings.dataset))
        base = {}
        if config is not None:
            base = {"config": CONFIGS / f"{config}.yaml"}
            name = [*name, f"config={config.removeprefix('finetune-')}"]
        name = [*name, *self.changes("finetune", variant.finetune, base), f"seed={seed}"]
        folder = self.settings.folder / "bft" / "_".join(name)
        options = self.options("finetune", base | {"pretrained": start} | variant.finetune | {"seed": seed})
        self.runs[folder] = Planned("finetune", options, start if isinstance(start, Path) else None)
        return folder

    def find_start(self, variant: Variant, seed: int) -> tuple[Path | str, list[str]]:
        """Return what a variant starts from, and its part of the name of the run."""
        if variant.start is not None:
            return self.finetuning(variant.start, seed), [f"after={variant.start.label.replace(' ', '-')}"]
        if variant.pretrain is None:
            return "none", ["scratch"]
        if self.settings.pretrained is not None and not variant.from_own_images:
            return self.settings.pretrained, []
        return self.pretraining(variant.pretrain, seed), self.changes("pretrain", variant.pretrain)

    def pretraining(self, options: dict, seed: int) -> Path:
        folder = self.settings.folder / "mgp" / "_".join([*self.changes("pretrain", options), f"seed={seed}"])
        self.runs[folder] = Planned("pretrain", self.options("pretrain", options | {"seed": seed}))
        return folder

    def changes(self, stage: str, options: dict, base: dict | None = None) -> list[str]:
        """Return the options of a run that differ from the settings it would have without them."""
        without = Planned(stage, self.options(stage, base or {})).settings.to_dict()
        return [f"{name}={value}" for name, value in sorted(options.items()) if value != without[name]]

    def rounds(self) -> list[list[Path]]:
        """Return the runs in rounds: each run comes after the one that it starts from."""
        depth = {}
        for folder, run in self.runs.items():  # a start is planned before what it is the start of
            depth[folder] = 0 if run.start is None else depth[run.start] + 1
        return [[folder for folder in depth if depth[folder] == level] for level in sorted(set(depth.values()))]

    def results(self) -> dict[str, list[Results]]:
        """Return the results of finished runs by variant."""
        return {label: [Run(run).results for run in runs] for label, runs in self.runs_of.items()}

    def first_stages(self) -> dict[str, list[Results]]:
        """Return the results of the pretrainings that the runs of each variant started from."""
        starts = {label: filter(None, (self.runs[run].start for run in runs)) for label, runs in self.runs_of.items()}
        return {
            label: [Run(run).results for run in runs if self.runs[run].stage == "pretrain"]
            for label, runs in starts.items()
        }

    def pretrained_on(self, variant: Variant) -> str | None:
        """Return the dataset of the model that a variant starts from, its own where it has none; None if unknown."""
        if variant.start is None and variant.pretrain is not None and self.settings.pretrained is not None:
            return None
        start = self.runs[self.runs_of[variant.label][0]].start
        return self.settings.dataset if start is None else self.runs[start].settings.data.dataset

    def paper_rows(self, sweep: Sweep, variant: Variant) -> list[dict]:
        settings = self.runs[self.runs_of[variant.label][0]].settings
        return paper_rows(sweep, variant, settings, self.pretrained_on(variant))

    def paper(self, sweep: Sweep, variant: Variant) -> dict | None:
        """Return the paper's numbers for a variant, with the size of the model that they belong to."""
        rows = self.paper_rows(sweep, variant)
        return {name: rows[0][name] for name in ("model_size", *REPORTED) if name in rows[0]} if rows else None


def main(argv: Sequence[str] | None = None) -> None:
    settings = SweepSettings.parse(argv)
    if settings.sweep is None:
        for name, sweep in SWEEPS.items():
            print(f"{name:14s} {sweep.title}: {'; '.join(variant.label for variant in sweep.variants)}")
        return
    if settings.pretrained is not None and settings.model_size is None:
        inherited = inherit_from_checkpoint({"dataset": settings.dataset, "pretrained": settings.pretrained})
        settings = settings.replace(model_size=inherited.get("model_size"))
    if settings.sweep not in SWEEPS:
        raise LiVTError(f"sweep is {settings.sweep!r}; choose one of {', '.join(SWEEPS)}.", argument="sweep")
    sweep = SWEEPS[settings.sweep]
    variants = select_variants(sweep, settings.only)
    plan = Plan(settings, variants)
    run_plan(plan)
    if not settings.dry_run:
        report(settings, sweep, plan, variants)


def run_plan(plan: Plan) -> None:
    """Run what is not finished of a plan, or print its commands where the settings ask for a dry run."""
    for folders in plan.rounds():
        if plan.settings.dry_run:
            print("\n".join(shell_line(["livt", *plan.runs[folder].words(folder)]) for folder in folders))
        else:
            run_all({folder: plan.runs[folder] for folder in folders}, plan.settings)


def run_all(runs: dict[Path, Planned], settings: SweepSettings) -> None:
    """Run what is not finished, `jobs` at a time; each run is resumed where it was stopped."""
    threads = max(1, available_cores() // settings.jobs)
    failed, processes = threading.Event(), []

    def run(folder: Path) -> None:
        if failed.is_set():
            return
        words = [*shell_words(settings.launch), *runs[folder].words(folder, threads=threads, resume="auto")]
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_name(f"{folder.name}.out")
        before = log.stat().st_size if log.exists() else 0
        with log.open("a", encoding="utf-8") as output:
            processes.append(command := start_command(words, output))
            status = command.wait()
        if status:
            failed.set()
            lines = log.read_bytes()[before:].decode("utf-8", errors="replace").splitlines()
            why = next((f"{line[7:]}\n" for line in reversed(lines) if line.startswith("error: ")), "")
            raise LiVTError(f"{why}{shell_line(['livt', *words])}\nfailed; see {log}")

    def stop(*_) -> None:
        failed.set()
        for command in processes:
            command.terminate()  # a training saves itself
        raise Interrupted

    for folder, planned in runs.items():  # begun under the same name, but perhaps with other options
        if Run(folder).started:
            check_same_settings(Run(folder), resolve_again(planned, Run(folder)))
    waiting = [folder for folder in runs if not Run(folder).finished]
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with ThreadPoolExecutor(settings.jobs) as pool:
            list(tqdm(pool.map(run, waiting), total=len(waiting), unit="run", file=sys.stderr))
    except (Interrupted, KeyboardInterrupt):
        print("Stopped; running trainings have saved themselves. The same command resumes them.")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def start_command(words: Sequence[str], output: TextIO) -> subprocess.Popen:
    """Start `livt` with these options in a process of its own."""
    command = [sys.executable, "-m", "livt_hf.cli.main", *words]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def resolve_again(planned: Planned, run: Run) -> TrainingSettings:
    """Return the settings that a started run would have now. Few images may have lowered the batch of a config."""
    cls = STAGES[planned.stage]
    explicit = cls.explicit_options(planned.options)
    settings = cls.resolve(explicit, CONFIGS, INHERIT[planned.stage](explicit))
    if settings.to_dict().get("tune") and "batch_size" not in explicit:
        return settings.replace(batch_size=settings_from_run(cls, run)["batch_size"])
    return settings


def report(settings: SweepSettings, sweep: Sweep, plan: Plan, variants: list[Variant]) -> None:
    """Write the table, the plot and sweep.json of a sweep whose runs are finished."""
    results = plan.results()
    # Where the first stages differ, what they cost is part of the comparison.
    pretraining = plan.first_stages() if any(variant.pretrain for variant in variants) else None
    paper = {variant.label: plan.paper(sweep, variant) for variant in variants}
    rows = summarise(results, paper.get, pretraining)
    folder = settings.folder / settings.sweep
    folder.mkdir(parents=True, exist_ok=True)
    record = {"title": sweep.title, "budget": budget(results, plan), "command": command(settings), "rows": rows}
    write_values(folder / "sweep.json", record)
    table = write_table(folder, rows, table_rows(rows), sweep.axis, f"{sweep.title} ({settings.name})")
    print(f"{sweep.title} on {settings.dataset}, percent\n\n{table}\n\nPlot: {folder / 'plot.png'}")


def write_table(folder: Path, rows: list[dict], lines: list[dict], axis: str, title: str) -> str:
    """Write table.md and plot.png of the rows of a comparison, and return the table."""
    table = markdown_table(lines)
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    sweep_plot(rows, folder / "plot.png", axis, title=title)
    return table


def budget(results: dict[str, list[Results]], plan: Plan) -> str:
    """Return model, images, epochs and seeds of the runs in a few words."""
    runs = [run for variant in results.values() for run in variant]
    parts = [f"{runs[0].model_size}, {runs[0].num_train_images:,} training images"]
    pretrainings = [Run(folder).results for folder, run in plan.runs.items() if run.stage == "pretrain"]
    if pretrainings:
        parts.append(f"MGP {spread(run.epochs for run in pretrainings)} epochs ({minutes(pretrainings)})")
    parts.append(f"BFT {spread(run.epochs for run in runs)} epochs ({minutes(runs)})")
    return "; ".join([*parts, f"seeds {spread(run.seed for run in runs)}"])


def spread(values) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))


def minutes(runs: list[Results]) -> str:
    taken = sorted({round(run.seconds / 60) for run in runs})
    return f"{' to '.join(str(m) for m in taken[:: max(1, len(taken) - 1)])} minutes per run"


def command(settings: SweepSettings) -> str:
    """Return the command of a sweep without local paths."""
    # The size of a checkpoint is known, and not always that of a preset.
    hidden = {"sweep"} if settings.pretrained is None else {"sweep", "model_size"}
    options, defaults = settings.to_dict().items(), SweepSettings().to_dict()
    shown = {name: value for name, value in options if name not in hidden and value not in (defaults[name], "")}
    for name in shown:
        if name in settings.names("is_path") and Path(str(shown[name])).exists():
            shown[name] = "FOLDER"
        elif isinstance(shown[name], str):
            shown[name] = without_paths(shown[name])
    return shell_line(["livt", "sweep", settings.sweep, *format_words(shown)])


def without_paths(text: str) -> str:
    """Replace each path in an option's value, which may itself hold several options, by FOLDER."""

    def hidden(word: str) -> str:
        option, equals, value = word.rpartition("=")
        local = re.search(r"[/\\]", value) and (Path(value).is_absolute() or Path(value).exists())
        return f"{option}{equals}FOLDER" if local else word

    return shell_line(map(hidden, shell_words(text)))


def select_variants(sweep: Sweep, only: list[str] | None) -> list[Variant]:
    """Return the variants that `--only` names, or all; a sweep of losses takes every registered loss."""
    if only is None:
        return sweep.variants
    known = {variant.label: variant for variant in sweep.variants}
    if sweep.compares_losses:
        known |= {name: loss_variant(name) for name in LOSSES if name not in known}
    unknown = [label for label in only if label not in known]
    if unknown:
        message = f"there is no variant {unknown[0]!r} in this sweep; choose from: {'; '.join(known)}."
        raise LiVTError(message, argument="only")
    return [variant for label, variant in known.items() if label in only]


if __name__ == "__main__":
    run_command(main)
