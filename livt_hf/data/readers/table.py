"""Tables of paths and labels, one row per image or box, with a header: csv, tsv, jsonl and parquet."""

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

from livt_hf.data.classes import ZERO_OR_ONE, order_class_names
from livt_hf.data.labels import (
    BOX,
    BOX_MARGIN,
    BOX_ROW,
    Labels,
    flatten_lists,
    format_class_names,
    image_paths,
    offsets_of,
)
from livt_hf.data.readers.annotations import read_annotations
from livt_hf.data.readers.boxes import check_boxes, name_boxes, read_boxes
from livt_hf.data.readers.image_table import (
    GROUP_NAMES,
    IMAGE_NAMES,
    LABEL_NAMES,
    DroppedImages,
    ImageTable,
    as_text,
    find_repeated,
    locate_files,
    log_dropped_images,
    match_column_name,
    matching_rows,
    read_conditions,
    relative_paths,
    tables_of_files,
)
from livt_hf.data.readers.split_names import SPLIT_COLUMN_NAMES, read_split_column
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError, did_you_mean
from livt_hf.text import format_error

logger = logging.getLogger(__name__)

TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".json")


def is_table(path: Path) -> bool:
    """Return True if a file is a table of paths and labels; parquet may hold the images themselves."""
    if path.suffix.lower() not in TABLES or not path.is_file():
        return False
    if path.suffix.lower() != ".parquet":
        return True
    with reading_table(path):
        kinds = pq.read_schema(path).types
    return not any(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)  # as `datasets` stores images
        for kind in kinds
    )


def read_table(file: Path, spec: DataSpec, dropped: DroppedImages) -> dict[str, ImageTable]:
    """Return the images that a table or a JSON file of boxes names, by split.

    Rows without a label or an image are counted in `dropped`.
    """
    if file.suffix.lower() == ".json":
        return tables_of_rows(*read_annotations(file, spec, dropped), file, dropped)
    return tables_of_rows(_read_file(file), spec, file, dropped)


def read_unlabelled_boxes(file: Path, spec: DataSpec) -> pa.Table:
    """Return the boxes that a table or a JSON file names, to be classified.

    Returns:
        A table with the columns `path`, `box`, `box_margin` and `box_row`. Boxes that cannot be used are logged.
    """
    dropped: DroppedImages = {}
    if file.suffix.lower() == ".json":
        table, spec = read_annotations(file, spec, dropped, labelled=False)
    else:
        table = _read_file(file)
    if read_boxes(table, spec)[0] is None:
        raise LiVTError(f"{file} has no columns of boxes: name them with box_columns.", "box_columns")
    if "label" in table.column_names:
        table = table.drop_columns("label")
    table = table.append_column("label", pa.array(["box"] * len(table)))
    spec = spec.replace(label_column="label", split_column="none", group_column=None, on_broken="skip")
    (images,) = tables_of_rows(table, spec, file, dropped).values()
    log_dropped_images(dropped)
    columns = {"path": image_paths(images.images), BOX_ROW: images.columns[BOX_ROW]}
    return pa.table(columns | {name: images.images.data.column(name) for name in (BOX, BOX_MARGIN)})


