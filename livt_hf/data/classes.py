"""The encoder of classes: label texts or numbers of all splits -> class ids and names; exclude, merge, drop.

Linear in the rows, never one by one. Image bytes are not copied.
"""

import logging
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetInfo, Features, concatenate_datasets

from livt_hf.data.labels import (
    MAX_CLASSES,
    Labels,
    flatten_lists,
    format_class_names,
    image_paths,
    normalize_name,
    row_indices,
)
from livt_hf.data.readers.image_table import UNLABELLED, DroppedImages, ImageTable, as_text
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

ZERO_OR_ONE = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
MERGED = "rare classes"  # the class that rare_classes="merge" makes


def encode_classes(splits: dict[str, ImageTable], spec: DataSpec, dropped: DroppedImages) -> dict[str, Dataset]:
    """Return datasets with class ids as the column `label`, and one list of class names for all splits.

    A split whose labels are all -1, as the Hub publishes hidden test sets, is dropped. Where another split names its
    classes in another order, its labels follow their names. Images of classes that the spec excludes or drops are
    counted in `dropped`.
    """
    labels, names = _encode_labels(splits)
    _check_no_flags(labels["train"], names)
    for split in [split for split, own in labels.items() if own.hidden and split != "train"]:
        logger.warning(UNLABELLED, split)
        del labels[split]
    counts = {split: own.counts(len(names)) for split, own in labels.items()}  # raises where a label has no name
    total = counts["train"] if spec.fold is None else counts["train"] + counts.get("validation", 0)
    new_id, new_names, reasons = _select_classes(total, names, spec)
    datasets = {}
    for split, own in labels.items():
        table = splits[split]
        encoded, is_kept = own.relabelled(new_id)
        columns = table.columns.set_column(table.columns.column_names.index("label"), "label", encoded.to_arrow())
        _check_groups(table)
        features = Features.from_arrow_schema(columns.schema) | {"label": encoded.feature(new_names)}
        dataset = _with_columns(table.images, columns, Features(features))
        if not is_kept.all():
            left_out = own.take(np.flatnonzero(~is_kept))
            first = left_out.values if left_out.offsets is None else left_out.values[left_out.offsets[:-1]]
            for label, count in zip(*np.unique(first, return_counts=True), strict=True):
                dropped.setdefault(reasons[label], Counter())[names[label]] += int(count)
            dataset = dataset.select(np.flatnonzero(is_kept))
        datasets[split] = dataset
    return datasets


def _encode_labels(splits: dict[str, ImageTable]) -> tuple[dict[str, Labels], list[str]]:
    """Return the labels of every split as class ids, and the names of the classes."""
    cells, labels = {}, {}
    for split, table in splits.items():
        _check_not_missing(table.columns["label"].is_null().to_numpy(), split)
        cells[split] = flatten_lists(table.columns["label"])
    is_text = {split: values.type in (pa.string(), pa.large_string()) for split, (values, _) in cells.items()}
    known = {split: table.class_names for split, table in splits.items()}
    numbered = [split for split in splits if known[split] is not None and not is_text[split]]
    if any(is_text.values()) and numbered:
        text = next(split for split in splits if is_text[split])
        raise LiVTError(
            f'the labels of the split "{text}" are text and those of "{numbered[0]}" class numbers: write them alike '
            "in both.",
            "label_column",
        )
    if known["train"] is None and not all(pa.types.is_integer(values.type) for values, _ in cells.values()):
        return _encode_texts(cells)
    for split, (values, offsets) in cells.items():
        if is_text[split]:
            values = pc.index_in(values, value_set=pa.array(known[split], pa.string()))
        labels[split] = Labels.from_ids(values, offsets)
        if known["train"] is not None:
            labels[split] = _match_names(labels[split], known[split], known["train"], split)
    if known["train"] is not None:
        return labels, known["train"]
    largest = max(int(own.values.max(initial=-1)) for own in labels.values())
    if largest >= MAX_CLASSES:
        raise LiVTError(
            f"the labels are numbers up to {largest}, which are ids and not classes 0, 1, 2: write them as text.",
            "label_column",
        )
    return labels, [str(i) for i in range(largest + 1)]


def _encode_texts(cells: dict[str, tuple[pa.ChunkedArray, np.ndarray | None]]) -> tuple[dict[str, Labels], list[str]]:
    """Return class ids and names of texts, which the names follow from."""
    for values, _ in cells.values():
        if pa.types.is_floating(values.type) or pa.types.is_temporal(values.type):
            raise LiVTError(
                f"the label column holds {values.type}, not classes: name another with label_column.", "label_column"
            )
    texts = {split: pc.utf8_normalize(as_text(values, "label"), "NFC") for split, (values, _) in cells.items()}
    names = order_class_names(pa.chunked_array(list(texts.values())).unique().drop_null().to_pylist())
    labels = {}
    for split, (_, offsets) in cells.items():
        ids = pc.index_in(texts[split], value_set=pa.array(names, pa.string()))
        labels[split] = Labels.from_ids(ids, offsets)
        if offsets is None:
            _check_not_missing(labels[split].values < 0, split)
    return labels, names


def order_class_names(names: list[str]) -> list[str]:
    """Sort class names, numbers by value, and warn about those that differ by case or spaces alone."""
    variants: dict[str, list[str]] = {}
    for name in sorted(names):
        variants.setdefault(" ".join(name.casefold().split()), []).append(name)
    for similar in variants.values():
        if len(similar) > 1:
            logger.warning("the labels %s differ only by case or spaces and are separate classes", similar)
    return sorted(sorted(names), key=int) if all(name.isdecimal() for name in names) else sorted(names)


