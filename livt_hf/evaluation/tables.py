"""Predictions of single images as a file: parquet, or CSV for a spreadsheet."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from livt_hf.data.labels import class_feature, image_paths, labels_of
from livt_hf.errors import LiVTError
from livt_hf.evaluation.exam import Answers
from livt_hf.evaluation.rules import label_thresholds
from livt_hf.evaluation.running import Outputs, Rule, scores_under

ANSWERS = "predictions.parquet"  # in every report
SEPARATOR = "|"  # between the labels of an image that has several
_TOGETHER = 1000  # images written at once
Column = tuple[str, pa.Array]
_WRITERS = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}


def check_table(path: str) -> None:
    """Refuse a file that could not be written at the end of an evaluation."""
    if Path(path).suffix not in _WRITERS:
        raise LiVTError(f"{path} is neither a .parquet nor a .csv file; give the table of predictions such a name.")
    if Path(path).exists():
        raise LiVTError(f"{path} exists; give the table of predictions another name.")
    if not Path(path).absolute().parent.is_dir():
        raise LiVTError(f"the folder of {path} does not exist; make it first.")


class PredictionTable(AbstractContextManager):
    """One row per image, written block by block.

    For every rule there is the predicted class, its score, and the scores of all classes: one list per image in
    parquet, one column per class in CSV. Where images may have several labels, there are those whose score reaches
    their threshold (C,) instead of one class. A score that is missing, of an image that cannot be read, is empty.
    Columns whose names would be the same are numbered: ImageNet has two classes called crane.
    """

    def __init__(self, path: str, classes: list[str], thresholds: Tensor | None = None):
        check_table(path)
        self.path, self.classes, self.thresholds, self._writer = Path(path), classes, thresholds, None
        self._waiting: list[tuple[dict[str, list], dict[str, Tensor]]] = []
        self._rows = 0

    def __exit__(self, *_) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def write(self, facts: dict[str, list], scores: dict[str, Tensor]) -> None:
        """What is known about some images, by column, with their (B, C) scores under each rule."""
        self._waiting.append((facts, {rule: rows.cpu().float() for rule, rows in scores.items()}))
        self._rows += len(next(iter(scores.values())))
        if self._rows >= _TOGETHER:
            self._flush()

    def _flush(self) -> None:
        """Write what waits; in one piece, for every column of every piece has a price."""
        if not self._waiting:
            return
        facts, scores = zip(*self._waiting, strict=True)
        columns = _fact_columns({name: [*itertools.chain(*(part[name] for part in facts))] for name in facts[0]})
        for rule in scores[0]:
            rows = torch.cat([part[rule] for part in scores])
            columns += self._best(rule, rows) if self.thresholds is None else self._given(rule, rows)
            columns += self._all_scores(rule, rows)
        names, arrays = zip(*columns, strict=True)
        table = pa.table(arrays, _numbered(names))
        if self._writer is None:
            self._writer = _WRITERS[self.path.suffix](self.path, table.schema)
        self._writer.write_table(table)
        self._waiting, self._rows = [], 0

    def _best(self, rule: str, rows: Tensor) -> list[Column]:
        best = rows.max(-1)  # NaN, where a score is
        labels = best.indices.masked_fill(best.values.isnan(), -1)
        return _answer_columns(rule, Answers(labels, best.values), self.classes)

    def _given(self, rule: str, rows: Tensor) -> list[Column]:
        """Labels as a list in parquet, in one cell of a CSV."""
        given = [
            None if row.isnan().any() else [self.classes[i] for i in (row >= self.thresholds).nonzero()[:, 0].tolist()]
            for row in rows
        ]
        if self.path.suffix == ".csv":
            given = [None if labels is None else SEPARATOR.join(labels) for labels in given]
        kind = pa.string() if self.path.suffix == ".csv" else pa.list_(pa.string())
        return [(f"labels ({rule})", pa.array(given, kind))]

    def _all_scores(self, rule: str, rows: Tensor) -> list[Column]:
        if self.path.suffix == ".csv":
            return [(f"{name} ({rule})", _numbers(rows[:, label])) for label, name in enumerate(self.classes)]
        lists = pa.FixedSizeListArray.from_arrays(_numbers(rows.reshape(-1)), len(self.classes))
        return [(f"scores ({rule})", lists)]


def _numbered(names: Sequence[str]) -> list[str]:
    """The names, each that stood before with a number that makes it another one."""
    taken, result = set(names), {}
    for name in names:
        if name in result:
            name = next(word for n in itertools.count(2) if (word := f"{name} {n}") not in taken | result.keys())
        result[name] = None
    return list(result)


def write_answers(
    path: Path, index: Tensor, facts: dict[str, list], answers: dict[str, Answers], classes: list[str]
) -> None:
    """The predicted class and its score under every rule, without the scores of the other classes.

    `index` says which row of the dataset an image is.
    """
    columns = [("index", pa.array(index.numpy())), *_fact_columns(facts)]
    for rule, answer in answers.items():
        columns += _answer_columns(rule, answer, classes)
    pyarrow.parquet.write_table(pa.table(dict(columns)), path)


def _fact_columns(facts: dict[str, list]) -> list[Column]:
    return [(name, pa.array(values, pa.string())) for name, values in facts.items()]


def _answer_columns(rule: str, answer: Answers, classes: list[str]) -> list[Column]:
    names = [None if label < 0 else classes[label] for label in answer.labels.tolist()]
    return [(f"prediction ({rule})", pa.array(names, pa.string())), (f"score ({rule})", _numbers(answer.scores))]


def _numbers(values: Tensor) -> pa.Array:
    """What is not a number is empty."""
    return pa.array(values.numpy(), from_pandas=True)


def write_predictions(
    path: str | Path, model: PreTrainedModel, outputs: Outputs, rules: dict[str, Rule], dataset: Dataset, split: str
) -> None:
    """What each rule says of each image of a split."""
    facts = image_facts(dataset, split)
    with PredictionTable(str(path), class_feature(dataset).names, label_thresholds(model)) as table:
        for logits, batch in outputs.batches():
            scores = {name: scores_under(rule, logits) for name, rule in rules.items()}
            table.write(facts_of(facts, batch["index"]), scores)


def image_facts(dataset: Dataset, split: str) -> dict[str, np.ndarray]:
    """What a table says of the images besides their scores; several labels of an image stand in one cell."""
    labels, names = labels_of(dataset), np.array(class_feature(dataset).names, dtype=object)
    texts = names[labels.values]
    if labels.offsets is not None:
        texts = [SEPARATOR.join(part) for part in np.split(texts, labels.offsets[1:-1])]
    facts = {"file": image_paths(dataset).to_pylist(), "label": texts, "split": [split] * len(dataset)}
    if "group" in dataset.column_names:
        facts["group"] = labels_of(dataset, "group").values
    return {name: np.array(values, dtype=object) for name, values in facts.items()}


def facts_of(facts: dict[str, np.ndarray], index: Tensor) -> dict[str, list]:
    """Those of some images."""
    return {name: values[index].tolist() for name, values in facts.items()}
