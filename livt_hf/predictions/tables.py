"""Tables of predictions for people: parquet, or CSV for a spreadsheet. Nothing of ours reads them back."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor

from livt_hf.data.labels import BOX, CORNERS
from livt_hf.errors import LiVTError
from livt_hf.files import check_writable
from livt_hf.predictions.decisions import choose_classes
from livt_hf.predictions.record import LABEL, LOGITS, MODEL, Predictions
from livt_hf.predictions.rules import DecisionRule

SEPARATOR = "|"  # between the labels of an image that has several
_ROWS = 1000  # images written at once
_WRITERS = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}
Column = tuple[str, pa.Array]


def check_output(path: str | None, others: Sequence[str] = ()) -> bool:
    """Return True for a table and False for the folder of a record, or raise an error for what cannot be written."""
    if path is None:
        return False
    if Path(path).suffix:
        check_table_path(path, "output", others)
        return True
    if Path(path).exists() and not Path(path).is_dir():
        raise LiVTError(f"{path} is no folder; name one for the record, or a .csv or .parquet file.", "output")
    check_writable(path, "output")
    return False


def check_table_path(path: str, argument: str, others: Sequence[str] = ()) -> None:
    """Raise an error for a file that could not be written at the end of an evaluation."""
    if Path(path).suffix not in (*_WRITERS, *others):
        raise LiVTError(f"{path} is neither a .parquet nor a .csv file; give the table such a name.", argument)
    if Path(path).exists():
        raise LiVTError(f"{path} exists; give the table of predictions another name.", argument)
    if not Path(path).absolute().parent.is_dir():
        raise LiVTError(f"the folder of {path} does not exist; make it first.", argument)
    check_writable(path, argument)


class TableWriter(AbstractContextManager):
    """Writes a table of predictions, one row per image, block by block.

    Columns are "file", "label", "split", "group" and others that the record has. The first rule adds "prediction",
    "score" and the scores of all classes: a list "scores" in parquet, columns "score_<class>" in CSV. Columns of
    further rules end in the name of the rule: "prediction_uniform". Where images may have several labels, "labels"
    are those whose score reaches its threshold. Scores of an image that cannot be read are empty. Columns whose names
    would be the same are numbered: ImageNet has two classes called crane.

    Args:
        path: a .parquet or .csv file.
        rules: decision rules.
        thresholds: scores (C,) from which on labels are given; by default those of the model.
    """

    def __init__(self, path: str | Path, rules: Sequence[DecisionRule], thresholds: Tensor | None = None):
        self.path, self.rules, self.thresholds = Path(path), rules, thresholds
        self.is_csv = self.path.suffix == ".csv"
        self._writer = None
        self._waiting: list[Predictions] = []

    def __exit__(self, *_) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def write(self, predictions: Predictions) -> None:
        """Add the images of a record."""
        self._waiting.append(predictions)
        if sum(map(len, self._waiting)) >= _ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        predictions, self._waiting = Predictions.concatenate(self._waiting), []
        columns = self._facts(predictions)
        for rule, suffix in zip(self.rules, ["", *(f"_{rule.name}" for rule in self.rules[1:])], strict=True):
            columns += self._decided(predictions, rule, suffix)
        names, arrays = zip(*columns, strict=True)
        table = pa.table(arrays, _unique(names))
        if self._writer is None:
            self._writer = _WRITERS[self.path.suffix](self.path, table.schema)
        self._writer.write_table(table)

    def _facts(self, predictions: Predictions) -> list[Column]:
        """Return the columns that the record has, with the names of the classes as labels."""
        table, columns = predictions.table, []
        for name in table.column_names:
            if name == LABEL:
                columns.append((name, self._class_names(predictions, table[name].to_pylist())))
            elif name == BOX and self.is_csv:
                sides = table[name].combine_chunks().flatten().to_numpy().reshape(-1, 4).T
                columns += [(column, pa.array(side)) for column, side in zip(CORNERS, sides, strict=True)]
            elif name not in (LOGITS, MODEL):
                columns.append(("file" if name == "path" else name, table[name].combine_chunks()))
        return columns

    def _class_names(self, predictions: Predictions, labels: list) -> pa.Array:
        """Return labels by name; several labels of an image as text in one cell."""
        names = predictions.class_names
        if predictions.info.multi_label:
            labels = [None if ids is None else SEPARATOR.join(names[i] for i in ids) for ids in labels]
        else:
            labels = [None if label is None or label < 0 else names[label] for label in labels]
        return pa.array(labels, pa.string())

    def _decided(self, predictions: Predictions, rule: DecisionRule, suffix: str) -> list[Column]:
        scores, (labels, best) = choose_classes(predictions, rule)
        if predictions.info.multi_label:
            columns = [(f"labels{suffix}", self._given(predictions, scores))]
        else:
            names = self._class_names(predictions, labels.tolist())
            columns = [(f"prediction{suffix}", names), (f"score{suffix}", _numbers(best))]
        if self.is_csv:
            classes = enumerate(predictions.class_names)
            return columns + [(f"score{suffix}_{name}", _numbers(scores[:, label])) for label, name in classes]
        lists = pa.FixedSizeListArray.from_arrays(_numbers(scores.reshape(-1)), scores.shape[1])
        return [*columns, (f"scores{suffix}", lists)]

    def _given(self, predictions: Predictions, scores: Tensor) -> pa.Array:
        """Return the labels that are given, as a list in parquet and in one cell of a CSV."""
        thresholds = predictions.thresholds if self.thresholds is None else self.thresholds
        chosen, missing = scores >= thresholds, scores.isnan().any(-1).tolist()
        names = predictions.class_names
        given = [
            None if empty else [names[i] for i in torch.where(row)[0].tolist()]
            for row, empty in zip(chosen, missing, strict=True)
        ]
        if self.is_csv:
            return pa.array([None if labels is None else SEPARATOR.join(labels) for labels in given], pa.string())
        return pa.array(given, pa.list_(pa.string()))


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, each that stood before with a number that makes it another one."""
    taken, result = set(names), {}
    for name in names:
        if name in result:
            name = next(other for n in itertools.count(2) if (other := f"{name} {n}") not in taken | result.keys())
        result[name] = None
    return list(result)


def _numbers(values: Tensor) -> pa.Array:
    """Return numbers, of which NaN is empty."""
    return pa.array(values.numpy(), from_pandas=True)
