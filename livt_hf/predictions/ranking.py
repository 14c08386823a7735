"""Rankings of images by their scores for a class: average precision and the area under the ROC curve."""

from collections.abc import Callable

import torch
from torch import Tensor

from livt_hf.predictions.shot_groups import class_mean, group_means

_BLOCK = 2**22  # scores sorted at a time


def one_against_rest(
    scores: Tensor, labels: Tensor, gather: Callable[[Tensor], Tensor] = lambda part: part
) -> dict[str, Tensor]:
    """scikit-learn's `auroc` and `average_precision` of every class against the others, from (N, C) scores. (C,)

    NaN where no image has the class and, of `auroc`, where all have it. A NaN score ranks last.
    `labels` are class ids (N,), or 0 and 1 (N, C) where an image may have several.
    A ranking needs the scores of all images, so blocks of classes are looked at one by one: `scores` may lie in a
    mapped file, and `gather` puts together the parts that several processes hold.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # imports scipy

    labels = gather(labels)
    auroc, precision = torch.full((2, scores.shape[1]), torch.nan, dtype=torch.float64)
    width = max(1, _BLOCK // max(1, len(labels)))
    for start in range(0, scores.shape[1], width):
        block = gather(scores[:, start : start + width].contiguous())
        finite = block.nan_to_num(nan=torch.finfo(block.dtype).min)
        for label, column in enumerate(finite.T.numpy(), start):
            positive = (labels[:, label] if labels.ndim == 2 else labels == label).numpy()
            if positive.any():
                precision[label] = average_precision_score(positive, column)
            if positive.any() and not positive.all():
                auroc[label] = roc_auc_score(positive, column)
    return {"auroc": auroc, "average_precision": precision}


def ranking_means(rankings: dict[str, Tensor], groups: Tensor) -> dict[str, float | None]:
    """Means over the classes that have test images, and over those of each group."""
    means: dict[str, float | None] = {}
    for name, values in rankings.items():
        means |= {name: class_mean(values)} | group_means(values, groups, f"_{name}")
    return means
