"""Accuracy by shot group and calibration as sums and counts, which any number of processes can add up.

Conventions are those of the paper's released evaluation: accuracy counts images; a group's accuracy is the mean of the
accuracies of its classes that have test images; calibration uses 15 equal bins (a, b] of the confidence in the
prediction. The first bin also takes a confidence of exactly 0, so that no image is left out.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.metrics.groups import FEW_BELOW, GROUPS, MANY_ABOVE, as_counts, check_labels, check_scores, shot_groups

# Confidences are summed as multiples of 2^-32: integers add to the same sum in any order, on any number of processes,
# and the rounding is far below that of a float32 confidence. 2^31 images fit.
_ONE = 2**32
# Logits are read in blocks of 4 MiB, which the cache keeps from one reduction to the next.
_BLOCK = 2**20


class LongTailMetrics:
    """Counts right predictions and confidences of batches; memory grows with classes and bins, not with images.

    `confidence` says what the rows given to `update` are, and so what a prediction's confidence is: logits whose
    softmax (the authors' convention) or sigmoid is taken, or "given" probabilities. A row whose confidence is not a
    number counts as an image predicted wrongly, is counted in `num_nan` and takes no part in calibration.
    """

    def __init__(
        self,
        class_counts: Sequence[int] | Tensor,
        *,
        many_above: int = MANY_ABOVE,
        few_below: int = FEW_BELOW,
        bins: int = 15,
        confidence: Literal["softmax", "sigmoid", "given"] = "softmax",
    ):
        if confidence not in ("softmax", "sigmoid", "given"):
            raise LiVTError(f"confidence={confidence!r} is unknown; use 'softmax', 'sigmoid' or 'given'.")
        if bins < 1:
            raise LiVTError(f"bins={bins}; calibration needs at least one.")
        self.class_counts = as_counts(class_counts)
        self.groups = shot_groups(self.class_counts, many_above, few_below)
        self.num_classes = len(self.class_counts)
        self.num_bins = bins
        self.confidence = confidence
        self._state = torch.zeros(4 * self.num_classes + 3 * bins + 1, dtype=torch.int64)
        # Views into the state: what is added to them is in it.
        self._images, self._correct, self._confidence, self._nan, *rest = self._state.split(
            [self.num_classes] * 4 + [bins] * 3 + [1]
        )
        self._bin_images, self._bin_correct, self._bin_confidence, self._top5 = rest

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch of (B, C) logits (or probabilities, if "given") on any device with its (B,) class ids.

        The prediction is the argmax, the first one among equals.
        """
        logits, labels = torch.as_tensor(logits), torch.as_tensor(labels).cpu()
        check_scores(logits, self.num_classes)
        check_labels(labels, len(logits), self.num_classes)
        labels = labels.long()
        if len(labels) == 0:
            return
        rows = max(1, _BLOCK // self.num_classes)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        scratch = logits.new_empty((min(rows, len(logits)), self.num_classes), dtype=dtype)
        blocks = zip(logits.split(rows), labels.split(rows), strict=True)
        read = [self._read(*block, scratch) for block in blocks]
        predicted, confidence, in_top5 = (torch.cat(parts).cpu() for parts in zip(*read, strict=True))
        valid = ~confidence.isnan()
        self._check_range(confidence[valid])
        correct = (predicted == labels) & valid

        self._images += torch.bincount(labels, minlength=self.num_classes)
        self._correct += torch.bincount(labels[correct], minlength=self.num_classes)
        self._nan += torch.bincount(labels[~valid], minlength=self.num_classes)
        self._top5 += (in_top5 & valid).sum()
        confidence, correct = confidence[valid].clamp(0, 1), correct[valid]
        whole = (confidence * _ONE).round().long()  # exact: a power of two
        self._confidence.index_add_(0, labels[valid], whole)
        edges = torch.linspace(0, 1, self.num_bins + 1, dtype=confidence.dtype)
        place = (torch.bucketize(confidence, edges) - 1).clamp(min=0)  # edges[i] < confidence <= edges[i + 1]
        self._bin_images += torch.bincount(place, minlength=self.num_bins)
        self._bin_correct += torch.bincount(place[correct], minlength=self.num_bins)
        self._bin_confidence.index_add_(0, place, whole)

    def _read(self, scores: Tensor, labels: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a block of rows: prediction, its confidence, and whether the label is among the first five."""
        scores, labels, scratch = scores.to(scratch.dtype), labels.to(scores.device), scratch[: len(scores)]
        best, predicted = scores.max(dim=1)
        if self.confidence == "softmax":
            confidence = 1 / torch.sub(scores, best[:, None], out=scratch).exp_().sum(dim=1)  # softmax at its maximum
        else:
            confidence = best.sigmoid() if self.confidence == "sigmoid" else best
        own = scores.gather(1, labels[:, None])  # (B, 1)
        ahead = torch.gt(scores, own, out=scratch).sum(dim=1)  # comparing into floats is vectorised, into bools not
        # Among equals the first class ranks first, as in the argmax; without this constant logits would score 100 %.
        (doubtful,) = torch.where((ahead < 5) & (predicted != labels))
        (tied,) = torch.where(torch.eq(scores[doubtful], own[doubtful], out=scratch[: len(doubtful)]).sum(dim=1) > 1)
        tied = doubtful[tied]
        before = torch.arange(self.num_classes, device=scores.device) < labels[tied, None]
        ahead[tied] += ((scores[tied] == own[tied]) & before).sum(dim=1)
        return predicted, confidence, ahead < 5

    def _check_range(self, confidence: Tensor) -> None:
        """Refuse logits passed as probabilities; a rounding error above 1 is let through."""
        wrong = confidence[(confidence < 0) | (confidence > 1.001)]
        if len(wrong):
            raise LiVTError(
                f"a confidence of {wrong[0].item():.4g} is not in [0, 1]; pass probabilities, "
                "or logits with confidence='softmax' or 'sigmoid'."
            )

    def state_tensor(self) -> Tensor:
        """All that was counted as one flat int64 tensor; the sum over processes is the state of all their images."""
        return self._state.clone()

    def load_state_tensor(self, state: Tensor) -> None:
        """Replace all that was counted, for instance by `accelerator.reduce(state.to(accelerator.device), "sum")`."""
        if state.shape != self._state.shape or state.dtype != torch.int64:
            raise LiVTError(
                f"a {state.dtype} state of shape {tuple(state.shape)} does not belong to {self.num_classes} classes "
                f"and {self.num_bins} bins; load what state_tensor() of equal settings gave."
            )
        self._state.copy_(state)

    @property
    def num_images(self) -> int:
        return int(self._images.sum())

    def compute(self) -> dict[str, float | int | None]:
        """All metrics as fractions; what has no image to be measured on is None."""
        images = self.num_images
        if images == 0:
            raise LiVTError("no image was counted; call update first.")
        accuracies, present = self._accuracies()
        calibrated = int(self._bin_images.sum())
        filled = self._bin_images > 0
        gaps = (self._bin_confidence[filled].double() / _ONE - self._bin_correct[filled]).abs()
        return {
            "accuracy": int(self._correct.sum()) / images,
            "top5": int(self._top5) / images if self.num_classes >= 5 else None,
            **{name: _mean(accuracies[present & (self.groups == i)]) for i, name in enumerate(GROUPS)},
            "mean_class_accuracy": _mean(accuracies[present]),
            "worst_class_accuracy": accuracies[present].min().item(),
            "ece": gaps.sum().item() / calibrated if calibrated else None,
            "mce": (gaps / self._bin_images[filled]).max().item() if calibrated else None,
            "mean_confidence": int(self._bin_confidence.sum()) / _ONE / calibrated if calibrated else None,
            "num_images": images,
            "num_nan": int(self._nan.sum()),
        }

    def _accuracies(self) -> tuple[Tensor, Tensor]:
        """Accuracy of each class, and which classes have test images (the others' is meaningless)."""
        return self._correct.double() / self._images.clamp(min=1), self._images > 0

    def per_class(self, names: Sequence[str] | None = None) -> list[dict]:
        """A row a class: training images, group, test images, accuracy and mean confidence (None without images)."""
        accuracies, present = self._accuracies()
        calibrated = self._images - self._nan
        confidences = self._confidence.double() / _ONE / calibrated.clamp(min=1)
        columns = {
            "class": range(self.num_classes),
            "name": [str(i) for i in range(self.num_classes)] if names is None else names,
            "count": self.class_counts.tolist(),
            "group": [GROUPS[i] for i in self.groups.tolist()],
            "images": self._images.tolist(),
            "accuracy": [a if p else None for a, p in zip(accuracies.tolist(), present.tolist(), strict=True)],
            "confidence": [c if n else None for c, n in zip(confidences.tolist(), calibrated.tolist(), strict=True)],
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @property
    def bins(self) -> list[dict]:
        """The reliability diagram: a row a bin (low, high] with its images, accuracy and mean confidence."""
        rows = []
        sums = zip(self._bin_images.tolist(), self._bin_correct.tolist(), self._bin_confidence.tolist(), strict=True)
        for i, (images, correct, confidence) in enumerate(sums):
            row = {"low": i / self.num_bins, "high": (i + 1) / self.num_bins, "images": images}
            row |= (
                {"accuracy": correct / images, "confidence": confidence / _ONE / images}
                if images
                else {
                    "accuracy": None,
                    "confidence": None,
                }
            )
            rows.append(row)
        return rows

    def intervals(
        self, level: float = 0.95, seed: int = 0, resamples: int = 1000
    ) -> dict[str, tuple[float, float] | None]:
        """Bootstrap intervals of the accuracies: how far another test set with as many images a class would move them.

        Classes are fixed (they are the task, not a sample), so images are resampled within each class. Drawing from
        right and wrong images with replacement gives a binomial number of right ones, so sums and counts are all it
        takes. n - 1 images are drawn of n: with n the variance would come out (n - 1) / n of what it is, which
        matters at three test images a class (iNat18). A class with one image has no measurable variance and adds none.
        """
        if not 0 < level < 1:
            raise LiVTError(f"level={level} is not between 0 and 1; 0.95 is usual.")
        accuracies, present = self._accuracies()
        values, images = accuracies[present].numpy(), self._images[present].numpy()
        groups = self.groups[present].numpy()
        # Each interval is that of a weighted sum of class accuracies.
        weights = {"accuracy": images / max(images.sum(), 1), "mean_class_accuracy": np.ones(len(images))}
        weights |= {name: (groups == i).astype(float) for i, name in enumerate(GROUPS)}
        weights = {name: w / w.sum() if w.sum() else None for name, w in weights.items()}
        wanted = [name for name, w in weights.items() if w is not None]
        matrix = np.stack([weights[name] for name in wanted], axis=1) if wanted else None
        rng = np.random.default_rng(seed)
        drawn = np.maximum(images - 1, 1)
        sums = []
        for _ in range(resamples if wanted else 0):  # one resample at a time keeps memory O(classes)
            resampled = np.where(images > 1, rng.binomial(drawn, values) / drawn, values)
            sums.append(resampled @ matrix)
        tails = [(1 - level) / 2, (1 + level) / 2]
        bounds = np.quantile(np.array(sums), tails, axis=0) if wanted else np.empty((2, 0))
        return {
            name: tuple(bounds[:, wanted.index(name)].tolist()) if name in wanted else None
            for name in ("accuracy", *GROUPS, "mean_class_accuracy")
        }


def _mean(values: Tensor) -> float | None:
    return values.mean().item() if len(values) else None


def long_tail_metrics(logits, labels, class_counts, **settings) -> dict[str, float | int | None]:
    """All metrics of a whole test set at once (torch or numpy); `settings` are those of `LongTailMetrics`."""
    metrics = LongTailMetrics(class_counts, **settings)
    metrics.update(logits, labels)
    return metrics.compute()
