"""Which classes are taken for which, without a table of classes by classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from livt_hf.metrics.groups import as_counts, check_labels


def confusions(
    predictions: Tensor, labels: Tensor, class_counts: Sequence[int] | Tensor, names: Sequence[str] | None = None
) -> list[dict]:
    """Pairs of a label and a wrong prediction, the most frequent first; -1 is an image without a prediction.

    Each with the images so confused, and their share of the label's images.
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
