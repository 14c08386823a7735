"""Calibrate a classifier on labelled images that it was not trained on."""

import dataclasses
import logging
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from livt_hf.data.labels import digest_of
from livt_hf.long_tail.calibration import MIN_IMAGES, Calibration, fit_calibration
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.priors import log_odds
from livt_hf.predictions.multi_label import best_thresholds
from livt_hf.predictions.predict import predict_batches

logger = logging.getLogger(__name__)


def calibrate(
    model: PreTrainedModel,
    loader: Iterable[dict],
    accelerator: Accelerator,
    split: str | None = None,
    fingerprint: str | None = None,
) -> Calibration:
    """Fit the calibration of a model's head on held-out images of all processes, and put it into the model's config.

    Where an image may have several labels, it comes with the threshold of each, at its frequency under the test prior.
    Every process keeps the logits of all held-out images: 4 bytes per image and class.

    Args:
        model: a classifier whose head gives probabilities.
        loader: batches of the images.
        accelerator: processes and devices.
        split, fingerprint: name and `digest_of` of these images, which are stored with the calibration.

    Returns:
        The calibration.
    """
    pairs = [(logits.cpu(), batch["labels"].cpu()) for logits, batch in predict_batches(model, loader, accelerator)]
    logits, labels = (torch.cat(parts) for parts in zip(*gather_object(pairs), strict=True))
    return calibrate_logits(model, logits.to(accelerator.device), labels, split, fingerprint)


def calibrate_logits(
    model: PreTrainedModel,
    logits: Tensor,
    labels: Tensor,
    split: str | None = None,
    fingerprint: str | None = None,
) -> Calibration:
    """Fit the calibration of a model's head on logits of images it was not trained on, and put it into its config."""
    head = model.head
    odds = None if head.multi_label else head.fitted_log_odds(logits)
    calibration = fit_calibration(head.fitted_posterior(logits), labels, head.prior, odds)
    calibration = dataclasses.replace(calibration, split=split, fingerprint=fingerprint)
    _set_calibration(model, calibration)
    if head.multi_label:
        thresholds = best_thresholds(head.posterior(logits).cpu(), labels, _odds_ratio(head.settings))
        calibration = dataclasses.replace(calibration, thresholds=thresholds)
        _set_calibration(model, calibration)
    return calibration


def calibrate_if_possible(
    model: PreTrainedModel,
    images: Dataset,
    loader: Iterable[dict],
    accelerator: Accelerator,
    split: str,
) -> Calibration | None:
    """Calibrate a trained model on a split, or warn and leave it as it is where the split has too few images."""
    if model.head.no_posterior is not None:
        return None
    if len(images) < MIN_IMAGES:
        logger.warning(
            "the %s split has %d images, and calibration needs %d: the model stays uncalibrated and is served by its "
            "largest logit. Hold out more with validation_fraction.",
            split,
            len(images),
            MIN_IMAGES,
        )
        return None
    return calibrate(model, loader, accelerator, split, digest_of(images))


def _odds_ratio(settings: LongTailConfig) -> Tensor | float:
    """Return how many times as likely each label is under the test prior as among held-out images, as odds. (C,)"""
    if settings.test_prior is None:
        return 1.0
    test_prior = torch.tensor(settings.test_prior, dtype=torch.float64)
    return (torch.logit(test_prior) - log_odds(settings.class_counts, settings.num_images)).exp()


def _set_calibration(model: PreTrainedModel, calibration: Calibration) -> None:
    model.config.long_tail = LongTailConfig.from_dict(
        {**model.config.long_tail, "calibration": dataclasses.asdict(calibration)}
    )
