"""Files that name images and their labels: tables with a header (csv, tsv, jsonl, parquet), and image lists.

An image list is a text file with `path label` on every line and labels 0, 1, 2 and so on, plain, gzipped or xz.
"""

import contextlib
import gzip
import logging
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from datasets import Dataset, DatasetInfo, Features, Image, NamedSplit, Value
from datasets.data_files import SPLIT_KEYWORDS

from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import (
    IMAGE_NAMES,
    LABEL_NAMES,
    MOST_CLASSES,
    ZERO_OR_ONE,
    Labels,
    LeftOut,
    as_text,
    class_ids,
    first_names,
    flat_lists,
    holds_lists,
    of_rows,
    offsets_of,
    telling_name,
)
from livt_hf.errors import LiVTError, perhaps_meant
from livt_hf.records import in_words
from livt_hf.settings import DataSettings

logger = logging.getLogger(__name__)

SPLIT_OF_WORD = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
LIST_NAME = re.compile(r"(?P<prefix>.*?)_?(?P<split>train|val|test)\.txt(\.gz|\.xz)?$")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
SPLIT_NAMES = ("split", "partition")
GROUP_NAMES = ("group", "patient", "patient_id", "subject", "subject_id", "site", "animal", "sequence", "lesion_id")


@dataclass(frozen=True)
class ImageList:
    """The lines of one list."""

    file: Path
    paths: list[str]
    labels: np.ndarray


def is_image_list(path: Path) -> bool:
    """Whether a file is named like an image list."""
    return path.name.removesuffix(".gz").removesuffix(".xz").endswith((".txt", ".lst"))


