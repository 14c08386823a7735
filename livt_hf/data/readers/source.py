"""Find out what kind of source a dataset is, and read it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import IterableDataset

from livt_hf.data.benchmarks import BENCHMARKS, Benchmark
from livt_hf.data.companions import select_files, select_rows_of_tables
from livt_hf.data.labels import image_paths
from livt_hf.data.readers.annotations import find_annotations, read_annotation_folder
from livt_hf.data.readers.folder import read_folder, scan_folder
from livt_hf.data.readers.image_list import ImageList, find_lists, is_image_list, read_list, tables_of_lists
from livt_hf.data.readers.image_table import DroppedImages, ImageTable
from livt_hf.data.readers.split_names import group_files_by_split, rename_splits
from livt_hf.data.readers.stored import (
    open_files,
    open_hub,
    open_saved,
    split_by_column,
    standardize_stream,
    tables_of_datasets,
)
from livt_hf.data.readers.table import TABLES, is_table, read_table, tables_of_rows
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError, did_you_mean, is_path_not_hub_id

Splits = dict[str, ImageTable] | dict[str, IterableDataset]


def read_source(spec: DataSpec, dropped: DroppedImages, streaming: bool = False) -> Splits:
    """Read the dataset that a spec names.

    Returns:
        Splits named train, validation and test: an `ImageTable` each, or, of a stream that is not stored as paths, an
        `IterableDataset` with the columns `image` and perhaps `label`. Rows that cannot be used are counted in
        `dropped`.
    """
    benchmark = BENCHMARKS.get(spec.dataset, Benchmark())
    path = Path(spec.dataset)
    if spec.dataset not in BENCHMARKS and is_table(path) and not streaming:
        return rename_splits(select_rows_of_tables(read_table(path, spec, dropped), spec), spec.dataset)
    if spec.label_separator is not None:
        raise LiVTError(
            f"label_separator is for tables of paths and labels, not for {spec.dataset}: drop it.", "label_separator"
        )
    if benchmark.load is not None:
        if streaming:
            raise LiVTError(
                f"{spec.dataset} is made in Python, not read from files: load it without streaming.", "dataset"
            )
        splits = _standardize(benchmark.load(spec), spec.dataset, spec, benchmark)
    elif benchmark.lists:
        splits = _read_listed(spec, benchmark, streaming)
    elif spec.dataset in BENCHMARKS:
        splits = _read_path(spec.source or benchmark.hub, spec, benchmark, streaming)
    elif spec.source is not None and not is_image_list(path) and path.suffix.lower() not in TABLES:
        # A table that comes here is missing, which is what must be said.
        raise LiVTError(
            f"source is for benchmarks, tables and image lists, not for {spec.dataset}: drop it.", "source"
        )
    elif path.is_dir() and not streaming and (annotations := find_annotations(path, spec)):
        rows, own = read_annotation_folder(path, annotations, spec, dropped)
        return rename_splits(select_rows_of_tables(tables_of_rows(rows, own, path, dropped), spec), spec.dataset)
    else:
        splits = _read_path(spec.dataset, spec, benchmark, streaming)
    if benchmark.reports_validation and "validation" in splits:
        return {"train": splits["train"], "test": splits["validation"]}
    return splits


def _read_path(where: str, spec: DataSpec, benchmark: Benchmark, streaming: bool) -> Splits:
    """Read a folder, a file or a Hub dataset."""
    path = Path(where)
    if path.is_file() and is_image_list(path):
        root = Path(spec.source or path.parent)
        splits = tables_of_lists({"train": read_list(path)}, root, spec.on_broken == "skip")
        splits = select_rows_of_tables(splits, spec)
    elif path.is_file():
        splits = open_files({"train": [where]}, streaming)
    elif path.is_dir():
        splits = _open_folder(path, spec, streaming)
    elif path.exists():  # a pipe or device would be read for ever
        raise LiVTError(f"{where} is not a regular file; write it to one first.", "dataset")
    elif is_path_not_hub_id(where) or path.suffix.lower() in TABLES:
        kinds = "pass an image folder, a table, a list or a Hub id"
        raise LiVTError(f"{where} does not exist: {kinds}.{did_you_mean(where)}", "dataset")
    else:
        splits = open_hub(where, spec, streaming)
    return _standardize(splits, where, spec, benchmark, streaming)


def _standardize(splits: dict, source: str, spec: DataSpec, benchmark: Benchmark, streaming: bool = False) -> Splits:
    """Name the splits and columns of what was opened: `ImageTable`s, datasets or streams."""
    if any(isinstance(part, ImageTable) for part in splits.values()):
        own = {"image_column": "image", "label_column": "label", "split_column": "none"}
        for argument in (*own, "group_column", "where"):
            value = getattr(spec, argument)
            if value not in (None, own.get(argument)):
                raise LiVTError(
                    f"{argument} is {value!r}, but {source} is no table: drop it, or pass a table.", argument
                )
        return rename_splits(splits, source)
    splits = rename_splits(split_by_column(splits, spec, streaming), source)
    if not streaming:
        return select_rows_of_tables(tables_of_datasets(splits, spec, benchmark.label_column), spec)
    return {name: standardize_stream(part, spec, benchmark.label_column) for name, part in splits.items()}


def _open_folder(path: Path, spec: DataSpec, streaming: bool) -> dict:
    if any((path / name).is_file() for name in ("config.json", "arguments.yaml", "plan.json")):
        raise LiVTError(f"{path} is the folder of a model or a run; name the folder of its images.", "dataset")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return open_saved(path)
    tree = scan_folder(path)
    images = tree.images()
    for suffix in (".parquet", ".arrow"):
        files = [str(path / file) for file in tree.files_ending(suffix)]
        if images and (tables := [file for file in files if is_table(Path(file))]):
            raise LiVTError(
                f"{tables[0]} holds no images, but {path} does: pass a table of labels by its own name, or move "
                "it elsewhere.",
                "dataset",
            )
        if files:
            return open_files(group_files_by_split(files, path), streaming)
    lists = find_lists(path)
    if "train" in lists:
        lists = {split: read_list(file) for split, file in lists.items()}
        return select_rows_of_tables(tables_of_lists(lists, path, spec.on_broken == "skip"), spec)
    archives = [str(path / file) for file in tree.files_ending(".tar")]
    if archives and not images:  # what was unpacked may lie beside its archive
        return open_files(group_files_by_split(archives, path), streaming)
    return read_folder(select_files(tree, spec.exclude))


def _read_listed(spec: DataSpec, benchmark: Benchmark, streaming: bool) -> Splits:
    """Read a benchmark that consists of the images that its lists name."""
    name, source = spec.dataset, spec.source
    folder = Path(spec.lists or source or ".")
    found = [f for prefix in benchmark.lists if folder.is_dir() and (f := find_lists(folder, prefix)) and "train" in f]
    if not found:
        if source is None or spec.lists is not None:
            raise LiVTError(
                f"{name} needs its list {benchmark.lists[0]}_train.txt, which is not in {folder}: it is usually found "
                f"in {benchmark.lists_from}; pass its folder as lists and the images as source.",
                "lists",
            )
        splits = _read_path(source, spec, benchmark, streaming)
        if not streaming and len(splits["train"]) != benchmark.train_images:
            raise LiVTError(
                f"{source} has {len(splits['train'])} training images, but {name} has {benchmark.train_images}: pass "
                f"the folder of its lists ({benchmark.lists[0]}_train.txt) as lists.",
                "lists",
            )
        return splits
    if streaming:
        raise LiVTError(
            f"{name} is picked by its lists, which a stream cannot do: load it without streaming.", "lists"
        )
    candidates = [{split: read_list(path) for split, path in files.items()} for files in found]
    if source is not None:
        for candidate in candidates:  # two styles of paths are in use; the one that finds its first image is meant
            if (Path(source) / candidate["train"].paths[0]).is_file():
                return tables_of_lists(candidate, Path(source), spec.on_broken == "skip")
    if benchmark.hub is None:
        train = candidates[0]["train"]
        raise LiVTError(
            f"{train.paths[0]} of {train.file} is not below {source}: pass the images as source.", "source"
        )
    return _pick_listed(_read_path(source or benchmark.hub, spec, benchmark, streaming=False), candidates[0])


def _pick_listed(published: dict[str, ImageTable], lists: dict[str, ImageList]) -> dict[str, ImageTable]:
    """Pick the images of lists from the Hub's ImageNet by file name: `n01440764_10026_n01440764.JPEG` there."""
    picked = {}
    for split, wanted in lists.items():
        table = published["train"]
        if not wanted.paths[0].startswith("train"):
            table = published.get("validation", table)
        stems = _stems(image_paths(table.images)).combine_chunks()
        rows = pc.index_in(_stems(pa.array(wanted.paths)), value_set=stems)
        if rows.null_count:
            first = wanted.paths[int(np.argmax(rows.is_null()))]
            raise LiVTError(
                f"{rows.null_count} of {len(rows)} images of {wanted.file} are not in the dataset, the first is "
                f"{first}: is it all of ILSVRC 2012?",
                "source",
            )
        picked[split] = table.select(rows.to_numpy())
        labels = picked[split].columns["label"].to_numpy()
        differing = np.flatnonzero(labels != wanted.labels)
        if len(differing):
            raise LiVTError(
                f"{wanted.file} and the dataset disagree on the class of {wanted.paths[differing[0]]}: "
                f"{wanted.labels[differing[0]]} and {labels[differing[0]]}.",
                "lists",
            )
    return picked


def _stems(paths: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return file names without folder, extension and the synset that the Hub appends."""
    names = pc.replace_substring_regex(paths, r"^.*/", "")
    return pc.replace_substring_regex(names, r"(_n\d{8})?\.[A-Za-z]+$", "")
