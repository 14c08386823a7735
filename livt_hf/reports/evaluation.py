"""The report of one evaluation: pictures, tables and a page, in a folder of their own."""

import itertools
from pathlib import Path

import numpy as np
from datasets import Dataset

from livt_hf.data.decoding import read_images
from livt_hf.data.labels import labels_of
from livt_hf.errors import LiVTError
from livt_hf.files import write_values
from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.shot_groups import GROUPS
from livt_hf.reports import (
    accuracy_by_frequency,
    best_and_worst,
    confused_classes,
    html_report,
    markdown_table,
    reliability_diagram,
    training_curves,
)
from livt_hf.reports.comparison import CLASSES, NUMBERS, write_classes
from livt_hf.reports.curves import accuracy_by_shift, shift_rows
from livt_hf.reports.verdict import first_screen, first_screen_text
from livt_hf.runs import FOLD, LOG, Run, runs_folder
from livt_hf.text import format_percent

Pictures, Tables = dict[str, Path], dict[str, list[dict]]
SAMPLES = 6
FOLD_METRICS = ("accuracy", "map", "mean_class_accuracy", "macro_f1", *GROUPS, "auroc", "ece")
_SHARES = ("accuracy", "precision", "recall", "f1", "auroc", "average_precision", "confidence")
# The files of a report that show numbers and no image of the dataset: they may be published without asking.
WITHOUT_IMAGES = (NUMBERS, "report.md", "frequency.png", "confused.png", "reliability-*.png", "training.png")
WITHOUT_IMAGES += ("shifts.png",)


def choose_folder(asked: str | None, model: str, is_comparison: bool = False) -> Path:
    """Return where a report goes: the folder asked for, if there is none yet, or report, report-2, ... of a run.

    The report on any other model, which may be a download, goes where runs go.
    """
    if asked is not None:
        if Path(asked).exists():
            raise LiVTError(f"the report folder {asked} exists; pass another --report.", "report")
        return Path(asked)
    if is_comparison:
        folder = runs_folder() / "comparison"
    elif Run(Path(model)).started:
        folder = Path(model, "report")
    else:
        folder = runs_folder() / f"report-{Path(model).name}"
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    return next(path for path in itertools.chain([folder], numbered) if not path.exists())


