"""Answers for boxes, written back into the file of COCO or MegaDetector that the boxes came from."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from livt_hf.data.labels import BOX_ROW
from livt_hf.data.readers.annotations import iterate_boxes
from livt_hf.errors import LiVTError
from livt_hf.files import replacing
from livt_hf.predictions.record import Predictions
from livt_hf.predictions.rules import DecisionRule
from livt_hf.text import format_error


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
        self.class_names: tuple[str, ...] = ()
        self._parts: list[tuple[np.ndarray, ...]] = []
        if not self.source.is_file():
            raise LiVTError(f"{self.source} is not a file; name that of the boxes.", "boxes")

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is None:
            with replacing(self.path) as writing:
                Path(writing).write_text(json.dumps(self._answered(), ensure_ascii=False), encoding="utf-8")

    def write(self, predictions: Predictions) -> None:
        """Add the boxes of a record."""
        numbers, paths = predictions.column(BOX_ROW), predictions.column("path")
        if numbers is None or paths is None:
            raise LiVTError("the record is not of boxes; write its answers to a .csv or .parquet file.", "output")
        top = predictions.scores(self.rule).topk(min(self.top_k, predictions.info.num_classes))
        names = np.array([os.path.basename(path) for path in paths])
        self.class_names = tuple(predictions.class_names)
        self._parts.append((numbers, top.indices.numpy(), top.values.numpy(), names))

    def _answered(self) -> dict[str, Any]:
        try:
            content = json.loads(self.source.read_bytes())
            boxes = list(iterate_boxes(content))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            message = f"{self.source} cannot be read as a file of boxes ({format_error(error)}); name another one."
            raise LiVTError(message, "boxes") from error
        answers: list[list | None] = [None] * len(boxes)
        for number, labels, scores, name in (row for part in self._parts for row in zip(*part, strict=True)):
            # A file may be found without its suffix; its name begins alike.
            if not (0 <= number < len(boxes) and name.startswith(Path(boxes[number][0].replace("\\", "/")).stem)):
                raise LiVTError(f"{self.source} has no box {number} in {name}: name the file of these boxes.", "boxes")
            if not np.isnan(scores).any():
                answers[number] = [(int(c), round(float(s), 4)) for c, s in zip(labels, scores, strict=True)]
        fill = self._fill_coco if "annotations" in content else self._fill_detections
        fill(content, [box for _, box in boxes], answers)
        return content

    def _fill_coco(self, content: dict, boxes: list[dict], answers: list[list | None]) -> None:
        ids = {category["name"]: category["id"] for category in content.get("categories") or ()}
        free = max((key for key in ids.values() if isinstance(key, int)), default=0)
        added = [name for name in self.class_names if name not in ids]
        ids |= {name: free + number for number, name in enumerate(added, 1)}
        content["categories"] = [
            *(content.get("categories") or ()),
            *({"id": ids[name], "name": name} for name in added),
        ]
        for box, answer in zip(boxes, answers, strict=True):
            if answer is not None:
                box |= {"category_id": ids[self.class_names[answer[0][0]]], "score": answer[0][1]}

    def _fill_detections(self, content: dict, boxes: list[dict], answers: list[list | None]) -> None:
        content["classification_categories"] = {str(label): name for label, name in enumerate(self.class_names)}
        for box, answer in zip(boxes, answers, strict=True):
            box.pop("classifications", None)
            if answer is not None:
                box["classifications"] = [[str(label), score] for label, score in answer]
