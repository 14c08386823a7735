"""Accuracy, precision, F1 and calibration by shot group, counted so that any number of processes can add them up.

Conventions are those of the paper's released evaluation: accuracy counts images; a group's accuracy is the mean of the
accuracies of its classes that have test images; calibration uses 15 equal bins (a, b] of the confidence in the
prediction. The first bin also takes a confidence of exactly 0, so that no image is left out. Precision, recall and F1
are scikit-learn's, of the classes that have test images, 0 where a class is never predicted. The recall of a class is
its accuracy, so macro recall, or balanced accuracy, is `mean_class_accuracy`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from livt_hf.constants import FEW_BELOW, MANY_ABOVE
from livt_hf.errors import LiVTError

GROUPS = ("many", "medium", "few")
THRESHOLDS = {"many_above": MANY_ABOVE, "few_below": FEW_BELOW}
# Confidences are summed as multiples of 2^-32: integers add to the same sum in any order, on any number of processes,
# and the rounding is far below that of a float32 confidence. 2^31 images fit.
_ONE = 2**32
# Logits are read in blocks of 4 MiB, which the cache keeps from one reduction to the next.
_BLOCK = 2**20
_SORTED = 2**22  # scores that are ranked at a time
ENOUGH = 5  # images with a label that choose its threshold; classes with fewer choose one together


def shot_groups(
    class_counts: Sequence[int] | Tensor, many_above: int = MANY_ABOVE, few_below: int = FEW_BELOW
) -> Tensor:
    """Return the group of each class as an index into `GROUPS`; classes at the thresholds are medium."""
    if few_below > many_above + 1:
        raise LiVTError(
            f"few_below={few_below} is above many_above={many_above}, so a class would be in both groups; lower it.",
            "few_below",
        )
    counts = as_counts(class_counts)
    return 1 - (counts > many_above).long() + (counts < few_below).long()


def group_sizes(class_counts: Sequence[int] | Tensor) -> dict[str, int]:
    """Return the number of classes in each group."""
    return dict(zip(GROUPS, torch.bincount(shot_groups(class_counts), minlength=len(GROUPS)).tolist(), strict=True))


def class_mean(values: Tensor) -> float | None:
    """Return the mean over the classes whose value is not NaN, or None where there is none."""
    found = values[~values.isnan()]
    return found.mean().item() if len(found) else None


def group_means(values: Tensor, groups: Tensor, suffix: str = "") -> dict[str, float | None]:
    """Return the mean over the classes of each group, by the name of the group and a suffix."""
    return {f"{name}{suffix}": class_mean(values[groups == index]) for index, name in enumerate(GROUPS)}


class ClassMetrics:
    """Base of metrics that know the training images and shot groups of the classes."""

    def __init__(self, class_counts: Sequence[int] | Tensor, many_above: int = MANY_ABOVE, few_below: int = FEW_BELOW):
        self.class_counts = as_counts(class_counts)
        self.many_above, self.few_below = many_above, few_below
        self.groups = shot_groups(self.class_counts, many_above, few_below)
        self.num_classes = len(self.class_counts)

    def rows(self, names: Sequence[str] | None, images: Tensor, measured: dict[str, Tensor]) -> list[dict]:
        """Return one row per class: its id, name, training images, group, test images, and its metrics."""
        ids = torch.arange(self.num_classes)
        known: dict[str, Sequence | Tensor] = {
            "class": ids,
            "name": [str(label) for label in ids.tolist()] if names is None else names,
            "count": self.class_counts,
            "group": [GROUPS[i] for i in self.groups.tolist()],
            "images": images,
        }
        return as_rows(known | measured)


def as_rows(columns: Mapping[str, Sequence | Tensor]) -> list[dict]:
    """Return the rows of a table given by columns; NaN becomes None."""
    lists = (column.tolist() if isinstance(column, Tensor) else column for column in columns.values())
    return [
        {name: None if value != value else value for name, value in zip(columns, row, strict=True)}
        for row in zip(*lists, strict=True)
    ]


def as_counts(class_counts: Sequence[int] | Tensor) -> Tensor:
    """Return the training images of each class as a 1-D int64 tensor; a class may have none."""
    counts = torch.as_tensor(class_counts).cpu()
    if counts.ndim != 1 or len(counts) == 0:
        raise LiVTError(
            f"class_counts has shape {tuple(counts.shape)}; give one number of training images per class.",
            "class_counts",
        )
    if (counts < 0).any() or counts.is_floating_point() and (counts != counts.round()).any():
        raise LiVTError(
            "class_counts must be whole numbers of images, none below 0; pass counts, not shares.", "class_counts"
        )
    return counts.long()


def check_scores(scores: Tensor, num_classes: int) -> None:
    if scores.ndim != 2 or scores.shape[1] != num_classes:
        raise LiVTError(
            f"scores have shape {tuple(scores.shape)} but class_counts name {num_classes} classes; "
            f"pass (images, {num_classes})."
        )


def check_labels(labels: Tensor, num_images: int, num_classes: int, what: str = "label") -> None:
    """Raise an error for labels, or predictions, that are not one class of `class_counts` per image."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise LiVTError(
            f"{what}s are {labels.dtype} of shape {tuple(labels.shape)}, not one class id per image; "
            "for several labels per image use MultiLabelMetrics."
        )
    if len(labels) != num_images:
        raise LiVTError(f"{len(labels)} {what}s for {num_images} images; pass one per image.")
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise LiVTError(
            f"{what} {outside[0].item()} is outside the {num_classes} classes of class_counts; "
            "pass the counts of all classes, in the order of the model's outputs."
        )


