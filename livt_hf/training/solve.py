"""The classifier on frozen features, solved exactly: fitted, calibrated and given a deployment prior in one go.

Nothing is held out: calibration and prior are chosen on out-of-fold logits of the training images.
"""

import dataclasses
import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file
from torch import Tensor

from livt_hf.data.labels import group_codes
from livt_hf.errors import Interrupted
from livt_hf.files import replacing
from livt_hf.long_tail.calibration import MIN_IMAGES
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.predictions.calibrate import calibrate_logits
from livt_hf.runs import Run
from livt_hf.training.device import StopOnSignal
from livt_hf.training.exact_head import ExactHead, assign_folds, fit_exact_head
from livt_hf.training.frozen import FeatureClassifier, FeatureLoader
from livt_hf.training.loop import TrainingLoop

logger = logging.getLogger(__name__)

HELD_OUT_HEAD = "held_out_head.safetensors"  # of `solve_head` with `held_out`, in the folder of the checkpoints


def solve_head(loop: TrainingLoop, objective: str | None = None, held_out: np.ndarray | None = None) -> dict:
    """Solve the classifier of a `FeatureTask`, calibrate it, and choose its deployment prior.

    The main process solves; a run that is interrupted or killed continues after the last L2 strength done.

    Args:
        loop: the loop of the task, which holds the module, the run's folder and the processes.
        objective: what the deployment prior pi^t is chosen for; None keeps the test prior.
        held_out: True for images (N,) that make up a fold of the cross-validation. The head that was trained without
            them, and its logits of them, are written to `HELD_OUT_HEAD`.

    Returns:
        What was chosen, for `results.json`: the L2 strength with its path.
    """
    accelerator, module = loop.accelerator, loop.bare_model
    solved: list = [None]
    if accelerator.is_main_process:
        with StopOnSignal() as stopping:
            solved = [_solve(loop, module, objective, held_out, stopping)]
    broadcast_object_list(solved)
    if solved[0] is None:
        raise Interrupted(loop.run.stage, "--resume", loop.run.cross_validation.folder)
    weight, bias, long_tail, solution, loop.progress.seconds = solved[0]
    with torch.no_grad():
        module.classifier.weight.copy_(weight)
        module.classifier.bias.copy_(bias)
    module.config.long_tail = LongTailConfig.from_dict(long_tail)
    module.head.update_buffers(module.classifier.weight.device)
    return solution


def _solve(
    loop: TrainingLoop,
    module: FeatureClassifier,
    objective: str | None,
    held_out: np.ndarray | None,
    stopping: StopOnSignal,
):
    """Return weight, bias, head settings, solution and seconds; None where the run was asked to stop."""
    began, loader = time.monotonic(), loop.task.loader
    limit = loop.checkpointing.max_hours
    labels = loader.labels.targets(range(loader.num_images), loader.num_classes)

    def log_or_interrupt(row: dict[str, float]) -> None:
        logger.info("L2 strength %g: cross-validated NLL %.4f", row["strength"], row["nll"])
        if stopping.requested or (limit is not None and time.monotonic() - began > 3600 * limit):
            raise Interrupted

    groups = _read_groups(loop)
    try:
        head = _fit(module.config.long_tail, loader, labels, groups, held_out, loop, log_or_interrupt)
    except Interrupted:
        return None
    if held_out is not None:
        weight, bias = head.first_fold
        save_held_out_head(loop.run, weight, bias, head.out_of_fold[torch.from_numpy(held_out)])
    device = module.classifier.weight.device
    with torch.no_grad():
        # From the backbone's own features to standardised ones, as the module has them.
        bias = head.bias.to(device) + head.weight.to(device) @ module.mean
        weight = head.weight.to(device) * module.std
    solution = {"solver": "exact", "strength": head.strength, "path": head.path}
    if module.head.no_posterior is None:
        seen, truth = ~head.unseen, torch.from_numpy(labels)
        logits = head.out_of_fold[: loader.num_images].to(device)
        if int(seen.sum()) >= MIN_IMAGES:
            seen_groups = None if groups is None else groups[seen.numpy()]
            options = dict(split="train, out of fold", objective=objective, groups=seen_groups)
            calibrate_logits(module, logits[seen.to(device)], truth[seen], **options)
    return weight.cpu(), bias.cpu(), dict(module.config.long_tail), solution, time.monotonic() - began


def save_held_out_head(run: Run, weight: Tensor, bias: Tensor, logits: Tensor) -> None:
    """Save a head that was trained without the held-out images, and its logits z of them.

    The weights are those on the backbone's own features, and the bias is that of the fitted posterior.
    """
    with replacing(run.checkpoints / HELD_OUT_HEAD) as path:
        save_file({"weight": weight.contiguous(), "bias": bias.contiguous(), "logits": logits.contiguous()}, path)


def _read_groups(loop: TrainingLoop) -> np.ndarray | None:
    """Return the groups of the training images (N,), or None where there are none."""
    dataset = loop.task.dataset["train"]  # type: ignore[attr-defined]  # a `FeatureTask`, the only task solved here
    return group_codes(dataset) if "group" in dataset.column_names else None


def _fit(
    config: LongTailConfig,
    loader: FeatureLoader,
    labels: np.ndarray,
    groups: np.ndarray | None,
    held_out: np.ndarray | None,
    loop: TrainingLoop,
    callback: Callable[[dict[str, float]], None],
) -> ExactHead:
    """Fit the head on all views of the images; the views of an image stay in one fold, and the first is measured."""
    views = len(loader.features)
    features = loader.features.reshape(views * loader.num_images, -1)
    if views > 1:
        groups = np.arange(loader.num_images) if groups is None else groups
        labels, groups = np.concatenate([labels] * views), np.tile(groups, views)
    options = {name: value for name, value in config.items() if name != "calibration"}
    options |= {"cache": loop.run.checkpoints, "seed": loop.optimization.seed, "callback": callback}
    if held_out is not None:
        fold, rest = np.zeros(len(labels), dtype=int), ~held_out
        own = None if groups is None else groups[rest]
        fold[rest] = 1 + assign_folds(labels[rest], 4, own, options["seed"])
        options["folds"] = fold
    head = fit_exact_head(features, labels, groups=groups, **options)
    return dataclasses.replace(head, unseen=head.unseen[: loader.num_images])
