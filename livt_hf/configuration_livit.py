"""`LiViTConfig`: the sizes of a ViT, how it pools, and the settings of its long-tailed head."""

from typing import Literal

import numpy as np
from transformers import PreTrainedConfig

from livt_hf.constants import PRESETS
from livt_hf.errors import LiVTError
from livt_hf.long_tail.config import LongTailConfig, check_labels
from livt_hf.specs import check_types

_SIZES = (*PRESETS["base"], "intermediate_size", "num_channels")
_LARGEST = 2**16  # far above every ViT: a damaged file must not have a model built that never ends
# What holds for one set of classes only.
LABEL_FIELDS = {"id2label", "label2id", "num_labels", "problem_type", "class_counts", "num_train_images", "test_prior"}
LABEL_FIELDS |= {"calibration", "trained_with", "seen_counts", "class_weights", "fingerprint"}


def encoder_preset(size: str) -> dict[str, int]:
    if size not in PRESETS:
        raise LiVTError(f"model_size {size!r} is not known; choose one of {', '.join(PRESETS)}.", "model_size")
    return PRESETS[size] | {"intermediate_size": 4 * PRESETS[size]["hidden_size"]}


def get_size_name(config: dict) -> str:
    """Return the name of the preset with the sizes of a config, or the sizes themselves."""
    for name, preset in PRESETS.items():
        if all(config[key] == preset[key] for key in ("hidden_size", "num_hidden_layers")):
            return name
    return f"{config['hidden_size']}x{config['num_hidden_layers']}"


class LiViTConfig(PreTrainedConfig):
    """Configuration of `LiViTModel` and `LiViTForImageClassification`; the defaults are the paper's ViT-B.

    Args:
        pooling: "mean" (the paper's: fc_norm of the mean patch token, no final norm) or "cls" (final norm, class
            token).
        drop_path_rate: stochastic depth of the last layer, rising linearly from 0.
        long_tail: a `LongTailConfig`, whose fields may also be given as keywords.
        **kwargs: fields of `ViTConfig` and of `LongTailConfig`.

    Example:
        >>> config = LiViTConfig.preset("micro", class_counts=[90, 10], loss="bal_ce")
        >>> config.num_labels, config.hidden_size, config.long_tail.loss
        (2, 128, 'bal_ce')
    """

    model_type = "livit"

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-6
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    qkv_bias: bool = True
    pooling: Literal["mean", "cls"] = "mean"
    drop_path_rate: float | int = 0.0
    long_tail: dict | None = None

    def __post_init__(self, **kwargs):
        settings = {name: kwargs.pop(name) for name in LongTailConfig.names() if name in kwargs}
        self.long_tail = LongTailConfig.from_dict((self.long_tail or {}) | settings)
        if self.long_tail.class_counts is not None and self.id2label is None:
            kwargs.setdefault("num_labels", len(self.long_tail.class_counts))
        if self.id2label is not None and kwargs.get("num_labels", len(self.id2label)) != len(self.id2label):
            raise LiVTError(f"id2label names {len(self.id2label)} labels and num_labels is {kwargs['num_labels']}.")
        super().__post_init__(**kwargs)
        self._check_sizes()
        check_labels(self)

    @classmethod
    def preset(cls, size: str = "base", **overrides) -> "LiViTConfig":
        return cls(**(encoder_preset(size) | overrides))

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        settings = {name: kwargs.pop(name) for name in LABEL_FIELDS.union(LongTailConfig.names()) if name in kwargs}
        return super().from_dict(merge_config_values(config_dict, settings), **kwargs)

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def _check_sizes(self):
        hints = LiViTConfig.__annotations__
        check_types({name: getattr(self, name) for name in hints}, hints)
        for name in _SIZES:
            if not 1 <= getattr(self, name) <= _LARGEST:
                message = f"{name} is {getattr(self, name)}; it must be at least 1 and at most {_LARGEST}."
                raise LiVTError(message, argument=name)
        check_patches(self)
        if self.hidden_size % self.num_attention_heads:
            message = f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads."
            raise LiVTError(message, argument="num_attention_heads")
        if not 0 <= self.drop_path_rate < 1:
            message = f"drop_path_rate {self.drop_path_rate} must be at least 0 and below 1."
            raise LiVTError(message, argument="drop_path_rate")


def check_patches(config: PreTrainedConfig) -> None:
    size, patch = config.image_size, config.patch_size
    if size % patch:
        message = (
            f"image_size {size} is not a multiple of patch_size {patch}; {size // patch * patch or patch} would be."
        )
        raise LiVTError(message, argument="image_size")


def merge_config_values(values: dict, settings: dict) -> dict:
    """Return the flat values of a config with changes; new labels drop what belongs to the old ones."""
    values, settings = ({**given, **(given.get("long_tail") or {}), "long_tail": None} for given in (values, settings))
    if not _keep_labels(settings, values):
        values = {name: value for name, value in values.items() if name not in LABEL_FIELDS}
    elif settings.get("id2label"):
        settings.setdefault("label2id", {name: label for label, name in enumerate(get_label_names(settings))})
    return LongTailConfig.merge(values, settings)


def _keep_labels(settings: dict, values: dict) -> bool:
    """Return True if the labels asked for are those of the values, perhaps under other names."""
    if "id2label" in settings:
        return is_same_labels(get_label_names(values), get_label_names(settings), "class_counts" in settings)
    counts = settings.get("class_counts")
    wanted = settings.get("num_labels") or (0 if counts is None else np.size(counts))
    return not wanted or wanted == len(get_label_names(values))


def is_same_labels(old: list[str], new: list[str], other_counts: bool) -> bool:
    """Return True if new label names mean the old classes, perhaps under other names.

    The same names in another order do not, nor do other names that come with class counts of their own.
    """
    return old == new or (len(old) == len(new) and set(old) != set(new) and not other_counts)


def get_label_names(config: dict) -> list[str]:
    """Return label names in order of their ids; transformers leaves out the default two."""
    names = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    return [name for _, name in sorted((int(label), name) for label, name in names.items())]


__all__ = ["LiViTConfig"]
