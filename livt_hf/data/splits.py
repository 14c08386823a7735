"""Which images a long-tailed dataset is made of: counts per class, and the picks that follow from them.

Numpy only (groups need scikit-learn), and no Python loop over rows.
"""

import bisect
import math
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import numpy as np

from livt_hf.errors import LiVTError

FINEST = 25  # parts that a fraction of groups is made of; as many folds take seconds
MOST_BUNDLES = 2000  # of groups that are divided one by one: scikit-learn needs half a millisecond for each


def exponential_counts(num_classes: int, max_count: int, imbalance_factor: float) -> np.ndarray:
    """The CIFAR-LT rule: class i of C keeps int(max_count * gamma^(-i / (C - 1))) images."""
    _check_rule(num_classes, max_count, imbalance_factor)
    exponent = -np.arange(num_classes) / max(num_classes - 1, 1)
    exact = max_count * float(imbalance_factor) ** exponent
    return (exact + 1e-9).astype(np.int64)  # 49 * 49^-1 is a little less than 1


def pareto_counts(num_classes: int, max_count: int, imbalance_factor: float) -> np.ndarray:
    """Quantiles of a (Lomax) Pareto distribution with power 6, stretched from max_count / gamma to max_count.

    ImageNet-LT was drawn with this power between 5 and 1,280 images. This resembles that split (about 105,000 images
    instead of 115,846); it does not reproduce its list.
    """
    _check_rule(num_classes, max_count, imbalance_factor)
    survival = (np.arange(num_classes) + 0.5) / num_classes
    quantile = survival ** (-1 / 6)
    spread = max(quantile[0] - quantile[-1], np.finfo(float).tiny)
    low = max_count / imbalance_factor
    counts = low + (max_count - low) * (quantile - quantile[-1]) / spread
    counts[0] = max_count  # also when there is one class only
    return (counts + 1e-9).astype(np.int64)  # the ends are whole numbers up to rounding


def counts_by_rule(
    available: np.ndarray,
    rule: str | Sequence[int],
    imbalance_factor: float | None = None,
    images_per_class: int | None = None,
    cap: bool = False,
) -> np.ndarray:
    """What a rule leaves of classes with so many images: larger classes get larger counts, equal ones in label order.

    `rule` may also be the counts themselves. `images_per_class` is the count of the largest class. A class with fewer
    images than it should keep is an error unless `cap`.
    """
    if not isinstance(rule, str):
        if len(rule) != len(available):
            raise LiVTError(f"rule gives {len(rule)} counts for {len(available)} classes: pass one for each class.")
        return np.asarray(rule, dtype=np.int64)
    gamma = 1.0 if rule == "balanced" else imbalance_factor
    if gamma is None:
        raise LiVTError(f'the rule "{rule}" needs an imbalance_factor, such as 100.')
    # The exponential rule with a factor of 1 is the balanced one.
    make = partial(pareto_counts if rule == "pareto" else exponential_counts, len(available), imbalance_factor=gamma)
    largest = available.min() if rule == "balanced" else available.max()
    count = int(largest) if images_per_class is None else images_per_class
    counts = np.empty(len(available), dtype=np.int64)
    counts[np.argsort(-available, kind="stable")] = make(count)  # equal classes keep the order of their labels
    if not cap and (counts > available).any():
        fitting = largest_fitting(make, available, math.ceil(gamma), count)
        instead = f"pass --images_per_class {fitting} or less" if fitting else "pass a larger --imbalance_factor"
        raise _too_few(available, counts, f"{instead}, or --cap to take all images of such classes.")
    return counts


def _too_few(available: np.ndarray, asked: np.ndarray, way_out: str) -> LiVTError:
    short = np.flatnonzero(asked > available)
    first = f"class {short[0]} has {available[short[0]]}, asked {asked[short[0]]}"
    return LiVTError(f"{len(short)} classes have fewer images than asked ({first}): {way_out}")


def largest_fitting(rule: Callable[[int], np.ndarray], available: np.ndarray, smallest: int, largest: int) -> int:
    """The largest count from `smallest` to `largest` for which no class falls short of `rule(count)`; 0 if none is.

    `rule` gives counts from the largest class to the smallest, none of which falls when its argument grows.
    """
    by_size, counts = np.sort(available)[::-1], range(smallest, largest + 1)
    fitting = bisect.bisect_left(counts, True, key=lambda count: bool((rule(count) > by_size).any()))
    return counts[fitting - 1] if fitting else 0


def _check_rule(num_classes: int, max_count: int, imbalance_factor: float) -> None:
    if num_classes < 1:
        raise LiVTError(f"num_classes is {num_classes}, but a split needs at least one class.")
    if imbalance_factor < 1:
        raise LiVTError(
            f"imbalance_factor is {imbalance_factor}, but it is largest / smallest class: pass 1 or more, such as 100."
        )
    if max_count / imbalance_factor < 1 - 1e-9:
        raise LiVTError(
            f"imbalance_factor {imbalance_factor} leaves the smallest class without an image when the largest has "
            f"{max_count}: pass an imbalance_factor of at most {max_count}."
        )


