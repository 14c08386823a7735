"""What `datasets` stores or loads: parquet, arrow, webdataset, `save_to_disk` and the Hub, at once or as a stream."""

import contextlib
import errno
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    IterableDataset,
    Value,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.data.labels import class_label, select_rows
from livt_hf.data.readers.image_table import (
    IMAGE_NAMES,
    LABEL_NAMES,
    UNLABELLED,
    ImageTable,
    as_text,
    match_column_name,
    matching_rows,
    read_conditions,
)
from livt_hf.data.readers.split_names import SPLIT_COLUMN_NAMES, read_split_column
from livt_hf.data.readers.table import TABLES
from livt_hf.data.shards import as_stream, count_images, with_shard_lengths
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError, did_you_mean
from livt_hf.text import format_error

logger = logging.getLogger(__name__)

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}  # the names that `datasets` gives them


def open_files(files: Mapping[str, list[str]], streaming: bool) -> dict:
    """Open parquet, arrow or webdataset files by split."""
    first = next(iter(files.values()))[0]
    suffix = Path(first).suffix.lower()
    if suffix not in FORMATS:
        if suffix in TABLES:
            raise LiVTError(f"{first} is a table of labels: pass it as the dataset, and without streaming.", "dataset")
        known = "a table (.csv, .tsv, .jsonl, .parquet), an arrow file, a webdataset (.tar) or an image list (.txt, "
        raise LiVTError(f"{first} is not {known}.txt.gz, .txt.xz).", "dataset")
    # One by one: loaded together, all splits get the class names of the first file.
    kind, splits = FORMATS[suffix], {}
    for split, paths in files.items():
        with _reading_dataset(", ".join(paths[:3])):
            splits[split] = load_dataset(kind, data_files={split: paths}, split=split, streaming=streaming)
            if streaming:
                splits[split] = with_shard_lengths(splits[split], count_images(kind, paths))
    return splits


def open_saved(folder: Path) -> dict[str, Dataset]:
    """Open what `save_to_disk` wrote."""
    with _reading_dataset(folder):
        stored = load_from_disk(folder).with_format(None)  # a format may hide columns
    return dict(stored) if isinstance(stored, DatasetDict) else {"train": stored}


def open_hub(name: str, spec: DataSpec, streaming: bool) -> dict:
    """Open a dataset of the Hub, `owner/name` or `owner/name:config`."""
    repository, _, config = name.partition(":")
    near = did_you_mean(name, () if "/" in name else BENCHMARKS)
    try:
        if near and "/" not in name:  # perhaps a misspelt folder: one short question, where loading asks many times
            HfApi().dataset_info(repository, timeout=10)
        if not streaming:
            return dict(load_dataset(repository, config or None))
        builder = load_dataset_builder(repository, config or None)
        streams = builder.as_streaming_dataset()
    # A ValueError is a config that is missing or misspelt, or no name for a dataset; a RuntimeError a loading script.
    except (ConnectionError, FileNotFoundError, HTTPError, ValueError, RuntimeError) as error:
        failure = f"{repository} could not be loaded from the Hub ({format_error(error)})"
        if spec.dataset in BENCHMARKS:
            failure += ": without internet or access rights, pass a local copy as source."
            raise LiVTError(failure, "source") from error
        raise LiVTError(
            f"there is no folder {name}, and {failure}: correct the name (owner/name, or owner/name:config), or give "
            f"the folder of a local copy.{near}",
            "dataset",
        ) from error
    if builder.name != "parquet":
        raise LiVTError(
            f"{repository} is stored as {builder.name}, whose images cannot be counted without reading all: load it "
            "without streaming, or download it.",
            "dataset",
        )
    files = builder.config.data_files
    with _reading_dataset(repository):
        counts = {split: count_images(builder.name, files[split]) for split in streams}
    return {split: with_shard_lengths(stream, counts[split]) for split, stream in streams.items()}


@contextlib.contextmanager
def _reading_dataset(source: str | Path) -> Iterator[None]:
    """Turn whatever `datasets` raises on damaged files into one sentence."""
    try:
        yield
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:  # it wraps what went wrong in "an error occurred"
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:  # where the cache is: the files may be good
            raise cause from None
        raise LiVTError(
            f"{source} cannot be read as a dataset: {format_error(cause)}; put back a good copy.", "dataset"
        ) from error


def split_by_column(splits: dict, spec: DataSpec, streaming: bool = False) -> dict:
    """Split images that are stored in one piece by a column that says train, val or test, where there is one."""
    if spec.split_column == "none" or (len(splits) > 1 and spec.split_column is None):
        return splits
    if len(splits) > 1:
        raise LiVTError(
            f"the images are stored as {', '.join(splits)}: leave split_column {spec.split_column} out.",
            "split_column",
        )
    (stored,) = splits.values()
    names = stored.column_names or ()
    column = spec.split_column or match_column_name(names, SPLIT_COLUMN_NAMES)
    if column is None:
        return splits
    if column not in names:
        raise LiVTError(f'there is no split_column "{column}"; the columns are {", ".join(names)}.', "split_column")
    if streaming:
        raise LiVTError(
            f'a stream is not split by its column "{column}": load it without streaming, or pass split_column none to '
            "train on all of it.",
            "split_column",
        )
    split_of = read_split_column(select_rows(stored, stored.data.column(column)), column)
    return {split: stored.select(np.flatnonzero(split_of == split)) for split in np.unique(split_of).tolist()}


