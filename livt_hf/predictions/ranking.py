"""Rank images by their scores for a class: average precision and area under the ROC curve."""

import torch
from torch import Tensor

from livt_hf.predictions.shot_groups import class_mean, group_means

_BLOCK = 2**22  # scores sorted at a time


def one_against_rest(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Compute scikit-learn's `auroc` and `average_precision` of every class against the others. (C,)

    NaN where no image has the class and, for `auroc`, where all have it. A NaN score ranks last.

    Args:
        scores: (N, C), read in blocks of classes, so that they may lie in a mapped file.
        labels: class ids (N,), or 0 and 1 (N, C) where an image may have several.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # imports scipy

    auroc, precision = torch.full((2, scores.shape[1]), torch.nan, dtype=torch.float64)
    width = max(1, _BLOCK // max(1, len(labels)))
    for start in range(0, scores.shape[1], width):
        block = scores[:, start : start + width]
        finite = block.nan_to_num(nan=torch.finfo(block.dtype).min)
        for label, column in enumerate(finite.T.numpy(), start):
            positive = (labels[:, label] if labels.ndim == 2 else labels == label).numpy()
            if positive.any():
                precision[label] = average_precision_score(positive, column)
            if positive.any() and not positive.all():
                auroc[label] = roc_auc_score(positive, column)
    return {"auroc": auroc, "average_precision": precision}


def ranking_means(rankings: dict[str, Tensor], groups: Tensor) -> dict[str, float | None]:
    """Return means over the classes that have test images, and over those of each group."""
    means: dict[str, float | None] = {}
    for name, values in rankings.items():
        means |= {name: class_mean(values)} | group_means(values, groups, f"_{name}")
    return means
