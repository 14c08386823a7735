"""Columns of boxes in a table: which ones they are, what they hold, and what is wrong with it."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from livt_hf.data.labels import CORNERS, MAX_NAMED
from livt_hf.data.readers.image_table import as_text
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError

# The third of such names ends in w or width where the last two are a size.
BOX_NAMES = (
    *(CORNERS, ("xmin", "ymin", "xmax", "ymax"), ("x0", "y0", "x1", "y1"), ("x1", "y1", "x2", "y2")),
    *(("left", "top", "right", "bottom"), ("left", "top", "width", "height"), ("x", "y", "w", "h")),
    *(("x", "y", "width", "height"), ("bbox_x", "bbox_y", "bbox_w", "bbox_h")),
    *(("bbox_x", "bbox_y", "bbox_width", "bbox_height"), ("x_min", "y_min", "width", "height")),
)
_IS_SIZE = re.compile(r"(w|width)$", re.IGNORECASE)
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_NOT_NUMBERS = "the box is not four numbers"


def find_box_columns(names: Sequence[str], spec: DataSpec) -> list[str]:
    """Return the four columns of a table that hold boxes: those that the spec names, or have well-known names."""
    if spec.box_columns == "none":
        return []
    if spec.box_columns is None:
        by_name = {name.casefold(): name for name in names}
        found = next((known for known in BOX_NAMES if by_name.keys() >= set(known)), ())
        return [by_name[name] for name in found]
    columns = [name.strip() for name in spec.box_columns.split(",")]
    if len(set(columns)) != 4:
        raise LiVTError(
            f"box_columns is {spec.box_columns!r}: name four columns, such as left,top,width,height.", "box_columns"
        )
    if absent := [name for name in columns if name not in names]:
        raise LiVTError(f'the table has no column "{absent[0]}"; its columns are {", ".join(names)}.', "box_columns")
    return columns


def read_boxes(table: pa.Table, spec: DataSpec) -> tuple[np.ndarray | None, list[tuple[str, np.ndarray]]]:
    """Return the boxes of a table as left, top, right, bottom (N, 4), and what is wrong with which of them.

    A table without columns of boxes has none.

    The boxes are relative to their pictures if most have no number above 1, else in pixels. What sticks out of a
    picture on the left or top, or of relative boxes on any side, is cut off.
    """
    columns = find_box_columns(table.column_names, spec)
    if not columns:
        return None, []
    corners = np.stack([_as_numbers(table[name], name) for name in columns], axis=1)
    if _IS_SIZE.search(columns[2]):
        corners[:, 2:] += corners[:, :2]
    is_box = np.isfinite(corners).all(axis=1)
    with np.errstate(invalid="ignore"):
        relative = is_box.any() and np.median(corners[is_box].max(axis=1)) <= 1
        corners = np.clip(corners, 0, 1 if relative else None)
        left, top, right, bottom = corners.T
        findings = [
            (_NOT_NUMBERS, ~is_box),
            ("the box is reversed: its right or bottom comes first", (right < left) | (bottom < top)),
            ("the box is empty, or outside of the picture", (right == left) | (bottom == top)),
            ("the box lies in the first pixel", ~np.any(corners > 1, axis=1) & (not relative)),
        ]
    is_found = np.zeros(len(corners), dtype=bool)
    for number, (reason, mask) in enumerate(findings):  # each box has one finding
        findings[number] = (reason, mask & ~is_found)
        is_found |= mask
    return corners, findings


def _as_numbers(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Return a column as numbers, of which NaN is none."""
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        text = as_text(column, name)
        column = pc.if_else(pc.match_substring_regex(text, _NUMBER), text, None)
    return column.cast(pa.float64()).to_numpy(zero_copy_only=False).copy()


def name_boxes(files: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Return a text for each box that tells it from others of its picture."""
    parts = [pc.cast(pa.array(column), pa.string()) for column in corners.T]
    box = pc.binary_join_element_wise(*parts, ", ")
    return pc.binary_join_element_wise(pa.array(files, pa.string()), box, ", box ").to_numpy(zero_copy_only=False)


def check_boxes(file: Path, paths: pa.StringArray, findings: Sequence[tuple[str, np.ndarray]], skip: bool) -> None:
    """Raise an error that names the boxes that cannot be used or, where these are to be skipped, if they are all."""
    if skip:
        if findings and np.any([mask for _, mask in findings], axis=0).all():
            reasons = "; ".join(f"{mask.sum()}: {reason}" for reason, mask in findings if mask.any())
            raise LiVTError(f"{file} holds no box that can be used ({reasons}): correct it.", "dataset")
        return
    named, total = [], 0
    for reason, mask in findings:
        total += mask.sum()
        rows = np.flatnonzero(mask)[: MAX_NAMED - len(named)]
        named += [f"\n  {path or '(no path)'}, box {row}: {reason}" for path, row in zip(
            paths.take(pa.array(rows)).to_pylist(), rows.tolist(), strict=True
        )]  # fmt: skip
    if total:
        more = f"\n  and {total - len(named)} more" if total > len(named) else ""
        number = "1 box" if total == 1 else f"{total} boxes"
        raise LiVTError(
            f"{number} of {file} cannot be used (the first is box 0):{''.join(named)}{more}\nCorrect or remove them, "
            "or leave them out with on_broken skip.",
            "on_broken",
        )
