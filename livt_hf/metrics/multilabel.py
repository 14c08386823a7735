"""Mean average precision for images with several labels: a ranking metric, so the one that has to keep its scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.metrics.groups import FEW_BELOW, GROUPS, MANY_ABOVE, as_counts, check_scores, shot_groups

_BLOCK = 2**22  # scores sorted at a time


class MultiLabelMetrics:
    """Macro and per-group mAP. Keeps 5 bytes per image and class; those of several processes `merge` into one.

    Average precision is the sum over thresholds of (recall gained) x precision, equal scores sharing a threshold
    (scikit-learn's definition). Classes without a positive test image take no part. A NaN score ranks last.
    """

    def __init__(
        self, class_counts: Sequence[int] | Tensor, *, many_above: int = MANY_ABOVE, few_below: int = FEW_BELOW
    ):
        self.class_counts = as_counts(class_counts)
        self.groups = shot_groups(self.class_counts, many_above, few_below)
        self.num_classes = len(self.class_counts)
        self._scores: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, scores: Tensor, targets: Tensor) -> None:
        """Keep a batch of (B, C) logits or probabilities with its (B, C) targets of 0 and 1."""
        scores, targets = torch.as_tensor(scores).detach().cpu().float(), torch.as_tensor(targets).cpu()
        check_scores(scores, self.num_classes)
        if targets.shape != scores.shape:
            raise LiVTError(f"targets have shape {tuple(targets.shape)} and scores {tuple(scores.shape)}; match them.")
        if not ((targets == 0) | (targets == 1)).all():
            raise LiVTError("targets must be 0 or 1 for each class; soft labels have no average precision.")
        self._scores.append(scores)
        self._targets.append(targets.bool())

    def merge(self, other: "MultiLabelMetrics") -> None:
        """Add what another one kept."""
        if not torch.equal(self.class_counts, other.class_counts):
            raise LiVTError("metrics of different class_counts cannot be merged.")
        self._scores += other._scores
        self._targets += other._targets

    def per_class(self, names: Sequence[str] | None = None) -> list[dict]:
        """One row per class: training images, group, positive test images and average precision (None without any)."""
        scores, targets = self._all()
        positives = targets.sum(dim=0).tolist()
        columns = max(1, _BLOCK // max(1, len(scores)))
        precisions = torch.cat(
            [average_precision(s, t) for s, t in zip(scores.split(columns, 1), targets.split(columns, 1), strict=True)]
        ).tolist()
        return [
            {
                "class": i,
                "name": str(i) if names is None else names[i],
                "count": int(self.class_counts[i]),
                "group": GROUPS[self.groups[i]],
                "images": positives[i],
                "average_precision": precisions[i] if positives[i] else None,
            }
            for i in range(self.num_classes)
        ]

    def compute(self) -> dict[str, float | int | None]:
        """`map` over all classes with positive images, and over those of each group; fractions, None where empty."""
        rows = [row for row in self.per_class() if row["images"]]
        members = {"map": rows} | {group: [row for row in rows if row["group"] == group] for group in GROUPS}
        metrics = {
            name: sum(row["average_precision"] for row in part) / len(part) if part else None
            for name, part in members.items()
        }
        scores, _ = self._all()
        return metrics | {"num_images": len(scores), "num_nan": int(scores.isnan().any(dim=1).sum())}

    def _all(self) -> tuple[Tensor, Tensor]:
        if not self._scores:
            raise LiVTError("no image was kept; call update first.")
        self._scores, self._targets = [torch.cat(self._scores)], [torch.cat(self._targets)]
        return self._scores[0], self._targets[0]


def average_precision(scores: Tensor, targets: Tensor) -> Tensor:
    """Average precision of each column of (N, K) scores against targets of 0 and 1; 0 where none is 1. (K,)"""
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    scores, order = scores.sort(dim=0, descending=True)
    hits = targets.gather(0, order).double()
    ranks = torch.arange(1, len(scores) + 1, dtype=torch.float64)[:, None]
    last_of_equals = torch.ones_like(scores, dtype=torch.bool)
    last_of_equals[:-1] = scores[:-1] != scores[1:]
    # The threshold of a row is the end of its run of equal scores: the nearest end at or after it.
    end = torch.where(last_of_equals, ranks.long() - 1, len(scores)).flip(0).cummin(dim=0).values.flip(0)
    precision = (hits.cumsum(dim=0) / ranks).gather(0, end)
    return (precision * hits).sum(dim=0) / hits.sum(dim=0).clamp(min=1)
