"""Image folders: one folder per class, or one such folder per split."""

import logging
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import Labels, plain_name
from livt_hf.data.paths import datasets_of_paths
from livt_hf.data.split_names import SPLIT_OF_WORD, named_folders, refuse_empty_splits
from livt_hf.errors import LiVTError
from livt_hf.runs import is_in_runs_folder

logger = logging.getLogger(__name__)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is not meant to be seen: .DS_Store, ._bird.jpg, __MACOSX."""
    return name.startswith(".") or name == "__MACOSX"


@dataclass(frozen=True)
class Tree:
    """What lies below a folder, as sorted paths from there with slashes. What is hidden and runs are left out."""

    root: str
    files: list[str]
    folders: list[str]
    links: list[str]  # those of the files that are links

    def ending(self, *suffixes: str) -> list[str]:
        """The files with one of these suffixes, whatever its case."""
        return [file for file in self.files if os.path.splitext(file)[1].lower() in suffixes]

    def images(self) -> list[str]:
        return self.ending(*image_suffixes())


def walk(folder: Path) -> Tree:
    """Look through a folder once. A link to a folder is a file, which is not followed."""
    root, files, folders, links, waiting = os.path.abspath(folder), [], [], [], [""]
    while waiting:
        place = waiting.pop()
        with os.scandir(os.path.join(root, place)) as entries:
            for entry in entries:
                path = f"{place}{entry.name}"
                if is_hidden(entry.name):
                    continue
                if entry.is_symlink():
                    links.append(path)
                if not entry.is_dir(follow_symlinks=False):
                    files.append(path)
                elif not is_in_runs_folder(entry.path, root):
                    folders.append(path)
                    waiting.append(f"{path}/")
    return Tree(root, sorted(files), sorted(folders), sorted(links))


def open_image_folder(tree: Tree) -> dict[str, Dataset]:
    """The images of a folder by split; only `train`, where there is one folder per class.

    The topmost folder is the class, however deep its images lie, and it is a class even without an image. A folder
    that only holds them all is passed over, as archives unpack: birds/birds/finch, train/images/finch.
    """
    images = tree.images()
    below: dict[str, list[str]] = defaultdict(list)
    for place in tree.folders:
        below[place.rpartition("/")[0]].append(place)
    if not below or not images:
        raise LiVTError(
            f"{tree.root} holds no folders with images, no parquet, arrow or tar files and no image lists; a table of "
            "labels is passed by its own name, such as labels.csv."
        )
    _check_entries(tree)
    hold_images = {image.rpartition("/")[0] for image in images}

    def unpacked(place: str) -> str:
        if len(below[place]) == 1:
            (alone,) = below[place]
            if below[alone] and not hold_images & {place, alone}:
                return unpacked(alone)
        return place

    top = unpacked("")
    named = named_folders([place.rpartition("/")[2] for place in below[top]])
    depth = _depth(top)  # of the folders of splits, or of classes
    train = next((place for place in below[top] if named.get(place.rpartition("/")[2]) == "train"), None)
    level = depth + 1 if train is None else _depth(unpacked(train))  # of the classes of splits
    parts = [place.split("/") for place in tree.folders]
    splits = {own[depth]: named[own[depth]] for own in parts if len(own) == level + 1 and own[depth] in named}
    if train and "train" not in splits.values() and len(set(named.values())) > 1:
        raise LiVTError(
            f"{os.path.join(tree.root, train)} has no class folders: put each class into a folder of its own, "
            "or pass the table of labels by its own name, such as labels.csv."
        )
    inside = [own for own in parts if len(own) == depth + 2 and own[-1].lower() in SPLIT_OF_WORD and not splits]
    if inside:
        place = os.path.join(tree.root, *inside[0])
        raise LiVTError(f"{place} lies below a class: put the class folders below the splits.")
    return _by_class(tree, images, splits, depth, level if splits else depth)


def _depth(place: str) -> int:
    """How many folders lie above those in a folder."""
    return len(place.split("/")) if place else 0


def _by_class(tree: Tree, images: list[str], splits: dict[str, str], depth: int, level: int) -> dict[str, Dataset]:
    """Datasets of paths: part `level` of a path is its class and, where there are splits, part `depth` names one."""
    parted = [place.split("/") for place in tree.folders]
    named = [parts[level] for parts in parted if len(parts) > level and (not splits or parts[depth] in splits)]
    names = sorted(set(map(plain_name, named)))
    id_of = {name: number for number, name in enumerate(names)}
    around = images[0].split("/")[:depth][-1:]  # of no splits: a lone folder around the classes may be called test
    alone = next(iter(named_folders(around).values()), "train")
    paths, labels, split_of, outside = [], [], [], []
    for image in images:
        parts = image.split("/", level + 1)
        if len(parts) < level + 2:
            outside.append(image)
            continue
        if splits and parts[depth] not in splits:
            raise LiVTError(
                f"{os.path.join(tree.root, *parts[: depth + 1])} names no split, but {next(iter(splits))} does: call "
                "it train, val or test, or move it."
            )
        paths.append(os.path.join(tree.root, image))
        labels.append(id_of[plain_name(parts[level])])
        split_of.append(splits.get(parts[depth], alone))
    if outside:
        logger.warning("left out %d images that lie in no class folder, such as %s", len(outside), outside[0])
    found = datasets_of_paths(paths, Labels(np.array(labels, dtype=np.int64)), names, np.array(split_of))
    refuse_empty_splits(dict.fromkeys(splits.values() or [alone], ()) | found)
    return found


def _check_entries(tree: Tree) -> None:
    """Refuse names and links that are not followed, and say which files are no images."""
    for path in (*tree.folders, *tree.files):
        try:
            path.encode()
        except UnicodeEncodeError as error:  # of old archives; neither tables nor terminals take such a name
            raise LiVTError(f"{os.path.join(tree.root, path)!r} is not named in UTF-8: rename it.") from error
    real_root = os.path.realpath(tree.root)
    for link in tree.links:
        target = os.path.realpath(os.path.join(tree.root, link))
        if os.path.isdir(target) or not Path(target).is_relative_to(real_root):
            raise LiVTError(
                f"{os.path.join(tree.root, link)} is a link to {target}: links to folders and links that leave the "
                "image folder are not followed, so copy the images or name them in a table."
            )
    others = Counter(os.path.splitext(file)[1].lower() for file in tree.files if "/" in file)
    for suffix in image_suffixes():
        del others[suffix]
    if others:
        counted = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in others.most_common())
        logger.warning("left out files in %s that are not images Pillow opens: %s", tree.root, counted)
