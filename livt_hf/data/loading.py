"""Batches for training and evaluation: the same images in the same order for any number of workers.

The sampler of the main process hands out (epoch, draw) pairs, so workers keep no state, and a run resumes in the
middle of an epoch without reading what it skips.

Data that fits neither on disk nor in memory comes as a stream, for pretraining. An epoch sees each image once, over
all processes and workers, and a run resumes bit for bit: each worker reads again at most a shard and a block. What a
stream gives up: shards are shuffled, and images within blocks of consecutive ones, but not over the whole set; the
order depends on the number of processes and workers, so a run that goes on with another number in the middle of an
epoch sees some of its images twice and others not; there are no labels.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, Image, IterableDataset
from torch.utils.data import DataLoader, get_worker_info
from transformers import BaseImageProcessor
from transformers.image_processing_backends import TorchvisionBackend

from livt_hf.data.decoding import BrokenImageError, encoded_images, read_image, with_all_broken
from livt_hf.data.labels import Labels, labels_of, number_of_classes
from livt_hf.data.sampling import Sampler
from livt_hf.data.shards import shard_lengths
from livt_hf.data.transforms import FinetuneAugmentation, PretrainAugmentation
from livt_hf.errors import LiVTError
from livt_hf.randomness import keyed_seed, purpose_seed
from livt_hf.system import outlive_signals

logger = logging.getLogger(__name__)

Augmentation = PretrainAugmentation | FinetuneAugmentation

# A set of small images of one size is decoded once into memory, if it fits in this many bytes.
IN_MEMORY_BYTES = 2**30
IN_MEMORY_SIDE = 96
BLOCK = 1000  # consecutive images of a stream that are shuffled; a worker keeps up to two blocks, encoded


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
    on_broken: str = "error",
) -> "TrainLoader | StreamLoader":
    """Batches of uint8 images for one stage.

    `on_broken` is for streams, which meet their broken images only in training; `load_data` has cleaned stored ones.
    """
    if isinstance(dataset, IterableDataset):
        return StreamLoader(dataset, augmentation, batches, on_broken)
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
        # The loader draws a seed for its workers: not from the global generator.
        super().__init__(dataset, generator=torch.Generator(), worker_init_fn=outlive_signals, **options)

    def __iter__(self) -> Iterator[dict]:
        return self._checked(super().__iter__())

    def _checked(self, batches: Iterator[dict | LiVTError]) -> Iterator[dict]:
        for batch in batches:
            if isinstance(batch, BrokenImageError) and not isinstance(self.dataset, _StreamedBatches):
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
        self.labelled = "label" in dataset.features  # what is held out of a stream may not be
        if self.labelled:
            self.num_classes, self.all_labels = number_of_classes(dataset), labels_of(dataset)
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
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
        labels = {"labels": self.stored.labels(indices)} if self.stored.labelled else {}
        return {"pixel_values": pixels, "index": torch.tensor(indices), **labels}


class StreamLoader:
    """The interface of `TrainLoader` over an `IterableDataset`, without labels.

    The shards of an epoch, in the order that is drawn for it, are one long row of images. Each process takes a part of
    it, of which each of its workers takes a part, a lane. A ragged end of the row, less than a batch, is dropped.
    """

    def __init__(
        self, dataset: IterableDataset, augmentation: Augmentation, batches: Batches, on_broken: str = "error"
    ):
        lengths = np.array(shard_lengths(dataset))
        self.num_images = int(lengths.sum())
        self.updates_per_epoch = batches.updates(self.num_images)
        if len(lengths) < batches.world_size:
            raise LiVTError(
                f"the stream has {len(lengths)} shards for {batches.world_size} processes: write it in at least "
                f"{batches.world_size} files."
            )
        self._accumulation = batches.accumulation
        # More workers than shards would read the same ones.
        self._num_workers = min(batches.num_workers, len(lengths) // batches.world_size)
        row = _ShardRow(dataset, lengths, batches.seed)
        total = self.updates_per_epoch * batches.accumulation
        self._batches = _StreamedBatches(row, augmentation, batches, total, max(1, self._num_workers), on_broken)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[dict]:
        """The micro-batches of this process, `accumulation` per update, from `start_update` on."""
        self._batches.epoch, self._batches.start = epoch, start_update * self._accumulation
        # A new loader for each epoch: workers that persist would keep the number of the first.
        return iter(_Loader(self._batches, batch_size=None, num_workers=self._num_workers))


class _ShardRow:
    """All images of a stream in the order of an epoch's shards, still encoded."""

    def __init__(self, dataset: IterableDataset, lengths: np.ndarray, seed: int):
        self.dataset = dataset.select_columns(["image"]).cast_column("image", Image(decode=False))
        self.lengths, self.seed = lengths, seed

    def images(self, epoch: int, begin: int, end: int) -> Iterator[tuple[int, dict]]:
        """(index, encoded image) of places `begin` to `end`; shards that lie outside are not opened.

        The index is unique: shard number and place within the shard.
        """
        seed = keyed_seed(purpose_seed(self.seed, "shards"), epoch)
        order = np.random.RandomState(seed).permutation(len(self.lengths))
        ends = np.cumsum(self.lengths[order])
        for shard, start, stop in zip(order.tolist(), ends - self.lengths[order], ends, strict=True):
            if begin < stop and start < end:
                yield from self._of_shard(shard, max(begin - start, 0), min(end, stop) - start)

    def _of_shard(self, shard: int, first: int, last: int) -> Iterator[tuple[int, dict]]:
        place = 0
        # `iter`, not a plain loop: the latter splits its shards between workers once more.
        for rows in self.dataset.shard(len(self.lengths), shard).iter(batch_size=64):
            for image in rows["image"]:
                if first <= place < last:
                    yield shard * 2**32 + place, image
                place += 1
            if place >= last:
                return
        raise LiVTError(
            f"shard {shard} of the stream holds {place} images, but {self.lengths[shard]} were counted: leave the "
            "files as they are while a run reads them."
        )


