"""Load a dataset: `DataSpec` -> `DatasetDict` with the splits train, test and perhaps validation."""

import logging
import os
from dataclasses import dataclass

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, concatenate_datasets

from livt_hf.data.benchmarks import BENCHMARKS, PUBLIC, Benchmark
from livt_hf.data.classes import encode_classes
from livt_hf.data.decoding import readable_rows
from livt_hf.data.groups import add_groups
from livt_hf.data.labels import class_counts, class_feature, is_multi_label, labels_of
from livt_hf.data.readers.image_table import DroppedImages, log_dropped_images
from livt_hf.data.readers.source import read_source
from livt_hf.data.readers.split_names import SPLITS, check_not_empty
from livt_hf.data.shards import as_stream
from livt_hf.data.spec import DataSpec
from livt_hf.data.splitting import (
    SplitDatasetDict,
    assign_folds,
    split_off,
    split_test,
    split_validation,
    warn_about_shared_groups,
)
from livt_hf.data.subsample import counts_by_rule, long_tail_indices
from livt_hf.errors import LiVTError, suggest_name

logger = logging.getLogger(__name__)

# The options that have a meaning for a stream.
STREAM_OPTIONS = ("dataset", "source", "lists", "image_column", "label_column", "on_broken", "num_workers")


def load_long_tailed(
    name: str,
    imbalance_factor: float | None = None,
    source: str | os.PathLike | None = None,
    seed: int = 0,
    *,
    streaming: bool = False,
    **options,
) -> DatasetDict | IterableDatasetDict:
    """Load a benchmark or your own images, as they are or as a long-tailed subset.

    Args:
        name: a benchmark (`glyphs`, `cifar10-lt`, `cifar100-lt`, `imagenet-lt`, `imagenet-bal`, `imagenet-1k`,
            `places-lt`, `inat18`), an image folder, a table of labels (csv, tsv, jsonl, parquet), a folder or file of
            parquet, arrow or webdataset (tar), an image list, or a Hub dataset (`owner/name` or `owner/name:config`).
        imbalance_factor: largest class over smallest class; a long-tailed subset is drawn where this is given.
        source: a local copy of a benchmark (the Hub's parquet files, an image folder, or lists and images), or the
            folder of the images that a table or an image list names.
        seed: seed of the images picked for the tail and the test set.
        streaming: for pretraining on data that does not fit; see `livt_hf.data.streaming` for what it gives up.
        options: any other field of `DataSpec`. `rule` may also be the counts of all classes.

    Returns:
        The splits `train`, `test` (what the paper reports on) and perhaps `validation`, with the columns `image`,
        `label` and perhaps `group`.

    Example:
        >>> data = load_long_tailed("glyphs", imbalance_factor=100)
        >>> {split: len(images) for split, images in data.items()}
        {'train': 7230, 'test': 2000}
    """
    known, renamed = DataSpec.names(), {"dataset": "name", "split_seed": "seed"}
    for option in options:
        if option in renamed:
            raise LiVTError(f"load_long_tailed has no option {option!r}; it is called {renamed[option]} here.", option)
        if option not in known:
            near = suggest_name(option, known, otherwise=f"choose from {', '.join(known)}.")
            raise LiVTError(f"load_long_tailed has no option {option!r}{near}", option)
    options |= {"dataset": str(name), "imbalance_factor": imbalance_factor, "source": source, "split_seed": seed}
    for option, value in options.items():
        if isinstance(value, os.PathLike | np.ndarray):
            options[option] = value.tolist() if isinstance(value, np.ndarray) else os.fspath(value)
    return load_dataset(DataSpec(**options), streaming)