def _match_names(labels: Labels, own: list[str] | None, names: list[str], split: str) -> Labels:
    """Return labels under a split's own class names as ids of the training split's; plain numbers are ids already."""
    if own is None or own == names or labels.hidden:
        return labels
    id_of = {name: i for i, name in enumerate(names)}
    new_id = np.array([id_of.get(name, -1) for name in own])
    counts = labels.counts(len(own))  # raises where a label has no name
    unknown = [own[i] for i in np.flatnonzero((counts > 0) & (new_id < 0))]
    if unknown:
        raise LiVTError(
            f'the split "{split}" has images of {len(unknown)} classes that the training split does not name (such '
            f"as {', '.join(unknown[:5])}): name the classes alike in both, or remove those images.",
            "dataset",
        )
    return Labels(new_id[labels.values], labels.offsets)


def _check_no_flags(labels: Labels, names: list[str]) -> None:
    """Raise an error for lists of one 0 or 1 per class, which would be read as class 0 and class 1."""
    flags = [ZERO_OR_ONE.get(name.lower()) for name in names]
    if labels.offsets is None or None in flags:
        return
    lengths, ones = np.diff(labels.offsets), np.bincount(labels.images, np.array(flags)[labels.values], len(labels))
    if (lengths == lengths[0]).all() and ((ones > 1) | (lengths - ones > 1)).any():
        raise LiVTError(
            "the label column holds one 0 or 1 per class, not the names or numbers of an image's classes: write "
            "those, such as [1, 3] for [0, 1, 0, 1].",
            "label_column",
        )


def _check_not_missing(is_missing: np.ndarray, split: str) -> None:
    if is_missing.any():
        row = int(np.argmax(is_missing))
        raise LiVTError(f'row {row} of the split "{split}" has no label: remove such rows.', "dataset")


def _check_groups(table: ImageTable) -> None:
    if "group" in table.columns.column_names and table.columns["group"].null_count:
        empty = np.flatnonzero(table.columns["group"].is_null())
        first = image_paths(table.images)[int(empty[0])]
        raise LiVTError(
            f"{len(empty)} images have an empty cell for their group, the first is image {empty[0]} ({first}): give "
            "each such image a group of its own, or the one that it belongs to.",
            "group_column",
        )


def _select_classes(counts: np.ndarray, names: list[str], spec: DataSpec) -> tuple[np.ndarray, list[str], dict]:
    """Return the new id of each class (-1 is none), the names of the new classes, and why a class is dropped."""
    normal, whole = [*map(normalize_name, names)], normalize_name(spec.exclude_labels or "")
    # A name may itself have a comma: "tench, Tinca tinca".
    excluded = [whole] if whole and whole in normal else [label.strip() for label in whole.split(",") if label.strip()]
    if absent := [label for label in excluded if label not in normal]:
        logger.warning("there is no label %s to exclude", " or ".join(map(repr, absent)))
    reasons = {c: "the label is excluded" for c, name in enumerate(normal) if name in excluded}
    rare = [c for c in np.flatnonzero(counts < (spec.min_images or 0)).tolist() if c not in reasons]
    merged = rare if spec.rare_classes == "merge" else []
    if spec.rare_classes == "merge" and spec.min_images is None:
        raise LiVTError("rare_classes merge needs to know which classes are rare: pass min_images.", "min_images")
    if merged:
        few = f"{len(merged)} classes with fewer than {spec.min_images} training images"
        logger.warning('made one class, "%s", of %s: %s', MERGED, few, format_class_names([names[c] for c in merged]))
    else:
        reasons |= dict.fromkeys(rare, f"the class has fewer than {spec.min_images} training images")
    if spec.drop_empty:
        empty = [c for c in np.flatnonzero(counts == 0).tolist() if c not in reasons and c not in merged]
        if empty:
            logger.warning(
                "left out classes without a training image: %s", format_class_names([names[c] for c in empty])
            )
        reasons |= dict.fromkeys(empty, "the class has no training image")
    kept = [c for c in range(len(names)) if c not in reasons and c not in merged]
    if merged and MERGED in [names[c] for c in kept]:
        raise LiVTError(
            f'a class is called "{MERGED}" like the one that rare_classes merge makes: rename it.', "rare_classes"
        )
    new_id = np.full(len(names), -1)
    new_id[kept], new_id[merged] = np.arange(len(kept)), len(kept)
    return new_id, [names[c] for c in kept] + [MERGED] * bool(merged), reasons


def _with_columns(images: Dataset, columns: pa.Table, features: Features) -> Dataset:
    """Put columns beside the images, whose bytes are not copied: the base table gets them, then rows are selected."""
    rows = row_indices(images)
    if rows is not None:
        position = np.zeros(images.data.num_rows, dtype=np.int64)
        position[rows] = np.arange(len(rows))
        columns = columns.take(pa.array(position))
        images = Dataset(images.data, info=images.info, split=images.split, fingerprint=images._fingerprint)
    beside = Dataset(columns.cast(features.arrow_schema), info=DatasetInfo(features=features))
    both = concatenate_datasets([images, beside], axis=1, split=images.split)
    return both if rows is None else both.select(rows)
