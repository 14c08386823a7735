"""The deployment prior for the metric one cares about: pi^t, chosen on out-of-sample posteriors.

A posterior p under the training prior pi is decided on under another prior q by argmax_j p_j q_j / pi_j. The family
q ~ pi^t goes from all classes equally frequent (t = 0), which maximises mean class accuracy, to the training prior
(t = 1), which maximises accuracy; in between lie macro F1 and every compromise. The posteriors must come from images
that the model was not trained on, and never from the test set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from livt_hf.errors import LiVTError

OBJECTIVES = ("mean_class_accuracy", "macro_f1", "balanced", "accuracy")
EXPONENTS = tuple(step / 20 for step in range(21))
_THEORY = {"mean_class_accuracy": 0.0, "accuracy": 1.0}  # optimal for every posterior that is right
_STANDARD_ERRORS = 2.0  # by which the labels must speak against the exponent that the posteriors expect to be best
_REPLICATES = 200


@dataclass(frozen=True)
class ExponentChoice:
    """A chosen exponent t of the deployment prior pi^t and what it was chosen by.

    Attributes:
        exponent: the chosen t.
        expected: the t that is best if the posteriors are right.
        best: the t that is best by the labels of these images.
        gain, standard_error: of the objective from `expected` to `best`, on these images.
        curve: `exponent` and the scores `accuracy`, `mean_class_accuracy`, `macro_f1` and `balanced` for every t.
    """

    exponent: float
    expected: float
    best: float
    gain: float
    standard_error: float
    curve: list[dict[str, float]]


def decide(log_posterior: Tensor, prior: Tensor, exponent: float) -> Tensor:
    """Return the most probable class of each image under the prior pi^t, from log p under pi. (N,)"""
    return (log_posterior - (1 - exponent) * prior.log().to(log_posterior)).argmax(-1)


def score_predictions(
    predicted: np.ndarray, labels: np.ndarray, num_classes: int, weights: np.ndarray | None = None
) -> dict[str, Any]:
    """Return accuracy, mean class accuracy, macro F1 and their compromise `balanced` of predicted classes.

    Means over classes are over those that occur among the labels. `balanced` is the mean of accuracy and mean class
    accuracy: a point of the one is worth a point of the other. With rows of weights of the images (B, N), each score
    is an array of one number per row.
    """
    scores = _scores(*_count(predicted[None], labels, num_classes, weights))
    return {name: values[0] if weights is not None else float(values[0, 0]) for name, values in scores.items()}


def compare_predictions(
    first: np.ndarray,
    second: np.ndarray,
    labels: np.ndarray,
    objective: str,
    *,
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Return by how much the second predictions of the same images score better, and the standard error of that.

    Args:
        first, second: predicted class ids (N,).
        labels: class ids (N,).
        objective: one of `OBJECTIVES`.
        groups: (N,), what images belong together, which the bootstrap then draws together.
        seed: of the bootstrap.

    Example:
        >>> labels = np.array([0, 0, 1, 1])
        >>> compare_predictions(np.array([0, 1, 1, 0]), labels, labels, "accuracy")[0]
        0.5
    """
    predicted, classes = np.stack([first, second]), int(max(first.max(), second.max(), labels.max())) + 1
    measured = _scores(*_count(predicted, labels, classes))[objective][:, 0]
    resampled = _scores(*_count(predicted, labels, classes, _resample(groups, predicted, classes, seed)))[objective]
    return float(measured[1] - measured[0]), float((resampled[1] - resampled[0]).std())


def expected_exponent(
    log_posterior: Tensor,
    prior: Tensor,
    objective: str,
    exponents: Sequence[float] = EXPONENTS,
    weights: np.ndarray | None = None,
) -> float:
    """Return the exponent with the largest expected score if the posteriors are right; no label is looked at.

    It is 0 for mean class accuracy and 1 for accuracy. For macro F1 it depends on how well the classes are told apart.
    `weights` (N,) are those of images whose classes are not as frequent as the prior says.
    """
    if objective in _THEORY:
        return min(exponents, key=lambda t: abs(t - _THEORY[objective]))
    weights = np.ones(len(log_posterior)) if weights is None else weights
    posterior = log_posterior.double().softmax(-1) * torch.from_numpy(weights)[:, None]  # (N, C)
    images = posterior.sum(0).numpy()[None]
    correct, predicted = [], []
    for exponent in exponents:
        chosen = decide(log_posterior, prior, exponent)
        sure = posterior.gather(1, chosen[:, None]).squeeze(1).numpy()
        correct.append(np.bincount(chosen.numpy(), sure, minlength=len(prior)))
        predicted.append(np.bincount(chosen.numpy(), weights, minlength=len(prior)))
    scores = _scores(np.stack(correct)[:, None], np.stack(predicted)[:, None], images)
    return float(exponents[int(scores[objective][:, 0].argmax())])


