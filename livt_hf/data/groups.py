"""Groups without a column: from the paths of the images, their capture times, a file, or near copies."""

import csv
import io
import itertools
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from datasets import Dataset, concatenate_datasets
from PIL import ExifTags, Image

from livt_hf.data.decoding import BrokenImageError, iterate_stored, process_stored
from livt_hf.data.labels import image_paths, labels_of, normalize_name
from livt_hf.data.near_copies import connected_copies, pixel_vectors, scale_by_chance, standardize
from livt_hf.data.readers.image_table import ImageTable
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError
from livt_hf.files import replacing

logger = logging.getLogger(__name__)
_ABOUT = {"arguments": ("group_from",)}  # the option that commands show as a flag

WORDS = PARENT, NEAR_COPIES, CAPTURE_TIME = "parent", "near_copies", "capture_time"
BURST_SECONDS = 60


def image_root(spec: DataSpec) -> str:
    """Return the folder that the paths of the images are relative to."""
    path = Path(spec.source or spec.dataset)
    return os.path.abspath(path if path.is_dir() else path.parent)


def relative_image_paths(images: Dataset, spec: DataSpec) -> list[str | None]:
    """Return the paths of the images in their dataset, with slashes; None for images without a name."""
    paths = pc.replace_substring(image_paths(images), "\\", "/")
    try:
        return pc.replace_substring_regex(paths, f"^{re.escape(image_root(spec))}/", "").to_pylist()
    except UnicodeDecodeError as error:
        raise LiVTError(f"{spec.dataset} is damaged: a path of an image is no text ({error}).", "dataset") from error


def add_groups(tables: dict[str, ImageTable], spec: DataSpec) -> dict[str, ImageTable]:
    """Return the tables with the column `group` that `group_from` asks for. Groups may be in several splits."""
    if spec.group_from is None:
        return tables
    images = concatenate_datasets([table.images for table in tables.values()])
    labels = [str(label) for table in tables.values() for label in table.columns["label"].to_pylist()]
    paths = relative_image_paths(images, spec)
    if spec.group_from == NEAR_COPIES:
        groups = _by_near_copies(images, paths, labels)
    elif None in paths:
        raise LiVTError(
            f"group_from {spec.group_from} needs the paths of the images, but those of {spec.dataset} have none: use "
            f"group_column, or {NEAR_COPIES}.",
            "group_from",
        )
    elif spec.group_from == CAPTURE_TIME:
        groups = _by_capture_time(images, paths)
    elif spec.group_from == PARENT:
        groups = _by_folder(paths, labels)
    else:
        groups = (_by_file if spec.group_from.endswith(".csv") else _by_pattern)(paths, spec.group_from)
    number = len(set(groups))
    if number == 1:
        raise LiVTError(
            f"group_from {spec.group_from!r} puts all {len(groups):,} images into one group, "
            f"{groups[0] or 'their folder'}: they cannot be split; choose another.",
            "group_from",
        )
    message = "group_from %s: %s groups of %s images"
    logger.info(message, spec.group_from, f"{number:,}", f"{len(groups):,}", extra=_ABOUT)
    if number == len(groups):
        message = "group_from %s makes each image a group of its own, which changes nothing"
        logger.warning(message, spec.group_from, extra=_ABOUT)
    remaining, grouped = iter(groups), {}
    for split, table in tables.items():
        own = pa.array(itertools.islice(remaining, len(table)), pa.string())
        grouped[split] = replace(table, columns=table.columns.append_column("group", own))
    return grouped


