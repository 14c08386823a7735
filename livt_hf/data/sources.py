"""Datasets by name or place, benchmarks and the user's own images, as a `DatasetDict` ready for both stages."""

import contextlib
import dataclasses
import difflib
import errno
import itertools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)

from livt_hf.data.benchmarks import BENCHMARKS, Benchmark
from livt_hf.data.decoding import without_broken
from livt_hf.data.folders import holds_images, open_image_folder
from livt_hf.data.folds import test_folds
from livt_hf.data.labels import (
    LeftOut,
    class_counts,
    class_feature,
    first_names,
    group_codes,
    is_multi_label,
    labels_of,
    number_of_classes,
    rows_of,
    say_left_out,
    standard_columns,
    standard_stream,
)
from livt_hf.data.shards import as_stream, count_images, with_shard_lengths
from livt_hf.data.splits import counts_by_rule, grouped_split, long_tail_indices, stratified_split
from livt_hf.data.tables import (
    SPLIT_OF_WORD,
    TABLES,
    ImageList,
    datasets_from_lists,
    find_lists,
    is_image_list,
    is_table,
    open_table,
    read_list,
)
from livt_hf.errors import LiVTError
from livt_hf.records import in_words
from livt_hf.settings import DataSettings

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
KINDS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}  # the names that `datasets` gives them
STREAM_SHARDS = 64  # of data that is stored as paths: enough to share out among processes and workers
# A set of own images below this size is not divided further without being asked.
ENOUGH_TO_HOLD_OUT = 500
CARVED = "set aside from the training data"
# Whole words only: "medieval" is no validation set. Digits may follow, as in val2017.
SPLIT_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(SPLIT_OF_WORD)})(?![^\W\d_])")


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
    known = DataSettings.names()
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}."
            raise LiVTError(f"load_long_tailed has no option {option!r}; {hint}")
    options |= {"dataset": str(name), "imbalance_factor": imbalance_factor, "source": source, "split_seed": seed}
    options = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in options.items()}
    return load_data(DataSettings(**options), streaming)


def load_data(settings: DataSettings, streaming: bool = False) -> DatasetDict | IterableDatasetDict:
    """The dataset that the settings describe; `load_long_tailed` explains it."""
    images = load_images(settings, streaming)
    return IterableDatasetDict(images.splits) if streaming else images.divided(settings)


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
            splits = {"train": train.select(np.flatnonzero(~tested)), "test": train.select(np.flatnonzero(tested))}
            splits["test"].info.description = CARVED
            trained -= trained // folds  # alike for all folds
        if "validation" not in splits:
            splits |= _held_out(splits["train"], settings, trained)
        return DatasetDict({split: splits[split] for split in SPLITS if split in splits})


def load_images(settings: DataSettings, streaming: bool = False) -> Images:
    """The images before they are divided: of a cross-validation, all folds share them."""
    benchmark = BENCHMARKS.get(settings.dataset, Benchmark())
    settings = with_defaults(settings, benchmark)
    if streaming and settings.rule is not None:
        raise LiVTError(f'a stream cannot be thinned out by the rule "{settings.rule}": load it without streaming.')
    left_out: LeftOut = {}
    file = Path(settings.dataset).expanduser()
    if settings.dataset not in BENCHMARKS and is_table(file) and not streaming:
        splits = _named_splits(open_table(file, settings, left_out), settings.dataset)
        group = None if settings.group_column is None else "group"
        settings = dataclasses.replace(settings, image_column="image", label_column="label", group_column=group)
    else:
        splits = _open_benchmark(settings, benchmark, streaming)
    if settings.label_column is None and benchmark.label_column in (splits["train"].column_names or []):
        settings = dataclasses.replace(settings, label_column=benchmark.label_column)
    if streaming:
        splits = {split: standard_stream(dataset, settings) for split, dataset in splits.items()}
        return Images(_reported_as_test(splits, benchmark))
    splits = _reported_as_test(standard_columns(splits, settings, left_out), benchmark)
    say_left_out(left_out)
    if settings.fold is not None:
        splits = {"train": _pooled(splits)}
    elif settings.group_column is not None and len(splits) > 1:
        _warn_of_shared_groups(splits)
    if "test" not in splits and settings.fold is None:
        splits |= _carved_test(splits, settings)
    if settings.rule is not None and not benchmark.own_tail:
        splits["train"] = _thinned(splits["train"], settings)
    if settings.on_broken == "skip":
        splits = {split: without_broken(dataset) for split, dataset in splits.items()}
        if settings.drop_empty:  # classes that had broken images only
            again = DataSettings(drop_empty=True, group_column=settings.group_column and "group")
            splits = standard_columns(splits, again, {})
    _refuse_empty_classes(splits["train"])
    if settings.fold is None:
        return Images(splits)
    return Images(splits, test_folds(splits["train"], settings.fold_numbers[1], settings.split_seed))


