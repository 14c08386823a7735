"""Shifted test sets: long tails cut out of a balanced test set, the exam of serving under any class prior.

Forward ones are as the training set is, with its frequent classes frequent; backward ones are the other way round.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from livt_hf.data.subsample import exponential_counts, label_counts, long_tail_indices
from livt_hf.errors import LiVTError
from livt_hf.evaluation.exam import Exam
from livt_hf.evaluation.rules import ESTIMATED, PAPER, TRUE, UNIFORM, posterior_rule
from livt_hf.evaluation.running import Rule
from livt_hf.predictions import PredictionsInfo

_KEPT = ("accuracy", "mean_class_accuracy", "many", "medium", "few")


@dataclass
class ShiftedSet:
    """Rows of a test set that have a class prior (C,); a negative imbalance is backward."""

    imbalance: float
    rows: np.ndarray
    prior: torch.Tensor


def shifted_sets(asked: str, labels: np.ndarray, train_counts: np.ndarray, seed: int = 0) -> list[ShiftedSet]:
    """The sets that were asked for and the balanced one, from forward to backward; the seed picks their images."""
    present = label_counts(labels, len(train_counts))
    order = np.argsort(-np.asarray(train_counts), kind="stable")  # from the most frequent class to the rarest
    sets = []
    for imbalance in _imbalances(asked, int(present.min())):
        sizes = exponential_counts(len(present), int(present.min()), abs(imbalance))
        counts = np.empty_like(sizes)
        counts[order] = sizes if imbalance > 0 else sizes[::-1]
        prior = torch.from_numpy(counts / counts.sum())
        sets.append(ShiftedSet(imbalance, long_tail_indices(labels, counts, seed), prior))
    return sets


def _imbalances(asked: str, fewest: int) -> list[float]:
    try:
        found = {float(part) for part in asked.split(",")}
    except ValueError as error:
        raise LiVTError(f"test_imbalance is {asked!r}; it must be numbers such as 50 or 50,-50.") from error
    largest = max(found, key=abs)
    if not all(1 <= abs(imbalance) < math.inf for imbalance in found):
        raise LiVTError(f"test_imbalance is {asked!r}; largest over smallest class is at least 1 (backward: -1).")
    if fewest < abs(largest):
        way_out = f"pass --test_imbalance={fewest},-{fewest} or less" if fewest > 1 else "leave it out"
        raise LiVTError(
            f"test_imbalance {largest:g} needs {math.ceil(abs(largest))} test images of every class, but some class "
            f"has {fewest}; {way_out}."
        )
    return sorted((found - {-1.0}) | {1.0}, key=_backward)


def _backward(imbalance: float) -> float:
    return -math.copysign(math.log(abs(imbalance)), imbalance)


def measure_shift(exam: Exam, shifted: ShiftedSet) -> dict:
    """The paper's rule and the posterior under the uniform, the true and the estimated prior, on one shifted set."""
    chosen = torch.isin(exam.outputs.index, torch.from_numpy(shifted.rows)).nonzero()[:, 0]
    result: dict = {"imbalance": shifted.imbalance, "num_images": len(shifted.rows)}
    rules: dict[str, Rule] = {PAPER: None}
    if PredictionsInfo.from_model(exam.model).no_posterior is None:
        rules |= {UNIFORM: posterior_rule(exam.model, "uniform"), TRUE: posterior_rule(exam.model, shifted.prior)}
        if PredictionsInfo.from_model(exam.model).uncalibrated_because is None:
            estimate = exam.estimated_prior(chosen)
            error = (estimate.prior - shifted.prior).abs().sum().item()
            result["estimate"] = {"error": error, "shift": estimate.shift, "variation": estimate.variation}
            if estimate.reliable:
                rules[ESTIMATED] = posterior_rule(exam.model, estimate.prior)
    measured = exam.metrics(rules, chosen)
    computed = {name: metric.compute() for name, metric in measured.items()}
    return result | {"rules": {name: {key: row[key] for key in _KEPT} for name, row in computed.items()}}
