"""Any dataset with the columns `image` and `label`, and perhaps `group`. Linear in the rows, never one by one."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

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
    Value,
    concatenate_datasets,
)

from livt_hf.data.decoding import sound_rows
from livt_hf.data.labels import (
    Labels,
    class_label,
    first_names,
    flat_lists,
    image_paths,
    of_rows,
    plain_name,
    rows_of,
)
from livt_hf.errors import LiVTError
from livt_hf.settings import DataSettings

logger = logging.getLogger(__name__)

IMAGE_NAMES = ("image", "img", "picture", "file_name", "path", "filename", "file", "filepath", "file_path")
IMAGE_NAMES += ("image_path", "image_id")
LABEL_NAMES = ("label", "labels", "target", "class", "category", "class_name", "species", "diagnosis", "cls")
ZERO_OR_ONE = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
MOST_CLASSES = 1_000_000  # larger numbers are ids of something else
LEFT_OUT = 'the split "%s" has no labels and is left out'
MERGED = "rare classes"  # the class that --rare_classes merge makes
LeftOut = dict[str, Counter]  # why images are left out -> which ones (their files or classes) and how many


def standard_columns(splits: dict[str, Dataset], settings: DataSettings, left_out: LeftOut) -> dict[str, Dataset]:
    """The splits with the columns `image`, `label` and perhaps `group` alone, and one list of class names.

    Image bytes are not copied. A split without labels (no such column, or all -1, as the Hub publishes hidden test
    sets) is left out. Where another split names its classes in another order, its labels follow their names. Images of
    classes that the settings take away are counted in `left_out`.
    """
    splits, image_column, label_column = _labelled(splits, settings)
    labels, names = _encoded_labels(splits, label_column)
    _refuse_flags(labels["train"], names)
    for split in [split for split, own in labels.items() if own.hidden and split != "train"]:
        logger.warning(LEFT_OUT, split)
        del splits[split], labels[split]
    counts = {split: own.counts(len(names)) for split, own in labels.items()}  # raises where a label has no name
    pooled = counts["train"] if settings.fold is None else counts["train"] + counts.get("validation", 0)
    new_id, new_names, why = _chosen_classes(pooled, names, settings)
    result = {}
    for split, dataset in splits.items():
        chosen = _images(dataset, image_column)
        relabelled, kept = labels[split].relabelled(new_id)
        beside, features = {"label": relabelled.to_arrow()}, Features(label=relabelled.feature(new_names))
        if settings.group_column is not None:
            beside["group"], features["group"] = _groups(dataset, settings.group_column, chosen), Value("string")
        chosen = _with_columns(chosen, beside, features)
        if not kept.all():
            _count_left_out(labels[split].take(np.flatnonzero(~kept)), names, why, left_out)
            chosen = chosen.select(np.flatnonzero(kept))
        result[split] = chosen
    return result


def sound_images(splits: dict[str, Dataset], settings: DataSettings) -> dict[str, Dataset]:
    """The splits without the images that cannot be read, of which a warning tells."""
    splits, column, _ = _labelled(splits, settings)
    return {split: part.select(sound_rows(_images(part, column))) for split, part in splits.items()}


def _labelled(splits: dict[str, Dataset], settings: DataSettings) -> tuple[dict[str, Dataset], str, str]:
    """The splits that have labels, and the columns of images and labels, which all have as the training split does."""
    features = splits["train"].features
    image, label = _find_columns(features, settings)
    if label is None:
        raise LiVTError(f"found no label column among {_described(features)}: name it with --label_column.")
    result = {}
    for split, dataset in splits.items():
        if label not in dataset.column_names:
            logger.warning(LEFT_OUT, split)
            continue
        for column in (image, settings.group_column):
            if column not in (None, *dataset.column_names):
                raise LiVTError(
                    f'the split "{split}" has no column "{column}", which the training split has: add it, or remove '
                    "the split."
                )
        result[split] = dataset
    return result, image, label


def _images(dataset: Dataset, column: str) -> Dataset:
    """The images alone."""
    images = dataset.select_columns(column).rename_columns({column: "image"})
    if images.features["image"] == Value("large_binary"):  # of which older datasets make no image
        images = images.cast_column("image", Value("binary"))
    return images if images.features["image"] == Image() else images.cast_column("image", Image())


def standard_stream(dataset: IterableDataset, settings: DataSettings) -> IterableDataset:
    """The same for a stream, whose labels stay only where they have names: nothing is read to find these."""
    features = dataset.features
    if features is None:
        raise LiVTError("the stream does not declare its columns: load it without streaming.")
    image_column, label_column = _find_columns(features, settings)
    columns = {image_column: "image"}
    if label_column is not None and class_label(features[label_column]) is not None:
        columns[label_column] = "label"
    elif settings.label_column is not None:
        raise LiVTError(f'column "{label_column}" of the stream has no class names: load it without streaming.')
    # Renaming hands the rows through Python: decoded images would be encoded again, and a broken one end the stream.
    encoded = dataset.select_columns(list(columns)).cast_column(image_column, Image(decode=False))
    renamed = {old: new for old, new in columns.items() if old != new}
    return encoded.rename_columns(renamed).cast_column("image", Image())


def _with_columns(images: Dataset, columns: dict[str, pa.Array], features: Features) -> Dataset:
    """Put columns beside the images, whose bytes are not copied: the base table gets them, then rows are selected."""
    rows = rows_of(images)
    if rows is not None:
        place = np.zeros(images.data.num_rows, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        columns = {name: column.take(pa.array(place)) for name, column in columns.items()}
        images = Dataset(images.data, info=images.info, split=images.split, fingerprint=images._fingerprint)
    beside = Dataset(pa.table(columns).cast(features.arrow_schema), info=DatasetInfo(features=features))
    both = concatenate_datasets([images, beside], axis=1, split=images.split)
    return both if rows is None else both.select(rows)


def _groups(dataset: Dataset, column: str, images: Dataset) -> pa.StringArray:
    """The group of every image as text."""
    groups = as_text(of_rows(dataset, dataset.data.column(column)), column)
    if groups.null_count:
        empty = np.flatnonzero(groups.is_null())
        first = image_paths(images)[int(empty[0])]
        raise LiVTError(
            f"{len(empty)} images have an empty cell for their group, the first is image {empty[0]} ({first}): give "
            "each such image a group of its own, or the one that it belongs to."
        )
    return groups


def _count_left_out(labels: Labels, names: list[str], why: dict[int, str], left_out: LeftOut) -> None:
    """Count images by the reason why the class, or the first of several classes, was taken away."""
    first = labels.values if labels.offsets is None else labels.values[labels.offsets[:-1]]
    for label, count in zip(*np.unique(first, return_counts=True), strict=True):
        left_out.setdefault(why[label], Counter())[names[label]] += int(count)


def say_left_out(left_out: LeftOut) -> None:
    """A table of what is left out and why, as a warning."""
    lines = []
    for reason, which in left_out.items():
        named = [name if count == 1 else f"{name} ({count})" for name, count in which.most_common(5)]
        more = ", ..." if len(which) > 5 else ""
        lines.append(f"\n  {which.total():>7,}  {reason}: {', '.join(named)}{more}")
    if lines:
        total = sum(which.total() for which in left_out.values())
        logger.warning("left out %s images:%s", f"{total:,}", "".join(lines))


def _chosen_classes(counts: np.ndarray, names: list[str], settings: DataSettings) -> tuple[np.ndarray, list, dict]:
    """The new id of each class (-1 is none), the names of the new classes, and why a class is not among them."""
    plain, whole = [*map(plain_name, names)], plain_name(settings.exclude_labels or "")
    # A name may itself have a comma: "tench, Tinca tinca".
    asked = [whole] if whole and whole in plain else [label.strip() for label in whole.split(",") if label.strip()]
    if absent := [label for label in asked if label not in plain]:
        logger.warning("there is no label %s to exclude", " or ".join(map(repr, absent)))
    why = {c: "the label is excluded" for c, name in enumerate(plain) if name in asked}
    rare = [c for c in np.flatnonzero(counts < (settings.min_images or 0)).tolist() if c not in why]
    merged = dict.fromkeys(rare if settings.rare_classes == "merge" else [])
    if settings.rare_classes == "merge" and settings.min_images is None:
        raise LiVTError("--rare_classes merge needs to know which classes are rare: pass --min_images, such as 5.")
    if merged:
        few = f"{len(merged)} classes with fewer than {settings.min_images} training images"
        logger.warning('made one class, "%s", of %s: %s', MERGED, few, first_names([names[c] for c in merged]))
    else:
        why |= dict.fromkeys(rare, f"the class has fewer than {settings.min_images} training images")
    if settings.drop_empty:
        empty = [c for c in np.flatnonzero(counts == 0).tolist() if c not in why and c not in merged]
        if empty:
            logger.warning("left out classes without a training image: %s", first_names([names[c] for c in empty]))
        why |= dict.fromkeys(empty, "the class has no training image")
    kept = [c for c in range(len(names)) if c not in why and c not in merged]
    if merged and MERGED in [names[c] for c in kept]:
        raise LiVTError(f'a class is called "{MERGED}" like the one that --rare_classes merge makes: rename it.')
    new_id = np.full(len(names), -1)
    new_id[kept], new_id[list(merged)] = np.arange(len(kept)), len(kept)
    return new_id, [names[c] for c in kept] + [MERGED] * bool(merged), why


def _encoded_labels(splits: dict[str, Dataset], column: str) -> tuple[dict[str, Labels], list[str]]:
    """Labels as integers for every split, and the names behind them."""
    cells = {split: of_rows(dataset, dataset.data.column(column)) for split, dataset in splits.items()}
    for split, own in cells.items():
        _refuse_missing(own.is_null().to_numpy(), split)
    flat = {split: flat_lists(own) for split, own in cells.items()}
    named = {split: class_label(dataset.features[column]) for split, dataset in splits.items()}
    classes, kinds = named["train"], [values.type for values, _ in flat.values()]
    texts = [split for split, (values, _) in flat.items() if values.type in (pa.string(), pa.large_string())]
    if texts and (numbers := [split for split in splits if named[split] is not None]):
        raise LiVTError(
            f'column "{column}" holds text in the split "{texts[0]}" and numbers of classes in "{numbers[0]}": write '
            "it alike in both."
        )
    if classes is None and not all(map(pa.types.is_integer, kinds)):
        return _encoded_texts(flat, column)
    labels = {split: Labels.of_ids(*parts) for split, parts in flat.items()}
    if classes is not None:
        for split in splits:
            labels[split] = _by_name(labels[split], named[split], classes.names, split)
        return labels, classes.names
    largest = max(int(own.values.max(initial=-1)) for own in labels.values())
    if largest >= MOST_CLASSES:
        raise LiVTError(
            f'column "{column}" holds numbers up to {largest}, which are ids and not class numbers 0, 1, 2: write '
            "them as text."
        )
    return labels, [str(i) for i in range(largest + 1)]


def _encoded_texts(
    flat: dict[str, tuple[pa.ChunkedArray, np.ndarray | None]], column: str
) -> tuple[dict[str, Labels], list[str]]:
    """The same for labels that are no numbers, as a table of paths has them."""
    for values, _ in flat.values():
        if pa.types.is_floating(values.type) or pa.types.is_temporal(values.type):
            raise LiVTError(f'column "{column}" holds {values.type}, not classes: name another with --label_column.')
    texts = {split: as_text(values, column) for split, (values, _) in flat.items()}
    ids, names = class_ids(pa.concat_arrays(texts.values()))
    labels, start = {}, 0
    for split, (_, offsets) in flat.items():
        labels[split] = Labels.of_ids(ids.slice(start, len(texts[split])), offsets)
        start += len(texts[split])
        if offsets is None:
            _refuse_missing(labels[split].values < 0, split)
    return labels, names


def _refuse_flags(labels: Labels, names: list[str]) -> None:
    """Refuse lists of one 0 or 1 per class, which would be read as class 0 and class 1."""
    flags = [ZERO_OR_ONE.get(name.lower()) for name in names]
    if labels.offsets is None or None in flags:
        return
    lengths, ones = np.diff(labels.offsets), np.bincount(labels.images, np.array(flags)[labels.values], len(labels))
    if (lengths == lengths[0]).all() and ((ones > 1) | (lengths - ones > 1)).any():
        raise LiVTError(
            "the label column holds one 0 or 1 per class, not the names or numbers of an image's classes: write "
            "those, such as [1, 3] for [0, 1, 0, 1]."
        )


def _refuse_missing(missing: np.ndarray, split: str) -> None:
    if missing.any():
        raise LiVTError(f'row {int(np.argmax(missing))} of the split "{split}" has no label: remove such rows.')


def _by_name(labels: Labels, own: ClassLabel | None, names: list[str], split: str) -> Labels:
    """Labels under a split's own class names as labels under the training split's; plain numbers are taken as ids."""
    if own is None or own.names == names or labels.hidden:
        return labels
    id_of = {name: i for i, name in enumerate(names)}
    new_id = np.array([id_of.get(name, -1) for name in own.names])
    counts = labels.counts(len(own.names))  # raises where a label has no name
    strangers = [own.names[i] for i in np.flatnonzero((counts > 0) & (new_id < 0))]
    if strangers:
        raise LiVTError(
            f'the split "{split}" has images of {len(strangers)} classes that the training split does not name (such '
            f"as {', '.join(strangers[:5])}): name the classes alike in both, or remove those images."
        )
    return Labels(new_id[labels.values], labels.offsets)


def class_ids(texts: pa.StringArray) -> tuple[pa.Array, list[str]]:
    """The class of each text, null where that is null, and the names of the classes."""
    texts = pc.utf8_normalize(texts, form="NFC")  # see `plain_name`
    names = _class_order(texts.unique().drop_null().to_pylist())
    return pc.index_in(texts, value_set=pa.array(names, pa.string())), names


def _class_order(names: list[str]) -> list[str]:
    """Class names in order, numbers by value. Names that look alike stay apart, but are pointed out."""
    alike: dict[str, list[str]] = {}
    for name in sorted(names):
        alike.setdefault(" ".join(name.casefold().split()), []).append(name)
    for variants in alike.values():
        if len(variants) > 1:
            logger.warning("the labels %s differ only by case or spaces and are separate classes", variants)
    return sorted(sorted(names), key=int) if all(name.isdecimal() for name in names) else sorted(names)


def as_text(column: pa.ChunkedArray, name: str) -> pa.StringArray:
    """A column as text without spaces around it; empty cells are null."""
    if pa.types.is_nested(column.type):
        raise LiVTError(
            f'column "{name}" holds {column.type}, not text or numbers: rewrite it, or name another column.'
        )
    if pa.types.is_float16(column.type):  # of which arrow knows little
        column = column.cast(pa.float32())
    if pa.types.is_floating(column.type):  # as pandas writes whole numbers beside empty cells
        column = pc.if_else(pc.is_nan(column), None, column)
        whole = pc.and_(pc.equal(column, pc.floor(column)), pc.less(pc.abs(column), 2.0**53))  # not infinity
        if pc.all(whole).as_py():
            column = column.cast(pa.int64())
    text = pc.utf8_trim_whitespace(column.cast(pa.string())).combine_chunks()
    return pc.if_else(pc.equal(text, ""), None, text)


def _find_columns(features: Features, settings: DataSettings) -> tuple[str, str | None]:
    """The columns of the images and of the labels: as named by the settings, or found by their type or name."""
    for option in ("image_column", "label_column", "group_column"):
        column = getattr(settings, option)
        if column is not None and column not in features:
            raise LiVTError(f'there is no {option} "{column}"; the columns are {_described(features)}.')
    images, classes = (
        [name for name, feature in features.items() if isinstance(feature, kind)] for kind in (Image, ClassLabel)
    )
    image, label = settings.image_column, settings.label_column or telling_name(features, LABEL_NAMES)
    if image is None:
        image = images[0] if len(images) == 1 else telling_name(images or features, IMAGE_NAMES)
    if image is None:
        raise LiVTError(f"found no image column; name it with --image_column, the columns are {_described(features)}.")
    return image, label or (classes[0] if len(classes) == 1 else None)


def telling_name(columns: Iterable[str], telling: Sequence[str]) -> str | None:
    """The column with the first of some names, whatever its case."""
    by_name = {column.casefold(): column for column in columns}
    return next((by_name[name] for name in telling if name in by_name), None)


def _described(features: Features) -> str:
    kinds = {name: type(f).__name__ if not isinstance(f, Value) else f.dtype for name, f in features.items()}
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