def find_lists(folder: Path, prefix: str = "") -> dict[str, Path]:
    """Lists named `<prefix>_train.txt`, `_val.txt`, `_test.txt` (or .gz, .xz) in a folder, by split."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = LIST_NAME.match(path.name)
        if match and match["prefix"] == prefix:
            found[SPLIT_OF_WORD[match["split"]]] = path
    return found


def read_list(path: Path) -> ImageList:
    """Read and check a list; an unreadable line is named by file and number."""
    openers = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (EOFError, OSError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:
        raise LiVTError(f"{path} cannot be read as an image list: {error}.") from error
    paths, labels = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, _, label = line.rstrip().rpartition(" ")
        if not name or not label.isdecimal() or len(label) >= len(str(MOST_CLASSES)):
            raise LiVTError(
                f"{path}, line {number}: {line[:200]!r} is not `path label` with a label 0, 1, 2 and so on."
            )
        if name[0] in "/\\" or ".." in name and ".." in re.split(r"[/\\]", name) or ":" in name[:2]:
            raise LiVTError(f"{path}, line {number}: {name!r} leads out of the image folder; paths must stay inside.")
        paths.append(name)
        labels.append(label)
    if not paths:
        raise LiVTError(f"{path} is empty: an image list has `path label` on every line.")
    return ImageList(path, paths, np.array(labels, dtype=np.int64))


def class_names(lists: Mapping[str, ImageList]) -> list[str]:
    """Folder names where each class of the training list has exactly one of its own, else the numbers."""
    num_classes = 1 + max(int(images.labels.max()) for images in lists.values())
    numbers = [str(label) for label in range(num_classes)]
    train = lists["train"]
    folders = {label: set() for label in range(num_classes)}
    for path, label in zip(train.paths, train.labels.tolist(), strict=True):
        folders[label].add(path.rpartition("/")[0])
    if any(len(options) != 1 for options in folders.values()):
        return numbers
    parts = [options.pop().split("/") for options in folders.values()]
    shared = min(len(part) for part in parts) - 1  # a deeper folder, such as arena/hockey, keeps all of its name
    for names in (["/".join(part[shared:]) for part in parts], ["/".join(part) for part in parts]):
        if len(set(names)) == num_classes:
            return names
    return numbers


def datasets_from_lists(lists: Mapping[str, ImageList], root: Path, skip_missing: bool = False) -> dict[str, Dataset]:
    """Datasets of image paths below `root`. A missing file is an error, or left out with `skip_missing`."""
    names = class_names(lists)
    result = {}
    for split, images in lists.items():
        files = locate(images.paths, root)
        missing = [path for path, file in zip(images.paths, files, strict=True) if file is None]
        if missing and not skip_missing:
            raise LiVTError(
                f"{len(missing)} of the {len(files)} files of {images.file} are not below {root}, the first is "
                f"{missing[0]}: pass the right folder with --source, or leave them out with --on_broken skip."
            )
        if len(missing) == len(files):
            raise LiVTError(f"none of the {len(files)} files of {images.file} is below {root}: pass it with --source.")
        if missing:
            logger.warning("left out %d missing files of %s, such as %s", len(missing), images.file, missing[0])
        kept = np.flatnonzero([file is not None for file in files])
        paths = pa.array([file for file in files if file is not None], type=pa.string())
        result[split] = dataset_of_paths(paths, Labels(images.labels[kept]), names, split)
    return result


def dataset_of_paths(
    paths: pa.Array, labels: Labels, names: list[str], split: str, groups: pa.Array | None = None
) -> Dataset:
    """A dataset of images that stay in their files."""
    storage = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), paths], names=["bytes", "path"])
    columns = {"image": storage, "label": labels.to_arrow()}
    features = Features(image=Image(), label=labels.feature(names))
    if groups is not None:
        columns["group"], features["group"] = groups, Value("string")
    table = pa.table(columns).cast(features.arrow_schema)
    return Dataset(table, info=DatasetInfo(features=features), split=NamedSplit(split))


def locate(paths: Iterable[str], root: Path) -> list[str | None]:
    """The file behind each path below `root`, also where the table leaves out its suffix; None where there is none.

    Each folder is read once, instead of asking for each file.
    """
    suffixes, prefix, found = image_suffixes(), f"{root}/", []
    listed: dict[str, set[str]] = {}
    stems: dict[str, dict[str, list[str]]] = {}  # by folder: the images of each name without its suffix
    for path in paths:
        folder, slash, name = path.rpartition("/")
        if folder not in listed:
            place = root / folder
            listed[folder] = set(os.listdir(place)) if place.is_dir() else set()
        if name not in listed[folder]:
            if folder not in stems:
                stems[folder] = {}
                for file in sorted(listed[folder]):
                    stem, suffix = os.path.splitext(file)
                    if suffix.lower() in suffixes:
                        stems[folder].setdefault(stem, []).append(file)
            meant = stems[folder].get(name, [])
            if len(meant) > 1:
                raise LiVTError(f"{path} may be {' or '.join(meant)} in {root / folder}: write its suffix.")
            name = meant[0] if meant else None
        found.append(None if name is None else f"{prefix}{folder}{slash}{name}")
    return found


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
    columns = _find_columns(table, settings)
    labels, names, unlabelled = _read_labels(table, columns.labels, settings.label_separator)
    root = Path(os.path.abspath(settings.source or file.parent))
    if not root.is_dir():
        raise LiVTError(
            f"the folder of the images, {root}, does not exist: pass it with --source.{perhaps_meant(root)}"
        )
    paths = _relative_paths(as_text(table[columns.image], columns.image), root)
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
            f'no row of {file} has both an image in the column "{columns.image}" and a label in '
            f'"{first_names(columns.labels)}": name others with --image_column and --label_column.'
        )
    files = np.array(locate(paths.take(rows).to_pylist(), root), dtype=object)
    missing = np.equal(files, None)
    if missing.all():
        raise LiVTError(
            f"none of the {len(rows)} images of {file} is below {root}, the first is {paths[rows[0]]}: pass their "
            "folder with --source."
        )
    rows, files = leave_out(missing, "the file is missing"), files[~missing]
    repeated = _repeated(files, labels.take(rows), names)
    rows, files = leave_out(repeated, "the image is named twice with the same label"), files[~repeated]
    groups = None if columns.group is None else as_text(table[columns.group], columns.group)
    splits = np.full(len(rows), "train")  # where no column says it
    if columns.split is not None:
        splits = _read_splits(table[columns.split].take(rows), columns.split)
    result = {}
    for split in np.unique(splits).tolist():
        own = splits == split
        group = None if groups is None else groups.take(rows[own])
        images = pa.array(files[own], type=pa.string())
        result[split] = dataset_of_paths(images, labels.take(rows[own]), names, split, group)
    return result


def _read_table(file: Path) -> pa.Table:
    """All columns; those of a text file as text, so that label 007 stays what it is."""
    with reading_table(file):
        if file.suffix.lower() == ".parquet":
            table = pq.read_table(file)
        elif file.suffix.lower() == ".jsonl":
            table = _read_json(file)
        else:
            table = _read_csv(file)
        table.validate(full=True)  # also that all text is UTF-8, which columns of a damaged file need not be
    table = table.rename_columns([name.strip() for name in table.column_names])
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
        raise LiVTError(f"{file} cannot be read as a table in UTF-8: {in_words(error)}") from error


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


@dataclass(frozen=True)
class _Columns:
    image: str
    labels: list[str]  # one, or a column of 0 and 1 for each class
    split: str | None
    group: str | None


def _find_columns(table: pa.Table, settings: DataSettings) -> _Columns:
    """The columns that the settings name, or those with telling names."""
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
    return _Columns(image, labels, split, settings.group_column)


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
    column, offsets = table[columns[0]], None
    if holds_lists(column):
        empty, (values, offsets) = column.is_null(), flat_lists(column)
        texts = as_text(values, columns[0])
    else:
        texts = as_text(column, columns[0])
        empty = texts.is_null()
        if separator is not None:
            if not separator:
                raise LiVTError('label_separator is "": pass what stands between labels, such as "|".')
            values, offsets = flat_lists(pc.split_pattern(texts, separator))
            texts = as_text(pa.chunked_array([values]), columns[0])
    ids, names = class_ids(texts)
    labels = Labels.of_ids(ids, offsets)
    empty = empty.to_numpy(False)
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


def _relative_paths(paths: pa.StringArray, root: Path) -> pa.StringArray:
    """Paths below the root, with slashes; one that leads out of it is refused."""
    paths = pc.replace_substring(paths, "\\", "/")
    paths = pc.replace_substring_regex(paths, f"^({re.escape(root.as_posix().rstrip('/'))}/|(\\./)+)", "")
    outside = pc.match_substring_regex(paths, r"^(/|[A-Za-z]:)|(^|/)\.\.(/|$)").fill_null(False)
    if pc.any(outside).as_py():
        first = paths.filter(outside)[0]
        raise LiVTError(
            f'"{first}" leads out of the image folder {root}: paths must stay inside; --source sets the folder.'
        )
    return paths


def _repeated(files: np.ndarray, labels: Labels, names: list[str]) -> np.ndarray:
    """Which of the files are named earlier with the same labels; other labels are refused."""
    codes = pa.array(files, pa.string()).dictionary_encode().indices.to_numpy()
    first = np.unique(codes, return_index=True)[1]
    repeated = np.ones(len(files), dtype=bool)
    repeated[first] = False
    two = [labels.take(rows) for rows in (first[codes[repeated]], np.flatnonzero(repeated))]
    differ = np.setxor1d(*(part.images * len(names) + part.values for part in two))  # images and their labels
    if len(differ):
        which = differ[:1] // len(names)
        a, b = (", ".join(names[label] for label in np.unique(part.take(which).values)) for part in two)
        raise LiVTError(
            f'{files[repeated][which[0]]} is named twice, with the label "{a}" and with "{b}": keep one row per '
            "image; several labels go into one cell, with --label_separator."
        )
    return repeated


def split_by_column(splits: dict[str, Dataset], asked: str | None) -> dict[str, Dataset]:
    """Images that are stored in one piece, divided by a column that says train, val or test, where there is one."""
    train = splits["train"]
    column = telling_name(train.column_names, SPLIT_NAMES) if asked is None else asked
    if asked not in (None, "none"):
        if asked not in train.column_names:
            raise LiVTError(f'there is no split_column "{asked}"; the columns are {", ".join(train.column_names)}.')
        if len(splits) > 1:
            raise LiVTError(f"the images are stored as {', '.join(splits)}: leave --split_column {asked} out.")
    if column in (None, "none") or len(splits) > 1:
        return splits
    words = _read_splits(of_rows(train, train.data.column(column)), column)
    return {split: train.select(np.flatnonzero(words == split)) for split in np.unique(words).tolist()}


def _read_splits(cells: pa.ChunkedArray, column: str) -> np.ndarray:
    """The split of each row."""
    texts = as_text(cells, column).dictionary_encode()
    words = texts.dictionary.to_pylist()
    strange = [word for word in words if word.lower() not in SPLIT_OF_WORD]
    if strange or texts.null_count:
        wrong = f'"{strange[0]}"' if strange else "an empty cell"
        raise LiVTError(
            f'the split column "{column}" has {wrong}: write train, val or test, or pass --split_column none to leave '
            "it unused."
        )
    return np.array([SPLIT_OF_WORD[word.lower()] for word in words])[texts.indices.to_numpy()]
