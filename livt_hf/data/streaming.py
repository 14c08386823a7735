"""Loader of a stream, for pretraining on data that fits neither on disk nor in memory.

An epoch sees each image at most once, over all processes and workers, and a run resumes bit for bit: each worker reads
again at most a shard and a block. What a stream gives up: shards are shuffled, and images within blocks of consecutive
ones, but not over the whole set; the order depends on the number of processes and workers, so a run that is resumed
with another number in the middle of an epoch sees some of its images twice and others not; there are no labels.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from datasets import Image, IterableDataset
from torch.utils.data import get_worker_info

from livt_hf.data.batches import Batches, Loader
from livt_hf.data.decoding import BrokenImageError, read_image
from livt_hf.data.shards import shard_lengths
from livt_hf.data.transforms import Augmentation
from livt_hf.errors import LiVTError
from livt_hf.randomness import keyed_seed, purpose_seed

logger = logging.getLogger(__name__)

BLOCK = 1000  # consecutive images of a stream that are shuffled; a worker keeps up to two blocks, encoded


class StreamLoader(torch.utils.data.IterableDataset):
    """Loader with the interface of `TrainLoader` over an `IterableDataset`, without labels.

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
        self._row = _ShardRow(dataset, lengths, batches.seed)
        self._augmentation, self._batches, self._on_broken = augmentation, batches, on_broken
        self._total = self.updates_per_epoch * batches.accumulation  # micro-batches of a process
        # More workers than shards would read the same ones.
        self._num_workers = min(batches.num_workers, len(lengths) // batches.world_size)
        self._lanes = max(1, self._num_workers)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[dict]:
        """Yield the micro-batches of this process, `accumulation` per update, from `start_update` on."""
        self._epoch, self._start = epoch, start_update * self._batches.accumulation
        # A new loader for each epoch: workers that persist would keep the number of the first.
        return iter(Loader(self, batch_size=None, num_workers=self._num_workers))

    def __iter__(self) -> Iterator[dict | LiVTError]:
        """Yield the micro-batches of one worker: number b of a process is the next of lane b modulo the lanes."""
        worker = get_worker_info()
        # A loader asks its workers in turn, so this is the first batch that is asked of this one.
        first = self._start + (0 if worker is None else worker.id)
        images = self._images(first % self._lanes, first // self._lanes * self._batches.micro_size)
        try:
            for _ in range(first, self._total, self._lanes):
                indices, pixels = zip(*itertools.islice(images, self._batches.micro_size), strict=True)
                pixels = self._augmentation.batch(pixels, self._batches.seed, self._epoch, indices)
                yield {"pixel_values": pixels, "index": torch.tensor(indices)}
        except LiVTError as error:
            yield error

    def _images(self, lane: int, done: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield decoded images of a lane after the first `done`; blocks are shuffled, each by its own key."""
        numbers = [len(range(number, self._total, self._lanes)) for number in range(self._lanes)]  # of each lane
        begin = (self._batches.rank * self._total + sum(numbers[:lane])) * self._batches.micro_size
        end = begin + numbers[lane] * self._batches.micro_size
        position = begin + done // BLOCK * BLOCK
        skipped = done % BLOCK
        rows = self._row.images(self._epoch, position, end)
        block = list(itertools.islice(rows, BLOCK))
        while block:
            seed = keyed_seed(purpose_seed(self._batches.seed, "blocks"), self._epoch, position)
            order = np.random.RandomState(seed).permutation(len(block))
            coming = []
            for number in range(skipped, len(block)):
                coming += itertools.islice(rows, 1)  # one by one, so that no batch waits for a whole block
                yield self._readable(block[i] for i in itertools.chain(order[number:], order[:number]))
            coming += itertools.islice(rows, BLOCK - len(coming))
            block, position, skipped = coming, position + BLOCK, 0

    def _readable(self, rows: Iterable[tuple[int, dict]]) -> tuple[int, torch.Tensor]:
        """Return the first of the rows; where that is broken and may be dropped, the next readable one."""
        for number, (index, encoded) in enumerate(rows):
            try:
                return index, read_image(encoded, index)
            except BrokenImageError as error:
                if self._on_broken == "error":
                    raise
                if number == 0:
                    logger.warning("left out: %s", error.finding)
                last = error
        raise last


class _ShardRow:
    """All images of a stream in the order of an epoch's shards, still encoded."""

    def __init__(self, dataset: IterableDataset, lengths: np.ndarray, seed: int):
        self.dataset = dataset.select_columns(["image"]).cast_column("image", Image(decode=False))
        self.lengths, self.seed = lengths, seed

    def images(self, epoch: int, begin: int, end: int) -> Iterator[tuple[int, dict]]:
        """Yield (index, encoded image) from position `begin` to `end`; shards that lie outside are not opened.

        The index is unique: shard number and position within the shard.
        """
        seed = keyed_seed(purpose_seed(self.seed, "shards"), epoch)
        order = np.random.RandomState(seed).permutation(len(self.lengths))
        ends = np.cumsum(self.lengths[order])
        for shard, start, stop in zip(order.tolist(), ends - self.lengths[order], ends, strict=True):
            if max(begin, start) < min(end, stop):
                yield from self._of_shard(shard, max(begin - start, 0), min(end, stop) - start)

    def _of_shard(self, shard: int, first: int, last: int) -> Iterator[tuple[int, dict]]:
        position = 0
        # `iter`, not a plain loop: the latter splits its shards between workers once more.
        for rows in self.dataset.shard(len(self.lengths), shard).iter(batch_size=64):
            for image in rows["image"]:
                if first <= position < last:
                    yield shard * 2**32 + position, image
                position += 1
            if position >= last:
                return
        raise LiVTError(
            f"shard {shard} of the stream holds {position} images, but {self.lengths[shard]} were counted: leave the "
            "files as they are while a run reads them."
        )
