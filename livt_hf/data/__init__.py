"""Long-tailed image data: datasets, splits, transforms and loaders. Names are looked up when they are first used."""

import importlib

_NAMES = {
    "batches": ("Batches",),
    "benchmarks": ("normalization", "register_dataset"),
    "decoding": ("find_broken", "find_copies", "read_rgb"),
    "labels": ("class_counts",),
    "load": ("load_dataset", "load_evaluation_data", "load_long_tailed"),
    "loading": ("eval_loader", "train_loader"),
    "splitting": ("is_made_split", "shot_counts"),
    "subsample": ("exponential_counts", "long_tail_indices", "pareto_counts"),
    "transforms": ("DeviceTransform", "FinetuneAugmentation", "PretrainAugmentation", "eval_processor"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
