"""Labels as arrays, and any dataset with the columns `image` and `label`. Linear in the rows, never one by one."""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import (
    ClassLabel,
    Dataset,
    DatasetInfo,
    Features,
    Image,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
)

from livt_hf.data.splits import label_counts
from livt_hf.errors import LiVTError
from livt_hf.settings import DataSettings

logger = logging.getLogger(__name__)

IMAGE_NAMES = ("image", "img", "picture", "file_name", "path")
LABEL_NAMES = ("label", "labels", "target", "class", "category")


@dataclass(frozen=True)
class Labels:
    """The labels of many images: `values[i]` is that of image i.

    Where images have any number of labels, image i has `values[offsets[i] : offsets[i + 1]]`.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None

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

    def with_values(self, values: np.ndarray) -> "Labels":
        return dataclasses.replace(self, values=values)

    def take(self, rows: np.ndarray) -> "Labels":
        """The labels of some of the images."""
        if self.offsets is None:
            return Labels(self.values[rows])
        starts, lengths = self.offsets[:-1][rows], np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return Labels(self.values[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])], offsets)

    def targets(self, rows: Sequence[int], num_classes: int) -> np.ndarray:
        """What a loss is given: class ids (B,), or rows of 0 and 1 (B, C) where images have any number of labels."""
        chosen = self.take(np.asarray(rows))
        if self.offsets is None:
            return chosen.values
        hot = np.zeros((len(chosen), num_classes), dtype=np.float32)
        hot[chosen.images, chosen.values] = 1
        return hot

    def counts(self, num_classes: int) -> np.ndarray:
        """Images per class (int64). An image with several labels counts once for each of them."""
        counts = label_counts(self.values, num_classes)
        if self.offsets is not None:  # two boxes of a car are one image with a car
            counts = np.bincount(
                np.unique(self.images * num_classes + self.values) % num_classes, minlength=num_classes
            )
        return counts.astype(np.int64)


def class_feature(dataset: Dataset) -> ClassLabel:
    """The names behind the labels, whether an image has one label or several."""
    return _class_label(dataset.features["label"])


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
    values, rows = dataset.data.column(column), rows_of(dataset)
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        lists = values.combine_chunks()
        lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        labels = Labels(lists.flatten().to_numpy(zero_copy_only=False), offsets)
    else:
        labels = Labels(values.to_numpy())
    return labels if rows is None else labels.take(rows)


def rows_of(dataset: Dataset) -> np.ndarray | None:
    """Which rows of the base table a dataset consists of; None means all. `datasets` has no public name for it."""
    return None if dataset._indices is None else dataset._indices.column(0).to_numpy()


def class_counts(dataset: Dataset) -> np.ndarray:
    """Images per class (int64). An image with several labels counts once for each of them."""
    return labels_of(dataset).counts(number_of_classes(dataset))


def label_statistics(dataset: Dataset) -> tuple[np.ndarray, int]:
    """Images per class and the number of images: the prior of class j is counts[j] / number, also for multi-label."""
    return class_counts(dataset), len(dataset)


def standard_columns(splits: dict[str, Dataset], settings: DataSettings) -> dict[str, Dataset]:
    """The splits with the columns `image` and `label` alone, and one list of class names.

    Image bytes are not copied. A split without labels (all -1, as the Hub publishes hidden test sets) is left out.
    Where another split names its classes in another order, its labels follow their names.
    `drop_empty` removes names without a training image; other splits lose the images of those classes.
    """
    image_column, label_column = _find_columns(splits["train"].features, settings)
    labels, names = _encoded_labels(splits, label_column)
    keep = np.arange(len(names))
    if settings.drop_empty:
        keep = np.flatnonzero(labels["train"].counts(len(names)))
        if len(keep) < len(names):
            dropped = [names[c] for c in np.setdiff1d(np.arange(len(names)), keep)]
            logger.warning("left out %d classes without a training image: %s", len(dropped), ", ".join(dropped[:10]))
    result = {}
    for split, dataset in splits.items():
        if labels[split].hidden:
            logger.warning('the split "%s" has no labels and is left out', split)
            continue
        label_counts(labels[split].values, len(names))  # raises where a label has no name
        own = _class_label(dataset.features[label_column])
        named = own is not None and own.names == names and len(keep) == len(names)
        columns = {image_column: "image"} | ({label_column: "label"} if named else {})
        images = dataset.select_columns(list(columns)).rename_columns({a: b for a, b in columns.items() if a != b})
        if images.features["image"] != Image():
            images = images.cast_column("image", Image())
        result[split] = images if named else _with_labels(images, labels[split], names, keep)
    return result


def _with_labels(images: Dataset, labels: Labels, names: list[str], keep: np.ndarray) -> Dataset:
    """Put a new label column beside the images, without those of classes that are not kept."""
    new_id = np.full(len(names), -1)
    new_id[keep] = np.arange(len(keep))
    feature, rows = ClassLabel(names=[names[i] for i in keep]), None
    if labels.offsets is not None:
        if len(keep) < len(names):
            raise LiVTError("drop_empty needs one label per image: remove the empty names from the dataset instead.")
        column = pa.ListArray.from_arrays(labels.offsets.astype(np.int32), labels.values)
        feature = List(feature)
    else:
        column = pa.array(new_id[labels.values] if len(labels) else labels.values, type=pa.int64())
        rows = None if len(keep) == len(names) else np.flatnonzero(new_id[labels.values] >= 0)
    features = Features(label=feature)
    beside = Dataset(pa.table({"label": column}).cast(features.arrow_schema), info=DatasetInfo(features=features))
    if images._indices is not None:
        images = images.flatten_indices()
    joined = concatenate_datasets([images, beside], axis=1, split=images.split)
    return joined if rows is None else joined.select(rows)


def _encoded_labels(splits: dict[str, Dataset], column: str) -> tuple[dict[str, Labels], list[str]]:
    """Labels as integers for every split, and the names behind them."""
    raw = {split: _checked(labels_of(dataset, column), split) for split, dataset in splits.items()}
    classes = _class_label(splits["train"].features[column])
    if classes is not None:
        for split, dataset in splits.items():
            raw[split] = _by_name(raw[split], _class_label(dataset.features[column]), classes.names, split)
        return raw, classes.names
    values = np.concatenate([labels.values for labels in raw.values()])
    if values.dtype.kind in "iu":
        return raw, [str(i) for i in range(int(values.max()) + 1)]
    if values.dtype.kind not in "OUSb":
        raise LiVTError(
            f'column "{column}" holds {values.dtype}, not classes; the columns are '
            f"{_described(splits['train'].features)}."
        )
    names = pa.array(sorted({str(v) for v in np.unique(values.astype(str))}))
    encoded = {}
    for split, labels in raw.items():
        ids = pc.index_in(pa.array(labels.values.astype(str)), value_set=names)
        encoded[split] = labels.with_values(ids.to_numpy().astype(np.int64))
    return encoded, names.to_pylist()


def _by_name(labels: Labels, own: ClassLabel | None, names: list[str], split: str) -> Labels:
    """Labels under a split's own class names as labels under the training split's; plain numbers are taken as ids."""
    if own is None or own.names == names or labels.hidden:
        return labels
    id_of = {name: i for i, name in enumerate(names)}
    new_id = np.array([id_of.get(name, -1) for name in own.names])
    counts = label_counts(labels.values, len(own.names))  # raises where a label has no name
    strangers = [own.names[i] for i in np.flatnonzero((counts > 0) & (new_id < 0))]
    if strangers:
        raise LiVTError(
            f'the split "{split}" has images of {len(strangers)} classes that the training split does not name (such '
            f"as {', '.join(strangers[:5])}): name the classes alike in both, or remove those images."
        )
    return labels.with_values(new_id[labels.values])


def _class_label(feature) -> ClassLabel | None:
    element = feature.feature if isinstance(feature, List) else feature
    return element if isinstance(element, ClassLabel) else None


def _checked(labels: Labels, split: str) -> Labels:
    values = labels.values
    empty = np.equal(values, None) if values.dtype.kind == "O" else values != values  # NaN: an empty integer
    if empty.any():
        raise LiVTError(f'row {int(np.argmax(empty))} of the split "{split}" has no label: remove such rows.')
    return labels


def _find_columns(features: Features, settings: DataSettings) -> tuple[str, str]:
    """The columns of the images and of the labels: as named by the settings, or found."""
    image_column = settings.image_column or _find_image_column(features)
    label_column = settings.label_column or _find_label_column(features)
    for name, column in (("image_column", image_column), ("label_column", label_column)):
        if column not in features:
            raise LiVTError(f'there is no {name} "{column}"; the columns are {_described(features)}.')
    return image_column, label_column


def _find_image_column(features: Features) -> str:
    """The column of images: the only one of that type, or one with a telling name."""
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    if len(images) != 1:
        images = [name for name in IMAGE_NAMES if name in (images or features)]
    if not images:
        raise LiVTError(f"found no image column; name it with --image_column, the columns are {_described(features)}.")
    return images[0]


def _find_label_column(features: Features) -> str:
    """The column of labels: one with a telling name, or the only one with class names."""
    named = [name for name in LABEL_NAMES if name in features]
    classes = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    if not named and len(classes) != 1:
        raise LiVTError(f"found no label column among {_described(features)}: name it with --label_column.")
    return (named or classes)[0]


def _described(features: Features) -> str:
    kinds = {name: type(f).__name__ if not isinstance(f, Value) else f.dtype for name, f in features.items()}
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def standard_stream(dataset: IterableDataset, settings: DataSettings) -> IterableDataset:
    """The same for a stream, whose labels must already have names: nothing is read to find them."""
    if dataset.features is None:
        raise LiVTError("the stream does not declare its columns: load it without streaming.")
    image_column, label_column = _find_columns(dataset.features, settings)
    if _class_label(dataset.features[label_column]) is None:
        raise LiVTError(f'column "{label_column}" of the stream has no class names: load it without streaming.')
    renamed = {old: new for old, new in ((image_column, "image"), (label_column, "label")) if old != new}
    # Renaming hands the rows through Python: decoded images would be encoded again, and a broken one end the stream.
    encoded = dataset.select_columns([image_column, label_column]).cast_column(image_column, Image(decode=False))
    return encoded.rename_columns(renamed).cast_column("image", Image())