def _pooled(splits: dict[str, Dataset]) -> Dataset:
    """What folds divide: all labelled images but those of a test split, which stays unseen."""
    if "test" in splits:
        logger.warning("the %d images of the test split are in no fold", len(splits["test"]))
    parts = [splits[split] for split in ("train", "validation") if split in splits]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def with_defaults(settings: DataSettings, benchmark: Benchmark) -> DataSettings:
    """The settings, with a benchmark's own rule and numbers where none are given."""
    rule = benchmark.rule if settings.rule is None else settings.rule
    if rule is None and (settings.imbalance_factor is not None or settings.images_per_class is not None):
        rule = "exponential"
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


def _carved_test(splits: dict[str, Dataset], settings: DataSettings) -> dict[str, Dataset]:
    """The training split in two parts: one to train on, one to test on."""
    train = splits["train"]
    rows, test_rows = _divided(train, settings.test_fraction, settings)
    parts = {"train": train.select(rows), "test": train.select(test_rows)}
    parts["test"].info.description = CARVED
    rename = ", or call the validation split so" if "validation" in splits else ""
    logger.warning(
        "there is no test split, so %d of %d training images are set aside as one; to choose them yourself, add a "
        "split called test%s",
        *(len(test_rows), len(train), rename),
    )
    absent = np.flatnonzero((class_counts(parts["test"]) == 0) & (class_counts(train) > 0))
    if len(absent):
        names = [class_feature(train).names[c] for c in absent]
        few = "have too few groups" if settings.group_column else "are too small"
        logger.warning("classes that %s to give a test image: %s", few, first_names(names))
    return parts


def _held_out(train: Dataset, settings: DataSettings, trained: int) -> dict[str, Dataset]:
    """The training split with a part of it as validation split, where that is asked for or sensible."""
    fraction = settings.validation_fraction
    if fraction is None:
        fraction = 0.0 if settings.dataset in BENCHMARKS or trained < ENOUGH_TO_HOLD_OUT else 0.1
    if fraction == 0:
        return {}
    rows, held_rows = _divided(train, fraction, settings)
    logger.info(
        "%d of %d training images are held out as validation split, to calibrate; --validation_fraction 0 keeps them",
        *(len(held_rows), len(train)),
    )
    parts = {"train": train.select(rows), "validation": train.select(held_rows)}
    parts["validation"].info.description = CARVED
    return parts


def _divided(train: Dataset, fraction: float, settings: DataSettings) -> tuple[np.ndarray, np.ndarray]:
    """Rows to keep and rows to set aside: no group on both sides, and each class divided alike as far as possible."""
    labels, seed = labels_of(train), settings.split_seed
    if settings.group_column is not None:
        return grouped_split(labels.rarest(number_of_classes(train)), group_codes(train), fraction, seed)
    if is_multi_label(train):
        order = np.random.RandomState(seed).permutation(len(train))
        number = int(len(train) * fraction)
        return np.sort(order[number:]), np.sort(order[:number])
    return stratified_split(labels.values, fraction, seed)


