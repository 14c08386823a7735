"""Calibrate a classifier on labelled images that it was not trained on."""

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from livt_hf.data.labels import digest_of, group_codes
from livt_hf.long_tail.calibration import MIN_IMAGES, Calibration, fit_calibration
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.objectives import choose_exponents
from livt_hf.long_tail.priors import class_prior, log_odds
from livt_hf.predictions.metrics import best_thresholds
from livt_hf.predictions.predict import predict_batches

logger = logging.getLogger(__name__)


def calibrate(
    model: PreTrainedModel,
    loader: Iterable[dict],
    accelerator: Accelerator,
    images: Dataset | None = None,
    split: str | None = None,
    objective: str | None = None,
) -> Calibration:
    """Fit the calibration of a model's head on held-out images of all processes, and put it into the model's config.

    It comes with an exponent of the deployment prior for each objective or, where an image may have several labels,
    with the threshold of each, at its frequency under the test prior.
    Every process keeps the logits of all held-out images: 4 bytes per image and class.

    Args:
        model: a classifier whose head gives probabilities.
        loader: batches of the images.
        accelerator: processes and devices.
        images: the images themselves, for their groups and their fingerprint, which is stored.
        split: the name of these images, which is stored.
        objective: what the model is to be served for; None keeps the test prior of the training.

    Returns:
        The calibration.
    """
    is_grouped = images is not None and "group" in images.column_names
    logits, labels, *index = collect_logits(model, loader, accelerator, *["index"] * is_grouped)
    groups = group_codes(images)[index[0].numpy()] if is_grouped else None
    fingerprint = None if images is None else digest_of(images)
    return calibrate_logits(model, logits.to(accelerator.device), labels, split, fingerprint, objective, groups)


def collect_logits(model: nn.Module, loader: Iterable[dict], accelerator: Accelerator, *names: str) -> list[Tensor]:
    """Return logits, labels and other named values of the batches of all processes, on the CPU."""
    parts = [
        (logits.cpu(), *(batch[name].cpu() for name in ("labels", *names)))
        for logits, batch in predict_batches(model, loader, accelerator)
    ]
    return [torch.cat(columns) for columns in zip(*gather_object(parts), strict=True)]


def calibrate_logits(
    model: PreTrainedModel,
    logits: Tensor,
    labels: Tensor,
    split: str | None = None,
    fingerprint: str | None = None,
    objective: str | None = None,
    groups: np.ndarray | None = None,
) -> Calibration:
    """Fit the calibration of a model's head on logits of images it was not trained on, and put it into its config.

    `groups` (N,) number the images that belong together, and `fingerprint` is the digest of all of them; the other
    arguments are those of `calibrate`.
    """
    head = model.head
    odds = None if head.multi_label else head.fitted_log_odds(logits)
    calibration = fit_calibration(head.fitted_posterior(logits), labels, head.prior, odds)
    calibration = dataclasses.replace(calibration, split=split, fingerprint=fingerprint)
    _set_calibration(model, calibration)  # thresholds and exponents are chosen on the calibrated posterior
    if head.multi_label:
        chosen = {"thresholds": best_thresholds(head.posterior(logits).cpu(), labels, _odds_ratio(head.settings))}
    else:
        chosen = _choose_exponents(head, logits, labels, objective, groups)
    calibration = dataclasses.replace(calibration, **chosen)
    _set_calibration(model, calibration)
    return calibration


def _choose_exponents(
    head: LongTailHead, logits: Tensor, labels: Tensor, objective: str | None, groups: np.ndarray | None
) -> dict[str, Any]:
    """Return the fields of a `Calibration` that follow from the exponents of the deployment prior."""
    settings = head.settings
    prior = class_prior(settings.class_counts, settings.num_images)
    moved = prior.log() - head.training_prior().log()  # where a sampler showed classes as often as they are not
    choices = choose_exponents(head.training_posterior(logits).cpu() + moved.float(), labels, prior, groups=groups)
    curve = [{name: round(value, 5) for name, value in row.items()} for row in choices["accuracy"].curve]
    exponents = {name: choice.exponent for name, choice in choices.items()}
    return {"objective": objective, "exponents": exponents, "curve": curve}


def set_objective(model: PreTrainedModel, objective: str) -> None:
    """Serve a calibrated model for another objective: no image is needed, for the exponents are stored."""
    _set_calibration(model, dataclasses.replace(model.head.calibration, objective=objective))


def warn_about_objective(head: LongTailHead, objective: str | None) -> None:
    """Warn about an objective of a head without a posterior, which no deployment prior can be chosen for."""
    if objective is not None:
        message, about = "objective %s has no effect: %s.", {"arguments": ("objective",)}
        logger.warning(message, objective, head.no_posterior, extra=about)


def calibrate_if_possible(
    model: PreTrainedModel,
    images: Dataset,
    loader: Iterable[dict],
    accelerator: Accelerator,
    split: str,
    objective: str | None = None,
) -> Calibration | None:
    """Calibrate a trained model on a split, or warn and leave it as it is where the split has too few images."""
    if model.head.no_posterior is not None:
        warn_about_objective(model.head, objective)
        return None
    if len(images) < MIN_IMAGES:
        logger.warning(
            "the %s split has %d images, and calibration needs %d: the model stays uncalibrated and is served by its "
            "largest logit. Hold out more with validation_fraction.",
            *(split, len(images), MIN_IMAGES),
            extra={"arguments": ("validation_fraction",)},
        )
        return None
    return calibrate(model, loader, accelerator, images, split, objective)


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