def choose_exponents(
    log_posterior: Tensor,
    labels: Tensor,
    prior: Tensor,
    objectives: Sequence[str] = OBJECTIVES,
    *,
    groups: np.ndarray | None = None,
) -> dict[str, ExponentChoice]:
    """Choose the exponent t of the deployment prior pi^t, one of `EXPONENTS`, for each of several objectives.

    Takes the t that is best if the posteriors are right, unless the labels speak clearly against it: then the nearest
    t that is within two standard errors of the best one, by differences on the same resampled images or groups. So
    noise in a few images of rare classes does not choose. Images are weighted by class so that classes are as frequent
    as the prior says: a balanced validation split chooses what a natural one would.

    Args:
        log_posterior: log p under the training prior, (N, C), of images that were not trained on.
        labels: class ids (N,).
        prior: the training prior (C,).
        objectives: some of "mean_class_accuracy", "macro_f1", "balanced" (the mean of accuracy and mean class
            accuracy) and "accuracy".
        groups: (N,), images that belong together, such as those of a patient.

    Returns:
        The choice for each objective, with the whole trade-off curve.

    Example:
        >>> prior = torch.tensor([0.9, 0.1])
        >>> posterior = torch.tensor([[0.95, 0.05]] * 90 + [[0.6, 0.4]] * 10)
        >>> labels = torch.tensor([0] * 90 + [1] * 10)
        >>> choose_exponents(posterior.log(), labels, prior)["mean_class_accuracy"].exponent
        0.0
    """
    for objective in objectives:
        if objective not in OBJECTIVES:
            message = f"objective {objective!r} is not known; use one of {', '.join(OBJECTIVES)}."
            raise LiVTError(message, argument="objective")
    truth, grid, classes = labels.numpy(), np.asarray(EXPONENTS), len(prior)
    weights = (prior.double().numpy() / np.maximum(np.bincount(truth, minlength=classes), 1))[truth][None]
    weights *= len(truth) / weights.sum()
    predicted = np.stack([decide(log_posterior, prior, float(t)).numpy() for t in grid])  # (T, N)
    scores = {name: value[:, 0] for name, value in _scores(*_count(predicted, truth, classes, weights)).items()}
    curve = [
        {"exponent": float(t)} | {name: float(values[row]) for name, values in scores.items()}
        for row, t in enumerate(grid)
    ]
    resampled = _scores(*_count(predicted, truth, classes, weights * _resample(groups, predicted, classes)))

    def choose(objective: str) -> ExponentChoice:
        value = scores[objective]
        distance = np.abs(grid - expected_exponent(log_posterior, prior, objective, weights=weights[0]))
        expected = int(distance.argmin())
        best = int(np.where(value >= value.max() - 1e-12, distance, np.inf).argmin())
        errors = (resampled[objective][best] - resampled[objective]).std(axis=1)  # (T,)
        close = value >= value[best] - _STANDARD_ERRORS * errors - 1e-12
        chosen = int(np.where(close, distance, np.inf).argmin())
        return ExponentChoice(
            exponent=float(grid[chosen]),
            expected=float(grid[expected]),
            best=float(grid[best]),
            gain=float(value[best] - value[expected]),
            standard_error=float(errors[expected]),
            curve=curve,
        )

    return {objective: choose(objective) for objective in objectives}


def _resample(groups: np.ndarray | None, predicted: np.ndarray, num_classes: int, seed: int = 0) -> np.ndarray:
    """Return how often each image is drawn in each resampling of the images, or of their groups. (B, N)"""
    rng = np.random.default_rng(seed)
    exponents, num_images = predicted.shape
    replicates = int(np.clip(min(4_000_000 // num_images, 20_000_000 // (exponents * num_classes)), 20, _REPLICATES))
    codes = np.arange(num_images) if groups is None else np.unique(groups, return_inverse=True)[1]
    units = codes.max() + 1
    drawn = [np.bincount(rng.integers(units, size=units), minlength=units)[codes] for _ in range(replicates)]
    return np.stack(drawn).astype(np.float64)


def _count(
    predicted: np.ndarray, labels: np.ndarray, num_classes: int, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return correct and predicted images (T, B, C) and images (B, C) by class, for weights of the images (B, N)."""
    weights = np.ones((1, len(labels))) if weights is None else weights
    first = np.arange(len(weights))[:, None] * num_classes

    def sums(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
        total = np.bincount((first + ids).ravel(), values.ravel(), minlength=len(weights) * num_classes)
        return total.reshape(-1, num_classes)

    correct = np.stack([sums(labels, weights * (row == labels)) for row in predicted])
    return correct, np.stack([sums(row, weights) for row in predicted]), sums(labels, weights)


def _scores(correct: np.ndarray, predicted: np.ndarray, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the scores of counts by class; a class without an image in a resampling counts for nothing. (T, B)"""
    there = images > 0
    number = there.sum(-1)
    accuracy = correct.sum(-1) / images.sum(-1)
    recall = (correct / np.maximum(images, 1e-12) * there).sum(-1) / number
    f1 = (2 * correct / np.maximum(images + predicted, 1e-12) * there).sum(-1) / number
    return {"accuracy": accuracy, "mean_class_accuracy": recall, "macro_f1": f1, "balanced": (accuracy + recall) / 2}
