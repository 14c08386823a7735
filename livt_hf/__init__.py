"""LiVT for the Hugging Face ecosystem: vision transformers and balanced heads for long-tailed images.

Importing the package costs milliseconds: public names are looked up when they are first used, and the model classes
are registered with transformers' Auto classes when those are first loaded.
"""

import importlib
import importlib.abc
import sys
from collections.abc import Callable

from livt_hf.version import __version__

_HOMES = {
    "LiVTError": "livt_hf.errors",
    "LiViTConfig": "livt_hf.configuration_livit",
    "LiViTForImageClassification": "livt_hf.modeling_livit",
    "LiViTForPreTraining": "livt_hf.modeling_livit_mae",
    "LiViTModel": "livt_hf.modeling_livit",
    "LongTailConfig": "livt_hf.long_tail.config",
    "balance": "livt_hf.long_tail.balance",
    "pretraining_config": "livt_hf.modeling_livit_mae",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_config(auto) -> None:
    from livt_hf.configuration_livit import LiViTConfig

    auto.AutoConfig.register("livit", LiViTConfig, exist_ok=True)


def _register_models(_auto) -> None:
    # The module registers its classes at its end. It may have asked for the Auto classes itself and be half-way.
    importlib.import_module("livt_hf.modeling_livit")


def _register_processors(auto) -> None:
    from transformers import ViTImageProcessor, ViTImageProcessorPil

    from livt_hf.configuration_livit import LiViTConfig

    classes = {"torchvision": ViTImageProcessor, "pil": ViTImageProcessorPil}
    auto.AutoImageProcessor.register(LiViTConfig, image_processor_classes=classes, exist_ok=True)


_REGISTRATIONS: dict[str, Callable] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.models.auto.image_processing_auto": _register_processors,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers our classes as soon as transformers' own module has been executed."""

    def find_spec(self, name, path=None, target=None):
        if name not in _REGISTRATIONS:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _REGISTRATIONS[name](module)

            spec.loader.exec_module = exec_module
        return spec


for _name, _register in _REGISTRATIONS.items():
    if _name in sys.modules:
        _register(sys.modules[_name])
sys.meta_path.insert(0, _AfterImport())
