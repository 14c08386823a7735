"""Where fine-tuning starts: a LiViT, or any image classifier of transformers and timm, each under a balanced head."""

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
from livt_hf.configuration_livit import LiViTConfig, get_size_name
from livt_hf.data import class_counts, eval_processor, normalization
from livt_hf.data.decoding import is_native
from livt_hf.data.labels import class_feature, is_multi_label
from livt_hf.data.sampling import seen_counts
from livt_hf.errors import LiVTError
from livt_hf.long_tail.balance import balance
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.priors import read_numbers, read_prior
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.pretrained import explain_load_errors, load_image_classifier, read_config
from livt_hf.processors import read_input_spec, resize_processor
from livt_hf.runs import lent_by_pretraining
from livt_hf.settings import FinetuneSettings
from livt_hf.training.results import image_size

logger = logging.getLogger(__name__)


def is_livit_compatible(config: dict) -> bool:
    """Whether a checkpoint is read into a LiViT: every plain ViT is, for its patch tokens are pooled and dropped."""
    return config.get("model_type") in ("livit", "vit", "vit_mae") or "livit" in config


def inherit_from_checkpoint(asked: dict) -> dict:
    """What fine-tuning takes over from where it starts: its size and, of a pretraining run, its data too."""
    lent, named = lent_by_pretraining(asked), asked.get("pretrained", "none")
    if not lent and named != "none":
        config = read_config(named)
        if is_livit_compatible(config):
            return {"model_size": get_size_name(config), "patch_size": config["patch_size"]}
        family = config.get("architecture") or config.get("model_type")
        own = {"model_size": family, "patch_size": None, "pooling": FinetuneSettings.pooling}
        for name in own.keys() & asked.keys():
            if asked[name] != own[name]:
                raise LiVTError(f"{named} is a {family}, which is as it is; leave --{name} out.")
        return {"model_size": family, "patch_size": None, "tune": "full"}
    return lent


def build_classifier(settings: FinetuneSettings, train: Dataset) -> PreTrainedModel:
    """The model at its start: from scratch or from a checkpoint, under a fresh head that knows the class counts."""
    head, labels = build_head_config(settings, train), build_label_config(train)
    if settings.pretrained != "none" and not is_livit_compatible(read_config(settings.pretrained)):
        return _backbone(settings, head, labels)
    encoder = {"pooling": settings.pooling, "drop_path_rate": settings.drop_path}
    if settings.pretrained == "none" or settings.image_size is not None:  # else that of the checkpoint
        encoder["image_size"] = image_size(settings)
    if settings.pretrained == "none":
        if settings.patch_size is not None:
            encoder["patch_size"] = settings.patch_size
        return LiViTForImageClassification(LiViTConfig.preset(settings.model_size, **encoder, **head, **labels))
    with explain_load_errors(settings.pretrained):
        model = LiViTForImageClassification.from_pretrained(
            settings.pretrained, dtype=torch.float32, **encoder, **head, **labels
        )
    found = get_size_name(model.config.to_dict())
    if found != settings.model_size:
        raise LiVTError(f"{settings.pretrained} is of size {found}; leave --model_size out.")
    if settings.patch_size not in (None, model.config.patch_size):
        raise LiVTError(f"{settings.pretrained} has patches of {model.config.patch_size}; leave --patch_size out.")
    return model


def build_head_config(settings: FinetuneSettings, train: Dataset) -> dict:
    """The fields of a `LongTailConfig`: those that are options, and what the training images say."""
    counts = class_counts(train)
    names, several = class_feature(train).names, is_multi_label(train)
    empty = [names[label] for label in np.flatnonzero(counts == 0)[:10]]
    if empty:
        raise LiVTError(f"classes {empty} have no training image, so their prior is undefined; leave them out.")
    head = {name: getattr(settings, name) for name in LongTailConfig.names() if name in settings.names()}
    head |= {"class_counts": counts.tolist(), "num_train_images": len(train) if several else None}
    softened = {"mixup": settings.mixup, "cutmix": settings.cutmix}
    head["trained_with"] = {name: alpha for name, alpha in softened.items() if alpha}
    if settings.sampler != "natural":
        head["seen_counts"] = seen_counts(counts, settings.sampler, settings.epochs).tolist()
    if settings.class_weights is not None:
        head["class_weights"] = read_numbers(settings.class_weights, names, "class weights")
    if settings.test_prior == "none" or several and settings.test_prior == "uniform":  # labels share no probability
        head["test_prior"] = None
    elif settings.test_prior != "uniform":
        head["test_prior"] = read_prior(settings.test_prior, names, multi_label=several)
    return head


