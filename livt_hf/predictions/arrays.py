"""Arrays of any framework: checked on their way into a prediction record."""

import numpy as np
import pyarrow as pa
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.text import format_error

RESERVED = ("logits", "label", "model")  # columns that a record has itself
SUM_TOLERANCE = 0.01  # by which rounded probabilities of an image may miss the sum 1
_SMALLEST = {"softmax": 1e-12, "sigmoid": 1e-7}  # what stands for a probability that was rounded to 0


def are_distributions(values: np.ndarray) -> bool:
    """Return True if the numbers of each image are probabilities that sum to 1."""
    return bool((values >= 0).all() and (np.abs(values.sum(1) - 1) <= SUM_TOLERANCE).all())


def probabilities_to_logits(values: np.ndarray, activation: str) -> np.ndarray:
    """Return logits whose softmax or sigmoid gives probabilities (N, C), or raise an error if they are none."""
    values = np.asarray(values, dtype=np.float64)
    wrong = np.flatnonzero(~((values >= 0) & (values <= 1)).all(1))  # written this way so that NaN fails the check
    if len(wrong):
        row = values[wrong[0]]
        message = f"row {wrong[0]} holds {row[~((row >= 0) & (row <= 1))][0]:g}; probabilities lie between 0 and 1."
        raise LiVTError(message, argument="probabilities")
    least = _SMALLEST[activation]
    if activation == "sigmoid":
        values = values.clip(least, 1 - least)
        return np.log(values) - np.log1p(-values)
    sums = values.sum(1)
    wrong = np.flatnonzero(np.abs(sums - 1) > SUM_TOLERANCE)
    if len(wrong):
        raise LiVTError(
            f"the probabilities of row {wrong[0]} sum to {sums[wrong[0]]:.4g}; those of one label per image sum to 1, "
            "those of a sigmoid need loss bce.",
            argument="probabilities",
        )
    return np.log(values.clip(least))


def check_logits(logits, num_classes: int) -> np.ndarray:
    """Return logits of any framework as an array of float32 (N, C), or raise an error."""
    try:
        values = np.asarray(logits.detach().cpu() if isinstance(logits, Tensor) else logits)
        values = values.astype(np.float32, casting="same_kind", copy=False)  # not texts, not complex numbers
    except (TypeError, ValueError) as error:
        raise LiVTError("the logits are not numbers; pass an array (images, classes).", argument="logits") from error
    if values.ndim != 2 or values.shape[1] != num_classes:
        message = f"the logits have shape {values.shape} for {num_classes} class names; pass (images, {num_classes})."
        raise LiVTError(message, argument="logits")
    wrong = np.flatnonzero(np.isnan(values).any(1) | np.isposinf(values).any(1))
    if len(wrong):
        message = (
            f"the logits of {len(wrong)} images are NaN or infinite, first of row {wrong[0]}; leave those images out."
        )
        raise LiVTError(message, argument="logits")
    return values


def check_labels(labels, shape: tuple[int, int]) -> np.ndarray:
    """Return class ids (N,), or rows of 0 and 1 (N, C), for logits of a shape, or raise an error."""
    labels = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if labels.shape not in (shape, shape[:1]) or not (np.issubdtype(labels.dtype, np.integer) or labels.ndim == 2):
        raise LiVTError(
            f"the labels are {labels.dtype} of shape {labels.shape}; pass {shape[0]} class ids, or 0 and 1 for each "
            "class.",
            argument="labels",
        )
    allowed = (labels == 0) | (labels == 1) if labels.ndim == 2 else (labels >= 0) & (labels < shape[1])
    if not allowed.all():
        message = f"the labels hold {labels[~allowed][0]}; the classes are 0 to {shape[1] - 1}."
        raise LiVTError(message, argument="labels")
    return labels


def check_column(name: str, values, rows: int) -> pa.Array:
    """Return one value per image as a column of a record, or raise an error."""
    if name in RESERVED:
        raise LiVTError(f"a column cannot be called {name!r}, which the record has already.", argument=name)
    try:
        column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    except (pa.ArrowException, TypeError) as error:
        raise LiVTError(f"column {name!r} cannot be stored: {format_error(error)}.", argument=name) from error
    if len(column) != rows:
        raise LiVTError(f"column {name!r} has {len(column)} values for {rows} images; pass one each.", argument=name)
    return column
