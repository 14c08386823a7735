"""Splits of a dataset: test, validation and folds, stratified by class, never through a group."""

import itertools
import logging
import warnings
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from datasets import Dataset, DatasetDict

from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.labels import (
    Labels,
    class_counts,
    class_feature,
    format_class_names,
    group_codes,
    labels_of,
    number_of_classes,
)
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

MIN_IMAGES_TO_SPLIT = 500  # of own images; fewer are not split further unless that is asked for
FINEST = 25  # parts that a fraction of groups is made of; as many folds take seconds
MAX_BUNDLES = 2000  # of groups that are divided one by one: scikit-learn needs half a millisecond for each
LEGACY_MARK = "set aside from the training data"  # how version 0.2 marked a split, in `DatasetInfo.description`


class SplitDatasetDict(DatasetDict):
    """A `DatasetDict` with `made_splits`, the names of the splits that were made here and not by the dataset.

    `shot_counts` are the training images of each class before these were made.
    """

    made_splits: frozenset[str] = frozenset()
    shot_counts: np.ndarray | None = None


def is_made_split(data: Mapping[str, Dataset], split: str) -> bool:
    """Return True if a split is not the dataset's own: split off the training images, or a fold of them."""
    if split not in data:
        return False
    return split in getattr(data, "made_splits", ()) or data[split].info.description == LEGACY_MARK


def shot_counts(data: Mapping[str, Dataset]) -> np.ndarray:
    """Return the images of each class that shot groups go by: of training, before any split or fold was held out."""
    counts = getattr(data, "shot_counts", None)
    return class_counts(data["train"]) if counts is None else counts


# Arrays


