"""Boxes in the JSON files of COCO and MegaDetector, as tables with a row per box."""

import json
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from livt_hf.data.labels import BOX_ROW, CORNERS
from livt_hf.data.readers.image_table import DroppedImages
from livt_hf.data.readers.split_names import SPLIT_FOLDER, group_files_by_split
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError
from livt_hf.text import format_error

_ANNOTATIONS = re.compile(r"(^|[\W_])(annotations?|instances|coco)([\W_]|$)", re.IGNORECASE)  # in the name of a file


def iterate_boxes(content: dict) -> Iterator[tuple[str, dict]]:
    """Yield the boxes of a JSON file that `read_annotations` reads, in its order, with the names of their pictures."""
    if "annotations" in content:
        names = {picture["id"]: picture["file_name"] for picture in content["images"]}
        yield from ((names[box["image_id"]], box) for box in content["annotations"])
    else:
        yield from ((picture["file"], box) for picture in content["images"] for box in picture.get("detections") or ())


def read_annotations(
    file: Path, spec: DataSpec, dropped: DroppedImages, labelled: bool = True
) -> tuple[pa.Table, DataSpec]:
    """Read a JSON file of boxes, which must have classes if it is to be `labelled`.

    Returns:
        A table with a row per box, and a spec that names its columns and the folder of the pictures.
    """
    table = _Boxes(file, spec).read(dropped)
    if labelled and table["label"].null_count == len(table):
        raise LiVTError(f"the boxes of {file} have no classes to learn: classify them with `livt predict`.", "dataset")
    root = spec.source or str(_picture_folder(file, table["image"], file.parent))
    return table, _spec_of_boxes(spec, root)


def read_annotation_folder(
    folder: Path, files: dict[str, Path], spec: DataSpec, dropped: DroppedImages
) -> tuple[pa.Table, DataSpec]:
    """Read the COCO files of a folder of pictures, one for each split; see `read_annotations`."""
    tables = []
    for split, file in files.items():
        table = _Boxes(file, spec).read(dropped)
        below = os.path.relpath(_picture_folder(file, table["image"], folder), folder)
        if below != ".":
            paths = pc.binary_join_element_wise(below, table["image"], "/")
            table = table.set_column(0, "image", paths)
        tables.append(table.append_column("split", pa.array([split]).take(pa.array(np.zeros(len(table), int)))))
    several = len(files) > 1
    return pa.concat_tables(tables), _spec_of_boxes(spec, str(folder), split_column="split" if several else "none")


def _spec_of_boxes(spec: DataSpec, root: str, **columns: str) -> DataSpec:
    for argument in ("image_column", "label_column", "split_column", "box_columns"):
        if getattr(spec, argument) not in (None, "none"):
            raise LiVTError(
                f"{argument} is {getattr(spec, argument)!r}, but {spec.dataset} is no table: drop it.", argument
            )
    columns = {"split_column": "none"} | columns
    return spec.replace(
        source=root, image_column="image", label_column="label", box_columns=",".join(CORNERS), **columns
    )


def find_annotations(folder: Path, spec: DataSpec) -> dict[str, Path]:
    """Return the COCO files of a folder of pictures by split; one that stands alone is `train`.

    They lie in the folder itself, in those of its splits, or in one called annotations. None are looked for where
    box_columns is none.
    """
    if spec.box_columns == "none":
        return {}
    folders = [folder]
    for below in sorted(folder.iterdir()):
        if below.is_dir() and (SPLIT_FOLDER.fullmatch(below.name) or below.name.lower() == "annotations"):
            folders.append(below)
    found = [file for parent in folders for file in sorted(parent.glob("*.json")) if _is_annotations(file)]
    splits = group_files_by_split([str(file) for file in found], folder)
    for files in splits.values():
        if len(files) > 1:
            raise LiVTError(f"{files[0]} and {files[1]} both hold boxes: pass one by its own name.", "dataset")
    return {split: Path(files[0]) for split, files in splits.items()}


def _is_annotations(file: Path) -> bool:
    """Return True if a file is named like one of COCO and begins like one."""
    if not _ANNOTATIONS.search(file.stem) or not file.is_file():
        return False
    with file.open("rb") as opened:
        beginning = opened.read(65536)
    return any(key in beginning for key in (b'"images"', b'"annotations"', b'"image_id"'))


