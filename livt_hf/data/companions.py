"""Files beside the images that are no images of their own: masks, thumbnails, augmented copies; and `exclude`."""

import fnmatch
import logging
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np

from livt_hf.data.decoding import BrokenImageError, read_rgb
from livt_hf.data.groups import image_root, relative_image_paths
from livt_hf.data.readers.folder import FileTree
from livt_hf.data.readers.image_table import ImageTable
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)
_ABOUT = {"arguments": ("exclude",)}  # the option that commands show as a flag

KEEP_ALL = "none"
SAMPLE = 100  # companions that are read to tell whether all are masks
# What ends the name of a companion, and folders of them; `images/x.jpg` and `masks/x_mask.png` are one picture.
_MARKS = re.compile(
    r"[ _.-]+((mask|seg|segmentation|labels?|annotations?|gt|ground[_-]?truth|thumb|thumbnail|preview|overlay)"
    r"|(aug|augmented|flip|flipped|hflip|vflip|rot|rotated)[ _-]?\d*)$",
    re.IGNORECASE,
)
_ROLES = re.compile(r"(masks?|annotations?|segmentations?|labels|ground[ _-]?truth|gt|thumb(nail)?s?)", re.IGNORECASE)
_IMAGES = re.compile(r"(images?|imgs?|photos?|pictures|rgb)", re.IGNORECASE)


def match_patterns(paths: Sequence[str], patterns: Sequence[str]) -> np.ndarray:
    """Return which paths match one of some patterns: as a whole, by their end, or by a folder that they lie in.

    A pattern that matches nothing is an error, and so are patterns that match everything.
    """
    excluded = np.zeros(len(paths), dtype=bool)
    for pattern in patterns:
        own = pattern.strip("/")
        matches = re.compile("|".join(map(fnmatch.translate, (own, f"*/{own}", f"{own}/*", f"*/{own}/*")))).match
        is_match = np.fromiter((matches(path) is not None for path in paths), bool, len(paths))
        if not is_match.any():
            raise LiVTError(
                f"exclude {pattern!r} matches none of the {len(paths):,} images, such as {paths[0]}: write a pattern "
                "of their paths, such as 'masks/*' or '*_mask.png'.",
                "exclude",
            )
        excluded |= is_match
    if excluded.all():
        raise LiVTError(
            f"exclude {' '.join(patterns)!r} matches all {len(paths):,} images: write a narrower pattern.", "exclude"
        )
    return excluded


def find_companions(paths: Sequence[str]) -> dict[int, int | None]:
    """Return the images that are named like companions of another: their row -> that of the image, or None.

    Companions have the path of an image but for the suffix, a mark such as `_mask` or `_aug1`, or a folder such as
    `masks`. None is for files with a mark or in such a folder beside no image.
    """
    by_picture: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for row, path in enumerate(paths):
        *folders, name = path.split("/")
        stem, suffix = posixpath.splitext(name)
        bare, roles = _MARKS.sub("", stem), [part for part in folders if _ROLES.fullmatch(part)]
        key = [part for part in folders if part not in roles and not _IMAGES.fullmatch(part)]
        in_masks = any(part.lower().endswith("s") for part in roles)  # a folder called mask may be a class
        rank = 8 * in_masks + 4 * bool(roles) + 2 * (bare != stem) + (suffix.lower() not in (".jpg", ".jpeg"))
        by_picture["/".join(key), bare].append((rank, row))
    companions: dict[int, int | None] = {}
    for members in by_picture.values():
        (rank, first), *others = sorted(members)
        if rank < 2 and others and _same_picture([paths[row] for _, row in members]):
            companions |= {row: first for _, row in others}
        elif rank >= 8 or rank >= 2 and others:  # of an image that is not there
            companions |= dict.fromkeys(row for _, row in members)
    return companions


def _same_picture(paths: Sequence[str]) -> bool:
    """Return False for files that only share a name: `a/1.jpg` and `images/a/1.jpg` have no mark and no suffix."""
    stems = Counter(posixpath.splitext(path)[0] for path in paths)
    marked = any(_MARKS.search(stem) or any(map(_ROLES.fullmatch, stem.split("/")[:-1])) for stem in stems)
    return marked or max(stems.values()) > 1


def is_two_valued(path: str) -> bool:
    """Return True if an image has at most two grey values, but for the blur that JPEG leaves."""
    try:
        pixels = read_rgb(path)
    except BrokenImageError:
        return False
    grey = pixels.float().mean(0).numpy()
    low, high = grey.min(), grey.max()
    return bool(((grey - low < 12) | (high - grey < 12)).all())


