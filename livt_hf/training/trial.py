"""What is decided by the pace of this machine, before a run begins and once for all: a resumed run keeps it."""

import copy
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from livt_hf import budget
from livt_hf.randomness import kept_rng
from livt_hf.settings import TrainingSettings
from livt_hf.training.loop import Loop

# Updates of a trial: the first warm up caches and allocators.
WARM_UP, TIMED = 2, 10


def settle(
    settings: TrainingSettings, accelerator: Accelerator, began: float, model: nn.Module, loader, loss_of: Callable
) -> None:
    """Choose what was left open, by the time that some updates take, and say it.

    Of `--hours`, counted from `began`: as many epochs as fit. Of `--compile auto`: whether it pays. The run is then,
    bit for bit, the one that was asked for these values.
    """
    if settings.hours is None and settings.compile != "auto":
        return
    per_epoch = seconds_per_update(settings, accelerator, model, loader, loss_of) * loader.updates_per_epoch
    if settings.hours is not None:
        left = 3600 * settings.hours - (budget.clock() - began)
        # The clocks of processes differ, their epochs must not.
        settings.epochs = int(_gathered(accelerator, budget.epochs_within(left, per_epoch)).min())
        said = (
            f"epochs that fit into {max(0, left) / 60:.1f} minutes, at {per_epoch:.1f} seconds each: {settings.epochs}"
        )
        accelerator.print(said, file=sys.stderr)
    if settings.compile == "auto":
        seconds, device = settings.epochs * per_epoch, accelerator.device.type
        settings.compile = budget.compiling_pays(seconds, device) and can_compile(device)
        said = f"{'' if settings.compile else 'not '}compiling the model: {seconds / 60:.0f} minutes on {device}"
        accelerator.print(said, file=sys.stderr)


def can_compile(device: str) -> bool:
    """Graphs for a CPU are C++."""
    return device != "cpu" or shutil.which(os.environ.get("CXX", "g++")) is not None


def seconds_per_update(
    settings: TrainingSettings, accelerator: Accelerator, model: nn.Module, loader, loss_of: Callable
) -> float:
    """The mean over some updates of a copy of the model, which is thrown away; that of the slowest process."""
    plain = dataclasses.replace(settings, ema_decay=None)
    with kept_rng():
        loop = Loop(accelerator, plain, None, copy.deepcopy(model), loader, loss_of)
        loop.model.train()
        updates = min(WARM_UP + TIMED, loop.per_epoch)
        batches = iter(loader.epoch(0))
        for update in range(updates):
            if update == min(WARM_UP, updates - 1):
                began = budget.clock()
            loop.update(batches, epoch=0)
        seconds = (budget.clock() - began) / max(1, updates - WARM_UP)
    accelerator.free_memory()
    return _gathered(accelerator, seconds).max().item()


def _gathered(accelerator: Accelerator, value: float) -> torch.Tensor:
    return accelerator.gather(torch.tensor([value], device=accelerator.device, dtype=torch.float32))
