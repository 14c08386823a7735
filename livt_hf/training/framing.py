"""The framing of a pretrained backbone on own images, chosen by cross-validation on its frozen features."""

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.data.first_look import sample_sizes
from livt_hf.data.labels import group_codes, labels_of, number_of_classes
from livt_hf.errors import LiVTError
from livt_hf.long_tail.objectives import compare_predictions, decide
from livt_hf.processors import Framing, frame_processor, read_framing
from livt_hf.randomness import preserve_rng_state
from livt_hf.training.device import compute_on_main_process
from livt_hf.training.exact_head import EXPONENTS, STRENGTHS, fit_exact_head
from livt_hf.training.frozen import FrozenBackbone

logger = logging.getLogger(__name__)

FRAMING = "framing.json"  # the result of a trial, in the folder of a run
# Training images of a trial: for a head, whose features are needed in any case, and for all else.
MAX_IMAGES = {"head": 10_000, "full": 2_000}
TRIAL_SHARE = 0.1  # of the time of a training
MIN_CUT = 0.1  # share of the area outside of the centre square, from which on a trial is made
_SAMPLE = 1000  # images whose headers tell
_TIMED, _FEWEST = 64, 200  # images that are timed, and that a trial is worth its time with
_TRIED = STRENGTHS[::3]  # ten-fold steps


@dataclass(frozen=True)
class FramingTrial:
    """A choice between two framings and what it was made by.

    Attributes:
        chosen: the name of the chosen framing.
        own: that of the backbone's own one.
        tried: the other one.
        cut: share of the area of the training images that is outside of their centre square, mean over classes.
        metric: what was compared, of cross-validated heads on frozen features; "log_likelihood" for several labels.
        gain, standard_error: of the metric from `own` to `tried`, on the same images.
        num_images: so many training images were tried.
    """

    chosen: str
    own: str
    tried: str
    cut: float
    metric: str
    gain: float
    standard_error: float
    num_images: int


def measure_outside_square(train: Dataset) -> float:
    """Return the share of the area of images that is outside of their centre square, as the mean over classes."""
    sizes, labels = sample_sizes(train, _SAMPLE)
    if not len(labels.values):
        return 0.0
    outside = 1 - Framing("crop").seen_share(*sizes.T)
    by_class = [outside[labels.images[labels.values == label]].mean() for label in np.unique(labels.values)]
    return float(np.mean(by_class))


def try_framings(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    train: Dataset,
    accelerator: Accelerator,
    *,
    objective: str | None = None,
    max_images: int = 2000,
    seconds: float | None = None,
    seed: int = 0,
    num_workers: int = 0,
) -> FramingTrial | None:
    """Compare the backbone's own framing with cropping or squashing, where proportions differ enough to matter.

    Linear heads on frozen features of the training images are solved and cross-validated under both framings. The
    other one is chosen if it is better by more than the standard error of the paired difference.

    Args:
        model: the backbone, at its pretrained weights.
        processor: its own image processor.
        train: training images, with the column "group" where groups stay together.
        accelerator: of all processes.
        objective: what to compare; default: mean class accuracy.
        max_images: so many training images are tried, drawn at random where there are more.
        seconds: there are fewer, or no trial, where their features would take longer than this.
        seed: of the draw and of the folds.
        num_workers: data loading processes.

    Returns:
        The trial, or None where the images are nearly square, or where time or images are too few.
    """
    cut, own = measure_outside_square(train), read_framing(processor).name
    if cut < MIN_CUT:
        return None
    tried = "crop" if own == "squash" else "squash"
    rows = np.random.RandomState(seed).permutation(len(train))
    with preserve_rng_state():
        processors = processor, frame_processor(processor, tried)
        backbones = [FrozenBackbone(model, one, accelerator, seed, num_workers) for one in processors]
        if seconds is not None:
            few, began = train.select(rows[:_TIMED]), time.monotonic()
            for backbone in backbones:
                backbone.features(few)
            fitting = int(seconds / (time.monotonic() - began) * len(few))
            # The clocks of processes differ.
            max_images = min(max_images, compute_on_main_process(accelerator, lambda: fitting))
            if max_images < min(_FEWEST, len(train)):
                logger.info("framing %s: there is no time to try %s", own, tried)
                return None
        train = train.select(np.sort(rows[:max_images]))
        features = [backbone.features(train)[0] for backbone in backbones]
        metric = objective or "mean_class_accuracy"
        compared = compute_on_main_process(accelerator, lambda: _compare(features, train, metric, seed))
    if compared is None:
        return None
    metric, gain, error = compared
    chosen = tried if gain > error else own
    trial = FramingTrial(chosen, own, tried, cut, metric, gain, error, len(train))
    logger.info(describe_trial(trial))
    return trial


def describe_trial(trial: FramingTrial) -> str:
    """Return a sentence on what was chosen and why."""
    percent = "" if trial.metric == "log_likelihood" else " points"
    gain, error = (value * (100 if percent else 1) for value in (trial.gain, trial.standard_error))
    return (
        f"framing {trial.chosen}: {trial.tried} instead of {trial.own} changes the cross-validated "
        f"{trial.metric.replace('_', ' ')} of frozen features by {gain:+.1f} ± {error:.1f}{percent} "
        f"({trial.num_images:,} training images, {trial.cut:.0%} of whose area is outside of their centre square)"
    )


def _compare(features: list[np.ndarray], train: Dataset, metric: str, seed: int) -> tuple[str, float, float] | None:
    """Return the metric, the gain of the second features over the first and its standard error; None of one class."""
    labels = labels_of(train).targets(range(len(train)), number_of_classes(train))
    groups = group_codes(train) if "group" in train.column_names else None
    several = labels.ndim == 2
    # Only labels that some of the images that are tried have, and some have not.
    labels = labels[:, labels.any(0) & ~labels.all(0)] if several else np.unique(labels, return_inverse=True)[1]
    if (labels.shape[1] if several else labels.max() + 1) < 2:
        return None
    options = dict(loss="bce" if several else "ce", groups=groups, strengths=_TRIED, seed=seed)
    try:
        first, second = (fit_exact_head(part, labels, **options).out_of_fold for part in features)
    except LiVTError as error:
        if error.argument != "folds":
            raise
        return None
    if several:
        truth = torch.from_numpy(labels).float()
        losses = [F.binary_cross_entropy_with_logits(one, truth, reduction="none").sum(1) for one in (first, second)]
        gains = (losses[0] - losses[1]).double().numpy()
        sums = np.bincount(np.arange(len(gains)) if groups is None else groups, gains - gains.mean())
        return "log_likelihood", float(gains.mean()), float(np.sqrt((sums**2).sum()) / len(gains))
    prior = torch.from_numpy(np.bincount(labels) / len(labels))
    before, after = (decide(logits.log_softmax(-1), prior, EXPONENTS[metric]).numpy() for logits in (first, second))
    return metric, *compare_predictions(before, after, labels, metric, groups=groups, seed=seed)
