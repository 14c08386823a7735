"""Class priors: from counts, from files, and under a change of serving prior.

Signs, once and for all. Training adds `bias = tau * B` to the logits z, so sigma(z + bias) (or softmax(z + bias))
estimates the posterior under the *training* prior pi. Serving under a prior q needs P_q(j|x) ~ p_j * q_j / pi_j:
divide by the prior one comes from, multiply by the one one goes to. The paper's rule, argmax z, drops the bias;
for a softmax head the two agree under the uniform prior, for a sigmoid head they agree only with two classes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.files import read_values
from livt_hf.specs import matches_type
from livt_hf.text import shorten

_DEVICE = "cpu"  # not every device has float64, and on the default "meta" no prior could be checked
_LARGEST = 1e18  # number of images that a file may claim: sums of larger ones could become infinite

Prior = Literal["uniform"] | Sequence[float] | Tensor | None


def log_odds(class_counts: Sequence[int], num_images: int | None = None) -> Tensor:
    """Return logit(pi_j) = log n_j - log(N - n_j), exact also for 1 image of 10 million."""
    counts = torch.as_tensor(class_counts, dtype=torch.float64, device=_DEVICE)
    total = counts.sum() if num_images is None else counts.new_tensor(num_images)
    return counts.log() - (total - counts).log()


def class_prior(class_counts: Sequence[int], num_images: int | None = None) -> Tensor:
    """Return pi_j = n_j / N; N is `num_images`, or by default the sum of the counts."""
    counts = torch.as_tensor(class_counts, dtype=torch.float64, device=_DEVICE)
    return counts / (counts.sum() if num_images is None else num_images)


def as_prior(prior: Prior, num_classes: int, *, multi_label: bool = False, what: str = "prior") -> Tensor:
    """Return a prior given as "uniform" or numbers as a checked tensor; zeros are allowed."""
    if isinstance(prior, str):
        if prior != "uniform":
            raise LiVTError(f"{what}={prior!r} is not known; use 'uniform' or {num_classes} probabilities.")
        if multi_label:
            raise LiVTError(
                f"{what}='uniform' has no meaning where an image may have several labels; pass one number per class."
            )
        prior = [1 / num_classes] * num_classes
    if isinstance(prior, Mapping):
        raise LiVTError(f"{what} names classes; pass its {len(prior)} numbers as a list, in the order of the classes.")
    prior = torch.as_tensor(prior.cpu() if isinstance(prior, Tensor) else prior, dtype=torch.float64, device=_DEVICE)
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
    """Read a file with a number for each class (see `read_numbers`) as a distribution.

    Where an image may have several labels, the numbers are the shares of images with each label and stay as they are.
    """
    content = read_numbers(path, labels, "prior")
    if min(content) < 0 or sum(content) <= 0:
        raise LiVTError(f"the prior in {path} must hold frequencies: none negative, not all zero.")
    if multi_label:
        return as_prior(content, len(labels), multi_label=True, what=f"the prior in {path}").tolist()
    return [value / sum(content) for value in content]


def read_numbers(path: str, labels: Sequence[str], what: str) -> list[float]:
    """Read a JSON or YAML file with a number for each class, as a list or by class name; `what` is for errors."""
    content = read_values(Path(path))
    if isinstance(content, dict):
        name, times = Counter(labels).most_common(1)[0]
        if times > 1:
            raise LiVTError(
                f"{path} ({what}) goes by name, but two classes are called {name!r}; give a list in class order."
            )
        names = {str(name): value for name, value in content.items()}
        missing, unknown = sorted(set(labels) - set(names)), sorted(set(names) - set(labels))
        if missing or unknown:
            problems = {"lacks the classes": missing[:10], "has unknown classes": unknown[:10]}
            how = " and ".join(f"{words} {classes}" for words, classes in problems.items() if classes)
            raise LiVTError(f"{path} ({what}) {how}; name each class of the model once.")
        content = [names[label] for label in labels]
    if not matches_type(content, list[float]) or len(content) != len(labels):
        raise LiVTError(f"{path} must hold {len(labels)} numbers, as a list in class order or by class name.")
    # Written this way so that NaN fails the check.
    wrong = next((value for value in content if not -_LARGEST < value < _LARGEST), None)
    if wrong is not None:
        raise LiVTError(f"{path} ({what}) holds {shorten(wrong)}; give a finite number for each class.")
    return content


def numbers_by_name(values: Sequence[float], labels: Sequence[str]) -> dict[str, float] | list[float]:
    """Return numbers by class name, or as a list where names repeat, as `read_numbers` reads them."""
    named = dict(zip(labels, values, strict=True))
    return named if len(named) == len(labels) else list(values)  # "crane" is a bird and a machine


def tempered_prior(prior: Tensor, exponent: float) -> Tensor:
    """Return pi^t, scaled to sum 1: uniform at exponent 0, the training prior at 1. (C,)"""
    return torch.softmax(exponent * prior.double().log(), dim=-1)


def shift_prior(log_posterior: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return P_q(j|x) = p_j q_j / pi_j, normalised over the classes. (B, C)"""
    shift = (target.cpu().double().log() - source.cpu().double().log()).to(log_posterior)
    return (log_posterior + shift).softmax(-1)


def shift_odds(log_odds: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return probabilities under another prior where images may have several labels: odds times prior odds ratio."""
    shift = (torch.logit(target.cpu().double()) - torch.logit(source.cpu().double())).to(log_odds)
    return (log_odds + shift).sigmoid()