def select_images(paths: Sequence[str], root: str, exclude: Sequence[str] | None) -> np.ndarray:
    """Return which images are kept: not those that `exclude` matches, nor masks where every image has exactly one.

    Other companions are kept and named in a warning.

    Args:
        paths: images, relative to `root`.
        root: folder of the dataset.
        exclude: patterns; `none` alone keeps everything, None leaves out masks.
    """
    kept, patterns = np.ones(len(paths), dtype=bool), [one for one in exclude or () if one != KEEP_ALL]
    if not len(paths) or exclude is not None and not patterns:
        return kept
    if patterns:
        kept = ~match_patterns(paths, patterns)
        first = paths[int(np.argmin(kept))]
        message = "left out %s images that exclude matches, such as %s"
        logger.warning(message, f"{(~kept).sum():,}", first, extra=_ABOUT)
    rows = np.flatnonzero(kept)
    names = [paths[row] for row in rows.tolist()]
    companions = find_companions(names)
    if not companions:
        return kept
    chosen, images = sorted(companions), set(companions.values())
    image = companions[chosen[0]]
    example = names[chosen[0]] if image is None else f"{names[chosen[0]]} of {names[image]}"
    sample = [names[chosen[i]] for i in np.linspace(0, len(chosen) - 1, min(SAMPLE, len(chosen))).astype(int)]
    one_each = None not in images and len(images) == len(chosen) == len(names) - len(chosen)
    if exclude is None and one_each and all(is_two_valued(f"{root}/{name}") for name in sample):
        kept[rows[chosen]] = False
        logger.warning(
            "left out %s masks: every image has one, of at most two grey values, such as %s; exclude none keeps them",
            *(f"{len(chosen):,}", example),
            extra=_ABOUT,
        )
        return kept
    logger.warning(
        "%s of %s images are named like masks, thumbnails or augmented copies of others, such as %s; leave out "
        "what is no image of its own with exclude, such as %s",
        *(f"{len(chosen):,}", f"{len(names):,}", example, _suggest_pattern([names[row] for row in chosen])),
        extra=_ABOUT,
    )
    return kept


def _suggest_pattern(paths: Sequence[str]) -> str:
    """Return the pattern that most of some companions have in common."""
    patterns: Counter = Counter()
    for path in paths:
        *folders, name = path.split("/")
        stem, suffix = posixpath.splitext(name)
        mark, role = _MARKS.search(stem), next(filter(_ROLES.fullmatch, folders), None)
        patterns[f"{role}/*" if role else f"*{re.sub(r'[0-9]+$', '*', mark[0])}.*" if mark else f"*{suffix}"] += 1
    return patterns.most_common(1)[0][0]


def select_files(tree: FileTree, exclude: Sequence[str] | None) -> FileTree:
    """Return a folder without the images that are left out, and without folders that held nothing else."""
    images = tree.images()
    kept = select_images(images, tree.root, exclude)
    if kept.all():
        return tree
    gone = {image for image, is_kept in zip(images, kept, strict=True) if not is_kept}
    emptied = _folders_above(gone) - _folders_above(set(images) - gone)
    files = [file for file in tree.files if file not in gone]
    return replace(tree, files=files, folders=[folder for folder in tree.folders if folder not in emptied])


def _folders_above(paths: Iterable[str]) -> set[str]:
    folders = {PurePosixPath(path).parent for path in paths}
    return {str(folder) for own in folders for folder in (own, *own.parents)}


def select_rows_of_tables(tables: dict[str, ImageTable], spec: DataSpec) -> dict[str, ImageTable]:
    """Return the images of a table, a list or stored files without those that are left out."""
    paths = {split: relative_image_paths(table.images, spec) for split, table in tables.items()}
    joined = [path or "" for own in paths.values() for path in own]
    if not any(joined) and not spec.exclude:  # images without names
        return tables
    names = list(dict.fromkeys(joined))  # a picture may have several boxes
    is_kept = dict(zip(names, select_images(names, image_root(spec), spec.exclude).tolist(), strict=True))
    kept = np.fromiter(map(is_kept.__getitem__, joined), bool, len(joined))
    ends = np.cumsum([len(own) for own in paths.values()])[:-1]
    return {
        split: table if own.all() else table.select(np.flatnonzero(own))
        for (split, table), own in zip(tables.items(), np.split(kept, ends), strict=True)
    }
