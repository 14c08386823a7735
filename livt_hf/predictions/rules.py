"""Decision rules: how an image gets its label from the logits z. Nothing here imports torch.

The paper's rule ranks by z itself. A posterior rule gives P(j|x) ~ p_j q_j / pi_j, with p_j the posterior under the
training prior pi and q the prior of the images to come (livt_hf/long_tail/priors.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ARGMAX, UNIFORM, TEST_PRIOR, PER_LABEL = "argmax", "uniform", "test_prior", "per_label"
TRAINING, LARGEST = "training", "largest_class"  # what every model is compared with
GIVEN, ESTIMATED, TRUE = "given", "estimated", "true"
# What each rule is called in text. Labels are for people: no code reads one.
LABELS = {
    ARGMAX: "largest logit",
    UNIFORM: "posterior, uniform prior",
    TEST_PRIOR: "posterior, the model's test prior",
    GIVEN: "posterior, the given prior",
    ESTIMATED: "posterior, estimated prior",
    TRUE: "posterior, true prior",
    PER_LABEL: "each label on its own",
    TRAINING: "posterior, training prior",
    LARGEST: "always the largest class",
}
# The keys of livt_hf 0.2 in evaluation.json and results.json, where a rule's label was its name.
_NAMES_OF_0_2 = {
    "paper (argmax z)": ARGMAX,
    "posterior, uniform prior": UNIFORM,
    "posterior, the model's test prior": TEST_PRIOR,
    "posterior, estimated prior": ESTIMATED,
    "posterior, true prior": TRUE,
    "each label by itself": PER_LABEL,
    "posterior, training prior": PER_LABEL,  # the default of a model with several labels per image
    "each class by its own logit": PER_LABEL,
}


@dataclass(frozen=True)
class DecisionRule:
    """How an image gets its label from its logits.

    Args:
        name: key of the rule in files and tables.
        label: text for people.
        prior: class frequencies to expect, which give posterior probabilities: "uniform", "training" (those of the
            training images), "model" (those that the model is configured for) or one number per class. None ranks
            by the logits.
    """

    name: str
    label: str
    prior: Literal["uniform", "training", "model"] | tuple[float, ...] | None = None

    @classmethod
    def named(cls, name: str, prior=None) -> "DecisionRule":
        """Return a rule under the label that its name has everywhere."""
        return cls(name, LABELS[name], prior)


def deployment_label(objective: str | None) -> str:
    """Return the label of the rule of the model's own prior, which names the objective it was chosen for."""
    return LABELS[TEST_PRIOR] if objective is None else f"posterior, prior for {describe_objective(objective)}"


def describe_objective(objective: str) -> str:
    """Return text for an objective."""
    return objective.replace("_", " ").replace("f1", "F1")


def rule_name(key: str) -> str:
    """Return the name of a rule from a key of a file of this version or of 0.2."""
    return _NAMES_OF_0_2.get(key, key if key in LABELS else GIVEN)


def prior_label(prior: str | Sequence[float]) -> str:
    """Return text for a prior as a command is given it: a name, or the file that holds it."""
    if not isinstance(prior, str):
        return "given prior"
    return f"{prior} prior" if prior in ("training", "uniform") else f"prior of {Path(prior).name}"


def rule_for_prior(prior: str | Sequence[float], values: Sequence[float] | None = None) -> DecisionRule:
    """Return the posterior rule under a prior: a name, numbers, or the file that `values` were read from."""
    numbers = values if values is not None else prior
    numbers = numbers if isinstance(numbers, str) else tuple(map(float, numbers))
    return DecisionRule(GIVEN, f"posterior, {prior_label(prior)}", numbers)
