"""Training a pretrained backbone in a given time: an exact head first, then the whole network for the time left.

Linear probing, then fine-tuning (Kumar et al., ICLR 2022). Time is counted in work of this process, so that a busy
machine does not change what is trained, and the schedule is in updates, so that a resumed run is the same run.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.data import Batches, eval_loader
from livt_hf.data.decoding import SAMPLE_SIZE, spread_rows
from livt_hf.errors import LiVTError
from livt_hf.long_tail.calibration import MIN_IMAGES, apply_calibration, fit_calibration
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.objectives import decide, score_predictions
from livt_hf.long_tail.structure import get_classifier
from livt_hf.predictions.calibrate import collect_logits
from livt_hf.processors import read_input_spec
from livt_hf.training.exact_head import score_logits
from livt_hf.training.loop import TrainingLoop
from livt_hf.training.recipe import SHARES, choose_batch_size

logger = logging.getLogger(__name__)

STEP_COST = 3  # forward passes that a training step costs: the backward pass is two
# Images held out to choose between the parts and to calibrate: a tenth; of fewer than 1,000 images 100, but at most a
# fifth; never more than 2,000.
HELD_OUT_SHARE, MOST_HELD_OUT_SHARE, FEW_HELD_OUT, MOST_HELD_OUT = 0.1, 0.2, 100, 2000
MIN_UPDATES = 10  # fewer do not move a network off its head
AVERAGING_SHARE = 0.1  # of the time left that trying the averages may take
REFIT_AFTER = 0.1  # share of the updates after which their number is fitted to the time that they take
UNKNOWN_CLASS = -5000.0  # below it lies the bias of a class that a head knew no image of
REFIT_TOLERANCE = 0.02  # by which the estimate may be off without another number of updates


def work_clock(device: torch.device, num_workers: int = 0) -> Callable[[], float]:
    """Return the clock that a budget is counted by.

    On a CPU that is the processor time of the main thread, which has a share of every parallel operation: the time of
    the wall on a quiet machine. Where the main thread waits for a device or for other processes, it is the wall clock.
    """
    return time.thread_time if device.type == "cpu" and num_workers == 0 else time.perf_counter


def choose_held_out_fraction(num_images: int) -> float:
    """Return the share of the training images to hold out."""
    share = min(max(HELD_OUT_SHARE, FEW_HELD_OUT / num_images), MOST_HELD_OUT_SHARE)
    return round(min(share, MOST_HELD_OUT / num_images), 6)


@dataclass(frozen=True)
class Rates:
    """Seconds for one image: to read it, for its forward pass, and for that of a training crop."""

    read: float
    forward: float
    crop_forward: float

    @property
    def feature(self) -> float:
        return self.read + self.forward

    @property
    def step(self) -> float:
        return self.read + STEP_COST * self.crop_forward


@torch.inference_mode()
def measure_rates(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    train: Dataset,
    clock: Callable[[], float],
    crop_size: int | None = None,
) -> Rates:
    """Measure how long some training images, and crops of a size, take to be read and classified."""
    some = train.select(spread_rows(train, SAMPLE_SIZE))
    list(eval_loader(some.select([0]), processor, Batches(1)))
    began = clock()
    list(eval_loader(some, processor, Batches(len(some))))
    read, model = (clock() - began) / len(some), model.eval()
    side = read_input_spec(processor).size
    forward = _measure_forward(model, side, clock)
    return Rates(read, forward, forward if crop_size is None else _measure_forward(model, crop_size, clock))


def _measure_forward(model: PreTrainedModel, side: int, clock: Callable[[], float]) -> float:
    """Measure the seconds that the forward pass of an image takes, once the shape is known to the kernels."""
    pixels = torch.zeros(SAMPLE_SIZE, 3, side, side, device=model.device)
    for _ in range(2):
        began = clock()
        model(pixels).logits.sum().item()
        seconds = (clock() - began) / SAMPLE_SIZE
    return seconds


@dataclass(frozen=True)
class TuningPlan:
    """How long the whole network is trained.

    Attributes:
        updates: number of updates; 0 where the time or the images are not enough.
        seconds: time for them.
        averages: whether the averages with the first weights are tried.
        why: why there are none, if so.
    """

    updates: int
    seconds: float
    averages: bool = False
    why: str | None = None


def plan_tuning(seconds: float, rates: Rates, num_images: int, num_held_out: int) -> TuningPlan:
    """Plan the training of the whole network in the time that is left.

    Args:
        seconds: time left.
        rates: seconds for one image.
        num_images: training images, without those held out.
        num_held_out: images held out to choose by.
    """
    if num_held_out == 0:
        return TuningPlan(0, 0.0, why="no image can be held out to compare the whole network by")
    measuring = num_held_out * rates.feature
    averages = (len(SHARES) - 1) * measuring <= AVERAGING_SHARE * seconds
    left = max(0.0, seconds - measuring * (len(SHARES) if averages else 1))
    updates = int(left / (rates.step * choose_batch_size(num_images)))
    if updates < MIN_UPDATES:
        return TuningPlan(
            0, left, why=f"the time left holds {updates} updates, and fewer than {MIN_UPDATES} do nothing"
        )
    return TuningPlan(updates, left, averages)


class UpdateFitter:
    """Fits the number of updates to a time, once, after the first part of a training."""

    def __init__(self, seconds: float, clock: Callable[[], float]):
        self.seconds, self.clock = seconds, clock
        self.first: int | None = None  # the first update of this process, which warms up caches and allocators
        self.began = 0.0
        self.change: float | None = None  # the time of an update as a multiple of the estimate

    def __call__(self, loop: TrainingLoop) -> int | None:
        """Return the number of updates that fits, once a tenth of them are done; else None."""
        update = loop.progress.update
        if loop.progress.total is not None:
            return None
        if self.first is None:
            self.first, self.began = update, self.clock()
            return None
        if update < max(MIN_UPDATES // 2, math.ceil(REFIT_AFTER * loop.total)):
            return None
        spent = (self.clock() - self.began) / (update - self.first)
        self.change = spent * loop.total / self.seconds
        fitting = loop.total if abs(self.change - 1) <= REFIT_TOLERANCE else max(update, int(self.seconds / spent))
        answer = [fitting]  # clocks of processes differ
        broadcast_object_list(answer)
        if answer[0] != loop.total:
            logger.info("an update takes %.2f times the estimate: %d updates fit", self.change, answer[0])
        return answer[0]


@torch.no_grad()
def start_from_head(model: PreTrainedModel, weight: Tensor, bias: Tensor) -> None:
    """Give a model the classifier of an exact head; `bias` is that of the fitted posterior."""
    classifier = get_classifier(model)
    classifier.weight.copy_(weight)
    prior = model.head.training_prior().log().to(bias)
    bias = torch.where(bias < UNKNOWN_CLASS, prior, bias)
    classifier.bias.copy_(bias - model.head.logit_bias.to(bias))


def score_held_out(head: LongTailHead, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the scores of logits z on held-out images, by which parts of a training are compared.

    Every part is calibrated on the same images, so that none is punished for being too sure of itself. Accuracy is
    that of decisions under the training prior, mean class accuracy that under the uniform one.
    """
    if head.multi_label:
        return score_logits(head, logits, labels)
    if head.no_posterior is not None:
        posterior = logits.log_softmax(-1)
    elif len(labels) < MIN_IMAGES:
        posterior = head.fitted_posterior(logits)
    else:
        fitted, odds = head.fitted_posterior(logits), head.fitted_log_odds(logits)
        posterior = apply_calibration(fitted, fit_calibration(fitted, labels, head.prior, odds), head.prior, odds)
    posterior = posterior.log_softmax(-1)
    scores = {"nll": -posterior[torch.arange(len(labels)), labels.long()].mean().item()}
    for name, exponent in (("accuracy", 1.0), ("mean_class_accuracy", 0.0)):
        predicted = logits.argmax(-1) if head.no_posterior else decide(posterior, head.prior, exponent)
        scores[name] = score_predictions(predicted.numpy(), labels.numpy(), logits.shape[1])[name]
    return scores


