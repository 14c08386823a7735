"""Which way for your images? From scratch against three ways to start from a pretrained backbone, at one budget.

    livt compare FOLDER --pretrained org/any-classifier --minutes 30
    livt compare FOLDER --pretrained org/any-classifier --ways head full --seeds 0 1 2
    livt compare cifar100-lt --source FOLDER --pretrained org/any-classifier --image_size 128

Foundation models do not always win: this shows it on your own images. Every way is a run of its own, which goes on
where it was stopped; what is done is skipped. It ends with a table, a picture and compare.json in the output folder.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from livt_hf.cli.console import run_command
from livt_hf.cli.options import format_words
from livt_hf.cli.training_settings import CompareSettings, SweepSettings
from livt_hf.data import load_dataset
from livt_hf.data.labels import is_multi_label
from livt_hf.errors import LiVTError
from livt_hf.files import write_values
from livt_hf.pretrained import read_config
from livt_hf.recipes.ablations import Variant, summarise, table_rows
from livt_hf.recipes.sweep import Plan, carried_out
from livt_hf.recipes.train import plan_scratch_training, unmixed
from livt_hf.reports import markdown_table, sweep_plot
from livt_hf.reports.comparison import difference
from livt_hf.results import Results
from livt_hf.text import shell_line
from livt_hf.training.lora import check_lora

LABELS = {"scratch": "from scratch", "head": "frozen, head only", "lora": "LoRA", "full": "all of it"}


class Ways(Plan):
    """The runs of a comparison, which has a folder of its own: they are told apart by their ways."""

    def changes(self, stage: str, options: dict, base: dict | None = None) -> list[str]:  # noqa: ARG002
        return [] if stage == "pretrain" else [options.get("tune", "scratch")]


def main(argv: Sequence[str] | None = None) -> None:
    settings = CompareSettings.parse(argv)
    train, _ = (
        load_dataset(settings.data)["train"],
        read_config(settings.pretrained),
    )  # checked before the first run
    if is_multi_label(train):
        raise LiVTError(
            "ways are compared by accuracy, which images with several labels do not have; train each way "
            "with livt finetune and compare their reports."
        )
    ways = settings.ways or list(LABELS)
    if "lora" in ways and not settings.dry_run:
        check_lora(or_else=" Or go the other ways: --ways scratch head full")
    plan = Ways(as_sweep(settings), [variant_of(way, settings, train) for way in ways])
    if carried_out(plan):
        report(settings, plan)


def as_sweep(settings: CompareSettings) -> SweepSettings:
    """The runs of a comparison are those of a sweep; both stages see the same images."""
    values, common = settings.to_dict(), ("dataset", "source", "imbalance_factor", "plugin")
    said = {name: value for name, value in settings.non_defaults("data").items() if name not in common}
    of_images = {name: value for name, value in said.items() if name != "validation_fraction"}
    return SweepSettings.build(
        **{name: values[name] for name in (*common, "pretrained", "seeds", "dry_run")},
        pretrain=shell_line(format_words(of_images)),
        finetune=shell_line(format_words(said)),
        output_dir=str(settings.folder),
    )


def variant_of(way: str, settings: CompareSettings, train: Dataset) -> Variant:
    """A way with its share of the time. A frozen head has its own number of epochs: it takes seconds."""
    hours, loss = settings.minutes / 60, {"loss": settings.loss}
    if way == "scratch":
        stages = plan_scratch_training(hours, train, settings.loss).options(hours)
        return Variant(LABELS[way], stages["finetune"] | loss, stages["pretrain"], from_own_images=True)
    options = {"tune": way, "image_size": settings.image_size} | loss | unmixed(settings.loss)
    return Variant(LABELS[way], options if way == "head" else options | {"hours": round(hours, 4)})


def report(settings: CompareSettings, plan: Plan) -> None:
    """The table, the picture and compare.json, and which way was best."""
    results, first = plan.results(), plan.first_stages()
    rows = summarise(results)
    for row in rows:
        second = results[row["variant"]]
        row["epochs"] = " + ".join(f"{runs[0].epochs:g}" for runs in (first[row["variant"]], second) if runs)
        row["minutes"] = statistics.fmean(map(spent, second)) + sum(map(spent, first[row["variant"]])) / len(second)
    folder = settings.folder
    table = [
        line | {"epochs": row["epochs"], "minutes": f"{row['minutes']:.1f}"}
        for line, row in zip(table_rows(rows), rows, strict=True)
    ]
    said = {"title": f"Ways to train on {Path(settings.data.dataset).name}", "minutes": settings.minutes, "rows": rows}
    write_values(folder / "compare.json", said)
    (folder / "table.md").write_text(markdown_table(table) + "\n", encoding="utf-8")
    sweep_plot(rows, folder / "plot.png", "way", title=f"{said['title']}, {settings.minutes:g} minutes each")
    print(f"{said['title']}, {settings.minutes:g} minutes each, percent\n\n{markdown_table(table)}\n")
    print(f"{verdict(results)}\nPicture: {folder / 'plot.png'}")


def spent(run: Results) -> float:
    """Minutes from the start of a run to its last update."""
    return (run.seconds + (run.preparation_seconds or 0)) / 60


def verdict(results: dict[str, list[Results]]) -> str:
    """The two best ways, by the mean of their seeds, and whether the number of test images can tell them apart."""
    means = {
        label: runs[0].metrics | {"accuracy": statistics.fmean(run.metrics["accuracy"] for run in runs)}
        for label, runs in results.items()
    }
    best, *others = sorted(means, key=lambda label: -means[label]["accuracy"])
    if not others:
        return f"Only {best!r} was run."
    return f"Best: {best!r}, then {others[0]!r}. {difference(means[best], means[others[0]])}"


if __name__ == "__main__":
    run_command(main)
