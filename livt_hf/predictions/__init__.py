"""Predictions: the record of a forward pass, and everything that is computed from it.

    images -> model -> Predictions -> decide -> metrics, report, demo

Names are looked up when they are first used, so that reading a name of a rule loads no torch.
"""

from livt_hf.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {"decisions": "decide", "record": "Predictions PredictionsInfo", "rules": "DecisionRule"}
)
