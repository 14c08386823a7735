"""The start of a fine-tuning: a LiViT, or any image classifier of transformers and timm, with a long-tail head."""

import inspect
import logging

import numpy as np
import timm
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    TimmWrapperConfig,
    ViTImageProcessor,
)

from livt_hf.classifiers import load_processor
from livt_hf.configuration_livit import LiViTConfig, encoder_preset, get_size_name
from livt_hf.data import class_counts, eval_processor, normalization
from livt_hf.data.decoding import is_native
from livt_hf.data.labels import class_feature, is_multi_label
from livt_hf.data.sampling import seen_counts
from livt_hf.data.spec import FinetuneAugmentationSpec
from livt_hf.errors import LiVTError
from livt_hf.long_tail.balance import balance
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.spec import LossSpec
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.pretrained import explain_load_errors, load_image_classifier, read_config
from livt_hf.processors import read_input_spec, resize_processor
from livt_hf.training.spec import FinetuneModelSpec, FinetuneOptimizationSpec

logger = logging.getLogger(__name__)


def is_livit_compatible(config: dict) -> bool:
    """Return True if a checkpoint is read into a LiViT, as every plain ViT is: only its encoder is used."""
    return config.get("model_type") in ("livit", "vit", "vit_mae") or "livit" in config


def build_classifier(
    train: Dataset,
    spec: FinetuneModelSpec,
    loss: LossSpec,
    optimization: FinetuneOptimizationSpec,
    augmentation: FinetuneAugmentationSpec,
) -> PreTrainedModel:
    """Build the model at the start of a fine-tuning, from scratch or from a checkpoint, with a long-tail head."""
    path, labels = spec.pretrained, build_label_config(train)
    head = build_head_config(train, loss, optimization, augmentation)
    if path != "none" and not is_livit_compatible(read_config(path)):
        return _build_backbone_classifier(spec, head, labels)
    encoder = {"pooling": spec.pooling, "drop_path_rate": spec.drop_path}
    if path == "none":
        encoder["image_size"] = spec.image_size or encoder_preset(spec.model_size)["image_size"]
        if spec.patch_size is not None:
            encoder["patch_size"] = spec.patch_size
        return LiViTForImageClassification(LiViTConfig.preset(spec.model_size, **encoder, **head, **labels))
    if spec.image_size is not None:
        encoder["image_size"] = spec.image_size
    with explain_load_errors(path):
        model = LiViTForImageClassification.from_pretrained(path, dtype=torch.float32, **encoder, **head, **labels)
    size = get_size_name(model.config.to_dict())
    if size != spec.model_size:
        raise LiVTError(f"{path} is of size {size}; leave model_size out.", argument="model_size")
    if spec.patch_size not in (None, model.config.patch_size):
        message = f"{path} has patches of {model.config.patch_size}; leave patch_size out."
        raise LiVTError(message, argument="patch_size")
    return model


def build_head_config(
    train: Dataset, loss: LossSpec, optimization: FinetuneOptimizationSpec, augmentation: FinetuneAugmentationSpec
) -> LongTailConfig:
    """Build the config of the head from the options of the loss and the training images."""
    counts, names, several = class_counts(train), class_feature(train).names, is_multi_label(train)
    empty = [names[label] for label in np.flatnonzero(counts == 0)[:10]]
    if empty:
        raise LiVTError(f"classes {empty} have no training image, so their prior is undefined; leave them out.")
    sampled = None
    if optimization.sampler != "natural":
        sampled = seen_counts(counts, optimization.sampler, optimization.epochs).tolist()
    alphas = {"mixup": augmentation.mixup, "cutmix": augmentation.cutmix}
    return loss.build_config(
        counts.tolist(),
        names,
        num_train_images=len(train) if several else None,
        seen_counts=sampled,
        trained_with={name: alpha for name, alpha in alphas.items() if alpha},
    )


def build_label_config(train: Dataset) -> dict:
    """Return the label fields of a model config; they replace those of a checkpoint."""
    names = class_feature(train).names
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: label for label, name in enumerate(names)},
        "problem_type": "multi_label_classification" if is_multi_label(train) else None,
    }


def _build_backbone_classifier(spec: FinetuneModelSpec, head: LongTailConfig, labels: dict) -> PreTrainedModel:
    """Build an image classifier of any family with a long-tail head.

    A classifier that was balanced for the same labels is kept, so that one can train the head first and then
    everything; any other is replaced by a fresh one.
    """
    path = spec.pretrained
    with explain_load_errors(path):
        config = AutoConfig.from_pretrained(path)
        drops = {"drop_path_rate": spec.drop_path} if _has_drop_path(config) else {}
    fresh = getattr(config, "long_tail", None) is None or config.id2label != labels["id2label"]
    for name, value in labels.items():
        setattr(config, name, value)
    if spec.drop_path and not drops:
        logger.info("%s has no stochastic depth: drop_path %g does nothing.", path, spec.drop_path)
    if isinstance(config, TimmWrapperConfig):
        config.label_names = list(labels["id2label"].values())  # loaded with labels, it would save those again
        config.model_args = (config.model_args or {}) | drops
        if spec.image_size is not None:
            config.pretrained_cfg["input_size"] = (3, spec.image_size, spec.image_size)
    else:
        config.update(drops)
    return balance(load_image_classifier(path, config), fresh_classifier=fresh, **head)


def _has_drop_path(config: PreTrainedConfig) -> bool:
    """Return True if a model has stochastic depth; some classes of timm pass it on to a parent."""
    if not isinstance(config, TimmWrapperConfig):
        return hasattr(config, "drop_path_rate")
    with torch.device("meta"):
        kinds = type(timm.create_model(config.architecture, **(config.model_args or {}))).__mro__
    return any("drop_path_rate" in inspect.signature(kind.__init__).parameters for kind in kinds)


def build_processor(
    model: PreTrainedModel, train: Dataset, spec: FinetuneModelSpec, dataset: str
) -> BaseImageProcessor:
    """Build the image processor to train with and to publish.

    A backbone keeps its own. A LiViT gets one with the statistics of its checkpoint, or of the dataset of that name.
    """
    if not isinstance(model, LiViTForImageClassification):
        return _build_backbone_processor(spec, model)
    mean, std = normalization(dataset)
    if spec.pretrained != "none":
        try:
            saved, _ = ViTImageProcessor.get_image_processor_dict(spec.pretrained)
            mean, std = saved["image_mean"], saved["image_std"]
        except (OSError, KeyError):
            message = "%s does not say how its images were normalised; taking the statistics of %s."
            logger.warning(message, spec.pretrained, dataset)
    size = model.config.image_size
    return eval_processor(size, mean, std, native=is_native(train, size))


def _build_backbone_processor(spec: FinetuneModelSpec, model: PreTrainedModel) -> BaseImageProcessor:
    processor = load_processor(spec.pretrained)
    if spec.image_size is not None:
        processor = resize_processor(processor, spec.image_size)
    side = read_input_spec(processor).size
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, side, side))
    except (ValueError, RuntimeError, AssertionError) as error:  # the last is timm's
        reason = str(error).splitlines()[0]
        message = f"{spec.pretrained} does not take images of {side} pixels ({reason}); leave image_size out."
        raise LiVTError(message, argument="image_size") from error
    return processor


def freeze_unused_parameters(model: PreTrainedModel, side: int) -> None:
    """Freeze parameters that no logit depends on, such as the mask token of a DINOv2 or the last norm of a CLIP.

    Several processes would wait for their gradients in vain.
    """
    model.eval()(torch.zeros(1, 3, side, side)).logits.sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
