"""LiVT for the Hugging Face ecosystem: vision transformers and balanced heads for long-tailed images.

Importing the package costs milliseconds: public names are imported when they are first used. LiViT is registered with
transformers' Auto classes at that moment, or at once where the Auto classes are imported already. So `from livt_hf
import LiViTConfig` (or any other name) makes `AutoModelForImageClassification` know a LiViT; a bare `import livt_hf`
before transformers does not, because transformers offers no registration without importing torch.
"""

import importlib
import sys

from livt_hf.version import __version__

_MODULES = {
    "LiVTError": "livt_hf.errors",
    "LiViTConfig": "livt_hf.configuration_livit",
    "LiViTForImageClassification": "livt_hf.modeling_livit",
    "LiViTForPreTraining": "livt_hf.modeling_livit_mae",
    "LiViTModel": "livt_hf.modeling_livit",
    "LongTailConfig": "livt_hf.long_tail.config",
    "balance": "livt_hf.long_tail.balance",
    "pretraining_config": "livt_hf.modeling_livit_mae",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "LiVTError":
        importlib.import_module("livt_hf.modeling_livit")  # registers LiViT
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "transformers.models.auto.modeling_auto" in sys.modules:
    importlib.import_module("livt_hf.modeling_livit")
