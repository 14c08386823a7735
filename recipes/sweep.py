"""The paper's ablations, one command each, over the configs of a dataset.

    livt sweep losses --dataset glyphs
    livt sweep losses --dataset cifar100-lt --source FOLDER --seeds 0 1 2
    livt sweep tau --dataset cifar100-lt --source FOLDER --finetune "--epochs 20" --jobs 2

Variants that share a pretraining share one MGP run. A sweep that is stopped goes on where it was; what is done is
skipped. It ends with a table, a plot and sweep.json in the output folder. `livt sweep` alone lists the ablations.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tqdm.auto import tqdm

from livt_hf.commands import run_command
from livt_hf.errors import LiVTError
from livt_hf.recipes.paper.sweeps import SWEEPS, Sweep, Variant, paper_row, summarise, table_rows
from livt_hf.reports import markdown_table, sweep_plot
from livt_hf.results import Results
from livt_hf.runs import ARGUMENTS, Run, check_same_settings, lent_by_pretraining, runs_folder
from livt_hf.settings import CommandSettings, FinetuneSettings, PretrainSettings, option
from livt_hf.training.machine import available_cores

CONFIGS = Path(__file__).parent / "configs"
STAGES = {"pretrain": PretrainSettings, "finetune": FinetuneSettings}


@dataclass
class SweepSettings(CommandSettings):
    """Run an ablation: every variant, on every seed."""

    stage: ClassVar[str] = "sweep"

    sweep: str | None = option(None, "which ablation; without one they are listed", choices=SWEEPS, positional=True)
    only: list[str] | None = option(None, "some of its variants, by their labels")
    dataset: str = option("glyphs", "its configs are the base of every variant", place=True)
    source: str | None = option(None, "local copy of the dataset", place=True)
    imbalance_factor: str | None = option(None, "largest class over smallest class")
    pretrained: str | None = option(None, "start every variant from this checkpoint instead of an MGP run", place=True)
    seeds: list[int] | None = option(None, "seeds of the runs; default: 0")
    pretrain: str = option("", 'further options of the first stage, such as "--epochs 50"')
    finetune: str = option("", "further options of the second stage")
    launch: str = option("", 'options of accelerate launch, such as "--multi_gpu"')
    jobs: int = option(1, "runs at a time, each with its share of the cores", at_least=1)
    output_dir: str | None = option(None, "default: runs/sweeps/<dataset>[-<factor>]", place=True)
    dry_run: bool = option(False, "print the commands and run nothing")

    @property
    def name(self) -> str:
        return "-".join(filter(None, (Path(self.dataset).name, self.imbalance_factor)))

    @property
    def folder(self) -> Path:
        return Path(self.output_dir or runs_folder() / "sweeps" / self.name)

    def words(self, stage: str) -> list[str]:
        """What every run of a stage is told."""
        shared = {name: getattr(self, name) for name in ("dataset", "source", "imbalance_factor", "plugin")}
        return [*as_words(shared), *shlex.split({"pretrain": self.pretrain, "finetune": self.finetune}[stage])]


@dataclass
class Plan:
    """The runs of a sweep: their folders with their command-line words, and which belong to which variant."""

    pretrainings: dict[Path, list[str]] = field(default_factory=dict)
    finetunings: dict[Path, list[str]] = field(default_factory=dict)
    start_of: dict[Path, Path | None] = field(default_factory=dict)
    runs_of: dict[str, list[Path]] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> None:
    settings = SweepSettings.parse(argv)
    if settings.sweep is None:
        for name, sweep in SWEEPS.items():
            print(f"{name:14s} {sweep.title}: {'; '.join(variant.label for variant in sweep.variants)}")
        return
    sweep = SWEEPS[settings.sweep]
    variants = chosen(sweep.variants, settings.only)
    bases = {stage: cls.parse(settings.words(stage), CONFIGS) for stage, cls in STAGES.items()}
    plan = planned(settings, variants, bases)
    runs = {"pretrain": plan.pretrainings, "finetune": plan.finetunings}
    if settings.dry_run:
        for stage, commands in runs.items():
            for folder, words in commands.items():
                print(shlex.join(["livt", stage, *words, "--output_dir", str(folder)]))
        return
    for stage, commands in runs.items():
        run_all(stage, commands, settings)
    report(settings, sweep, plan, bases["finetune"])


def planned(settings: SweepSettings, variants: list[Variant], bases: dict) -> Plan:
    """Every variant with every seed. A run is named by what it changes, so equal runs of different sweeps are one."""
    plan = Plan(runs_of={variant.label: [] for variant in variants})
    for seed in settings.seeds or [0]:
        for variant in variants:
            start, name = settings.pretrained or "none", ["scratch"]
            if settings.pretrained is not None:
                name = []
            elif variant.pretrain is not None:
                name = differences(variant.pretrain, bases["pretrain"])
                start = settings.folder / "mgp" / "_".join([*name, f"seed={seed}"])
                plan.pretrainings[start] = [*settings.words("pretrain"), *as_words(variant.pretrain | {"seed": seed})]
            changed = differences(variant.finetune, bases["finetune"])
            run = settings.folder / "bft" / "_".join([*name, *changed, f"seed={seed}"])
            options = as_words({"pretrained": start} | variant.finetune | {"seed": seed})
            plan.finetunings[run] = [*settings.words("finetune"), *options]
            plan.start_of[run] = start if isinstance(start, Path) else None
            plan.runs_of[variant.label].append(run)
    return plan


def run_all(stage: str, commands: dict[Path, list[str]], settings: SweepSettings) -> None:
    """Run what is not finished, `jobs` at a time; each can be killed and goes on the next time."""
    threads = max(1, available_cores() // settings.jobs)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(settings.launch)]

    def run(folder: Path) -> None:
        command = [*launcher, "--module", f"livt_hf.recipes.{stage}", *commands[folder]]
        command += ["--output_dir", str(folder), "--resume", "auto", "--threads", str(threads)]
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_name(f"{folder.name}.out")
        with log.open("a") as output:
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
        if status:
            raise LiVTError(f"{shlex.join(command)}\nfailed; see {log}")

    for folder, words in commands.items():  # begun under the same name, but perhaps with other options
        if (folder / ARGUMENTS).exists():
            inherit = lent_by_pretraining if stage == "finetune" else lambda _: {}
            check_same_settings(Run(folder), STAGES[stage].parse(words, CONFIGS, inherit))
    waiting = [folder for folder in commands if not Run(folder).finished]
    with ThreadPoolExecutor(settings.jobs) as pool:
        list(tqdm(pool.map(run, waiting), total=len(waiting), desc=stage, unit="run", file=sys.stderr))


def report(settings: SweepSettings, sweep: Sweep, plan: Plan, base: FinetuneSettings) -> None:
    """The table, the plot and sweep.json of a sweep whose runs are finished."""
    results = {label: [Run(run).results for run in runs] for label, runs in plan.runs_of.items()}
    variants = {variant.label: variant for variant in sweep.variants}
    pretraining = None
    if any(variants[label].pretrain for label in results):  # what the first stage cost is part of the comparison
        starts = {label: [plan.start_of[run] for run in runs] for label, runs in plan.runs_of.items()}
        pretraining = {label: [Run(run).results for run in runs if run] for label, runs in starts.items()}
    rows = summarise(results, lambda label: paper_row(sweep, variants[label], base), pretraining)
    table = markdown_table(table_rows(rows))
    folder = settings.folder / settings.sweep
    folder.mkdir(parents=True, exist_ok=True)
    said = {"title": sweep.title, "budget": budget(results, plan), "command": command(settings), "rows": rows}
    (folder / "sweep.json").write_text(json.dumps(said, indent=2) + "\n")
    (folder / "table.md").write_text(table + "\n")
    sweep_plot(rows, folder / "plot.png", sweep.axis, title=f"{sweep.title} ({settings.name})")
    print(f"{sweep.title} on {settings.dataset}, percent\n\n{table}\n\nPlot: {folder / 'plot.png'}")


def budget(results: dict[str, list[Results]], plan: Plan) -> str:
    """What each run was given, in a few words."""
    runs = [run for variant in results.values() for run in variant]
    parts = [f"{runs[0].model_size}, {runs[0].num_train_images:,} training images"]
    pretrainings = [Run(folder).results for folder in plan.pretrainings]
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
    """This command, without the paths of this machine."""
    said = {name: getattr(settings, name) for name in settings.names() if name != "sweep"}
    defaults = vars(SweepSettings())
    shown = {name: value for name, value in said.items() if value not in (defaults[name], "")}
    for name in shown:
        if name in settings.names("place") and Path(str(shown[name])).expanduser().exists():
            shown[name] = "FOLDER"
        elif isinstance(shown[name], str):
            shown[name] = without_paths(shown[name])
    return shlex.join(["livt", "sweep", settings.sweep, *as_words(shown)])


def without_paths(text: str) -> str:
    """FOLDER for each path in an option's value, which may itself hold several options."""

    def hidden(word: str) -> str:
        option, equals, value = word.rpartition("=")
        local = "/" in value and (Path(value).is_absolute() or Path(value).exists())
        return f"{option}{equals}FOLDER" if local else word

    return " ".join(map(hidden, text.split(" ")))


def as_words(options: dict) -> list[str]:
    """Values as the command line takes them; a list is one option with several values."""
    words = []
    for name, value in options.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def chosen(variants: list[Variant], only: list[str] | None) -> list[Variant]:
    labels = [variant.label for variant in variants]
    unknown = [label for label in only or () if label not in labels]
    if unknown:
        raise LiVTError(f"there is no variant {unknown[0]!r} in this sweep; choose from: {'; '.join(labels)}")
    return [variant for variant in variants if only is None or variant.label in only]


def differences(options: dict, base) -> list[str]:
    """What a run changes of the base settings."""
    return [f"{name}={value}" for name, value in sorted(options.items()) if value != getattr(base, name)]


if __name__ == "__main__":
    run_command(main)