def _warn_of_shared_groups(splits: dict[str, Dataset]) -> None:
    """Splits that the dataset came with stay as they are, also where they divide a group."""
    groups = {split: set(labels_of(part, "group").values.tolist()) for split, part in splits.items()}
    for first, second in itertools.combinations(groups, 2):
        shared = sorted(groups[first] & groups[second])
        if shared:
            logger.warning("%d groups are both in %s and in %s, such as %s", len(shared), first, second, shared[0])


def has_carved_test(data: DatasetDict | IterableDatasetDict) -> bool:
    """Whether the test split is not the dataset's own: set aside from the training images, or a fold of them."""
    return is_carved(data, "test")


def is_carved(data: DatasetDict | IterableDatasetDict, split: str) -> bool:
    return split in data and data[split].info.description == CARVED


def _thinned(train: Dataset, settings: DataSettings) -> Dataset:
    """Pick the training images that the rule asks for."""
    if is_multi_label(train):
        raise LiVTError(
            "a rule needs one label per image, but this dataset has several: drop rule and imbalance_factor."
        )
    names = ("rule", "imbalance_factor", "images_per_class", "cap")
    counts = counts_by_rule(class_counts(train), **{name: getattr(settings, name) for name in names})
    return train.select(long_tail_indices(labels_of(train).values, counts, settings.split_seed, settings.cap))


def _refuse_empty_classes(train: Dataset) -> None:
    empty = np.flatnonzero(class_counts(train) == 0)
    if len(empty):
        names = [class_feature(train).names[c] for c in empty[:5]]
        raise LiVTError(
            f"{len(empty)} classes have no training image, so their prior is undefined (such as {', '.join(names)}): "
            "pass --drop_empty (in Python drop_empty=True) to remove them, or other counts."
        )


def _open_benchmark(settings: DataSettings, benchmark: Benchmark, streaming: bool) -> dict:
    """The splits as they are stored."""
    if benchmark.load is not None:
        if streaming:
            raise LiVTError(f"{settings.dataset} is made in Python, not read from files: load it without streaming.")
        return _named_splits(benchmark.load(settings), settings.dataset)
    if benchmark.lists:
        return _open_listed(settings, benchmark, streaming)
    if settings.dataset in BENCHMARKS:
        return _open(settings.source or benchmark.hub, settings, streaming)
    path = Path(settings.dataset)
    # A table that comes here is missing, which is what must be said.
    if settings.source is not None and not is_image_list(path) and path.suffix.lower() not in TABLES:
        raise LiVTError(f"source is for benchmarks, tables and image lists, not for {settings.dataset}: drop it.")
    return _open(settings.dataset, settings, streaming)


def _open_listed(settings: DataSettings, benchmark: Benchmark, streaming: bool) -> dict[str, Dataset]:
    """A benchmark that consists of the images that its lists name."""
    name, source = settings.dataset, settings.source
    folder = Path(settings.lists or source or ".").expanduser()
    found = [f for prefix in benchmark.lists if folder.is_dir() and (f := find_lists(folder, prefix)) and "train" in f]
    if not found:
        if source is None or settings.lists is not None:
            raise LiVTError(
                f"{name} needs its list {benchmark.lists[0]}_train.txt, which is not in {folder}: it is usually found "
                f"in {benchmark.lists_from}; pass its folder with --lists and the images with --source."
            )
        return _open_ready_made(settings, benchmark, streaming)
    if streaming:
        raise LiVTError(f"{name} is picked by its lists, which a stream cannot do: load it without streaming.")
    candidates = [{split: read_list(path) for split, path in files.items()} for files in found]
    if source is not None:
        root = Path(source).expanduser()
        for candidate in candidates:  # two styles of paths are in use; the one that finds its first image is meant
            if (root / candidate["train"].paths[0]).is_file():
                return datasets_from_lists(candidate, root, settings.on_broken == "skip")
    if benchmark.hub is None:
        train = candidates[0]["train"]
        raise LiVTError(f"{train.paths[0]} of {train.file} is not below {source}: pass the images with --source.")
    return _picked(_open(source or benchmark.hub, settings, streaming=False), candidates[0])


