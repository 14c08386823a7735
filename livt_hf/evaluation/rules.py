"""Decision rules: how an image gets its label from the logits z.

The paper's rule ranks by z itself. The posterior rule gives P(j|x) ~ p_j q_j / pi_j, with p_j the posterior under the
training prior pi and q the prior of the images to come (livt_hf/long_tail/priors.py).
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from livt_hf.classifiers import check_posterior, class_names, get_head, is_multi_label
from livt_hf.evaluation.running import Rule
from livt_hf.long_tail.priors import Prior, as_prior, class_prior, read_prior
from livt_hf.predictions import PredictionsInfo
from livt_hf.results import OWN, PAPER, UNIFORM

TRAINING, TRUE = "posterior, training prior", "posterior, true prior"
ESTIMATED = "posterior, estimated prior"
BY_LOGIT = "each class by its own logit"


def posterior_rule(model: PreTrainedModel, prior: Prior) -> Rule:
    """Class probabilities under a prior; None is the model's own test prior."""
    check_posterior(model)
    return lambda logits: get_head(model).posterior(logits, prior)


def headline(model: PreTrainedModel) -> str:
    """The rule by which a model is judged and served where nobody asks for another; every command names it first.

    The posterior under the model's own test prior once it is calibrated; until then the paper's rule, which needs no
    calibrated posterior.
    """
    return own_rule(model) if PredictionsInfo.from_model(model).is_calibrated else PAPER


def own_rule(model: PreTrainedModel) -> str:
    """What the posterior under the model's own test prior is called.

    Without one a model serves under the uniform prior, or under the training prior if its images have several labels.
    """
    prior = get_head(model).settings.test_prior
    if prior is None and is_multi_label(model):
        return TRAINING
    return UNIFORM if prior in (None, "uniform") else OWN


def label_thresholds(model: PreTrainedModel) -> Tensor | None:
    """Of a model whose images may have several labels: the score under its own rule from which on each is given."""
    if not is_multi_label(model):
        return None
    calibration = get_head(model).settings.calibration if PredictionsInfo.from_model(model).is_calibrated else None
    chosen = calibration and calibration.get("thresholds")
    return torch.tensor(chosen or [0.5] * model.config.num_labels, dtype=torch.float64)


def given_labels(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """Which labels a model gives to images that may have several. (B, C)"""
    (rule,) = standard_rules(model).values()
    return rule(logits).cpu() >= label_thresholds(model)


def standard_rules(model: PreTrainedModel) -> dict[str, Rule]:
    """The headline first, then the paper's rule and, of a model with probabilities, that of the uniform prior.

    Where an image may have several labels there is one rule, which asks for each of them by itself.
    """
    if is_multi_label(model):
        known = PredictionsInfo.from_model(model).no_posterior is None
        return {own_rule(model): posterior_rule(model, None)} if known else {BY_LOGIT: torch.sigmoid}
    rules = {headline(model): None, PAPER: None}
    if PredictionsInfo.from_model(model).no_posterior is None:
        rules[UNIFORM] = posterior_rule(model, "uniform")
    if OWN in rules:
        rules[OWN] = posterior_rule(model, None)
    return rules


def serving_prior(asked: str, model: PreTrainedModel) -> Tensor:
    """The prior that a command was given: `training`, `uniform`, or a file. A class with a zero is never predicted."""
    check_posterior(model)
    names, several = class_names(model), is_multi_label(model)
    if asked == "training":
        settings = get_head(model).settings
        return class_prior(settings.class_counts, settings.num_images)
    prior = asked if asked == "uniform" else read_prior(asked, names, multi_label=several)
    return as_prior(prior, len(names), multi_label=several)


def prior_words(asked: str) -> str:
    """What a rule under such a prior is called."""
    return f"{asked} prior" if asked in ("training", "uniform") else f"prior of {Path(asked).name}"
