"""Packages whose names are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[Callable, Callable, list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, from the public names of its modules.

    Example:
        >>> __getattr__, __dir__, __all__ = lazy_names("livt_hf.hub", {"card": "eval_result_files model_card"})
        >>> __getattr__("model_card").__module__
        'livt_hf.hub.card'
    """
    homes = {name: f"{package}.{module}" for module, own in names.items() for name in own.split()}

    def get(name: str):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes)
