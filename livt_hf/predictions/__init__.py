"""Predictions: the record of a forward pass, and everything that is computed from it.

    images -> model -> Predictions -> decide -> metrics, report, demo

Names are looked up when they are first used, so that reading a name of a rule loads no torch.
"""

import importlib

_HOMES = {
    "DecisionRule": "livt_hf.predictions.rules",
    "Predictions": "livt_hf.predictions.record",
    "PredictionsInfo": "livt_hf.predictions.record",
    "decide": "livt_hf.predictions.decisions",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
