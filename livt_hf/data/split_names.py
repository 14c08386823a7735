"""How splits are named: those of a dataset, in a column, in the path of a file, by a folder."""

import logging
import re
from collections.abc import Mapping, Sized
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import IterableDataset
from datasets.data_files import SPLIT_KEYWORDS

from livt_hf.data.columns import as_text, telling_name
from livt_hf.data.labels import of_rows
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
SPLIT_OF_WORD = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
SPLIT_NAMES = ("split", "partition")
# Whole words only: "medieval" is no validation set. Digits may follow, as in val2017.
SPLIT_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(SPLIT_OF_WORD)})(?![^\W\d_])")
# train, val2017, test_images
SPLIT_FOLDER = re.compile(rf"({'|'.join(SPLIT_OF_WORD)})([\W_]*(images|set|data))?[\W_]*\d*", re.IGNORECASE)


def named_splits(splits: Mapping, where: str) -> dict:
    """The splits under the names train, validation and test; the only one there is trains."""
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}
    called: dict[str, list[str]] = {}
    for name in splits:
        called.setdefault(SPLIT_OF_WORD.get(name.lower(), name), []).append(name)
    if "train" not in called:
        raise LiVTError(f"{where} has no split called train, but {', '.join(splits)}: rename one.")
    for split, names in called.items():
        if len(names) > 1:
            raise LiVTError(f"{where} has the splits {' and '.join(names)}, which both mean {split}: rename one.")
    if unused := [name for name in called if name not in SPLITS]:
        logger.warning("splits of %s that are neither train, validation nor test: %s", where, ", ".join(unused))
    return {split: splits[called[split][0]] for split in SPLITS if split in called}


def refuse_empty_splits(splits: Mapping[str, Sized]) -> None:
    for split, dataset in splits.items():
        if not len(dataset):
            raise LiVTError(
                f'the split "{split}" has no image: add some to it, remove it, or leave out fewer (exclude_labels, '
                "min_images, on_broken)."
            )


def by_split(files: list[str], folder: Path) -> dict[str, list[str]]:
    """Files by the last word of their path below `folder` that names a split.

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
            "name, or move it elsewhere."
        )
    return splits | ({"train": unnamed} if unnamed else {})


def named_folders(folders: list[str]) -> dict[str, str]:
    """The split that folders name: train and test_images, or seg_train and seg_test, which differ by this word alone.

    "bullet train" and "test tube" are classes.
    """
    named = {
        folder: SPLIT_OF_WORD[match[1].lower()] for folder in folders if (match := SPLIT_FOLDER.fullmatch(folder))
    }
    if named:
        return named
    alike: dict[str, dict[str, str]] = {}
    for folder in folders:
        words = SPLIT_WORD.findall(folder.lower())
        if len(words) == 1:
            alike.setdefault(SPLIT_WORD.sub("", folder.lower()), {})[folder] = SPLIT_OF_WORD[words[0]]
    pairs = [own for own in alike.values() if "train" in own.values() and len(set(own.values())) > 1]
    return pairs[0] if pairs else {}


def split_by_column(splits: dict, asked: str | None) -> dict:
    """Images that are stored in one piece, divided by a column that says train, val or test, where there is one."""
    train = splits["train"]
    column = telling_name(train.column_names or (), SPLIT_NAMES) if asked is None else asked
    if asked not in (None, "none"):
        if asked not in train.column_names:
            raise LiVTError(f'there is no split_column "{asked}"; the columns are {", ".join(train.column_names)}.')
        if len(splits) > 1:
            raise LiVTError(f"the images are stored as {', '.join(splits)}: leave --split_column {asked} out.")
    if column in (None, "none") or len(splits) > 1:
        return splits
    if isinstance(train, IterableDataset):
        raise LiVTError(
            f'a stream is not divided by its column "{column}": load it without streaming, or pass --split_column '
            "none to train on all of it."
        )
    words = read_splits(of_rows(train, train.data.column(column)), column)
    return {split: train.select(np.flatnonzero(words == split)) for split in np.unique(words).tolist()}


def read_splits(cells: pa.ChunkedArray, column: str) -> np.ndarray:
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
