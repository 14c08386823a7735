"""Any data set with images and labels to the columns `image` and `label`, with class names."""

import logging

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

from livt_hf.data.labels import LabelLists, labels_of
from livt_hf.data.splits import label_counts
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

IMAGE_NAMES = ("image", "img", "picture", "file_name", "path")
LABEL_NAMES = ("label", "labels", "target", "class", "category")


def standard_columns(
    splits: dict[str, Dataset],
    image_column: str | None = None,
    label_column: str | None = None,
    drop_empty: bool = False,
) -> dict[str, Dataset]:
    """The splits with the columns `image` and `label` alone, and one list of class names.

    Image bytes are not copied. A split without labels (all -1, as the Hub publishes hidden test sets) is left out.
    Where another split names its classes in another order, its labels follow their names.
    `drop_empty` removes names without a training image; other splits lose the images of those classes.
    """
    train = splits["train"]
    image_column = image_column or find_image_column(train.features)
    label_column = label_column or find_label_column(train.features)
    for name, column in (("image_column", image_column), ("label_column", label_column)):
        if column not in train.features:
            raise LiVTError(f'there is no {name} "{column}"; the columns are {_described(train.features)}.')
    labels, names = _encoded_labels(splits, label_column)
    keep = np.arange(len(names))
    if drop_empty:
        keep = np.flatnonzero(label_counts(_values(labels["train"]), len(names)))
        if len(keep) < len(names):
            logger.warning("left out %d classes without a training image", len(names) - len(keep))
    result = {}
    for split, dataset in splits.items():
        values = _values(labels[split])
        if len(values) and (values == -1).all():
            logger.warning('the split "%s" has no labels and is left out', split)
            continue
        label_counts(values, len(names))  # raises where a label has no name
        own = _class_label(dataset.features[label_column])
        named = own is not None and own.names == names and len(keep) == len(names)
        columns = {image_column: "image"} | ({label_column: "label"} if named else {})
        images = dataset.select_columns(list(columns)).rename_columns({a: b for a, b in columns.items() if a != b})
        if images.features["image"] != Image():
            images = images.cast_column("image", Image())
        result[split] = images if named else _with_labels(images, labels[split], names, keep)
    return result


def _with_labels(images: Dataset, labels, names: list[str], keep: np.ndarray) -> Dataset:
    """Put a new label column beside the images, without those of classes that are not kept."""
    new_id = np.full(len(names), -1)
    new_id[keep] = np.arange(len(keep))
    feature = ClassLabel(names=[names[i] for i in keep])
    if isinstance(labels, LabelLists):
        if len(keep) < len(names):
            raise LiVTError("drop_empty is for one label an image: remove the empty names from the data set instead.")
        column = pa.ListArray.from_arrays(labels.offsets.astype(np.int32), labels.values)
        feature, rows = List(feature), None
    else:
        column = pa.array(new_id[labels] if len(labels) else labels, type=pa.int64())
        rows = None if len(keep) == len(names) else np.flatnonzero(new_id[labels] >= 0)
    features = Features(label=feature)
    beside = Dataset(pa.table({"label": column}).cast(features.arrow_schema), info=DatasetInfo(features=features))
    if images._indices is not None:
        images = images.flatten_indices()
    joined = concatenate_datasets([images, beside], axis=1, split=images.split)
    return joined if rows is None else joined.select(rows)


def _encoded_labels(splits: dict[str, Dataset], column: str) -> tuple[dict, list[str]]:
    """Labels as integers for every split, and the names behind them."""
    raw = {split: _checked(labels_of(dataset, column), split) for split, dataset in splits.items()}
    classes = _class_label(splits["train"].features[column])
    if classes is not None:
        for split, dataset in splits.items():
            raw[split] = _by_name(raw[split], _class_label(dataset.features[column]), classes.names, split)
        return raw, classes.names
    values = np.concatenate([_values(labels) for labels in raw.values()])
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
        ids = pc.index_in(pa.array(_values(labels).astype(str)), value_set=names).to_numpy().astype(np.int64)
        encoded[split] = LabelLists(ids, labels.offsets) if isinstance(labels, LabelLists) else ids
    return encoded, names.to_pylist()


def _by_name(labels: np.ndarray | LabelLists, own: ClassLabel | None, names: list[str], split: str):
    """Labels under a split's own class names as labels under the training split's; plain numbers are taken as ids."""
    values = _values(labels)
    hidden = len(values) > 0 and (values == -1).all()
    if own is None or own.names == names or hidden:
        return labels
    id_of = {name: i for i, name in enumerate(names)}
    new_id = np.array([id_of.get(name, -1) for name in own.names])
    counts = label_counts(values, len(own.names))  # raises where a label has no name
    strangers = [own.names[i] for i in np.flatnonzero((counts > 0) & (new_id < 0))]
    if strangers:
        raise LiVTError(
            f'the split "{split}" has images of {len(strangers)} classes that the training split does not name (such '
            f"as {', '.join(strangers[:5])}): name the classes alike in both, or remove those images."
        )
    return LabelLists(new_id[values], labels.offsets) if isinstance(labels, LabelLists) else new_id[values]


def _class_label(feature) -> ClassLabel | None:
    element = feature.feature if isinstance(feature, List) else feature
    return element if isinstance(element, ClassLabel) else None


def _values(labels: np.ndarray | LabelLists) -> np.ndarray:
    return labels.values if isinstance(labels, LabelLists) else labels


def _checked(labels: np.ndarray | LabelLists, split: str):
    values = _values(labels)
    empty = np.equal(values, None) if values.dtype.kind == "O" else values != values  # NaN: an empty integer
    if empty.any():
        raise LiVTError(f'row {int(np.argmax(empty))} of the split "{split}" has no label: remove such rows.')
    return labels


def find_image_column(features: Features) -> str:
    """The column of images: the only one of that type, or one with a telling name."""
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    if len(images) != 1:
        images = [name for name in IMAGE_NAMES if name in (images or features)]
    if not images:
        raise LiVTError(f"found no image column; name it with image_column, the columns are {_described(features)}.")
    return images[0]


def find_label_column(features: Features) -> str:
    """The column of labels: one with a telling name, or the only one with class names."""
    named = [name for name in LABEL_NAMES if name in features]
    classes = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    if not named and len(classes) != 1:
        raise LiVTError(
            f"found no label column among {_described(features)}: name it with label_column; an image folder "
            "needs one subfolder a class."
        )
    return (named or classes)[0]


def _described(features: Features) -> str:
    kinds = {name: type(f).__name__ if not isinstance(f, Value) else f.dtype for name, f in features.items()}
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def standard_stream(dataset: IterableDataset, image_column: str | None, label_column: str | None) -> IterableDataset:
    """The same for a stream, whose labels must already have names: nothing is read to find them."""
    if dataset.features is None:
        raise LiVTError("the stream does not declare its columns: load it without streaming.")
    image_column = image_column or find_image_column(dataset.features)
    label_column = label_column or find_label_column(dataset.features)
    if _class_label(dataset.features[label_column]) is None:
        raise LiVTError(f'column "{label_column}" of the stream has no class names: load it without streaming.')
    renamed = {old: new for old, new in ((image_column, "image"), (label_column, "label")) if old != new}
    # Renaming hands the rows through Python: decoded images would be encoded again, and a broken one end the stream.
    encoded = dataset.select_columns([image_column, label_column]).cast_column(image_column, Image(decode=False))
    return encoded.rename_columns(renamed).cast_column("image", Image())
