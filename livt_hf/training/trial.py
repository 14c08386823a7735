"""What is decided by the pace of this machine, before a run begins and once for all: a resumed run keeps it."""

import copy
import dataclasses
import math
import os
import shutil
import sys

import torch
from accelerate import Accelerator

from livt_hf import budget
from livt_hf.randomness import kept_rng
from livt_hf.settings import TrainingSettings
from livt_hf.training.loop import Course, Loop

# Updates of a trial: the first warm up caches and allocators.
WARM_UP, TIMED = 2, 10


def settle(settings: TrainingSettings, accelerator: Accelerator, began: float, course: Course) -> None:
    """Choose what was left open, by the time that some updates take, and say it.

    Of `--hours`, counted from `began`: as many epochs as fit. Of `--compile auto`: whether it pays. The run is then,
    bit for bit, the one that was asked for these values.
    """
    if settings.hours is None and settings.compile != "auto":
        return
    updates = course.loader.updates_per_epoch

    def seconds_of(epoch: int) -> float:
        return seconds_per_update(settings, accelerator, course, epoch) * updates

    per_epoch = seconds_of(0)
    if settings.hours is not None:
        last = settings.keep_all_epochs if getattr(settings, "keep_ratio", 1) < 1 else 0
        per_last = seconds_of(settings.epochs - 1) if last else 0.0
        left = 3600 * settings.hours - (budget.clock() - began)
        # The clocks of processes differ, their epochs must not.
        fitting = budget.epochs_within(left, per_epoch, last, per_last)
        if settings.max_steps is not None:
            fitting = min(fitting, math.ceil(settings.max_steps / updates))
        settings.epochs = int(_gathered(accelerator, fitting).min())
        said = f"epochs that fit into {max(0, left) / 60:.1f} minutes, at {per_epoch:.1f} seconds each"
        if last:
            said += f" and {per_last:.1f} with all patches (the last {last})"
        late = "; one epoch takes longer than that" if left < (per_last if last else per_epoch) else ""
        accelerator.print(f"{said}: {settings.epochs}{late}", file=sys.stderr)
    if settings.compile == "auto":
        seconds, device = settings.epochs * per_epoch, accelerator.device.type
        settings.compile = budget.compiling_pays(seconds, device) and can_compile(device)
        said = f"{'' if settings.compile else 'not '}compiling the model: {seconds / 60:.0f} minutes on {device}"
        accelerator.print(said, file=sys.stderr)


def can_compile(device: str) -> bool:
    """Graphs for a CPU are C++."""
    return device != "cpu" or shutil.which(os.environ.get("CXX", "g++")) is not None


def seconds_per_update(settings: TrainingSettings, accelerator: Accelerator, course: Course, epoch: int) -> float:
    """The mean over some updates of an epoch by a copy of the model, which is thrown away; on the slowest process."""
    plain = dataclasses.replace(settings, ema_decay=None)
    with kept_rng():
        loop = Loop(accelerator, plain, None, dataclasses.replace(course, module=copy.deepcopy(course.module)))
        loop.model.train()
        updates = min(WARM_UP + TIMED, loop.per_epoch)
        batches = iter(course.loader.epoch(epoch))
        for update in range(updates):
            if update == min(WARM_UP, updates - 1):
                began = budget.clock()
            loop.update(batches, epoch)
        seconds = (budget.clock() - began) / max(1, updates - WARM_UP)
    accelerator.free_memory()
    return _gathered(accelerator, seconds).max().item()


def _gathered(accelerator: Accelerator, value: float) -> torch.Tensor:
    return accelerator.gather(torch.tensor([value], device=accelerator.device, dtype=torch.float32))
