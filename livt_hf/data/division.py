"""What is made of the splits that a dataset comes with: parts set aside to test and to validate, long tails, folds."""

import itertools
import logging

import numpy as np
from datasets import Dataset, DatasetDict, IterableDatasetDict, concatenate_datasets

from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.labels import (
    Labels,
    class_counts,
    class_feature,
    first_names,
    group_codes,
    is_multi_label,
    labels_of,
    number_of_classes,
)
from livt_hf.data.splits import (
    counts_by_rule,
    grouped_split,
    lone_groups,
    long_tail_indices,
    stratified_folds,
    stratified_split,
)
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
    parts = _divided(train, "test", settings.test_fraction, settings.split_seed)
    rename = ", or call the validation split so" if "validation" in splits else ""
    logger.warning(
        "there is no test split, so %d of %d training images are set aside as one; to choose them yourself, add a "
        "split called test%s",
        *(len(parts["test"]), len(train), rename),
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
    asked = settings.validation_fraction is not None
    parts = _divided(train, "validation", fraction, settings.split_seed, asked)
    if parts and settings.stage not in ("eval", "calibrate"):  # of a training that is over, nobody needs to be told
        logger.info(
            "%d of %d training images are held out as validation split, to calibrate; --validation_fraction 0 keeps "
            "them",
            *(len(parts["validation"]), len(train)),
        )
    return parts


def _divided(train: Dataset, split: str, fraction: float, seed: int, asked: bool = True) -> dict[str, Dataset]:
    """The training split and a part of it: no group in both, and each class divided alike as far as possible.

    Where no class can spare an image, that is refused or, if nobody asked for a part, there are none.
    """
    if not 0 < fraction < 1:
        raise LiVTError(f"{split}_fraction is {fraction}, but it must lie between 0 and 1, such as 0.2.")
    labels, strata, groups = _to_divide(train)
    grouped = "group" in train.column_names
    _, aside = grouped_split(strata, groups, fraction, seed) if grouped else stratified_split(strata, fraction, seed)
    fold = np.full(len(train), -1)
    fold[aside] = 0
    _keep_trained(fold, labels, groups)
    if (fold == 0).any():
        return carved(train, np.flatnonzero(fold < 0), split, np.flatnonzero(fold == 0))
    if not asked:
        return {}
    what = f"{len(np.unique(groups))} {'groups' if grouped else 'images'}"
    raise LiVTError(
        f"{split}_fraction {fraction} of {what} in {number_of_classes(train)} classes sets none aside, as each class "
        f"keeps one to train on: pass a larger one{', another group column' * grouped} or a split called {split}."
    )


def _to_divide(dataset: Dataset) -> tuple[Labels, np.ndarray, np.ndarray]:
    """The labels of all images, the class of each to stratify by, and their groups: without any, each is its own."""
    labels = labels_of(dataset)
    groups = group_codes(dataset) if "group" in dataset.column_names else np.arange(len(dataset))
    return labels, labels.rarest(number_of_classes(dataset)), groups


def test_folds(dataset: Dataset, folds: int, seed: int = 0) -> np.ndarray:
    """The fold (0 .. folds - 1) in which each image is tested; -1 is none, because every fold must train on it. (N,)

    No group is in two folds, each class is spread as evenly as that allows, and every fold trains on every class.
    What that means for rare classes is said.
    """
    (labels, strata, groups), grouped = _to_divide(dataset), "group" in dataset.column_names
    fold = np.full(len(dataset), -1)
    free = np.flatnonzero(~np.isin(groups, lone_groups(labels.values, groups[labels.images])))
    most = min(len(np.unique(groups[free])), np.bincount(strata[free], minlength=1).max())
    if folds > most:
        what = "groups" if grouped else "images"
        raise LiVTError(
            f"{folds} folds need {folds} {what} of the largest class that can be spared in training, but there are "
            f"{most}; use fewer folds" + (" or another group column." if grouped else ".")
        )
    fold[free] = stratified_folds(strata[free], groups[free] if grouped else None, folds, seed)
    _keep_trained(fold, labels, groups)
    _say_rare(fold, labels, class_feature(dataset).names, "group" if grouped else "image")
    return fold


def _keep_trained(fold: np.ndarray, labels: Labels, groups: np.ndarray) -> None:
    """Where all images of a class came to one fold, which then could not train on it, a group of them leaves it."""
    number = labels.values.max(initial=-1) + 1
    lowest, highest = np.full(number, np.iinfo(np.int64).max), np.full(number, -1)
    np.minimum.at(lowest, labels.values, fold[labels.images])
    np.maximum.at(highest, labels.values, fold[labels.images])
    for label in np.flatnonzero((lowest == highest) & (lowest >= 0)):
        rows = labels.images[labels.values == label]
        if (fold[rows] >= 0).all():
            fold[groups == groups[rows[0]]] = -1


def _say_rare(fold: np.ndarray, labels: Labels, names: list[str], unit: str) -> None:
    """Name the classes that not every fold tests."""
    folds, where = fold.max() + 1, fold[labels.images]
    pairs = np.unique(labels.values[where >= 0] * folds + where[where >= 0])  # class and fold
    tested = np.bincount(pairs // folds, minlength=len(names))
    counts = np.bincount(labels.values, minlength=len(names))
    never = [f"{names[c]} ({counts[c]})" for c in np.flatnonzero(tested == 0)]
    partly = [f"{names[c]} (in {tested[c]})" for c in np.flatnonzero((tested > 0) & (tested < folds))]
    if never:
        logger.warning(
            "classes that are trained on in every fold and never tested, for each depends on one %s (images in "
            "brackets): %s",
            *(unit, first_names(never)),
        )
    if partly:
        logger.warning("classes with too few %ss to be tested in every fold: %s", unit, first_names(partly))
    if never and (fold < 0).any():
        logger.warning("%d of %d images are tested, each once", (fold >= 0).sum(), len(fold))


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
