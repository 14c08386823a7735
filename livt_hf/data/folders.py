"""Image folders: one folder per class, or one such folder per split."""

import logging
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset

from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import Labels, plain_name
from livt_hf.data.paths import dataset_of_paths
from livt_hf.data.split_names import SPLIT_FOLDER, SPLIT_OF_WORD
from livt_hf.errors import LiVTError
from livt_hf.system import is_of_runs

logger = logging.getLogger(__name__)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is not meant to be seen: .DS_Store, ._bird.jpg, __MACOSX."""
    return name.startswith(".") or name == "__MACOSX"


def holds_images(folder: Path) -> bool:
    """Whether an image lies anywhere below a folder."""
    suffixes = image_suffixes()
    return any(os.path.splitext(file)[1].lower() in suffixes for *_, files in os.walk(folder) for file in files)


def open_image_folder(folder: Path) -> dict[str, Dataset]:
    """The images of a folder by split; only `train`, where there is one folder per class.

    The topmost folder is the class, however deep its images lie, and it is a class even without an image.
    """
    root = os.path.abspath(folder)
    images, folders = _walk(root)
    tops = [place for place in folders if "/" not in place]
    if not tops or not images:
        raise LiVTError(
            f"{root} holds no folders with images, no parquet, arrow or tar files and no image lists; a table of "
            "labels is passed by its own name, such as labels.csv."
        )
    hold_folders = {place.partition("/")[0] for place in folders if "/" in place}
    hold_images = {image.rpartition("/")[0] for image in images}
    if len(tops) == 1 and tops[0] in hold_folders and not hold_images & {"", tops[0]}:
        return open_image_folder(Path(root, tops[0]))  # as archives unpack: birds/birds/finch
    named = {top: SPLIT_FOLDER.fullmatch(top) for top in tops if top in hold_folders}
    splits = {top: SPLIT_OF_WORD[match[1].lower()] for top, match in named.items() if match}
    below = [place for place in folders if place.partition("/")[2].lower() in SPLIT_OF_WORD and not splits]
    if below:
        raise LiVTError(f"{os.path.join(root, below[0])} lies below a class: put the class folders below the splits.")
    return _by_class(root, images, folders, splits)


def _by_class(root: str, images: list[str], folders: list[str], splits: dict[str, str]) -> dict[str, Dataset]:
    """Datasets of paths; `splits` gives the split of the topmost folders where these are not the classes."""
    level = 1 if splits else 0  # of the class folders
    parted = [place.split("/") for place in folders]
    named = [parts[level] for parts in parted if len(parts) > level and (not splits or parts[0] in splits)]
    names = sorted(set(map(plain_name, named)))
    id_of = {name: number for number, name in enumerate(names)}
    found: dict[str, tuple[list, list]] = {split: ([], []) for split in splits.values() or ["train"]}
    outside = []
    for image in images:
        parts = image.split("/", level + 1)
        if len(parts) < level + 2:
            outside.append(image)
            continue
        if splits and parts[0] not in splits:
            raise LiVTError(
                f"{os.path.join(root, parts[0])} names no split, but {next(iter(splits))} does: call it train, val or "
                "test, or move it."
            )
        paths, labels = found[splits[parts[0]] if splits else "train"]
        paths.append(os.path.join(root, image))
        labels.append(id_of[plain_name(parts[level])])
    if outside:
        logger.warning("left out %d images that lie in no class folder, such as %s", len(outside), outside[0])
    return {
        split: dataset_of_paths(pa.array(paths, pa.string()), Labels(np.array(labels, dtype=np.int64)), names, split)
        for split, (paths, labels) in found.items()
    }


def _walk(root: str) -> tuple[list[str], list[str]]:
    """The paths of the images below a folder, and of the folders, sorted. What is hidden is left out."""
    suffixes, others, images, folders = image_suffixes(), Counter(), [], []
    real_root = os.path.realpath(root)
    waiting = [""]
    while waiting:
        place = waiting.pop()
        with os.scandir(os.path.join(root, place)) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                path = f"{place}{entry.name}"
                _refuse_other_encoding(entry)
                if entry.is_symlink():
                    _refuse_stray_link(entry, real_root)
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.is_dir():
                    if not is_of_runs(entry.path, root):
                        folders.append(path)
                        waiting.append(f"{path}/")
                elif suffix in suffixes:
                    images.append(path)
                elif place:
                    others[suffix or "without a suffix"] += 1
    if others:
        counted = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common())
        logger.warning("left out files in %s that are not images Pillow opens: %s", root, counted)
    return sorted(images), sorted(folders)


def _refuse_other_encoding(entry: os.DirEntry) -> None:
    """Old archives leave names that are not UTF-8, which neither tables nor terminals take."""
    try:
        entry.name.encode()
    except UnicodeEncodeError as error:
        raise LiVTError(f"{entry.path!r} is not named in UTF-8: rename it.") from error


def _refuse_stray_link(entry: os.DirEntry, root: str) -> None:
    target = os.path.realpath(entry.path)
    if entry.is_dir() or not Path(target).is_relative_to(root):
        raise LiVTError(
            f"{entry.path} is a link to {target}: links to folders and links that leave the image folder are not "
            "followed, so copy the images or name them in a table."
        )
