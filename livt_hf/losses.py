"""The losses under the name that others import them by; see `livt_hf.long_tail.losses`."""

from livt_hf.long_tail.losses import (
    LOSSES,
    LossDefinition,
    LossInputs,
    balanced_bce_bias,
    balanced_ce_bias,
    register_loss,
)

__all__ = ["LOSSES", "LossInputs", "LossDefinition", "balanced_bce_bias", "balanced_ce_bias", "register_loss"]
