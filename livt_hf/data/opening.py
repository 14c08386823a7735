"""Where images are read from: a folder, a file, lists, a benchmark's copy, the Hub. Splits as they are stored."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, load_dataset, load_dataset_builder, load_from_disk
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from livt_hf.data.benchmarks import BENCHMARKS, Benchmark
from livt_hf.data.folders import open_image_folder, walk
from livt_hf.data.labels import image_paths, labels_of
from livt_hf.data.lists import ImageList, datasets_from_lists, find_lists, is_image_list, read_list
from livt_hf.data.shards import as_stream, count_images, with_shard_lengths
from livt_hf.data.split_names import by_split, named_splits, refuse_empty_splits
from livt_hf.data.tables import TABLES, is_table
from livt_hf.errors import LiVTError, did_you_mean, is_path_not_hub_id
from livt_hf.settings import DataSettings
from livt_hf.text import format_error

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}  # the names that `datasets` gives them
STREAM_SHARDS = 64  # of data that is stored as paths: enough to share out among processes and workers


def open_splits(settings: DataSettings, benchmark: Benchmark, streaming: bool) -> dict:
    """The splits as they are stored."""
    if benchmark.load is not None:
        if streaming:
            raise LiVTError(f"{settings.dataset} is made in Python, not read from files: load it without streaming.")
        return named_splits(benchmark.load(settings), settings.dataset)
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
    folder = Path(settings.lists or source or ".")
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
        root = Path(source)
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
        published = images["train"]
        if not wanted.paths[0].startswith("train"):
            published = images.get("validation", published)
        stored = _stems(image_paths(published)).combine_chunks()
        rows = pc.index_in(_stems(pa.array(wanted.paths)), value_set=stored)
        if rows.null_count:
            first = wanted.paths[int(np.argmax(rows.is_null()))]
            raise LiVTError(
                f"{rows.null_count} of {len(rows)} images of {wanted.file} are not in the dataset, the first is "
                f"{first}: is it all of ILSVRC 2012?"
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
    path = Path(where)
    skip_missing = settings.on_broken == "skip"
    if path.is_file() and is_image_list(path):
        root = Path(settings.source or path.parent)
        splits = datasets_from_lists({"train": read_list(path)}, root, skip_missing)
    elif path.is_file():
        splits = _load(KINDS.get(path.suffix.lower(), ""), {"train": [str(path)]}, streaming)
    elif path.is_dir():
        splits = _open_folder(path, streaming, skip_missing)
    elif is_path_not_hub_id(where) or path.suffix.lower() in TABLES:
        pass_one = "pass an image folder, a table, a list or a Hub id"
        raise LiVTError(f"{where} does not exist: {pass_one}.{did_you_mean(where)}")
    else:
        splits = _open_hub(where, settings, streaming)
    splits = named_splits(splits, where)
    if streaming:  # what is stored as paths becomes one too
        stored = {split: dataset for split, dataset in splits.items() if isinstance(dataset, Dataset)}
        refuse_empty_splits(stored)
        splits |= {split: as_stream(dataset, STREAM_SHARDS) for split, dataset in stored.items()}
    return splits


def _open_hub(where: str, settings: DataSettings, streaming: bool) -> dict:
    repository, _, config = where.partition(":")
    near = did_you_mean(where, () if "/" in where else BENCHMARKS)
    try:
        if near and "/" not in where:  # perhaps a misspelt folder: one short question, where loading asks many times
            HfApi().dataset_info(repository, timeout=10)
        if not streaming:
            return dict(load_dataset(repository, config or None))
        builder = load_dataset_builder(repository, config or None)
        streams = builder.as_streaming_dataset()
    # A ValueError is a config that is missing or misspelt, or no name for a dataset; a RuntimeError a loading script.
    except (ConnectionError, FileNotFoundError, HTTPError, ValueError, RuntimeError) as error:
        away = f"{repository} could not be loaded from the Hub ({format_error(error)})"
        if settings.dataset in BENCHMARKS:
            away += ": without internet or access rights, pass a local copy with --source FOLDER."
        else:
            away = f"there is no folder {where}, and {away}: correct the name (owner/name, or owner/name:config), or "
            away += f"give the folder of a local copy.{near}"
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
    if any((path / name).is_file() for name in ("config.json", "arguments.yaml", "plan.json")):
        raise LiVTError(f"{path} is the folder of a model or a run; name the folder of its images.")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        with _reading_dataset(path):
            stored = load_from_disk(path).with_format(None)  # a format may hide columns
        return dict(stored) if isinstance(stored, DatasetDict) else {"train": stored}
    tree = walk(path)
    images = tree.images()
    for suffix in (".parquet", ".arrow"):
        files = [str(path / file) for file in tree.ending(suffix)]
        if images and (tables := [file for file in files if is_table(Path(file))]):
            raise LiVTError(
                f"{tables[0]} holds no images, but {path} does: pass a table of labels by its own name, or move "
                "it elsewhere."
            )
        if files:
            return _load(KINDS[suffix], by_split(files, path), streaming)
    lists = find_lists(path)
    if "train" in lists:
        return datasets_from_lists({split: read_list(file) for split, file in lists.items()}, path, skip_missing)
    archives = [str(path / file) for file in tree.ending(".tar")]
    if archives and not images:  # what was unpacked may lie beside its archive
        return _load("webdataset", by_split(archives, path), streaming)
    return open_image_folder(tree)


def _load(kind: str, files: dict[str, list[str]], streaming: bool) -> dict:
    if kind not in KINDS.values():
        if Path(files["train"][0]).suffix.lower() in TABLES:
            raise LiVTError(
                f"{files['train'][0]} is a table of labels: pass it as the dataset, and without streaming."
            )
        known = "a table (.csv, .tsv, .jsonl, .parquet), an arrow file, a webdataset (.tar) or an image list (.txt, "
        raise LiVTError(f"{files['train'][0]} is not {known}.txt.gz, .txt.xz).")
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
        raise LiVTError(
            f"{place} cannot be read as a dataset: {format_error(cause)}; put back a good copy."
        ) from error
