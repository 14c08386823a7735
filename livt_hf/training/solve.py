"""The classifier on frozen features, solved exactly: fitted, calibrated and given a deployment prior in one go.

Nothing is held out: calibration and prior are chosen on out-of-fold logits of the training images.
"""

import contextlib
import logging
import time
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from livt_hf.data.labels import group_codes
from livt_hf.errors import Interrupted
from livt_hf.files import replacing
from livt_hf.long_tail.calibration import MIN_IMAGES
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.predictions.calibrate import calibrate_logits, warn_about_objective
from livt_hf.runs import Run
from livt_hf.training.device import StopOnSignal, compute_on_main_process
from livt_hf.training.exact_head import ExactHead, assign_folds, fit_exact_head
from livt_hf.training.loop import TrainingLoop

logger = logging.getLogger(__name__)

# Files of `solve_head` in the folder of the checkpoints.
START_HEAD, HELD_OUT_LOGITS = "start_head.safetensors", "held_out_logits.safetensors"


def solve_head(
    loop: TrainingLoop,
    objective: str | None = None,
    held_out: np.ndarray | None = None,
    shrinkage: float | None = None,
) -> dict:
    """Solve the classifier of a `FeatureTask`, calibrate it, and choose its deployment prior.

    The main process solves; a run that is interrupted or killed continues after the last L2 strength done.

    Args:
        loop: the loop of the task, which holds the module, the run's folder and the processes.
        objective: what the deployment prior pi^t is chosen for; None keeps the test prior.
        held_out: True for images (N,) that make up a fold of the cross-validation; the logits of them, by a head that
            was trained without them, are written to `HELD_OUT_LOGITS`.
        shrinkage: write a head of so many times the chosen strength to `START_HEAD`, which was trained without the
            held-out images.

    Returns:
        What was chosen, for `results.json`: the L2 strength with its path.
    """

    def solve():
        with StopOnSignal() as stopping, contextlib.suppress(Interrupted):
            return _solve(loop, objective, held_out, shrinkage, stopping)

    solved = compute_on_main_process(loop.accelerator, solve)
    if solved is None:
        raise Interrupted(loop.run.stage, "--resume", loop.run.cross_validation.folder)
    weight, bias, long_tail, solution, loop.progress.seconds = solved
    module = loop.bare_model
    with torch.no_grad():
        module.classifier.weight.copy_(weight)
        module.classifier.bias.copy_(bias)
    module.config.long_tail = LongTailConfig.from_dict(long_tail)
    module.head.update_buffers(module.classifier.weight.device)
    return solution


def _solve(
    loop: TrainingLoop,
    objective: str | None,
    held_out: np.ndarray | None,
    shrinkage: float | None,
    stopping: StopOnSignal,
) -> tuple[Tensor, Tensor, dict, dict, float]:
    """Return weight and bias on standardised features, head settings, solution and seconds."""
    began, limit, loader, module = time.monotonic(), loop.checkpointing.max_hours, loop.task.loader, loop.bare_model
    labels = loader.labels.targets(range(loader.num_images), loader.num_classes)
    train = loop.task.dataset["train"]  # type: ignore[attr-defined]  # a `FeatureTask`, the only task solved here
    groups = group_codes(train) if "group" in train.column_names else None

    def log_or_interrupt(row: dict[str, float]) -> None:
        logger.info("L2 strength %g: cross-validated NLL %.4f", row["strength"], row["nll"])
        if stopping.requested or (limit is not None and time.monotonic() - began > 3600 * limit):
            raise Interrupted

    options = {name: value for name, value in module.config.long_tail.items() if name != "calibration"}
    options |= {"cache": loop.run.checkpoints, "seed": loop.optimization.seed, "callback": log_or_interrupt}
    options["shrinkage"] = shrinkage
    head = _fit(loader.features, labels, groups, held_out, **options)
    if held_out is not None:
        save_held_out_logits(loop.run, head.out_of_fold[: len(held_out)][torch.from_numpy(held_out)])
    if head.shrunk is not None:
        _save(loop.run, START_HEAD, weight=head.shrunk[0], bias=head.shrunk[1])
    seen = ~head.unseen[: loader.num_images]
    if module.head.no_posterior is not None:
        warn_about_objective(module.head, objective)
    elif int(seen.sum()) >= MIN_IMAGES:
        logits, truth = head.out_of_fold[: loader.num_images][seen], torch.from_numpy(labels)[seen]
        seen_groups = None if groups is None else groups[seen.numpy()]
        chosen_on: dict[str, Any] = dict(split="train, out of fold", objective=objective, groups=seen_groups)
        calibrate_logits(module, logits.to(module.mean.device), truth, **chosen_on)
    solution = {"solver": "exact", "strength": head.strength, "path": head.path}
    weight, bias = head.weight.to(module.mean.device), head.bias.to(module.mean.device)
    weight, bias = (weight * module.std).cpu(), (bias + weight @ module.mean).cpu()
    return weight, bias, dict(module.config.long_tail), solution, time.monotonic() - began


def save_held_out_logits(run: Run, logits: Tensor) -> None:
    """Save the logits z of the held-out images by a head that was trained without them."""
    _save(run, HELD_OUT_LOGITS, logits=logits)


def _save(run: Run, name: str, **tensors: Tensor) -> None:
    with replacing(run.checkpoints / name) as path:
        save_file({key: value.contiguous() for key, value in tensors.items()}, path)


def _fit(
    features: np.ndarray, labels: np.ndarray, groups: np.ndarray | None, held_out: np.ndarray | None, **options: Any
) -> ExactHead:
    """Fit the head on all views (views, N, D) of the images; the views of an image stay in one fold."""
    views, num_images, width = features.shape
    if views > 1:
        groups = np.arange(num_images) if groups is None else groups
        labels, groups = np.concatenate([labels] * views), np.tile(groups, views)
    if held_out is not None:
        fold, rest = np.zeros(len(labels), dtype=int), np.tile(~held_out, views)
        own = None if groups is None else groups[rest]
        fold[rest] = 1 + assign_folds(labels[rest], 4, own, options["seed"])
        options["folds"] = fold
    return fit_exact_head(features.reshape(views * num_images, width), labels, groups=groups, **options)