def _open_ready_made(settings: DataSettings, benchmark: Benchmark, streaming: bool) -> dict:
    """A copy that consists of the listed images already."""
    splits = _open(settings.source, settings, streaming)
    if not streaming and len(splits["train"]) != benchmark.train_images:
        raise LiVTError(
            f"{settings.source} has {len(splits['train'])} training images, but {settings.dataset} has "
            f"{benchmark.train_images}: pass the folder of its lists ({benchmark.lists[0]}_train.txt) with --lists."
        )
    return splits


def _picked(images: dict[str, Dataset], lists: dict[str, ImageList]) -> dict[str, Dataset]:
    """Pick the images of lists from the Hub's ImageNet by file name: `n01440764_10026_n01440764.JPEG` there."""
    picked = {}
    for split, wanted in lists.items():
        published = images["train" if wanted.paths[0].startswith("train") else "validation"]
        stored = pc.struct_field(published.data.column("image"), "path")  # not combined: that would copy the bytes
        if (kept := rows_of(published)) is not None:
            stored = stored.take(pa.array(kept))
        rows = pc.index_in(_stems(pa.array(wanted.paths)), value_set=_stems(stored).combine_chunks())
        if rows.null_count:
            first = wanted.paths[int(np.argmax(rows.is_null()))]
            raise LiVTError(
                f"{rows.null_count} of {len(rows)} images of {wanted.file} are not in the dataset, the first is "
                f"{first}: is it ILSVRC 2012?"
            )
        part = published.select(rows.to_numpy())
        labels = labels_of(part).values
        differ = np.flatnonzero(labels != wanted.labels)
        if len(differ):
            raise LiVTError(
                f"{wanted.file} and the dataset disagree on the class of {wanted.paths[differ[0]]}: "
                f"{wanted.labels[differ[0]]} and {labels[differ[0]]}."
            )
        picked[split] = part
    return picked


