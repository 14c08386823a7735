"""The report of one evaluation: pictures, tables and a page, in a folder of their own."""

import itertools
import json
from pathlib import Path

import numpy as np
from datasets import Dataset

from livt_hf.data.labels import class_feature, labels_of
from livt_hf.data.loading import StoredImages
from livt_hf.errors import LiVTError
from livt_hf.metrics import ConfusionPairs, LongTailMetrics
from livt_hf.reports import (
    accuracy_by_frequency,
    best_and_worst,
    best_and_worst_classes,
    confused_classes,
    html_report,
    markdown_table,
    reliability_diagram,
    training_curves,
)
from livt_hf.reports.comparison import CLASSES, write_classes
from livt_hf.reports.verdict import Measured, first_screen, first_screen_text
from livt_hf.results import percent
from livt_hf.runs import LOG
from livt_hf.settings import EvalSettings

SAMPLES = 6
# The files of a report that show numbers and no image of the dataset: they may be published without asking.
NUMBERS = ("evaluation.json", "report.md", "frequency.png", "confused.png", "reliability-*.png", "training.png")


def choose_folder(settings: EvalSettings) -> Path:
    """Where the report goes: the folder asked for, if there is none yet, or report, report-2, ... beside the model."""
    if settings.report is not None:
        if Path(settings.report).exists():
            raise LiVTError(f"the report folder {settings.report} exists; pass another --report.")
        return Path(settings.report)
    folder = Path(settings.model, "report") if Path(settings.model).is_dir() else Path("report")
    folder = Path("comparison") if settings.compare else folder
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    return next(path for path in itertools.chain([folder], numbered) if not path.exists())


def write_report(
    folder: Path,
    settings: EvalSettings,
    summary: dict,
    measured: dict[str, LongTailMetrics],
    pairs: ConfusionPairs,
    dataset: Dataset,
) -> None:
    folder.mkdir(parents=True)
    names = class_feature(dataset).names
    first = next(iter(measured.values()))
    per_class = first.per_class(names)
    pictures = {
        "Accuracy against class frequency": accuracy_by_frequency(per_class, folder / "frequency.png"),
        "Best and worst classes": best_and_worst(per_class, _samples(dataset, per_class), folder / "classes.png"),
    }
    confused = pairs.top(20, names)
    if confused:
        pictures["Most confused classes"] = confused_classes(confused, folder / "confused.png")
    for number, (rule, metric) in enumerate(measured.items()):
        title = f"Reliability: {rule}"
        if any(row["images"] for row in metric.bins):  # none where all logits are NaN
            pictures[title] = reliability_diagram(metric.bins, folder / f"reliability-{number}.png", title)
    log = Path(settings.model) / LOG
    if log.exists():
        pictures["Training"] = training_curves({Path(settings.model).name: log}, folder / "training.png")
    tables = {
        "Metrics (percent)": _rule_rows(summary["rules"], measured),
        "Classes (accuracy and confidence in percent)": [
            row | {name: percent(row[name]) for name in ("accuracy", "confidence")} for row in per_class
        ],
    }
    write_classes(per_class, folder / CLASSES)
    (folder / "evaluation.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = f"{settings.model} on {settings.dataset} ({settings.split})"
    known = Measured(measured, pairs, names)
    text = [
        f"# {title}",
        first_screen_text(known),
        *(f"## {name}\n\n{markdown_table(rows)}" for name, rows in tables.items()),
    ]
    (folder / "report.md").write_text("\n\n".join(text) + "\n")
    html_report(folder, title, tables, pictures, first_screen(known))


def _rule_rows(rules: dict[str, dict], measured: dict[str, LongTailMetrics]) -> list[dict]:
    shown = ("accuracy", "many", "medium", "few", "mean_class_accuracy", "worst_class_accuracy", "ece", "mce")
    rows = []
    for rule, metrics in rules.items():
        low, high = measured[rule].intervals()["accuracy"]
        interval = {"accuracy, 95 %": f"{percent(low)} to {percent(high)}"}
        rows.append({"rule": rule} | {name: percent(metrics[name]) for name in shown} | interval)
    return rows


def _samples(dataset: Dataset, per_class: list[dict]) -> dict[int, list[np.ndarray]]:
    """A few test images of each class that the report shows."""
    labels, stored = labels_of(dataset).values, StoredImages(dataset)
    chosen = {
        label: np.flatnonzero(labels == label)[:SAMPLES].tolist()
        for ids in best_and_worst_classes(per_class)
        for label in ids
    }
    return {label: [image.permute(1, 2, 0).numpy() for image in stored.images(rows)] for label, rows in chosen.items()}
