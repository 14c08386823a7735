"""Long-tailed subsets: images per class by a rule, and which images are picked. Numpy only, no loop over rows."""

import bisect
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from livt_hf.errors import LiVTError


def exponential_counts(num_classes: int, max_count: int, imbalance_factor: float) -> np.ndarray:
    """Return the class counts of the CIFAR-LT rule, int(max_count * imbalance_factor^(-i / (num_classes - 1))).

    Args:
        num_classes: number of classes C.
        max_count: images of the largest class.
        imbalance_factor: images of the largest class over those of the smallest, 1 or more.

    Returns:
        Images per class in descending order, an int64 array of shape (C,).

    Example:
        >>> exponential_counts(3, 100, 100).tolist()
        [100, 10, 1]
    """
    _check_rule(num_classes, max_count, imbalance_factor)
    exponent = -np.arange(num_classes) / max(num_classes - 1, 1)
    exact = max_count * float(imbalance_factor) ** exponent
    return (exact + 1e-9).astype(np.int64)  # 49 * 49^-1 is a little less than 1


def pareto_counts(num_classes: int, max_count: int, imbalance_factor: float) -> np.ndarray:
    """Return class counts that are quantiles of a (Lomax) Pareto distribution with power 6.

    ImageNet-LT was drawn with this power between 5 and 1,280 images. The counts resemble that split (about 105,000
    images instead of 115,846); they do not reproduce its list.

    Args:
        num_classes: number of classes C.
        max_count: images of the largest class.
        imbalance_factor: images of the largest class over those of the smallest, 1 or more.

    Returns:
        Images per class in descending order, an int64 array of shape (C,).

    Example:
        >>> pareto_counts(5, 100, 10).tolist()
        [100, 50, 30, 18, 10]
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
    """Return how many images of each class a rule keeps: the larger a class, the larger its count.

    `rule` may also be the counts themselves. `images_per_class` is the count of the largest class. A class with fewer
    images than it should keep is an error unless `cap`.
    """
    if not isinstance(rule, str):
        if len(rule) != len(available):
            raise LiVTError(
                f"rule gives {len(rule)} counts for {len(available)} classes: pass one for each class.", "rule"
            )
        return np.asarray(rule, dtype=np.int64)
    gamma = 1.0 if rule == "balanced" else imbalance_factor
    if gamma is None:
        raise LiVTError(f'the rule "{rule}" needs an imbalance_factor, such as 100.', "imbalance_factor")
    # The exponential rule with a factor of 1 is the balanced one.
    make = partial(pareto_counts if rule == "pareto" else exponential_counts, len(available), imbalance_factor=gamma)
    largest = available.min() if rule == "balanced" else available.max()
    count = int(largest) if images_per_class is None else images_per_class
    counts = np.empty(len(available), dtype=np.int64)
    counts[np.argsort(-available, kind="stable")] = make(count)  # equal classes keep the order of their labels
    if not cap and (counts > available).any():
        fitting = largest_fitting(make, available, math.ceil(gamma), count)
        instead = f"images_per_class {fitting} or less" if fitting else "a larger imbalance_factor"
        raise _too_few(available, counts, f"pass {instead}, or cap to take all images of such classes.")
    return counts


def _too_few(available: np.ndarray, wanted: np.ndarray, way_out: str) -> LiVTError:
    short = np.flatnonzero(wanted > available)
    first = f"class {short[0]} has {available[short[0]]}, asked {wanted[short[0]]}"
    return LiVTError(f"{len(short)} classes have fewer images than asked ({first}): {way_out}", "cap")


def largest_fitting(rule: Callable[[int], np.ndarray], available: np.ndarray, smallest: int, largest: int) -> int:
    """Return the largest count from `smallest` to `largest` for which all classes have `rule(count)` images, or 0.

    `rule` gives counts from the largest class to the smallest, none of which falls when its argument grows.
    """
    by_size, counts = np.sort(available)[::-1], range(smallest, largest + 1)
    fitting = bisect.bisect_left(counts, True, key=lambda count: bool((rule(count) > by_size).any()))
    return counts[fitting - 1] if fitting else 0


def _check_rule(num_classes: int, max_count: int, imbalance_factor: float) -> None:
    if num_classes < 1:
        raise LiVTError(f"num_classes is {num_classes}, but a split needs at least one class.", "num_classes")
    if imbalance_factor < 1:
        raise LiVTError(
            f"imbalance_factor is {imbalance_factor}, but it is largest / smallest class: pass 1 or more.",
            "imbalance_factor",
        )
    if max_count / imbalance_factor < 1 - 1e-9:
        raise LiVTError(
            f"imbalance_factor {imbalance_factor} leaves the smallest class without an image when the largest has "
            f"{max_count}: pass an imbalance_factor of at most {max_count}.",
            "imbalance_factor",
        )


def long_tail_indices(labels: np.ndarray, counts: Sequence[int], seed: int = 0, cap: bool = False) -> np.ndarray:
    """Return the rows of a long-tailed subset; with seed 0 exactly the community's CIFAR-LT images.

    That code seeds numpy's legacy generator, shuffles the rows of one class after another (in label order, rows in
    dataset order) and keeps the first ones. The subset of a smaller imbalance factor therefore contains that of a
    larger one.

    Args:
        labels: class of each image, of shape (N,).
        counts: images to keep of each class, of shape (C,).
        seed: seed of the picks.
        cap: keep all images of a class that has fewer than its count, instead of an error.

    Returns:
        Row numbers in the order of the picks, class after class.

    Example:
        >>> long_tail_indices(np.array([0, 1, 0, 1, 0]), [2, 1]).tolist()
        [4, 2, 1]
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
    """Count the labels of each class; one outside 0 .. num_classes - 1 is an error that names its row.

    `rows` are the rows of the labels, where images have several.
    """
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
