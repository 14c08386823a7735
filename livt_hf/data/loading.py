"""Batches for training and evaluation: the same images in the same order for any number of workers.

The sampler of the main process hands out (epoch, index) pairs, so workers keep no state, and a run resumes in the
middle of an epoch without reading what it skips.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from datasets import Dataset, Image, IterableDataset
from torch.utils.data import DataLoader
from transformers import BaseImageProcessor

from livt_hf.data.broken import without_broken
from livt_hf.data.decoding import read_image
from livt_hf.data.labels import labels_of, multi_hot_of, number_of_classes
from livt_hf.data.streaming import StreamLoader
from livt_hf.data.transforms import FinetuneAugmentation, PretrainAugmentation
from livt_hf.errors import LiVTError
from livt_hf.randomness import keyed_seed, purpose_seed

Augmentation = PretrainAugmentation | FinetuneAugmentation

# A set of small images of one size is decoded once into memory, if it fits in this many bytes.
IN_MEMORY_BYTES = 2**30
IN_MEMORY_SIDE = 96


def train_loader(
    dataset: Dataset | IterableDataset,
    augmentation: Augmentation,
    *,
    batch_size: int,
    accumulation: int = 1,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    on_broken: str = "error",
    num_images: int | None = None,
) -> "TrainLoader | StreamLoader":
    """Batches of uint8 images for one stage; `batch_size` counts the images of an update over all processes.

    `on_broken="skip"` reads everything once to leave broken images out; data that `load_long_tailed` already cleaned
    need not pay for it again. `num_images` is for streams that do not know their length.
    """
    per_step = world_size * accumulation
    if batch_size % per_step:
        lower = batch_size // per_step * per_step
        near = " or ".join(str(b) for b in (lower, lower + per_step) if b > 0)
        raise LiVTError(
            f"batch_size {batch_size} is no multiple of {world_size} processes x {accumulation} accumulation steps: "
            f"use {near}."
        )
    settings = {"batch_size": batch_size, "accumulation": accumulation, "seed": seed}
    settings |= {"rank": rank, "world_size": world_size, "num_workers": num_workers}
    if isinstance(dataset, IterableDataset):
        return StreamLoader(dataset, augmentation, num_images=num_images, on_broken=on_broken, **settings)
    return TrainLoader(without_broken(dataset, on_broken), augmentation, **settings)


class TrainLoader:
    """Update u of epoch e takes images permutation(seed, e)[u * B : (u + 1) * B]; a ragged last batch is dropped."""

    def __init__(
        self,
        dataset: Dataset,
        augmentation: Augmentation,
        *,
        batch_size: int,
        accumulation: int,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int,
    ):
        self.num_images = len(dataset)
        if batch_size > self.num_images:
            usable = self.num_images // (world_size * accumulation) * (world_size * accumulation)
            raise LiVTError(
                f"batch_size is {batch_size}, but there are {self.num_images} images only: "
                + (f"use at most {usable}." if usable else "lower the accumulation or the number of processes too.")
            )
        self.updates_per_epoch = self.num_images // batch_size
        self._sampler = _UpdateSampler(self.num_images, batch_size, accumulation, seed, rank, world_size)
        self._loader = DataLoader(
            _AugmentedImages(StoredImages(dataset), augmentation, seed),
            batch_sampler=self._sampler,
            collate_fn=_as_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # the loader draws a seed for its workers: not from the global generator
        )

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[dict]:
        """The micro-batches of this process, `accumulation` an update, from `start_update` on."""
        self._sampler.epoch, self._sampler.start_update = epoch, start_update
        return iter(self._loader)


class _UpdateSampler:
    def __init__(self, num_images, batch_size, accumulation, seed, rank, world_size):
        self.num_images, self.batch_size, self.accumulation = num_images, batch_size, accumulation
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = self.start_update = 0

    def __len__(self) -> int:
        return (self.num_images // self.batch_size - self.start_update) * self.accumulation

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = epoch_permutation(self.num_images, self.seed, self.epoch)
        micro_size = self.batch_size // (self.accumulation * self.world_size)
        for update in range(self.start_update, self.num_images // self.batch_size):
            for micro in range(self.accumulation):
                start = update * self.batch_size + (micro * self.world_size + self.rank) * micro_size
                yield [(self.epoch, index) for index in order[start : start + micro_size].tolist()]


def epoch_permutation(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch takes its images."""
    return np.random.RandomState(keyed_seed(purpose_seed(seed, "order"), epoch)).permutation(num_images)


