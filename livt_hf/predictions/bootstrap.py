"""Bootstrap intervals: how far another test set of the same kind would move the numbers."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from livt_hf.predictions.metrics import recall_precision_f1
from livt_hf.predictions.shot_groups import GROUPS, class_mean, group_means

Drawn = tuple[np.ndarray, np.ndarray]  # numbers of images, and how much each of them counts
TAILS = (0.025, 0.975)
NAMES = ("accuracy", *GROUPS, "mean_class_accuracy", "macro_f1")


def bootstrap_intervals(
    labels: np.ndarray,
    predictions: np.ndarray,
    shots: Tensor,
    clusters: np.ndarray | None = None,
    *,
    resamples: int = 1000,
) -> dict[str, tuple[float, float] | None]:
    """95% intervals of the accuracies and of macro F1; None where a shot group has no test image, or where all its
    images are right, or all wrong: no resample then differs, which tells nothing of another test set.

    `labels` and `predictions` are class ids of all test images; a prediction of -1 is none. `shots` says the group of
    each class. Images of one cluster (patient, site, sequence) resemble each other, so whole clusters are drawn where
    they are given. Without them images are drawn class by class, for classes are the task and no sample of it.
    n - 1 of n are drawn and weighted by n / (n - 1): with n the variance would come out (n - 1) / n of what it is,
    which matters at three test images per class (iNat18). A class with one image has no measurable variance.
    """
    draw = _by_class(labels) if clusters is None else _by_cluster(clusters)
    rng = np.random.default_rng(0)
    values = np.array([_measured(labels, predictions, shots, *draw(rng)) for _ in range(resamples)], dtype=np.float64)
    finite = {name: column[np.isfinite(column)] for name, column in zip(NAMES, values.T, strict=True)}
    return {
        name: tuple(np.quantile(column, TAILS).tolist()) if len(np.unique(column)) > 1 else None
        for name, column in finite.items()
    }


def _by_class(labels: np.ndarray) -> Callable[[np.random.Generator], Drawn]:
    order = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    drawn = np.maximum(sizes - 1, 1)
    first, size = np.repeat(starts, drawn), np.repeat(sizes, drawn)
    weights = np.repeat(sizes / drawn, drawn)
    return lambda rng: (order[first + (rng.random(len(first)) * size).astype(np.int64)], weights)


def _by_cluster(clusters: np.ndarray) -> Callable[[np.random.Generator], Drawn]:
    _, member = np.unique(clusters, return_inverse=True)
    number = int(member.max()) + 1
    drawn = max(number - 1, 1)

    def draw(rng: np.random.Generator) -> Drawn:
        times = np.bincount(rng.integers(number, size=drawn), minlength=number) * (number / drawn)
        return np.arange(len(member)), times[member]

    return draw


def _measured(
    labels: np.ndarray, predictions: np.ndarray, shots: Tensor, rows: np.ndarray, weights: np.ndarray
) -> list[float | None]:
    """The numbers in the order of `NAMES`, of some images that count so much each."""
    labels, predictions, classes = labels[rows], predictions[rows], len(shots)
    hits, made = predictions == labels, predictions >= 0
    images = np.bincount(labels, weights, classes)
    correct = np.bincount(labels[hits], weights[hits], classes)
    predicted = np.bincount(predictions[made], weights[made], classes)
    recall, _, f1 = recall_precision_f1(*map(torch.from_numpy, (images, correct, predicted)))
    means = [*group_means(recall, shots).values(), class_mean(recall), class_mean(f1)]
    return [correct.sum() / images.sum(), *means]
