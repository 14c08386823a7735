"""Warn about copies and near copies of images in two splits, with a picture of six pairs."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from datasets import Dataset, concatenate_datasets
from PIL import Image

from livt_hf.cli.console import WITHIN_TRAIN
from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.decoding import describe_copies, read_images
from livt_hf.data.groups import NEAR_COPIES
from livt_hf.data.near_copies import Leaks, describe_leaks, find_leaks, pixel_vectors, standardize
from livt_hf.data.spec import DataSpec
from livt_hf.data.splitting import is_made_split
from livt_hf.runs import data_folder

logger = logging.getLogger(__name__)

MOST_IMAGES = 50_000  # images that a training looks through; `livt data` looks through any number


def describe_near_copies(
    splits: Mapping[str, Dataset], made: bool, folder: Path, vectors: np.ndarray | None = None
) -> str | None:
    """Return a message about images that have near copies in another split, and draw six pairs; None without any.

    Args:
        splits: the images.
        made: the dataset did not come with these splits, so that groups can keep copies together.
        folder: folder of the picture.
        vectors: standardized vectors of the images of all splits; default: of their pixels.
    """
    if len(splits) < 2:
        return None
    if vectors is None:
        vectors = standardize(pixel_vectors(concatenate_datasets(list(splits.values()))))
    leaks = find_leaks(splits, vectors)
    if leaks is None:
        return None
    picture = draw_pairs(leaks, splits, folder / "near_copies.png")
    return f"{describe_leaks(leaks, splits, made)}\nSuch pairs side by side: {picture}"


def draw_pairs(leaks: Leaks, splits: Mapping[str, Dataset], path: Path) -> Path:
    """Draw the first pairs of near copies side by side."""
    from livt_hf.reports import contact_sheet

    shown = [image for one, other, _ in leaks.shown for image in (one, other)]
    images = [read_images(splits[split], [row])[0] for split, row in shown]
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    names = [f"pair {number // 2 + 1}\n{split}" for number, (split, _) in enumerate(shown)]
    return contact_sheet(pictures, names, path, columns=4)


def warn_about_copies(splits: Mapping[str, Dataset], spec: DataSpec, made: bool | None = None) -> None:
    """Warn before a training of images that have copies or near copies on the other side of a split.

    `made` says that the dataset did not come with these splits; default: whether its test split was made.
    """
    if WITHIN_TRAIN in os.environ or spec.dataset in PUBLIC:  # `livt train` has warned; benchmarks are known
        return
    about = {"arguments": ("group_from", "group_column", "exclude")}
    if message := describe_copies(splits):
        logger.warning(message, extra=about)
    if spec.group_from == NEAR_COPIES or len(splits) < 2:
        return
    number, made = sum(map(len, splits.values())), is_made_split(splits, "test") if made is None else made
    if number > MOST_IMAGES:
        logger.info("%s images are not searched for near copies here; `livt data` does", f"{number:,}")
    elif message := describe_near_copies(splits, made, data_folder(spec.dataset)):
        logger.warning(message, extra=about)