def build_label_config(train: Dataset) -> dict:
    """What the config of any classifier says of its labels; whatever a checkpoint's labels were is replaced."""
    names = class_feature(train).names
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: label for label, name in enumerate(names)},
        "problem_type": "multi_label_classification" if is_multi_label(train) else None,
    }


def _backbone(settings: FinetuneSettings, head: dict, labels: dict) -> PreTrainedModel:
    """An image classifier of any family with a balanced head. A classifier that was balanced for these very labels is
    kept, so that one can train the head first and then everything; any other is replaced by a fresh one.
    """
    path = settings.pretrained
    with explain_load_errors(path):
        config = AutoConfig.from_pretrained(path)
        drops = {"drop_path_rate": settings.drop_path} if _has_drop_path(config) else {}
    fresh = getattr(config, "long_tail", None) is None or config.id2label != labels["id2label"]
    for name, value in labels.items():
        setattr(config, name, value)
    if settings.drop_path and not drops:
        logger.info("%s has no stochastic depth: drop_path %g does nothing.", path, settings.drop_path)
    if isinstance(config, TimmWrapperConfig):
        # Loaded with labels, it would save those again.
        config.label_names = list(labels["id2label"].values())
        config.model_args = (config.model_args or {}) | drops
        if settings.image_size is not None:
            config.pretrained_cfg["input_size"] = (3, settings.image_size, settings.image_size)
    else:
        config.update(drops)
    return balance(load_image_classifier(path, config), fresh_classifier=fresh, **head)


def _has_drop_path(config: PreTrainedConfig) -> bool:
    """Whether a model has stochastic depth; some classes of timm hand it on to a parent."""
    if not isinstance(config, TimmWrapperConfig):
        return hasattr(config, "drop_path_rate")
    with torch.device("meta"):
        kinds = type(timm.create_model(config.architecture, **(config.model_args or {}))).__mro__
    return any("drop_path_rate" in inspect.signature(kind.__init__).parameters for kind in kinds)


def build_processor(settings: FinetuneSettings, train: Dataset, model: PreTrainedModel) -> BaseImageProcessor:
    """The processor that is saved with the model: the backbone's own, or for a LiViT one with its statistics."""
    if not isinstance(model, LiViTForImageClassification):
        return _backbone_processor(settings, model)
    mean, std = normalization(settings.dataset)
    if settings.pretrained != "none":
        try:
            saved, _ = ViTImageProcessor.get_image_processor_dict(settings.pretrained)
            mean, std = saved["image_mean"], saved["image_std"]
        except (OSError, KeyError):
            logger.warning(
                "%s does not say how its images were normalised; taking the statistics of %s.",
                settings.pretrained,
                settings.dataset,
            )
    size = model.config.image_size
    return eval_processor(size, mean, std, native=is_native(train, size))


def _backbone_processor(settings: FinetuneSettings, model: PreTrainedModel) -> BaseImageProcessor:
    processor = load_processor(settings.pretrained)
    if settings.image_size is not None:
        processor = resize_processor(processor, settings.image_size)
    side = read_input_spec(processor).size
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, side, side))
    except (ValueError, RuntimeError, AssertionError) as error:  # the last is timm's
        words = str(error).splitlines()[0]
        raise LiVTError(
            f"{settings.pretrained} does not take images of {side} pixels ({words}); leave --image_size out."
        ) from error
    return processor


def freeze_unused_parameters(model: PreTrainedModel, side: int) -> None:
    """Freeze what no logit depends on (the mask token of a DINOv2, the pooling of a SigLIP, the last norm of a CLIP).

    It would learn nothing, and several processes would wait for its gradient in vain.
    """
    model.eval()(torch.zeros(1, 3, side, side)).logits.sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