class _StreamedBatches(torch.utils.data.IterableDataset):
    """The micro-batches of a process, `total` an epoch: number b is the next of lane b modulo `lanes`."""

    def __init__(
        self, row: _ShardRow, augmentation: Augmentation, batches: Batches, total: int, lanes: int, on_broken: str
    ):
        self.row, self.augmentation, self.batches, self.on_broken = row, augmentation, batches, on_broken
        self.total, self.lanes = total, lanes
        self.epoch = self.start = 0

    def __iter__(self) -> Iterator[dict | LiVTError]:
        worker = get_worker_info()
        # A loader asks its workers in turn, so this is the first batch that is asked of this one.
        first = self.start + (0 if worker is None else worker.id)
        images = self._images(first % self.lanes, first // self.lanes * self.batches.micro_size)
        try:
            for _ in range(first, self.total, self.lanes):
                indices, pixels = zip(*itertools.islice(images, self.batches.micro_size), strict=True)
                pixels = self.augmentation.batch(pixels, self.batches.seed, self.epoch, indices)
                yield {"pixel_values": pixels, "index": torch.tensor(indices)}
        except LiVTError as error:
            yield error

    def _images(self, lane: int, done: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Decoded images of a lane after the first `done`; consecutive blocks are shuffled, each by its own key."""
        batches = [len(range(number, self.total, self.lanes)) for number in range(self.lanes)]  # of each lane
        begin = (self.batches.rank * self.total + sum(batches[:lane])) * self.batches.micro_size
        end = begin + batches[lane] * self.batches.micro_size
        place = begin + done // BLOCK * BLOCK
        skipped = done % BLOCK
        rows = self.row.images(self.epoch, place, end)
        block = list(itertools.islice(rows, BLOCK))
        while block:
            seed = keyed_seed(purpose_seed(self.batches.seed, "blocks"), self.epoch, place)
            order = np.random.RandomState(seed).permutation(len(block))
            coming = []
            for number in range(skipped, len(block)):
                coming += itertools.islice(rows, 1)  # one by one, so that no batch waits for a whole block
                yield self._readable(block[i] for i in itertools.chain(order[number:], order[:number]))
            coming += itertools.islice(rows, BLOCK - len(coming))
            block, place, skipped = coming, place + BLOCK, 0

    def _readable(self, rows: Iterable[tuple[int, dict]]) -> tuple[int, torch.Tensor]:
        """The first of the rows; where that is broken and may be left out, the next that is not stands in for it."""
        for number, (index, encoded) in enumerate(rows):
            try:
                return index, read_image(encoded, index)
            except BrokenImageError as error:
                if self.on_broken == "error":
                    raise
                if number == 0:
                    logger.warning("left out: %s", error.finding)
                last = error
        raise last
