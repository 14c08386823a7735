"""Which classes are taken for which, without a table of classes by classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.metrics.groups import as_counts, check_labels

_PENDING = 2**16


class ConfusionPairs:
    """Counts (label, wrong prediction) pairs that occur: at most one entry per misclassified image.

    It pickles, so processes can exchange it (`accelerate.utils.gather_object([pairs])`) and `merge`.
    """

    def __init__(self, class_counts: Sequence[int] | Tensor):
        self.class_counts = as_counts(class_counts)
        self.num_classes = len(self.class_counts)
        self._images = torch.zeros(self.num_classes, dtype=torch.int64)
        self._keys = torch.zeros(0, dtype=torch.int64)  # label * C + prediction, each once
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._pending: list[Tensor] = []

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch of predicted class ids with its labels."""
        predictions, labels = torch.as_tensor(predictions).cpu(), torch.as_tensor(labels).cpu()
        check_labels(labels, len(predictions), self.num_classes)
        check_labels(predictions, len(labels), self.num_classes)
        predictions, labels = predictions.long(), labels.long()
        self._images += torch.bincount(labels, minlength=self.num_classes)
        wrong = predictions != labels
        self._pending.append(labels[wrong] * self.num_classes + predictions[wrong])
        if sum(map(len, self._pending)) > _PENDING:
            self._compact()

    def _compact(self) -> None:
        """Fold what came since the last time into the counts."""
        new = torch.cat([self._keys, *self._pending])
        amounts = torch.ones_like(new)
        amounts[: len(self._keys)] = self._counts
        self._keys, place = new.unique(return_inverse=True)
        self._counts = torch.zeros_like(self._keys).index_add_(0, place, amounts)
        self._pending = []

    def merge(self, other: "ConfusionPairs") -> None:
        """Add what another one counted."""
        if self.num_classes != other.num_classes:
            raise LiVTError(f"pairs of {self.num_classes} and of {other.num_classes} classes cannot be merged.")
        self._compact()
        other._compact()
        keys = torch.cat([self._keys, other._keys])
        amounts = torch.cat([self._counts, other._counts])
        self._keys, place = keys.unique(return_inverse=True)
        self._counts = torch.zeros_like(self._keys).index_add_(0, place, amounts)
        self._images += other._images

    def top(self, k: int = 20, names: Sequence[str] | None = None) -> list[dict]:
        """The k most frequent pairs: label, prediction, images so confused, and their share of the label's images."""
        self._compact()
        order = self._counts.argsort(descending=True, stable=True)[:k]  # equals in the order of label and prediction
        rows = []
        for key, images in zip(self._keys[order].tolist(), self._counts[order].tolist(), strict=True):
            label, predicted = divmod(key, self.num_classes)
            row = {"label": label, "predicted": predicted, "images": images}
            row["share"] = images / int(self._images[label])
            row["label_name"] = str(label) if names is None else names[label]
            row["predicted_name"] = str(predicted) if names is None else names[predicted]
            rows.append(row | {"label_count": int(self.class_counts[label])})
            rows[-1]["predicted_count"] = int(self.class_counts[predicted])
        return rows
