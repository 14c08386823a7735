"""Pictures and pages of evaluations and sweeps. Each function writes one file and returns its path.

Names are looked up when they are first used.
"""

from livt_hf.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "classes": "accuracy_by_frequency best_and_worst best_and_worst_classes class_counts_chart class_distribution "
        "confused_classes reliability_diagram",
        "curves": "sweep_plot training_curves",
        "page": "markdown_table write_page",
        "sheets": "contact_sheet reconstruction_sheet",
    },
)
