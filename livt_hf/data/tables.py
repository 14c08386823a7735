"""Tables that name images and their labels, one row per image, with a header: csv, tsv, jsonl and parquet."""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from datasets import Dataset

from livt_hf.data.columns import (
    IMAGE_NAMES,
    LABEL_NAMES,
    ZERO_OR_ONE,
    LeftOut,
    as_text,
    class_ids,
    telling_name,
)
from livt_hf.data.labels import Labels, first_names, flat_lists, offsets_of
from livt_hf.data.paths import datasets_of_paths, locate, relative_paths, repeated
from livt_hf.data.split_names import SPLIT_NAMES, read_splits
from livt_hf.errors import LiVTError, did_you_mean
from livt_hf.settings import DataSettings
from livt_hf.text import format_error

logger = logging.getLogger(__name__)

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
GROUP_NAMES = ("group", "patient", "patient_id", "subject", "subject_id", "site", "animal", "sequence", "lesion_id")


def is_table(path: Path) -> bool:
    """Whether a file is a table of paths and labels; parquet may hold the images themselves."""
    if path.suffix.lower() not in TABLES or not path.is_file():
        return False
    if path.suffix.lower() != ".parquet":
        return True
    with reading_table(path):
        kinds = pq.read_schema(path).types
    return not any(map(_holds_bytes, kinds))


def _holds_bytes(kind: pa.DataType) -> bool:
    """Whether a column may hold images: as bytes, or as `datasets` stores them, with a path beside the bytes."""
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def open_table(file: Path, settings: DataSettings, left_out: LeftOut) -> dict[str, Dataset]:
    """The images that a table names, by split. Rows without a label or an image are counted in `left_out`."""
    table = _read_table(file)
    image_column, label_columns, split_column = _find_columns(table, settings)
    labels, names, unlabelled = _read_labels(table, label_columns, settings.label_separator)
    root = _image_folder(file, settings)
    paths = relative_paths(as_text(table[image_column], image_column), root)
    rows = np.arange(len(table))

    def leave_out(absent: np.ndarray, why: str) -> np.ndarray:
        if absent.any():
            left_out.setdefault(why, Counter()).update(paths.take(rows[absent]).fill_null("(no path)").to_pylist())
        return rows[~absent]

    none = "; for images that have none of the labels, have one column of 0 and 1 per class"
    rows = leave_out(unlabelled, f"the label is empty{none if settings.label_separator else ''}")
    rows = leave_out(paths.is_null().to_numpy(False)[rows], "the path is empty")
    if not len(rows):
        raise LiVTError(
            f'no row of {file} has both an image in the column "{image_column}" and a label in '
            f'"{first_names(label_columns)}": name others with --image_column and --label_column.'
        )
    files = np.array(locate(paths.take(rows).to_pylist(), root), dtype=object)
    missing = np.equal(files, None)
    if missing.all():
        raise LiVTError(
            f"none of the {len(rows)} images of {file} is below {root}, the first is {paths[rows[0]]}: pass their "
            "folder with --source."
        )
    rows, files = leave_out(missing, "the file is missing"), files[~missing]
    splits, groups = np.full(len(rows), "train"), None  # where no column says them
    if split_column is not None:
        splits = read_splits(table[split_column].take(rows), split_column)
    if settings.group_column is not None:
        groups = as_text(table[settings.group_column].take(rows), settings.group_column)
    beside = {"split": splits} | ({} if groups is None else {"group": groups.to_numpy(False)})
    twice = repeated(files, labels.take(rows), names, beside)
    rows = leave_out(twice, "the image is named twice with the same label")
    groups = None if groups is None else groups.filter(~twice)
    return datasets_of_paths(files[~twice], labels.take(rows), names, splits[~twice], groups)


def _image_folder(file: Path, settings: DataSettings) -> Path:
    root = Path(os.path.abspath(settings.source or file.parent))
    if not root.is_dir():
        raise LiVTError(
            f"the folder of the images, {root}, does not exist: pass it with --source.{did_you_mean(root)}"
        )
    return root


def _read_table(file: Path) -> pa.Table:
    """All columns with a name; those of a text file as text, so that label 007 stays what it is."""
    with reading_table(file):
        if file.suffix.lower() == ".parquet":
            table = pq.read_table(file)
        elif file.suffix.lower() == ".jsonl":
            table = _read_json(file)
        else:
            table = _read_csv(file)
        table.validate(full=True)  # also that all text is UTF-8, which columns of a damaged file need not be
    names = [name.strip() for name in table.column_names]
    table = table.rename_columns(names).select([place for place, name in enumerate(names) if name])
    twice = [name for name, count in Counter(table.column_names).items() if count > 1]
    if twice:
        raise LiVTError(f'{file} has two columns called "{twice[0]}": rename one.')
    return table


