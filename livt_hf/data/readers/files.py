"""Images that a table or a list names by paths: where the files are, and which are named twice."""

import functools
import os
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import normalize_name
from livt_hf.errors import LiVTError

_LEADS_OUT = r"^(/|[A-Za-z]:)|(^|/)\.\.(/|$)"  # of a path with slashes


def relative_paths(paths: pa.StringArray, root: Path, file: Path) -> pa.StringArray:
    """Return the paths that a file names below the root, with slashes; one that leads out of it is an error."""
    paths = pc.replace_substring(paths, "\\", "/")
    paths = pc.replace_substring_regex(paths, f"^({re.escape(root.as_posix().rstrip('/'))}/|(\\./)+)", "")
    outside = pc.match_substring_regex(paths, _LEADS_OUT).fill_null(False)
    if pc.any(outside).as_py():
        first = paths.filter(outside)[0]
        raise LiVTError(
            f'"{first}" of {file} leads out of the image folder {root}: pass another source, or correct it.', "source"
        )
    return paths


def locate_files(paths: Iterable[str], root: Path) -> np.ndarray:
    """Return the file behind each path below `root` (str), or None where there is none.

    Its name may lack the suffix, and have its letters in another Unicode form, as may those of its folders. Each
    folder is read once, instead of asking for each file.
    """
    suffixes = image_suffixes()

    @functools.cache
    def find_folder(path: str) -> str | None:
        folder = find(path) if path else os.path.abspath(root)
        return folder if folder and os.path.isdir(folder) else None

    @functools.cache
    def names_in(folder: str) -> set[str]:
        return set(os.listdir(folder))

    @functools.cache
    def by_normalized_name(folder: str) -> dict[str, list[str]]:
        """Return what a folder holds by name, with and without the suffix of an image."""
        known: dict[str, list[str]] = {}
        for name in sorted(names_in(folder)):
            stem, suffix = os.path.splitext(name)
            for written in (stem, name) if suffix.lower() in suffixes else (name,):
                known.setdefault(normalize_name(written), []).append(name)
        return known

    def find(path: str) -> str | None:
        parent, _, name = path.rpartition("/")
        folder = find_folder(parent)
        if folder is None or name in names_in(folder):
            return folder and f"{folder}/{name}"
        candidates = by_normalized_name(folder).get(normalize_name(name), [])
        if len(candidates) > 1:
            raise LiVTError(f"{path} may be {' or '.join(candidates)} in {folder}: write its suffix.", "dataset")
        return f"{folder}/{candidates[0]}" if candidates else None

    # One file has one path.
    found = [find(posixpath.normpath(path) if "//" in path or "./" in path else path) for path in paths]
    return np.array(found, dtype=object)


def find_repeated(files: np.ndarray, columns: dict[str, pa.Array | pa.ChunkedArray]) -> np.ndarray:
    """Return which rows name a file that an earlier row names. Rows that differ in one of `columns` are an error."""
    codes = pa.array(files, pa.string()).dictionary_encode().indices.to_numpy()
    first = np.unique(codes, return_index=True)[1]
    repeated = np.ones(len(files), dtype=bool)
    repeated[first] = False
    later = np.flatnonzero(repeated)
    for name, cells in columns.items():
        both = (cells.take(pa.array(rows)).to_pylist() for rows in (first[codes[later]], later))
        for row, one, other in zip(later, *both, strict=True):
            if one != other and _as_labels(one) != _as_labels(other):
                one, other = (", ".join(map(str, _as_labels(cell))) for cell in (one, other))
                several = "; several labels go into one cell, with label_separator" if name == "label" else ""
                raise LiVTError(
                    f'{files[row]} is named twice, with the {name} "{one}" and with "{other}": keep one row per '
                    f"image{several}.",
                    "dataset",
                )
    return repeated


def _as_labels(cell: str | list[str] | None) -> list:
    return sorted(set(cell)) if isinstance(cell, list) else [cell]