def tables_of_rows(table: pa.Table, spec: DataSpec, file: Path, dropped: DroppedImages) -> dict[str, ImageTable]:
    """Return the images that the rows of a table name, or the boxes in them; see `read_table`."""
    if wanted := read_conditions(spec.where, table.column_names):
        table = table.filter(matching_rows(table, wanted))
    image_column, label_columns, split_column = _find_columns(table, spec)
    labels, class_names, is_unlabelled = _read_labels(table, label_columns, spec.label_separator)
    root = _image_folder(file, spec)
    paths = relative_paths(as_text(table[image_column], image_column), root, file)
    rows = np.arange(len(table))

    def drop(is_dropped: np.ndarray, reason: str) -> np.ndarray:
        if is_dropped.any():
            names = paths.take(rows[is_dropped]).fill_null("(no path)").to_pylist()
            dropped.setdefault(reason, Counter()).update(names)
        return rows[~is_dropped]

    hint = "; for images that have none of the labels, have one column of 0 and 1 per class"
    corners, findings = read_boxes(table, spec)
    if corners is not None:  # boxes of a picture become neighbours
        rows = np.argsort(paths.dictionary_encode().indices.fill_null(-1), kind="stable")
    check_boxes(file, paths, findings, skip=spec.on_broken == "skip")
    for reason, mask in findings:
        rows = drop(mask[rows], reason)
    rows = drop(is_unlabelled[rows], f"the label is empty{hint if spec.label_separator else ''}")
    rows = drop(paths.is_null().to_numpy(False)[rows], "the path is empty")
    if not len(rows):
        raise LiVTError(
            f'no row of {file} has both an image in the column "{image_column}" and a label in '
            f'"{format_class_names(label_columns)}": name others with image_column and label_column.',
            "label_column",
        )
    files = locate_files(paths.take(rows).to_pylist(), root)
    is_missing = np.equal(files, None)
    if is_missing.all():
        raise LiVTError(
            f"source {root} has none of the {len(rows)} images of {file}, such as {paths[rows[0]]} in its column "
            f'"{image_column}": name the folder that these paths are relative to, or the column of paths '
            "(image_column).",
            "source",
        )
    rows, files = drop(is_missing, "the file is missing"), files[~is_missing]
    columns = {"label": labels.take(pa.array(rows))}
    splits = np.full(len(rows), "train")
    if split_column is not None:
        splits = read_split_column(table[split_column].take(rows), split_column)
    if spec.group_column is not None:
        columns["group"] = as_text(table[spec.group_column].take(rows), spec.group_column)
    names = files
    if corners is not None:
        corners = corners[rows]
        columns = ({} if spec.group_from else {"group": paths.take(pa.array(rows))}) | columns
        names = name_boxes(files, corners)
    is_repeated = find_repeated(names, columns | {"split": pa.array(splits)})
    drop(is_repeated, "the image is named twice with the same label")
    if corners is not None:
        columns[BOX_ROW] = table[BOX_ROW].take(rows) if BOX_ROW in table.column_names else rows
        corners = corners[~is_repeated]
    rest = pa.table(columns).filter(~is_repeated)
    return tables_of_files(files[~is_repeated], rest, splits[~is_repeated], class_names, corners, spec.box_margin)


def _image_folder(file: Path, spec: DataSpec) -> Path:
    root = Path(os.path.abspath(spec.source or file.parent))
    if not root.is_dir():
        raise LiVTError(
            f"the folder of the images, {root}, does not exist: pass it with source.{did_you_mean(root)}", "source"
        )
    return root


def _read_file(file: Path) -> pa.Table:
    """Return all columns with a name; those of a text file as text, so that label 007 stays what it is."""
    with reading_table(file):
        if file.suffix.lower() == ".parquet":
            table = pq.read_table(file)
        elif file.suffix.lower() == ".jsonl":
            table = _read_json(file)
        else:
            table = _read_csv(file)
        table.validate(full=True)  # also that all text is UTF-8, which columns of a damaged file need not be
    names = [name.strip() for name in table.column_names]
    table = table.rename_columns(names).select([number for number, name in enumerate(names) if name])
    twice = [name for name, count in Counter(table.column_names).items() if count > 1]
    if twice:
        raise LiVTError(f'{file} has two columns called "{twice[0]}": rename one.', "dataset")
    return table


