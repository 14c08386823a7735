"""Compare two reports: what the second model gains and loses against the first, by group and by class."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from livt_hf.errors import LiVTError
from livt_hf.files import read_record
from livt_hf.predictions.decisions import decide
from livt_hf.predictions.evaluate import upgrade_summary
from livt_hf.predictions.metrics import THRESHOLDS
from livt_hf.predictions.record import FOLDER, read_groups, read_parts
from livt_hf.predictions.significance import LEVEL, paired_p_value, sum_by_group
from livt_hf.reports import files
from livt_hf.reports.page import write_page
from livt_hf.text import format_error, format_percent, shell_line

METRICS = ("accuracy", "many", "medium", "few", "mean_class_accuracy", "worst_class_accuracy", "ece")
PICTURES = {"Accuracy against class frequency": files.FREQUENCY, "Reliability": files.RELIABILITY.format(number=0)}
PICTURES |= {"Most confused classes": files.CONFUSED, "Training": files.TRAINING}
MAX_CLASSES = 20  # listed: those that differ most


@dataclass(frozen=True)
class SavedReport:
    """A report of `livt eval` on disk."""

    name: str
    folder: Path
    summary: dict
    classes: list[dict]

    @classmethod
    def load(cls, path: str) -> "SavedReport":
        """Load the report in a folder, or the newest one of a run."""
        command, own = f"livt eval {shell_line([path])}", Path(path, files.NUMBERS)
        found = [own] if own.is_file() else files.find_reports(Path(path), files.NUMBERS)
        folder = found[0].parent if found else Path(path)
        if not found or not (folder / files.CLASSES).is_file():
            raise LiVTError(f"{path} has no report of a classifier to compare; write one: {command}", "compare")
        hints = {"dataset": str, "split": str, "rules": dict[str, dict[str, float | None]]}
        summary = upgrade_summary(read_record(folder / files.NUMBERS, hints))
        rules = summary.get("rules", {}).values()
        if not hints.keys() <= summary.keys() or not rules or not all(map(_is_comparable, rules)):
            raise LiVTError(
                f"{folder / files.NUMBERS} has no accuracies to compare; write the report again: {command}"
            )
        return cls(path, folder, {"thresholds": THRESHOLDS} | summary, _read_classes(folder / files.CLASSES))

    @property
    def metrics(self) -> dict:
        """Return the metrics of the default rule."""
        return self.summary["rules"][self.summary["default_rule"]]


def _is_comparable(metrics: dict) -> bool:
    """Return True if a rule was measured on images, in fractions."""
    known = {*METRICS, "num_images"} <= metrics.keys() and None not in (metrics["accuracy"], metrics["num_images"])
    return known and 0 <= metrics["accuracy"] <= 1 <= metrics["num_images"] < math.inf


def _read_classes(path: Path) -> list[dict]:
    """Read the table of classes; the accuracy of a class without test images is None."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                {"name": row["name"], "count": int(row["count"]), "images": int(row["images"])}
                | {"accuracy": float(row["accuracy"]) if row["accuracy"] else None}
                for row in csv.DictReader(file)
            ]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise LiVTError(
            f"{path} is damaged ({format_error(error)}); write the report again with livt eval."
        ) from error


def compare(first: str, second: str, folder: Path) -> tuple[str, Path]:
    """Write the page of a comparison into a new folder.

    Args:
        first: folder of a run or a report.
        second: the same, of another model on the same images.
        folder: where the page goes.

    Returns:
        The conclusion in one sentence, and the page.
    """
    one, other = SavedReport.load(first), SavedReport.load(second)
    for name in ("dataset", "split", "thresholds"):
        if one.summary[name] != other.summary[name]:
            raise LiVTError(
                f"the reports are not of the same {name} ({one.summary[name]} and {other.summary[name]}); measure "
                "both models on the same images, with the same --many_above and --few_below.",
                "compare",
            )
    if [row["name"] for row in one.classes] != [row["name"] for row in other.classes]:
        raise LiVTError(f"{first} and {second} have different classes and cannot be compared.", "compare")
    folder.mkdir(parents=True)
    tables = {
        "Metrics (percent)": [
            {"metric": name} | _compare_numbers(one.metrics[name], other.metrics[name]) for name in METRICS
        ],
        "All decision rules (percent)": [row for report in (one, other) for row in _rule_rows(report)],
        f"The {MAX_CLASSES} classes that differ most (accuracy in percent)": _class_rows(one, other),
    }
    paths = {caption: [report.folder / name for report in (one, other)] for caption, name in PICTURES.items()}
    pictures = {caption: both for caption, both in paths.items() if all(path.is_file() for path in both)}
    title = f"{first} and {second} on {one.summary['dataset']} ({one.summary['split']})"
    conclusion = describe_difference(one.metrics, other.metrics, *_compare_images(one, other))
    return conclusion, write_page(folder, title=title, tables=tables, pictures=pictures, lead=conclusion)


