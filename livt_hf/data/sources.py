"""Benchmarks of the paper and the user's own images as a `DatasetDict` ready for both stages."""

import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, IterableDatasetDict

from livt_hf.data import glyphs
from livt_hf.data.benchmarks import BENCHMARKS, Benchmark
from livt_hf.data.broken import without_broken
from livt_hf.data.columns import standard_columns, standard_stream
from livt_hf.data.labels import class_counts, class_feature, is_multi_label, labels_of
from livt_hf.data.opening import open_benchmark
from livt_hf.data.splits import (
    balanced_counts,
    exponential_counts,
    largest_fitting,
    long_tail_indices,
    pareto_counts,
    stratified_split,
)
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)


def load_long_tailed(
    name: str,
    imbalance_factor: float | None = None,
    source: str | Path | None = None,
    seed: int = 0,
    *,
    rule: str | Sequence[int] | None = None,
    images_per_class: int | None = None,
    cap: bool = False,
    lists: str | Path | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    test_fraction: float = 0.2,
    drop_empty: bool = False,
    on_broken: str = "error",
    streaming: bool = False,
) -> DatasetDict | IterableDatasetDict:
    """A data set with the splits `train`, `test` (what the paper reports on) and perhaps `validation`.

    `name`: a benchmark (`glyphs`, `cifar10-lt`, `cifar100-lt`, `imagenet-lt`, `imagenet-bal`, `imagenet-1k`,
        `places-lt`, `inat18`), an image folder, a folder or file of parquet or arrow, an image list, or a Hub data set
        (`owner/name` or `owner/name:config`).
    `source`: a local copy for a benchmark (the Hub's parquet files, an image folder, or lists and images), or the
        images' folder of an image list. `lists`: the folder of a benchmark's lists, when they are not in `source`.
    `rule`: how a long tail is made of the training images: "exponential" (the default when an imbalance factor is
        given), "pareto", "balanced", or the counts of all classes; without one the natural imbalance is kept. Larger
        classes get larger counts, equal ones in label order. `images_per_class` is the largest count (or that of every
        class when balanced). A class with fewer images is an error unless `cap`.
    `test_fraction`: taken from each class of own data without a test split.
    `on_broken`: "error" stops when a broken image is met, "skip" looks for them first and leaves them out.
    `streaming`: for pretraining on data that does not fit; see `livt_hf.data.streaming` for what it gives up.
    """
    benchmark = BENCHMARKS.get(name, Benchmark())
    if rule is None:
        rule = benchmark.rule or (None if imbalance_factor is None and images_per_class is None else "exponential")
    if name == "glyphs":
        return _glyphs(imbalance_factor, seed, rule, images_per_class, source, streaming)
    imbalance_factor = benchmark.imbalance_factor if imbalance_factor is None else imbalance_factor
    images_per_class = benchmark.images_per_class if images_per_class is None else images_per_class
    if streaming and rule is not None:
        raise LiVTError(f'a stream cannot be thinned out by the rule "{rule}": load it without streaming.')

    splits = open_benchmark(name, benchmark, source, lists, streaming, on_broken)
    label_column = label_column or (benchmark.label_column if _has_column(splits, benchmark.label_column) else None)
    if streaming:
        splits = {split: standard_stream(dataset, image_column, label_column) for split, dataset in splits.items()}
        return IterableDatasetDict(_reported_as_test(splits, benchmark))
    splits = standard_columns(splits, image_column, label_column, drop_empty)
    splits = _reported_as_test(splits, benchmark)
    if "test" not in splits:
        splits |= _carved_test(splits["train"], test_fraction, seed)
    if rule is not None:
        splits["train"] = _thinned(splits["train"], rule, imbalance_factor, images_per_class, seed, cap)
    splits = {split: without_broken(dataset, on_broken) for split, dataset in splits.items()}
    _refuse_empty_classes(splits["train"])
    return DatasetDict({split: splits[split] for split in ("train", "validation", "test") if split in splits})


