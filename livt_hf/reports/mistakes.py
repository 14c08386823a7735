"""The mistakes of a model by class and by image, from a prediction record."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from datasets import DatasetDict

from livt_hf.data.labels import labels_of
from livt_hf.errors import LiVTError
from livt_hf.predictions.decisions import decide
from livt_hf.predictions.metrics import LongTailMetrics, confusions
from livt_hf.predictions.record import FOLDER, Predictions
from livt_hf.predictions.rules import DecisionRule
from livt_hf.reports.files import find_reports
from livt_hf.text import shell_line

COLUMNS = ("id", "class", "training images", "test images", "accuracy (%)", "confidence (%)", "often predicted as")


def find_newest_predictions(run: Path) -> Path:
    """Return the newest prediction record of a run: that of one of its reports, or its own."""
    found = [*find_reports(run, FOLDER), *(path for path in [run / FOLDER] if path.is_dir())]
    if not found:
        raise LiVTError(f"{run} has no {FOLDER}; write them with: {shell_line(['livt', 'eval', run])}", "report")
    return max(found, key=lambda path: path.stat().st_mtime)


@dataclass(frozen=True)
class Mistakes:
    """Decisions of one rule on the test images; images without a prediction are left out."""

    index: np.ndarray  # (N,): which image of the split
    label: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    split: str

    @classmethod
    def of(cls, predictions: Predictions, rule: DecisionRule) -> "Mistakes":
        """Decide a record with labels by a rule."""
        labels, scores = (part.numpy() for part in decide(predictions, rule))
        index, splits = np.flatnonzero(labels >= 0), predictions.column("split")
        split = "test" if splits is None or not len(splits) else splits[0]
        return cls(index, predictions.labels[index], labels[index], scores[index], split)

    def belong_to(self, data: DatasetDict) -> bool:
        """Return True if the predictions are about the images of this data."""
        if self.split not in data or self.index.max(initial=-1) >= len(data[self.split]):
            return False
        return bool((labels_of(data[self.split]).values[self.index] == self.label).all())

    @property
    def correct(self) -> np.ndarray:
        return self.label == self.predicted

    @cached_property
    def pairs(self) -> list[dict]:
        """Return pairs of confused classes, as `confusions` gives them."""
        classes = 1 + max(self.label.max(initial=0), self.predicted.max(initial=0))
        return confusions(torch.from_numpy(self.predicted), torch.from_numpy(self.label), np.zeros(classes))

    def class_rows(self, names: list[str], counts: np.ndarray | None) -> list[list]:
        """Return a row per class that has test images, the least accurate first."""
        metrics = LongTailMetrics(np.zeros(len(names)) if counts is None else counts)
        metrics.update(self.predicted, self.label)
        confidence, most = np.bincount(self.label, self.confidence, len(names)), {}
        for pair in self.pairs:
            most.setdefault(pair["label"], f"{names[pair['predicted']]} ({pair['images']})")
        rows = []
        for label, row in enumerate(metrics.per_class(names)):
            if images := row["images"]:
                shares = (round(100 * share, 1) for share in (row["accuracy"], confidence[label].item() / images))
                count = None if counts is None else row["count"]
                rows.append([label, row["name"], count, images, *shares, most.get(label, "")])
        return sorted(rows, key=lambda row: row[4])

    def predicted_as(self, label: int) -> list[tuple[int, int]]:
        """Return the classes that images of this class were predicted as, with counts, the most frequent first."""
        return [(pair["predicted"], pair["images"]) for pair in self.pairs if pair["label"] == label]

    def errors_of(self, label: int) -> np.ndarray:
        """Return the rows of a class's misclassified images, the most confident first."""
        rows = np.flatnonzero((self.label == label) & ~self.correct)
        return rows[np.argsort(-self.confidence[rows], kind="stable")]

    def bins(self, label: int) -> list[dict]:
        """Return the bins of a reliability diagram of the images of one class."""
        own = self.label == label
        correct, confidence = self.correct[own], self.confidence[own]
        metrics = LongTailMetrics([1, 1], confidence="given")  # class 0: correct, which is always predicted
        metrics.update(np.stack([confidence, np.zeros_like(confidence)], axis=1), np.where(correct, 0, 1))
        return metrics.bins


def load_predictions(path: Path, names: list[str]) -> Predictions:
    """Load the record of a report on a model with these classes."""
    predictions = Predictions.load(path)
    if predictions.class_names != names or predictions.labels is None:
        message = f"{path} is not about the classes of this model, or has no labels; evaluate this model again."
        raise LiVTError(message, "report")
    return predictions
