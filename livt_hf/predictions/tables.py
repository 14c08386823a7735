"""Predictions for people and other programs: parquet, CSV for a spreadsheet, or the JSON file of boxes they are of.

Nothing of ours reads these files back.
"""

import itertools
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor

from livt_hf.data.labels import BOX, BOX_ROW, CORNERS
from livt_hf.errors import LiVTError
from livt_hf.files import check_writable, replace_text
from livt_hf.predictions.decisions import choose_classes
from livt_hf.predictions.record import LABEL, LOGITS, MODEL, Predictions
from livt_hf.predictions.rules import DecisionRule
from livt_hf.text import format_error

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
    """

    def __init__(self, path: str | Path, rules: Sequence[DecisionRule]):
        self.path, self.rules = Path(path), rules
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
            columns = [(f"labels{suffix}", self._given(predictions, rule, scores))]
        else:
            names = self._class_names(predictions, labels.tolist())
            columns = [(f"prediction{suffix}", names), (f"score{suffix}", _numbers(best))]
        if self.is_csv:
            classes = enumerate(predictions.class_names)
            return columns + [(f"score{suffix}_{name}", _numbers(scores[:, label])) for label, name in classes]
        lists = pa.FixedSizeListArray.from_arrays(_numbers(scores.reshape(-1)), scores.shape[1])
        return [*columns, (f"scores{suffix}", lists)]

    def _given(self, predictions: Predictions, rule: DecisionRule, scores: Tensor) -> pa.Array:
        """Return the labels that are given, as a list in parquet and in one cell of a CSV."""
        chosen, missing = scores >= predictions.thresholds(rule), scores.isnan().any(-1).tolist()
        names = predictions.class_names
        given = [
            None if empty else [names[i] for i in torch.where(row)[0].tolist()]
            for row, empty in zip(chosen, missing, strict=True)
        ]
        if self.is_csv:
            return pa.array([None if labels is None else SEPARATOR.join(labels) for labels in given], pa.string())
        return pa.array(given, pa.list_(pa.string()))


class AnswersWriter(AbstractContextManager):
    """Writes a copy of a JSON file of boxes with the answers of a model.

    In a file of COCO the best class of a box becomes its category, with a `score`; new classes get new ids. In one of
    MegaDetector a box gets `classifications`, the best first, and classes of another classifier are removed. Boxes
    without an answer, such as those of pictures that cannot be read, keep their category or have no classifications.

    Args:
        path: file to write.
        source: file of COCO or MegaDetector that the boxes were read from.
        rule: decision rule.
        top_k: classes of each box in a file of MegaDetector.
    """

    def __init__(self, path: str | Path, source: str | Path, rule: DecisionRule, top_k: int = 5):
        self.path, self.source, self.rule, self.top_k = Path(path), Path(source), rule, top_k
        self.class_names: list[str] = []
        self._rows: list[tuple[int, str, list | None]] = []  # number of the box, its picture, (label, score) pairs
        if not self.source.is_file():
            raise LiVTError(f"{self.source} is not a file; name that of the boxes.", "boxes")

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is None:
            replace_text(self.path, json.dumps(self._answered(), ensure_ascii=False))

    def write(self, predictions: Predictions) -> None:
        """Add the boxes of a record."""
        numbers, paths = predictions.column(BOX_ROW), predictions.column("path")
        if numbers is None or paths is None:
            raise LiVTError("the record is not of boxes; write its answers to a .csv or .parquet file.", "output")
        top = predictions.scores(self.rule).topk(min(self.top_k, predictions.info.num_classes))
        self.class_names = predictions.class_names
        columns = numbers.tolist(), paths, top.indices.tolist(), top.values.tolist(), top.values.isnan().any(-1)
        for number, path, labels, scores, is_missing in zip(*columns, strict=True):
            answer = [(label, round(score, 4)) for label, score in zip(labels, scores, strict=True)]
            self._rows.append((number, os.path.basename(path), None if is_missing else answer))

    def _answered(self) -> dict:
        from livt_hf.data.readers.annotations import iterate_boxes  # few predictions are of boxes

        try:
            content = json.loads(self.source.read_bytes())
            boxes = list(iterate_boxes(content))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            message = f"{self.source} cannot be read as a file of boxes ({format_error(error)}); name another one."
            raise LiVTError(message, "boxes") from error
        answers: list[list | None] = [None] * len(boxes)
        for number, name, answer in self._rows:
            # A file may be found without its suffix; its name begins alike.
            if not (0 <= number < len(boxes) and name.startswith(Path(boxes[number][0].replace("\\", "/")).stem)):
                raise LiVTError(f"{self.source} has no box {number} in {name}: name the file of these boxes.", "boxes")
            answers[number] = answer
        fill = self._fill_coco if "annotations" in content else self._fill_detections
        fill(content, [box for _, box in boxes], answers)
        return content

    def _fill_coco(self, content: dict, boxes: list[dict], answers: list[list | None]) -> None:
        content["categories"] = categories = list(content.get("categories") or ())
        ids = {category["name"]: category["id"] for category in categories}
        free = itertools.count(1 + max((key for key in ids.values() if isinstance(key, int)), default=0))
        for name in self.class_names:
            if name not in ids:
                ids[name] = next(free)
                categories.append({"id": ids[name], "name": name})
        for box, answer in zip(boxes, answers, strict=True):
            if answer is not None:
                box |= {"category_id": ids[self.class_names[answer[0][0]]], "score": answer[0][1]}

    def _fill_detections(self, content: dict, boxes: list[dict], answers: list[list | None]) -> None:
        content["classification_categories"] = {str(label): name for label, name in enumerate(self.class_names)}
        for box, answer in zip(boxes, answers, strict=True):
            box.pop("classifications", None)
            if answer is not None:
                box["classifications"] = [[str(label), score] for label, score in answer]


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
