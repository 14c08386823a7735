"""Write the report of one evaluation: pictures, tables and a page, in a folder of their own."""

import csv
from pathlib import Path

import numpy as np
from datasets import Dataset

from livt_hf.data.decoding import read_images
from livt_hf.data.labels import labels_of
from livt_hf.files import write_values
from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.shot_groups import GROUPS
from livt_hf.reports import files
from livt_hf.reports.classes import accuracy_by_frequency, best_and_worst, confused_classes, reliability_diagram
from livt_hf.reports.curves import accuracy_by_shift, shift_rows, training_curves
from livt_hf.reports.page import render, write_page
from livt_hf.reports.verdict import judge
from livt_hf.text import format_percent

Pictures, Tables = dict[str, list[Path]], dict[str, list[dict]]
SAMPLES = 6  # images of each of the best and worst classes
FOLD_METRICS = ("accuracy", "map", "mean_class_accuracy", "macro_f1", *GROUPS, "auroc", "ece")
_FRACTIONS = ("accuracy", "precision", "recall", "f1", "auroc", "average_precision", "confidence")


def write_report(folder: Path, report: EvaluationReport, dataset: Dataset) -> Path:
    """Write pictures, tables and the page of an evaluation into a folder, and return the page.

    Args:
        folder: where the report goes; predictions may be there already.
        report: what was measured.
        dataset: the images, in the order of the predictions.

    Returns:
        The page, `report.html`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary, multi_label = report.summary, not report.metrics
    verdict = None if multi_label else judge(report)
    pictures, tables = (_multi_label_parts if multi_label else _single_label_parts)(folder, report, dataset)
    logs = files.find_logs(Path(summary["model"]))
    if logs:
        pictures["Training"] = [training_curves(logs, folder / files.TRAINING)]
    write_values(folder / files.NUMBERS, summary | ({"classes": report.per_class} if multi_label else {}))
    if not multi_label:
        write_classes(report.per_class, folder / files.CLASSES)
    title = f"{summary['model']} on {summary['dataset']} ({summary['split']})"
    text = render("report.md", title=title, tables=tables, verdict=verdict)
    (folder / files.TEXT).write_text(text, encoding="utf-8")
    return write_page(folder, title, tables, pictures, verdict=verdict)


def write_classes(rows: list[dict], path: Path) -> None:
    """Write the table of classes, one line per class; what was not measured is empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


def _single_label_parts(folder: Path, report: EvaluationReport, dataset: Dataset) -> tuple[Pictures, Tables]:
    """Draw the pictures and build the tables of images with one label each."""
    per_class, summary, labels = report.per_class, report.summary, labels_of(dataset).values

    def samples(label: int) -> list[np.ndarray]:
        rows = np.flatnonzero(labels == label)[:SAMPLES].tolist()
        return [image.permute(1, 2, 0).numpy() for image in read_images(dataset, rows)]

    pictures = {
        "Accuracy against class frequency": [accuracy_by_frequency(per_class, folder / files.FREQUENCY)],
        "Best and worst classes": [best_and_worst(per_class, samples, folder / files.BEST_AND_WORST)],
        "Most confused classes": [confused_classes(report.confusions[:20], folder / files.CONFUSED)],
    }
    for number, (rule, metric) in enumerate(report.metrics.items()):
        title = f"Reliability: {summary['rule_labels'][rule]}"
        if any(row["images"] for row in metric.bins):  # none where all logits are NaN
            path = folder / files.RELIABILITY.format(number=number)
            pictures[title] = [reliability_diagram(metric.bins, path, title)]
    if "shifted" in summary:
        pictures["Shifted test sets"] = [accuracy_by_shift(summary["shifted"], folder / files.SHIFTS)]
    return pictures, _tables(summary, per_class)


def _multi_label_parts(folder: Path, report: EvaluationReport, _dataset: Dataset) -> tuple[Pictures, Tables]:
    """Draw the pictures and build the tables of images with several labels, each a binary question of its own."""
    metrics, rows, pictures = report.summary["rules"][report.summary["default_rule"]], report.per_class, {}
    if metrics["map"] is not None:
        picture = accuracy_by_frequency(rows, folder / files.FREQUENCY, measure="average_precision")
        pictures["Average precision against class frequency"] = [picture]
    means = {"mean average precision": "map"} | {group: group for group in GROUPS} | {"AUROC": "auroc"}
    means |= {name: f"macro_{name}" for name in ("precision", "recall", "f1") if f"macro_{name}" in metrics}
    over_classes = {column: format_percent(metrics[name]) for column, name in means.items()}
    tables = {"Mean over classes (percent; average precision by shot group)": [over_classes]}
    if "folds" in report.summary:
        tables["Folds (percent)"] = fold_rows(report.summary)
    return pictures, tables | {"Classes (percent)": _class_rows(rows)}


def _tables(summary: dict, per_class: list[dict]) -> Tables:
    """Return the tables of an evaluation by heading."""
    labels, rules = summary["rule_labels"], summary["rules"]
    default = labels[summary["default_rule"]]
    tables = {
        "Metrics (percent, with 95 % intervals)": [_rule_row(rule, summary) for rule in rules],
        f"Precision, F1 and rankings of each class against the rest (percent; {default})": _group_rows(summary),
    }
    if "folds" in summary:
        tables = {f"Folds (percent; {default})": fold_rows(summary)} | tables
    if "under_prior" in summary:
        under = summary["under_prior"]
        rows = [{"rule": labels[rule], "accuracy": format_percent(value)} for rule, value in under["accuracy"].items()]
        rows = rows or [{"accuracy": "no class has test images"}]
        tables[f"Accuracy under the {under['prior']} (percent)"] = rows
    if "shifted" in summary:
        tables["Shifted test sets (accuracy in percent)"] = shift_rows(summary["shifted"])
    return tables | {"Classes (percent; the accuracy of a class is its recall)": _class_rows(per_class)}


def _class_rows(per_class: list[dict]) -> list[dict]:
    """Return the table of classes in percent."""
    return [{n: format_percent(v) if n in _FRACTIONS else v for n, v in row.items()} for row in per_class]


def _rule_row(rule: str, summary: dict) -> dict:
    metrics, intervals = summary["rules"][rule], summary["intervals"][rule]
    row = {"rule": summary["rule_labels"][rule]}
    for name in ("accuracy", *GROUPS, "mean_class_accuracy", "macro_f1", "worst_class_accuracy", "ece", "mce"):
        low_high = intervals.get(name)
        interval = f" ({format_percent(low_high[0])} to {format_percent(low_high[1])})" if low_high else ""
        row[name] = format_percent(metrics[name]) + interval
    return row


def fold_rows(summary: dict) -> list[dict]:
    """Return a row per fold of a cross-validation, their mean and standard deviation, and all test images pooled."""
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
    return [*rows[:-1], {"fold": "mean ± std"} | spread, rows[-1]]


def _group_rows(summary: dict) -> list[dict]:
    """Return rows of all classes and of each shot group, under the default rule."""
    metrics = summary["rules"][summary["default_rule"]] | summary["rankings"]
    columns = ("precision", "recall", "F1", "AUROC", "average precision")
    names = {"all": ("macro_precision", "mean_class_accuracy", "macro_f1", "auroc", "average_precision")}
    names |= {g: (f"{g}_precision", g, f"{g}_f1", f"{g}_auroc", f"{g}_average_precision") for g in GROUPS}
    return [
        {"classes": group} | {column: format_percent(metrics[name]) for column, name in zip(columns, row, strict=True)}
        for group, row in names.items()
    ]
