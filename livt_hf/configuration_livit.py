"""`LiViTConfig`: the sizes of a ViT, how it pools, and the balanced head."""

import math
from typing import Literal, get_args

from transformers import PreTrainedConfig

from livt_hf.errors import LiVTError
from livt_hf.long_tail.losses import LOSSES
from livt_hf.long_tail.priors import as_prior

# The encoders; intermediate layers are four times the width, as in every ViT of the paper.
PRESETS: dict[str, dict[str, int]] = {
    "micro": dict(hidden_size=128, num_hidden_layers=6, num_attention_heads=4, image_size=32, patch_size=4),
    "tiny": dict(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, image_size=224, patch_size=16),
    "small": dict(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=224, patch_size=16),
    "base": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, image_size=224, patch_size=16),
    "large": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, image_size=224, patch_size=16),
}
_SIZES = (*PRESETS["base"], "intermediate_size", "num_channels")


def encoder_preset(size: str) -> dict[str, int]:
    if size not in PRESETS:
        raise LiVTError(f"model size {size!r} is not known; choose one of {', '.join(PRESETS)}.")
    return PRESETS[size] | {"intermediate_size": 4 * PRESETS[size]["hidden_size"]}


def size_name(config: dict) -> str:
    """The preset that a model's config has the sizes of, or its sizes."""
    for name, preset in PRESETS.items():
        if all(config[key] == preset[key] for key in ("hidden_size", "num_hidden_layers")):
            return name
    return f"{config['hidden_size']}x{config['num_hidden_layers']}"


def _whole(count) -> int:
    if count != int(count):
        raise LiVTError(f"class_counts holds {count}; counts of images are whole numbers.")
    return int(count)


