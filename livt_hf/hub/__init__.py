"""Publishing to the Hugging Face Hub: cards, results files, models and datasets.

Names are looked up when they are first used.
"""

import importlib

_NAMES = {
    "card": "eval_result_files model_card",
    "datasets": "Origin dataset_card origin_of publish_dataset",
    "publication": "Publication PublishError",
    "publishing": "check_space list_files prepare_publication prepare_space publish publish_space",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