def _glyphs(imbalance_factor, seed, rule, images_per_class, source, streaming) -> DatasetDict:
    if rule not in (None, "exponential") or source is not None or streaming:
        raise LiVTError("glyphs are made by the exponential rule, without source or streaming: drop those options.")
    options = {"imbalance_factor": imbalance_factor, "max_count": images_per_class}
    return glyphs.glyphs(seed=seed, **{key: value for key, value in options.items() if value is not None})


def _has_column(splits: dict, column: str | None) -> bool:
    return column is not None and column in (splits["train"].column_names or [])


def _reported_as_test(splits: dict, benchmark: Benchmark) -> dict:
    """Where the paper reports on the published validation set, that one is `test`."""
    if benchmark.reports_validation and "validation" in splits:
        return {"train": splits["train"], "test": splits["validation"]}
    return splits


def _carved_test(train: Dataset, test_fraction: float, seed: int) -> dict[str, Dataset]:
    if is_multi_label(train):
        order = np.random.RandomState(seed).permutation(len(train))
        num_test = int(len(train) * test_fraction)
        rows, test_rows = np.sort(order[num_test:]), np.sort(order[:num_test])
    else:
        rows, test_rows = stratified_split(labels_of(train), test_fraction, seed)
    parts = {"train": train.select(rows), "test": train.select(test_rows)}
    absent = np.flatnonzero((class_counts(parts["test"]) == 0) & (class_counts(train) > 0))
    if len(absent):
        names = [class_feature(train).names[c] for c in absent]
        logger.warning("%d classes are too small to give a test image: %s", len(names), ", ".join(names))
    return parts


def _thinned(train: Dataset, rule, imbalance_factor, images_per_class, seed: int, cap: bool) -> Dataset:
    """Pick the training images that a rule asks for."""
    if is_multi_label(train):
        raise LiVTError(
            "a rule needs one label an image, but this data set has several: drop rule and imbalance_factor."
        )
    available = class_counts(train)
    if not isinstance(rule, str):
        counts = np.asarray(rule, dtype=np.int64)
        if len(counts) != len(available):
            raise LiVTError(f"rule gives {len(counts)} counts for {len(available)} classes: pass one for each class.")
    else:
        counts = _counts_by_rule(available, rule, imbalance_factor, images_per_class, cap)
    return train.select(long_tail_indices(labels_of(train), counts, seed, cap))


def _counts_by_rule(available: np.ndarray, rule: str, imbalance_factor, images_per_class, cap: bool) -> np.ndarray:
    """What a rule leaves of each class."""
    if rule == "balanced":
        count, gamma = int(available.min()), 1.0
        make = partial(balanced_counts, len(available))
    elif rule in ("exponential", "pareto"):
        if imbalance_factor is None:
            raise LiVTError(f'the rule "{rule}" needs an imbalance_factor, such as 100.')
        count, gamma = int(available.max()), imbalance_factor
        by_name = {"exponential": exponential_counts, "pareto": pareto_counts}
        make = partial(by_name[rule], len(available), imbalance_factor=imbalance_factor)
    else:
        raise LiVTError(f'rule is "{rule}": pass "exponential", "pareto", "balanced" or a count for each class.')
    count = count if images_per_class is None else images_per_class
    counts = np.empty(len(available), dtype=np.int64)
    counts[np.argsort(-available, kind="stable")] = make(count)  # equal classes keep the order of their labels
    short = np.flatnonzero(counts > available)
    if len(short) and not cap:
        fitting = largest_fitting(make, available, math.ceil(gamma), count)
        c = short[0]
        raise LiVTError(
            f"{len(short)} classes have fewer images than asked (class {c} has {available[c]}, asked {counts[c]}): "
            + (f"pass --images_per_class {fitting} or less" if fitting else "pass a larger --imbalance_factor")
            + " (or in Python cap=True, which takes all that such a class has)."
        )
    return counts


def _refuse_empty_classes(train: Dataset) -> None:
    empty = np.flatnonzero(class_counts(train) == 0)
    if len(empty):
        names = [class_feature(train).names[c] for c in empty[:5]]
        raise LiVTError(
            f"{len(empty)} classes have no training image, so their prior is undefined (such as {', '.join(names)}): "
            "pass --drop_empty (in Python drop_empty=True) to remove them, or other counts."
        )