def tables_of_datasets(splits: Mapping[str, Dataset], spec: DataSpec, label_column: str | None) -> dict:
    """Return the splits that have labels as `ImageTable`s; all have the columns of the training split.

    `label_column` is that of a benchmark, taken where the spec names none and the column exists.
    """
    train = splits["train"]
    image, label = _find_columns(train.features, spec, label_column)
    if label is None:
        raise LiVTError(
            f"found no label column among {_describe(train.features)}: name it with label_column.", "label_column"
        )
    tables, wanted = {}, read_conditions(spec.where, train.column_names)
    needed = [("image_column", image), ("group_column", spec.group_column), *(("where", name) for name in wanted)]
    cells: dict[str, list[pa.Array]] = {name: [] for name in wanted}
    for split, dataset in splits.items():
        if label not in dataset.column_names:
            logger.warning(UNLABELLED, split)
            continue
        for argument, column in needed:
            if column not in (None, *dataset.column_names):
                raise LiVTError(
                    f'the split "{split}" has no column "{column}", which the training split has: add it, or remove '
                    "the split.",
                    argument,
                )
        images = dataset.select_columns(image).rename_columns({image: "image"})
        if images.features["image"] == Value("large_binary"):  # of which older datasets make no image
            images = images.cast_column("image", Value("binary"))
        if images.features["image"] != Image():
            images = images.cast_column("image", Image())
        columns = {"label": select_rows(dataset, dataset.data.column(label))}
        if spec.group_column is not None:
            groups = select_rows(dataset, dataset.data.column(spec.group_column))
            columns["group"] = as_text(groups, spec.group_column)
        names = class_label(dataset.features[label])
        tables[split] = ImageTable(images, pa.table(columns), names and names.names)
        for name in wanted:
            texts, feature = select_rows(dataset, dataset.data.column(name)), dataset.features[name]
            if isinstance(feature, ClassLabel):  # -1 is a hidden label
                texts = pa.array(feature.names).take(pc.if_else(pc.less(texts, 0), None, texts))
            cells[name].append(as_text(texts, name))
    if wanted:  # a value need not be in every split
        matches = matching_rows({name: pa.concat_arrays(parts) for name, parts in cells.items()}, wanted)
        parts = np.split(matches, np.cumsum([len(table) for table in tables.values()])[:-1])
        own = zip(tables.items(), parts, strict=True)
        tables = {split: table.select(np.flatnonzero(is_match)) for (split, table), is_match in own}
    return tables


def standardize_stream(stream: Dataset | IterableDataset, spec: DataSpec, label_column: str | None) -> IterableDataset:
    """Return a stream of the columns `image` and, where it has class names, `label`: nothing is read to find these."""
    if isinstance(stream, Dataset):
        stream = as_stream(stream)
    features = stream.features
    if features is None:
        raise LiVTError("the stream does not declare its columns: load it without streaming.", "dataset")
    image, label = _find_columns(features, spec, label_column)
    columns = {image: "image"}
    if label is not None and class_label(features[label]) is not None:
        columns[label] = "label"
    elif spec.label_column is not None:
        raise LiVTError(
            f'column "{label}" of the stream has no class names: load it without streaming.', "label_column"
        )
    # Renaming hands the rows through Python: decoded images would be encoded again, and a broken one end the stream.
    encoded = stream.select_columns(list(columns)).cast_column(image, Image(decode=False))
    renamed = {old: new for old, new in columns.items() if old != new}
    return encoded.rename_columns(renamed).cast_column("image", Image())


def _find_columns(features: Features, spec: DataSpec, label_column: str | None) -> tuple[str, str | None]:
    """Return the columns of the images and of the labels: named by the spec, or found by their type or name."""
    for argument in ("image_column", "label_column", "group_column"):
        column = getattr(spec, argument)
        if column is not None and column not in features:
            raise LiVTError(f'there is no {argument} "{column}"; the columns are {_describe(features)}.', argument)
    images, classes = (
        [name for name, feature in features.items() if isinstance(feature, kind)] for kind in (Image, ClassLabel)
    )
    only = images[0] if len(images) == 1 else None
    image = spec.image_column or only or match_column_name(images or features, IMAGE_NAMES)
    if image is None:
        raise LiVTError(
            f"found no image column; name it with image_column, the columns are {_describe(features)}.", "image_column"
        )
    label = spec.label_column or (label_column if label_column in features else None)
    label = label or match_column_name(features, LABEL_NAMES)
    return image, label or (classes[0] if len(classes) == 1 else None)


def _describe(features: Features) -> str:
    kinds = {name: type(f).__name__ if not isinstance(f, Value) else f.dtype for name, f in features.items()}
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
