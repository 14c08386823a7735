"""Datasets by name or place, benchmarks and the user's own images, as a `DatasetDict` ready for both stages."""

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, IterableDatasetDict, concatenate_datasets

from livt_hf.data.benchmarks import BENCHMARKS, PUBLIC, Benchmark
from livt_hf.data.columns import LeftOut, say_left_out, sound_images, standard_columns, standard_stream
from livt_hf.data.decoding import without_broken
from livt_hf.data.division import (
    carved,
    carved_test,
    held_out,
    pooled,
    refuse_empty_classes,
    test_folds,
    thinned,
    warn_of_shared_groups,
)
from livt_hf.data.opening import open_splits
from livt_hf.data.split_names import SPLITS, named_splits, refuse_empty_splits, split_by_column
from livt_hf.data.tables import is_table, open_table
from livt_hf.errors import LiVTError, suggest_name
from livt_hf.settings import DataSettings

logger = logging.getLogger(__name__)

# The options that a stream heeds.
OF_STREAMS = ("dataset", "source", "lists", "image_column", "label_column", "on_broken", "num_workers", "plugin")


def load_long_tailed(
    name: str,
    imbalance_factor: float | None = None,
    source: str | os.PathLike | None = None,
    seed: int = 0,
    *,
    streaming: bool = False,
    **options,
) -> DatasetDict | IterableDatasetDict:
    """A dataset with the splits `train`, `test` (what the paper reports on) and perhaps `validation`.

    `name`: a benchmark (`glyphs`, `cifar10-lt`, `cifar100-lt`, `imagenet-lt`, `imagenet-bal`, `imagenet-1k`,
        `places-lt`, `inat18`), an image folder, a table of labels (csv, tsv, jsonl, parquet), a folder or file of
        parquet, arrow or webdataset (tar), an image list, or a Hub dataset (`owner/name` or `owner/name:config`).
    `source`: a local copy of a benchmark (the Hub's parquet files, an image folder, or lists and images), or the
        folder of the images that a table or an image list names.
    `seed`: picks the images of the tail and of the test set.
    `streaming`: for pretraining on data that does not fit; see `livt_hf.data.streaming` for what it gives up.
    `options`: any other field of `DataSettings`. `rule` may also be the counts of all classes.
    """
    known, called = DataSettings.names(), {"dataset": "name", "split_seed": "seed"}
    for option in options:
        if option in called:
            raise LiVTError(f"load_long_tailed has no option {option!r}; it is called {called[option]} here.")
        if option not in known:
            near = suggest_name(option, known, otherwise=f"choose from {', '.join(known)}.")
            raise LiVTError(f"load_long_tailed has no option {option!r}{near}")
    options |= {"dataset": str(name), "imbalance_factor": imbalance_factor, "source": source, "split_seed": seed}
    options = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in options.items()}
    return load_data(DataSettings(**options), streaming)


def load_data(settings: DataSettings, streaming: bool = False) -> DatasetDict | IterableDatasetDict:
    """The dataset that the settings describe; `load_long_tailed` explains it."""
    images = load_images(settings, streaming)
    return IterableDatasetDict(images.splits) if streaming else images.divided(settings)


def load_to_measure(settings: DataSettings, split: str) -> DatasetDict:
    """The data by split; if that is asked for, `all` is all of them together, and then none is made."""
    if split != "all":
        return load_data(settings)
    data = DatasetDict(_chosen_images(dataclasses.replace(settings, test_fraction=None), streaming=False))
    data["all"] = concatenate_datasets(list(data.values()))  # nothing is trained, so a class may have no image
    return data


@dataclass(frozen=True)
class Images:
    """All images that the settings choose, by split; `fold` says for cross-validation where each is tested."""

    splits: dict
    fold: np.ndarray | None = None

    def by_fold(self) -> dict[str, Dataset]:
        """The images that each fold tests."""
        rows = [np.flatnonzero(self.fold == number) for number in range(self.fold.max() + 1)]
        return {f"fold {number}": self.splits["train"].select(own) for number, own in enumerate(rows, 1)}

    def divided(self, settings: DataSettings) -> DatasetDict:
        """The splits of a training, with images held out for validation where that is asked for or sensible."""
        splits, trained = dict(self.splits), len(self.splits["train"])
        if self.fold is not None:
            number, folds = settings.fold_numbers
            train, tested = splits["train"], self.fold == number - 1
            splits = carved(train, np.flatnonzero(~tested), "test", np.flatnonzero(tested))
            trained -= trained // folds  # alike for all folds
        if "validation" not in splits:
            splits |= held_out(splits["train"], settings, trained)
        return DatasetDict({split: splits[split] for split in SPLITS if split in splits})