def long_tail_indices(labels: np.ndarray, counts: Sequence[int], seed: int = 0, cap: bool = False) -> np.ndarray:
    """Row numbers of `counts[c]` images of each class c, in pick order: exactly the community's CIFAR-LT picks.

    That code seeds numpy's legacy generator, shuffles the rows of one class after another (in label order, rows in
    dataset order) and keeps the first ones. The picks of a smaller imbalance factor therefore contain those of a
    larger one. A class with fewer images than asked is an error, or gives all it has with `cap=True`.
    """
    labels, wanted = np.asarray(labels), np.asarray(counts, dtype=np.int64)
    available = label_counts(labels, len(wanted))
    if not cap and (wanted > available).any():
        raise _too_few(available, wanted, "lower the counts or pass cap=True to take all such a class has.")
    rows = np.argsort(labels.astype(np.min_scalar_type(len(counts))), kind="stable")  # 16-bit labels sort by radix
    ends = np.cumsum(available)
    generator = np.random.RandomState(seed)
    picks = []
    for start, end, count in zip(ends - available, ends, wanted, strict=True):
        of_class = rows[start:end]
        generator.shuffle(of_class)
        picks.append(of_class[:count])
    return np.concatenate(picks)


def label_counts(labels: np.ndarray, num_classes: int, rows: np.ndarray | None = None) -> np.ndarray:
    """Labels per class; one outside 0 .. num_classes - 1 is an error that names its row, by `rows` where given."""
    labels = np.asarray(labels)
    outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(outside):
        first, those = outside[0], outside if rows is None else np.unique(rows[outside])
        if (labels == -1).all():
            raise LiVTError("all labels are -1, which is how hidden ones are published: take images with labels.")
        raise LiVTError(
            f"row {those[0]} has label {labels[first]}, but there are {num_classes} classes (0 to {num_classes - 1}): "
            f"drop the {len(those)} rows with such labels or name more classes."
        )
    return np.bincount(labels, minlength=num_classes)


def stratified_split(labels: np.ndarray, test_fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and rows for test: the fraction of each class, but one image of a class stays in training."""
    labels = np.asarray(labels)
    order = np.lexsort((np.random.RandomState(seed).rand(len(labels)), labels))
    available = np.bincount(labels)
    num_test = np.minimum(np.rint(available * test_fraction).astype(np.int64), np.maximum(available - 1, 0))
    starts = np.cumsum(available) - available
    position_in_class = np.arange(len(labels)) - np.repeat(starts, available)
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[order] = position_in_class < np.repeat(num_test, available)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def grouped_split(
    labels: np.ndarray, groups: np.ndarray, test_fraction: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and rows for test: no group is in both, and each class is divided as evenly as that allows.

    The fraction is met as nearly as the number of groups allows. A group that alone has images of a class is trained
    on.
    """
    labels, groups = (np.unique(values, return_inverse=True)[1] for values in (labels, groups))
    free = np.flatnonzero(~np.isin(groups, lone_groups(labels, groups)))
    is_test = np.zeros(len(labels), dtype=bool)
    if _most_folds(labels[free], groups[free]) >= 2:
        is_test[free] = _share_of_groups(labels[free], groups[free], test_fraction, seed)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _most_folds(labels: np.ndarray, groups: np.ndarray) -> int:
    return min(FINEST, len(np.unique(groups)), int(np.bincount(labels, minlength=1).max()))


def _share_of_groups(labels: np.ndarray, groups: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Which rows are a fraction of them, by whole groups. Of a fraction below the finest, a fold is divided again."""
    most = _most_folds(labels, groups)
    share = Fraction(fraction).limit_denominator(FINEST)
    if not 1 < share.denominator <= most:  # few groups, or a very small or large fraction
        share = Fraction(min(max(round(fraction * most), 1), most - 1), most)
    fold = stratified_folds(labels, groups, share.denominator, seed)
    # Few groups have one best division: then the seed chooses among its folds.
    chosen = (fold + seed) % share.denominator < share.numerator
    rows = np.flatnonzero(chosen)
    if fraction < 1 / FINEST and _most_folds(labels[rows], groups[rows]) >= 2:
        chosen[rows] = _share_of_groups(labels[rows], groups[rows], fraction / float(share), seed)
    return chosen


def lone_groups(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The groups that alone have images of some class, which therefore cannot leave the training set."""
    label_of, group_of = np.divmod(np.unique(labels * (groups.max() + 1) + groups), groups.max() + 1)
    return np.unique(group_of[np.bincount(label_of)[label_of] == 1])


def stratified_folds(labels: np.ndarray, groups: np.ndarray | None, folds: int, seed: int = 0) -> np.ndarray:
    """The fold of each row (0 .. folds - 1): no group is in two folds, each class spread as evenly as that allows."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # imports scipy

    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    if groups is not None:  # of very many groups, several are divided together
        codes = np.unique(groups, return_inverse=True)[1]
        groups = np.random.RandomState(seed).permutation(codes.max() + 1)[codes] % MOST_BUNDLES
    splits = kind(folds, shuffle=True, random_state=seed).split(labels, labels, groups)
    fold = np.full(len(labels), folds - 1)  # what is in no other fold is in the last
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class")
        warnings.filterwarnings("ignore", "The groups parameter is ignored")
        for number, (_, rows) in zip(range(folds - 1), splits, strict=False):
            fold[rows] = number
    return fold
