"""Bootstrap intervals of accuracies and macro F1."""

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
    """Compute 95 % intervals of the accuracies and of macro F1.

    Whole clusters are resampled where they are given, else images within their class. n - 1 of n are drawn and
    weighted by n / (n - 1): n draws would give (n - 1) / n of the variance, which matters at three images per class.

    Args:
        labels: class ids of the test images.
        predictions: class ids; -1 is none.
        shots: shot group of each class.
        clusters: what each image belongs to (patient, site, sequence): such images resemble each other.
        resamples: number of resamples.

    Returns:
        Low and high by metric; None where a group has no test image or no resample differs (all right, all wrong).
    """
    draw = _by_class(labels) if clusters is None else _by_cluster(clusters)
    rng = np.random.default_rng(0)
    values = np.array([_measure(labels, predictions, shots, *draw(rng)) for _ in range(resamples)], dtype=np.float64)
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


def _measure(
    labels: np.ndarray, predictions: np.ndarray, shots: Tensor, rows: np.ndarray, weights: np.ndarray
) -> list[float | None]:
    """Return the metrics in the order of `NAMES` of some images with weights."""
    labels, predictions, classes = labels[rows], predictions[rows], len(shots)
    hits, made = predictions == labels, predictions >= 0
    images = np.bincount(labels, weights, classes)
    correct = np.bincount(labels[hits], weights[hits], classes)
    predicted = np.bincount(predictions[made], weights[made], classes)
    recall, _, f1 = recall_precision_f1(*map(torch.from_numpy, (images, correct, predicted)))
    means = [*group_means(recall, shots).values(), class_mean(recall), class_mean(f1)]
    return [correct.sum() / images.sum(), *means]
