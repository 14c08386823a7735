"""Image lists: text files with `path label` on every line and labels 0, 1, 2 and so on, plain, gzipped or xz."""

import gzip
import logging
import lzma
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from livt_hf.data.labels import MAX_CLASSES, normalize_name
from livt_hf.data.readers.image_table import ImageTable, find_repeated, locate_files, relative_paths, tables_of_files
from livt_hf.data.readers.split_names import SPLIT_OF_WORD
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

_LIST_NAME = re.compile(r"(?P<prefix>.*?)_?(?P<split>train|val|test)\.txt(\.gz|\.xz)?$")


@dataclass(frozen=True)
class ImageList:
    """The lines of one list: paths and class numbers."""

    file: Path
    paths: list[str]
    labels: np.ndarray


def is_image_list(path: Path) -> bool:
    """Return True if a file is named like an image list."""
    return path.name.removesuffix(".gz").removesuffix(".xz").endswith((".txt", ".lst"))


def find_lists(folder: Path, prefix: str = "") -> dict[str, Path]:
    """Return the lists `<prefix>_train.txt`, `_val.txt`, `_test.txt` (or .gz, .xz) of a folder by split."""
    matches = [(path, _LIST_NAME.match(path.name)) for path in sorted(folder.iterdir())]
    return {SPLIT_OF_WORD[match["split"]]: path for path, match in matches if match and match["prefix"] == prefix}


def read_list(path: Path) -> ImageList:
    """Read and check a list; a wrong line is named by file and number."""
    openers = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (EOFError, OSError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:
        raise LiVTError(f"{path} cannot be read as an image list: {error}.", "dataset") from error
    paths, labels = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, _, label = line.rstrip().rpartition(" ")
        if not name or not label.isdecimal() or len(label) >= len(str(MAX_CLASSES)):
            raise LiVTError(
                f"{path}, line {number}: {line[:200]!r} is not `path label` with a label 0, 1, 2 and so on.", "dataset"
            )
        paths.append(name)
        labels.append(label)
    if not paths:
        raise LiVTError(f"{path} is empty: an image list has `path label` on every line.", "dataset")
    return ImageList(path, paths, np.array(labels, dtype=np.int64))


def class_names_of_lists(lists: Mapping[str, ImageList]) -> list[str]:
    """Return folder names where each class of the training list has exactly one of its own, else the numbers."""
    num_classes = 1 + max(int(images.labels.max()) for images in lists.values())
    numbers = [str(label) for label in range(num_classes)]
    train = lists["train"]
    folders: dict[int, set[str]] = {label: set() for label in range(num_classes)}
    for path, label in zip(train.paths, train.labels.tolist(), strict=True):
        folders[label].add(normalize_name(path.rpartition("/")[0]))
    if any(len(options) != 1 for options in folders.values()):
        return numbers
    parts = [options.pop().split("/") for options in folders.values()]
    shared = min(len(part) for part in parts) - 1  # a deeper folder, such as arena/hockey, keeps all of its name
    for names in (["/".join(part[shared:]) for part in parts], ["/".join(part) for part in parts]):
        if len(set(names)) == num_classes:
            return names
    return numbers


def tables_of_lists(lists: Mapping[str, ImageList], root: Path, skip_missing: bool = False) -> dict[str, ImageTable]:
    """Return the images of lists, below `root`. A missing file is an error, or dropped with `skip_missing`."""
    root = Path(os.path.abspath(root))
    class_names, files, labels, splits = class_names_of_lists(lists), [], [], []
    for split, images in lists.items():
        found = locate_files(relative_paths(pa.array(images.paths), root, images.file).to_pylist(), root)
        is_missing = np.equal(found, None)
        count, first = is_missing.sum(), images.paths[int(np.argmax(is_missing))]
        if count and (count == len(found) or not skip_missing):
            raise LiVTError(
                f"{count} of the {len(found)} files of {images.file} are not below {root}, the first is {first}: pass "
                "the right folder with source, or leave missing files out with on_broken skip.",
                "source",
            )
        if count:
            logger.warning("left out %d missing files of %s, such as %s", count, images.file, first)
        files.append(found[~is_missing])
        labels.append(images.labels[~is_missing])
        splits.append(np.full(len(files[-1]), split))
    files, splits = np.concatenate(files), np.concatenate(splits)
    columns = pa.table({"label": pa.array(class_names).take(pa.array(np.concatenate(labels)))})
    repeated = find_repeated(files, {"label": columns["label"], "split": pa.array(splits)})
    if repeated.any():
        logger.warning(
            "left out %d lines that name an image once more, such as %s", repeated.sum(), files[repeated][0]
        )
    return tables_of_files(files[~repeated], columns.filter(~repeated), splits[~repeated], class_names)
