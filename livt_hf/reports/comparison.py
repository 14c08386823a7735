"""Two reports side by side: what the second model gains and loses against the first, by group and by class."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from livt_hf.errors import LiVTError
from livt_hf.files import read_record
from livt_hf.predictions.decide import decide
from livt_hf.predictions.evaluate import upgrade_summary
from livt_hf.predictions.record import FOLDER, Predictions
from livt_hf.predictions.shot_groups import THRESHOLDS
from livt_hf.reports.page import html_report
from livt_hf.runs import Run
from livt_hf.text import format_error, format_percent, shell_line

NUMBERS, CLASSES = "evaluation.json", "classes.csv"
METRICS = ("accuracy", "many", "medium", "few", "mean_class_accuracy", "worst_class_accuracy", "ece")
PICTURES = {"Accuracy against class frequency": "frequency.png", "Reliability": "reliability-0.png"}
PICTURES |= {"Most confused classes": "confused.png", "Training": "training.png"}
LISTED = 20  # classes that differ most


@dataclass(frozen=True)
class Report:
    """What `livt eval` left in a folder."""

    name: str
    folder: Path
    summary: dict
    classes: list[dict]

    @classmethod
    def of(cls, place: str) -> "Report":
        """The report in a folder, or the newest one in the folder of a run."""
        again, own = shell_line([place]), Path(place, NUMBERS)
        folder = next(iter([own] * own.is_file() + Run(Path(place)).reports(NUMBERS)), own).parent
        if not (folder / NUMBERS).is_file() or not (folder / CLASSES).is_file():
            raise LiVTError(f"{place} has no report of a classifier to compare; write one: livt eval {again}")
        hints = {"dataset": str, "split": str, "rules": dict[str, dict[str, float | None]]}
        summary = upgrade_summary(read_record(folder / NUMBERS, hints))
        rules = summary.get("rules", {}).values()
        if not hints.keys() <= summary.keys() or not rules or not all(map(_comparable, rules)):
            raise LiVTError(
                f"{folder / NUMBERS} has no accuracies to compare; write the report again: livt eval {again}"
            )
        return cls(place, folder, {"thresholds": THRESHOLDS} | summary, _read_classes(folder / CLASSES))

    @property
    def metrics(self) -> dict:
        """Under the rule that the model is judged by."""
        return self.summary["rules"][self.summary["default_rule"]]


def _comparable(metrics: dict) -> bool:
    """Whether a rule was measured on images, in fractions."""
    known = {*METRICS, "num_images"} <= metrics.keys() and None not in (metrics["accuracy"], metrics["num_images"])
    return known and 0 <= metrics["accuracy"] <= 1 <= metrics["num_images"] < math.inf


def _read_classes(path: Path) -> list[dict]:
    """What is compared of the table that `write_classes` wrote; the accuracy of a class without images is None."""
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


def write_classes(rows: list[dict], path: Path) -> None:
    """The table of classes, one line per class; what was not measured is empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


def compare(first: str, second: str, folder: Path) -> tuple[str, Path]:
    """Write the page of a comparison into a new folder. Returns its first sentence and the page."""
    one, other = Report.of(first), Report.of(second)
    for name in ("dataset", "split", "thresholds"):
        if one.summary[name] != other.summary[name]:
            raise LiVTError(
                f"the reports are not of the same {name} ({one.summary[name]} and {other.summary[name]}); measure "
                "both models on the same images, with the same --many_above and --few_below."
            )
    if [row["name"] for row in one.classes] != [row["name"] for row in other.classes]:
        raise LiVTError(f"{first} and {second} have other classes; only models of the same classes can be compared.")
    folder.mkdir(parents=True)
    tables = {
        "Metrics (percent)": _metric_rows(one, other),
        "All rules (percent)": [row for report in (one, other) for row in _rule_rows(report)],
        f"The {LISTED} classes that differ most (accuracy in percent)": _class_rows(one, other),
    }
    files = {caption: [report.folder / name for report in (one, other)] for caption, name in PICTURES.items()}
    pictures = {caption: paths for caption, paths in files.items() if all(path.is_file() for path in paths)}
    title = f"{first} and {second} on {one.summary['dataset']} ({one.summary['split']})"
    sentence = difference(one.metrics, other.metrics, _paired_noise(one, other))
    return sentence, html_report(folder, title, tables, pictures, f'<p class="lead">{sentence}</p>')


def difference(first: dict, second: dict, noise: float | None = None) -> str:
    """Which of two accuracies is higher, and whether the number of test images can tell.

    `noise` is what chance makes of two models on the same images. Where nobody knows what both are right about, it is
    that of models that err independently; those that err alike are told apart by less.
    """
    a, b, if_so = first["accuracy"], second["accuracy"], ""
    if noise is None:
        noise = 1.96 * math.sqrt(a * (1 - a) / first["num_images"] + b * (1 - b) / second["num_images"])
        if_so = " if they err independently"
    words = f"The first is right for {format_percent(a)} % of the test images, the second for {format_percent(b)} %:"
    if abs(b - a) <= noise:
        return f"{words} no more apart than chance could make them{if_so} ({format_percent(noise)} points)."
    better = "second" if b > a else "first"
    return f"{words} the {better} is better, by more than chance could make{if_so} ({format_percent(noise)} points)."


def _paired_noise(one: Report, other: Report) -> float | None:
    """How far apart chance brings two models on the same images, with 95 % confidence, by those that one has right.

    None where a report has no predictions, or they are of other images.
    """
    folders = [report.folder / FOLDER for report in (one, other)]
    if not all(folder.is_dir() for folder in folders):
        return None
    first, second = map(Predictions.load, folders)
    if not len(first) or not np.array_equal(first.labels, second.labels):
        return None
    right = [(decide(part).labels.numpy() == part.labels).astype(int) for part in (first, second)]
    gains, images = right[1] - right[0], len(first)
    return 1.96 * math.sqrt(abs(gains).sum() - gains.sum() ** 2 / images) / images


def _metric_rows(one: Report, other: Report) -> list[dict]:
    return [{"metric": name} | _compared(one.metrics[name], other.metrics[name]) for name in METRICS]


def _rule_rows(report: Report) -> list[dict]:
    return [
        {"model": report.name, "rule": report.summary["rule_labels"][rule]}
        | {name: format_percent(metrics[name]) for name in METRICS}
        for rule, metrics in report.summary["rules"].items()
    ]


def _class_rows(one: Report, other: Report) -> list[dict]:
    both = zip(one.classes, other.classes, strict=True)
    pairs = [(a, b) for a, b in both if a["accuracy"] is not None and b["accuracy"] is not None]
    pairs.sort(key=lambda pair: -abs(pair[1]["accuracy"] - pair[0]["accuracy"]))
    return [
        {"class": a["name"], "training images": a["count"], "test images": a["images"]}
        | _compared(a["accuracy"], b["accuracy"])
        for a, b in pairs[:LISTED]
    ]


def _compared(first: float | None, second: float | None) -> dict:
    difference = "-" if first is None or second is None else f"{100 * (second - first):+.1f}"
    return {"first": format_percent(first), "second": format_percent(second), "difference": difference}