def load_dataset(spec: DataSpec, streaming: bool = False) -> DatasetDict | IterableDatasetDict:
    """Load the dataset that a spec describes; see `load_long_tailed`."""
    if streaming:
        return load_streams(spec)
    pool = load_pool(spec)
    data = pool.split(spec)
    if "validation" in data.made_splits:
        logger.info(
            "%d of %d training images are held out as validation split, to calibrate; validation_fraction 0 keeps "
            "them",
            *(len(data["validation"]), len(data["train"]) + len(data["validation"])),
        )
    return data


def load_evaluation_data(spec: DataSpec, split: str) -> DatasetDict:
    """Load the splits to measure a model on; `all` is all images together, of which none are split off then."""
    if split != "all":
        return load_pool(spec).split(spec)
    data = DatasetDict(_load_splits(spec.replace(test_fraction=None))[0])
    data["all"] = concatenate_datasets(list(data.values()))  # nothing is trained, so a class may have no image
    return data


@dataclass(frozen=True)
class ImagePool:
    """All images that a spec chooses, before the validation set or a fold is split off: all folds share them.

    Attributes:
        splits: images by split; for cross-validation only `train`.
        made_splits: names of the splits that are not the dataset's own.
        fold: number of the fold that tests each image, for cross-validation.
    """

    splits: dict[str, Dataset]
    made_splits: frozenset[str] = frozenset()
    fold: np.ndarray | None = None

    def fold_datasets(self) -> dict[str, Dataset]:
        """Return the images that each fold tests."""
        rows = [np.flatnonzero(self.fold == number) for number in range(self.fold.max() + 1)]
        return {f"fold {number}": self.splits["train"].select(own) for number, own in enumerate(rows, 1)}

    def split(self, spec: DataSpec) -> SplitDatasetDict:
        """Split off the fold to test on and the validation set, as the spec says."""
        splits, made, num_images = dict(self.splits), self.made_splits, len(self.splits["train"])
        counts = class_counts(splits["train"])
        # A rule made the long tail of the training images after the test set was split off.
        if "test" in made and resolve_benchmark_defaults(spec).rule is None:
            counts = counts + class_counts(splits["test"])
        if self.fold is not None:
            number, folds = spec.fold_numbers
            splits, made = split_off(splits["train"], self.fold == number - 1, "test"), {"test"}
            num_images -= num_images // folds  # alike for all folds
        if "validation" not in splits:
            parts = split_validation(splits["train"], spec, num_images)
            splits, made = splits | parts, made | (parts.keys() - {"train"})
        data = SplitDatasetDict({split: splits[split] for split in SPLITS if split in splits})
        data.made_splits, data.shot_counts = frozenset(made), counts
        return data


def load_pool(spec: DataSpec) -> ImagePool:
    """Load the images before they are split, with the fold of each for cross-validation."""
    splits, made = _load_splits(spec)
    check_no_empty_classes(splits["train"])
    fold = None if spec.fold is None else assign_folds(splits["train"], spec.fold_numbers[1], spec.split_seed)
    return ImagePool(splits, made, fold)


def load_streams(spec: DataSpec) -> IterableDatasetDict:
    """Load streams, of which no images can be chosen: they are read as they come."""
    spec = resolve_benchmark_defaults(spec)
    for name, value in spec.non_defaults().items():
        if name not in STREAM_OPTIONS and (name, value) not in (("split_column", "none"), ("box_columns", "none")):
            raise LiVTError(
                f"{name} is {value!r}, but no images can be chosen of a stream: load it without streaming.", name
            )
    splits = read_source(spec, {}, streaming=True)
    if not isinstance(splits["train"], IterableDataset):  # what is stored as paths becomes a stream too
        check_not_empty(splits)
        splits = {split: as_stream(images) for split, images in encode_classes(splits, spec, {}).items()}
    if len(splits) == 1:
        logger.warning("a stream without a test split is trained on as a whole: keep images to test on elsewhere")
    return IterableDatasetDict(splits)