def _picture_folder(file: Path, paths: pa.ChunkedArray, folder: Path) -> Path:
    """Return the folder that has the first picture: that of the file, or one that is usual beside it."""
    split = file.stem.rpartition("_")[2]  # instances_train2017.json
    bases = [file.parent, folder, file.parent.parent] if file.parent.name == "annotations" else [file.parent, folder]
    folders = [base / below for base in bases for below in ("", "images", split, f"images/{split}")]
    first = next((path for path in paths[:1000].to_pylist() if path), "")
    return next((below for below in folders if (below / first).is_file()), file.parent)


class _Boxes:
    """The boxes of a JSON file, gathered while it is parsed: numbers in arrays, so that no object per box is kept."""

    def __init__(self, file: Path, spec: DataSpec):
        self.file, self.min_confidence, self.group_column = file, spec.min_confidence, spec.group_column
        self.codes: dict[Any, int] = {}  # ids or paths of pictures, numbered
        self.categories: dict[Any, int] = {}  # ids of classes, numbered
        self.picture, self.category, self.box = array("q"), array("q"), array("d")
        self.confidence, self.is_crowd = array("d"), array("b")
        self.detector: dict[Any, int] = {}
        self.detected = array("q")  # as what a detector took it
        self.pictures: dict[Any, tuple[str, Any]] = {}  # path and group by id
        self.failures: Counter = Counter()

    def read(self, dropped: DroppedImages) -> pa.Table:
        """Return a table with a row per box that can be told apart; boxes that are no examples are counted."""
        try:
            with open(self.file, "rb") as file:
                top = json.loads(file.read(), object_hook=self._take)
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, LiVTError):
                raise
            raise self._error(f"cannot be read as JSON ({format_error(error)})") from error
        is_coco = isinstance(top, dict) and isinstance(top.get("annotations"), list)
        if not isinstance(top, dict) or not isinstance(top.get("images"), list) or not (
            is_coco or isinstance(top.get("detection_categories"), dict)
        ):  # fmt: skip
            raise self._error(
                "is neither a file of COCO (images, annotations, categories) nor of MegaDetector (images, "
                "detection_categories)"
            )
        if any(top["images"]) or any(top.get("annotations", ())):
            raise self._error("has pictures without a file name, or annotations without an image_id")
        labels, is_left_out = self._coco(top) if is_coco else self._detections(top)
        codes, paths = np.array(self.picture), self._paths()
        for reason, mask in is_left_out.items():
            if mask.any():
                counts = Counter(paths.take(pa.array(codes[mask])).to_pylist())
                dropped.setdefault(reason, Counter()).update(counts)
        rows = np.flatnonzero(~np.any([*is_left_out.values()], axis=0))
        if self.failures:
            dropped.setdefault("the detector could not read the picture", Counter()).update(self.failures)
        if not len(rows):
            raise self._nothing_left(is_left_out)
        return self._table(rows, labels, codes, paths)

    def _error(self, text: str, way_out: str = "correct it") -> LiVTError:
        return LiVTError(f"{self.file} {text}: {way_out}.", "dataset")

    def _nothing_left(self, is_left_out: dict[str, np.ndarray]) -> LiVTError:
        reasons = [f"{mask.sum()}: {reason}" for reason, mask in is_left_out.items() if mask.any()]
        is_unsure = any("confidence" in reason for reason in reasons)
        reasons += [f"{len(self.failures)}: the detector could not read the picture"] * bool(self.failures)
        text = f"holds no box to take ({'; '.join(reasons) or 'there is none'})"
        return self._error(text, "lower min_confidence" if is_unsure else "pass another file")

    def _table(self, rows: np.ndarray, labels: pa.StringArray, codes: np.ndarray, paths: pa.StringArray) -> pa.Table:
        x, y, width, height = np.frombuffer(self.box, dtype=float).reshape(-1, 4)[rows].T
        columns = {"image": paths.take(pa.array(codes[rows])), "label": labels.take(pa.array(rows))}
        most = 1 if self.detector else None  # the boxes of MegaDetector are relative
        columns |= zip(CORNERS, (np.clip(side, None, most) for side in (x, y, x + width, y + height)), strict=True)
        if self.group_column is not None:
            groups = [self.pictures.get(key, (key, None))[1] for key in self.codes]
            groups = pa.array([None if group is None else str(group) for group in groups], pa.string())
            if groups.null_count < len(groups):
                columns[self.group_column] = groups.take(pa.array(codes[rows]))
        return pa.table(columns | {BOX_ROW: rows})

    def _paths(self) -> pa.StringArray:
        paths = []
        for key in self.codes:
            if key not in self.pictures:
                raise self._error(f"has annotations with the image_id {key!r}, which no picture has")
            paths.append(self.pictures[key][0])
        return pa.array(paths, pa.string())

    # What `json` hands over, the innermost first. What is returned is kept.

    def _take(self, value: dict) -> dict | bool | None:
        if "conf" in value and "bbox" in value:
            return self._take_detection(value)
        if "image_id" in value:
            self._take_annotation(value)
        elif "file_name" in value or "file" in value:
            self._take_picture(value)
        else:
            return value
        return None

    def _take_annotation(self, value: dict) -> None:
        self.picture.append(self._number(self.codes, value["image_id"], "image_id"))
        self.category.append(self._number(self.categories, value.get("category_id"), "category_id"))
        self.is_crowd.append(bool(value.get("iscrowd")))
        self._append_box(value.get("bbox"))

    def _take_detection(self, value: dict) -> bool:
        category: Any = value.get("classifications")
        for _ in range(2):  # [["3", 0.9], ...], the best first
            category = category[0] if isinstance(category, list) and category else None
        self.category.append(-1 if category is None else self._number(self.categories, category, "classification"))
        self.detected.append(self._number(self.detector, value.get("category"), "category"))
        confidence = _as_float(value["conf"])
        if math.isnan(confidence):
            raise self._error(f"has a detection with the confidence {value['conf']!r}, which is no number")
        self.confidence.append(confidence)
        self._append_box(value["bbox"])
        return True

    def _take_picture(self, value: dict) -> None:
        path, key = (value["file_name"], value.get("id")) if "file_name" in value else (value["file"],) * 2
        if not isinstance(path, str) or not isinstance(key, int | str):
            raise self._error(f"has a picture with the name {path!r} and the id {key!r}")
        self.pictures[key] = (path, value.get(self.group_column))
        detections = value.get("detections") or ()
        if value.get("failure") and "file" in value:
            self.failures[path] += 1
        if isinstance(detections, list) and "file" in value:
            if not all(one is True for one in detections):
                raise self._error(f"has detections of {path} without a box or a confidence")
            if detections:
                self.picture.extend([self._number(self.codes, key, "file")] * len(detections))

    def _number(self, known: dict, key: Any, name: str) -> int:
        if not isinstance(key, int | str):
            raise self._error(f"has a box with the {name} {key!r}")
        return known.setdefault(key, len(known))

    def _append_box(self, box: Any) -> None:
        numbers = [_as_float(one) for one in box] if isinstance(box, list) and len(box) == 4 else [math.nan] * 4
        self.box.extend(numbers)

    # The two formats

    def _coco(self, top: dict) -> tuple[pa.StringArray, dict[str, np.ndarray]]:
        names = {}
        for category in top.get("categories") or ():
            key, name = (category.get("id"), category.get("name")) if isinstance(category, dict) else (None, None)
            if not isinstance(key, int | str) or not isinstance(name, str) or not name.strip():
                raise self._error(f"has a category without a name or an id ({category!r})")
            names[key] = name
        return self._labels(names), {"the annotation is of a crowd": np.array(self.is_crowd, dtype=bool)}

    def _detections(self, top: dict) -> tuple[pa.StringArray, dict[str, np.ndarray]]:
        if len(self.picture) != len(self.confidence):
            raise self._error("has detections outside of its pictures")
        names = top.get("classification_categories") or {}
        animals = [key for key, name in top["detection_categories"].items() if name == "animal"]
        is_other = np.zeros(len(self.picture), dtype=bool)
        if animals:  # beside people and vehicles, which are not what pictures of animals are classified for
            is_other = np.array(self.detected) != self.detector.get(animals[0], -1)
        is_unsure = np.array(self.confidence) < self.min_confidence
        return self._labels(names), {
            f"the confidence is below {self.min_confidence:g}": is_unsure,
            "the detection is no animal": is_other & ~is_unsure,
        }

    def _labels(self, names: dict) -> pa.StringArray:
        if absent := [key for key in self.categories if not isinstance(names.get(key), str)]:
            raise self._error(f"has boxes of the category {absent[0]!r}, which it does not name")
        codes = np.array(self.category)
        texts = pa.array([names[key] for key in self.categories], pa.string())
        return texts.take(pa.array(codes, mask=codes < 0))


def _as_float(value: Any) -> float:
    """Return a number of a JSON file; NaN for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan
