"""Images that stay in their files: paths below a folder, and the dataset of them."""

import functools
import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetInfo, Features, Image, NamedSplit, Value

from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import Labels, plain_name
from livt_hf.errors import LiVTError

LEADS_OUT = r"^(/|[A-Za-z]:)|(^|/)\.\.(/|$)"  # of a path with slashes


def relative_paths(paths: pa.StringArray, root: Path) -> pa.StringArray:
    """Paths below the root, with slashes; one that leads out of it is refused."""
    paths = pc.replace_substring(paths, "\\", "/")
    paths = pc.replace_substring_regex(paths, f"^({re.escape(root.as_posix().rstrip('/'))}/|(\\./)+)", "")
    outside = pc.match_substring_regex(paths, LEADS_OUT).fill_null(False)
    if pc.any(outside).as_py():
        first = paths.filter(outside)[0]
        raise LiVTError(
            f'"{first}" leads out of the image folder {root}: paths must stay inside; --source sets the folder.'
        )
    return paths


def locate(paths: Iterable[str], root: Path) -> list[str | None]:
    """The file behind each path below `root`; None where there is none.

    Its name may lack the suffix, and have its letters in another form, as may those of its folders. Each folder is
    read once, instead of asking for each file.
    """
    suffixes = image_suffixes()

    @functools.cache
    def place_of(folder: str) -> str | None:
        place = find(folder) if folder else os.path.abspath(root)
        return place if place and os.path.isdir(place) else None

    @functools.cache
    def names_in(place: str) -> set[str]:
        return set(os.listdir(place))

    @functools.cache
    def known_in(place: str) -> dict[str, list[str]]:
        """What a folder holds by name, with and without the suffix of an image."""
        known: dict[str, list[str]] = {}
        for name in sorted(names_in(place)):
            stem, suffix = os.path.splitext(name)
            for written in (stem, name) if suffix.lower() in suffixes else (name,):
                known.setdefault(plain_name(written), []).append(name)
        return known

    def find(path: str) -> str | None:
        folder, _, name = path.rpartition("/")
        place = place_of(folder)
        if place is None or name in names_in(place):
            return place and f"{place}/{name}"
        meant = known_in(place).get(plain_name(name), [])
        if len(meant) > 1:
            raise LiVTError(f"{path} may be {' or '.join(meant)} in {place}: write its suffix.")
        return f"{place}/{meant[0]}" if meant else None

    # One file has one path.
    return [find(posixpath.normpath(path) if "//" in path or "./" in path else path) for path in paths]


def repeated(files: np.ndarray, labels: Labels, names: list[str], beside: dict[str, np.ndarray]) -> np.ndarray:
    """Which of the files are named earlier with the same labels; other ones are refused, and so is what else differs.

    `beside` says the split or the group of each file.
    """
    codes = pa.array(files, pa.string()).dictionary_encode().indices.to_numpy()
    first = np.unique(codes, return_index=True)[1]
    twice = np.ones(len(files), dtype=bool)
    twice[first] = False
    both = first[codes[twice]], np.flatnonzero(twice)
    two = [labels.take(rows) for rows in both]
    differ = np.setxor1d(*(part.images * len(names) + part.values for part in two))  # images and their labels
    if len(differ):
        which = differ[:1] // len(names)
        a, b = (", ".join(names[label] for label in np.unique(part.take(which).values)) for part in two)
        raise LiVTError(
            f'{files[twice][which[0]]} is named twice, with the label "{a}" and with "{b}": keep one row per '
            "image; several labels go into one cell, with --label_separator."
        )
    for what, values in beside.items():
        differ = np.flatnonzero(values[both[0]] != values[both[1]])
        if len(differ):
            a, b = (values[rows[differ[0]]] for rows in both)
            raise LiVTError(
                f'{files[twice][differ[0]]} is named twice, with the {what} "{a}" and with "{b}": keep one row per '
                "image."
            )
    return twice


def datasets_of_paths(
    paths: Sequence[str], labels: Labels, names: list[str], split_of: np.ndarray, groups: pa.Array | None = None
) -> dict[str, Dataset]:
    """Datasets of images that stay in their files, by the split of each image."""
    paths = pa.array(paths, pa.string())
    storage = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), paths], names=["bytes", "path"])
    columns = {"image": storage, "label": labels.to_arrow()}
    features = Features(image=Image(), label=labels.feature(names))
    if groups is not None:
        columns["group"], features["group"] = groups, Value("string")
    table = pa.table(columns).cast(features.arrow_schema)
    return {
        split: Dataset(table.filter(split_of == split), info=DatasetInfo(features=features), split=NamedSplit(split))
        for split in np.unique(split_of).tolist()
    }
