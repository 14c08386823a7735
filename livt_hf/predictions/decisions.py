"""Decide: from a record and a rule to one class per image, and the rule of a prior or an objective."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.long_tail.priors import Prior, as_prior, class_prior, read_prior, tempered_prior
from livt_hf.predictions.record import Predictions, PredictionsInfo, Source, iterate_blocks, read_groups
from livt_hf.predictions.rules import GIVEN, DecisionRule, deployment_label, rule_for_prior


def load_prior(prior: str, info: PredictionsInfo) -> Tensor:
    """Return the class frequencies that a command is given: `training`, `uniform`, or those of a file.

    A class with a zero is never predicted. The training images of several models are counted together.
    """
    if info.no_posterior is not None:
        name = info.model or "the model"
        message = f"{name} gives no probabilities under a prior ({info.no_posterior}); leave it out to rank by logits."
        raise LiVTError(message, argument="prior")
    if prior == "training":
        settings = [model.long_tail for model in info.models]
        counts = np.sum([one.class_counts for one in settings], axis=0)
        return class_prior(counts, sum(one.num_images for one in settings))
    values = prior if prior == "uniform" else read_prior(prior, info.class_names, multi_label=info.multi_label)
    return as_prior(values, info.num_classes, multi_label=info.multi_label)


def read_rule(prior: str, info: PredictionsInfo) -> DecisionRule:
    """Return the posterior rule under the class frequencies that a command is given, as by `load_prior`."""
    return rule_for_prior(prior, load_prior(prior, info).tolist())


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
    decided = [Decisions(torch.zeros(0, dtype=torch.long), torch.zeros(0))]  # of a record without images
    decided += (choose_classes(block, rule or block.info.default_rule)[1] for block in iterate_blocks(source))
    return Decisions(*map(torch.cat, zip(*decided, strict=True)))


def rank_by(block: Predictions, rule: DecisionRule) -> Tensor:
    """Return what a rule ranks by: the logits or, of several models, whose logits differ, the scores.

    A prior changes which class of an image ranks first, but not which image of a label does.
    """
    if len(block.info.models) == 1 and (rule.prior is None or block.info.multi_label):
        return torch.from_numpy(block.logits.copy())
    return block.scores(rule)


def choose_classes(block: Predictions, rule: DecisionRule) -> tuple[Tensor, Decisions]:
    """Return what a rule says of every class (N, C), and the class that it chooses."""
    scores = block.scores(rule)
    ranked = scores if rule.prior is not None else rank_by(block, rule)
    best = ranked.argmax(-1, keepdim=True)
    chosen = best[:, 0].masked_fill(ranked.isnan().any(-1), -1)
    return scores, Decisions(chosen, scores.gather(-1, best)[:, 0])


def rule_for_objective(info: PredictionsInfo, objective: str, validation: Source | None = None) -> DecisionRule:
    """Return the posterior rule under the prior pi^t for an objective.

    Args:
        info: of the predictions to decide on. The exponent is the one stored with its model's calibration.
        objective: a name of `livt_hf.long_tail.objectives.OBJECTIVES`.
        validation: a labelled record of images that the model was not trained on, and that nothing is measured on, to
            choose the exponent on instead.

    Returns:
        The rule.
    """
    settings = info.long_tail
    if info.multi_label or info.no_posterior is not None:
        reason = info.no_posterior or "an image may have several labels"
        raise LiVTError(f"objective {objective} needs class probabilities ({reason}); leave it out.", "objective")
    if settings is None:
        raise LiVTError(f"objective {objective} is chosen for one model; decide on its folds one by one.", "objective")
    prior = class_prior(settings.class_counts, settings.num_images)
    if validation is not None:
        exponent = _choose_on(validation, info, prior, objective)
    elif settings.trade_off is None:
        raise LiVTError(
            f"objective {objective} has no exponent, for the model is not calibrated on images that it was not "
            "trained on; calibrate it (livt calibrate), or name a labelled record of such images with choose_on.",
            argument="objective",
        )
    else:
        exponent = settings.trade_off["exponents"][objective]
    label = f"{deployment_label(objective)}, pi^{exponent:g}"
    return DecisionRule(GIVEN, label, tuple(tempered_prior(prior, exponent).tolist()))


def _choose_on(validation: Source, info: PredictionsInfo, prior: Tensor, objective: str) -> float:
    """Choose an exponent on a labelled record, which must be no test set."""
    from livt_hf.long_tail.objectives import choose_exponents  # most decisions need no objective

    record = validation if isinstance(validation, Predictions) else Predictions.load(validation)
    split = record.column("split")
    if record.labels is None or (record.labels < 0).any():
        raise LiVTError("choose_on needs a label of every image; name a labelled record.", "choose_on")
    if split is not None and "test" in split:
        raise LiVTError("choose_on has images of the split test; choose on others, such as validation.", "choose_on")
    if record.info.class_names != info.class_names:
        raise LiVTError("choose_on has other classes; name a record of the same model.", "choose_on")
    log_posterior = torch.from_numpy(record.posterior("training")).log()
    labels, groups = torch.from_numpy(record.labels), read_groups(record)
    return choose_exponents(log_posterior, labels, prior, [objective], groups=groups)[objective].exponent
