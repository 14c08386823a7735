"""Pictures and pages of evaluations and sweeps. Each function writes one file and returns its path.

Names are looked up when they are first used.
"""

import importlib

_NAMES = {
    "classes": "accuracy_by_frequency best_and_worst best_and_worst_classes class_counts_chart class_distribution "
    "confused_classes reliability_diagram",
    "curves": "sweep_plot training_curves",
    "page": "markdown_table write_page",
    "sheets": "contact_sheet reconstruction_sheet",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
