"""Opening what holds images: named benchmarks, folders, parquet and arrow files, image lists, Hub data sets."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_dataset, load_from_disk
from datasets.data_files import SPLIT_KEYWORDS

from livt_hf.data.benchmarks import BENCHMARKS, Benchmark
from livt_hf.data.image_lists import ImageList, datasets_from_lists, find_lists, is_image_list, read_list
from livt_hf.data.labels import labels_of, rows_of
from livt_hf.errors import LiVTError

SPLIT_OF_WORD = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
# Whole words only: "medieval" is no validation set. Digits may follow, as in val2017.
SPLIT_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(SPLIT_OF_WORD)})(?![^\W\d_])")


def open_benchmark(name: str, benchmark: Benchmark, source, lists, streaming: bool, on_broken: str) -> dict:
    if not benchmark.lists:
        if name in BENCHMARKS:
            return _open(str(source or benchmark.hub), None, streaming, on_broken, hint=name)
        return _open(name, source, streaming, on_broken, hint=name)

    folder = Path(lists or source or ".").expanduser()
    found = [f for prefix in benchmark.lists if folder.is_dir() and (f := find_lists(folder, prefix)) and "train" in f]
    if not found:
        if source is None or lists is not None:
            raise LiVTError(
                f"{name} needs its list {benchmark.lists[0]}_train.txt, which is not in {folder}: it is usually found "
                f"in {benchmark.lists_from}; pass its folder as lists and the images as source."
            )
        splits = _open(str(source), None, streaming, on_broken, hint=name)
        if not streaming and len(splits["train"]) != benchmark.train_images:
            raise LiVTError(
                f"{source} has {len(splits['train'])} training images, but {name} has {benchmark.train_images}: pass "
                f"the folder of its lists ({benchmark.lists[0]}_train.txt) as lists."
            )
        return splits
    if streaming:
        raise LiVTError(f"{name} is picked by its lists, which a stream cannot do: load it without streaming.")
    candidates = [{split: read_list(path) for split, path in files.items()} for files in found]
    if source is not None:
        for candidate in candidates:  # two styles of paths are in use; the one that finds its first image is meant
            if (Path(source).expanduser() / candidate["train"].paths[0]).is_file():
                return datasets_from_lists(candidate, Path(source).expanduser(), on_broken == "skip")
    if benchmark.hub is None:
        train = candidates[0]["train"]
        raise LiVTError(f"{train.paths[0]} of {train.file} is not below {source}: pass the images' folder as source.")
    images = _open(str(source or benchmark.hub), None, False, on_broken, hint=name)
    return _joined(images, candidates[0])


def _joined(images: dict[str, Dataset], lists: dict[str, ImageList]) -> dict[str, Dataset]:
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
                f"{rows.null_count} of {len(rows)} images of {wanted.file} are not in the data set, the first is "
                f"{first}: is it ILSVRC 2012?"
            )
        part = published.select(rows.to_numpy())
        differ = np.flatnonzero(labels_of(part) != wanted.labels)
        if len(differ):
            raise LiVTError(
                f"{wanted.file} and the data set disagree on the class of {wanted.paths[differ[0]]}: "
                f"{wanted.labels[differ[0]]} and {labels_of(part)[differ[0]]}."
            )
        picked[split] = part
    return picked


def _stems(paths: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """File names without folder, extension and the synset that the Hub appends."""
    names = pc.replace_substring_regex(paths, r"^.*/", "")
    return pc.replace_substring_regex(names, r"(_n\d{8})?\.[A-Za-z]+$", "")


def _open(where: str, root, streaming: bool, on_broken: str, hint: str) -> dict:
    """Open a folder, a file or a Hub data set; splits named train, validation, test."""
    path = Path(where).expanduser()
    if path.is_file() and is_image_list(path):
        splits = datasets_from_lists(
            {"train": read_list(path)}, Path(root or path.parent).expanduser(), on_broken == "skip"
        )
        return {"train": splits["train"].to_iterable_dataset(num_shards=64)} if streaming else splits
    if root is not None:
        raise LiVTError(f"source is for benchmarks and image lists, but {where} is neither: drop it.")
    if path.is_file():
        splits = _load(path.suffix[1:], {"train": [str(path)]}, streaming)
    elif path.is_dir():
        splits = _open_folder(path, streaming, on_broken)
    elif where.startswith((".", "/", "~")) or where.count("/") > 1:
        raise LiVTError(f"{where} does not exist: pass an image folder, a parquet or arrow file, a list or a Hub id.")
    else:
        repository, _, config = where.partition(":")
        try:
            splits = load_dataset(repository, config or None, streaming=streaming)
        except (ConnectionError, FileNotFoundError) as error:
            raise LiVTError(
                f"{repository} cannot be had from the Hub ({error}): without internet or access rights, pass a local "
                f'copy, as in load_long_tailed("{hint}", source="FOLDER").'
            ) from error
    if "train" not in splits:
        if len(splits) != 1:
            raise LiVTError(f"{where} has no split called train, but {', '.join(splits)}: rename one.")
        splits = {"train": next(iter(splits.values()))}
    aliases = {"val": "validation", "valid": "validation", "dev": "validation"}
    splits = {aliases.get(split, split): dataset for split, dataset in splits.items()}
    return {split: splits[split] for split in ("train", "validation", "test") if split in splits}


def _open_folder(path: Path, streaming: bool, on_broken: str) -> dict:
    if (path / "dataset_dict.json").is_file():
        return dict(load_from_disk(path))
    if (path / "state.json").is_file():
        return {"train": load_from_disk(path)}
    for kind in ("parquet", "arrow"):
        files = sorted(str(file) for file in path.rglob(f"*.{kind}"))
        if files:
            return _load(kind, _by_split(files, path), streaming)
    lists = find_lists(path)
    if "train" in lists:
        read = {split: read_list(file) for split, file in lists.items()}
        return datasets_from_lists(read, path, on_broken == "skip")
    try:
        return dict(load_dataset("imagefolder", data_dir=str(path), streaming=streaming))
    except FileNotFoundError as error:
        raise LiVTError(f"{path} holds no images, parquet or arrow files or lists: check the folder.") from error


def _load(kind: str, files: dict[str, list[str]], streaming: bool) -> dict:
    if kind not in ("parquet", "arrow"):
        raise LiVTError(f"{files['train'][0]} is no parquet or arrow file and no image list (.txt, .txt.gz, .txt.xz).")
    # One by one: loaded together, all splits get the class names of the first file.
    return {
        split: load_dataset(kind, data_files={split: own}, split=split, streaming=streaming)
        for split, own in files.items()
    }


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