@dataclass(frozen=True)
class Candidate:
    """Weights that may be kept: their share of tuned weights, logits of the held-out images, and scores."""

    share: float
    logits: Tensor
    labels: Tensor
    scores: Mapping[str, float]


def choose_weights(
    module: nn.Module,
    start: Mapping[str, Tensor],
    loader: Callable[[], Iterable[dict]],
    accelerator: Accelerator,
    averages: bool,
) -> list[Candidate]:
    """Score the tuned weights and, with `averages`, their averages with the first ones; put the best into the module.

    Args:
        module: with the tuned weights.
        start: state of the module before training.
        loader: returns the held-out images of this process.
        accelerator: processes and device.
        averages: try averages too.

    Returns:
        The candidates with finite logits, the best first.
    """
    tuned = {name: value.detach().clone() for name, value in module.state_dict().items()}
    head, found = copy.deepcopy(module.head).cpu(), []
    for share in SHARES if averages else SHARES[:1]:
        module.load_state_dict(_average(start, tuned, share))
        logits, labels = collect_logits(module, loader(), accelerator)
        if torch.isfinite(logits).all():
            found.append(Candidate(share, logits, labels, score_held_out(head, logits, labels)))
    if not found:
        message = (
            "the network gives held-out images infinite logits or NaN. Lower base_lr or clip gradients (clip_grad 1)."
        )
        raise LiVTError(message, argument="base_lr")
    found.sort(key=lambda one: one.scores["nll"])
    module.load_state_dict(_average(start, tuned, found[0].share))
    return found


def _average(start: Mapping[str, Tensor], tuned: Mapping[str, Tensor], share: float) -> dict[str, Any]:
    """Return the average of two states; counters are those of the second."""
    return {
        name: torch.lerp(start[name].to(value), value, share) if value.is_floating_point() and share < 1 else value
        for name, value in tuned.items()
    }
