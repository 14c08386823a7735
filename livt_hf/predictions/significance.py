"""What a test set shows: intervals of its numbers, and tests of rules, of classes and of calibration."""

import math

import numpy as np
import torch
from torch import Tensor

from livt_hf.predictions.metrics import GROUPS, class_mean, group_means, recall_precision_f1

LEVEL = 0.05  # of all tests in this package, after the correction for several tests
MIN_UNITS = 6  # images or groups below which no paired test can be significant: two of 2^5 outcomes are 6 %
_FLIPS, _EXACT_UNITS = 3999, 1000
TAILS = (0.025, 0.975)
NAMES = ("accuracy", *GROUPS, "mean_class_accuracy", "macro_f1")  # metrics that have an interval
_BORROWED = 4  # units that a class borrows from its shot group; coverage by recipes/benchmarks/simulations.py


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


def bootstrap_intervals(
    labels: np.ndarray,
    predictions: np.ndarray,
    shots: Tensor,
    clusters: np.ndarray | None = None,
    *,
    resamples: int = 1000,
) -> dict[str, tuple[float, float] | None]:
    """Compute 95 % bootstrap intervals of the accuracies and of macro F1.

    Images are drawn from all test images. Images of one cluster (patient, site, sequence) resemble each other, so
    whole clusters are drawn where they are given.
    A class with one image has no variance of its own, and a resample may miss it. Means over classes must neither take
    it for certain nor leave it out. So a drawn image of a class with n images is replaced, with the probability
    4 / (n + 4), by one of another class of its shot group, right or wrong as that was; a class that was not drawn gets
    one image in the same way. Intervals are then moved to the measured value, and keep the width that this gave them.

    Args:
        labels: class ids of all test images.
        predictions: class ids; -1 is no prediction.
        shots: shot group of each class, as an index into `GROUPS`.
        clusters: what each image belongs to.
        resamples: number of resamples.

    Returns:
        Lower and upper bound by metric; None where a shot group has no test image, where no resample differs, as
        when all its images are right, or where there are fewer than 6 images or clusters: that tells nothing of
        another test set.
    """
    labels, predictions = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    resampler, rng = _Resampler(labels, predictions, shots.numpy(), clusters), np.random.default_rng(0)
    if resampler.clusters < MIN_UNITS:
        return dict.fromkeys(NAMES)
    measured = _measured(labels, predictions, np.ones(len(labels)), shots)
    values = np.array([_resampled(resampler, shots, rng) for _ in range(resamples)], dtype=np.float64)
    intervals: dict[str, tuple[float, float] | None] = {}
    for name, value, column in zip(NAMES, measured, values.T, strict=True):
        column = column[np.isfinite(column)]
        if value is None or len(np.unique(column)) < 2:
            intervals[name] = None
            continue
        moved = 0.0 if name == "accuracy" else value - column.mean()
        intervals[name] = tuple(np.clip(np.quantile(column, TAILS) + moved, 0, 1).tolist())
    return intervals


def _resampled(resampler: "_Resampler", shots: Tensor, rng: np.random.Generator) -> list[float | None]:
    """Return the numbers of one resample, in the order of `NAMES`."""
    times, weights = resampler.draw(rng)
    right = resampler.labels == resampler.predictions
    accuracy = weights[right].sum() / weights.sum()
    return [accuracy, *_measured(*resampler.borrow(times, weights, rng), shots)[1:]]


class _Resampler:
    """Draws test sets as pairs of label and prediction with weights.

    A unit is what is drawn of a class at once: an image, or the images of one cluster.
    """

    def __init__(self, labels: np.ndarray, predictions: np.ndarray, shots: np.ndarray, clusters: np.ndarray | None):
        self.classes = len(shots)
        pairs, self.pair = np.unique(labels * (self.classes + 1) + predictions + 1, return_inverse=True)
        self.labels, self.predictions = pairs // (self.classes + 1), pairs % (self.classes + 1) - 1
        self.counts = np.bincount(self.pair).astype(np.float64)
        names = np.arange(len(labels)) if clusters is None else clusters
        _, self.cluster = np.unique(names, return_inverse=True)
        self.clusters = int(self.cluster.max()) + 1
        # Units in the order of their labels, with their clusters and the pairs of their images.
        keys, unit, sizes = np.unique(labels * self.clusters + self.cluster, return_inverse=True, return_counts=True)
        self.unit_labels, self.unit_clusters = keys // self.clusters, keys % self.clusters
        self.unit_sizes, self.unit_starts = sizes, np.cumsum(sizes) - sizes
        self.unit_pairs = self.pair[np.argsort(unit, kind="stable")]
        self.units = np.bincount(self.unit_labels, minlength=self.classes)  # of each class
        self.first_unit = np.cumsum(self.units) - self.units
        # Classes that have test images in the order of their groups, from which others borrow.
        tested = np.flatnonzero(self.units)
        self.lenders = tested[np.argsort(shots[tested], kind="stable")]
        lending = np.bincount(shots[tested], minlength=len(GROUPS))
        self.lending, self.first_lender = lending[shots], (np.cumsum(lending) - lending)[shots]

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return how often each cluster is drawn, and so each pair of label and prediction."""
        # With n of n draws the variance would be (n - 1) / n of what it is, which matters for a handful of clusters.
        draws = rng.integers(self.clusters, size=max(self.clusters - 1, 1))
        times = np.bincount(draws, minlength=self.clusters)
        return times, np.bincount(self.pair, times[self.cluster], len(self.labels))

    def borrow(
        self, times: np.ndarray, weights: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return labels, predictions and weights with units of rare classes replaced by those of other classes."""
        drawn = np.bincount(self.unit_labels, times[self.unit_clusters], self.classes).astype(np.int64)
        missing = (drawn == 0) & (self.units > 0)
        drawn[missing] = 1
        weights = np.where(missing[self.labels], self.counts / self.units[self.labels], weights)
        replaced = rng.binomial(drawn, _BORROWED / (self.units + _BORROWED))
        weights = weights * ((drawn - replaced) / np.maximum(drawn, 1))[self.labels]
        borrower = np.repeat(np.arange(self.classes), replaced)
        chosen = self.first_lender[borrower] + (rng.random(len(borrower)) * self.lending[borrower]).astype(np.int64)
        lender = self.lenders[chosen]
        unit = self.first_unit[lender] + (rng.random(len(lender)) * self.units[lender]).astype(np.int64)
        sizes = self.unit_sizes[unit]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        pair, borrower = self.unit_pairs[np.repeat(self.unit_starts[unit], sizes) + within], np.repeat(borrower, sizes)
        label, given = self.labels[pair], self.predictions[pair]
        given = np.where(given == label, borrower, np.where(given == borrower, label, given))
        return (
            np.concatenate([self.labels, borrower]),
            np.concatenate([self.predictions, given]),
            np.concatenate([weights, np.ones(len(borrower))]),
        )


def _measured(labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray, shots: Tensor) -> list[float | None]:
    """Return the numbers in the order of `NAMES`, of pairs of label and prediction that count so much each."""
    classes, hits, made = len(shots), predictions == labels, predictions >= 0
    images = np.bincount(labels, weights, classes)
    correct = np.bincount(labels[hits], weights[hits], classes)
    predicted = np.bincount(predictions[made], weights[made], classes)
    recall, _, f1 = recall_precision_f1(*map(torch.from_numpy, (images, correct, predicted)))
    means = [*group_means(recall, shots).values(), class_mean(recall), class_mean(f1)]
    return [correct.sum() / images.sum(), *means]
