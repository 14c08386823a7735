"""Image folders: one folder per class, or one such folder per split."""

import logging
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import normalize_name
from livt_hf.data.readers.image_table import ImageTable, tables_of_files
from livt_hf.data.readers.split_names import SPLIT_OF_WORD, check_not_empty, match_split_folders
from livt_hf.errors import LiVTError
from livt_hf.files import is_hidden
from livt_hf.runs import is_in_runs_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileTree:
    """What lies below a folder, as sorted paths from there with slashes, without hidden files and runs."""

    root: str
    files: list[str]
    folders: list[str]
    links: list[str]  # those of the files that are links

    def files_ending(self, *suffixes: str) -> list[str]:
        """Return the files with one of these suffixes, whatever its case."""
        return [file for file in self.files if os.path.splitext(file)[1].lower() in suffixes]

    def images(self) -> list[str]:
        """Return the files that are named like images."""
        return self.files_ending(*image_suffixes())


def scan_folder(folder: Path) -> FileTree:
    """List a folder once. A link to a folder is a file, which is not followed."""
    root, files, folders, links, pending = os.path.abspath(folder), [], [], [], [""]
    while pending:
        parent = pending.pop()
        with os.scandir(os.path.join(root, parent)) as entries:
            for entry in entries:
                path = f"{parent}{entry.name}"
                if is_hidden(entry.name):
                    continue
                if entry.is_symlink():
                    links.append(path)
                if not entry.is_dir(follow_symlinks=False):
                    files.append(path)
                elif not is_in_runs_folder(entry.path, root):
                    folders.append(path)
                    pending.append(f"{path}/")
    return FileTree(root, sorted(files), sorted(folders), sorted(links))


def read_folder(tree: FileTree) -> dict[str, ImageTable]:
    """Return the images of a folder by split; only `train`, where there is one folder per class.

    The topmost folder is the class, however deep its images lie, and it is a class even without an image. A folder
    that only holds them all is passed over, as archives unpack: birds/birds/finch, train/images/finch.
    """
    images = tree.images()
    below: dict[str, list[str]] = defaultdict(list)
    for folder in tree.folders:
        below[folder.rpartition("/")[0]].append(folder)
    if images and all("/" not in image for image in images):
        raise LiVTError(
            f"{tree.root} holds {len(images):,} images but no class folders: put the images of each class into a "
            "folder that is called like the class, or pass a table of file names and labels, such as labels.csv.",
            "dataset",
        )
    if not below or not images:
        raise LiVTError(
            f"{tree.root} holds no folders with images, no parquet, arrow or tar files and no image lists; a table of "
            "labels is passed by its own name, such as labels.csv.",
            "dataset",
        )
    _check_entries(tree)
    have_images = {image.rpartition("/")[0] for image in images}

    def skip_wrappers(folder: str) -> str:
        if len(below[folder]) == 1:
            (only,) = below[folder]
            if below[only] and not have_images & {folder, only}:
                return skip_wrappers(only)
        return folder

    top = skip_wrappers("")
    split_of = match_split_folders([folder.rpartition("/")[2] for folder in below[top]])
    depth = _depth(top)  # of the folders of splits, or of classes
    train = next((folder for folder in below[top] if split_of.get(folder.rpartition("/")[2]) == "train"), None)
    class_depth = depth + 1 if train is None else _depth(skip_wrappers(train))
    folders = [folder.split("/") for folder in tree.folders]
    splits = {
        parts[depth]: split_of[parts[depth]]
        for parts in folders
        if len(parts) == class_depth + 1 and parts[depth] in split_of
    }
    if train and "train" not in splits.values() and len(set(split_of.values())) > 1:
        raise LiVTError(
            f"{os.path.join(tree.root, train)} has no class folders: put each class into a folder of its own, "
            "or pass the table of labels by its own name, such as labels.csv.",
            "dataset",
        )
    if not splits:
        class_depth = depth
        for parts in folders:
            if len(parts) == depth + 2 and parts[-1].lower() in SPLIT_OF_WORD:
                folder = os.path.join(tree.root, *parts)
                raise LiVTError(f"{folder} lies below a class: put the class folders below the splits.", "dataset")
    return _tables_by_class(tree, images, splits, depth, class_depth)


def _depth(folder: str) -> int:
    """Return how many folders lie above the entries of a folder."""
    return len(folder.split("/")) if folder else 0


def _tables_by_class(
    tree: FileTree, images: list[str], splits: dict[str, str], depth: int, class_depth: int
) -> dict[str, ImageTable]:
    """Return the images by split. Part `class_depth` of a path is the class, part `depth` the folder of the split."""
    folders = [folder.split("/") for folder in tree.folders]
    classes = [
        parts[class_depth] for parts in folders if len(parts) > class_depth and (not splits or parts[depth] in splits)
    ]
    wrapper = images[0].split("/")[:depth][-1:]  # without splits, a lone folder around the classes may be called test
    only_split = next(iter(match_split_folders(wrapper).values()), "train")
    files, labels, split_of, outside = [], [], [], []
    for image in images:
        parts = image.split("/", class_depth + 1)
        if len(parts) < class_depth + 2:
            outside.append(image)
            continue
        if splits and parts[depth] not in splits:
            raise LiVTError(
                f"{os.path.join(tree.root, *parts[: depth + 1])} names no split, but {next(iter(splits))} does: call "
                "it train, val or test, or move it.",
                "dataset",
            )
        files.append(os.path.join(tree.root, image))
        labels.append(normalize_name(parts[class_depth]))
        split_of.append(splits.get(parts[depth], only_split))
    if outside:
        logger.warning("left out %d images that lie in no class folder, such as %s", len(outside), outside[0])
    columns = pa.table({"label": pa.array(labels, pa.string())})
    tables = tables_of_files(files, columns, np.array(split_of), sorted(set(map(normalize_name, classes))))
    check_not_empty(dict.fromkeys(splits.values() or [only_split], ()) | tables)
    return tables


def _check_entries(tree: FileTree) -> None:
    """Raise an error for names and links that cannot be followed, and warn about files that are no images."""
    for path in (*tree.folders, *tree.files):
        try:
            path.encode()
        except UnicodeEncodeError as error:  # of old archives; neither tables nor terminals take such a name
            raise LiVTError(
                f"{os.path.join(tree.root, path)!r} is not named in UTF-8: rename it.", "dataset"
            ) from error
    real_root = os.path.realpath(tree.root)
    for link in tree.links:
        target = os.path.realpath(os.path.join(tree.root, link))
        if os.path.isdir(target) or not Path(target).is_relative_to(real_root):
            raise LiVTError(
                f"{os.path.join(tree.root, link)} is a link to {target}: links to folders and links that leave the "
                "image folder are not followed, so copy the images or name them in a table.",
                "dataset",
            )
    others = Counter(os.path.splitext(file)[1].lower() for file in tree.files if "/" in file)
    for suffix in image_suffixes():
        del others[suffix]
    if others:
        counts = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in others.most_common())
        logger.warning("left out files in %s that are not images Pillow opens: %s", tree.root, counts)