@contextlib.contextmanager
def reading_table(file: Path) -> Iterator[None]:
    """Around what reads a table: whatever its library raises on damaged files, in a sentence."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise LiVTError(f"{file} cannot be read as a table in UTF-8: {format_error(error)}") from error


def _read_json(file: Path) -> pa.Table:
    table = pyarrow.json.read_json(file)
    dates = [field.with_type(pa.string()) for field in table.schema if pa.types.is_temporal(field.type)]
    if not dates:
        return table
    return pyarrow.json.read_json(file, parse_options=pyarrow.json.ParseOptions(explicit_schema=pa.schema(dates)))


def _read_csv(file: Path) -> pa.Table:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        header = next((line for line in lines if line.strip()), "")
    delimiter = "\t" if file.suffix.lower() == ".tsv" else max(",;\t", key=header.count)
    parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with pyarrow.csv.open_csv(file, parse_options=parsing) as reader:
        texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(reader.schema.names, pa.string()))
    return pyarrow.csv.read_csv(file, parse_options=parsing, convert_options=texts)


def _find_columns(table: pa.Table, settings: DataSettings) -> tuple[str, list[str], str | None]:
    """The columns of images, labels (one, or a column of 0 and 1 for each class) and perhaps splits.

    They are those that the settings name, or have telling names.
    """
    names = table.column_names
    label = settings.label_column
    labels = [label] if label is None or label in names else [part.strip() for part in label.split(",")]
    split = None if settings.split_column == "none" else settings.split_column
    for asked in (settings.image_column, *labels, split, settings.group_column):
        if asked is not None and asked not in names:
            raise LiVTError(f'the table has no column "{asked}"; its columns are {", ".join(names)}.')
    image = settings.image_column or telling_name(names, IMAGE_NAMES)
    if image is None:
        raise LiVTError(f"found no column of image paths among {', '.join(names)}: name it with --image_column.")
    if settings.split_column is None:
        split = telling_name(names, SPLIT_NAMES)
    others = [name for name in names if name not in (image, split, settings.group_column)]
    if label is None:
        found = telling_name(others, LABEL_NAMES)
        labels = [found] if found else [name for name in others if _zeros_and_ones(table, name) is not None]
        if not found and (labels != others or len(labels) < 2):
            raise LiVTError(
                f"found no column of labels among {', '.join(names)}: name it with --label_column, or name one column "
                "of 0 and 1 for each class, separated by commas."
            )
    hint = telling_name(others, GROUP_NAMES)
    if hint and hint not in labels and split is None and settings.group_column is None:
        logger.warning('images may belong together by "%s": --group_column keeps them on one side of a split', hint)
    return image, labels, split


def _zeros_and_ones(table: pa.Table, column: str) -> np.ndarray | None:
    """A column as booleans; None where it holds anything but 0 and 1."""
    if pa.types.is_nested(table[column].type):
        return None
    texts = as_text(table[column], column).dictionary_encode()
    values = [ZERO_OR_ONE.get(text.lower()) for text in texts.dictionary.to_pylist()]
    return None if texts.null_count or None in values else np.array(values)[texts.indices.to_numpy()]


def _read_labels(table: pa.Table, columns: list[str], separator: str | None) -> tuple[Labels, list[str], np.ndarray]:
    """The labels, the names of the classes, and which rows have an empty cell for a label."""
    if len(columns) > 1:
        return _labels_of_flags(table, columns)
    if separator == "":
        raise LiVTError('label_separator is "": pass what stands between labels, such as "|".')
    column = table[columns[0]]
    values, offsets = flat_lists(column)
    texts = as_text(values, columns[0])
    empty = (texts if offsets is None else column).is_null().to_numpy(False)
    if separator is not None and offsets is None:
        values, offsets = flat_lists(pc.split_pattern(texts, separator))
        texts = as_text(pa.chunked_array([values]), columns[0])
    ids, names = class_ids(texts)
    labels = Labels.of_ids(ids, offsets)
    return labels, names, empty if separator is None else empty | (np.diff(labels.offsets) == 0)


def _labels_of_flags(table: pa.Table, columns: list[str]) -> tuple[Labels, list[str], np.ndarray]:
    """Labels of one column of 0 and 1 for each class: one label per image, where each row has a single 1."""
    flags = [_zeros_and_ones(table, column) for column in columns]
    for column, values in zip(columns, flags, strict=True):
        if values is None:
            raise LiVTError(f'the column "{column}" has cells that are neither 0 nor 1: fill or correct them.')
    images, labels = np.nonzero(np.stack(flags, axis=1))
    lengths = np.bincount(images, minlength=len(table))
    offsets = None if (lengths == 1).all() else offsets_of(lengths)
    return Labels(labels, offsets), columns, np.zeros(len(table), dtype=bool)
