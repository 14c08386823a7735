"""Metrics of images with several labels, and the thresholds from which on labels are given."""

from collections.abc import Sequence

import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.predictions.metrics import recall_precision_f1
from livt_hf.predictions.ranking import one_against_rest
from livt_hf.predictions.shot_groups import ClassMetrics, check_scores, class_mean, group_means

ENOUGH = 5  # images with a label that choose its threshold; classes with fewer choose one together


def best_thresholds(scores: Tensor, targets: Tensor, weights: Tensor | float = 1.0) -> list[float]:
    """Choose the probability from which on each label is given: that of the highest F1 on held-out images.

    `scores` are probabilities (N, C) and `targets` 0 and 1. Labels that too few images
    have share one threshold. Where there is nothing to learn from, it is 0.5.
    `weights` (C,) say how often an image with a label counts, where the label will be more frequent than it is here.
    """
    hits = targets.double() * weights
    positives = targets.sum(dim=0)
    enough = (positives >= ENOUGH) & (positives < len(targets))
    thresholds = torch.full((scores.shape[1],), 0.5, dtype=torch.float64)
    if (~enough).any():
        thresholds[~enough] = _best_threshold(scores[:, ~enough].flatten(), hits[:, ~enough].flatten())
    for label in enough.nonzero()[:, 0].tolist():
        thresholds[label] = _best_threshold(scores[:, label], hits[:, label])
    return thresholds.tolist()


def _best_threshold(scores: Tensor, hits: Tensor) -> float:
    """Return the middle between the last score to give and the next one; the highest of equally good ones.

    `hits` are the weights of images with the label, and 0 for the others.
    """
    scores, order = scores.double().sort(descending=True)
    hits, others = hits[order], hits[order] == 0
    if others.all() or not others.any():
        return 0.5
    f1 = 2 * hits.cumsum(0) / (hits.cumsum(0) + others.cumsum(0) + hits.sum())
    f1[:-1][scores[:-1] == scores[1:]] = 0  # equal scores are given together
    last = int(f1.argmax())
    below = scores[last + 1] if last + 1 < len(scores) else 0.0
    return float((scores[last] + below) / 2)


class MultiLabelMetrics(ClassMetrics):
    """Mean average precision overall and by group, AUROC and, where labels are given, macro precision, recall and F1.

    Keeps 5 or 6 bytes per image and class. Classes without a positive test image take no part, and in AUROC those
    without a negative one. A NaN score ranks last.
    """

    def __init__(self, class_counts: Sequence[int] | Tensor, **thresholds: int):
        super().__init__(class_counts, **thresholds)
        self._scores: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._given: list[Tensor] = []

    def update(self, scores: Tensor, targets: Tensor, given: Tensor | None = None) -> None:
        """Keep a batch of (B, C) logits or probabilities with its (B, C) targets of 0 and 1.

        `given` says which labels the model gives; without it there are rankings only.
        """
        scores, targets = torch.as_tensor(scores).detach().cpu().float(), torch.as_tensor(targets).cpu()
        check_scores(scores, self.num_classes)
        if targets.shape != scores.shape:
            raise LiVTError(f"targets have shape {tuple(targets.shape)} and scores {tuple(scores.shape)}; match them.")
        if not ((targets == 0) | (targets == 1)).all():
            raise LiVTError("targets must be 0 or 1 for each class; soft labels have no average precision.")
        self._scores.append(scores)
        self._targets.append(targets.bool())
        if given is not None:
            self._given.append(given.cpu())

    def per_class(self, names: Sequence[str] | None = None) -> list[dict]:
        """Return one row per class: training images, group, positive test images, and its metrics."""
        _, targets = self._all()
        return self.rows(names, targets.sum(dim=0), self._by_class())

    def compute(self) -> dict[str, float | int | None]:
        """Return `map` over all classes with positive images and by group, as fractions; None where empty."""
        (scores, _), values = self._all(), self._by_class()
        precisions = values.pop("average_precision")
        metrics = {"map": class_mean(precisions)} | group_means(precisions, self.groups)
        metrics |= {"auroc": class_mean(values.pop("auroc"))}
        metrics |= {f"macro_{name}": class_mean(value) for name, value in values.items()}
        return metrics | {"num_images": len(scores), "num_nan": int(scores.isnan().any(dim=1).sum())}

    def _by_class(self) -> dict[str, Tensor]:
        """Return metrics by class; NaN for a class without a positive image."""
        scores, targets = self._all()
        rankings = one_against_rest(scores, targets)
        values = {name: rankings[name] for name in ("average_precision", "auroc")}
        if self._given:
            given = torch.cat(self._given)
            parts = recall_precision_f1(targets.sum(dim=0), (given & targets).sum(dim=0), given.sum(dim=0))
            values |= zip(("recall", "precision", "f1"), parts, strict=True)
        return values

    def _all(self) -> tuple[Tensor, Tensor]:
        if not self._scores:
            raise LiVTError("no image was kept; call update first.")
        self._scores, self._targets = [torch.cat(self._scores)], [torch.cat(self._targets)]
        return self._scores[0], self._targets[0]
