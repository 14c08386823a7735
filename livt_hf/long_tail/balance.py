"""`balance`: a long-tail head on any image classifier of transformers, and of timm through its wrapper."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from livt_hf.errors import LiVTError
from livt_hf.long_tail.config import LongTailConfig, check_labels
from livt_hf.long_tail.fingerprint import (
    compute_fingerprint,
    find_stale_reason,
    read_classifier,
    warn_about_stale_settings,
)
from livt_hf.long_tail.head import CosineClassifier, LongTailHead, classifier_init_std
from livt_hf.long_tail.priors import Prior
from livt_hf.long_tail.structure import get_classifier, parameter_depths, parameters_without_decay, use_channels_last

_COUNTS = ("class_counts", "num_train_images")


class BalancedClassifier:
    """Image classifier whose loss and probabilities come from its `LongTailHead`. Its logits have no bias added."""

    head: LongTailHead
    # Trainer divides the loss by the accumulation steps only if forward does not claim to do it.
    accepts_loss_kwargs = False

    @torch.no_grad()
    def probabilities(self, pixel_values: Tensor, prior: Prior = None, **inputs) -> Tensor:
        """Return class probabilities under a deployment prior.

        Args:
            pixel_values: images (B, 3, H, W).
            prior: "uniform", one probability per class, or None for the `deployment_prior` of the config.
            **inputs: further inputs of the model.

        Returns:
            Probabilities (B, C).
        """
        return self.head.posterior(self(pixel_values, **inputs).logits, prior)

    def save_pretrained(self, save_directory, is_main_process: bool = True, state_dict=None, **kwargs):
        """Save as transformers does, with a fingerprint of the classifier beside the settings of the head."""
        if is_main_process:
            self.sign_settings(state_dict)
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)

    def sign_settings(self, state_dict=None) -> None:
        """Put the fingerprint of the classifier into the settings of the head."""
        tensors = read_classifier(self, state_dict)
        fingerprint = None if tensors is None else compute_fingerprint(tensors)
        self.config.long_tail = LongTailConfig.from_dict({**self.config.long_tail, "fingerprint": fingerprint})

    def parameter_depths(self) -> dict[str, int]:
        """Return the layer of each parameter, from 0 for the embeddings."""
        return parameter_depths(self)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that weight decay leaves alone."""
        return parameters_without_decay(self)


def balance(
    model: PreTrainedModel, class_counts: Sequence[int] | None = None, *, fresh_classifier: bool = False, **long_tail
) -> PreTrainedModel:
    """Attach a long-tail head to an image classifier of transformers or timm.

    The head replaces the model's loss by a prior-aware one (`loss="bal_bce"`, `"bal_ce"`, ...) for hard, soft and
    multi-hot labels, and adds `model.probabilities(pixel_values, prior=...)`. Logits are unchanged. The model stays an
    instance of its class; `save_pretrained` keeps the head's config as `config.long_tail`, and its own class loads it.

    Args:
        model: any `*ForImageClassification` model. One that was trained elsewhere gets probabilities without training:
            name the loss it was trained with, `loss="ce"` or `"bce"`.
        class_counts: number of training images per class; default: those of `config.long_tail`.
        fresh_classifier: re-initialise the classifier; with class counts, the saved head config is dropped too.
        **long_tail: fields of `LongTailConfig`; they replace those of `config.long_tail`.

    Returns:
        The same model object.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=32, num_labels=2)
        >>> model = balance(ViTForImageClassification(config), class_counts=[90, 10], loss="bal_ce")
        >>> images, labels = torch.zeros(4, 3, 32, 32), torch.tensor([0, 0, 0, 1])
        >>> loss = model(images, labels=labels).loss
        >>> model.probabilities(images, prior=[0.5, 0.5]).shape
        torch.Size([4, 2])
    """
    if not isinstance(model, PreTrainedModel):
        raise LiVTError(
            f"model is a {type(model).__name__}, not a model of transformers; load one of timm by "
            "AutoModelForImageClassification.from_pretrained('timm/NAME').",
            argument="model",
        )
    classifier = get_classifier(model)
    if not isinstance(model, BalancedClassifier) and hasattr(model, "head"):
        raise LiVTError(
            f"{type(model).__name__} is not a known kind of image classifier: it should have no part called `head`.",
            argument="model",
        )
    if class_counts is not None:
        long_tail["class_counts"] = class_counts
    if fresh_classifier:
        long_tail = {"calibration": None} | long_tail  # one of the old classifier means nothing to the new one
    if not (fresh_classifier or isinstance(model, BalancedClassifier)):
        drop_stale_settings(model, long_tail)
    replaced = class_counts is not None and fresh_classifier
    saved = None if replaced else getattr(model.config, "long_tail", None)
    model.config.long_tail = _build_config(model, saved, long_tail, isinstance(classifier, CosineClassifier))
    if isinstance(model, BalancedClassifier):
        model.head.update_buffers(classifier.weight.device)
    else:
        _attach_head(model, classifier)
    if fresh_classifier:
        _init_classifier(classifier, model.head)
    return model


