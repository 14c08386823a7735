"""What images tell about a classifier without being trained on: their class prior, and how to calibrate its head."""

import tempfile
from collections.abc import Iterable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from livt_hf.evaluation.models import check_posterior, head_of
from livt_hf.evaluation.running import logits_of
from livt_hf.long_tail.calibration import Calibration, fit_calibration
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.priors import PriorEstimate, estimate_prior


def estimated_prior(model: PreTrainedModel, loader: Iterable[dict], accelerator: Accelerator) -> PriorEstimate:
    """The class prior of the images of all processes by EM on the model's training posteriors, labels unseen.

    Posteriors go through a temporary file of 4 bytes per image and class; memory holds one batch of them at a time.
    """
    head = model.head

    def total(sums: Tensor) -> Tensor:
        if accelerator.num_processes == 1:
            return sums
        return accelerator.reduce(sums.to(accelerator.device), "sum").cpu()

    with tempfile.TemporaryFile() as file:
        images = 0
        for logits, _ in logits_of(model, loader, accelerator):
            posterior = head.training_posterior(logits).exp().cpu().numpy()
            file.write(posterior.astype(np.float32).tobytes())
            images += len(posterior)
        file.flush()
        shape = (images, len(head.prior))
        stored = np.memmap(file, np.float32, "r+", shape=shape) if images else np.zeros(shape, np.float32)
        return estimate_prior(torch.from_numpy(stored), head.prior, total)


def calibrate(model: PreTrainedModel, loader: Iterable[dict], accelerator: Accelerator) -> Calibration:
    """Fit the calibration of a model's head on held-out images of all processes, and put it into the model's config.

    Every process keeps the posteriors of all held-out images: 4 bytes per image and class.
    """
    check_posterior(model)
    head = head_of(model)
    pairs = [
        (head.fitted_posterior(logits).cpu(), batch["labels"].cpu())
        for logits, batch in logits_of(model, loader, accelerator)
    ]
    if accelerator.num_processes > 1:
        pairs = gather_object(pairs)
    fitted, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    calibration = fit_calibration(fitted, labels, head.prior)
    model.config.long_tail = LongTailConfig.from_dict({**model.config.long_tail, "calibration": calibration.to_dict()})
    return calibration
