"""Decide: from a record and a rule to one class per image, or to several."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from livt_hf.long_tail.priors import Prior
from livt_hf.predictions.record import Predictions, read_parts
from livt_hf.predictions.rules import DecisionRule, rule_for_prior

Source = Predictions | str | Path  # a record, or its folder, of which one part is read at a time


class Decisions(NamedTuple):
    """The class of each image, -1 where its logits are not numbers, and the score of that class. (N,)"""

    labels: Tensor
    scores: Tensor


def blocks_of(source: Source):
    """Yield a record block by block, from memory or from its folder."""
    for part in [source] if isinstance(source, Predictions) else read_parts(source):
        yield from part.blocks()


def ranked_scores(block: Predictions, rule: DecisionRule) -> Tensor:
    """Return what a rule ranks the classes by: the logits or, of several models, whose logits differ, the scores."""
    if rule.prior is None and len(block.info.models) == 1:
        return torch.from_numpy(block.logits.copy())
    return block.scores(rule)


def decide(source: Source, rule: DecisionRule | None = None, *, prior: Prior | str = None) -> Decisions:
    """Choose a class for each image by a decision rule, without looking at an image again.

    Args:
        source: a record, or the folder of one.
        rule: a decision rule; by default that of the record.
        prior: "uniform", "training" or one probability per class, in place of a rule.

    Returns:
        Class ids and their scores.

    Example:
        >>> decide(Predictions.load("runs/finetune-birds-base/1/predictions"), prior="training").labels
        tensor([3, 0, 1])
    """
    rule = rule if prior is None else rule_for_prior(prior)
    labels, scores = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0)]
    for block in blocks_of(source):
        of_rule = rule or block.info.default_rule
        every = block.scores(of_rule)
        ranked = ranked_scores(block, of_rule)
        best = ranked.argmax(-1, keepdim=True)
        labels.append(best[:, 0].masked_fill(ranked.isnan().any(-1), -1))
        scores.append(every.gather(-1, best)[:, 0])
    return Decisions(torch.cat(labels), torch.cat(scores))