def drop_stale_settings(model: PreTrainedModel, changes: Mapping = MappingProxyType({})) -> None:
    """Remove saved long-tail settings that belong to another classifier than the model has by now.

    Those that take their place (`changes`) are believed; where they name the loss only, the class counts stay.
    """
    saved = getattr(model.config, "long_tail", None)
    reason = saved and find_stale_reason(model, saved)
    if reason:
        model.config.long_tail = {n: saved[n] for n in _COUNTS if saved.get(n)} if "loss" in changes else None
        if not changes.keys() & {"class_counts", "loss"}:
            warn_about_stale_settings(model.name_or_path or "this model", reason)


def _build_config(model: PreTrainedModel, saved: dict | None, changes: dict, cosine: bool) -> LongTailConfig:
    if saved is None and "class_counts" not in changes:
        message = f"the config of this {type(model).__name__} has no long_tail settings; pass class_counts."
        raise LiVTError(message, argument="class_counts")
    long_tail = LongTailConfig.from_dict(LongTailConfig.merge(saved or {}, changes))
    check_labels(model.config, long_tail)
    if long_tail.normalised_classifier != cosine:
        raise LiVTError(
            f"normalised_classifier={long_tail.normalised_classifier} does not fit the classifier of this "
            f"{type(model).__name__}; only a LiViT has one that is made so.",
            argument="normalised_classifier",
        )
    return long_tail


def _attach_head(model: PreTrainedModel, classifier: nn.Linear) -> None:
    model.__class__ = _balanced_class(type(model))
    model.head = LongTailHead(model.config).to(classifier.weight.device).train(model.training)
    classifier.register_forward_pre_hook(model.head.capture_features)
    model.register_forward_hook(model.head.release_features, always_call=True)
    use_channels_last(model)


@functools.cache
def _balanced_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Create a subclass of `kind` with a balanced loss, under the same name: checkpoints record it."""

    names = list(inspect.signature(kind.forward).parameters)[1:]
    position = names.index("labels") if "labels" in names else len(names)

    @functools.wraps(kind.forward)  # Trainer reads the signature
    def forward(self, *args, labels: Tensor | None = None, **kwargs):
        if len(args) > position:  # given without their name: the model would compute its own loss
            args, labels = (*args[:position], None, *args[position + 1 :]), args[position]
        outputs = kind.forward(self, *args, **kwargs)
        if labels is None:
            self.head.note_missing_labels()
            return outputs
        is_tuple = not isinstance(outputs, ModelOutput)
        loss = self.head(outputs[0] if is_tuple else outputs.logits, labels, self.head.features)
        return (loss, *outputs) if is_tuple else type(outputs)(loss=loss, **outputs)

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
    return type(kind.__name__, (BalancedClassifier, kind), members | {"forward": forward})


def _reduce(model: PreTrainedModel, protocol: int) -> tuple:
    """Pickle a balanced model: its class is not found under its name and is created again."""
    _, (kind, *_), *rest = object.__reduce_ex__(model, protocol)
    return _create_empty, (kind.__mro__[2],), *rest


def _create_empty(kind: type[PreTrainedModel]) -> PreTrainedModel:
    balanced = _balanced_class(kind)
    return balanced.__new__(balanced)


@torch.no_grad()
def _init_classifier(classifier: nn.Linear, head: LongTailHead) -> None:
    nn.init.trunc_normal_(classifier.weight, std=classifier_init_std(classifier))
    if classifier.bias is not None:
        classifier.bias.copy_(head.initial_classifier_bias())
