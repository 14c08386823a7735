"""`balance`: the long-tailed head on any image classifier of transformers, and of timm through its wrapper."""

import functools
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from livt_hf.errors import LiVTError
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import CosineClassifier, LongTailHead, classifier_init_std
from livt_hf.long_tail.priors import Prior
from livt_hf.long_tail.structure import get_classifier, parameter_depths, parameters_without_decay, use_channels_last


class BalancedClassifier:
    """An image classifier whose loss and probabilities come from its `LongTailHead`. Its logits have no bias added."""

    head: LongTailHead
    # Trainer divides the loss by the accumulation steps only if forward does not claim to do it.
    accepts_loss_kwargs = False

    def loss_function(self, labels: Tensor, logits: Tensor | None = None, config=None, **kwargs) -> Tensor:  # noqa: ARG002
        """What the forward of every stock class calls; ConvNeXt calls its logits `pooled_logits`."""
        return self.head(kwargs["pooled_logits"] if logits is None else logits, labels, self.head.features)

    @torch.no_grad()
    def probabilities(self, pixel_values: Tensor, prior: Prior = None, **inputs) -> Tensor:
        """Class probabilities under a serving prior (None: the config's test prior). (B, C)"""
        return self.head.posterior(self(pixel_values, **inputs).logits, prior)

    def parameter_depths(self) -> dict[str, int]:
        """The layer each parameter belongs to."""
        return parameter_depths(self)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay leaves alone."""
        return parameters_without_decay(self)


def balance(
    model: PreTrainedModel, class_counts: Sequence[int] | None = None, *, fresh_classifier: bool = False, **settings
) -> PreTrainedModel:
    """The same model with the loss of a `LongTailConfig` for hard, soft and multi-hot labels, and `probabilities`.

    Further keywords are fields of `LongTailConfig`. The settings become `config.long_tail`, which `save_pretrained`
    keeps. Settings saved there are taken, and class counts and keywords replace some of them. The model stays an
    instance of its class, and what it saves is loaded by that class.

    `fresh_classifier=True` starts the classifier anew: small weights, and the bias where `head_start` says; with class
    counts the settings begin anew, too.
    A classifier that was trained elsewhere gets probabilities under any prior without training:
    `balance(model, class_counts=counts, loss="ce")` (or "bce") names the loss it was trained with.
    """
    classifier = get_classifier(model)
    if not isinstance(model, BalancedClassifier):
        _check_kind(model)
    if class_counts is not None:
        settings["class_counts"] = class_counts
    if fresh_classifier:
        settings = {"calibration": None} | settings  # one of the old classifier means nothing to the new one
    anew = fresh_classifier and class_counts is not None
    saved = None if anew else getattr(model.config, "long_tail", None)
    model.config.long_tail = _settings(model, saved, settings, isinstance(classifier, CosineClassifier))
    if isinstance(model, BalancedClassifier):
        model.head.derive(classifier.weight.device)
    else:
        _attach_head(model, classifier)
    if fresh_classifier:
        _start(classifier, model.head)
    return model


def _settings(model: PreTrainedModel, saved: dict | None, settings: dict, cosine: bool) -> LongTailConfig:
    if saved is None and "class_counts" not in settings:
        raise LiVTError(f"the config of this {type(model).__name__} has no long_tail settings; pass class_counts.")
    long_tail = LongTailConfig.from_dict(LongTailConfig.changed(saved or {}, settings))
    long_tail.check_labels(model.config.num_labels, model.config.problem_type == "multi_label_classification")
    if long_tail.normalised_classifier != cosine:
        raise LiVTError(
            f"normalised_classifier={long_tail.normalised_classifier} does not fit the classifier of this "
            f"{type(model).__name__}; only a LiViT has one that is made so."
        )
    return long_tail


def _check_kind(model: PreTrainedModel) -> None:
    forward = inspect.unwrap(type(model).forward)
    if "loss_function" not in forward.__code__.co_names or hasattr(model, "head"):
        raise LiVTError(
            f"{type(model).__name__} is not a known kind of image classifier: its forward should call "
            "`self.loss_function`, and it should have no part called `head`."
        )


def _attach_head(model: PreTrainedModel, classifier: nn.Linear) -> None:
    model.__class__ = _balanced_class(type(model))
    model.head = LongTailHead(model.config).to(classifier.weight.device).train(model.training)
    classifier.register_forward_pre_hook(model.head.capture_features)
    model.register_forward_hook(model.head.release_features, always_call=True)
    use_channels_last(model)


@functools.cache
def _balanced_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`kind` with the methods of a balanced classifier, under its own name: that is the one a checkpoint tells."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduced}
    return type(kind.__name__, (BalancedClassifier, kind), names)


def _reduced(model: PreTrainedModel, protocol: int) -> tuple:
    """How a balanced model is pickled: its class, which is found under no name, is made again."""
    _, (kind, *_), *rest = object.__reduce_ex__(model, protocol)
    return _empty, (kind.__mro__[2],), *rest


def _empty(kind: type[PreTrainedModel]) -> PreTrainedModel:
    balanced = _balanced_class(kind)
    return balanced.__new__(balanced)


@torch.no_grad()
def _start(classifier: nn.Linear, head: LongTailHead) -> None:
    nn.init.trunc_normal_(classifier.weight, std=classifier_init_std(classifier))
    if classifier.bias is not None:
        classifier.bias.copy_(head.initial_classifier_bias())
