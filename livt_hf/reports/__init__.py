"""Pictures and pages that show what a model does to the tail. Each function writes one file and returns its path."""

from .biases import bias_by_gamma, bias_curves, class_distribution
from .sheets import contact_sheet, reconstruction_sheet

__all__ = ["bias_by_gamma", "bias_curves", "class_distribution", "contact_sheet", "reconstruction_sheet"]
