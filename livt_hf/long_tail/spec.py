"""LossSpec: the options of the loss and of the head. Nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from livt_hf.long_tail.loss_table import LOSSES
from livt_hf.specs import Spec, option

if TYPE_CHECKING:
    from livt_hf.long_tail.config import LongTailConfig

Objective = Literal["mean_class_accuracy", "macro_f1", "balanced", "accuracy", "none"]


def loss_names() -> list[str]:
    """Return the names of all losses, with those that plugins register."""
    return sorted(LOSSES)


@dataclass(frozen=True)
class LossSpec(Spec):
    """Loss: how the head learns from imbalanced classes."""

    loss: str = option(
        "bal_bce", f"loss of the head: {', '.join(sorted(LOSSES))}, or a plugin's", choices=loss_names, common=True
    )
    tau: float = option(1.0, "strength of the logit bias", common=True)
    test_prior: str = option(
        "uniform",
        "uniform, none, or a JSON file of class probabilities; uniform is none where images have several labels",
        common=True,
        is_path=True,
    )
    objective: Objective | None = option(
        None, "what to serve the model for; default: macro_f1, of benchmarks none", common=True, legacy_default="none"
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
    focal_gamma: float = option(2.0, "focal loss: exponent of its focusing factor; 0 is cross-entropy")

    def build_config(
        self,
        class_counts: list[int],
        class_names: Sequence[str],
        *,
        num_train_images: int | None = None,
        seen_counts: list[float] | None = None,
        trained_with: dict[str, float] | None = None,
    ) -> "LongTailConfig":
        """Build the config of a head; files of priors and weights are read.

        Args:
            class_counts: training images of each class.
            class_names: names in the same order.
            num_train_images: number of training images, only where an image may have several labels.
            seen_counts: images of each class that an epoch shows, where a sampler changes them.
            trained_with: what made the targets soft, such as {"mixup": 0.8}.
        """
        from livt_hf.long_tail.config import LongTailConfig
        from livt_hf.long_tail.priors import read_numbers, read_prior

        several, prior = num_train_images is not None, self.test_prior
        values = {name: getattr(self, name) for name in LossSpec.names() if name != "objective"}
        if self.class_weights is not None:
            values["class_weights"] = read_numbers(self.class_weights, class_names, "class weights")
        if prior == "none" or (several and prior == "uniform"):  # labels that exclude nothing share no probability
            values["test_prior"] = None
        elif prior != "uniform":
            values["test_prior"] = read_prior(prior, class_names, multi_label=several)
        return LongTailConfig(
            **values,
            class_counts=class_counts,
            num_train_images=num_train_images,
            seen_counts=seen_counts,
            trained_with=trained_with,
        )
