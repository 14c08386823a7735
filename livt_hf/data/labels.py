"""Labels of a data set as arrays: class counts and multi-hot rows. Linear in the rows, never one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, IterableDataset

from livt_hf.data.splits import label_counts
from livt_hf.errors import LiVTError


@dataclass(frozen=True)
class LabelLists:
    """Several labels an image: image i has `values[offsets[i] : offsets[i + 1]]`."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def images(self) -> np.ndarray:
        """Which image each of the values belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))


def class_feature(dataset: Dataset) -> ClassLabel:
    """The names behind the labels, whether an image has one label or several."""
    feature = dataset.features["label"]
    return feature if isinstance(feature, ClassLabel) else feature.feature


def number_of_classes(dataset: Dataset) -> int:
    """Classes that the data set names, with or without images."""
    return class_feature(dataset).num_classes


def is_multi_label(dataset: Dataset) -> bool:
    """Whether an image has a list of labels."""
    return not isinstance(dataset.features["label"], ClassLabel)


def labels_of(dataset: Dataset, column: str = "label") -> np.ndarray | LabelLists:
    """The labels of all images.

    The column of the base table is read and indexed by the rows that `select` left: through the mapping, `datasets`
    takes seconds for a million rows.
    """
    if isinstance(dataset, IterableDataset):
        raise LiVTError("a stream cannot be counted without reading it all: pass class_counts.")
    values, rows = dataset.data.column(column), rows_of(dataset)
    if not _is_list(values.type):
        values = values.to_numpy()
        return values if rows is None else values[rows]
    lists = values.combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    starts = np.cumsum(lengths) - lengths
    if rows is not None:
        lengths, starts = lengths[rows], starts[rows]
        ends = np.cumsum(lengths)
        flat = flat[np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())]
    return LabelLists(flat, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def rows_of(dataset: Dataset) -> np.ndarray | None:
    """Which rows of the base table a data set consists of; None means all. `datasets` has no public name for it."""
    return None if dataset._indices is None else dataset._indices.column(0).to_numpy()


def _is_list(arrow_type: pa.DataType) -> bool:
    return pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)


def class_counts(dataset: Dataset) -> np.ndarray:
    """Images per class (int64). An image with several labels counts once for each of them."""
    return label_statistics(dataset)[0]


def label_statistics(dataset: Dataset) -> tuple[np.ndarray, int]:
    """Images per class and the number of images: the prior of class j is counts[j] / number, also for multi-label."""
    labels, num_classes = labels_of(dataset), number_of_classes(dataset)
    values = labels.values if isinstance(labels, LabelLists) else labels
    counts = label_counts(values, num_classes)
    if isinstance(labels, LabelLists):  # two boxes of a car are one image with a car
        pairs = np.unique(labels.images * num_classes + values)
        counts = np.bincount(pairs % num_classes, minlength=num_classes)
    return counts.astype(np.int64), len(labels)


def multi_hot_of(labels: LabelLists, indices: Sequence[int], num_classes: int) -> np.ndarray:
    """Rows of 0 and 1 (B, C) for the given images."""
    rows = np.zeros((len(indices), num_classes), dtype=np.float32)
    for row, index in zip(rows, indices, strict=True):
        row[labels.values[labels.offsets[index] : labels.offsets[index + 1]]] = 1
    return rows
