"""Proportions of images, read from their headers, and the area that a framing cuts away from them."""

import io
from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset
from PIL import Image

from livt_hf.data.decoding import DAMAGED, crop_box, iterate_stored, spread_rows
from livt_hf.data.labels import BOX, BOX_MARGIN, Labels, class_feature, labels_of
from livt_hf.errors import LiVTError
from livt_hf.processors import Framing

_ORIENTATION, _TURNED = 0x0112, range(5, 9)  # EXIF: the tag, and the values that swap width and height
_SAMPLE = 10_000  # images whose headers are read
_NAMED = 3  # classes
_DIMMED = 0.3  # what is left of the colours outside of the frame


def read_image_sizes(dataset: Dataset, rows: Sequence[int]) -> np.ndarray:
    """Return width and height of the upright images of some rows, from their headers. (N, 2); 0 where unreadable."""
    sizes = np.zeros((len(rows), 2), dtype=np.int64)
    for number, image in enumerate(iterate_stored(dataset.select(rows))):
        try:
            with Image.open(image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])) as opened:
                turned = opened.getexif().get(_ORIENTATION) in _TURNED
                width, height = opened.size[::-1] if turned else opened.size
            if image.get(BOX) is not None:
                pixels = torch.empty(1).expand(3, height, width)  # takes no memory
                height, width = crop_box(pixels, image[BOX], image[BOX_MARGIN]).shape[-2:]
            sizes[number] = width, height
        except (*DAMAGED, LiVTError, AttributeError):  # the last where there is neither file nor bytes
            continue
    return sizes


def sample_sizes(dataset: Dataset, sample: int = _SAMPLE) -> tuple[np.ndarray, Labels]:
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
    worst = sorted(medians, key=lambda label: -medians[label])[:_NAMED]
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
    pale = Image.blend(Image.new("RGB", image.size, "white"), image, _DIMMED)
    pale.paste(image.crop(box), box)
    return pale
