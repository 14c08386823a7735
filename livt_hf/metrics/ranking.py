"""Rankings of images by their scores for a class: average precision and the area under the ROC curve."""

from collections.abc import Callable

import torch
from torch import Tensor

from livt_hf.metrics.groups import group_means

_BLOCK = 2**22  # scores sorted at a time


def average_precision(scores: Tensor, targets: Tensor) -> Tensor:
    """Average precision of each column of (N, K) scores against targets of 0 and 1; 0 where none is 1. (K,)

    The sum over thresholds of (recall gained) x precision, equal scores sharing a threshold (scikit-learn's
    definition). A NaN score ranks last.
    """
    scores, order = torch.where(scores.isnan(), -torch.inf, scores).sort(dim=0, descending=True)
    hits = targets.gather(0, order).double()
    ranks = torch.arange(1, len(scores) + 1, dtype=torch.float64)[:, None]
    # The threshold of a row is the end of its run of equal scores.
    precision = (hits.cumsum(dim=0) / ranks).gather(0, _last_of_equals(scores))
    return (precision * hits).sum(dim=0) / hits.sum(dim=0).clamp(min=1)


def auroc(scores: Tensor, targets: Tensor) -> Tensor:
    """The chance that a positive image scores higher than a negative one, of each column; ties count half. (K,)

    NaN where an image of either kind is missing. A NaN score ranks last.
    """
    scores, order = torch.where(scores.isnan(), -torch.inf, scores).sort(dim=0)
    hits = targets.gather(0, order).double()
    last = _last_of_equals(scores)
    first = len(scores) - 1 - _last_of_equals(scores.flip(0)).flip(0)
    ranks = (first + last).double() / 2 + 1  # equals share their mean rank
    positives = hits.sum(dim=0)
    pairs = positives * (len(scores) - positives)
    above = (ranks * hits).sum(dim=0) - positives * (positives + 1) / 2
    return torch.where(pairs > 0, above / pairs, torch.nan)


def _last_of_equals(scores: Tensor) -> Tensor:
    """Of sorted columns: the last row with the same score, for each row. (N, K)"""
    places = torch.arange(len(scores))[:, None].expand_as(scores)
    is_last = torch.ones_like(scores, dtype=torch.bool)
    is_last[:-1] = scores[:-1] != scores[1:]
    return torch.where(is_last, places, len(scores)).flip(0).cummin(dim=0).values.flip(0)


def one_against_rest(
    scores: Tensor, labels: Tensor, gather: Callable[[Tensor], Tensor] = lambda part: part
) -> dict[str, Tensor]:
    """`auroc` and `average_precision` of every class against the others, from (N, C) scores. (C,)

    `labels` are class ids (N,), or 0 and 1 (N, C) where an image may have several.
    A ranking needs the scores of all images, so blocks of classes are looked at one by one: `scores` may lie in a
    mapped file, and `gather` puts together the parts that several processes hold.
    """
    labels = gather(labels)
    results: dict[str, list[Tensor]] = {"auroc": [], "average_precision": []}
    width = max(1, _BLOCK // max(1, len(labels)))
    for start in range(0, scores.shape[1], width):
        block = gather(scores[:, start : start + width].contiguous())
        classes = torch.arange(start, start + block.shape[1])
        targets = (labels[:, classes] if labels.ndim == 2 else labels[:, None] == classes).long()
        results["auroc"].append(auroc(block, targets))
        results["average_precision"].append(average_precision(block, targets))
    return {name: torch.cat(parts) for name, parts in results.items()}


def ranking_means(rankings: dict[str, Tensor], labels: Tensor, groups: Tensor) -> dict[str, float | None]:
    """Means over the classes that have test images, and over those of each group."""
    images = torch.bincount(labels, minlength=len(groups))
    means = {}
    for name, values in rankings.items():
        present = (images > 0) & values.isfinite()
        means[name] = values[present].mean().item() if present.any() else None
        means |= group_means(values, present, groups, f"_{name}")
    return means
