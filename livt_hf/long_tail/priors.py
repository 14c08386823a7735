"""Class priors: from counts, under a change of serving prior, and estimated from unlabelled images.

Signs, once and for all. Training adds `bias = tau * B` to the logits z, so sigma(z + bias) (or softmax(z + bias))
estimates the posterior under the *training* prior pi. Serving under a prior q needs P_q(j|x) ~ p_j * q_j / pi_j:
divide by the prior one comes from, multiply by the one one goes to. The paper's rule, argmax z, drops the bias;
for a softmax head the two agree under the uniform prior, for a sigmoid head they agree only with two classes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import yaml
from torch import Tensor

from livt_hf.errors import LiVTError

Prior = Literal["uniform"] | Sequence[float] | Tensor | None


def log_odds(class_counts: Sequence[int], num_images: int | None = None) -> Tensor:
    """logit(pi_j) = log n_j - log(N - n_j): from the counts, so that 1 against 10 million loses nothing."""
    counts = torch.as_tensor(class_counts, dtype=torch.float64)
    total = counts.sum() if num_images is None else torch.tensor(float(num_images), dtype=torch.float64)
    return counts.log() - (total - counts).log()


def class_prior(class_counts: Sequence[int], num_images: int | None = None) -> Tensor:
    """pi_j = n_j / N; N is the sum of the counts, or the number of images where an image may have several labels."""
    counts = torch.as_tensor(class_counts, dtype=torch.float64)
    return counts / (counts.sum() if num_images is None else num_images)


def as_prior(prior: Prior, num_classes: int, *, multi_label: bool = False, what: str = "prior") -> Tensor:
    """A prior given as "uniform" or numbers, checked; zeros are allowed and give their classes probability zero."""
    if isinstance(prior, str):
        if prior != "uniform":
            raise LiVTError(f"{what}={prior!r} is not known; use 'uniform' or {num_classes} probabilities.")
        if multi_label:
            raise LiVTError(
                f"{what}='uniform' has no meaning where an image may have several labels; pass one number per class."
            )
        return torch.full((num_classes,), 1 / num_classes, dtype=torch.float64)
    prior = torch.as_tensor(prior, dtype=torch.float64)
    if prior.shape != (num_classes,):
        raise LiVTError(
            f"{what} has shape {tuple(prior.shape)}; it needs one number for each of {num_classes} classes."
        )
    if not torch.isfinite(prior).all() or (prior < 0).any() or (prior > 1).any():
        raise LiVTError(
            f"{what} spans {prior.min():g} to {prior.max():g}; probabilities lie between 0 and 1: divide counts by "
            "their sum."
        )
    if not multi_label and abs(prior.sum().item() - 1) > 1e-4:
        raise LiVTError(f"{what} sums to {prior.sum().item():g}; divide it by its sum so that it is a distribution.")
    return prior


def read_prior(path: str, labels: Sequence[str], *, multi_label: bool = False) -> list[float]:
    """A JSON or YAML file with a number for each class (a list in class order, or by class name) as a distribution.

    Where an image may have several labels, the numbers are the shares of images with each label and stay as they are.
    """
    content = _numbers_by_class(path, labels, "prior")
    if min(content) < 0 or sum(content) <= 0:
        raise LiVTError(f"the prior in {path} must hold frequencies: none negative, not all zero.")
    if multi_label:
        return as_prior(content, len(labels), multi_label=True, what=f"the prior in {path}").tolist()
    return [value / sum(content) for value in content]


def read_class_weights(path: str, labels: Sequence[str]) -> list[float]:
    """A JSON or YAML file with a positive weight for each class, as a list in class order or by class name."""
    return _numbers_by_class(path, labels, "class weights")


def _numbers_by_class(path: str, labels: Sequence[str], what: str) -> list[float]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LiVTError(f"{path} is no readable JSON or YAML file with a number for each class: {error}") from error
    if isinstance(content, dict):
        names = {str(name): value for name, value in content.items()}
        wrong = sorted(set(labels) ^ set(names))
        if wrong:
            raise LiVTError(
                f"the {what} in {path} and the model disagree on the classes {wrong[:10]}; name each class once."
            )
        content = [names[label] for label in labels]
    if (
        not isinstance(content, list)
        or len(content) != len(labels)
        or not all(isinstance(v, int | float) for v in content)
    ):
        raise LiVTError(f"{path} must hold {len(labels)} numbers, as a list in class order or by class name.")
    return content


def log_training_posterior(logits: Tensor, bias: Tensor, activation: Literal["softmax", "sigmoid"]) -> Tensor:
    """log P_s(j|x) for every class, from the logits z and the bias that training added to them. (B, C)"""
    adjusted = logits.float() + bias
    return adjusted.log_softmax(-1) if activation == "softmax" else torch.nn.functional.logsigmoid(adjusted)


def shift_prior(log_posterior: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """P_q(j|x) = p_j q_j / pi_j, normalised over the classes. (B, C)"""
    shift = (target.double().log() - source.double().log()).to(log_posterior)
    return (log_posterior + shift).softmax(-1)


def shift_odds(log_odds: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The same rule where images may have several labels: the odds of each class times the ratio of its prior odds."""
    shift = (torch.logit(target.double()) - torch.logit(source.double())).to(log_odds)
    return (log_odds + shift).sigmoid()


def estimate_prior(
    posterior: Tensor, source: Tensor, *, max_iterations: int = 1000, tolerance: float = 1e-6, floor: float = 1e-8
) -> Tensor:
    """The class prior of unlabelled images by EM (Saerens et al., 2002) from their training posteriors. (B, C) -> (C,)

    `posterior` rows are P_s(j|x), normalised here (sigmoids need not sum to 1). The likelihood is concave in the
    prior, so the start does not matter; `floor` keeps a class that looks absent from sticking at zero too early.
    """
    if posterior.ndim != 2 or len(posterior) == 0:
        raise LiVTError(f"estimating a prior needs posteriors (images, classes), got shape {tuple(posterior.shape)}.")
    if not torch.isfinite(posterior).all():
        raise LiVTError("the posteriors contain NaN or infinity; evaluate the model first and drop those images.")
    posterior = posterior.double()
    source = source.to(posterior)
    ratio = posterior / posterior.sum(-1, keepdim=True) / source  # (B, C): likelihoods up to a factor
    estimate = source
    for _ in range(max_iterations):
        joint = ratio * estimate
        updated = (joint / joint.sum(-1, keepdim=True)).mean(0).clamp_min(floor)  # (C,)
        updated = updated / updated.sum()
        if (updated - estimate).abs().sum() < tolerance:
            return updated
        estimate = updated
    return estimate


def has_collapsed(estimate: Tensor, posterior: Tensor, source: Tensor) -> bool:
    """Whether an estimate left less than half of the classes that EM's first step, from the uniform prior, still saw.

    Classes are counted by the exponential of the entropy. Posteriors that are surer than they are right drive EM
    further at every step; calibrated ones settle near the first.
    """
    likelihood = posterior.double() / source.to(posterior.double())
    first = (likelihood / likelihood.sum(-1, keepdim=True)).mean(0)  # (C,)
    return _effective_classes(estimate) < _effective_classes(first) / 2


def _effective_classes(prior: Tensor) -> float:
    return torch.special.entr(prior.double()).sum().exp().item()
