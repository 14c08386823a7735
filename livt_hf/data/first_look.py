"""What is worth knowing before training: small classes, doubtful labels, likely groups, what a framing cuts away."""

import io
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np
import torch
from datasets import Dataset
from PIL import ExifTags, Image

from livt_hf.data.decoding import DAMAGED, BrokenImageError, crop_box, iterate_stored, process_stored, spread_rows
from livt_hf.data.groups import BURST_SECONDS, CAPTURE_TIME, PARENT, read_capture_times
from livt_hf.data.labels import BOX, BOX_MARGIN, Labels, class_counts, class_feature, format_class_names, labels_of
from livt_hf.errors import LiVTError
from livt_hf.processors import Framing

# Labels that rarely name a class.
_NO_CLASS = set(
    "todo unknown unsure unclear test tmp temp none null nan na n/a unlabeled unlabelled unclassified undefined "
    "delete trash ignore skip ?".split()
) | {"new folder", "untitled folder", "not sure", "no label"}
SMALL = 5  # images of a class below which its accuracy says little
MOST_OF = 0.8  # share of the images that must lie in groups of several
LOOKED_AT = 2_000  # images whose capture times are read
HEADERS = 10_000  # images whose sizes are read
_COUNTER = r"([^/]+)[ _-]\d+\.\w+$"  # a name up to its last number


def find_doubtful_labels(names: Sequence[str]) -> list[str]:
    """Return the class names that look like no class: todo, unknown, test."""
    return [name for name in names if " ".join(re.split(r"[\s_-]+", name.casefold())).strip() in _NO_CLASS]


def find_similar_labels(names: Sequence[str]) -> list[list[str]]:
    """Return class names that differ by case, spaces, hyphens or a plural alone."""
    variants: dict[str, list[str]] = defaultdict(list)
    for name in names:
        words = re.split(r"[\s_-]+", name.casefold().strip())
        variants[" ".join(re.sub(r"(?<=\w\w\w)(es|s)$", "", word) for word in words)].append(name)
    return [similar for similar in variants.values() if len(similar) > 1]


def describe_labels(splits: Mapping[str, Dataset]) -> list[str]:
    """Return sentences about classes that are too small and labels that look wrong, with what helps."""
    names = class_feature(splits["train"]).names
    total = np.sum([class_counts(part) for part in splits.values()], axis=0)
    lines = []
    small = [c for c in np.argsort(total, kind="stable") if total[c] < SMALL]
    if small:
        listed = format_class_names([f"{names[c]} ({total[c]})" for c in small])
        lines.append(
            f"Classes of fewer than {SMALL} images, too few to train on some and test on others: {listed}; min_images "
            f"{SMALL} leaves them out, with rare_classes merge they become one class."
        )
    tested = class_counts(splits["test"]) if "test" in splits else total
    if len(untested := np.flatnonzero((tested == 0) & (total >= SMALL))):
        lines.append(f"Classes without a test image: {format_class_names([names[c] for c in untested])}.")
    if doubtful := find_doubtful_labels(names):
        listed = format_class_names([f"{name} ({total[names.index(name)]})" for name in doubtful])
        lines.append(f"Labels that may be no classes: {listed}; exclude_labels leaves them out.")
    for similar in find_similar_labels(names):
        listed = " and ".join(f"{name!r} ({total[names.index(name)]})" for name in similar)
        lines.append(f"Labels that may be one class: {listed}.")
    return lines


def suggest_groups(paths: Sequence[str | None], labels: Sequence[int], images: Dataset) -> tuple[str, str] | None:
    """Return a `group_from` that would keep sites or bursts together, and what speaks for it; None if nothing does.

    Folders below the classes, names that are alike but for a last number, and EXIF times are looked at.
    """
    if None in paths or not len(paths):
        return None
    folders = [str(PurePosixPath(path).parent) for path in paths]  # type: ignore[arg-type]
    matches = [(path, re.search(_COUNTER, str(path))) for path in paths]
    stems = [str(path) if match is None else match[1] for path, match in matches]
    for option, groups, text in (
        (PARENT, folders, "the images of a class lie in several folders"),
        (_COUNTER, stems, "file names are alike but for a last number"),
    ):
        if _are_groups(groups, labels):
            several = next(name for name, count in Counter(groups).items() if count > 1)
            example = [str(path) for path, group in zip(paths, groups, strict=True) if group == several][:2]
            return option, f"{text} ({len(set(groups)):,} of {len(paths):,} images; {' and '.join(example)})"
    taken = read_capture_times(images.select(range(min(LOOKED_AT, len(images)))))
    times = sorted((folders[row], *one) for row, one in enumerate(taken) if one is not None)
    gaps = [(b[2] - a[2]).total_seconds() for a, b in itertools.pairwise(times) if a[:2] == b[:2]]
    if sum(gap <= BURST_SECONDS for gap in gaps) > len(taken) / 3:
        return CAPTURE_TIME, f"many were taken within {BURST_SECONDS} seconds of another by their EXIF data"
    return None


