"""Where a model errs, from the predictions that `livt eval` saved: by class and image by image."""

import itertools
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from datasets import DatasetDict

from livt_hf.data.labels import labels_of
from livt_hf.data.readers.table import reading_table
from livt_hf.errors import LiVTError
from livt_hf.evaluation.tables import ANSWERS
from livt_hf.metrics import LongTailMetrics, confusions
from livt_hf.runs import Run
from livt_hf.text import shell_line

_COLUMN = re.compile(r"prediction \((?P<rule>.*)\)")
COLUMNS = ("id", "class", "training images", "test images", "accuracy (%)", "confidence (%)", "most often taken for")


def newest_predictions(folder: Path) -> Path:
    """Of the reports in a run's folder, the predictions that were saved last."""
    saved = Run(folder).reports(ANSWERS)
    if not saved:
        command = shell_line(["livt", "eval", folder])
        raise LiVTError(f"{folder} has no report with a {ANSWERS}; write one with: {command}")
    return saved[0]


@dataclass(frozen=True)
class Predictions:
    """What one decision rule said of the test images."""

    index: np.ndarray  # (N,): which image of the split
    label: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    split: str

    def belong_to(self, data: DatasetDict) -> bool:
        """Whether they are about the images of this data."""
        if self.split not in data or self.index.max(initial=-1) >= len(data[self.split]):
            return False
        return bool((labels_of(data[self.split]).values[self.index] == self.label).all())

    @property
    def right(self) -> np.ndarray:
        return self.label == self.predicted

    @cached_property
    def pairs(self) -> list[dict]:
        """Which classes are taken for which, as `confusions` gives them."""
        classes = 1 + max(self.label.max(initial=0), self.predicted.max(initial=0))
        return confusions(torch.from_numpy(self.predicted), torch.from_numpy(self.label), np.zeros(classes))

    def class_rows(self, names: list[str], counts: np.ndarray | None) -> list[list]:
        """One row per class that has test images, the least accurate first."""
        metrics = LongTailMetrics(np.zeros(len(names)) if counts is None else counts)
        metrics.update(self.predicted, self.label)
        sure, most = np.bincount(self.label, self.confidence, len(names)), {}
        for pair in self.pairs:
            most.setdefault(pair["label"], f"{names[pair['predicted']]} ({pair['images']})")
        rows = []
        for label, row in enumerate(metrics.per_class(names)):
            if images := row["images"]:
                shares = (round(100 * share, 1) for share in (row["accuracy"], sure[label].item() / images))
                count = None if counts is None else row["count"]
                rows.append([label, row["name"], count, images, *shares, most.get(label, "")])
        return sorted(rows, key=lambda row: row[4])

    def taken_for(self, label: int) -> list[tuple[int, int]]:
        """The classes that images of this one were taken for, with how many, the most frequent first."""
        return [(pair["predicted"], pair["images"]) for pair in self.pairs if pair["label"] == label]

    def wrong(self, label: int) -> np.ndarray:
        """Rows of the class's images that were taken for another, the surest mistakes first."""
        rows = np.flatnonzero((self.label == label) & ~self.right)
        return rows[np.argsort(-self.confidence[rows], kind="stable")]

    def bins(self, label: int) -> list[dict]:
        """The reliability diagram of the images of one class, as `reliability_diagram` draws it."""
        own = self.label == label
        right, sure = self.right[own], self.confidence[own]
        metrics = LongTailMetrics([1, 1], confidence="given")  # of "right", as every answer claims to be, and "wrong"
        metrics.update(np.stack([sure, np.zeros_like(sure)], axis=1), np.where(right, 0, 1))
        return metrics.bins


def read_predictions(path: Path, names: list[str]) -> dict[str, Predictions]:
    """Rule -> its predictions, from the table in a report of `livt eval`; images without a prediction are left out."""
    if not path.is_file():
        raise LiVTError(f"{path} does not exist; write a report with: livt eval MODEL")
    with reading_table(path):
        table = pq.read_table(path)
    matched = [_COLUMN.fullmatch(name) for name in table.column_names]
    rules = [match["rule"] for match in matched if match]
    if not {"index", "label", "split"} <= set(table.column_names) or not rules:
        raise LiVTError(f"{path} is no table of predictions of a report; write one with: livt eval MODEL")
    table = table.sort_by("index")  # several processes write their images one after another
    return {rule: _under(table, rule, names, path) for rule in rules}


def _under(table: pa.Table, rule: str, names: list[str], path: Path) -> Predictions:
    table = table.filter(pc.is_valid(table[f"prediction ({rule})"]))
    known = {name: label for label, name in enumerate(names)}
    found = [table[name].to_pylist() for name in ("label", f"prediction ({rule})")]
    strange = next((name for name in itertools.chain(*found) if name not in known), None)
    if strange is not None:
        raise LiVTError(f"{path} speaks of {strange!r}, which is no class of this model; evaluate this model anew.")
    label, predicted = (np.array([known[name] for name in column], dtype=np.int64) for column in found)
    split = table["split"][0].as_py() if len(table) else "test"
    return Predictions(table["index"].to_numpy(), label, predicted, table[f"score ({rule})"].to_numpy(), split)
