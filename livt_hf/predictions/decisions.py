"""Decide: from a record and a rule to one class per image."""

from typing import NamedTuple

import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.long_tail.priors import Prior, as_prior, class_prior, read_prior
from livt_hf.predictions.blocks import Source, iterate_blocks, rank_by
from livt_hf.predictions.record import Predictions, PredictionsInfo
from livt_hf.predictions.rules import DecisionRule, rule_for_prior


def load_prior(prior: str, info: PredictionsInfo) -> Tensor:
    """Return the class frequencies that a command is given: `training`, `uniform`, or those of a file.

    A class with a zero is never predicted.
    """
    settings, classes = info.long_tail, info.num_classes
    if settings is None or info.no_posterior is not None:
        name = info.model or "the model"
        message = f"{name} gives no probabilities under a prior ({info.no_posterior}); leave it out to rank by logits."
        raise LiVTError(message, argument="prior")
    if prior == "training":
        return class_prior(settings.class_counts, settings.num_images)
    several = info.multi_label
    values = prior if prior == "uniform" else read_prior(prior, info.class_names, multi_label=several)
    return as_prior(values, classes, multi_label=several)


class Decisions(NamedTuple):
    """The class of each image, -1 where its logits are not numbers, and the score of that class. (N,)"""

    labels: Tensor
    scores: Tensor


def decide(source: Source, rule: DecisionRule | None = None, *, prior: Prior | str = None) -> Decisions:
    """Choose a class for each image by a decision rule, without looking at an image again.

    Args:
        source: a record, or the folder of one.
        rule: a decision rule; by default that of the record.
        prior: "uniform", "training" or one probability per class, in place of a rule.

    Returns:
        Class ids and their scores.

    Example:
        >>> decide("runs/finetune-birds-base/1/predictions", prior="training").labels
        tensor([3, 0, 1])
    """
    rule = rule if prior is None else rule_for_prior(prior)
    labels, scores = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0)]
    for block in iterate_blocks(source):
        decided = choose_classes(block, rule or block.info.default_rule)[1]
        labels.append(decided.labels)
        scores.append(decided.scores)
    return Decisions(torch.cat(labels), torch.cat(scores))


def choose_classes(block: Predictions, rule: DecisionRule) -> tuple[Tensor, Decisions]:
    """Return what a rule says of every class (N, C), and the class that it chooses."""
    scores = block.scores(rule)
    ranked = scores if rule.prior is not None else rank_by(block, rule)
    best = ranked.argmax(-1, keepdim=True)
    chosen = best[:, 0].masked_fill(ranked.isnan().any(-1), -1)
    return scores, Decisions(chosen, scores.gather(-1, best)[:, 0])