def _stems(paths: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """File names without folder, extension and the synset that the Hub appends."""
    names = pc.replace_substring_regex(paths, r"^.*/", "")
    return pc.replace_substring_regex(names, r"(_n\d{8})?\.[A-Za-z]+$", "")


def _open(where: str, settings: DataSettings, streaming: bool) -> dict:
    """Open a folder, a file or a Hub dataset; splits named train, validation, test."""
    path = Path(where).expanduser()
    skip_missing = settings.on_broken == "skip"
    if path.is_file() and is_image_list(path):
        root = Path(settings.source or path.parent).expanduser()
        splits = datasets_from_lists({"train": read_list(path)}, root, skip_missing)
    elif path.is_file():
        splits = _load(KINDS.get(path.suffix, ""), {"train": [str(path)]}, streaming)
    elif path.is_dir():
        splits = _open_folder(path, streaming, skip_missing)
    elif where.startswith((".", "/", "~")) or "\\" in where or where.count("/") > 1 or path.suffix.lower() in TABLES:
        raise LiVTError(f"{where} does not exist: pass an image folder, a table, a list or a Hub id.")
    else:
        splits = _open_hub(where, settings, streaming)
    return _named_splits(_streams(splits) if streaming else splits, where)


def _streams(splits: Mapping) -> dict[str, IterableDataset]:
    """What is stored as paths becomes a stream too."""
    return {
        split: as_stream(part, STREAM_SHARDS) if isinstance(part, Dataset) else part for split, part in splits.items()
    }


def _named_splits(splits: Mapping, where: str) -> dict:
    if "train" not in splits:
        if len(splits) != 1:
            raise LiVTError(f"{where} has no split called train, but {', '.join(splits)}: rename one.")
        splits = {"train": next(iter(splits.values()))}
    aliases = {"val": "validation", "valid": "validation", "dev": "validation"}
    splits = {aliases.get(split, split): dataset for split, dataset in splits.items()}
    return {split: splits[split] for split in SPLITS if split in splits}


def _open_hub(where: str, settings: DataSettings, streaming: bool) -> dict:
    repository, _, config = where.partition(":")
    try:
        if not streaming:
            return dict(load_dataset(repository, config or None))
        builder = load_dataset_builder(repository, config or None)
        streams = builder.as_streaming_dataset()
    except (ConnectionError, FileNotFoundError) as error:
        away = f"{repository} could not be loaded from the Hub ({error})"
        if settings.dataset in BENCHMARKS:
            away += ": without internet or access rights, pass a local copy with --source FOLDER."
        else:
            away = f"there is no folder {where}, and {away}: correct the name, or give the folder of a local copy."
        raise LiVTError(away) from error
    if builder.name != "parquet":
        raise LiVTError(
            f"{repository} is stored as {builder.name}, whose images cannot be counted without reading all: load it "
            "without streaming, or download it."
        )
    files = builder.config.data_files
    with _reading_dataset(repository):
        counts = {split: count_images(builder.name, files[split]) for split in streams}
    return {split: with_shard_lengths(stream, counts[split]) for split, stream in streams.items()}


def _open_folder(path: Path, streaming: bool, skip_missing: bool) -> dict:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        with _reading_dataset(path):
            stored = load_from_disk(path).with_format(None)  # a format may hide columns
        return dict(stored) if isinstance(stored, DatasetDict) else {"train": stored}
    for suffix in (".parquet", ".arrow"):
        files = sorted(str(file) for file in path.rglob(f"*{suffix}"))
        if files:
            return _load(KINDS[suffix], _by_split(files, path), streaming)
    lists = find_lists(path)
    if "train" in lists:
        return datasets_from_lists({split: read_list(file) for split, file in lists.items()}, path, skip_missing)
    archives = sorted(str(file) for file in path.rglob("*.tar"))
    if archives and not holds_images(path):  # what was unpacked may lie beside its archive
        return _load("webdataset", _by_split(archives, path), streaming)
    return open_image_folder(path)


def _load(kind: str, files: dict[str, list[str]], streaming: bool) -> dict:
    if kind not in KINDS.values():
        known = "a table (.csv, .tsv, .jsonl, .parquet), an arrow file, a webdataset (.tar) or an image list (.txt, "
        raise LiVTError(f"{files['train'][0]} is not {known}.txt.gz, .txt.xz), or it cannot be streamed.")
    # One by one: loaded together, all splits get the class names of the first file.
    splits = {}
    for split, own in files.items():
        with _reading_dataset(", ".join(own[:3])):
            splits[split] = load_dataset(kind, data_files={split: own}, split=split, streaming=streaming)
            if streaming:
                splits[split] = with_shard_lengths(splits[split], count_images(kind, own))
    return splits


@contextlib.contextmanager
def _reading_dataset(place: str | Path) -> Iterator[None]:
    """Around what `datasets` reads of a disk: whatever it raises on damaged files, in a sentence."""
    try:
        yield
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:  # it wraps what went wrong in "an error occurred"
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:  # where the cache is: the files may be good
            raise cause from None
        raise LiVTError(f"{place} cannot be read as a dataset: {in_words(cause)}; put back a good copy.") from error


def _by_split(files: list[str], folder: Path) -> dict[str, list[str]]:
    """Files by the last word of their path below `folder` that names a split.

    Where no file names the training split, those that name none are it.
    """
    splits: dict[str, list[str]] = {}
    unnamed = []
    for file in files:
        words = SPLIT_WORD.findall(Path(file).relative_to(folder).as_posix().lower())
        (splits.setdefault(SPLIT_OF_WORD[words[-1]], []) if words else unnamed).append(file)
    if unnamed and "train" in splits:
        raise LiVTError(
            f"{unnamed[0]} names no split, but {splits['train'][0]} does: put train, validation or test into its "
            "name, or move it elsewhere."
        )
    return splits | ({"train": unnamed} if unnamed else {})
