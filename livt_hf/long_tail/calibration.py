"""Calibration: from the posterior that training fitted to the one that the images bear out.

Mixup, smoothed labels and short training leave p_j, a head's posterior under the training prior pi, too unsure or too
sure, and dividing by pi multiplies that error. What an image says about class j, apart from the prior, is corrected by
one temperature and one offset per class (bias-corrected temperature scaling, Alexandari et al., 2020):

    log P(j|x) = log pi_j + scale * evidence_j + offset_j - log of the sum over classes
    evidence_j = log (p_j / pi_j) - odds * log ((1 - p_j) / (1 - pi_j))

Scaling the evidence and not the posterior keeps the prior where it is known. `odds` goes from 0, the log posterior,
which is exact for a head that fitted well, to 1, the log-odds, by which sigmoids that mixup kept unsure rank better
(beta calibration, Kull et al., 2017). Scale 1, odds 0 and offsets 0 change nothing.
Where an image may have several labels, each class is a question of its own, asked in log-odds.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from livt_hf.errors import LiVTError

# How far an offset strays without evidence, as the standard deviation of its Gaussian prior: a class moves halfway to
# its own offset at some 1 / 0.3^2 = 11 uncertain held-out images, so that few images leave the temperature alone.
OFFSET_SPREAD = 0.3
_BLOCK = 2**20  # posteriors looked at in one piece
_SURE = -1e-7  # the largest log p: its log (1 - p) is still finite


@dataclass(frozen=True)
class Calibration:
    """Parameters of the calibration and the number of held-out images; saved as `config.long_tail.calibration`.

    `thresholds`: where an image may have several labels, the probability from which on each label is predicted.
    """

    scale: float
    odds: float
    offsets: list[float]
    num_images: int
    thresholds: list[float] | None = None


def apply_calibration(log_posterior: Tensor, calibration: Calibration, prior: Tensor) -> Tensor:
    """Return log P(j|x) under the training prior, from log p_j. (B, C)"""
    prior, offsets = prior.to(log_posterior), torch.tensor(calibration.offsets).to(log_posterior)
    evidence = _evidence(log_posterior, prior, calibration.odds)
    return (prior.log() + calibration.scale * evidence + offsets).log_softmax(-1)


def calibrate_odds(log_odds: Tensor, calibration: Calibration, prior: Tensor) -> Tensor:
    """Return calibrated log-odds of each class, where an image may have several labels. (B, C)"""
    base = torch.logit(prior.cpu().double()).to(log_odds)  # not every device has float64
    return base + calibration.scale * (log_odds - base) + torch.tensor(calibration.offsets).to(log_odds)


def fit_calibration(log_posterior: Tensor, labels: Tensor, prior: Tensor) -> Calibration:
    """Fit a calibration on held-out images, with Gaussian priors on log(scale), logit(odds) and the offsets.

    `log_posterior` (N, C) is what training fitted, under the training prior `prior`, and `labels` are class ids (N,),
    or rows of 0 and 1 (N, C) where an image may have several: then `log_posterior` holds log-odds. The images should
    look like those of training class by class; how frequent the classes are among them does not matter, for their
    likelihood is that under their own class frequencies. A class without images keeps the offset 0.
    """
    finite = int(torch.isfinite(log_posterior).all(-1).sum())
    if len(labels) == 0 or finite < len(labels):
        raise LiVTError(
            f"calibration needs held-out images with finite posteriors; {finite} of {len(labels)} have one."
        )
    several, prior = labels.ndim == 2, prior.cpu().double()
    loss = _several_labels_loss if several else _one_label_loss
    frequency = labels.double().mean(0) if several else torch.bincount(labels, minlength=len(prior)) / len(labels)
    shape = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # log(scale), logit(odds)
    offsets = torch.zeros(len(prior), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([shape, offsets], max_iter=200, tolerance_grad=1e-8, line_search_fn="strong_wolfe")
    rows = max(1, _BLOCK // len(prior))

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = (shape.square().sum() + (offsets / OFFSET_SPREAD).square().sum()) / 2 / len(labels)
        total.backward()
        for block, targets in zip(log_posterior.split(rows), labels.split(rows), strict=True):
            part = loss(block.cpu().double(), targets.cpu(), prior, frequency, shape, offsets) / len(labels)
            part.backward()  # block by block, so that memory does not grow with the images
            total = total + part.detach()
        return total

    optimizer.step(closure)
    odds = 0.0 if several else shape[1].sigmoid().item()
    return Calibration(shape[0].exp().item(), odds, offsets.detach().tolist(), len(labels))


def _evidence(log_posterior: Tensor, prior: Tensor, odds: Tensor | float) -> Tensor:
    log_posterior = log_posterior.clamp(max=_SURE)
    against = torch.log(-torch.expm1(log_posterior)) - torch.log1p(-prior)
    return log_posterior - prior.log() - odds * against


def _one_label_loss(log_posterior, labels, prior, frequency, shape, offsets) -> Tensor:
    evidence = _evidence(log_posterior, prior, shape[1].sigmoid())
    scores = frequency.double().log() + shape[0].exp() * evidence + offsets
    return F.cross_entropy(scores, labels.long(), reduction="sum")


def _several_labels_loss(log_odds, targets, prior, frequency, shape, offsets) -> Tensor:
    seen = (frequency > 0) & (frequency < 1)  # the others have nothing to learn from
    evidence = log_odds - torch.logit(prior)
    scores = torch.logit(frequency) + shape[0].exp() * evidence + offsets
    return F.binary_cross_entropy_with_logits(scores[:, seen], targets[:, seen].double(), reduction="sum")
