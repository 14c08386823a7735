"""LossSpec: the options of the loss and of the head. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

from livt_hf.long_tail.loss_table import LOSSES
from livt_hf.specs import Spec, option


def loss_names() -> list[str]:
    """Return the names of all losses, with those that plugins register."""
    return sorted(LOSSES)


@dataclass
class LossSpec(Spec):
    """Loss: how the head learns from imbalanced classes."""

    loss: str = option(
        "bal_bce",
        f"loss of the head: {', '.join(sorted(LOSSES))}, or a plugin's",
        choices=loss_names,
        common=True,
    )
    tau: float = option(1.0, "strength of the logit bias", common=True)
    test_prior: str = option(
        "uniform",
        "uniform, none, or a JSON file of class probabilities; uniform is none where images have several labels",
        common=True,
        is_path=True,
    )
    bias: Literal["bce", "ce"] = option("bce", "bias of balanced sigmoid losses: bce (Theorem 3) or ce (Theorem 1)")
    head_start: Literal["prior", "zero"] = option("prior", "where the classifier bias of a sigmoid loss starts")
    label_smoothing: float = option(0.0, "probability mass moved to all classes, in the loss")
    class_weights: str | None = option(
        None,
        "JSON or YAML file with one weight per class, by name or as a list: factors of its images' loss",
        is_path=True,
    )
    normalised_classifier: bool = option(False, "LDAM: logits are cosines, as Cao et al. have them (not the paper)")
    drw_start: float | None = option(
        None, "deferred re-weighting: share of the epochs after which images are weighted by class; default: never"
    )
    cb_beta: float = option(0.9999, "beta of the class weights of CB and of deferred re-weighting")
    ldam_max_margin: float = option(0.5, "LDAM: margin of the rarest class")
    ldam_scale: float = option(30.0, "LDAM: factor of the logits")
    lade_weight: float = option(0.1, "LADE: weight of its regulariser; 0.005 on Places-LT, 0.05 on ImageNet-LT")
    lade_lambda: float = option(0.01, "LADE: lambda; 0.1 on Places-LT, 0.5 on ImageNet-LT")
    ib_alpha: float = option(1000.0, "IB: factor of the loss")
    ib_warmup: float = option(0.5, "IB: share of the epochs on cross-entropy before it starts")
    nt_lambda: float = option(2.0, "lambda of the NT-BCE losses; 1 is plain BCE")
