"""Batches: how images are shared out among updates, processes and workers."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader, default_convert

from livt_hf.data.decoding import BrokenImageError, check_readable
from livt_hf.data.sampling import Sampler
from livt_hf.errors import LiVTError


@dataclass(frozen=True)
class Batches:
    """A plan of batches: `batch_size` images per update, over all processes and accumulation steps."""

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
        """Return the number of micro-batches per update, over all processes."""
        return self.world_size * self.accumulation

    @property
    def micro_size(self) -> int:
        """Return the number of images of a micro-batch on one process."""
        return self.batch_size // self.parts

    def in_order(self, num_images: int) -> list[list[int]]:
        """Return the batches of this process where each image is taken once, in contiguous parts."""
        bounds = np.linspace(0, num_images, self.world_size + 1).astype(int)
        part, size = range(bounds[self.rank], bounds[self.rank + 1]), self.micro_size
        return [list(part[i : i + size]) for i in range(0, len(part), size)]

    def updates(self, num_images: int) -> int:
        """Return the number of updates of an epoch. A ragged last batch is dropped."""
        if self.batch_size > num_images:
            usable = num_images // self.parts * self.parts
            raise LiVTError(
                f"batch_size is {self.batch_size}, but there are only {num_images} images: "
                + (f"use at most {usable}." if usable else "lower the accumulation or the number of processes too.")
            )
        return num_images // self.batch_size


class Loader(DataLoader):
    """A data loader that raises the errors of its workers as they are, without a worker's traceback.

    Workers return them as values. Where an image is broken, all broken ones of the stored `images` are named.
    """

    def __init__(self, dataset: torch.utils.data.Dataset, images: Dataset | None = None, **options):
        self.images = images
        # The loader draws a seed for its workers: not from the global generator.
        options |= {"generator": torch.Generator(), "worker_init_fn": outlive_signals, "collate_fn": default_convert}
        super().__init__(dataset, **options)

    def __iter__(self) -> Iterator[dict]:
        return self._checked(super().__iter__())

    def _checked(self, batches: Iterator[dict | LiVTError]) -> Iterator[dict]:
        for batch in batches:
            if isinstance(batch, LiVTError):
                if isinstance(batch, BrokenImageError) and self.images is not None:
                    check_readable(self.images)
                raise batch
            yield batch


def build_train_batches(
    batch_size: int,
    accumulation: int,
    seed: int,
    accelerator: Accelerator,
    num_workers: int = 0,
    sampler: Sampler | None = None,
) -> Batches:
    """Share the images of an update among processes and accumulation steps."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    return Batches(batch_size, accumulation, seed, rank, world_size, num_workers, sampler or Sampler())


def build_eval_batches(per_process: int, accelerator: Accelerator, num_workers: int = 0) -> Batches:
    """Plan batches for evaluation: `per_process` images per forward pass, each image on one process."""
    return build_train_batches(per_process * accelerator.num_processes, 1, 0, accelerator, num_workers)


def outlive_signals(_worker: int) -> None:
    """Make a data loading worker ignore the signals that stop a run: its parent decides when to stop.

    Whoever stops a run may signal all its processes, and SIGTERM would end torch's workers at once.
    """
    outlive_ctrl_c()
    if hasattr(signal, "sigwaitinfo"):  # macOS does not tell who sends a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_own_process, daemon=True).start()


def outlive_ctrl_c() -> None:
    """Ignore Ctrl-C in a spawned worker; a forked one has the handler of the training already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _wait_for_own_process() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