def describe_difference(first: dict, second: dict, margin: float | None = None, p_value: float = 0.0) -> str:
    """Return which of two accuracies is higher, and whether the number of test images suffices to tell.

    Args:
        first: `accuracy` and `num_images` of a model.
        second: the same of another model.
        margin: 95 % margin of the difference between models on the same images; default: that of independent errors,
            which is wider.
        p_value: of a paired test, which a few images that all differ in one direction do not pass.
    """
    a, b, assumption = first["accuracy"], second["accuracy"], ""
    if margin is None:
        margin = 1.96 * math.sqrt(a * (1 - a) / first["num_images"] + b * (1 - b) / second["num_images"])
        assumption = " if their errors are independent"
    text = f"Accuracy {format_percent(a)} % (first) and {format_percent(b)} % (second):"
    bound = f"95 % margin{assumption}: {format_percent(margin)} points"
    if abs(b - a) > margin and p_value > LEVEL:
        bound = f"paired test, p = {p_value:.2f}"
    if abs(b - a) <= margin or p_value > LEVEL:
        return f"{text} the difference is not significant ({bound})."
    return f"{text} the {'second' if b > a else 'first'} is significantly better ({bound})."


def _compare_images(one: SavedReport, other: SavedReport) -> tuple[float, float] | tuple[()]:
    """Return 95 % margin and p-value of the difference between two models, by the images that only one has right.

    Images of one group (patient, site) count together. Empty where a report has no predictions, or they are of other
    images.
    """
    folders = [report.folder / FOLDER for report in (one, other)]
    if not all(folder.is_dir() for folder in folders):
        return ()
    labels, others = (np.concatenate([part.labels for part in read_parts(folder)]) for folder in folders)
    if not len(labels) or not np.array_equal(labels, others):
        return ()
    before, after = (decide(folder).labels.numpy() == labels for folder in folders)
    gains, groups = after.astype(float) - before, read_groups(folders[0])
    units = sum_by_group(gains - gains.mean(), groups)
    return 1.96 * math.sqrt((units**2).sum()) / len(labels), paired_p_value(gains, groups)


def _rule_rows(report: SavedReport) -> list[dict]:
    """Return a row per decision rule of a report."""
    return [
        {"model": report.name, "rule": report.summary["rule_labels"][rule]}
        | {name: format_percent(metrics[name]) for name in METRICS}
        for rule, metrics in report.summary["rules"].items()
    ]


def _class_rows(one: SavedReport, other: SavedReport) -> list[dict]:
    both = zip(one.classes, other.classes, strict=True)
    pairs = [(a, b) for a, b in both if a["accuracy"] is not None and b["accuracy"] is not None]
    pairs.sort(key=lambda pair: -abs(pair[1]["accuracy"] - pair[0]["accuracy"]))
    return [
        {"class": a["name"], "training images": a["count"], "test images": a["images"]}
        | _compare_numbers(a["accuracy"], b["accuracy"])
        for a, b in pairs[:MAX_CLASSES]
    ]


def _compare_numbers(first: float | None, second: float | None) -> dict:
    difference = "-" if first is None or second is None else f"{100 * (second - first):+.1f}"
    return {"first": format_percent(first), "second": format_percent(second), "difference": difference}
