"""Class priors other than that of training: estimated from images, and test sets that have them.

Shifted sets are long tails cut out of a balanced test set, to measure predictions under other class priors. Forward
sets are as the training set is, with its frequent classes frequent; backward sets are the other way round.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from livt_hf.data.subsample import exponential_counts, label_counts, long_tail_indices
from livt_hf.errors import LiVTError
from livt_hf.long_tail.label_shift import PriorEstimate, estimate_prior
from livt_hf.predictions.evaluate import Evaluator
from livt_hf.predictions.record import Source, iterate_blocks, read_parts, stack_on_disk
from livt_hf.predictions.rules import ARGMAX, ESTIMATED, TRUE, UNIFORM, DecisionRule

_KEPT = ("accuracy", "mean_class_accuracy", "many", "medium", "few")


def estimate_record_prior(source: Source, rows: np.ndarray | None = None) -> PriorEstimate:
    """Estimate the class prior of a record's images by EM on their training posteriors, without their labels.

    Args:
        source: a record of one model, or its folder.
        rows: a mask of the images to use; by default all.

    Returns:
        The estimate. Posteriors go through a temporary file; memory holds one block of them at a time.
    """
    info = next(read_parts(source)).info
    head, *others = info.heads
    if others:
        raise LiVTError("the record is of several models; estimate the prior by one of them.", argument="source")
    if head is None:
        raise LiVTError(f"no prior can be estimated: {info.no_posterior}.", argument="class_counts")
    blocks = (torch.from_numpy(block.logits.copy()) for block in iterate_blocks(source, rows))
    posteriors = stack_on_disk((head.training_posterior(block).softmax(-1) for block in blocks), info.num_classes)
    return estimate_prior(posteriors, head.prior, head.calibration)


@dataclass
class ShiftedSet:
    """Rows of a test set that have a class prior (C,); a negative imbalance is backward."""

    imbalance: float
    rows: np.ndarray
    prior: torch.Tensor


def build_shifted_sets(
    imbalances: str, labels: np.ndarray, train_counts: np.ndarray, seed: int = 0
) -> list[ShiftedSet]:
    """Build sets of the listed imbalances and the balanced one, forward to backward; the seed picks their images."""
    present = label_counts(labels, len(train_counts))
    order = np.argsort(-np.asarray(train_counts), kind="stable")  # from the most frequent class to the rarest
    sets = []
    for imbalance in _parse_imbalances(imbalances, int(present.min())):
        sizes = exponential_counts(len(present), int(present.min()), abs(imbalance))
        counts = np.empty_like(sizes)
        counts[order] = sizes if imbalance > 0 else sizes[::-1]
        prior = torch.from_numpy(counts / counts.sum())
        sets.append(ShiftedSet(imbalance, long_tail_indices(labels, counts, seed), prior))
    return sets


def _parse_imbalances(text: str, fewest: int) -> list[float]:
    """Return the imbalances in order, all of which the rarest class of the test set must allow."""
    try:
        values = {float(part) for part in text.split(",")}
    except ValueError as error:
        message = f"test_imbalance is {text!r}; it must be numbers such as 50 or 50,-50."
        raise LiVTError(message, "test_imbalance") from error
    largest = max(values, key=abs)
    if not all(1 <= abs(imbalance) < math.inf for imbalance in values):
        message = f"test_imbalance is {text!r}; largest over smallest class is at least 1 (backward: -1)."
        raise LiVTError(message, "test_imbalance")
    if fewest < abs(largest):
        way_out = f"pass --test_imbalance={fewest},-{fewest} or less" if fewest > 1 else "leave it out"
        raise LiVTError(
            f"test_imbalance {largest:g} needs {math.ceil(abs(largest))} test images of every class, but some class "
            f"has {fewest}; {way_out}.",
            "test_imbalance",
        )
    return sorted((values - {-1.0}) | {1.0}, key=lambda value: -math.copysign(math.log(abs(value)), value))


def measure_shift(evaluator: Evaluator, shifted: ShiftedSet) -> dict:
    """Measure the paper's rule and the posterior under the uniform, the true and the estimated prior on one set."""
    info, chosen = evaluator.info, np.zeros(len(evaluator.labels), dtype=bool)
    chosen[shifted.rows] = True
    result: dict = {"imbalance": shifted.imbalance, "num_images": len(shifted.rows)}
    rules = [DecisionRule.named(ARGMAX)]
    if info.no_posterior is None:
        true = DecisionRule.named(TRUE, tuple(shifted.prior.tolist()))
        rules += [DecisionRule.named(UNIFORM, "uniform"), true]
        if info.uncalibrated_because is None:
            estimate = estimate_record_prior(evaluator.source, chosen)
            error = (estimate.prior - shifted.prior).abs().sum().item()
            result["estimate"] = {"error": error, "shift": estimate.shift, "variation": estimate.variation}
            if estimate.reliable:
                rules.append(DecisionRule.named(ESTIMATED, tuple(estimate.prior.tolist())))
    metrics = {name: metric.compute() for name, metric in evaluator.measure(rules, chosen).items()}
    return result | {"rules": {name: {key: row[key] for key in _KEPT} for name, row in metrics.items()}}
