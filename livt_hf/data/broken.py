"""Finding images that cannot be decoded before they stop a run."""

import logging

import numpy as np
from datasets import Dataset, Image
from tqdm.auto import tqdm

from livt_hf.data.decoding import WAY_OUT, BrokenImageError, read_image
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

NAMED = 20  # broken images a warning names


def find_broken(dataset: Dataset) -> dict[int, str]:
    """Decode every image; row number -> what is wrong with it. Shows progress, for it takes as long as an epoch."""
    rows = dataset.select_columns(["image"]).cast_column("image", Image(decode=False)).with_format(None)
    broken = {}
    with tqdm(total=len(rows), desc="Looking for broken images", unit="images", disable=None) as progress:
        for start in range(0, len(rows), 256):
            for index, encoded in enumerate(rows[start : start + 256]["image"], start):
                try:
                    read_image(encoded, index)
                except BrokenImageError as error:
                    broken[index] = str(error).removesuffix(WAY_OUT)
                progress.update()
    return broken


def without_broken(dataset: Dataset, on_broken: str) -> Dataset:
    """For "skip" the images that can be decoded; for "error" all: a broken one stops the run when it is met."""
    if on_broken not in ("error", "skip"):
        raise LiVTError(f'on_broken is "{on_broken}": pass "error" or "skip".')
    if on_broken == "error":
        return dataset
    broken = find_broken(dataset)
    if not broken:
        return dataset
    named = "".join(f"\n  {reason}" for reason in list(broken.values())[:NAMED])
    more = f"\n  and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
    logger.warning("left out %d broken of %d images:%s%s", len(broken), len(dataset), named, more)
    return dataset.select(np.setdiff1d(np.arange(len(dataset)), list(broken)))
