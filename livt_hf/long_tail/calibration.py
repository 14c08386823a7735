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

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from livt_hf.errors import LiVTError

# Standard deviations of the Gaussian priors around the identity: of log(scale), of odds and of the offsets. The last
# one is learned from the held-out images, as if OFFSET_WEIGHT further classes had shown this spread.
SCALE_SPREAD, ODDS_SPREAD, OFFSET_SPREAD, OFFSET_WEIGHT = 0.5, 0.5, 0.3, 10
ERROR_SPREAD = 0.4  # the least spread that errors of the offsets assume: few images make it look smaller than it is
MIN_IMAGES = 20  # with fewer, even one temperature is guesswork
# By how much the log evidence must favour a scale and odds over none: by MIN_IMAGES / images more, as what few images
# favour by chance is far off. At 0, exact heads lose .02 nats on 30 images, and at 1 up to .27 on 20.
# Two parameters cost 1 / images nats on average, which is nothing from _MANY images on.
_MARGIN, _MANY = 1.0, 5000
_ROUNDS = 4  # of learning the spread of the offsets
_BLOCK = 2**20  # posteriors looked at in one piece
_SATURATED, _TRACE = 16.0, 1e-5  # log-odds above which a sigmoid is 1 in float32, and the part of them that is kept


@dataclass(frozen=True)
class Calibration:
    """A correction of a head's posterior, saved as `config.long_tail.calibration`.

    Attributes:
        scale, odds, offsets: see the formula of this module; 1, 0 and zeros change nothing.
        num_images: number of held-out images it was fitted on.
        thresholds: where an image may have several labels, the probability from which on each label is given.
        offset_errors, scale_error: standard deviations that the images leave open, of each offset and of log(scale);
            None in files of version 0.2.
        split, fingerprint: which images these were: the name of their split, and its `fingerprint`; None if unknown.
        objective: what the deployment prior pi^t was chosen for; None serves under the test prior of the training.
        exponents: t for each objective, chosen on these images; None where an image may have several labels.
        curve: accuracy, mean class accuracy and macro F1 on these images for every t.
    """

    scale: float
    odds: float
    offsets: list[float]
    num_images: int
    thresholds: list[float] | None = None
    offset_errors: list[float] | None = None
    scale_error: float | None = None
    split: str | None = None
    fingerprint: str | None = None
    objective: str | None = None
    exponents: dict[str, float] | None = None
    curve: list[dict[str, float]] | None = None


def apply_calibration(
    log_posterior: Tensor, calibration: Calibration, prior: Tensor, log_odds: Tensor | None = None
) -> Tensor:
    """Return the corrected log P(j|x) under the training prior, of shape (B, C).

    Args:
        log_posterior: log p_j as the head fitted it, (B, C).
        calibration: the correction.
        prior: the training prior, (C,).
        log_odds: log p_j - log (1 - p_j) where known: log p_j alone cannot tell two sigmoids apart that are almost 1.
    """
    prior, offsets = prior.to(log_posterior), torch.tensor(calibration.offsets).to(log_posterior)
    log_odds = _log_odds(log_posterior) if log_odds is None else log_odds
    evidence, against = _evidence(log_posterior, log_odds, prior)
    evidence = calibration.scale * (evidence - calibration.odds * against)
    return (prior.log() + evidence + offsets + saturation_trace(log_odds)).log_softmax(-1)


def saturation_trace(log_odds: Tensor) -> Tensor:
    """Return what is added to log p_j to keep the order of sigmoids that are 1 in float32; 0 for all others."""
    return _TRACE * (log_odds - _SATURATED).clamp_min(0)


def calibrate_odds(log_odds: Tensor, calibration: Calibration, prior: Tensor) -> Tensor:
    """Return the corrected log-odds of each class of an image that may have several, of shape (B, C)."""
    base = torch.logit(prior.cpu().double()).to(log_odds)  # not every device has float64
    return base + calibration.scale * (log_odds - base) + torch.tensor(calibration.offsets).to(log_odds)


