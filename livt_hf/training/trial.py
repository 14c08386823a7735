"""What is decided by the pace of this machine, before a run begins and once for all: a resumed run keeps it."""

import copy
import dataclasses
import logging
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from livt_hf import budget
from livt_hf.randomness import kept_rng
from livt_hf.settings import TrainingSettings
from livt_hf.training.loop import Loop

logger = logging.getLogger(__name__)

# Updates of a trial: the first warm up caches and allocators.
WARM_UP, TIMED = 2, 10


def choose_epochs(
    settings: TrainingSettings, accelerator: Accelerator, began: float, model: nn.Module, loader, loss_of: Callable
) -> None:
    """Of `--hours`, counted from `began`: as many epochs as fit, by the time that some updates take.

    Such a run is, bit for bit, the one with `--epochs` of this number.
    """
    if settings.hours is None:
        return
    per_epoch = seconds_per_update(settings, accelerator, model, loader, loss_of) * loader.updates_per_epoch
    left = 3600 * settings.hours - (budget.clock() - began)
    settings.epochs = budget.epochs_within(left, per_epoch)
    logger.info(
        "%d epochs of %.1f s fit into the %.1f minutes that are left", settings.epochs, per_epoch, max(0, left) / 60
    )


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
    return accelerator.gather(torch.tensor([seconds], device=accelerator.device)).max().item()