def _by_folder(paths: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return the folder of each image, without the folder of its class: a site may have images of several classes."""
    folders = (PurePosixPath(path).parent.parts for path in paths)
    return [
        "/".join(part for part in parts if normalize_name(part) != normalize_name(label))
        for parts, label in zip(folders, labels, strict=True)
    ]


def _by_near_copies(images: Dataset, paths: Sequence[str | None], labels: Sequence[str]) -> list[str]:
    """Return one group for images that are near copies of each other, called by the first of them."""
    codes = pa.array(labels).dictionary_encode().indices.to_numpy()
    groups = connected_copies(*scale_by_chance(standardize(pixel_vectors(images)), codes))
    first = np.unique(groups, return_index=True)[1]
    return [paths[row] or f"image {row}" for row in first[groups].tolist()]


def _by_capture_time(images: Dataset, paths: Sequence[str]) -> list[str]:
    """Return one group for images that a camera took in one folder at most `BURST_SECONDS` after each other."""
    taken = read_capture_times(images)
    if not any(taken):
        raise LiVTError("group_from capture_time needs EXIF data, which no image has: choose another.", "group_from")
    _log_lone(paths, [one is None for one in taken], "have no time in their EXIF data")
    groups = list(paths)
    keys = [(str(PurePosixPath(paths[row]).parent), *one, row) for row, one in enumerate(taken) if one]
    for before, after in itertools.pairwise(sorted(keys)):
        if before[:2] == after[:2] and (after[2] - before[2]).total_seconds() <= BURST_SECONDS:
            groups[after[-1]] = groups[before[-1]]
    return groups


def read_capture_times(images: Dataset) -> list[tuple[str, datetime] | None]:
    """Return the camera and the time of each image from its EXIF data; None where it says none or is broken."""
    taken: list[tuple[str, datetime] | None] = []
    for row, image in enumerate(iterate_stored(images)):
        try:
            taken.append(process_stored(image, row, _read_capture_time, lambda one, *_: one))
        except BrokenImageError:
            taken.append(None)
    return taken


def _read_capture_time(data: bytes) -> tuple[str, datetime] | None:
    with Image.open(io.BytesIO(data)) as image:
        exif = image.getexif()
    try:
        taken = exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal]
        return str(exif.get(ExifTags.Base.Model)), datetime.strptime(str(taken).strip("\0 "), "%Y:%m:%d %H:%M:%S")
    except (KeyError, ValueError):
        return None


def _by_pattern(paths: Sequence[str], pattern: str) -> list[str]:
    """Return the first group of a regular expression, or all of its match; images without a match stay alone."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise LiVTError(
            f"group_from {pattern!r} is no regular expression ({error}): write one such as '(site\\d+)_', or "
            f"{', '.join(WORDS)}.",
            "group_from",
        ) from error
    matches = [search(path) for path in paths]
    if not any(matches):
        raise LiVTError(
            f"group_from {pattern!r} matches none of the {len(paths):,} paths, such as {paths[0]}: write a regular "
            f"expression that does, or {', '.join(WORDS)}.",
            "group_from",
        )
    groups = [None if match is None else match[1 if match.re.groups else 0] for match in matches]
    _log_lone(paths, [group is None for group in groups], "do not match group_from")
    return [path if group is None else group for path, group in zip(paths, groups, strict=True)]


def _by_file(paths: Sequence[str], file: str) -> list[str]:
    """Return the groups of a file with the columns `path` and `group`; images that it does not name stay alone."""
    texts = dict.fromkeys(("path", "group"), pa.string())
    try:
        reading = pyarrow.csv.ConvertOptions(column_types=texts, include_columns=list(texts))
        table = pyarrow.csv.read_csv(file, convert_options=reading)
    except (OSError, pa.ArrowException) as error:
        raise LiVTError(
            f"group_from {file} cannot be read as a table with the columns path and group: {error}.", "group_from"
        ) from error
    group_of = dict(zip(table["path"].to_pylist(), table["group"].to_pylist(), strict=True))
    is_lone = [group_of.get(path) is None for path in paths]
    if all(is_lone):
        raise LiVTError(
            f"group_from {file} names none of the images, such as {paths[0]}: write their paths in the dataset.",
            "group_from",
        )
    _log_lone(paths, is_lone, f"have no group in {file}")
    return [group_of.get(path) or path for path in paths]


def _log_lone(paths: Sequence[str], is_lone: Sequence[bool], reason: str) -> None:
    if any(is_lone):
        first = paths[list(is_lone).index(True)]
        share = f"{sum(is_lone):,} of {len(paths):,}"
        message = "%s images %s, such as %s: each is a group of its own"
        logger.warning(message, share, reason, first, extra=_ABOUT)


def write_groups(datasets: Iterable[Dataset], spec: DataSpec, path: Path) -> Path:
    """Write the groups of all images as a table that `group_from` reads again, images of a group beside each other."""
    rows = [
        (group, image)
        for dataset in datasets
        for image, group in zip(relative_image_paths(dataset, spec), labels_of(dataset, "group").values, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as writing, open(writing, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "group"), *((image, group) for group, image in sorted(rows))])
    return path
