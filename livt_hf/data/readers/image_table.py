"""What every reader returns, `ImageTable`: images of one split with their columns; and the files that paths name."""

import functools
import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetInfo, Features, Image, List, NamedSplit, Value

from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import BOX, BOX_MARGIN, normalize_name
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

IMAGE_NAMES = ("image", "img", "picture", "file_name", "path", "filename", "file", "filepath", "file_path")
IMAGE_NAMES += ("image_path", "image_id")
LABEL_NAMES = ("label", "labels", "target", "class", "category", "class_name", "species", "diagnosis", "cls")
LABEL_NAMES += ("finding", "findings", "dx", "disease", "condition", "defect", "taxon", "scientific_name", "breed")
GROUP_NAMES = ("group", "patient", "patient_id", "subject", "subject_id", "site", "animal", "sequence", "lesion_id")
_LEADS_OUT = r"^(/|[A-Za-z]:)|(^|/)\.\.(/|$)"  # of a path with slashes
UNLABELLED = 'the split "%s" has no labels and is left out'

DroppedImages = dict[str, Counter]  # why images are dropped -> which ones (their files or classes) and how many


@dataclass(frozen=True)
class ImageTable:
    """The images of one split as a reader found them; `classes` turns the labels into class ids.

    Attributes:
        images: dataset with the column `image`, and with `box` and `box_margin` where boxes are cut out of pictures;
            files and bytes stay where they are stored.
        columns: Arrow table with a row per image: `label` (text, class numbers, or lists of either), perhaps `group`
            (text), and any column that is carried along.
        class_names: names of all classes in their order; None where they follow from the labels.
    """

    images: Dataset
    columns: pa.Table
    class_names: list[str] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def select(self, rows: np.ndarray) -> "ImageTable":
        """Return the table of some rows."""
        return ImageTable(self.images.select(rows), self.columns.take(pa.array(rows)), self.class_names)


def tables_of_files(
    files: Sequence[str],
    columns: pa.Table,
    split_of: np.ndarray,
    class_names: list[str],
    boxes: np.ndarray | None = None,
    margin: float = 0.0,
) -> dict[str, ImageTable]:
    """Return the images that lie in files, or boxes (N, 4) in them that are cut out with a margin, by their split."""
    features = Features(image=Image())
    paths = pa.array(files, pa.string())
    storage = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), paths], names=["bytes", "path"])
    stored = {"image": storage}
    if boxes is not None:
        features |= {BOX: List(Value("float64"), length=4), BOX_MARGIN: Value("float32")}
        stored[BOX] = pa.FixedSizeListArray.from_arrays(boxes.reshape(-1), 4)
        stored[BOX_MARGIN] = np.full(len(paths), margin, dtype=np.float32)
    features = Features(features)
    images = pa.table(stored).cast(features.arrow_schema)
    tables = {}
    for split in np.unique(split_of).tolist():
        info, mask = DatasetInfo(features=features), split_of == split
        dataset = Dataset(images.filter(mask), info=info, split=NamedSplit(split))
        tables[split] = ImageTable(dataset, columns.filter(mask), class_names)
    return tables


def relative_paths(paths: pa.StringArray, root: Path, file: Path) -> pa.StringArray:
    """Return the paths that a file names below the root, with slashes; one that leads out of it is an error."""
    paths = pc.replace_substring(paths, "\\", "/")
    paths = pc.replace_substring_regex(paths, f"^({re.escape(root.as_posix().rstrip('/'))}/|(\\./)+)", "")
    outside = pc.match_substring_regex(paths, _LEADS_OUT).fill_null(False)
    if pc.any(outside).as_py():
        first = paths.filter(outside)[0]
        raise LiVTError(
            f'"{first}" of {file} leads out of the image folder {root}: pass another source, or correct it.', "source"
        )
    return paths


def locate_files(paths: Iterable[str], root: Path) -> np.ndarray:
    """Return the file behind each path below `root` (str), or None where there is none.

    Its name may lack the suffix, and have its letters in another Unicode form, as may those of its folders. Each
    folder is read once, instead of asking for each file.
    """
    suffixes = image_suffixes()

    @functools.cache
    def find_folder(path: str) -> str | None:
        folder = find(path) if path else os.path.abspath(root)
        return folder if folder and os.path.isdir(folder) else None

    @functools.cache
    def names_in(folder: str) -> set[str]:
        return set(os.listdir(folder))

    @functools.cache
    def by_normalized_name(folder: str) -> dict[str, list[str]]:
        """Return what a folder holds by name, with and without the suffix of an image."""
        known: dict[str, list[str]] = {}
        for name in sorted(names_in(folder)):
            stem, suffix = os.path.splitext(name)
            for written in (stem, name) if suffix.lower() in suffixes else (name,):
                known.setdefault(normalize_name(written), []).append(name)
        return known

    def find(path: str) -> str | None:
        parent, _, name = path.rpartition("/")
        folder = find_folder(parent)
        if folder is None or name in names_in(folder):
            return folder and f"{folder}/{name}"
        candidates = by_normalized_name(folder).get(normalize_name(name), [])
        if len(candidates) > 1:
            raise LiVTError(f"{path} may be {' or '.join(candidates)} in {folder}: write its suffix.", "dataset")
        return f"{folder}/{candidates[0]}" if candidates else None

    # One file has one path.
    found = [find(posixpath.normpath(path) if "//" in path or "./" in path else path) for path in paths]
    return np.array(found, dtype=object)


