"""The classifier on frozen features, solved exactly: fitted, calibrated and given a deployment prior in one go.

Nothing is held out: calibration and prior are chosen on out-of-fold logits of the training images.
"""

import dataclasses
import logging
import time

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from livt_hf.data.labels import group_codes
from livt_hf.errors import Interrupted
from livt_hf.long_tail.calibration import MIN_IMAGES
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.objectives import choose_exponent, tempered_prior
from livt_hf.long_tail.spec import LossSpec
from livt_hf.predictions.calibrate import calibrate_logits
from livt_hf.training.device import StopOnSignal
from livt_hf.training.exact_head import CONVEX_LOSSES, ExactHead, fit_exact_head
from livt_hf.training.frozen import FeatureClassifier, FeatureLoader
from livt_hf.training.loop import TrainingLoop
from livt_hf.training.spec import FinetuneModelSpec, FinetuneOptimizationSpec

logger = logging.getLogger(__name__)


def is_solvable(model: FinetuneModelSpec, optimization: FinetuneOptimizationSpec, loss: LossSpec) -> bool:
    """Return True if the classifier is solved exactly: a convex loss on frozen features, every image drawn once."""
    exact = model.tune == "head" and model.solver == "exact" and optimization.sampler == "natural"
    return exact and loss.loss in CONVEX_LOSSES and loss.drw_start is None


def solve_head(loop: TrainingLoop, objective: str | None = None) -> dict:
    """Solve the classifier of a `FeatureTask`, calibrate it, and choose its deployment prior.

    The main process solves; a run that is interrupted or killed continues after the last L2 strength done.

    Args:
        loop: the loop of the task, which holds the module, the run's folder and the processes.
        objective: chooses the deployment prior pi^t, which becomes the test prior; None keeps the test prior.

    Returns:
        What was chosen, for `results.json`: the L2 strength with its path, the objective with its trade-off curve.
    """
    accelerator, module = loop.accelerator, loop.bare_model
    answer: list = [None]
    if accelerator.is_main_process:
        with StopOnSignal() as stopping:
            answer = [_solve(loop, module, objective, stopping)]
    broadcast_object_list(answer)
    if answer[0] is None:
        raise Interrupted(loop.run.stage, "--resume", loop.run.cross_validation.folder)
    weight, bias, long_tail, solution, loop.progress.seconds = answer[0]
    with torch.no_grad():
        module.classifier.weight.copy_(weight)
        module.classifier.bias.copy_(bias)
    module.config.long_tail = LongTailConfig.from_dict(long_tail)
    module.head.update_buffers(module.classifier.weight.device)
    return solution


def _solve(loop: TrainingLoop, module: FeatureClassifier, objective: str | None, stopping: StopOnSignal):
    """Return weight, bias, head settings, solution and seconds; None where the run was asked to stop."""
    began, loader = time.monotonic(), loop.task.loader
    limit = loop.checkpointing.max_hours
    labels = loader.labels.targets(range(loader.num_images), loader.num_classes)

    def report(row: dict[str, float]) -> None:
        logger.info("L2 strength %g: cross-validated NLL %.4f", row["strength"], row["nll"])
        if stopping.requested or (limit is not None and time.monotonic() - began > 3600 * limit):
            raise Interrupted

    groups = _groups(loop)
    try:
        head = _fit(module.config.long_tail, loader, labels, groups, loop, report)
    except Interrupted:
        return None
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
            calibrate_logits(module, logits[seen.to(device)], truth[seen], split="train, out of fold")
        if objective is not None and not module.head.multi_label:
            bias = bias + _choose_prior(module, logits, truth, objective, groups, solution)
    return weight.cpu(), bias.cpu(), dict(module.config.long_tail), solution, time.monotonic() - began


def _groups(loop: TrainingLoop) -> np.ndarray | None:
    dataset = loop.task.dataset["train"]  # type: ignore[attr-defined]  # a `FeatureTask`, the only task solved here
    return group_codes(dataset) if "group" in dataset.column_names else None


def _fit(
    config: LongTailConfig, loader: FeatureLoader, labels: np.ndarray, groups: np.ndarray | None, loop, report
) -> ExactHead:
    """Fit the head on all views of the images; the views of an image stay in one fold, and the first is measured."""
    views = len(loader.features)
    features = loader.features.reshape(views * loader.num_images, -1)
    if views > 1:
        groups = np.arange(loader.num_images) if groups is None else groups
        labels, groups = np.concatenate([labels] * views), np.tile(groups, views)
    options = {name: value for name, value in config.items() if name != "calibration"}
    cache, seed = loop.run.checkpoints, loop.optimization.seed
    head = fit_exact_head(features, labels, groups=groups, seed=seed, cache=cache, callback=report, **options)
    return dataclasses.replace(head, unseen=head.unseen[: loader.num_images])


def _choose_prior(
    module: FeatureClassifier,
    logits: Tensor,
    labels: Tensor,
    objective: str,
    groups: np.ndarray | None,
    solution: dict,
) -> Tensor:
    """Make pi^t the test prior of the head, and return what the bias of the classifier must move by.

    A balanced loss has the test prior in its logit bias. The classifier moves against it, so that the posterior stays,
    and the largest logit of a softmax head is the decision under the new prior.
    """
    head, before = module.head, module.head.logit_bias.clone()
    prior = head.training_prior()
    posterior = head.training_posterior(logits).cpu()
    choice = choose_exponent(posterior, labels, prior, objective, groups=groups)
    served = tempered_prior(prior, choice.exponent).tolist() if choice.exponent > 0 else "uniform"
    module.config.long_tail = LongTailConfig.from_dict({**module.config.long_tail, "test_prior": served})
    head.update_buffers(before.device)
    solution |= dataclasses.asdict(choice)
    return before - head.logit_bias
