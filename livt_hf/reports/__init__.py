"""Pictures and pages that show what a model does to the tail. Each function writes one file and returns its path."""

from livt_hf.reports.biases import bias_by_gamma, bias_curves, class_distribution
from livt_hf.reports.classes import (
    accuracy_by_frequency,
    best_and_worst,
    best_and_worst_classes,
    confused_classes,
    reliability_diagram,
)
from livt_hf.reports.curves import sweep_plot, training_curves
from livt_hf.reports.page import html_report, markdown_table
from livt_hf.reports.sheets import contact_sheet, reconstruction_sheet

__all__ = [
    "accuracy_by_frequency",
    "best_and_worst",
    "best_and_worst_classes",
    "bias_by_gamma",
    "bias_curves",
    "class_distribution",
    "confused_classes",
    "contact_sheet",
    "html_report",
    "markdown_table",
    "reconstruction_sheet",
    "reliability_diagram",
    "sweep_plot",
    "training_curves",
]
