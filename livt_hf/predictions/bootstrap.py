"""Bootstrap intervals: how far another test set of the same kind would move the numbers."""

import numpy as np
import torch
from torch import Tensor

from livt_hf.predictions.metrics import recall_precision_f1
from livt_hf.predictions.shot_groups import GROUPS, class_mean, group_means
from livt_hf.predictions.significance import MIN_UNITS

TAILS = (0.025, 0.975)
NAMES = ("accuracy", *GROUPS, "mean_class_accuracy", "macro_f1")
_BORROWED = 4  # units that a class borrows from its shot group; coverage by recipes/benchmarks/simulations.py


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
