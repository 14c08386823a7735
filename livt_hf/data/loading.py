"""Loaders for training and evaluation: the same images in the same order for any number of workers.

The sampler of the main process hands out (epoch, draw) pairs, so workers keep no state, and a run resumes in the
middle of an epoch without reading what it skips.

Data that fits neither on disk nor in memory comes as a stream: see `livt_hf.data.streaming`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import BaseImageProcessor
from transformers.image_processing_backends import TorchvisionBackend

from livt_hf.data.batches import Batches, Loader, build_eval_batches
from livt_hf.data.decoding import (
    BrokenImageError,
    check_readable,
    iterate_stored,
    list_stored_images,
    read_image,
    select_stored_images,
)
from livt_hf.data.labels import Labels, labels_of, number_of_classes
from livt_hf.data.streaming import StreamLoader
from livt_hf.data.transforms import Augmentation, Images
from livt_hf.errors import LiVTError

# A set of small images of one size is decoded once into memory, if it fits in this many bytes.
IN_MEMORY_BYTES = 2**30
IN_MEMORY_SIDE = 96
# Other images are decoded so many at a time: a photograph of twelve megapixels takes 36 MB, and its processor as much.
AT_ONCE = 8


def train_loader(
    dataset: Dataset | IterableDataset, augmentation: Augmentation, batches: Batches, on_broken: str = "error"
) -> "TrainLoader | StreamLoader":
    """Return a loader of batches of uint8 images.

    `on_broken` is for streams, which meet their broken images only in training; `load_dataset` drops stored ones.
    """
    if isinstance(dataset, IterableDataset):
        return StreamLoader(dataset, augmentation, batches, on_broken)
    return TrainLoader(dataset, augmentation, batches)


class TrainLoader:
    """Loader whose update u of epoch e takes draws(seed, e)[u * B : (u + 1) * B]; a ragged last batch is dropped."""

    def __init__(self, dataset: Dataset, augmentation: Augmentation, batches: Batches):
        self.num_images = len(dataset)
        self.updates_per_epoch = batches.updates(self.num_images)
        images = _PreparedImages(dataset, augmentation, batches.seed)
        self._sampler = UpdateSampler(images.stored.all_labels, batches)
        self._loader = images.loader(self._sampler, batches.num_workers)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[dict]:
        """Yield the micro-batches of this process, `accumulation` per update, from `start_update` on."""
        self._sampler.epoch, self._sampler.start_update = epoch, start_update
        return iter(self._loader)


class UpdateSampler:
    """The draws of an epoch's micro-batches on this process, as pairs (epoch, draw)."""

    def __init__(self, labels: Labels, batches: Batches):
        if labels.offsets is not None and batches.sampler.name != "natural":
            raise LiVTError(
                f"sampler {batches.sampler.name!r} draws images by their one class; where images may have several "
                "labels, only 'natural' is defined."
            )
        self.classes = labels.values if labels.offsets is None else np.zeros(len(labels), dtype=int)
        self.batches = batches
        self.epoch = self.start_update = 0

    def __len__(self) -> int:
        return (len(self.classes) // self.batches.batch_size - self.start_update) * self.batches.accumulation

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        batches = self.batches
        order = batches.sampler.draws(self.classes, batches.seed, self.epoch)
        first, size = self.start_update * batches.batch_size, batches.micro_size
        for number in range(len(self)):
            start = first + (number * batches.world_size + batches.rank) * size
            yield [(self.epoch, draw) for draw in order[start : start + size].tolist()]


def eval_loader(dataset: Dataset, processor: BaseImageProcessor, batches: Batches) -> DataLoader:
    """Return a loader of float32 batches by the model's own image processor; each image once over all processes.

    Processes get contiguous parts that differ by at most one image, so they may have different numbers of batches.
    """
    return ordered_loader(dataset, _EvalTransform(processor), batches, epoch=0)


def read_first_pixels(
    dataset: Dataset, processor: BaseImageProcessor, accelerator: Accelerator, images: int
) -> torch.Tensor:
    """Return the pixels of the first images of a dataset, on the device; each process gets images of its own."""
    few = dataset.select(range(min(images * accelerator.num_processes, len(dataset))))
    loader = eval_loader(few, processor, build_eval_batches(images, accelerator))
    return next(iter(loader))["pixel_values"].to(accelerator.device)


def ordered_loader(
    dataset: Dataset, augmentation: "Augmentation | _EvalTransform", batches: Batches, epoch: int
) -> DataLoader:
    """Return a loader of images as an epoch of training sees them, but in order, each once over all processes."""
    keys = [[(epoch, index) for index in part] for part in batches.in_order(len(dataset))]
    return _PreparedImages(dataset, augmentation, batches.seed).loader(keys, batches.num_workers)


class StoredImages:
    """Random access to the decoded images and labels of a dataset, one batch at a time."""

    def __init__(self, dataset: Dataset):
        if len(dataset) == 0:
            raise LiVTError("the dataset has no image: check the split, the labels or the rule that made it.")
        self.rows = select_stored_images(dataset)
        self.labelled = "label" in dataset.features  # what is held out of a stream may not be
        if self.labelled:
            self.num_classes, self.all_labels = number_of_classes(dataset), labels_of(dataset)
        try:
            self._cache = self._decode_small()
        except BrokenImageError:
            check_readable(self.rows)
            raise

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, indices: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        """Return a tensor (B, 3, H, W) for an in-memory set of one size, else a list of (3, H, W)."""
        if self._cache is not None:
            return self._cache[torch.as_tensor(indices)]
        stored = list_stored_images(self.rows[list(indices)])
        return [read_image(image, index) for image, index in zip(stored, indices, strict=True)]

    def in_parts(self, numbers: list[int]) -> list[list[int]]:
        """Return the rows or draws of a batch in parts whose images may be in memory at once."""
        size = AT_ONCE if self._cache is None else len(numbers)
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def labels(self, indices: Sequence[int]) -> torch.Tensor:
        """Return class ids (B,) or, for several labels per image, a float multi-hot (B, C)."""
        return torch.from_numpy(self.all_labels.targets(indices, self.num_classes))

    def _decode_small(self) -> torch.Tensor | None:
        """Decode all images into one uint8 tensor; None when they are large, many or of different sizes."""
        first = read_image(list_stored_images(self.rows[:1])[0], 0)
        if max(first.shape) > IN_MEMORY_SIDE or len(self.rows) * first.numel() > IN_MEMORY_BYTES:
            return None
        cache = torch.empty(len(self.rows), *first.shape, dtype=torch.uint8)
        for index, encoded in enumerate(iterate_stored(self.rows)):
            image = read_image(encoded, index)
            if image.shape != first.shape:
                return None
            cache[index] = image
        return cache


class _PreparedImages(torch.utils.data.Dataset):
    """Images as they are augmented, or as the processor of a model makes them, by (epoch, draw) pairs."""

    def __init__(self, dataset: Dataset, augmentation: "Augmentation | _EvalTransform", seed: int):
        self.stored, self.augmentation, self.seed = StoredImages(dataset), augmentation, seed

    def loader(self, keys: Iterable[list[tuple[int, int]]], num_workers: int) -> Loader:
        options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        return Loader(self, self.stored.rows, batch_sampler=keys, **options)

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict | LiVTError:
        """Return images by their rows; what is random about them belongs to the draw (see `Sampler.draws`)."""
        epoch, draws = keys[0][0], [draw for _, draw in keys]
        rows = [draw % len(self.stored) for draw in draws]
        try:
            parts = zip(self.stored.in_parts(rows), self.stored.in_parts(draws), strict=True)
            pixels = [self.augmentation.batch(self.stored.images(own), self.seed, epoch, part) for own, part in parts]
        except LiVTError as error:
            return error
        labels = {"labels": self.stored.labels(rows)} if self.stored.labelled else {}
        return {"pixel_values": torch.cat(pixels), "index": torch.tensor(draws), **labels}


@dataclass(frozen=True)
class _EvalTransform:
    """A model's image processor with the interface of an `Augmentation`; nothing about it is random."""

    processor: BaseImageProcessor

    def batch(self, images: Images, *_) -> torch.Tensor:
        if not isinstance(self.processor, TorchvisionBackend):  # the others want arrays with the channels last
            images = [image.permute(1, 2, 0).numpy() for image in images]
        return self.processor(images=images, return_tensors="pt")["pixel_values"]