def load_images(settings: DataSettings, streaming: bool = False) -> Images:
    """The images before they are divided: of a cross-validation, all folds share them."""
    splits = _chosen_images(settings, streaming)
    if streaming:
        return Images(splits)
    refuse_empty_classes(splits["train"])
    if settings.fold is None:
        return Images(splits)
    return Images(splits, test_folds(splits["train"], settings.fold_numbers[1], settings.split_seed))


def _chosen_images(settings: DataSettings, streaming: bool) -> dict:
    """All images that the settings choose, by split; a class may have none to train on."""
    benchmark = BENCHMARKS.get(settings.dataset, Benchmark())
    settings = with_defaults(settings, benchmark)
    if streaming:
        _refuse_choice(settings)
    left_out: LeftOut = {}
    splits, settings = _opened(settings, benchmark, streaming, left_out)
    if streaming:
        splits = {split: standard_stream(dataset, settings) for split, dataset in splits.items()}
        if len(splits) == 1:
            logger.warning("a stream without a test split is trained on as a whole: keep images to test on elsewhere")
        return splits
    is_thinned = settings.rule is not None and not benchmark.own_tail
    late = is_thinned and settings.dataset in PUBLIC  # few of whose images are kept: only they are read
    if settings.on_broken == "skip" and not late:
        splits = sound_images(splits, settings)
    refuse_empty_splits(splits)
    splits = standard_columns(splits, settings, left_out)
    say_left_out(left_out)
    refuse_empty_splits(splits)
    if settings.fold is not None:
        splits = {"train": pooled(splits)}
    elif settings.group_column is not None and len(splits) > 1:
        warn_of_shared_groups(splits)
    if "test" not in splits and settings.fold is None and settings.test_fraction is not None:
        splits |= carved_test(splits, settings)
    if is_thinned:
        splits["train"] = thinned(splits["train"], settings)
    if settings.on_broken == "skip" and late:
        splits = {split: without_broken(dataset) for split, dataset in splits.items()}
    return splits


def _opened(
    settings: DataSettings, benchmark: Benchmark, streaming: bool, left_out: LeftOut
) -> tuple[dict, DataSettings]:
    """The splits as they are stored, and the settings with the columns that they have by now."""
    file = Path(settings.dataset)
    if settings.dataset not in BENCHMARKS and is_table(file) and not streaming:
        splits = named_splits(open_table(file, settings, left_out), settings.dataset)
        group = None if settings.group_column is None else "group"
        return splits, dataclasses.replace(settings, image_column="image", label_column="label", group_column=group)
    if settings.label_separator is not None:
        raise LiVTError(f"label_separator is for tables of paths and labels, not for {settings.dataset}: drop it.")
    splits = split_by_column(open_splits(settings, benchmark, streaming), settings.split_column)
    splits = _reported_as_test(named_splits(splits, settings.dataset), benchmark)
    if settings.label_column is None and benchmark.label_column in (splits["train"].column_names or []):
        settings = dataclasses.replace(settings, label_column=benchmark.label_column)
    return splits, settings


def _refuse_choice(settings: DataSettings) -> None:
    """Of a stream, which is read as it comes, no images can be chosen."""
    for name, value in settings.non_default_data_options().items():
        if name not in OF_STREAMS and (name, value) != ("split_column", "none"):
            raise LiVTError(
                f"{name} is {value!r}, but no images can be chosen of a stream: load it without streaming."
            )


def with_defaults(settings: DataSettings, benchmark: Benchmark) -> DataSettings:
    """The settings, with a benchmark's own rule and numbers where none are given."""
    rule = benchmark.rule if settings.rule is None else settings.rule
    if rule is None and (settings.imbalance_factor is not None or settings.images_per_class is not None):
        rule = "exponential"
    if rule == "balanced" and settings.imbalance_factor not in (None, 1):
        raise LiVTError(
            f"imbalance_factor is {settings.imbalance_factor:g}, but the rule balanced keeps as many images of each "
            "class: pass --imbalance_factor 1, or another rule."
        )
    numbers = {
        name: getattr(settings if getattr(settings, name) is not None else benchmark, name)
        for name in ("imbalance_factor", "images_per_class")
    }
    return dataclasses.replace(settings, rule=rule, **numbers)


def _reported_as_test(splits: dict, benchmark: Benchmark) -> dict:
    """Where the paper reports on the published validation set, that one is `test`."""
    if benchmark.reports_validation and "validation" in splits:
        return {"train": splits["train"], "test": splits["validation"]}
    return splits
