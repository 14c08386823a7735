"""Labels as arrays, and how a dataset is asked for them. Linear in the rows, never one by one; no image is read."""

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, IterableDataset, LargeList, List

from livt_hf.data.splits import label_counts
from livt_hf.errors import LiVTError

NAMED = 10  # classes or images that a warning names


@dataclass(frozen=True)
class Labels:
    """The labels of many images: `values[i]` is that of image i.

    Where images have any number of labels, image i has `values[offsets[i] : offsets[i + 1]]`.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None

    @classmethod
    def of_ids(cls, ids: pa.Array | pa.ChunkedArray, offsets: np.ndarray | None) -> "Labels":
        """Ids of which some are null: -1 where that is the one label of an image, and nothing in a list."""
        ids = ids.cast(pa.int64(), safe=False)  # unsigned numbers know no -1
        if offsets is None:
            return cls(ids.fill_null(-1).to_numpy())
        named = ids.is_valid().to_numpy(zero_copy_only=False)
        return cls(ids.drop_null().to_numpy(), offsets_of(named)[offsets])

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def images(self) -> np.ndarray:
        """Which image each of the values belongs to."""
        return np.arange(len(self)) if self.offsets is None else np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def hidden(self) -> bool:
        """Whether all are -1, which is how the Hub publishes test sets without labels."""
        return len(self.values) > 0 and bool((self.values == -1).all())

    def take(self, rows: np.ndarray) -> "Labels":
        """The labels of some of the images."""
        if self.offsets is None:
            return Labels(self.values[rows])
        starts, lengths = self.offsets[:-1][rows], np.diff(self.offsets)[rows]
        offsets = offsets_of(lengths)
        return Labels(self.values[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])], offsets)

    def relabelled(self, new_id: np.ndarray) -> tuple["Labels", np.ndarray]:
        """The labels under new class ids, of which -1 is none, and which images have one (or never had any)."""
        values = new_id[self.values] if len(self.values) else self.values
        if self.offsets is None:
            return Labels(values), values >= 0
        offsets = offsets_of(values >= 0)[self.offsets]
        return Labels(values[values >= 0], offsets), (np.diff(offsets) > 0) | (np.diff(self.offsets) == 0)

    def rarest(self, num_classes: int) -> np.ndarray:
        """One class per image, to stratify by: of several labels the one that fewest images have."""
        if self.offsets is None:
            return self.values
        rank = np.argsort(np.argsort(self.counts(num_classes), kind="stable"))
        best = np.full(len(self), num_classes)
        np.minimum.at(best, self.images, rank[self.values])
        return best

    def targets(self, rows: Sequence[int], num_classes: int) -> np.ndarray:
        """What a loss is given: class ids (B,), or rows of 0 and 1 (B, C) where images have any number of labels."""
        chosen = self.take(np.asarray(rows))
        if self.offsets is None:
            return chosen.values
        hot = np.zeros((len(chosen), num_classes), dtype=np.float32)
        hot[chosen.images, chosen.values] = 1
        return hot

    def to_arrow(self) -> pa.Array:
        values = pa.array(self.values, type=pa.int64())
        return values if self.offsets is None else pa.ListArray.from_arrays(self.offsets.astype(np.int32), values)

    def feature(self, names: list[str]) -> ClassLabel | List:
        """The type of a column of these labels."""
        return ClassLabel(names=names) if self.offsets is None else List(ClassLabel(names=names))

    def counts(self, num_classes: int) -> np.ndarray:
        """Images per class (int64). An image with several labels counts once for each of them."""
        counts = label_counts(self.values, num_classes, self.images)
        if self.offsets is not None:  # two boxes of a car are one image with a car
            pairs = np.unique(self.images * num_classes + self.values)
            counts = np.bincount(pairs % num_classes, minlength=num_classes)
        return counts.astype(np.int64)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Where each of some lists begins when one follows the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def plain_name(name: str) -> str:
    """A class name in the one form of its letters that most keyboards make: macOS spells ö as o and two points."""
    return unicodedata.normalize("NFC", name)


def flat_lists(column: pa.ChunkedArray | pa.Array) -> tuple[pa.ChunkedArray | pa.Array, np.ndarray | None]:
    """All values of a column of lists, and the offsets of the lists; one that is null counts as empty.

    Of a column without lists, the column itself and None.
    """
    kinds = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    if not any(is_kind(column.type) for is_kind in kinds):
        return column, None
    lengths = pc.list_value_length(column).fill_null(0)
    return pc.list_flatten(column), offsets_of(lengths.to_numpy(zero_copy_only=False))


def class_feature(dataset: Dataset) -> ClassLabel:
    """The names behind the labels, whether an image has one label or several."""
    return class_label(dataset.features["label"])


def number_of_classes(dataset: Dataset) -> int:
    """Classes that the dataset names, with or without images."""
    return class_feature(dataset).num_classes


def is_multi_label(dataset: Dataset) -> bool:
    """Whether an image has a list of labels."""
    return not isinstance(dataset.features["label"], ClassLabel)


def labels_of(dataset: Dataset, column: str = "label") -> Labels:
    """The labels of all images.

    The column of the base table is read and indexed by the rows that `select` left: through the mapping, `datasets`
    takes seconds for a million rows.
    """
    if isinstance(dataset, IterableDataset):
        raise LiVTError("a stream cannot be counted without reading it all: pass class_counts.")
    (values, offsets), rows = flat_lists(dataset.data.column(column)), rows_of(dataset)
    labels = Labels(values.to_numpy(), offsets)
    return labels if rows is None else labels.take(rows)


def group_codes(dataset: Dataset) -> np.ndarray:
    """The groups of all images as numbers, which sort faster than text."""
    return pa.array(labels_of(dataset, "group").values, type=pa.string()).dictionary_encode().indices.to_numpy()


def image_paths(dataset: Dataset) -> pa.ChunkedArray:
    """The files of all images; null for those that came without a name."""
    return of_rows(dataset, pc.struct_field(dataset.data.column("image"), "path"))


def embedded_sizes(dataset: Dataset) -> pa.ChunkedArray:
    """Bytes of the images that the dataset holds itself; null for those that stay in their files."""
    return of_rows(dataset, pc.binary_length(pc.struct_field(dataset.data.column("image"), "bytes")))


def digest_of(dataset: Dataset | IterableDataset) -> str | None:
    """By what a run remembers the images that it was trained on: no name can be read from it.

    A digest of the labels and file names of all images, in their order, and of the length of those without a name.
    Folders do not count, for data may move. A stream is not read for it and has none.
    """
    if isinstance(dataset, IterableDataset):
        return None
    labels = labels_of(dataset)
    names = pc.replace_substring_regex(image_paths(dataset), r"^.*[/\\]", "")
    texts = pc.coalesce(names, embedded_sizes(dataset).cast(pa.string()), "")
    digest = hashlib.sha256("\0".join(texts.to_pylist()).encode())
    for numbers in (labels.values, [] if labels.offsets is None else labels.offsets):
        digest.update(np.asarray(numbers, dtype="<i8").tobytes())
    return digest.hexdigest()


def of_rows(dataset: Dataset, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """What a column of the base table, or one made of it, holds for the rows of a dataset."""
    rows = rows_of(dataset)
    return column if rows is None else column.take(pa.array(rows))


def rows_of(dataset: Dataset) -> np.ndarray | None:
    """Which rows of the base table a dataset consists of; None means all. `datasets` has no public name for it."""
    return None if dataset._indices is None else dataset._indices.column(0).to_numpy()


def class_counts(dataset: Dataset) -> np.ndarray:
    """Images per class (int64). An image with several labels counts once for each of them."""
    return labels_of(dataset).counts(number_of_classes(dataset))


def first_names(names: Sequence[str]) -> str:
    """The first names of classes, and how many more there are: a dataset may have thousands."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def class_label(feature) -> ClassLabel | None:
    element = feature.feature if isinstance(feature, List | LargeList) else feature
    return element if isinstance(element, ClassLabel) else None