def fit_calibration(
    log_posterior: Tensor, labels: Tensor, prior: Tensor, log_odds: Tensor | None = None
) -> Calibration:
    """Fit a calibration on held-out images: the maximum a posteriori under Gaussian priors around the identity.

    The images should look like those of training class by class; how frequent the classes are among them does not
    matter, for their likelihood is that under their own class frequencies. A class without images keeps the offset 0.
    Scale and odds stay at 1 and 0 unless the evidence (the marginal likelihood in Laplace's approximation) clearly
    favours others, so a head that is right already keeps its posterior.

    Args:
        log_posterior: log p_j as training fitted it under the training prior, (N, C); log-odds where an image may
            have several labels.
        labels: class ids (N,), or rows of 0 and 1 (N, C) where an image may have several.
        prior: the training prior, (C,).
        log_odds: as in `apply_calibration`.

    Returns:
        The calibration, with `offset_errors` but without `thresholds`.

    Raises:
        LiVTError: for fewer than `MIN_IMAGES` images, or posteriors that are not finite.
    """
    finite = int(torch.isfinite(log_posterior).all(-1).sum())
    if finite < len(labels):
        raise LiVTError(
            f"calibration needs held-out images with finite posteriors; {finite} of {len(labels)} have one."
        )
    if len(labels) < MIN_IMAGES:
        raise LiVTError(
            f"calibration needs at least {MIN_IMAGES} held-out images, and {len(labels)} were given; hold out or "
            "label more, or use the model uncalibrated."
        )
    objective = _Objective(log_posterior, labels, prior, log_odds)
    chosen = _fit(objective, shaped=True)
    if len(labels) < _MANY:
        plain = _fit(objective, shaped=False)
        margin = _MARGIN + MIN_IMAGES / len(labels)
        chosen = chosen if chosen.evidence > plain.evidence + margin else plain
    scale, odds = chosen.shape[0].exp().item(), chosen.shape[1].clamp(0, 1).item()
    errors = dict(offset_errors=chosen.errors.tolist(), scale_error=chosen.scale_error)
    return Calibration(scale, odds, chosen.offsets.tolist(), len(labels), **errors)


class _Fit(NamedTuple):
    """A maximum a posteriori: log(scale) and odds, offsets, errors of both, and the log evidence of the model."""

    shape: Tensor
    offsets: Tensor
    errors: Tensor
    scale_error: float
    evidence: float


def _fit(objective: "_Objective", shaped: bool) -> _Fit:
    """Fit the offsets, and with `shaped` the scale and odds as well."""
    shape = torch.zeros(2, dtype=torch.float64, requires_grad=shaped)
    offsets = torch.zeros(len(objective.prior), dtype=torch.float64, requires_grad=True)
    spread = OFFSET_SPREAD
    for _ in range(_ROUNDS):
        _maximise(objective, shape, offsets, spread)
        curvature = objective.curvature(shape.detach(), offsets.detach())
        variance, used = 1 / (spread**-2 + curvature["offsets"]), spread
        # The spread that explains the offsets, by the number of them that the images determine (MacKay, 1992).
        determined = OFFSET_WEIGHT + (1 - variance / spread**2).sum().item()
        spread = ((OFFSET_WEIGHT * OFFSET_SPREAD**2 + offsets.detach().square().sum().item()) / determined) ** 0.5
        if abs(spread / used - 1) < 0.1:
            break
    with torch.no_grad():
        evidence = -objective.loss(shape, offsets) - _penalty(shape, offsets, used)
        evidence -= torch.log1p(used**2 * curvature["offsets"]).sum() / 2
        precision = torch.diag(torch.tensor([SCALE_SPREAD**-2, ODDS_SPREAD**-2]).double()) + curvature["shape"]
        if shaped:
            evidence -= torch.logdet(precision) / 2 + math.log(SCALE_SPREAD * ODDS_SPREAD)
        variance = 1 / (max(used, ERROR_SPREAD) ** -2 + curvature["offsets"])
        precision -= (curvature["cross"] * variance) @ curvature["cross"].T
        scale_error = precision.inverse()[0, 0].clamp(0, SCALE_SPREAD**2).sqrt().item()
    return _Fit(shape.detach(), offsets.detach(), variance.sqrt(), scale_error, evidence.item())


