"""Tests of what a test set shows: rules compared on the same images, classes against the others, calibration."""

import math

import numpy as np

LEVEL = 0.05  # of all tests in this package, after the correction for several tests
MIN_UNITS = 6  # images or groups below which no paired test can be significant: two of 2^5 outcomes are 6 %
_FLIPS, _EXACT_UNITS = 3999, 1000


def sum_by_group(values: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Return the sums over groups (patients, sites), whose images are not independent; without groups the values."""
    return values if groups is None else np.bincount(np.unique(groups, return_inverse=True)[1], values)


def paired_p_value(gains: np.ndarray, groups: np.ndarray | None = None) -> float:
    """Test whether two sets of decisions on the same images differ: McNemar's test, with weights and groups.

    If both are equally good, each image, or group of images, could as well have favoured the other one. So the signs
    of the gains are flipped at random.

    Args:
        gains: (N,), what each image counts for the first rather than the second: 1, 0 and -1, or weighted by class.
        groups: (N,), images that belong together.

    Returns:
        The two-sided p-value.

    Example:
        >>> paired_p_value(np.array([1.0] * 9 + [0.0] * 50 + [-1.0])) < 0.05
        True
    """
    units = sum_by_group(np.asarray(gains, dtype=np.float64), groups)
    units = units[np.abs(units) > 1e-12]
    if not len(units):
        return 1.0
    if len(units) > _EXACT_UNITS:
        return math.erfc(abs(units.sum()) / math.sqrt(2 * (units**2).sum()))
    signs = 1.0 - 2.0 * np.random.default_rng(0).integers(0, 2, (_FLIPS, len(units)), dtype=np.int8)
    as_far = np.abs(signs @ units) >= abs(units.sum()) - 1e-12
    return float(1 + as_far.sum()) / (1 + _FLIPS)


def class_gains(first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return what each image adds to the difference in mean class accuracy between two sets of predictions."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return ((first == labels).astype(float) - (second == labels)) / (len(counts) * counts[codes])


def below_the_rest(images: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return the p-value of each class for an accuracy below that of all other images: Fisher's exact test.

    Args:
        images: test images of each class, or their groups where images belong together. (C,)
        correct: how many of them are right. (C,)
    """
    from scipy.stats import hypergeom

    images, correct = np.rint(images).astype(int), np.rint(correct).astype(int)
    return np.where(images > 0, hypergeom.cdf(correct, images.sum(), correct.sum(), images), 1.0)


def wilson_interval(correct: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Return 95 % intervals of shares, (C, 2): from 0 to 1 where there is no image."""
    images = np.asarray(images, dtype=np.float64)
    share, z = np.divide(correct, images, out=np.zeros_like(images), where=images > 0), 1.959964
    centre = (share * images + z**2 / 2) / (images + z**2)
    half = z * np.sqrt(share * (1 - share) * images + z**2 / 4) / (images + z**2)
    return np.stack([np.maximum(centre - half, 0), np.minimum(centre + half, 1)], axis=-1)


def significant(p_values: np.ndarray) -> np.ndarray:
    """Return which of several tests are significant: a false discovery rate of 5 % (Benjamini and Hochberg)."""
    from scipy.stats import false_discovery_control

    return false_discovery_control(p_values) <= LEVEL if len(p_values) else np.zeros(0, dtype=bool)


def calibration_p_value(confidence: np.ndarray, right: np.ndarray, groups: np.ndarray | None = None) -> float:
    """Test whether the mean confidence differs from the accuracy; images without a confidence are left out."""
    known = ~np.isnan(confidence)
    gaps = (confidence - right)[known]
    units = sum_by_group(gaps - gaps.mean(), None if groups is None else groups[known]) if len(gaps) else gaps
    error = math.sqrt((units**2).sum())
    return math.erfc(abs(gaps.sum()) / (math.sqrt(2) * error)) if error > 0 else 1.0
