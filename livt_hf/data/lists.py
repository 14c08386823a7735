"""Image lists: text files with `path label` on every line and labels 0, 1, 2 and so on, plain, gzipped or xz."""

import gzip
import logging
import lzma
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from livt_hf.data.columns import MOST_CLASSES
from livt_hf.data.labels import Labels, plain_name
from livt_hf.data.paths import LEADS_OUT, datasets_of_paths, locate, repeated
from livt_hf.data.split_names import SPLIT_OF_WORD
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

LIST_NAME = re.compile(r"(?P<prefix>.*?)_?(?P<split>train|val|test)\.txt(\.gz|\.xz)?$")


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
        if re.search(LEADS_OUT, name.replace("\\", "/")):
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
        folders[label].add(plain_name(path.rpartition("/")[0]))
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
    names, files, labels, splits = class_names(lists), [], [], []
    for split, images in lists.items():
        found = locate(images.paths, root)
        missing = [path for path, file in zip(images.paths, found, strict=True) if file is None]
        if missing and not skip_missing:
            raise LiVTError(
                f"{len(missing)} of the {len(found)} files of {images.file} are not below {root}, the first is "
                f"{missing[0]}: pass the right folder with --source, or leave them out with --on_broken skip."
            )
        if len(missing) == len(found):
            raise LiVTError(f"none of the {len(found)} files of {images.file} is below {root}: pass it with --source.")
        if missing:
            logger.warning("left out %d missing files of %s, such as %s", len(missing), images.file, missing[0])
        kept = [row for row, file in enumerate(found) if file is not None]
        files += [found[row] for row in kept]
        labels += images.labels[kept].tolist()
        splits += [split] * len(kept)
    files, labels, splits = np.array(files, dtype=object), np.array(labels), np.array(splits)
    twice = repeated(files, Labels(labels), names, {"split": splits})
    if twice.any():
        logger.warning("left out %d lines that name an image once more, such as %s", twice.sum(), files[twice][0])
    return datasets_of_paths(files[~twice], Labels(labels[~twice]), names, splits[~twice])
