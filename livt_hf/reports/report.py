"""Write the report of one evaluation: pictures, tables and a page, in a folder of their own."""

import contextlib
import csv
import datetime
import functools
import io
from pathlib import Path

import numpy as np
from datasets import Dataset
from PIL import Image

from livt_hf.data.decoding import read_images
from livt_hf.data.labels import labels_of
from livt_hf.errors import LiVTError
from livt_hf.files import write_values
from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.metrics import GROUPS
from livt_hf.predictions.rules import describe_objective
from livt_hf.predictions.significance import wilson_interval
from livt_hf.reports import files
from livt_hf.reports.classes import (
    accuracy_by_frequency,
    best_and_worst,
    best_and_worst_classes,
    confused_classes,
    reliability_diagram,
)
from livt_hf.reports.curves import accuracy_by_shift, shift_rows, trade_off, training_curves
from livt_hf.reports.page import data_url, render, write_page
from livt_hf.reports.verdict import count_correct, judge
from livt_hf.results import Results
from livt_hf.runs import Run
from livt_hf.text import format_percent, shell_line

Figures, Tables = list[tuple[str, Path, str]], dict[str, list[dict]]  # figures: caption, file, note
SAMPLES = 6  # images of each of the best and worst classes
SHOWN_CONFUSIONS = 12
FOLD_METRICS = ("accuracy", "map", "mean_class_accuracy", "macro_f1", *GROUPS, "auroc", "ece")
_FRACTIONS = ("accuracy", "precision", "recall", "f1", "auroc", "average_precision", "confidence")
_ON_WIDE_SCREENS = ("F1", "AUROC", "95 % interval", "train")


def write_report(folder: Path, report: EvaluationReport, dataset: Dataset | None) -> Path:
    """Write pictures, tables and the page of an evaluation into a folder, and return the page.

    Args:
        folder: where the report goes; predictions may be there already.
        report: what was measured.
        dataset: the images, in the order of the predictions; None leaves out their pictures.

    Returns:
        The page, `report.html`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary, multi_label = report.summary | {"date": datetime.date.today().isoformat()}, not report.metrics
    run = Run(Path(summary["model"]))
    results = None
    with contextlib.suppress(LiVTError):  # title and command need them, and nothing else
        results = run.results if run.finished else None
    if results is not None and "folds" not in summary:
        summary.setdefault("command", shell_line(["livt", "eval", summary["model"]]))
    if multi_label:
        verdict, context = None, {"confusions": [], "examples": []}
        figures, tables, classes = _multi_label_parts(folder, report)
    else:
        verdict, bounds = judge(report), wilson_interval(*count_correct(report, report.per_class))
        figures, tables = _single_label_figures(folder, report, bounds), _tables(summary)
        classes = _rows_by_need(report.per_class, bounds, {row["class"] for row in verdict.weak})
        examples = [] if dataset is None else _draw_examples(folder, report, dataset)
        context = {"examples": examples, "confusions": _shown_confusions(report)}
    if logs := files.find_logs(run.folder):
        path = training_curves(logs, folder / files.TRAINING, columns=1)
        figures.append(("Training", path, "Loss, learning rate and accuracy, on the images that each panel names."))
    write_values(folder / files.NUMBERS, summary | ({"classes": report.per_class} if multi_label else {}))
    if not multi_label:
        write_classes(report.per_class, folder / files.CLASSES)
    title = f"{Path(summary['dataset']).name}: {_name_model(summary['model'], results)}"
    listed = tables | {"Classes (percent; the accuracy of a class is its recall)": _class_rows(report.per_class)}
    text = render("report.md", title=title, tables=listed, verdict=verdict)
    (folder / files.TEXT).write_text(text, encoding="utf-8")
    context |= {"title": title, "verdict": verdict, "figures": figures, "tables": tables, "classes": classes}
    context |= {"facts": _list_facts(summary, report.per_class), "command": summary.get("command")}
    context |= {"grouped": report.groups is not None, "more_columns": _ON_WIDE_SCREENS}
    context["class_columns"] = [name for name in classes[0] if name not in ("name", "group", "is_weak")]
    return write_page(folder, "report.html", **context)


def _name_model(model: str, results: Results | None) -> str:
    """Return the name of a model without the folder that it is in: of a run its architecture and loss."""
    if results is not None and results.model_size:
        return f"{results.model_size}, {results.loss}"
    path = Path(model)
    return "/".join(path.parts[-2:]) if path.is_absolute() or path.is_dir() else model


def _list_facts(summary: dict, rows: list[dict]) -> list[str]:
    """Return the provenance line: version, date, and what was measured."""
    counts, tested = [row["count"] for row in rows], [row for row in rows if row["images"]]
    images = summary["rules"][summary["default_rule"]]["num_images"]
    facts = [f"livt-hf {summary['versions']['livt-hf']}"] if "versions" in summary else []
    facts += [summary["date"], f"split: {summary['split']}, {images:,} images of {len(tested):,} classes"]
    return [*facts, f"training: {sum(counts):,} images, {min(counts):,} to {max(counts):,} per class"]


def write_classes(rows: list[dict], path: Path) -> None:
    """Write the table of classes, one line per class; what was not measured is empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