def find_repeated(files: np.ndarray, columns: dict[str, pa.Array | pa.ChunkedArray]) -> np.ndarray:
    """Return which rows name a file that an earlier row names. Rows that differ in one of `columns` are an error."""
    codes = pa.array(files, pa.string()).dictionary_encode().indices.to_numpy()
    first = np.unique(codes, return_index=True)[1]
    repeated = np.ones(len(files), dtype=bool)
    repeated[first] = False
    later = np.flatnonzero(repeated)
    for name, cells in columns.items():
        both = (cells.take(pa.array(rows)).to_pylist() for rows in (first[codes[later]], later))
        for row, one, other in zip(later, *both, strict=True):
            if one != other and _as_labels(one) != _as_labels(other):
                one, other = (", ".join(map(str, _as_labels(cell))) for cell in (one, other))
                several = "; several labels go into one cell, with label_separator" if name == "label" else ""
                raise LiVTError(
                    f'{files[row]} is named twice, with the {name} "{one}" and with "{other}": keep one row per '
                    f"image{several}.",
                    "dataset",
                )
    return repeated


def _as_labels(cell: str | list[str] | None) -> list:
    return sorted(set(cell)) if isinstance(cell, list) else [cell]


def match_column_name(columns: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the column that has the first of some names, whatever its case."""
    by_name = {column.casefold(): column for column in columns}
    return next((by_name[name] for name in names if name in by_name), None)


def as_text(column: pa.ChunkedArray, name: str) -> pa.StringArray:
    """Return a column as text without spaces around it; empty cells are null."""
    if pa.types.is_nested(column.type):
        raise LiVTError(
            f'column "{name}" holds {column.type}, not text or numbers: rewrite it, or name another column.'
        )
    if pa.types.is_float16(column.type):  # of which arrow knows little
        column = column.cast(pa.float32())
    if pa.types.is_floating(column.type):  # as pandas writes whole numbers beside empty cells
        column = pc.if_else(pc.is_nan(column), None, column)
        whole = pc.and_(pc.equal(column, pc.floor(column)), pc.less(pc.abs(column), 2.0**53))  # not infinity
        if pc.all(whole).as_py():
            column = column.cast(pa.int64())
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    text = text.combine_chunks() if isinstance(text, pa.ChunkedArray) else text
    return pc.if_else(pc.equal(text, ""), None, text)


def read_conditions(where: Sequence[str] | None, columns: Sequence[str]) -> dict[str, list[str]]:
    """Return the values that `where` asks for by column, from `column=value`; those of a column are alternatives."""
    wanted: dict[str, list[str]] = {}
    for condition in where or ():
        column, equals, value = condition.partition("=")
        if not equals or column.strip() not in columns:
            raise LiVTError(
                f"where {condition!r} is not column=value with one of the columns {', '.join(columns)}.", "where"
            )
        wanted.setdefault(column.strip(), []).append(value.strip())
    return wanted


def matching_rows(cells: Mapping[str, pa.Array] | pa.Table, wanted: Mapping[str, Sequence[str]]) -> np.ndarray:
    """Return which rows have the wanted values. Text and whole numbers are compared as they are written."""
    is_match = []
    for column, values in wanted.items():
        texts = as_text(cells[column], column)
        for value in values:
            if not pc.any(pc.equal(texts, value)).as_py():
                examples = ", ".join(texts.drop_null().unique().to_pylist()[:5])
                raise LiVTError(f'where {column}={value} matches no row; "{column}" holds {examples}.', "where")
        is_match.append(pc.is_in(texts, value_set=pa.array(values, pa.string())).to_numpy(zero_copy_only=False))
    matches = np.all(is_match, axis=0)
    if not matches.any():
        named = " ".join(f"{column}={value}" for column, values in wanted.items() for value in values)
        raise LiVTError(f"where {named!r} matches no row: its columns exclude each other.", "where")
    return matches


def log_dropped_images(dropped: DroppedImages) -> None:
    """Log a table of the images that are dropped and why."""
    lines = []
    for reason, names in dropped.items():
        first = [name if count == 1 else f"{name} ({count})" for name, count in names.most_common(5)]
        more = ", ..." if len(names) > 5 else ""
        lines.append(f"\n  {names.total():>7,}  {reason}: {', '.join(first)}{more}")
    if lines:
        total = sum(names.total() for names in dropped.values())
        logger.warning("left out %s images:%s", f"{total:,}", "".join(lines))
