"""Compare strategies on your images: from scratch, and three ways to start from a backbone, in the same time each.

    livt compare FOLDER --pretrained org/any-classifier --minutes 30
    livt compare FOLDER --pretrained org/any-classifier --ways head full --seeds 0 1 2
    livt compare cifar100-lt --source FOLDER --pretrained org/any-classifier --image_size 128

Foundation models do not always win: this shows it on your own images. Every strategy is a run of its own, which is
resumed where it was stopped; finished runs are skipped. It ends with a table, a picture and compare.json in the output
folder.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from livt_hf.cli.console import run_command
from livt_hf.cli.training_settings import CompareSettings, SweepSettings
from livt_hf.data import load_dataset
from livt_hf.data.labels import is_multi_label
from livt_hf.errors import LiVTError
from livt_hf.files import write_values
from livt_hf.pretrained import read_config
from livt_hf.recipes.ablations import Variant, summarise, table_rows
from livt_hf.recipes.sweep import Plan, run_plan, write_table
from livt_hf.recipes.train import mixing_options, plan_scratch_training
from livt_hf.reports.comparison import describe_difference
from livt_hf.results import Results
from livt_hf.training.lora import check_lora

LABELS = {"scratch": "from scratch", "head": "frozen, head only", "lora": "LoRA", "full": "all of it"}
SHARED = ("dataset", "source", "imbalance_factor", "plugin")  # options of both stages that a sweep has too


class StrategyPlan(Plan):
    """Runs of a comparison, named by their strategies."""

    def changes(self, stage: str, options: dict, base: dict | None = None) -> list[str]:  # noqa: ARG002
        return [] if stage == "pretrain" else [options.get("tune", "scratch")]


def main(argv: Sequence[str] | None = None) -> None:
    """Run all strategies and report which is best."""
    settings = CompareSettings.parse(argv)
    train = load_dataset(settings.data)["train"]
    read_config(settings.pretrained)  # checked before the first run
    if is_multi_label(train):
        raise LiVTError(
            "strategies are compared by accuracy, which images with several labels do not have; train each with livt "
            "finetune and compare their reports."
        )
    ways = settings.ways or list(LABELS)
    if "lora" in ways and not settings.dry_run:
        check_lora(or_else=" Or compare the others: --ways scratch head full")
    variants = [build_variant(way, settings, train) for way in ways]
    plan = StrategyPlan(build_sweep(settings), variants, data_options(settings))
    run_plan(plan)
    if not settings.dry_run:
        write_report(settings, plan)


def build_sweep(settings: CompareSettings) -> SweepSettings:
    """Return the settings of the sweep that a comparison is."""
    values, names = settings.to_dict(), (*SHARED, "pretrained", "seeds", "dry_run")
    return SweepSettings.build(**{name: values[name] for name in names}, output_dir=str(settings.folder))


def data_options(settings: CompareSettings) -> dict[str, dict]:
    """Return the options of each stage that both see the same images by, beside those that a sweep has."""
    finetune = {name: value for name, value in settings.non_defaults("data").items() if name not in SHARED}
    pretrain = {name: value for name, value in finetune.items() if name != "validation_fraction"}
    return {"pretrain": pretrain, "finetune": finetune}


def build_variant(way: str, settings: CompareSettings, train: Dataset) -> Variant:
    """Return a strategy with its time. A frozen head has its own number of epochs: it takes seconds."""
    hours, loss = settings.minutes / 60, {"loss": settings.loss}
    if way == "scratch":
        stages = plan_scratch_training(hours, train, settings.loss).options(hours)
        return Variant(LABELS[way], stages["finetune"] | loss, stages["pretrain"], from_own_images=True)
    options = {"tune": way, "image_size": settings.image_size} | loss | mixing_options(settings.loss)
    return Variant(LABELS[way], options if way == "head" else options | {"hours": round(hours, 4)})


def write_report(settings: CompareSettings, plan: Plan) -> None:
    """Write the table, the picture and compare.json, and print which strategy was best."""
    results, first = plan.results(), plan.first_stages()
    rows, lines = summarise(results), []
    for row, line in zip(rows, table_rows(rows), strict=True):
        runs, pretrainings = results[row["variant"]], first[row["variant"]]
        row["epochs"] = " + ".join(f"{stage[0].epochs:g}" for stage in (pretrainings, runs) if stage)
        row["minutes"] = sum(map(minutes_spent, [*pretrainings, *runs])) / len(runs)
        lines.append(line | {"epochs": row["epochs"], "minutes": f"{row['minutes']:.1f}"})
    folder, title = settings.folder, f"Ways to train on {Path(settings.data.dataset).name}"
    write_values(folder / "compare.json", {"title": title, "minutes": settings.minutes, "rows": rows})
    title = f"{title}, {settings.minutes:g} minutes each"
    table = write_table(folder, rows, lines, "way", title)
    print(f"{title}, percent\n\n{table}\n\n{format_verdict(results)}\nPicture: {folder / 'plot.png'}")


def minutes_spent(run: Results) -> float:
    """Return the minutes from the start of a run to its last update."""
    return (run.seconds + (run.preparation_seconds or 0)) / 60


def format_verdict(results: dict[str, list[Results]]) -> str:
    """Return the two best strategies by the mean of their seeds, and whether the test images can tell them apart."""
    means = {
        label: runs[0].metrics | {"accuracy": statistics.fmean(run.metrics["accuracy"] for run in runs)}
        for label, runs in results.items()
    }
    best, *others = sorted(means, key=lambda label: -means[label]["accuracy"])
    if not others:
        return f"Only {best!r} was run."
    return f"Best: {best!r}, then {others[0]!r}. {describe_difference(means[best], means[others[0]])}"


if __name__ == "__main__":
    run_command(main)