class LongTailMetrics(ClassMetrics):
    """Counts right predictions and confidences of batches; memory grows with classes and bins, not with images.

    `confidence` says what the rows given to `update` are, and so what a prediction's confidence is: logits whose
    softmax (the authors' convention) or sigmoid is taken, or "given" probabilities. A row whose confidence is not a
    number counts as an image predicted wrongly, is counted in `num_nan` and takes no part in calibration. Predictions
    may be given as class ids too; they have no confidence and no top five. `thresholds` are those of `shot_groups`.
    """

    def __init__(
        self,
        class_counts: Sequence[int] | Tensor,
        *,
        bins: int = 15,
        confidence: Literal["softmax", "sigmoid", "given"] = "softmax",
        **thresholds: int,
    ):
        if confidence not in ("softmax", "sigmoid", "given"):
            raise LiVTError(f"confidence={confidence!r} is unknown; use 'softmax', 'sigmoid' or 'given'.")
        if bins < 1:
            raise LiVTError(f"bins={bins}; calibration needs at least one.")
        super().__init__(class_counts, **thresholds)
        self.num_bins = bins
        self.confidence = confidence
        self._state = torch.zeros(5 * self.num_classes + 3 * bins + 3, dtype=torch.int64)
        # Views into the state: what is added to them is in it.
        views = self._state.split([self.num_classes] * 5 + [bins] * 3 + [1] * 3)
        self._images, self._correct, self._predicted, self._confident, self._confidence, *rest = views
        self._bin_images, self._bin_correct, self._bin_confidence, self._top5, self._scored, self._nan = rest

    @torch.no_grad()
    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch of (B, C) logits (or probabilities, if "given"), or of (B,) predicted class ids.

        `labels` are (B,) class ids. Of logits the prediction is the argmax, the first one among equals.
        """
        predictions, labels = torch.as_tensor(predictions), torch.as_tensor(labels).cpu()
        ids = predictions.ndim == 1
        if ids:
            check_labels(predictions, len(labels), self.num_classes, "prediction")
        else:
            check_scores(predictions, self.num_classes)
        check_labels(labels, len(predictions), self.num_classes)
        if len(labels) == 0:
            return
        labels = labels.long()
        predicted, valid = (predictions.cpu(), slice(None)) if ids else self._count_scores(predictions, labels)
        hits = labels[valid][predicted[valid] == labels[valid]]
        self._images += torch.bincount(labels, minlength=self.num_classes)
        self._correct += torch.bincount(hits, minlength=self.num_classes)
        self._predicted += torch.bincount(predicted[valid], minlength=self.num_classes)

    def _count_scores(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Count top five and confidences, which need scores. Return predictions, and which are valid. (B,)"""
        rows = max(1, _BLOCK // self.num_classes)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        scratch = logits.new_empty((min(rows, len(logits)), self.num_classes), dtype=dtype)
        blocks = zip(logits.split(rows), labels.split(rows), strict=True)
        read = [self._read(*block, scratch) for block in blocks]
        predicted, confidence, in_top5 = (torch.cat(parts).cpu() for parts in zip(*read, strict=True))
        valid = ~confidence.isnan()
        self._check_range(confidence[valid])
        self._scored += len(labels)
        self._nan += (~valid).sum()
        self._top5 += (in_top5 & valid).sum()
        self._confident += torch.bincount(labels[valid], minlength=self.num_classes)
        confidence, correct = confidence[valid].clamp(0, 1), (predicted == labels)[valid]
        whole = (confidence * _ONE).round().long()  # exact: a power of two
        self._confidence.index_add_(0, labels[valid], whole)
        edges = torch.linspace(0, 1, self.num_bins + 1, dtype=confidence.dtype)
        place = (torch.bucketize(confidence, edges) - 1).clamp(min=0)  # edges[i] < confidence <= edges[i + 1]
        self._bin_images += torch.bincount(place, minlength=self.num_bins)
        self._bin_correct += torch.bincount(place[correct], minlength=self.num_bins)
        self._bin_confidence.index_add_(0, place, whole)
        return predicted, valid

    def _read(self, scores: Tensor, labels: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return prediction, confidence, and whether the label is among the first five, for a block of rows."""
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
        """Raise an error for logits passed as probabilities; a rounding error above 1 is allowed."""
        wrong = confidence[(confidence < 0) | (confidence > 1.001)]
        if len(wrong):
            raise LiVTError(
                f"a confidence of {wrong[0].item():.4g} is not in [0, 1]; pass probabilities, "
                "or logits with confidence='softmax' or 'sigmoid'."
            )

    def state_tensor(self) -> Tensor:
        """Return the counts as one flat int64 tensor; the sum over processes is the state of all their images."""
        return self._state.clone()

    def load_state_tensor(self, state: Tensor) -> None:
        """Replace the counts, for instance by `accelerator.reduce(state.to(accelerator.device), "sum")`."""
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
        """Return all metrics as fractions; None where there is no image to measure on."""
        images = self.num_images
        if images == 0:
            raise LiVTError("no image was counted; call update first.")
        recall, precision, f1 = self.by_class()
        calibrated = int(self._bin_images.sum())
        filled = self._bin_images > 0
        gaps = (self._bin_confidence[filled].double() / _ONE - self._bin_correct[filled]).abs()
        all_scored = int(self._scored) == images and self.num_classes >= 5
        return {
            "accuracy": int(self._correct.sum()) / images,
            "top5": int(self._top5) / images if all_scored else None,
            **group_means(recall, self.groups),
            "mean_class_accuracy": class_mean(recall),
            "worst_class_accuracy": recall[self._images > 0].min().item(),
            "macro_precision": class_mean(precision),
            "macro_f1": class_mean(f1),
            **group_means(precision, self.groups, "_precision"),
            **group_means(f1, self.groups, "_f1"),
            "ece": gaps.sum().item() / calibrated if calibrated else None,
            "mce": (gaps / self._bin_images[filled]).max().item() if calibrated else None,
            "mean_confidence": int(self._bin_confidence.sum()) / _ONE / calibrated if calibrated else None,
            "num_images": images,
            "num_nan": int(self._nan),
        }

    def by_class(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return recall, precision and F1 of each class; NaN where it has no test image."""
        return recall_precision_f1(self._images, self._correct, self._predicted)

    def per_class(self, names: Sequence[str] | None = None, **further: Tensor) -> list[dict]:
        """Return one row per class: training images, group, test images, accuracy (recall), precision, F1, confidence.

        `further` columns are numbers of the classes (C,), NaN where there is none.
        """
        recall, precision, f1 = self.by_class()
        confidence = self._confidence.double() / _ONE / self._confident
        measured = {"accuracy": recall, "precision": precision, "f1": f1, "confidence": confidence}
        return self.rows(names, self._images, measured | further)

    @property
    def bins(self) -> list[dict]:
        """Return the reliability diagram: a row per bin (low, high] with images, accuracy and mean confidence."""
        edges = torch.arange(self.num_bins + 1, dtype=torch.float64) / self.num_bins
        accuracy = self._bin_correct.double() / self._bin_images
        confidence = self._bin_confidence.double() / _ONE / self._bin_images
        measured = {"images": self._bin_images, "accuracy": accuracy, "confidence": confidence}
        return as_rows({"low": edges[:-1], "high": edges[1:]} | measured)


def recall_precision_f1(images: Tensor, correct: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute recall, precision and F1 of each class from its test images, right predictions and predictions.

    NaN for a class without test images; the precision of one that is never predicted is 0.
    """
    present, images, predicted = images > 0, images.double(), predicted.double()
    correct = correct.double().where(present, torch.nan)
    return correct / images, correct / predicted.where(predicted > 0, 1.0), 2 * correct / (images + predicted)


def long_tail_metrics(predictions, labels, class_counts, **settings) -> dict[str, float | int | None]:
    """Compute all metrics of a test set.

    Args:
        predictions: logits (images, classes) or class ids, torch or numpy.
        labels: class ids.
        class_counts: training images of each class.
        **settings: those of `LongTailMetrics`: `bins`, `confidence`, `many_above`, `few_below`.

    Returns:
        Fractions by name; None where there is no image to measure on.

    Example:
        >>> long_tail_metrics([[2.0, 0.0], [0.0, 1.0]], [0, 0], [500, 5])["many"]
        0.5
    """
    metrics = LongTailMetrics(class_counts, **settings)
    metrics.update(predictions, labels)
    return metrics.compute()


def confusions(
    predictions: Tensor, labels: Tensor, class_counts: Sequence[int] | Tensor, names: Sequence[str] | None = None
) -> list[dict]:
    """List pairs of a label and a wrong prediction, the most frequent first, without a table of classes by classes.

    Each with the images so confused, and their share of the label's images; -1 is an image without a prediction.
    """
    counts = as_counts(class_counts)
    classes = len(counts)
    check_labels(labels, len(predictions), classes)
    check_labels(predictions.where(predictions != -1, 0), len(labels), classes, "prediction")
    labels, predictions = labels.long(), predictions.long()  # the keys below would not fit into a byte
    names = [str(label) for label in range(classes)] if names is None else names
    images = torch.bincount(labels, minlength=classes)
    wrong = (predictions != labels) & (predictions != -1)
    keys, times = (labels[wrong] * classes + predictions[wrong]).unique(return_counts=True)
    order = times.argsort(descending=True, stable=True)  # equals in the order of label and prediction
    pairs = (divmod(key, classes) for key in keys[order].tolist())
    return [
        {
            "label": label,
            "predicted": predicted,
            "images": confused,
            "share": confused / int(images[label]),
            "label_name": names[label],
            "predicted_name": names[predicted],
            "label_count": int(counts[label]),
            "predicted_count": int(counts[predicted]),
        }
        for (label, predicted), confused in zip(pairs, times[order].tolist(), strict=True)
    ]


def one_against_rest(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Compute scikit-learn's `auroc` and `average_precision` of every class against the others. (C,)

    NaN where no image has the class and, for `auroc`, where all have it. A NaN score ranks last.

    Args:
        scores: (N, C), read in blocks of classes, so that they may lie in a mapped file.
        labels: class ids (N,), or 0 and 1 (N, C) where an image may have several.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # imports scipy

    auroc, precision = torch.full((2, scores.shape[1]), torch.nan, dtype=torch.float64)
    width = max(1, _SORTED // max(1, len(labels)))
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
