"""Decision rules: how an image gets its label from the logits z.

The paper's rule ranks by z itself. The posterior rule gives P(j|x) ~ p_j q_j / pi_j, with p_j the posterior under the
training prior pi and q the prior of the images to come (livt_hf/long_tail/priors.py).
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from livt_hf.evaluation.models import check_posterior, class_names, head_of, is_multi_label, why_no_posterior
from livt_hf.evaluation.running import Rule, logits_of
from livt_hf.long_tail.priors import Prior, as_prior, class_prior, estimate_prior, has_collapsed, read_prior

logger = logging.getLogger(__name__)

PAPER, UNIFORM = "paper (argmax z)", "posterior, uniform prior"


def posterior_rule(model: PreTrainedModel, prior: Prior) -> Rule:
    """Class probabilities under a prior; None is the model's own test prior."""
    check_posterior(model)
    return lambda logits: head_of(model).posterior(logits, prior)


def standard_rules(model: PreTrainedModel) -> dict[str, Rule]:
    """The paper's rule and, where a model gives probabilities, the posterior under the uniform prior."""
    rules = {PAPER: None}
    if why_no_posterior(model) is None:
        rules[UNIFORM] = posterior_rule(model, "uniform")
    return rules


def serving_prior(asked: str, model: PreTrainedModel) -> Tensor:
    """The prior that a command was given: `training`, `uniform`, or a file. A class with a zero is never predicted."""
    check_posterior(model)
    names, several = class_names(model), is_multi_label(model)
    if asked == "training":
        settings = head_of(model).settings
        return class_prior(settings.class_counts, settings.num_images)
    prior = asked if asked == "uniform" else read_prior(asked, names, multi_label=several)
    return as_prior(prior, len(names), multi_label=several, what=f"the prior {asked}")


def prior_words(asked: str) -> str:
    """What a rule under such a prior is called."""
    return f"{asked} prior" if asked in ("training", "uniform") else f"prior of {Path(asked).name}"


def estimated_prior(model: nn.Module, loader: Iterable[dict], accelerator: Accelerator) -> Tensor:
    """The class prior of the loader's images by EM on the model's training posteriors, labels unseen. (C,)"""
    batches = logits_of(model, loader, accelerator)
    posterior = torch.cat([model.head.training_posterior(logits).exp().cpu() for logits, _ in batches])
    source = model.head.prior.cpu()
    estimate = estimate_prior(posterior, source)
    if has_collapsed(estimate, posterior, source):
        logger.warning(
            "the estimated prior has collapsed onto few classes, as it does where a model is surer than it is right: "
            "do not serve under it; train longer, or measure the prior on some labelled images and pass --prior."
        )
    return estimate