def stratified_split(labels: np.ndarray, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to keep and the rows to split off, the fraction of each class; one image of a class is kept."""
    labels = np.asarray(labels)
    order = np.lexsort((np.random.RandomState(seed).rand(len(labels)), labels))
    available = np.bincount(labels)
    num_split = np.minimum(np.rint(available * fraction).astype(np.int64), np.maximum(available - 1, 0))
    starts = np.cumsum(available) - available
    position_in_class = np.arange(len(labels)) - np.repeat(starts, available)
    is_split = np.zeros(len(labels), dtype=bool)
    is_split[order] = position_in_class < np.repeat(num_split, available)
    return np.flatnonzero(~is_split), np.flatnonzero(is_split)


def grouped_split(
    labels: np.ndarray, groups: np.ndarray, fraction: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to keep and the rows to split off: no group is in both, each class is divided evenly.

    The fraction is met as nearly as the number of groups allows. A group that alone has images of a class is kept.
    """
    labels, groups = (np.unique(values, return_inverse=True)[1] for values in (labels, groups))
    free = np.flatnonzero(~np.isin(groups, lone_groups(labels, groups)))
    fold = np.full(len(labels), -1)
    if _max_folds(labels[free], groups[free]) >= 2:
        fold[free] = _fraction_of_groups(labels[free], groups[free], fraction, seed) - 1  # the fold 0 is split off
    _keep_classes_in_training(fold, Labels(labels), groups)
    return np.flatnonzero(fold < 0), np.flatnonzero(fold == 0)


def _max_folds(labels: np.ndarray, groups: np.ndarray) -> int:
    return min(FINEST, len(np.unique(groups)), int(np.bincount(labels, minlength=1).max()))


def _fraction_of_groups(labels: np.ndarray, groups: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return which rows are a fraction of them, by whole groups. Below the finest fraction, a fold is split again."""
    most = _max_folds(labels, groups)
    share = Fraction(fraction).limit_denominator(FINEST)
    if not 1 < share.denominator <= most:  # few groups, or a very small or large fraction
        share = Fraction(min(max(round(fraction * most), 1), most - 1), most)
    fold = stratified_folds(labels, groups, share.denominator, seed)
    # Few groups have one best division: then the seed chooses among its folds.
    chosen = (fold + seed) % share.denominator < share.numerator
    rows = np.flatnonzero(chosen)
    if fraction < 1 / FINEST and _max_folds(labels[rows], groups[rows]) >= 2:
        chosen[rows] = _fraction_of_groups(labels[rows], groups[rows], fraction / float(share), seed)
    return chosen


def lone_groups(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the groups that alone have images of some class, and so cannot leave the training set."""
    label_of, group_of = np.divmod(np.unique(labels * (groups.max() + 1) + groups), groups.max() + 1)
    return np.unique(group_of[np.bincount(label_of)[label_of] == 1])


def stratified_folds(labels: np.ndarray, groups: np.ndarray | None, folds: int, seed: int = 0) -> np.ndarray:
    """Return the fold of each row (0 .. folds - 1): no group is in two folds, each class is spread evenly."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # imports scipy

    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    if groups is not None:  # of very many groups, several are divided together
        codes = np.unique(groups, return_inverse=True)[1]
        groups = np.random.RandomState(seed).permutation(codes.max() + 1)[codes] % MAX_BUNDLES
    splits = kind(folds, shuffle=True, random_state=seed).split(labels, labels, groups)
    fold = np.full(len(labels), folds - 1)  # what is in no other fold is in the last
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class")
        warnings.filterwarnings("ignore", "The groups parameter is ignored")
        for number, (_, rows) in zip(range(folds - 1), splits, strict=False):
            fold[rows] = number
    return fold


# Datasets


def split_off(train: Dataset, is_split: np.ndarray, name: str) -> dict[str, Dataset]:
    """Return the training split without some images, and these images as the split `name`."""
    return {"train": train.select(np.flatnonzero(~is_split)), name: train.select(np.flatnonzero(is_split))}


def split_test(splits: dict[str, Dataset], spec: DataSpec) -> dict[str, Dataset]:
    """Split a test set off the training split, for a dataset that has none."""
    train = splits["train"]
    parts = split_off(train, _choose_fraction(train, "test", spec.test_fraction, spec.split_seed), "test")
    rename = ", or rename the validation split to test" if "validation" in splits else ""
    logger.warning(
        "there is no test split, so %d of %d training images are held out as one; to choose them yourself, add a "
        "split called test%s",
        *(len(parts["test"]), len(train), rename),
    )
    absent = np.flatnonzero((class_counts(parts["test"]) == 0) & (class_counts(train) > 0))
    if len(absent):
        names, reason = [class_feature(train).names[c] for c in absent], "are too small to give a test image"
        if "group" in train.column_names:
            reason = "have no test image, because all their groups, perhaps only one, are in training"
        logger.warning("classes that %s: %s", reason, format_class_names(names))
    return parts


def split_validation(train: Dataset, spec: DataSpec, num_images: int) -> dict[str, Dataset]:
    """Split a validation set off the training split, if the spec asks for one or there are images to spare.

    `num_images` is the size by which that is decided, alike for all folds. Without a validation set, returns nothing.
    """
    chosen = choose_validation(train, spec, num_images)
    return {} if chosen is None else split_off(train, chosen, "validation")


def choose_validation(train: Dataset, spec: DataSpec, num_images: int) -> np.ndarray | None:
    """Return which training images `split_validation` splits off. (N,)"""
    fraction = spec.validation_fraction
    if fraction is None:
        fraction = 0.0 if spec.dataset in PUBLIC or num_images < MIN_IMAGES_TO_SPLIT else 0.1
    if fraction == 0:
        return None
    is_required = spec.validation_fraction is not None
    return _choose_fraction(train, "validation", fraction, spec.split_seed, is_required)


def _choose_fraction(
    train: Dataset, name: str, fraction: float, seed: int, is_required: bool = True
) -> np.ndarray | None:
    """Choose a fraction of each class, by whole groups. If no class can spare an image: an error, or None."""
    argument = f"{name}_fraction"
    if not 0 < fraction < 1:
        raise LiVTError(f"{argument} is {fraction}, but it must lie between 0 and 1, such as 0.2.", argument)
    labels, strata, groups = _labels_strata_groups(train)
    has_groups = "group" in train.column_names
    split = grouped_split(strata, groups, fraction, seed) if has_groups else stratified_split(strata, fraction, seed)
    fold = np.full(len(train), -1)
    fold[split[1]] = 0
    _keep_classes_in_training(fold, labels, groups)
    if (fold == 0).any():
        return fold == 0
    if not is_required:
        return None
    units = f"{len(np.unique(groups))} {'groups' if has_groups else 'images'}"
    raise LiVTError(
        f"{argument} {fraction} of {units} in {number_of_classes(train)} classes holds out none, as each class keeps "
        f"one to train on: pass a larger one{', other groups' * has_groups} or a split called {name}.",
        argument,
    )


def _labels_strata_groups(dataset: Dataset) -> tuple[Labels, np.ndarray, np.ndarray]:
    """Return the labels, the class of each image to stratify by, and its group: its own where there are none."""
    labels = labels_of(dataset)
    groups = group_codes(dataset) if "group" in dataset.column_names else np.arange(len(dataset))
    return labels, labels.rarest(number_of_classes(dataset)), groups


def assign_folds(dataset: Dataset, folds: int, seed: int = 0) -> np.ndarray:
    """Return the fold (0 .. folds - 1) that tests each image, or -1 for images that every fold must train on.

    No group is in two folds, each class is spread as evenly as that allows, and every fold trains on every class.
    Classes that are too rare for that are logged.
    """
    (labels, strata, groups), has_groups = _labels_strata_groups(dataset), "group" in dataset.column_names
    fold = np.full(len(dataset), -1)
    free = np.flatnonzero(~np.isin(groups, lone_groups(labels.values, groups[labels.images])))
    most = min(len(np.unique(groups[free])), np.bincount(strata[free], minlength=1).max())
    if folds > most:
        unit = "groups" if has_groups else "images"
        raise LiVTError(
            f"{folds} folds need {folds} {unit} of the largest class that can be spared in training, but there are "
            f"{most}; use fewer folds" + (" or other groups." if has_groups else "."),
            "folds",
        )
    fold[free] = stratified_folds(strata[free], groups[free] if has_groups else None, folds, seed)
    _keep_classes_in_training(fold, labels, groups)
    _warn_about_rare_classes(fold, labels, class_feature(dataset).names, "group" if has_groups else "image")
    return fold


def _keep_classes_in_training(fold: np.ndarray, labels: Labels, groups: np.ndarray) -> None:
    """Take a group out of a fold that has all images of a class and could not train on it, in place."""
    images, number = labels.images, labels.values.max(initial=-1) + 1
    lowest, highest = np.full(number, np.iinfo(np.int64).max), np.full(number, -1)
    np.minimum.at(lowest, labels.values, fold[images])
    np.maximum.at(highest, labels.values, fold[images])
    ends = np.cumsum(np.bincount(labels.values, minlength=number))
    groups_of = np.split(groups[images[np.argsort(labels.values, kind="stable")]], ends[:-1])
    is_kept = np.zeros(groups.max(initial=-1) + 1, dtype=bool)
    for label in np.flatnonzero((lowest == highest) & (lowest >= 0)):
        if not is_kept[groups_of[label]].any():
            is_kept[groups_of[label][0]] = True
    fold[is_kept[groups]] = -1


def _warn_about_rare_classes(fold: np.ndarray, labels: Labels, names: list[str], unit: str) -> None:
    folds, fold_of_label = fold.max() + 1, fold[labels.images]
    is_tested = fold_of_label >= 0
    pairs = np.unique(labels.values[is_tested] * folds + fold_of_label[is_tested])  # class and fold
    tested = np.bincount(pairs // folds, minlength=len(names))
    counts = np.bincount(labels.values, minlength=len(names))
    never = [f"{names[c]} ({counts[c]})" for c in np.flatnonzero(tested == 0)]
    partly = [f"{names[c]} (in {tested[c]})" for c in np.flatnonzero((tested > 0) & (tested < folds))]
    if never:
        logger.warning(
            "classes that are trained on in every fold and never tested, for each depends on one %s (images in "
            "brackets): %s",
            *(unit, format_class_names(never)),
        )
    if partly:
        logger.warning("classes whose %ss are not in every fold: %s", unit, format_class_names(partly))
    if never and (fold < 0).any():
        logger.warning("%d of %d images are tested, each once", (fold >= 0).sum(), len(fold))


def warn_about_shared_groups(splits: Mapping[str, Dataset]) -> None:
    """Warn about groups that are in two of a dataset's own splits, which stay as they are."""
    groups = {split: set(labels_of(part, "group").values.tolist()) for split, part in splits.items()}
    for first, second in itertools.combinations(groups, 2):
        shared = sorted(groups[first] & groups[second])
        if shared:
            logger.warning("%d groups are both in %s and in %s, such as %s", len(shared), first, second, shared[0])