def _maximise(objective: "_Objective", shape: Tensor, offsets: Tensor, spread: float) -> None:
    """Move `shape` and `offsets` to the maximum a posteriori, from where they are."""
    moving = [part for part in (shape, offsets) if part.requires_grad]
    optimizer = torch.optim.LBFGS(moving, max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = _penalty(shape, offsets, spread) / objective.num_images
        total.backward()
        return total.detach() + objective.loss(shape, offsets, backward=True) / objective.num_images

    optimizer.step(closure)


def _penalty(shape: Tensor, offsets: Tensor, spread: float) -> Tensor:
    scale, odds = shape
    return ((scale / SCALE_SPREAD).square() + (odds / ODDS_SPREAD).square() + (offsets / spread).square().sum()) / 2


class _Objective:
    """The negative log-likelihood of held-out images, block by block, so that memory does not grow with them."""

    def __init__(self, log_posterior: Tensor, labels: Tensor, prior: Tensor, log_odds: Tensor | None):
        self.several, self.num_images, self.prior = labels.ndim == 2, len(labels), prior.cpu().double()
        counts = labels.double().sum(0).cpu() if self.several else torch.bincount(labels.cpu(), minlength=len(prior))
        self.frequency = counts.double() / len(labels)
        rows = max(1, _BLOCK // len(prior))
        self.blocks = [part.split(rows) for part in (log_posterior, labels, log_odds) if part is not None]

    def loss(self, shape: Tensor, offsets: Tensor, backward: bool = False) -> Tensor:
        """Return the sum over images; with `backward`, gradients of its mean are added to the parameters."""
        total = torch.zeros((), dtype=torch.float64)
        for scores, targets, _ in self._scored(shape, offsets):
            if self.several:
                part = F.binary_cross_entropy_with_logits(scores, targets, reduction="sum")
            else:
                part = F.cross_entropy(scores, targets, reduction="sum")
            if backward:
                (part / self.num_images).backward()
            total += part.detach()
        return total

    def curvature(self, shape: Tensor, offsets: Tensor) -> dict[str, Tensor]:
        """Return the Gauss-Newton curvature: in log(scale) and odds (2, 2), in the offsets (C,), across (2, C).

        Of that in the offsets it is the diagonal.
        """
        sizes = {"shape": (2, 2), "offsets": (len(offsets),), "cross": (2, len(offsets))}
        found = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
        for scores, _, moved in self._scored(shape, offsets):
            chances = scores.sigmoid() if self.several else scores.softmax(-1)
            weights = chances * (1 - chances)
            found["offsets"][self._learned] += weights.sum(0)
            if not self.several:
                weights, moved = chances, moved - (moved * chances).sum(-1, keepdim=True)
            found["shape"] += torch.einsum("knc,lnc,nc->kl", moved, moved, weights)
            found["cross"][:, self._learned] += (moved * weights).sum(1)
        return found

    @property
    def _learned(self) -> Tensor:
        """Return which classes the images tell something about."""
        return (self.frequency > 0) & (self.frequency < 1) if self.several else self.frequency > 0

    def _scored(self, shape: Tensor, offsets: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield scores (B, C), targets, and how scores move with log(scale) and odds (2, B, C), of learned classes."""
        learned = self._learned
        start = torch.logit(self.frequency[learned]) if self.several else self.frequency[learned].log()
        renumbered = learned.long().cumsum(0) - 1
        for block, targets, *known in zip(*self.blocks, strict=True):
            block, targets = block.cpu().double(), targets.cpu()
            if self.several:
                targets = targets[:, learned].double()
                evidence = (block - torch.logit(self.prior))[:, learned]
                against = torch.zeros_like(evidence)
            else:
                targets = renumbered[targets.long()]
                log_odds = known[0].cpu().double() if known else _log_odds(block)
                evidence, against = (part[:, learned] for part in _evidence(block, log_odds, self.prior))
            scale, odds = shape[0].exp(), shape[1].clamp(0, 1)  # in the loop: each block has a graph of its own
            scaled = scale * (evidence - odds * against)
            yield start + scaled + offsets[learned], targets, torch.stack([scaled, -scale * against]).detach()


def _log_odds(log_posterior: Tensor) -> Tensor:
    """Return log p - log (1 - p), finite also where p was rounded to 1."""
    complement = -torch.expm1(log_posterior.clamp(max=-torch.finfo(log_posterior.dtype).eps))
    return log_posterior - complement.log()


def _evidence(log_posterior: Tensor, log_odds: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Return log (p_j / pi_j) and log ((1 - p_j) / (1 - pi_j)), each (B, C)."""
    return log_posterior - prior.log(), log_posterior - log_odds - torch.log1p(-prior)
