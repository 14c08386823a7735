"""What is made of the splits that a dataset comes with: parts set aside to test and to validate, long tails, folds."""

import itertools
import logging

import numpy as np
from datasets import Dataset, DatasetDict, IterableDatasetDict, concatenate_datasets

from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.folds import keep_trained
from livt_hf.data.labels import (
    class_counts,
    class_feature,
    first_names,
    group_codes,
    is_multi_label,
    labels_of,
    number_of_classes,
)
from livt_hf.data.splits import counts_by_rule, grouped_split, long_tail_indices, stratified_split
from livt_hf.errors import LiVTError
from livt_hf.settings import DataSettings

logger = logging.getLogger(__name__)

# A set of own images below this size is not divided further without being asked.
ENOUGH_TO_HOLD_OUT = 500
CARVED = "set aside from the training data"


def pooled(splits: dict[str, Dataset]) -> Dataset:
    """What folds divide: all labelled images but those of a test split, which stays unseen."""
    if "test" in splits:
        logger.warning("the %d images of the test split are in no fold", len(splits["test"]))
    parts = [splits[split] for split in ("train", "validation") if split in splits]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def carved(train: Dataset, rows: np.ndarray, split: str, split_rows: np.ndarray) -> dict[str, Dataset]:
    """The training split in two parts, of which the second is marked as not the dataset's own."""
    parts = {"train": train.select(rows), split: train.select(split_rows)}
    parts[split].info.description = CARVED
    return parts


def carved_test(splits: dict[str, Dataset], settings: DataSettings) -> dict[str, Dataset]:
    """The training split in two parts: one to train on, one to test on."""
    train = splits["train"]
    rows, test_rows = _divided(train, "test", settings.test_fraction, settings)
    if not len(test_rows):
        raise _nothing_aside(train, "test", settings.test_fraction, settings)
    parts = carved(train, rows, "test", test_rows)
    rename = ", or call the validation split so" if "validation" in splits else ""
    logger.warning(
        "there is no test split, so %d of %d training images are set aside as one; to choose them yourself, add a "
        "split called test%s",
        *(len(test_rows), len(train), rename),
    )
    absent = np.flatnonzero((class_counts(parts["test"]) == 0) & (class_counts(train) > 0))
    if len(absent):
        names = [class_feature(train).names[c] for c in absent]
        few = "have too few groups" if settings.group_column else "are too small"
        logger.warning("classes that %s to give a test image: %s", few, first_names(names))
    return parts


def held_out(train: Dataset, settings: DataSettings, trained: int) -> dict[str, Dataset]:
    """The training split with a part of it as validation split, where that is asked for or sensible."""
    fraction = settings.validation_fraction
    if fraction is None:
        fraction = 0.0 if settings.dataset in PUBLIC or trained < ENOUGH_TO_HOLD_OUT else 0.1
    if fraction == 0:
        return {}
    rows, held_rows = _divided(train, "validation", fraction, settings)
    if not len(held_rows):
        if settings.validation_fraction is None:
            return {}
        raise _nothing_aside(train, "validation", fraction, settings)
    if settings.stage not in ("eval", "calibrate"):  # of a training that is over, nobody needs to be told
        logger.info(
            "%d of %d training images are held out as validation split, to calibrate; --validation_fraction 0 keeps "
            "them",
            *(len(held_rows), len(train)),
        )
    return carved(train, rows, "validation", held_rows)


def _divided(train: Dataset, split: str, fraction: float, settings: DataSettings) -> tuple[np.ndarray, np.ndarray]:
    """Rows to keep and rows of a new split: no group in both, and each class divided alike as far as possible."""
    if not 0 < fraction < 1:
        raise LiVTError(f"{split}_fraction is {fraction}, but it must lie between 0 and 1, such as 0.2.")
    labels, seed, number = labels_of(train), settings.split_seed, number_of_classes(train)
    strata, groups = labels.rarest(number), np.arange(len(train))
    if settings.group_column is not None:
        groups = group_codes(train)
        _, aside = grouped_split(strata, groups, fraction, seed)
    else:
        _, aside = stratified_split(strata, fraction, seed)
    fold = np.full(len(train), -1)
    fold[aside] = 0
    keep_trained(fold, labels, groups, number)
    return np.flatnonzero(fold < 0), np.flatnonzero(fold == 0)


def _nothing_aside(train: Dataset, split: str, fraction: float, settings: DataSettings) -> LiVTError:
    grouped = settings.group_column is not None
    what = f"{len(np.unique(group_codes(train)))} groups" if grouped else f"{len(train)} images"
    return LiVTError(
        f"{split}_fraction {fraction} of {what} in {number_of_classes(train)} classes sets none aside, as each class "
        f"keeps one to train on: pass a larger one{', another group column' * grouped} or a split called {split}."
    )


def warn_of_shared_groups(splits: dict[str, Dataset]) -> None:
    """Splits that the dataset came with stay as they are, also where they divide a group."""
    groups = {split: set(labels_of(part, "group").values.tolist()) for split, part in splits.items()}
    for first, second in itertools.combinations(groups, 2):
        shared = sorted(groups[first] & groups[second])
        if shared:
            logger.warning("%d groups are both in %s and in %s, such as %s", len(shared), first, second, shared[0])


def is_carved(data: DatasetDict | IterableDatasetDict, split: str) -> bool:
    """Whether a split is not the dataset's own: set aside from the training images, or a fold of them."""
    return split in data and data[split].info.description == CARVED


def thinned(train: Dataset, settings: DataSettings) -> Dataset:
    """Pick the training images that the rule asks for."""
    if is_multi_label(train):
        raise LiVTError(
            "a rule needs one label per image, but this dataset has several: drop rule and imbalance_factor."
        )
    refuse_empty_classes(train)
    names = ("rule", "imbalance_factor", "images_per_class", "cap")
    counts = counts_by_rule(class_counts(train), **{name: getattr(settings, name) for name in names})
    return train.select(long_tail_indices(labels_of(train).values, counts, settings.split_seed, settings.cap))


def refuse_single_class(train: Dataset) -> None:
    """Refuse to train a classifier of one class; with several labels, one class is a question of its own."""
    names = class_feature(train).names
    if len(names) < 2 and not is_multi_label(train):
        raise LiVTError(f"all images are of one class, {', '.join(names)}; a classifier needs images of another too.")


def refuse_empty_classes(train: Dataset) -> None:
    empty = np.flatnonzero(class_counts(train) == 0)
    if len(empty):
        names = [class_feature(train).names[c] for c in empty[:5]]
        number = "1 class has" if len(empty) == 1 else f"{len(empty)} classes have"
        raise LiVTError(
            f"{number} no training image, so the prior is undefined (such as {', '.join(names)}): "
            "pass --drop_empty (in Python drop_empty=True) to remove them, or other counts."
        )
