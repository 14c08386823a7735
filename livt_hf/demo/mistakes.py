"""Where a model errs, from the predictions that `livt eval` saved: by class and image by image."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from livt_hf.errors import LiVTError

PREDICTIONS = "predictions.parquet"
BINS = 15  # as the metrics have them
COLUMNS = ("id", "class", "training images", "test images", "accuracy (%)", "confidence (%)", "most often taken for")


def newest_predictions(folder: Path) -> Path:
    """Of the reports in a run's folder, the predictions that were saved last."""
    found = sorted(folder.glob(f"report*/{PREDICTIONS}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise LiVTError(f"{folder} has no report with a {PREDICTIONS}; write one with: livt eval --model {folder}")
    return found[-1]


@dataclass(frozen=True)
class Predictions:
    """What one decision rule said of the test images. `confidence` is None where it was not saved."""

    index: np.ndarray  # (N,): which image of the split
    label: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray | None
    split: str

    @property
    def right(self) -> np.ndarray:
        return self.label == self.predicted

    def class_rows(self, names: list[str], counts: np.ndarray | None) -> list[list]:
        """One row per class that has test images, the least accurate first."""
        rows = []
        for label in np.unique(self.label).tolist():
            own = self.label == label
            sure = None if self.confidence is None else round(100 * self.confidence[own].mean().item(), 1)
            taken = self.taken_for(label)
            count = None if counts is None else int(counts[label])
            accuracy = round(100 * self.right[own].mean().item(), 1)
            most = f"{names[taken[0][0]]} ({taken[0][1]})" if taken else ""
            rows.append([label, names[label], count, int(own.sum()), accuracy, sure, most])
        return sorted(rows, key=lambda row: row[4])

    def taken_for(self, label: int) -> list[tuple[int, int]]:
        """The classes that images of this one were taken for, with how many, the most frequent first."""
        wrong = self.predicted[(self.label == label) & ~self.right]
        classes, images = np.unique(wrong, return_counts=True)
        return sorted(zip(classes.tolist(), images.tolist(), strict=True), key=lambda pair: -pair[1])

    def wrong(self, label: int) -> np.ndarray:
        """Rows of the class's images that were taken for another, the surest mistakes first."""
        rows = np.flatnonzero((self.label == label) & ~self.right)
        return rows if self.confidence is None else rows[np.argsort(-self.confidence[rows], kind="stable")]

    def bins(self, label: int) -> list[dict]:
        """The reliability diagram of the images of one class, as `reliability_diagram` draws it."""
        own = self.label == label
        sure, right = self.confidence[own], self.right[own]
        place = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
        rows = []
        for number in range(BINS):
            inside = place == number
            row = {"low": number / BINS, "high": (number + 1) / BINS, "images": int(inside.sum())}
            means = (right[inside].mean().item(), sure[inside].mean().item()) if inside.any() else (None, None)
            rows.append(row | dict(zip(("accuracy", "confidence"), means, strict=True)))
        return rows


def read_predictions(path: Path) -> dict[str, Predictions]:
    """Rule -> its predictions. Columns that are missing are made from others where that can be done, or named."""
    table = pq.read_table(path)
    columns = {name: table.column(name) for name in table.column_names}
    if "label" not in columns:
        raise LiVTError(f"{path} has no column 'label', so nobody knows which predictions are right; write it anew.")
    label = columns["label"].to_numpy()
    index = columns["index"].to_numpy() if "index" in columns else np.arange(len(label))
    split = str(columns["split"][0]) if "split" in columns and len(label) else "test"
    scores = _scores(columns)
    rules = {}
    for name in columns:
        if name.startswith("predicted"):
            rule = name.removeprefix("predicted").strip(" :_")
            predicted = columns[name].to_numpy()
            confidence = columns.get(name.replace("predicted", "confidence", 1))
            sure = _confidence(predicted, scores) if confidence is None else confidence.to_numpy()
            rules[rule or "prediction"] = Predictions(index, label, predicted, sure, split)
    if not rules and scores is not None:
        predicted = scores.argmax(1)
        rules["largest score"] = Predictions(index, label, predicted, _confidence(predicted, scores), split)
    if not rules:
        raise LiVTError(f"{path} has neither a column 'predicted' nor 'probabilities' nor 'logits'; write it anew.")
    return rules


def _scores(columns: dict) -> np.ndarray | None:
    """Probabilities (N, C), or the softmax of the logits."""
    for name in ("probabilities", "logits"):
        if name in columns:
            flat = columns[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            scores = torch.from_numpy(flat.reshape(len(columns[name]), -1).astype(np.float32))
            return (scores if name == "probabilities" else scores.softmax(-1)).numpy()
    return None


def _confidence(predicted: np.ndarray, scores: np.ndarray | None) -> np.ndarray | None:
    return None if scores is None else scores[np.arange(len(predicted)), predicted]
