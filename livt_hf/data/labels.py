"""Labels, groups and paths of a dataset as arrays. Linear in the rows, never one by one; no image is read."""

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, IterableDataset, LargeList, List

from livt_hf.data.subsample import label_counts
from livt_hf.errors import LiVTError

# Columns of a dataset of boxes: what is cut out of each picture, and the number of a box in its file.
BOX, BOX_MARGIN, BOX_ROW = "box", "box_margin", "box_row"
CORNERS = ("x_min", "y_min", "x_max", "y_max")  # columns of a box in tables that are written
MAX_NAMED = 10  # classes or images that a warning names
MAX_CLASSES = 1_000_000  # larger numbers are ids of something else


@dataclass(frozen=True)
class Labels:
    """The labels of many images: `values[i]` is that of image i.

    Where images have any number of labels, image i has `values[offsets[i] : offsets[i + 1]]`.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None

    @classmethod
    def from_ids(cls, ids: pa.Array | pa.ChunkedArray, offsets: np.ndarray | None) -> "Labels":
        """Build labels of ids, of which some are null: -1 for the one label of an image, dropped from a list."""
        ids = ids.cast(pa.int64(), safe=False)  # unsigned numbers know no -1
        if offsets is None:
            return cls(ids.fill_null(-1).to_numpy())
        is_valid = ids.is_valid().to_numpy(zero_copy_only=False)
        return cls(ids.drop_null().to_numpy(), offsets_of(is_valid)[offsets])

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def images(self) -> np.ndarray:
        """Return the number of the image that each of the values belongs to."""
        return np.arange(len(self)) if self.offsets is None else np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def hidden(self) -> bool:
        """Return True if all are -1, which is how the Hub publishes test sets without labels."""
        return len(self.values) > 0 and bool((self.values == -1).all())

    def take(self, rows: np.ndarray) -> "Labels":
        """Return the labels of some of the images."""
        if self.offsets is None:
            return Labels(self.values[rows])
        starts, lengths = self.offsets[:-1][rows], np.diff(self.offsets)[rows]
        offsets = offsets_of(lengths)
        return Labels(self.values[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])], offsets)

    def relabelled(self, new_id: np.ndarray) -> tuple["Labels", np.ndarray]:
        """Return the labels under new class ids, of which -1 is none, and which images keep one or never had any."""
        values = new_id[self.values] if len(self.values) else self.values
        if self.offsets is None:
            return Labels(values), values >= 0
        offsets = offsets_of(values >= 0)[self.offsets]
        return Labels(values[values >= 0], offsets), (np.diff(offsets) > 0) | (np.diff(self.offsets) == 0)

    def rarest(self, num_classes: int) -> np.ndarray:
        """Return one class per image, to stratify by: of several labels the one that fewest images have."""
        if self.offsets is None:
            return self.values
        rank = np.argsort(np.argsort(self.counts(num_classes), kind="stable"))
        best = np.full(len(self), num_classes)
        np.minimum.at(best, self.images, rank[self.values])
        return best

    def targets(self, rows: Sequence[int], num_classes: int) -> np.ndarray:
        """Return the targets of a loss: class ids (B,), or multi-hot rows (B, C) where images have several labels."""
        chosen = self.take(np.asarray(rows))
        if self.offsets is None:
            return chosen.values
        hot = np.zeros((len(chosen), num_classes), dtype=np.float32)
        hot[chosen.images, chosen.values] = 1
        return hot

    def to_arrow(self, names: pa.Array | None = None) -> pa.Array:
        """Return the labels as an Arrow column of ids or, where given, of class names."""
        values = pa.array(self.values, type=pa.int64())
        values = values if names is None else names.take(values)
        return values if self.offsets is None else pa.ListArray.from_arrays(self.offsets.astype(np.int32), values)

    def feature(self, names: list[str]) -> ClassLabel | List:
        """Return the type of a column of these labels."""
        return ClassLabel(names=names) if self.offsets is None else List(ClassLabel(names=names))

    def counts(self, num_classes: int) -> np.ndarray:
        """Return the images per class (int64). An image with several labels counts once for each of them."""
        counts = label_counts(self.values, num_classes, self.images)
        if self.offsets is not None:  # two boxes of a car are one image with a car
            pairs = np.unique(self.images * num_classes + self.values)
            counts = np.bincount(pairs % num_classes, minlength=num_classes)
        return counts.astype(np.int64)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return where each of some lists begins when one follows the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def normalize_name(name: str) -> str:
    """Return a class name in the Unicode form that most keyboards make: macOS spells ö as o and two points."""
    return unicodedata.normalize("NFC", name)


def flatten_lists(column: pa.ChunkedArray | pa.Array) -> tuple[pa.ChunkedArray | pa.Array, np.ndarray | None]:
    """Return all values of a column of lists and the offsets of the lists; one that is null counts as empty.

    A column without lists is returned as it is, with None.
    """
    kinds = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    if not any(is_kind(column.type) for is_kind in kinds):
        return column, None
    lengths = pc.list_value_length(column).fill_null(0)
    return pc.list_flatten(column), offsets_of(lengths.to_numpy(zero_copy_only=False))


def class_label(feature) -> ClassLabel | None:
    """Return the class names behind a column of labels or lists of labels; None where it has none."""
    element = feature.feature if isinstance(feature, List | LargeList) else feature
    return element if isinstance(element, ClassLabel) else None


def class_feature(dataset: Dataset) -> ClassLabel:
    """Return the names behind the labels, whether an image has one label or several."""
    feature = class_label(dataset.features["label"])
    if feature is None:
        raise LiVTError('the labels have no names: cast them by dataset.class_encode_column("label").', "dataset")
    return feature


def number_of_classes(dataset: Dataset) -> int:
    """Return the number of classes that the dataset names, with or without images."""
    return class_feature(dataset).num_classes


def is_multi_label(dataset: Dataset) -> bool:
    """Return True if an image has a list of labels."""
    return not isinstance(dataset.features["label"], ClassLabel)


def labels_of(dataset: Dataset, column: str = "label") -> Labels:
    """Return the labels of all images.

    The column of the base table is read and indexed by the rows that `select` left: through the mapping, `datasets`
    takes seconds for a million rows.
    """
    if isinstance(dataset, IterableDataset):
        raise LiVTError("a stream cannot be counted without reading it all: pass class_counts.", "class_counts")
    (values, offsets), rows = flatten_lists(dataset.data.column(column)), row_indices(dataset)
    labels = Labels(values.to_numpy(), offsets)
    return labels if rows is None else labels.take(rows)


def class_counts(dataset: Dataset) -> np.ndarray:
    """Count the images of each class.

    Args:
        dataset: dataset with a column `label` of class labels or lists of them.

    Returns:
        Images per class, an int64 array of shape (C,). An image with several labels counts once for each of them.

    Example:
        >>> class_counts(load_long_tailed("glyphs", imbalance_factor=10)["train"])[[0, -1]].tolist()
        [800, 80]
    """
    return labels_of(dataset).counts(number_of_classes(dataset))


def group_codes(dataset: Dataset) -> np.ndarray:
    """Return the groups of all images as numbers, which sort faster than text."""
    return pa.array(labels_of(dataset, "group").values, type=pa.string()).dictionary_encode().indices.to_numpy()


def image_paths(dataset: Dataset) -> pa.ChunkedArray:
    """Return the files of all images; null for those that came without a name."""
    return select_rows(dataset, pc.struct_field(dataset.data.column("image"), "path"))


def embedded_sizes(dataset: Dataset) -> pa.ChunkedArray:
    """Return the bytes of the images that the dataset holds itself; null for those that stay in their files."""
    return select_rows(dataset, pc.binary_length(pc.struct_field(dataset.data.column("image"), "bytes")))


def digest_of(dataset: Dataset | IterableDataset) -> str | None:
    """Return the fingerprint by which a run remembers its training images: no name can be read from it.

    A digest of the labels, file names and boxes of all images, in their order, and of the length of those without a
    name.
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
    if BOX in dataset.column_names:
        boxes = select_rows(dataset, dataset.data.column(BOX)).combine_chunks()
        digest.update(boxes.flatten().to_numpy().astype("<f8").tobytes())
    return digest.hexdigest()


def select_rows(dataset: Dataset, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return what a column of the base table, or one made of it, holds for the rows of a dataset."""
    rows = row_indices(dataset)
    return column if rows is None else column.take(pa.array(rows))


def row_indices(dataset: Dataset) -> np.ndarray | None:
    """Return the rows of the base table that a dataset consists of; None means all.

    `datasets` has no public name for them.
    """
    return None if dataset._indices is None else dataset._indices.column(0).to_numpy()


def format_class_names(names: Sequence[str]) -> str:
    """Return the first names of classes and how many more there are: a dataset may have thousands."""
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
