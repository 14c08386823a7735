"""Parts for people who train with transformers' `Trainer`: metrics and a sampler.

Layer-wise learning rates are `layer_decay_groups(..., lr=...)` of `livt_hf.optim`; the loss is that of `balance`.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch.utils.data
from transformers import EvalPrediction

from livt_hf.data.sampling import Sampler
from livt_hf.predictions.metrics import long_tail_metrics

_METRICS = ("accuracy", "mean_class_accuracy", "many", "medium", "few")


def compute_long_tail_metrics(class_counts: Sequence[int]) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a `compute_metrics` for `Trainer`: accuracy, mean class accuracy, and that of many, medium and few.

    Args:
        class_counts: training images of each class, which say what is many-, medium- and few-shot.

    Returns:
        A function of Trainer's predictions (logits, or a tuple that begins with them) and labels. A group without
        classes is left out.

    Example:
        >>> metrics = compute_long_tail_metrics([500, 5])
        >>> metrics(EvalPrediction(np.eye(2), np.array([0, 0])))["accuracy"]
        0.5
    """

    def compute_metrics(predictions: EvalPrediction) -> dict[str, float]:
        logits, labels = predictions.predictions, predictions.label_ids
        values = long_tail_metrics(logits[0] if isinstance(logits, tuple) else logits, labels, class_counts)
        return {name: values[name] for name in _METRICS if values[name] is not None}

    return compute_metrics


class ClassBalancedSampler(torch.utils.data.Sampler[int]):
    """Sampler that draws rare classes as often as frequent ones, the same on all processes, anew in every epoch.

    A head learns the posterior under the prior it sees: tell it by
    `balance(model, counts, seen_counts=seen_counts(counts, name, epochs))` of `livt_hf.data.sampling`.

    Args:
        labels: class id of each training image.
        name: "balanced", "sqrt" or "natural".
        seed: of the draws.

    Example:
        >>> sampler = ClassBalancedSampler([0, 0, 0, 1])
        >>> sum(index == 3 for index in sampler)
        2
    """

    def __init__(self, labels: Sequence[int], name: str = "balanced", seed: int = 0):
        self.labels, self.sampler, self.seed, self.epoch = np.asarray(labels), Sampler(name), seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the draws of an epoch; Trainer calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[int]:
        return iter((self.sampler.draws(self.labels, self.seed, self.epoch) % len(self.labels)).tolist())


__all__ = ["ClassBalancedSampler", "compute_long_tail_metrics"]
