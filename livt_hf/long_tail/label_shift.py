"""Label shift: the class prior of unlabelled images, and whether they bear it out.

EM (Saerens et al., 2002) finds the prior under which the images are most likely. It cannot tell a shifted prior from
evidence that favours some classes, nor from the luck of few images. So an estimate comes with a bootstrap over images,
in which the evidence of each class is disturbed by as much as calibration leaves open.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.long_tail.calibration import OFFSET_SPREAD, OFFSET_WEIGHT, Calibration

LEVEL = 0.05  # of the test of the uniform prior, and of the gain that must not be negative
# Of the test of the training prior, under which most images are of well-known classes: small errors of calibration
# look like a shift there.
TRAINING_LEVEL = 0.01
HARM = 0.001  # loss of accuracy that is noise
# Resamples for each error of log(scale), in standard deviations: the middles of fifths of a normal distribution.
_WORLDS, _SCALES = 40, (-1.4, -0.53, 0.0, 0.53, 1.4)
_SCALE_ERROR = 0.2  # of log(scale) where no calibration says it
_INFLATION = 1.6  # of errors in tests: errors neglect that those of several classes go together
_LEAST = -700.0  # log of what is 0
_BLOCK = 2**20  # posteriors looked at in one piece
_STEPS, _TOLERANCE = 1000, 1e-4  # of EM, and of EM in resamples:
_WORLD_STEPS, _WORLD_TOLERANCE = 100, 1e-3


@dataclass(frozen=True)
class PriorEstimate:
    """A class prior estimated from unlabelled images, and how much of it the images bear out.

    Attributes:
        prior: the estimate, (C,).
        bounds: 90 % interval of each class, (2, C), over images and over what calibration leaves open.
        shift: distance from the uniform prior: the sum of absolute differences over the classes.
        variation: mean distance of the resampled estimates from this one.
        p_uniform, p_training: p-values of the uniform and of the training prior.
        gain: accuracy that the estimate adds to the better of these two, as a fraction: 5 % quantile over resamples.
    """

    prior: Tensor
    bounds: Tensor
    shift: float
    variation: float
    p_uniform: float
    p_training: float
    gain: float

    @property
    def reliable(self) -> bool:
        """Return True if the images exclude the uniform and the training prior, and it does no harm."""
        return self.p_uniform <= LEVEL and self.p_training <= TRAINING_LEVEL and self.gain >= -HARM


def estimate_prior(posterior: Tensor, source: Tensor, calibration: Calibration | None = None) -> PriorEstimate:
    """Estimate the class prior of unlabelled images from their posteriors under the training prior.

    The estimate is the maximum a posteriori under a Dirichlet prior of one image per class, so that a class that looks
    absent keeps a chance. The bootstrap looks at no more than some thousand images.

    Args:
        posterior: P_s(j|x) up to a factor, (B, C). It is read in blocks, so it may lie in a mapped file. Rows of zeros
            say nothing and are left out.
        source: the training prior, (C,).
        calibration: that of the posteriors, whose errors disturb the evidence; without one they are those of a good
            head.

    Returns:
        The estimate.

    Example:
        >>> estimate = estimate_prior(posterior, class_prior(counts))
        >>> prior = estimate.prior if estimate.reliable else "uniform"
    """
    classes = len(source)
    if posterior.ndim != 2 or posterior.shape[1] != classes or len(posterior) == 0:
        raise LiVTError(f"estimating a prior needs posteriors (images, classes), got shape {tuple(posterior.shape)}.")
    blocks = posterior.split(max(1, _BLOCK // classes))
    if not all(torch.isfinite(block).all() for block in blocks):
        raise LiVTError("the posteriors contain NaN or infinity; evaluate the model first and drop those images.")
    if not any((block > 0).any() for block in blocks):
        raise LiVTError("the posteriors are all zero; they say nothing about a prior.")
    ratio = 1 / source.cpu().double()
    prior = _em(lambda: (block.double() for block in blocks), ratio[:, None])[:, 0]
    step = -(-len(posterior) // min(2000, max(1000, 200_000 // classes)))
    return _Worlds(posterior[::step].double(), ratio, calibration).examine(prior)


def _em(
    blocks: Callable[[], Iterable[Tensor]],
    ratio: Tensor,
    weights: Tensor | None = None,
    start: Tensor | None = None,
    steps: int = _STEPS,
    tolerance: float = _TOLERANCE,
) -> Tensor:
    """Return the priors (C, K) of images under K ratios of likelihood to posterior, weighted in K ways, (B, K)."""
    estimates = torch.full_like(ratio, 1 / len(ratio)) if start is None else start
    for _ in range(steps):
        factors, sums = ratio * estimates, torch.zeros_like(estimates)
        for block in blocks():
            mixed = block @ factors
            inverse = torch.where(mixed > 0, 1 / mixed, 0)  # a row of zeros says nothing
            sums += block.T @ (inverse if weights is None else weights * inverse)
        updated = factors * sums + 1
        updated /= updated.sum(0)
        moved = (updated - estimates).abs().sum(0).max()
        estimates = updated
        if moved < tolerance:
            break
    return estimates


class _Worlds:
    """Resamples of some images in which the evidence is off by what calibration leaves open.

    There are `_WORLDS` worlds for each of `_SCALES`, by which log(scale) may be off.
    """

    def __init__(self, posterior: Tensor, ratio: Tensor, calibration: Calibration | None):
        mass = posterior.sum(-1, keepdim=True)
        self.posterior, self.ratio = (posterior / mass)[mass[:, 0] > 0], ratio[:, None]
        self.generator = torch.Generator().manual_seed(0)
        errors = getattr(calibration, "offset_errors", None) or [OFFSET_SPREAD] * len(ratio)
        scale_error = getattr(calibration, "scale_error", None) or _SCALE_ERROR
        self.scales = [math.exp(scale_error * off) for off in _SCALES]
        self.disturbed = [self._disturbed(torch.tensor(errors).double()) for _ in self.scales]

    def _disturbed(self, errors: Tensor) -> Tensor:
        """Return factors of the evidence (C, K). The size of the errors is itself only known by some classes."""
        noise = torch.randn(len(errors), _WORLDS, generator=self.generator, dtype=torch.float64)
        known = torch.randn(OFFSET_WEIGHT, _WORLDS, generator=self.generator, dtype=torch.float64)
        return (errors[:, None] * noise / known.square().mean(0).sqrt()).exp()

    def examine(self, prior: Tensor) -> PriorEstimate:
        """Return the estimate with what the worlds tell about it."""
        uniform, source = torch.full_like(prior, 1 / len(prior)), 1 / self.ratio[:, 0]
        source /= source.sum()
        again, gains, statistics = [], [], {"uniform": [], "training": []}
        for scale, factors in zip(self.scales, self.disturbed, strict=True):
            # As it would be if log(scale) was off: evidence to the power of the scale.
            truth = (source.log() + scale * (self.posterior / source).log().clamp(min=_LEAST)).softmax(-1)
            weights = self._draw(torch.ones(len(truth), _WORLDS, dtype=torch.float64))
            disturbed = self.ratio * factors
            again.append(_world_em(truth, disturbed, weights, prior))
            gains.append(self._gains(truth, disturbed, prior, weights, again[-1]))
            disturbed = self.ratio * factors**_INFLATION
            fitted = truth @ (disturbed * _world_em(truth, disturbed, None, prior))
            for name, null in (("uniform", uniform), ("training", source)):
                expected = truth @ (disturbed * null[:, None]) / fitted
                statistics[name].append(self._likelihood_ratios(null, self._draw(expected)))
        found = torch.cat(again, dim=1)
        once = torch.ones(len(self.posterior), 1, dtype=torch.float64)
        p_values = {}
        for name, null in (("uniform", uniform), ("training", source)):
            worlds = torch.cat(statistics[name])
            reached = (worlds >= self._likelihood_ratios(null, once)).sum().item()
            p_values[f"p_{name}"] = (1 + reached) / (1 + len(worlds))
        return PriorEstimate(
            prior,
            found.quantile(torch.tensor([0.05, 0.95], dtype=found.dtype), dim=1),
            shift=(prior - uniform).abs().sum().item(),
            variation=(found - prior[:, None]).abs().sum(0).mean().item(),
            gain=torch.cat(gains).quantile(LEVEL).item(),
            **p_values,
        )

    def _likelihood_ratios(self, null: Tensor, weights: Tensor) -> Tensor:
        """Return log-likelihood ratios of the estimated prior to a null hypothesis, of images weighted in K ways."""
        best = _world_em(self.posterior, self.ratio.expand(-1, weights.shape[1]), weights, null)
        known = self.posterior @ (self.ratio * null[:, None])
        gained = torch.log(self.posterior @ (self.ratio * best) / known)
        return (weights * gained).sum(0)

    def _gains(self, truth: Tensor, disturbed: Tensor, prior: Tensor, weights: Tensor, again: Tensor) -> Tensor:
        """Return the accuracy that the estimate adds to the better of the uniform and the training prior. (K,)"""
        factors = disturbed * again
        mixed = truth @ factors
        accuracies = []
        for one in (prior * self.ratio[:, 0], self.ratio[:, 0], 1.0):
            rule = (self.posterior * one).argmax(-1, keepdim=True)
            right = truth.gather(1, rule) * factors[rule[:, 0]] / mixed  # (B, K)
            accuracies.append((weights * right).sum(0) / weights.sum(0))
        return accuracies[0] - torch.maximum(*accuracies[1:])

    def _draw(self, chances: Tensor) -> Tensor:
        """Draw as many images as there are with replacement; return how often each is drawn, (B, K)."""
        drawn = torch.multinomial(chances.T, len(chances), replacement=True, generator=self.generator)
        return torch.zeros_like(chances).T.scatter_add(1, drawn, torch.ones_like(chances).T).T.contiguous()


def _world_em(posterior: Tensor, ratio: Tensor, weights: Tensor | None, start: Tensor) -> Tensor:
    start = start[:, None].expand_as(ratio)
    return _em(lambda: [posterior], ratio, weights, start, steps=_WORLD_STEPS, tolerance=_WORLD_TOLERANCE)
