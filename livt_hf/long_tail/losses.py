"""The paper's logit biases (Theorems 1-3) and the losses it compares, as pure functions of logits and targets.

Every loss takes `logits` (B, C) and `targets` (B, C), which are one-hot, soft or, for sigmoid losses, multi-hot. It
sums over the classes and returns one number per image (B,), which the head averages. `LOSSES` says of each loss what a
model needs to know. Half-precision logits are raised to float32 first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from livt_hf.long_tail.loss_table import LOSSES, PACKAGED, LossDefinition, implement_loss, register_loss  # noqa: F401
from livt_hf.long_tail.priors import Prior, as_prior, class_prior, log_odds

if TYPE_CHECKING:
    from livt_hf.long_tail.config import LongTailConfig


def balanced_ce_bias(class_counts: Sequence[int], test_prior: Prior = None) -> Tensor:
    """Return the logit bias of a softmax loss (Theorem 1): log pi_s - log pi_t.

    Args:
        class_counts: training images per class; pi_s is their share.
        test_prior: pi_t, "uniform" or one probability per class; None leaves its term out.

    Returns:
        The bias, of shape (C,).

    Example:
        >>> balanced_ce_bias([75, 25], "uniform").exp()
        tensor([1.5000, 0.5000])
    """
    bias = class_prior(class_counts).log()
    if test_prior is not None:
        bias = bias - as_prior(test_prior, len(class_counts), what="test_prior").log()
    return bias.float()


def balanced_bce_bias(
    class_counts: Sequence[int], test_prior: Prior = "uniform", *, num_images: int | None = None
) -> Tensor:
    """Return the logit bias of a sigmoid loss (Theorem 3): logit(pi_s) - logit(pi_t).

    Args:
        class_counts: training images per class; pi_s is their share.
        test_prior: pi_t; "uniform" gives Eq. 13, log pi - log(1 - pi) + log(C - 1), and None Theorem 2, logit(pi_s).
        num_images: number of training images, where an image may have several labels.

    Returns:
        The bias, of shape (C,).

    Example:
        >>> balanced_bce_bias([75, 25], None).exp()
        tensor([3.0000, 0.3333])
    """
    bias = log_odds(class_counts, num_images)
    if test_prior is not None:
        prior = as_prior(test_prior, len(class_counts), multi_label=num_images is not None, what="test_prior")
        bias = bias - torch.logit(prior)
    return bias.float()


def normalize_class_weights(weights: Tensor) -> Tensor:
    """Scale class weights to the sum C, so that the loss keeps its size. (C,)"""
    return (weights * len(weights) / weights.sum()).float()


def effective_number_weights(class_counts: Sequence[int], beta: float) -> Tensor:
    """Return class-balanced weights (1 - beta) / (1 - beta^n), scaled to sum C (Cui et al., 2019). (C,)"""
    counts = torch.as_tensor(class_counts, dtype=torch.float64)
    return normalize_class_weights(1 / -torch.expm1(counts * torch.tensor(beta, dtype=torch.float64).log()))


def inverse_count_weights(class_counts: Sequence[int]) -> Tensor:
    """Return weights 1 / n, scaled to sum C: the lambda_k of Park et al. (2021). (C,)"""
    return normalize_class_weights(1 / torch.as_tensor(class_counts, dtype=torch.float64))


def class_weighted(targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets (B, C) and image weights (B,) that weight every image by the class weight of its label.

    Soft targets t mean the mixture of the hard losses f_y. Weighted it is sum_y t_y w_y f_y, which is W times the
    mixture under the targets t w / W, with W = sum_y t_y w_y.
    """
    weighted = targets * weights
    total = weighted.sum(dim=-1, keepdim=True)  # (B, 1)
    return weighted / total, total.squeeze(-1)


def ldam_margins(class_counts: Sequence[int], max_margin: float) -> Tensor:
    """Return margins n^(-1/4), scaled so that the rarest class has `max_margin` (Cao et al., 2019). (C,)"""
    margins = torch.as_tensor(class_counts, dtype=torch.float64) ** -0.25
    return (margins * max_margin / margins.max()).float()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * _raised(logits).log_softmax(-1)).sum(dim=-1)


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logits = _raised(logits)
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").sum(dim=-1)


def negative_tolerant_bce(logits: Tensor, targets: Tensor, tolerance: float) -> Tensor:
    """Compute NT-BCE, whose negative term softplus(lambda z) / lambda forgives small negatives (Wu et al., 2020)."""
    logits = _raised(logits)
    positive = targets * F.softplus(-logits)
    negative = (1 - targets) * F.softplus(tolerance * logits) / tolerance
    return (positive + negative).sum(dim=-1)