@contextlib.contextmanager
def reading_table(file: Path) -> Iterator[None]:
    """Turn whatever a library raises on a damaged table into one sentence."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise LiVTError(f"{file} cannot be read as a table in UTF-8: {format_error(error)}", "dataset") from error


def _read_json(file: Path) -> pa.Table:
    table = pyarrow.json.read_json(file)
    dates = [field.with_type(pa.string()) for field in table.schema if pa.types.is_temporal(field.type)]
    if not dates:
        return table
    return pyarrow.json.read_json(file, parse_options=pyarrow.json.ParseOptions(explicit_schema=pa.schema(dates)))


def _read_csv(file: Path) -> pa.Table:
    content = file.read_bytes()
    beginning = content[:65536].decode("utf-8-sig", errors="replace")
    header = next((line for line in beginning.splitlines() if line.strip()), "")
    delimiter = "\t" if file.suffix.lower() == ".tsv" else max(",;\t", key=header.count)
    parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with pyarrow.csv.open_csv(pa.BufferReader(content), parse_options=parsing) as reader:
        texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(reader.schema.names, pa.string()))
    return pyarrow.csv.read_csv(pa.BufferReader(content), parse_options=parsing, convert_options=texts)


def _find_columns(table: pa.Table, spec: DataSpec) -> tuple[str, list[str], str | None]:
    """Return the columns of images, labels (one, or a column of 0 and 1 for each class) and perhaps splits.

    They are those that the spec names, or have well-known names.
    """
    names = table.column_names
    label = spec.label_column
    labels = [label] if label is None or label in names else [part.strip() for part in label.split(",")]
    split = None if spec.split_column == "none" else spec.split_column
    named = [("image_column", spec.image_column), ("split_column", split), ("group_column", spec.group_column)]
    for argument, column in [*named, *(("label_column", one) for one in labels)]:
        if column is not None and column not in names:
            raise LiVTError(f'the table has no column "{column}"; its columns are {", ".join(names)}.', argument)
    image = spec.image_column or match_column_name(names, IMAGE_NAMES)
    if image is None:
        raise LiVTError(
            f"found no column of image paths among {', '.join(names)}: name it with image_column.", "image_column"
        )
    if spec.split_column is None:
        split = match_column_name(names, SPLIT_COLUMN_NAMES)
    others = [name for name in names if name not in (image, split, spec.group_column)]
    if label is None:
        match = match_column_name(others, LABEL_NAMES)
        labels = [match] if match else [name for name in others if _read_flags(table, name) is not None]
        if not match and (labels != others or len(labels) < 2):
            raise LiVTError(
                f"found no column of labels among {', '.join(names)}: name it with label_column, or name one column "
                "of 0 and 1 for each class, separated by commas.",
                "label_column",
            )
    group = match_column_name(others, GROUP_NAMES)
    if group and group not in labels and split is None and spec.group_column is None and spec.group_from is None:
        message = 'images may belong together by "%s": group_column keeps them on one side of a split'
        logger.warning(message, group, extra={"arguments": ("group_column",)})
    return image, labels, split


def _read_labels(table: pa.Table, columns: list[str], separator: str | None) -> tuple[pa.Array, list, np.ndarray]:
    """Return the labels as text or lists of text, the class names, and which rows have no label."""
    if len(columns) > 1:
        return _labels_of_flags(table, columns)
    if separator == "":
        raise LiVTError('label_separator is "": pass what stands between labels, such as "|".', "label_separator")
    column = table[columns[0]]
    values, offsets = flatten_lists(column)
    texts = as_text(values, columns[0])
    is_empty = (texts if offsets is None else column).is_null().to_numpy(zero_copy_only=False)
    if separator is not None and offsets is None:
        values, offsets = flatten_lists(pc.split_pattern(texts, separator))
        texts = as_text(values, columns[0])
    texts = pc.utf8_normalize(texts, "NFC")
    class_names = order_class_names(texts.unique().drop_null().to_pylist())
    if offsets is None:
        return texts, class_names, is_empty
    offsets = offsets_of(texts.is_valid().to_numpy(zero_copy_only=False))[offsets]
    cells = pa.ListArray.from_arrays(offsets.astype(np.int32), texts.drop_null())
    return cells, class_names, is_empty if separator is None else is_empty | (np.diff(offsets) == 0)


def _read_flags(table: pa.Table, column: str) -> np.ndarray | None:
    """Return a column as booleans; None where it holds anything but 0 and 1."""
    if pa.types.is_nested(table[column].type):
        return None
    texts = as_text(table[column], column).dictionary_encode()
    values = [ZERO_OR_ONE.get(text.lower()) for text in texts.dictionary.to_pylist()]
    return None if texts.null_count or None in values else np.array(values)[texts.indices.to_numpy()]


def _labels_of_flags(table: pa.Table, columns: list[str]) -> tuple[pa.Array, list[str], np.ndarray]:
    """Return the labels of one column of 0 and 1 for each class: one per image where each row has a single 1."""
    flags = [_read_flags(table, column) for column in columns]
    for column, values in zip(columns, flags, strict=True):
        if values is None:
            raise LiVTError(
                f'the column "{column}" has cells that are neither 0 nor 1: fill or correct them.', "label_column"
            )
    images, labels = np.nonzero(np.stack(flags, axis=1))
    lengths = np.bincount(images, minlength=len(table))
    offsets = None if (lengths == 1).all() else offsets_of(lengths)
    return Labels(labels, offsets).to_arrow(pa.array(columns)), columns, np.zeros(len(table), dtype=bool)
