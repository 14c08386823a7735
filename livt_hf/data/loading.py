"""Batches for training and evaluation: the same images in the same order for any number of workers.

The sampler of the main process hands out (epoch, draw) pairs, so workers keep no state, and a run resumes in the
middle of an epoch without reading what it skips.

Data that fits neither on disk nor in memory comes as a stream. What that gives up: images are shuffled within a buffer
and by shard, not over the whole set; the order depends on the number of processes and workers; a run resumes at the
last shard boundary of each process, so some images of the epoch are seen twice and others not; the number of images
must be known; class counts must be given.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, Image, IterableDataset
from torch.utils.data import DataLoader, get_worker_info
from transformers import BaseImageProcessor
from transformers.image_processing_backends import TorchvisionBackend

from livt_hf.data.decoding import BrokenImageError, encoded_images, read_image, with_all_broken
from livt_hf.data.labels import Labels, is_multi_label, labels_of, number_of_classes
from livt_hf.data.sampling import Sampler
from livt_hf.data.transforms import FinetuneAugmentation, PretrainAugmentation
from livt_hf.errors import LiVTError
from livt_hf.randomness import keyed_seed, purpose_seed
from livt_hf.system import outlive_ctrl_c

logger = logging.getLogger(__name__)

Augmentation = PretrainAugmentation | FinetuneAugmentation

# A set of small images of one size is decoded once into memory, if it fits in this many bytes.
IN_MEMORY_BYTES = 2**30
IN_MEMORY_SIDE = 96
BUFFER = 1000  # encoded images of a stream that a worker keeps to shuffle from


@dataclass(frozen=True)
class Batches:
    """How images are drawn and shared out: `batch_size` per update, over all processes and accumulation steps."""

    batch_size: int
    accumulation: int = 1
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    sampler: Sampler = Sampler()

    def __post_init__(self):
        if self.batch_size % self.parts:
            lower = self.batch_size // self.parts * self.parts
            near = " or ".join(str(b) for b in (lower, lower + self.parts) if b > 0)
            raise LiVTError(
                f"batch_size {self.batch_size} is no multiple of {self.world_size} processes x {self.accumulation} "
                f"accumulation steps: use {near}."
            )

    @property
    def parts(self) -> int:
        """Micro-batches per update, over all processes."""
        return self.world_size * self.accumulation

    @property
    def micro_size(self) -> int:
        """Images of a micro-batch on one process."""
        return self.batch_size // self.parts

    def in_order(self, num_images: int) -> list[list[int]]:
        """The batches of this process where each image is taken once: contiguous parts of nearly equal length."""
        bounds = np.linspace(0, num_images, self.world_size + 1).astype(int)
        part, size = range(bounds[self.rank], bounds[self.rank + 1]), self.micro_size
        return [list(part[i : i + size]) for i in range(0, len(part), size)]

    def updates(self, num_images: int) -> int:
        """Updates of an epoch. A ragged last batch is dropped."""
        if self.batch_size > num_images:
            usable = num_images // self.parts * self.parts
            raise LiVTError(
                f"batch_size is {self.batch_size}, but there are only {num_images} images: "
                + (f"use at most {usable}." if usable else "lower the accumulation or the number of processes too.")
            )
        return num_images // self.batch_size


def train_loader(
    dataset: Dataset | IterableDataset,
    augmentation: Augmentation,
    batches: Batches,
    num_images: int | None = None,
    on_broken: str = "error",
) -> "TrainLoader | StreamLoader":
    """Batches of uint8 images for one stage.

    `num_images` and `on_broken` are for streams, which may not know their length and meet their broken images only in
    training; `load_data` has cleaned what is stored.
    """
    if isinstance(dataset, IterableDataset):
        return StreamLoader(dataset, augmentation, batches, num_images, on_broken)
    return TrainLoader(dataset, augmentation, batches)


class TrainLoader:
    """Update u of epoch e takes draws(seed, e)[u * B : (u + 1) * B] of the sampler; a ragged last batch is dropped."""

    def __init__(self, dataset: Dataset, augmentation: Augmentation, batches: Batches):
        self.num_images = len(dataset)
        self.updates_per_epoch = batches.updates(self.num_images)
        stored = StoredImages(dataset)
        self._sampler = UpdateSampler(stored.all_labels, batches)
        images = _AugmentedImages(stored, augmentation, batches.seed)
        self._loader = _loader(images, batches.num_workers, batch_sampler=self._sampler)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[dict]:
        """The micro-batches of this process, `accumulation` per update, from `start_update` on."""
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
    """Normalised float32 batches through the model's own image processor; each image once over all processes.

    Processes get contiguous parts that differ by at most one image, so they may have different numbers of batches.
    """
    images = _ProcessedImages(StoredImages(dataset), processor)
    return _loader(images, batches.num_workers, batch_sampler=batches.in_order(len(dataset)))


def augmented_in_order(dataset: Dataset, augmentation: Augmentation, batches: Batches, epoch: int) -> DataLoader:
    """The uint8 images of `train_loader` as an epoch sees them, but in order, each image once over all processes."""
    rows = [[(epoch, index) for index in part] for part in batches.in_order(len(dataset))]
    images = _AugmentedImages(StoredImages(dataset), augmentation, batches.seed)
    return _loader(images, batches.num_workers, batch_sampler=rows)


class _Loader(DataLoader):
    """What a dataset refuses comes out of its worker as a value and is raised here, as the sentence that it is."""

    def __init__(self, dataset: torch.utils.data.Dataset, **options):
        super().__init__(dataset, worker_init_fn=outlive_ctrl_c, **options)

    def __iter__(self) -> Iterator[dict]:
        return self._checked(super().__iter__())

    def _checked(self, batches: Iterator[dict | LiVTError]) -> Iterator[dict]:
        for batch in batches:
            if isinstance(batch, BrokenImageError) and not isinstance(self.dataset, _EndlessBatches):
                raise with_all_broken(self.dataset.stored.rows, batch)
            if isinstance(batch, LiVTError):
                raise batch
            yield batch


def _loader(dataset: torch.utils.data.Dataset, num_workers: int, **options) -> DataLoader:
    return _Loader(
        dataset,
        collate_fn=_as_is,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # the loader draws a seed for its workers: not from the global generator
        **options,
    )


def _as_is(batch: dict | LiVTError) -> dict | LiVTError:
    """The datasets already give batches."""
    return batch


class StoredImages:
    """Random access to the decoded images and labels of a dataset, one batch at a time."""

    def __init__(self, dataset: Dataset):
        if len(dataset) == 0:
            raise LiVTError("the dataset has no image: check the split, the labels or the rule that made it.")
        self.rows = encoded_images(dataset)
        self.num_classes = number_of_classes(dataset)
        self.all_labels = labels_of(dataset)
        try:
            self._cache = self._decode_small()
        except BrokenImageError as error:
            raise with_all_broken(self.rows, error) from error

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, indices: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        """A tensor (B, 3, H, W) for an in-memory set of one size, else a list of (3, H, W)."""
        if self._cache is not None:
            return self._cache[torch.as_tensor(indices)]
        encoded = self.rows[list(indices)]["image"]
        return [read_image(image, index) for image, index in zip(encoded, indices, strict=True)]

    def labels(self, indices: Sequence[int]) -> torch.Tensor:
        """Class ids (B,) or, for several labels per image, a float multi-hot (B, C)."""
        return torch.from_numpy(self.all_labels.targets(indices, self.num_classes))

    def _decode_small(self) -> torch.Tensor | None:
        """All images in one uint8 tensor, or None when they are large, many or of different sizes."""
        first = read_image(self.rows[0]["image"], 0)
        if max(first.shape) > IN_MEMORY_SIDE or len(self.rows) * first.numel() > IN_MEMORY_BYTES:
            return None
        cache = torch.empty(len(self.rows), *first.shape, dtype=torch.uint8)
        for start in range(0, len(self.rows), 1000):
            for index, encoded in enumerate(self.rows[start : start + 1000]["image"], start):
                image = read_image(encoded, index)
                if image.shape != first.shape:
                    return None
                cache[index] = image
        return cache


class _AugmentedImages(torch.utils.data.Dataset):
    def __init__(self, stored: StoredImages, augmentation: Augmentation, seed: int):
        self.stored, self.augmentation, self.seed = stored, augmentation, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict | LiVTError:
        """Images by their rows; what is random about them belongs to the draw (see `Sampler.draws`)."""
        epoch, draws = keys[0][0], [draw for _, draw in keys]
        rows = [draw % len(self.stored) for draw in draws]
        try:
            images = self.augmentation.batch(self.stored.images(rows), self.seed, epoch, draws)
        except LiVTError as error:
            return error
        return {"pixel_values": images, "labels": self.stored.labels(rows), "index": torch.tensor(draws)}


class _ProcessedImages(torch.utils.data.Dataset):
    def __init__(self, stored: StoredImages, processor: BaseImageProcessor):
        self.stored, self.processor = stored, processor

    def __getitems__(self, indices: list[int]) -> dict | LiVTError:
        try:
            images = self.stored.images(indices)
        except LiVTError as error:
            return error
        if not isinstance(self.processor, TorchvisionBackend):  # the others want arrays with the channels last
            images = [image.permute(1, 2, 0).numpy() for image in images]
        return {
            "pixel_values": self.processor(images=images, return_tensors="pt")["pixel_values"],
            "labels": self.stored.labels(indices),
            "index": torch.tensor(indices),
        }


class StreamLoader:
    """The interface of `TrainLoader` over an `IterableDataset`: whole shards go to processes and workers."""

    def __init__(
        self,
        dataset: IterableDataset,
        augmentation: Augmentation,
        batches: Batches,
        num_images: int | None = None,
        on_broken: str = "error",
    ):
        if num_images is None:
            splits = dataset.info.splits or {}
            if dataset.split not in splits or not splits[dataset.split].num_examples:
                raise LiVTError("the stream does not know its length: pass --num_images, the images of an epoch.")
            num_images = splits[dataset.split].num_examples
        self.num_images, self.updates_per_epoch = num_images, batches.updates(num_images)
        if dataset.num_shards < batches.world_size:
            raise LiVTError(
                f"the stream has {dataset.num_shards} shards for {batches.world_size} processes: write it in at least "
                f"{batches.world_size} files (or use its reshard())."
            )
        self._accumulation = batches.accumulation
        # A worker without a shard would have nothing to give.
        self._num_workers = min(batches.num_workers, dataset.num_shards // batches.world_size)
        self._batches = _EndlessBatches(dataset, augmentation, batches, on_broken)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[dict]:
        """The micro-batches of this process, `accumulation` per update, from about `start_update` on.

        The shards that precede `start_update`, taking all as equally long, are skipped without being read.
        """
        self._batches.epoch = epoch
        self._batches.done = start_update / self.updates_per_epoch
        # A new loader for each epoch: workers that persist would keep the number of the first.
        loader = _Loader(self._batches, batch_size=None, num_workers=self._num_workers, generator=torch.Generator())
        return itertools.islice(iter(loader), (self.updates_per_epoch - start_update) * self._accumulation)


class _EndlessBatches(torch.utils.data.IterableDataset):
    """Micro-batches without end: when the shards of a process are used up, it begins with them again."""

    def __init__(self, dataset: IterableDataset, augmentation: Augmentation, batches: Batches, on_broken: str):
        self.dataset = dataset.select_columns(["image", "label"]).cast_column("image", Image(decode=False))
        self.augmentation, self.batches, self.on_broken = augmentation, batches, on_broken
        self.several, self.num_classes = is_multi_label(dataset), number_of_classes(dataset)
        self.epoch, self.done = 0, 0.0

    def __iter__(self) -> Iterator[dict | LiVTError]:
        images = self._images()
        try:
            while True:
                indices, pixels, labels = zip(*itertools.islice(images, self.batches.micro_size), strict=True)
                yield {
                    "pixel_values": self.augmentation.batch(pixels, self.batches.seed, self.epoch, indices),
                    "labels": self._targets(labels),
                    "index": torch.tensor(indices),
                }
        except LiVTError as error:
            yield error

    def _targets(self, labels: Sequence) -> torch.Tensor:
        if self.several:
            offsets = np.cumsum([0, *map(len, labels)])
            batch = Labels(np.array(list(itertools.chain(*labels)), dtype=np.int64), offsets)
        else:
            batch = Labels(np.array(labels))
        return torch.from_numpy(batch.targets(range(len(labels)), self.num_classes))

    def _images(self) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Decoded images in the order of a shuffle buffer."""
        worker = get_worker_info()
        key = self.epoch, self.batches.rank, 0 if worker is None else worker.id
        generator = np.random.RandomState(keyed_seed(purpose_seed(self.batches.seed, "buffer"), *key))
        buffer, broken_in_a_row = [], 0
        for row in self._rows():
            if len(buffer) < BUFFER:
                buffer.append(row)
                continue
            place = generator.randint(BUFFER)
            (index, encoded, label), buffer[place] = buffer[place], row
            try:
                image = read_image(encoded, index)
            except BrokenImageError as error:
                broken_in_a_row += 1
                if self.on_broken == "error" or broken_in_a_row > BUFFER:  # never loop over nothing but broken images
                    raise
                logger.warning("left out: %s", error.finding)
                continue
            broken_in_a_row = 0
            yield index, image, label

    def _rows(self) -> Iterator[tuple[int, dict, int]]:
        """(index, encoded image, label) without end; the index is unique: shard number and place within the shard."""
        num_shards, seed = self.dataset.num_shards, purpose_seed(self.batches.seed, "shards")
        order = np.random.RandomState(keyed_seed(seed, self.epoch)).permutation(num_shards)
        shards = order[self.batches.rank :: self.batches.world_size]
        shards = np.roll(shards, -int(self.done * len(shards)))
        worker = get_worker_info()
        if worker is not None:
            shards = shards[worker.id :: worker.num_workers]
        while True:
            seen = 0
            for shard in shards.tolist():
                place = 0
                # `iter`, not a plain loop: the latter splits its shards between workers once more.
                for rows in self.dataset.shard(num_shards, shard).iter(batch_size=64):
                    for image, label in zip(rows["image"], rows["label"], strict=True):
                        yield shard * 2**32 + place, image, label
                        place += 1
                seen += place
            if not seen:
                raise LiVTError(f"shards {shards.tolist()} of the stream hold no image.")