def _load_splits(spec: DataSpec) -> tuple[dict[str, Dataset], frozenset[str]]:
    """Return all images that the spec chooses by split, and the names of the splits that were made."""
    benchmark = BENCHMARKS.get(spec.dataset, Benchmark())
    spec = resolve_benchmark_defaults(spec)
    dropped: DroppedImages = {}
    tables = read_source(spec, dropped)
    is_subsampled = spec.rule is not None and not benchmark.own_tail
    check_after_subsampling = is_subsampled and spec.dataset in PUBLIC  # only the few images that are kept are read
    if spec.on_broken == "skip" and not check_after_subsampling:
        tables = {split: table.select(readable_rows(table.images)) for split, table in tables.items()}
    check_not_empty(tables)
    splits = encode_classes(add_groups(tables, spec), spec, dropped)
    log_dropped_images(dropped)
    check_not_empty(splits)
    made: frozenset[str] = frozenset()
    if spec.fold is not None:
        if "test" in splits:
            logger.warning("the %d images of the test split are in no fold", len(splits["test"]))
        parts = [splits[split] for split in ("train", "validation") if split in splits]
        splits = {"train": parts[0] if len(parts) == 1 else concatenate_datasets(parts)}
    elif "group" in splits["train"].column_names and len(splits) > 1:
        warn_about_shared_groups(splits)
    if "test" not in splits and spec.fold is None and spec.test_fraction is not None:
        splits, made = splits | split_test(splits, spec), frozenset({"test"})
    if is_subsampled:
        splits["train"] = subsample_long_tail(splits["train"], spec)
    if spec.on_broken == "skip" and check_after_subsampling:
        splits = {split: images.select(readable_rows(images)) for split, images in splits.items()}
    return splits, made


def subsample_long_tail(train: Dataset, spec: DataSpec) -> Dataset:
    """Pick the training images that the rule keeps."""
    if is_multi_label(train):
        raise LiVTError(
            "a rule needs one label per image, but this dataset has several: drop rule and imbalance_factor.", "rule"
        )
    check_no_empty_classes(train)
    counts = counts_by_rule(class_counts(train), spec.rule, spec.imbalance_factor, spec.images_per_class, spec.cap)
    return train.select(long_tail_indices(labels_of(train).values, counts, spec.split_seed, spec.cap))


def check_several_classes(train: Dataset) -> None:
    """Raise an error for a classifier of one class; with several labels, one class is a question of its own."""
    names = class_feature(train).names
    if len(names) < 2 and not is_multi_label(train):
        raise LiVTError(
            f"all images are of one class, {', '.join(names)}; a classifier needs images of another too.", "dataset"
        )


def check_no_empty_classes(train: Dataset) -> None:
    """Raise an error for classes without a training image, whose prior is undefined."""
    empty = np.flatnonzero(class_counts(train) == 0)
    if len(empty):
        names = [class_feature(train).names[c] for c in empty[:5]]
        number = "1 class has" if len(empty) == 1 else f"{len(empty)} classes have"
        raise LiVTError(
            f"{number} no training image, so the prior is undefined (such as {', '.join(names)}): pass drop_empty to "
            "drop them, or other counts.",
            "drop_empty",
        )


def resolve_benchmark_defaults(spec: DataSpec) -> DataSpec:
    """Return the spec with a benchmark's own rule and numbers where none are given."""
    benchmark, names = BENCHMARKS.get(spec.dataset, Benchmark()), ("rule", "imbalance_factor", "images_per_class")
    values = {name: getattr(benchmark if getattr(spec, name) is None else spec, name) for name in names}
    if values["rule"] is None and (spec.imbalance_factor is not None or spec.images_per_class is not None):
        values["rule"] = "exponential"
    if values["rule"] == "balanced" and spec.imbalance_factor not in (None, 1):
        raise LiVTError(
            f"imbalance_factor is {spec.imbalance_factor:g}, but the rule balanced keeps as many images of each "
            "class: pass imbalance_factor 1, or another rule.",
            "imbalance_factor",
        )
    return spec.replace(**values)