def _are_groups(groups: Sequence[str], labels: Sequence[int]) -> bool:
    """Return True for names that most images share with a few others, and that are not the classes once more."""
    sizes = Counter(groups)
    in_several = sum(size for size in sizes.values() if size > 1)
    pairs = len(set(zip(groups, labels, strict=True)))
    return in_several >= MOST_OF * len(groups) and pairs >= 2 * len(set(labels)) and len(sizes) >= 2 * len(set(labels))


def count_two_valued(images: Dataset) -> int:
    """Return the number of images of at most two grey values, which are masks or blank; JPEGs have more."""

    def is_two_valued(data: bytes) -> bool:
        with Image.open(io.BytesIO(data)) as image:
            return image.format != "JPEG" and bool(np.count_nonzero(image.convert("L").histogram()) <= 2)

    number = 0
    for row, image in enumerate(iterate_stored(images)):
        try:
            number += process_stored(image, row, is_two_valued, lambda *_: False)
        except BrokenImageError:
            continue
    return number


def read_image_sizes(dataset: Dataset, rows: Sequence[int]) -> np.ndarray:
    """Return width and height of the upright images of some rows, from their headers. (N, 2); 0 where unreadable."""
    sizes = np.zeros((len(rows), 2), dtype=np.int64)
    for number, image in enumerate(iterate_stored(dataset.select(rows))):
        try:
            with Image.open(image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])) as opened:
                turned = opened.getexif().get(ExifTags.Base.Orientation) in range(5, 9)  # turned by 90 degrees
                width, height = opened.size[::-1] if turned else opened.size
            if image.get(BOX) is not None:
                pixels = torch.empty(1).expand(3, height, width)  # takes no memory
                height, width = crop_box(pixels, image[BOX], image[BOX_MARGIN]).shape[-2:]
            sizes[number] = width, height
        except (*DAMAGED, LiVTError, AttributeError):  # the last where there is neither file nor bytes
            continue
    return sizes


def sample_sizes(dataset: Dataset, sample: int = HEADERS) -> tuple[np.ndarray, Labels]:
    """Return width and height (N, 2) and the labels of images that are spread over a dataset and can be read."""
    rows = np.asarray(spread_rows(dataset, sample))
    sizes = read_image_sizes(dataset, rows)
    readable = sizes.min(axis=1) > 0
    return sizes[readable], labels_of(dataset).take(rows[readable])


def describe_cut(dataset: Dataset, framing: Framing, whose: str) -> str | None:
    """Return a sentence on the area that a framing cuts away: of the median image, and of the classes that lose most.

    Args:
        dataset: one split, of which at most 10,000 images are looked at.
        framing: of an image processor.
        whose: framing it is, to begin the sentence.

    Returns:
        The sentence, or None where no image can be read.
    """
    sizes, labels = sample_sizes(dataset)
    if not len(sizes):
        return None
    cut = 1 - framing.seen_share(*sizes.T)
    medians = {label: np.median(cut[labels.images[labels.values == label]]) for label in np.unique(labels.values)}
    names = class_feature(dataset).names
    worst = sorted(medians, key=lambda label: -medians[label])[:3]
    sentence = f"{whose} cuts away {np.median(cut):.0%} of the area of the median image"
    if medians and medians[worst[0]] > np.median(cut) + 0.01:
        sentence += ", and most of " + ", ".join(f"{names[label]} ({medians[label]:.0%})" for label in worst)
    return sentence + "."


def dim_outside(image: Image.Image, framing: Framing) -> Image.Image:
    """Return an image that is pale where a model does not see it."""
    width, height = image.size
    seen_width, seen_height = framing.seen_sides(width, height)
    left, top = width * (1 - float(seen_width)) / 2, height * (1 - float(seen_height)) / 2
    box = round(left), round(top), round(width - left), round(height - top)
    pale = Image.blend(Image.new("RGB", image.size, "white"), image, 0.3)
    pale.paste(image.crop(box), box)
    return pale
