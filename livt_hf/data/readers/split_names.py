"""Names of splits: those of a dataset, in a column, in the path of a file, of a folder."""

import logging
import re
from collections.abc import Mapping, Sized
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets.data_files import SPLIT_KEYWORDS

from livt_hf.data.readers.image_table import as_text
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
SPLIT_OF_WORD = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
SPLIT_COLUMN_NAMES = ("split", "partition")
# Whole words only: "medieval" is no validation set. Digits may follow, as in val2017.
SPLIT_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(SPLIT_OF_WORD)})(?![^\W\d_])")
# train, val2017, test_images
SPLIT_FOLDER = re.compile(rf"({'|'.join(SPLIT_OF_WORD)})([\W_]*(images|set|data))?[\W_]*\d*", re.IGNORECASE)


def rename_splits(splits: Mapping, source: str) -> dict:
    """Return the splits under the names train, validation and test; a single one is train."""
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}
    names_of: dict[str, list[str]] = {}
    for name in splits:
        names_of.setdefault(SPLIT_OF_WORD.get(name.lower(), name), []).append(name)
    if "train" not in names_of:
        raise LiVTError(f"{source} has no split called train, but {', '.join(splits)}: rename one.", "dataset")
    for split, names in names_of.items():
        if len(names) > 1:
            both = " and ".join(names)
            raise LiVTError(f"{source} has the splits {both}, which both mean {split}: rename one.", "dataset")
    if unused := [name for name in names_of if name not in SPLITS]:
        logger.warning("splits of %s that are neither train, validation nor test: %s", source, ", ".join(unused))
    return {split: splits[names_of[split][0]] for split in SPLITS if split in names_of}


def check_not_empty(splits: Mapping[str, Sized]) -> None:
    """Raise an error for a split without images."""
    for split, images in splits.items():
        if not len(images):
            raise LiVTError(
                f'the split "{split}" has no image: add some to it, remove it, or leave out fewer (exclude_labels, '
                "min_images, on_broken).",
                "dataset",
            )


def group_files_by_split(files: list[str], folder: Path) -> dict[str, list[str]]:
    """Group files by the last word of their path below `folder` that names a split.

    Where no file names the training split, those that name none are it.
    """
    splits: dict[str, list[str]] = {}
    unnamed = []
    for file in files:
        words = SPLIT_WORD.findall(Path(file).relative_to(folder).as_posix().lower())
        (splits.setdefault(SPLIT_OF_WORD[words[-1]], []) if words else unnamed).append(file)
    if unnamed and "train" in splits:
        raise LiVTError(
            f"{unnamed[0]} names no split, but {splits['train'][0]} does: put train, validation or test into its "
            "name, or move it elsewhere.",
            "dataset",
        )
    return splits | ({"train": unnamed} if unnamed else {})


def match_split_folders(folders: list[str]) -> dict[str, str]:
    """Return the split that folders name: train and test_images, or seg_train and seg_test, which differ by one word.

    "bullet train" and "test tube" are classes.
    """
    named = {
        folder: SPLIT_OF_WORD[match[1].lower()] for folder in folders if (match := SPLIT_FOLDER.fullmatch(folder))
    }
    if named:
        return named
    families: dict[str, dict[str, str]] = {}
    for folder in folders:
        words = SPLIT_WORD.findall(folder.lower())
        if len(words) == 1:
            families.setdefault(SPLIT_WORD.sub("", folder.lower()), {})[folder] = SPLIT_OF_WORD[words[0]]
    pairs = [family for family in families.values() if "train" in family.values() and len(set(family.values())) > 1]
    return pairs[0] if pairs else {}


def read_split_column(cells: pa.ChunkedArray, column: str) -> np.ndarray:
    """Return the split of each row."""
    texts = as_text(cells, column).dictionary_encode()
    words = texts.dictionary.to_pylist()
    unknown = [word for word in words if word.lower() not in SPLIT_OF_WORD]
    if unknown or texts.null_count:
        wrong = f'"{unknown[0]}"' if unknown else "an empty cell"
        raise LiVTError(
            f'the split column "{column}" has {wrong}: write train, val or test, or pass split_column none to ignore '
            "it.",
            "split_column",
        )
    return np.array([SPLIT_OF_WORD[word.lower()] for word in words])[texts.indices.to_numpy()]
