"""Training from a stream, for data that fits neither on disk nor in memory.

What it gives up against a stored data set: images are shuffled within a buffer and by shard, not over the whole set;
the order depends on the number of processes and workers; a run resumes at the last shard boundary of each process, so
some images of the epoch are seen twice and others not; the number of images must be known; class counts must be given.
"""

import itertools
import logging
from collections.abc import Iterator

import numpy as np
import torch
from datasets import Image, IterableDataset
from torch.utils.data import DataLoader, get_worker_info

from livt_hf.data.decoding import WAY_OUT, BrokenImageError, read_image
from livt_hf.data.labels import class_feature, is_multi_label
from livt_hf.errors import LiVTError
from livt_hf.randomness import keyed_seed, purpose_seed

logger = logging.getLogger(__name__)

BUFFER = 1000  # encoded images a worker keeps to shuffle from


class StreamLoader:
    """The interface of `TrainLoader` over an `IterableDataset`: whole shards go to processes and workers."""

    def __init__(
        self,
        dataset: IterableDataset,
        augmentation,
        *,
        batch_size: int,
        accumulation: int,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int,
        on_broken: str,
        num_images: int | None = None,
    ):
        if num_images is None:
            splits = dataset.info.splits or {}
            if dataset.split not in splits or not splits[dataset.split].num_examples:
                raise LiVTError("the stream does not know its length: pass num_images, which sets the epoch's length.")
            num_images = splits[dataset.split].num_examples
        if batch_size > num_images:
            raise LiVTError(f"batch_size is {batch_size}, but there are {num_images} images only: lower it.")
        if dataset.num_shards < world_size:
            raise LiVTError(
                f"the stream has {dataset.num_shards} shards for {world_size} processes: write it in at least "
                f"{world_size} files (or use its reshard())."
            )
        self.num_images = num_images
        self.updates_per_epoch = num_images // batch_size
        self._accumulation = accumulation
        # A worker without a shard would have nothing to give.
        self._num_workers = min(num_workers, dataset.num_shards // world_size)
        self._batches = _EndlessBatches(
            dataset, augmentation, batch_size // (accumulation * world_size), seed, rank, world_size, on_broken
        )

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[dict]:
        """The micro-batches of this process, `accumulation` an update, from about `start_update` on.

        The shards that precede `start_update`, taking all as equally long, are skipped without being read.
        """
        self._batches.epoch = epoch
        self._batches.done = start_update / self.updates_per_epoch
        loader = DataLoader(self._batches, batch_size=None, num_workers=self._num_workers, generator=torch.Generator())
        return itertools.islice(iter(loader), (self.updates_per_epoch - start_update) * self._accumulation)


class _EndlessBatches(torch.utils.data.IterableDataset):
    """Micro-batches without end: when the shards of a process are used up, it begins with them again."""

    def __init__(self, dataset, augmentation, micro_size: int, seed: int, rank: int, world_size: int, on_broken: str):
        self.dataset = dataset.select_columns(["image", "label"]).cast_column("image", Image(decode=False))
        self.augmentation, self.micro_size, self.seed = augmentation, micro_size, seed
        self.rank, self.world_size, self.on_broken = rank, world_size, on_broken
        self.num_classes = class_feature(dataset).num_classes if is_multi_label(dataset) else None
        self.epoch, self.done = 0, 0.0

    def __iter__(self) -> Iterator[dict]:
        images = self._images()
        while True:
            batch = list(itertools.islice(images, self.micro_size))
            indices = [index for index, _, _ in batch]
            yield {
                "pixel_values": self.augmentation.batch(
                    [image for _, image, _ in batch], self.seed, self.epoch, indices
                ),
                "labels": self._labels([label for _, _, label in batch]),
                "index": torch.tensor(indices),
            }

    def _labels(self, labels: list) -> torch.Tensor:
        if self.num_classes is None:
            return torch.tensor(labels)
        rows = torch.zeros(len(labels), self.num_classes)
        for row, classes in zip(rows, labels, strict=True):
            row[classes] = 1
        return rows

    def _images(self) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Decoded images in the order of a shuffle buffer."""
        worker = get_worker_info()
        key = self.epoch, self.rank, 0 if worker is None else worker.id
        generator = np.random.RandomState(keyed_seed(purpose_seed(self.seed, "buffer"), *key))
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
                logger.warning("left out: %s", str(error).removesuffix(WAY_OUT))
                continue
            broken_in_a_row = 0
            yield index, image, label

    def _rows(self) -> Iterator[tuple[int, dict, int]]:
        """(index, encoded image, label) without end; the index is unique: shard number and place within the shard."""
        num_shards = self.dataset.num_shards
        order = np.random.RandomState(keyed_seed(purpose_seed(self.seed, "shards"), self.epoch)).permutation(
            num_shards
        )
        shards = order[self.rank :: self.world_size]
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