def _single_label_figures(folder: Path, report: EvaluationReport, bounds: np.ndarray) -> Figures:
    """Draw the figures of images with one label each; `bounds` are the 95 % intervals of the classes."""
    summary = report.summary
    path = accuracy_by_frequency(report.per_class, folder / files.FREQUENCY, intervals=bounds)
    note = "Lines: 95 % intervals. Dashed: mean of the group."
    figures = [("Accuracy of each class against its training images", path, note)]
    if "trade_off" in summary:
        chosen = summary["trade_off"]
        curve, exponent = chosen.get("curve") or (), chosen.get("exponent")
        path = trade_off(folder / files.TRADE_OFF, curve, exponent, chosen["test"])
        note = "Decisions under the prior pi^t: t = 0 is the uniform prior, t = 1 the training prior."
        if exponent is not None:
            note += f" t = {exponent:g} was chosen for {describe_objective(chosen['objective'])} on training images."
        figures.append(("Accuracy against mean class accuracy", path, f"{note} Test images are a check only."))
    confused_classes(report.confusions[:20], folder / files.CONFUSED)
    for number, (rule, metric) in enumerate(report.metrics.items()):
        if any(row["images"] for row in metric.bins):  # none where all logits are NaN
            path = reliability_diagram(metric.bins, folder / files.RELIABILITY.format(number=number))
            if rule == summary["default_rule"]:
                figures.append(("Calibration", path, f"Decision rule: {report.default_label}."))
    if "shifted" in summary:
        path = accuracy_by_shift(summary["shifted"], folder / files.SHIFTS)
        figures.append(("Shifted test sets", path, "Subsets of the test images with other class frequencies."))
    return figures


def _draw_examples(folder: Path, report: EvaluationReport, dataset: Dataset) -> list[list[dict]]:
    """Draw images of the most and least accurate classes, and return their rows with thumbnails for the page."""
    labels = labels_of(dataset).values

    @functools.cache
    def samples(label: int) -> list[np.ndarray]:
        rows = np.flatnonzero(labels == label)[:SAMPLES].tolist()
        return [image.permute(1, 2, 0).numpy() for image in read_images(dataset, rows)]

    best_and_worst(report.per_class, samples, folder / files.BEST_AND_WORST)
    by_id = {row["class"]: row for row in report.per_class}
    return [
        [by_id[label] | {"thumbnails": [_thumbnail(image) for image in samples(label)]} for label in ids]
        for ids in best_and_worst_classes(report.per_class)
        if ids
    ]


def _thumbnail(image: np.ndarray) -> str:
    """Return a small copy of an image as a data URL."""
    small, content = Image.fromarray(image), io.BytesIO()
    small.thumbnail((112, 112))
    small.save(content, "JPEG", quality=80)
    return data_url(content.getvalue(), "image/jpeg")


def _shown_confusions(report: EvaluationReport) -> list[dict]:
    images = {row["class"]: row["images"] for row in report.per_class}
    return [pair | {"total": images[pair["label"]]} for pair in report.confusions[:SHOWN_CONFUSIONS]]


def _rows_by_need(rows: list[dict], bounds: np.ndarray, weak: set[int]) -> list[dict]:
    """Return the rows of the table of classes, those first that are most surely inaccurate."""
    order = sorted(range(len(rows)), key=lambda i: (not rows[i]["images"], bounds[i, 1]))
    return [
        {
            "class": row["name"],
            "name": row["name"],
            "group": row["group"],
            "is_weak": row["class"] in weak,
            "train": f"{row['count']:,}",
            "test": f"{row['images']:,}",
            "recall": format_percent(row["accuracy"]),
            "95 % interval": f"{100 * low:.0f} to {100 * high:.0f}" if row["images"] else "-",
            "precision": format_percent(row["precision"]),
            "F1": format_percent(row["f1"]),
            "AUROC": format_percent(row["auroc"]),
        }
        for row, (low, high) in ((rows[i], bounds[i]) for i in order)
    ]


def _multi_label_parts(folder: Path, report: EvaluationReport) -> tuple[Figures, Tables, list[dict]]:
    """Draw the figures and build the tables of images with several labels, each a binary question of its own."""
    metrics, rows = report.summary["rules"][report.summary["default_rule"]], report.per_class
    figures: Figures = []
    if metrics["map"] is not None:
        path = accuracy_by_frequency(rows, folder / files.FREQUENCY, measure="average_precision")
        figures.append(
            ("Average precision of each class against its training images", path, "Dashed: mean of the group.")
        )
    means = {"mean average precision": "map"} | {group: group for group in GROUPS} | {"AUROC": "auroc"}
    means |= {name: f"macro_{name}" for name in ("precision", "recall", "f1") if f"macro_{name}" in metrics}
    over_classes = {column: format_percent(metrics[name]) for column, name in means.items()}
    tables = {"Mean over classes (percent; average precision by shot group)": [over_classes]}
    if "folds" in report.summary:
        tables["Folds (percent)"] = fold_rows(report.summary)
    kept = [{"class" if n == "name" else n: v for n, v in row.items() if n != "class"} for row in _class_rows(rows)]
    return figures, tables, [row | {"name": row["class"], "is_weak": False} for row in kept]


def _tables(summary: dict) -> Tables:
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
    return tables


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
    pooled, folds = summary["rules"][summary["default_rule"]], summary["folds"]
    names = [name for name in FOLD_METRICS if name in pooled]
    *rows, total = (
        {"fold": fold, "images": metrics["num_images"]} | {name: format_percent(metrics[name]) for name in names}
        for fold, metrics in [*((str(n), each) for n, each in enumerate(folds["each"], 1)), ("pooled", pooled)]
    )
    measured = [name for name in names if folds["mean"][name] is not None]
    spread = {n: f"{format_percent(folds['mean'][n])} ± {format_percent(folds['deviation'][n])}" for n in measured}
    return [*rows, {"fold": "mean ± std"} | spread, total]


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