def eval_loader(
    dataset: Dataset,
    processor: BaseImageProcessor,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    on_broken: str = "error",
) -> DataLoader:
    """Normalised float32 batches through the model's own image processor; each image once over all processes.

    Processes get contiguous parts that differ by at most one image, so they may have different numbers of batches.
    """
    dataset = without_broken(dataset, on_broken)
    bounds = np.linspace(0, len(dataset), world_size + 1).astype(int)
    part = range(bounds[rank], bounds[rank + 1])
    return DataLoader(
        _ProcessedImages(StoredImages(dataset), processor),
        batch_sampler=[list(part[i : i + batch_size]) for i in range(0, len(part), batch_size)],
        collate_fn=_as_is,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),
    )


class StoredImages:
    """Random access to the decoded images and labels of a data set, a batch at a time."""

    def __init__(self, dataset: Dataset):
        if len(dataset) == 0:
            raise LiVTError("the data set has no image: check the split, the labels or the rule that made it.")
        self._rows = dataset.select_columns(["image"]).cast_column("image", Image(decode=False)).with_format(None)
        self.num_classes = number_of_classes(dataset)
        self._labels = labels_of(dataset)
        self._cache = self._decode_small()

    def images(self, indices: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        """A tensor (B, 3, H, W) for an in-memory set of one size, else a list of (3, H, W)."""
        if self._cache is not None:
            return self._cache[torch.as_tensor(indices)]
        encoded = self._rows[list(indices)]["image"]
        return [read_image(image, index) for image, index in zip(encoded, indices, strict=True)]

    def labels(self, indices: Sequence[int]) -> torch.Tensor:
        """Class ids (B,) or, for several labels an image, a float multi-hot (B, C)."""
        if isinstance(self._labels, np.ndarray):
            return torch.from_numpy(self._labels[np.asarray(indices)])
        return torch.from_numpy(multi_hot_of(self._labels, indices, self.num_classes))

    def _decode_small(self) -> torch.Tensor | None:
        """All images in one uint8 tensor, or None when they are large, many or of different sizes."""
        first = read_image(self._rows[0]["image"], 0)
        if max(first.shape) > IN_MEMORY_SIDE or len(self._rows) * first.numel() > IN_MEMORY_BYTES:
            return None
        cache = torch.empty(len(self._rows), *first.shape, dtype=torch.uint8)
        for start in range(0, len(self._rows), 1000):
            for index, encoded in enumerate(self._rows[start : start + 1000]["image"], start):
                image = read_image(encoded, index)
                if image.shape != first.shape:
                    return None
                cache[index] = image
        return cache


class _AugmentedImages(torch.utils.data.Dataset):
    def __init__(self, stored: StoredImages, augmentation: Augmentation, seed: int):
        self.stored, self.augmentation, self.seed = stored, augmentation, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict:
        epoch, indices = keys[0][0], [index for _, index in keys]
        return {
            "pixel_values": self.augmentation.batch(self.stored.images(indices), self.seed, epoch, indices),
            "labels": self.stored.labels(indices),
            "index": torch.tensor(indices),
        }


class _ProcessedImages(torch.utils.data.Dataset):
    def __init__(self, stored: StoredImages, processor: BaseImageProcessor):
        self.stored, self.processor = stored, processor

    def __getitems__(self, indices: list[int]) -> dict:
        images = self.stored.images(indices)
        if self.processor.backend == "pil":  # it wants arrays with the channels last
            images = [image.permute(1, 2, 0).numpy() for image in images]
        return {
            "pixel_values": self.processor(images=images, return_tensors="pt")["pixel_values"],
            "labels": self.stored.labels(indices),
            "index": torch.tensor(indices),
        }


def _as_is(batch: dict) -> dict:
    """`__getitems__` already gives a batch."""
    return batch
