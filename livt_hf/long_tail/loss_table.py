"""The losses by name, with what a head and a command must know of each. Nothing here imports torch.

The functions of the packaged losses are added by `losses`, those of plugins by `register_loss`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from livt_hf.errors import LiVTError

if TYPE_CHECKING:
    from torch import Tensor

    from livt_hf.long_tail.config import LongTailConfig
    from livt_hf.long_tail.losses import LossInputs

    LossFunction = Callable[[LossInputs], Tensor]


def _not_loaded(_batch: "LossInputs") -> "Tensor":
    raise RuntimeError("import livt_hf.long_tail.losses first")


@dataclass(frozen=True)
class LossDefinition:
    """A loss and what a head must know of it; `function` returns one number per image (B,).

    balanced: tau B is added to the logits. class_weighted: images are weighted by the class of their label.
    batch_statistic: `function` returns one number for the whole batch, so the loss of a batch is not the mean of the
    losses of its parts. scaled: it scales the logits, so that they may be cosines.
    no_posterior: why activation(z + tau B) does not estimate the training posterior, if it does not.
    """

    function: "LossFunction" = _not_loaded
    _: KW_ONLY
    activation: Literal["softmax", "sigmoid"]
    balanced: bool = False
    class_weighted: bool = False
    needs_counts: bool = False
    uses_features: bool = False
    soft_labels: bool = True
    batch_statistic: bool = False
    scaled: bool = False
    no_posterior: "str | Callable[[LongTailConfig], str | None] | None" = None

    @property
    def uses_counts(self) -> bool:
        """Return True if the loss depends on the class counts."""
        return self.balanced or self.class_weighted or self.needs_counts

    def why_no_posterior(self, settings: "LongTailConfig") -> str | None:
        """Return the reason why the outputs do not estimate the training posterior; None if they do."""
        if settings.weighted_from is not None:
            return "its class weights change what the outputs estimate"
        return self.no_posterior(settings) if callable(self.no_posterior) else self.no_posterior


def _why_tolerant(settings: "LongTailConfig") -> str | None:
    return None if settings.nt_lambda == 1 else "its negative term is a log likelihood only where nt_lambda is 1"


def _why_focal(settings: "LongTailConfig") -> str | None:
    return None if settings.focal_gamma == 0 else "its focusing factor makes the outputs underconfident"


LOSSES = {
    "nt_bce": LossDefinition(activation="sigmoid", no_posterior=_why_tolerant),
    "bal_nt_bce": LossDefinition(activation="sigmoid", balanced=True, no_posterior=_why_tolerant),
    "ib": LossDefinition(
        activation="softmax",
        needs_counts=True,
        uses_features=True,
        soft_labels=False,
        no_posterior="its weights of images move the outputs",
    ),
    "lade": LossDefinition(
        activation="softmax",
        balanced=True,
        soft_labels=False,
        batch_statistic=True,
        no_posterior="its regulariser moves the outputs",
    ),
    "focal": LossDefinition(activation="softmax", no_posterior=_why_focal),
    "ldam": LossDefinition(
        activation="softmax",
        needs_counts=True,
        scaled=True,
        no_posterior="its margins and scale make the outputs scores",
    ),
    "bce": LossDefinition(activation="sigmoid"),
    "bal_bce": LossDefinition(activation="sigmoid", balanced=True),
    "cb_bce": LossDefinition(activation="sigmoid", class_weighted=True),
    "ce": LossDefinition(activation="softmax"),
    "bal_ce": LossDefinition(activation="softmax", balanced=True),
    "cb_ce": LossDefinition(activation="softmax", class_weighted=True),
}
CONVEX_LOSSES = ("ce", "bce", "bal_ce", "bal_bce", "cb_ce", "cb_bce")  # in the weights of a linear classifier
PACKAGED = frozenset(LOSSES)  # plugins add to LOSSES, and a model that is published is loaded without them


def implement_loss(*names: str) -> "Callable[[LossFunction], LossFunction]":
    """Make a function the implementation of packaged losses."""

    def implement(function: "LossFunction") -> "LossFunction":
        LOSSES.update({name: dataclasses.replace(LOSSES[name], function=function) for name in names})
        return function

    return implement


def register_loss(name: str, **facts) -> "Callable[[LossFunction], LossFunction]":
    """Register a function of `LossInputs` under a name for `LongTailConfig.loss`.

    Args:
        name: new name of the loss.
        **facts: fields of `LossDefinition`; `activation` must be given.

    Returns:
        A decorator.

    Example:
        >>> @register_loss("my_ce", activation="softmax", balanced=True)
        ... def my_ce(batch):
        ...     return -(batch.targets * batch.adjusted.log_softmax(-1)).sum(-1)
    """

    def register(function: "LossFunction") -> "LossFunction":
        if name in LOSSES:
            raise LiVTError(f"a loss named {name!r} exists already; choose another name.")
        LOSSES[name] = LossDefinition(function, **facts)
        return function

    return register
