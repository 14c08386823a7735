"""Cross-validation: which images are tested in which fold."""

import logging

import numpy as np
from datasets import Dataset

from livt_hf.data.labels import Labels, class_feature, first_names, group_codes, labels_of, number_of_classes
from livt_hf.data.splits import lone_groups, stratified_folds
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)


def test_folds(dataset: Dataset, folds: int, seed: int = 0) -> np.ndarray:
    """The fold (0 .. folds - 1) in which each image is tested; -1 is none, because every fold must train on it. (N,)

    No group is in two folds, each class is spread as evenly as that allows, and every fold trains on every class.
    What that means for rare classes is said.
    """
    labels, number, grouped = labels_of(dataset), number_of_classes(dataset), "group" in dataset.column_names
    groups = group_codes(dataset) if grouped else np.arange(len(dataset))
    fold, strata = np.full(len(dataset), -1), labels.rarest(number)
    free = np.flatnonzero(~np.isin(groups, lone_groups(labels.values, groups[labels.images])))
    most = min(len(np.unique(groups[free])), np.bincount(strata[free], minlength=1).max())
    if folds > most:
        what = "groups" if grouped else "images"
        raise LiVTError(
            f"{folds} folds need {folds} {what} of the largest class that can be spared in training, but there are "
            f"{most}; use fewer folds" + (" or another group column." if grouped else ".")
        )
    fold[free] = stratified_folds(strata[free], groups[free] if grouped else None, folds, seed)
    keep_trained(fold, labels, groups, number)
    _say_rare(fold, labels, class_feature(dataset).names, "group" if grouped else "image")
    return fold


def keep_trained(fold: np.ndarray, labels: Labels, groups: np.ndarray, number: int) -> None:
    """Where all images of a class came to one fold, which then could not train on it, a group of them leaves it."""
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
