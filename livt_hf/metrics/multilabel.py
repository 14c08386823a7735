"""Rankings of images with several labels: they have to keep their scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.metrics.groups import FEW_BELOW, GROUPS, MANY_ABOVE, as_counts, check_scores, known, shot_groups
from livt_hf.metrics.ranking import auroc, average_precision

_BLOCK = 2**22  # scores sorted at a time


class MultiLabelMetrics:
    """Macro and per-group mAP, and AUROC. Keeps 5 bytes per image and class; several processes' `merge` into one.

    Classes without a positive test image take no part, and in AUROC those without a negative one. A NaN score ranks
    last.
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
        """One row per class: training images, group, positive test images, average precision and AUROC."""
        scores, targets = self._all()
        columns = max(1, _BLOCK // max(1, len(scores)))
        blocks = list(zip(scores.split(columns, 1), targets.long().split(columns, 1), strict=True))
        positives, areas = targets.sum(dim=0), torch.cat([auroc(*block) for block in blocks])
        precisions = known(torch.cat([average_precision(*block) for block in blocks]), positives > 0)
        known_areas = known(areas, areas.isfinite())
        return [
            {
                "class": i,
                "name": str(i) if names is None else names[i],
                "count": int(self.class_counts[i]),
                "group": GROUPS[self.groups[i]],
                "images": int(positives[i]),
                "average_precision": precisions[i],
                "auroc": known_areas[i],
            }
            for i in range(self.num_classes)
        ]

    def compute(self) -> dict[str, float | int | None]:
        """`map` over all classes with positive images, and over those of each group; fractions, None where empty."""
        rows = self.per_class()
        members = {"map": rows} | {group: [row for row in rows if row["group"] == group] for group in GROUPS}
        metrics = {name: _mean([row["average_precision"] for row in part]) for name, part in members.items()}
        metrics["auroc"] = _mean([row["auroc"] for row in rows])
        scores, _ = self._all()
        return metrics | {"num_images": len(scores), "num_nan": int(scores.isnan().any(dim=1).sum())}

    def _all(self) -> tuple[Tensor, Tensor]:
        if not self._scores:
            raise LiVTError("no image was kept; call update first.")
        self._scores, self._targets = [torch.cat(self._scores)], [torch.cat(self._targets)]
        return self._scores[0], self._targets[0]


def _mean(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
