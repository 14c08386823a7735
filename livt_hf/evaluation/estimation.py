"""What images tell about a classifier without being trained on: their class prior, and how to calibrate its head."""

import dataclasses
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from livt_hf.evaluation.running import Batches, logits_of, on_disk
from livt_hf.long_tail.calibration import Calibration, fit_calibration
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.priors import PriorEstimate, estimate_prior, log_odds
from livt_hf.metrics import best_thresholds


def estimated_prior(head: LongTailHead, batches: Batches, accelerator: Accelerator) -> PriorEstimate:
    """The class prior of the images of all processes by EM on their training posteriors, labels unseen.

    Posteriors go through a temporary file of 4 bytes per image and class; memory holds one block of them at a time.
    """

    def total(sums: Tensor) -> Tensor:
        if accelerator.num_processes == 1:
            return sums
        return accelerator.reduce(sums.to(accelerator.device), "sum").cpu()

    posteriors = on_disk((head.training_posterior(logits).exp() for logits, _ in batches), len(head.prior))
    return estimate_prior(posteriors, head.prior, total)


def calibrate(model: PreTrainedModel, loader: Iterable[dict], accelerator: Accelerator) -> Calibration:
    """Fit the calibration of a model's head on held-out images of all processes, and put it into the model's config.

    Where an image may have several labels, it comes with the threshold of each, at its frequency under the test prior.
    Every process keeps the logits of all held-out images: 4 bytes per image and class.
    """
    head = model.head
    pairs = [(logits.cpu(), batch["labels"].cpu()) for logits, batch in logits_of(model, loader, accelerator)]
    logits, labels = (torch.cat(parts) for parts in zip(*gather_object(pairs), strict=True))
    logits = logits.to(accelerator.device)
    calibration = fit_calibration(head.fitted_posterior(logits).cpu(), labels, head.prior)
    _keep(model, calibration)
    if head.multi_label:
        thresholds = best_thresholds(head.posterior(logits).cpu(), labels, _odds_ratio(head.settings))
        calibration = dataclasses.replace(calibration, thresholds=thresholds)
        _keep(model, calibration)
    return calibration


def _odds_ratio(settings: LongTailConfig) -> Tensor | float:
    """How many times as likely each label is under the test prior as among held-out images, as odds. (C,)"""
    if settings.test_prior is None:
        return 1.0
    served = torch.tensor(settings.test_prior, dtype=torch.float64)
    return (torch.logit(served) - log_odds(settings.class_counts, settings.num_images)).exp()


def _keep(model: PreTrainedModel, calibration: Calibration) -> None:
    model.config.long_tail = LongTailConfig.from_dict(
        {**model.config.long_tail, "calibration": dataclasses.asdict(calibration)}
    )
