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
        # Pairs as label * C + prediction, with how often they occur. In the first entry each pair stands once.
        self._counted = [(torch.zeros(0, dtype=torch.int64),) * 2]

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch of predicted class ids with its labels; -1 is an image without a prediction."""
        predictions, labels = torch.as_tensor(predictions).cpu(), torch.as_tensor(labels).cpu()
        check_labels(labels, len(predictions), self.num_classes)
        check_labels(predictions.where(predictions != -1, 0), len(labels), self.num_classes)
        predictions, labels = predictions.long(), labels.long()
        self._images += torch.bincount(labels, minlength=self.num_classes)
        wrong = (predictions != labels) & (predictions != -1)
        keys = labels[wrong] * self.num_classes + predictions[wrong]
        self._counted.append((keys, torch.ones_like(keys)))
        if sum(len(keys) for keys, _ in self._counted[1:]) > _PENDING:
            self._compact()

    def _compact(self) -> tuple[Tensor, Tensor]:
        """All entries as one: the pairs in order, and how often each occurs."""
        keys, times = map(torch.cat, zip(*self._counted, strict=True))
        keys, place = keys.unique(return_inverse=True)
        self._counted = [(keys, torch.zeros_like(keys).index_add_(0, place, times))]
        return self._counted[0]

    def merge(self, other: "ConfusionPairs") -> None:
        """Add what another one counted."""
        if self.num_classes != other.num_classes:
            raise LiVTError(f"pairs of {self.num_classes} and of {other.num_classes} classes cannot be merged.")
        self._counted += other._counted
        self._images += other._images

    def top(self, k: int = 20, names: Sequence[str] | None = None) -> list[dict]:
        """The k most frequent pairs: label, prediction, images so confused, and their share of the label's images."""
        keys, times = self._compact()
        order = times.argsort(descending=True, stable=True)[:k]  # equals in the order of label and prediction
        names = [str(label) for label in range(self.num_classes)] if names is None else names
        pairs = [divmod(key, self.num_classes) for key in keys[order].tolist()]
        return [
            {
                "label": label,
                "predicted": predicted,
                "images": images,
                "share": images / int(self._images[label]),
                "label_name": names[label],
                "predicted_name": names[predicted],
                "label_count": int(self.class_counts[label]),
                "predicted_count": int(self.class_counts[predicted]),
            }
            for (label, predicted), images in zip(pairs, times[order].tolist(), strict=True)
        ]