def write_report(folder: Path, report: EvaluationReport, dataset: Dataset) -> Path:
    """Write pictures, tables and the page of an evaluation into a folder, and return the page.

    Args:
        folder: where the report goes; predictions may be there already.
        report: what was measured.
        dataset: the images, in the order of the predictions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary, several = report.summary, not report.metrics
    pictures, tables = (_of_several_labels if several else _of_one_label)(folder, report, dataset)
    folds = sorted(Path(summary["model"]).glob(f"{FOLD}*/{LOG}"))
    logs = {log.parent.name: log for log in (Path(summary["model"]) / LOG, *folds) if log.exists()}
    if logs:
        pictures["Training"] = training_curves(logs, folder / "training.png")
    title, text, page = f"{summary['model']} on {summary['dataset']} ({summary['split']})", [], ""
    write_values(folder / NUMBERS, summary | ({"classes": report.per_class} if several else {}))
    if not several:
        write_classes(report.per_class, folder / CLASSES)
        text, page = [first_screen_text(report)], first_screen(report)
    text = [f"# {title}", *text, *(f"## {name}\n\n{markdown_table(rows)}" for name, rows in tables.items())]
    (folder / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return html_report(folder, title, tables, pictures, page)


def _of_one_label(folder: Path, report: EvaluationReport, dataset: Dataset) -> tuple[Pictures, Tables]:
    per_class, summary, labels = report.per_class, report.summary, labels_of(dataset).values

    def samples(label: int) -> list[np.ndarray]:
        rows = np.flatnonzero(labels == label)[:SAMPLES].tolist()
        return [image.permute(1, 2, 0).numpy() for image in read_images(dataset, rows)]

    pictures = {
        "Accuracy against class frequency": accuracy_by_frequency(per_class, folder / "frequency.png"),
        "Best and worst classes": best_and_worst(per_class, samples, folder / "classes.png"),
        "Most confused classes": confused_classes(report.confusions[:20], folder / "confused.png"),
    }
    for number, (rule, metric) in enumerate(report.metrics.items()):
        title = f"Reliability: {summary['rule_labels'][rule]}"
        if any(row["images"] for row in metric.bins):  # none where all logits are NaN
            pictures[title] = reliability_diagram(metric.bins, folder / f"reliability-{number}.png", title)
    if "shifted" in summary:
        pictures["Shifted test sets"] = accuracy_by_shift(summary["shifted"], folder / "shifts.png")
    return pictures, _tables(summary, per_class)


def _of_several_labels(folder: Path, report: EvaluationReport, _dataset: Dataset) -> tuple[Pictures, Tables]:
    """Each class is a question of its own, and its images are those that have it."""
    metrics, rows, pictures = report.summary["rules"][report.summary["default_rule"]], report.per_class, {}
    if metrics["map"] is not None:
        picture = accuracy_by_frequency(rows, folder / "frequency.png", measure="average_precision")
        pictures["Average precision against class frequency"] = picture
    means = {"mean average precision": "map"} | {group: group for group in GROUPS} | {"AUROC": "auroc"}
    means |= {name: f"macro_{name}" for name in ("precision", "recall", "f1") if f"macro_{name}" in metrics}
    over_classes = {words: format_percent(metrics[name]) for words, name in means.items()}
    tables = {"Mean over classes (percent; of frequent and rare classes the average precision)": [over_classes]}
    if "folds" in report.summary:
        tables["Folds (percent)"] = fold_rows(report.summary)
    return pictures, tables | {"Classes (percent)": _class_rows(rows)}


def _tables(summary: dict, per_class: list[dict]) -> Tables:
    labels, rules = summary["rule_labels"], summary["rules"]
    first = labels[summary["default_rule"]]
    tables = {
        "Metrics (percent, with 95 % intervals)": [_rule_row(rule, summary) for rule in rules],
        f"Precision, F1 and rankings of each class against the rest (percent; {first})": _group_rows(summary),
    }
    if "folds" in summary:
        tables = {f"Folds (percent; {first})": fold_rows(summary)} | tables
    if "under_prior" in summary:
        under = summary["under_prior"]
        rows = [{"rule": labels[rule], "accuracy": format_percent(value)} for rule, value in under["accuracy"].items()]
        rows = rows or [{"accuracy": "no class has test images"}]
        tables[f"Accuracy under the {under['prior']} (percent)"] = rows
    if "shifted" in summary:
        tables["Shifted test sets (accuracy in percent)"] = shift_rows(summary["shifted"])
    return tables | {"Classes (percent; the accuracy of a class is its recall)": _class_rows(per_class)}


def _class_rows(per_class: list[dict]) -> list[dict]:
    return [
        {name: format_percent(value) if name in _SHARES else value for name, value in row.items()} for row in per_class
    ]


def _rule_row(rule: str, summary: dict) -> dict:
    metrics, intervals = summary["rules"][rule], summary["intervals"][rule]
    row = {"rule": summary["rule_labels"][rule]}
    for name in ("accuracy", *GROUPS, "mean_class_accuracy", "macro_f1", "worst_class_accuracy", "ece", "mce"):
        low_high = intervals.get(name)
        words = f" ({format_percent(low_high[0])} to {format_percent(low_high[1])})" if low_high else ""
        row[name] = format_percent(metrics[name]) + words
    return row


def fold_rows(summary: dict) -> list[dict]:
    """One row per fold of a cross-validation, their mean and deviation, and all their test images taken together."""
    pooled = summary["rules"][summary["default_rule"]]
    folds = {str(number): metrics for number, metrics in enumerate(summary["folds"]["each"], 1)} | {"pooled": pooled}
    names = [name for name in FOLD_METRICS if name in pooled]
    rows = [
        {"fold": fold, "images": metrics["num_images"]} | {name: format_percent(metrics[name]) for name in names}
        for fold, metrics in folds.items()
    ]
    mean, deviation = summary["folds"]["mean"], summary["folds"]["deviation"]
    spread = {
        name: f"{format_percent(mean[name])} ± {format_percent(deviation[name])}"
        for name in names
        if mean[name] is not None
    }
    return [*rows[:-1], {"fold": "mean ± deviation"} | spread, rows[-1]]


def _group_rows(summary: dict) -> list[dict]:
    """All classes, then those of each shot group, under the default rule."""
    metrics = summary["rules"][summary["default_rule"]] | summary["rankings"]
    columns = ("precision", "recall", "F1", "AUROC", "average precision")
    names = {"all": ("macro_precision", "mean_class_accuracy", "macro_f1", "auroc", "average_precision")}
    names |= {g: (f"{g}_precision", g, f"{g}_f1", f"{g}_auroc", f"{g}_average_precision") for g in GROUPS}
    return [
        {"classes": group} | {column: format_percent(metrics[name]) for column, name in zip(columns, row, strict=True)}
        for group, row in names.items()
    ]