class LiViTConfig(PreTrainedConfig):
    """Configuration of `LiViTModel` and `LiViTForImageClassification`; the defaults are the paper's ViT-B.

    pooling: "mean" (the paper's: fc_norm of the mean patch token, no final norm) or "cls" (final norm, class token).
    drop_path_rate: stochastic depth of the last layer, rising linearly from 0.
    loss: a name of `livt_hf.losses.LOSSES`.
    class_counts: training images of each class; `num_train_images` is their sum unless images have several labels.
    tau: strength of the logit bias. test_prior: None (Theorem 2), "uniform" (Eq. 13) or a prior (Theorem 3).
    bias: which theorem's bias a balanced sigmoid loss gets, "bce" (2 and 3) or "ce" (1: the paper's negative example).
    head_start: where the classifier's bias starts under a sigmoid loss: "prior", logit(test_prior), or "zero".
    label_smoothing: applied once, in the loss, in training mode.
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

    loss: str = "bal_bce"
    class_counts: list[int] | None = None
    num_train_images: int | None = None
    tau: float | int = 1.0
    test_prior: str | list[float] | None = "uniform"
    bias: Literal["bce", "ce"] = "bce"
    head_start: Literal["prior", "zero"] = "prior"
    label_smoothing: float | int = 0.0
    cb_beta: float = 0.9999
    ldam_max_margin: float | int = 0.5
    ldam_scale: float | int = 30.0
    lade_weight: float | int = 0.1
    lade_lambda: float | int = 0.01
    ib_alpha: float | int = 1000.0
    nt_lambda: float | int = 2.0

    def __post_init__(self, **kwargs):
        if self.class_counts is not None:
            self.class_counts = [_whole(count) for count in self.class_counts]
            if self.id2label is None:
                kwargs.setdefault("num_labels", len(self.class_counts))
        if self.test_prior is not None and not isinstance(self.test_prior, str):
            self.test_prior = [float(value) for value in self.test_prior]
        if self.id2label is not None and kwargs.get("num_labels", len(self.id2label)) != len(self.id2label):
            raise LiVTError(f"id2label names {len(self.id2label)} labels and num_labels is {kwargs['num_labels']}.")
        super().__post_init__(**kwargs)
        self._check_sizes()
        self._check_head()

    @classmethod
    def preset(cls, size: str = "base", **overrides) -> "LiViTConfig":
        return cls(**(encoder_preset(size) | overrides))

    @property
    def multi_label(self) -> bool:
        return self.problem_type == "multi_label_classification"

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_images(self) -> int | None:
        """The N of pi_j = n_j / N where it is not the sum of the counts."""
        return self.num_train_images if self.multi_label else None

    @property
    def no_posterior(self) -> str | None:
        """Why this head's outputs are not posteriors, or None where they are."""
        if self.loss in ("nt_bce", "bal_nt_bce") and self.nt_lambda == 1:
            return None
        return LOSSES[self.loss].no_posterior

    def _check_sizes(self):
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise LiVTError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.image_size % self.patch_size:
            raise LiVTError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}; "
                f"{self.image_size // self.patch_size * self.patch_size or self.patch_size} would be."
            )
        if self.hidden_size % self.num_attention_heads:
            raise LiVTError(f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads.")
        if not 0 <= self.drop_path_rate < 1:
            raise LiVTError(f"drop_path_rate {self.drop_path_rate} must be at least 0 and below 1.")

    def _check_head(self):
        if self.loss not in LOSSES:
            raise LiVTError(
                f"loss {self.loss!r} is not known; choose one of {', '.join(sorted(LOSSES))}, "
                "or import the module that registers it."
            )
        for name in ("pooling", "bias", "head_start"):
            choices = get_args(LiViTConfig.__annotations__[name])
            if getattr(self, name) not in choices:
                raise LiVTError(f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(choices)}.")
        if self.num_labels < 2:
            raise LiVTError(f"num_labels is {self.num_labels}; a classifier needs at least two classes.")
        if not (math.isfinite(self.tau) and self.tau >= 0):
            raise LiVTError(f"tau {self.tau} must be a finite number, 0 (no bias) or more.")
        spec = LOSSES[self.loss]
        if self.multi_label and self.bias == "ce":
            raise LiVTError("bias='ce' compares the classes of one image; multi-label data needs bias='bce'.")
        if self.multi_label and spec.activation == "softmax":
            raise LiVTError(f"loss {self.loss!r} picks one class an image; multi-label data needs a sigmoid loss.")
        if not 0 <= self.label_smoothing < 1:
            raise LiVTError(f"label_smoothing {self.label_smoothing} must be at least 0 and below 1.")
        if self.label_smoothing and (self.multi_label or not spec.soft_labels):
            what = "multi-label targets" if self.multi_label else f"loss {self.loss!r}, which wants hard labels"
            raise LiVTError(f"label_smoothing {self.label_smoothing} cannot be used with {what}; set it to 0.")
        if self.nt_lambda <= 0:
            raise LiVTError(f"nt_lambda {self.nt_lambda} must be positive; 1 is plain BCE.")
        if not 0 < self.cb_beta < 1:
            raise LiVTError(f"cb_beta {self.cb_beta} must lie between 0 and 1.")
        if self.multi_label and self.test_prior == "uniform":
            raise LiVTError(
                "test_prior='uniform' has no meaning with several labels an image; "
                "pass test_prior=None or one prior a class."
            )
        if self.test_prior is not None:
            prior = as_prior(self.test_prior, self.num_labels, multi_label=self.multi_label, what="test_prior")
            if (prior <= 0).any() or (prior >= 1).any():
                raise LiVTError("test_prior must lie strictly between 0 and 1 in every class; its log-odds are used.")
        if self.class_counts is not None:
            self._check_counts()

    def _check_counts(self):
        counts = self.class_counts
        if len(counts) != self.num_labels:
            raise LiVTError(f"class_counts has {len(counts)} entries for {self.num_labels} labels; give one a class.")
        empty = [label for label, count in enumerate(counts) if count <= 0]
        if empty:
            listed = str(empty[:10])[:-1] + (", ...]" if len(empty) > 10 else "]")
            raise LiVTError(
                f"classes {listed} have no training image, so their prior is undefined; "
                "drop them or pass class_counts."
            )
        if self.multi_label:
            if self.num_train_images is None:
                raise LiVTError("multi-label priors are n_j / num_train_images; pass num_train_images.")
            if max(counts) >= self.num_train_images:
                label = counts.index(max(counts))
                raise LiVTError(
                    f"class {label} has {counts[label]} of {self.num_train_images} images: a label that every "
                    "image has cannot be learned; drop it or correct num_train_images."
                )
        elif self.num_train_images is None:
            self.num_train_images = sum(counts)
        elif self.num_train_images != sum(counts):
            raise LiVTError(
                f"num_train_images is {self.num_train_images} but class_counts sum to {sum(counts)}; leave it out."
            )


__all__ = ["LiViTConfig"]
