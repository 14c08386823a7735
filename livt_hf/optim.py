"""Layer-wise learning rates under the name that others import them by; see `livt_hf.training.optim`."""

from livt_hf.training.optim import layer_decay_groups

__all__ = ["layer_decay_groups"]