def ldam(logits: Tensor, targets: Tensor, margins: Tensor, scale: float) -> Tensor:
    """Compute the cross-entropy of s (z_k - m_y [k = y]); for soft targets the mixture of the hard losses.

    For every y at once it is softplus(R_y - s (z_y - m_y)) with R_y the logsumexp of the other classes: that of all
    classes plus log(1 - p_y), which is accurate where p_y is at most 1/2. The top class is summed without itself.
    """
    logits = scale * _raised(logits)  # (B, C)
    top = logits.argmax(-1, keepdim=True)  # (B, 1)
    below_top = logits.softmax(-1).scatter(-1, top, 0.0)
    rest = logits.logsumexp(-1, keepdim=True) + torch.log1p(-below_top)  # (B, C)
    rest = rest.scatter(-1, top, logits.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True))
    return (targets * F.softplus(rest - logits + scale * margins)).sum(dim=-1)


def focal(logits: Tensor, targets: Tensor, gamma: float) -> Tensor:
    """Compute the focal loss -(1 - p_y)^gamma log p_y (Lin et al., 2017), p by softmax; 0 is cross-entropy.

    For soft targets it is the mixture of the hard losses.
    """
    log_p = _raised(logits).log_softmax(-1)
    wrong = -torch.expm1(log_p)  # 1 - p, accurate where p is almost 1
    # Clamped, for a power below one has no slope at zero.
    return -(targets * wrong.clamp_min(torch.finfo(wrong.dtype).tiny) ** gamma * log_p).sum(dim=-1)


def lade_regulariser(logits: Tensor, targets: Tensor, prior: Tensor, strength: float) -> Tensor:
    """Compute LADE's Donsker-Varadhan term (Hong et al., 2021), for hard labels only.

    It is one number for the whole batch. A class without an image in the batch has no mean logit; its partition term
    stays.
    """
    logits = _raised(logits)
    images, classes = logits.shape
    present = targets.sum(dim=0)  # (C,)
    mean_logit = (targets * logits).sum(dim=0) / present.clamp_min(1)  # (C,)
    spread = logits - prior.log() - math.log(classes)
    partition = spread.logsumexp(dim=0) - math.log(images)  # (C,)
    return -(prior * (mean_logit - partition - strength * partition**2)).sum()


def influence_balanced(logits: Tensor, targets: Tensor, features: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Compute IB: w_y cross-entropy / influence ||softmax - y||_1 ||h||_1 (Park et al., 2021). Hard labels only."""
    logits = _raised(logits)
    influence = (logits.softmax(-1) - targets).abs().sum(-1) * features.float().abs().sum(-1)  # (B,)
    loss = -(weights * targets * logits.log_softmax(-1)).sum(dim=-1)
    return loss * alpha / (influence + 1e-3)


def _raised(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class ClassStatistics:
    """Statistics of the class counts, one number per class (C,)."""

    prior: Tensor  # n_j / N
    class_weight: Tensor  # `class_weights` of the config, else by the effective number of images; they sum to C
    inverse_count: Tensor  # 1 / n_j, scaled like the weights
    margin: Tensor  # LDAM's


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss function, for one batch."""

    logits: Tensor  # z (B, C), float32
    adjusted: Tensor  # z + tau B for a balanced loss, z otherwise (B, C)
    targets: Tensor  # (B, C)
    features: Tensor | None  # what the classifier saw (B, D), where the loss says that it uses features
    classes: ClassStatistics | None  # None where the head does not know the class counts
    settings: "LongTailConfig"
    progress: float  # how much of the training is done, from 0 to 1


@implement_loss("ce", "bal_ce", "cb_ce")
def _ce(batch: LossInputs) -> Tensor:
    return cross_entropy(batch.adjusted, batch.targets)


@implement_loss("bce", "bal_bce", "cb_bce")
def _bce(batch: LossInputs) -> Tensor:
    return binary_cross_entropy(batch.adjusted, batch.targets)


@implement_loss("ldam")
def _ldam(batch: LossInputs) -> Tensor:
    """Compute LDAM on a plain linear classifier, as in the paper; Cao et al. add `normalised_classifier` and DRW."""
    return ldam(batch.adjusted, batch.targets, batch.classes.margin, batch.settings.ldam_scale)


@implement_loss("focal")
def _focal(batch: LossInputs) -> Tensor:
    return focal(batch.adjusted, batch.targets, batch.settings.focal_gamma)


@implement_loss("lade")
def _lade(batch: LossInputs) -> Tensor:
    settings = batch.settings
    regulariser = lade_regulariser(batch.logits, batch.targets, batch.classes.prior, settings.lade_lambda)
    return cross_entropy(batch.adjusted, batch.targets).mean() + settings.lade_weight * regulariser


@implement_loss("ib")
def _ib(batch: LossInputs) -> Tensor:
    if batch.progress < batch.settings.ib_warmup:
        return cross_entropy(batch.adjusted, batch.targets)
    weights, alpha = batch.classes.inverse_count, batch.settings.ib_alpha
    return influence_balanced(batch.adjusted, batch.targets, batch.features, weights, alpha)


@implement_loss("nt_bce", "bal_nt_bce")
def _nt_bce(batch: LossInputs) -> Tensor:
    return negative_tolerant_bce(batch.adjusted, batch.targets, batch.settings.nt_lambda)
