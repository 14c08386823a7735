"""Build the model and the image processor that a fine-tuning starts from.

The model is a LiViT, or any image classifier of transformers and timm, with a long-tail head.
"""

import inspect
import logging

import numpy as np
import timm
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel, TimmWrapperConfig, ViTImageProcessor

from livt_hf.classifiers import load_processor
from livt_hf.configuration_livit import LiViTConfig, get_size_name
from livt_hf.data import class_counts, eval_processor, normalization, shot_counts
from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.decoding import is_native
from livt_hf.data.labels import class_feature, is_multi_label
from livt_hf.data.sampling import seen_counts
from livt_hf.data.spec import DataSpec, FinetuneAugmentationSpec
from livt_hf.errors import LiVTError
from livt_hf.long_tail.balance import balance
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.spec import LossSpec
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.pretrained import explain_load_errors, load_config, load_image_classifier, read_config
from livt_hf.processors import FRAMINGS, frame_processor, read_input_spec, resize_processor
from livt_hf.training.framing import MAX_IMAGES, TRIAL_SHARE, FramingTrial, try_framings
from livt_hf.training.spec import FinetuneModelSpec, FinetuneOptimizationSpec

logger = logging.getLogger(__name__)


def is_livit_compatible(config: dict) -> bool:
    """Return True if a checkpoint is read into a LiViT, as every plain ViT is: only its encoder is used."""
    return config.get("model_type") in ("livit", "vit", "vit_mae") or "livit" in config


def build_model_and_processor(
    dataset: DatasetDict,
    spec: FinetuneModelSpec,
    loss: LossSpec,
    data: DataSpec,
    optimization: FinetuneOptimizationSpec,
    augmentation: FinetuneAugmentationSpec,
    objective: str | None,
    accelerator: Accelerator,
) -> tuple[PreTrainedModel, BaseImageProcessor, FramingTrial | None]:
    """Build the model and its image processor, and choose the framing of the images where it is "auto".

    Args:
        dataset: splits "train", "test" and perhaps "validation".
        spec: model, checkpoint and framing.
        loss: options of the long-tail head.
        data: source of the dataset; benchmarks keep the framing of the checkpoint.
        optimization: seed and time; a trial takes a share of the `hours`.
        augmentation: mixing, which the head records.
        objective: what a trial compares framings by.
        accelerator: of all processes.

    Returns:
        The model, its processor with the framing, and the trial that chose it; None where there was none.
    """
    train, trial, framing = dataset["train"], None, spec.framing
    model = build_classifier(train, spec, loss, optimization, augmentation)
    store_shot_counts(model, dataset)
    processor = build_processor(model, train, spec, data.dataset)
    if framing == "auto" and not isinstance(model, LiViTForImageClassification) and data.dataset not in PUBLIC:
        trial = try_framings(
            model,
            processor,
            train,
            accelerator,
            objective=objective,
            max_images=MAX_IMAGES["head" if spec.tune == "head" else "full"],
            seconds=None if optimization.hours is None else TRIAL_SHARE * 3600 * optimization.hours,
            seed=optimization.seed,
            num_workers=data.num_workers,
        )
        framing = trial.chosen if trial else "own"
    return model, apply_framing(model, processor, framing), trial


def build_classifier(
    train: Dataset,
    spec: FinetuneModelSpec,
    loss: LossSpec,
    optimization: FinetuneOptimizationSpec,
    augmentation: FinetuneAugmentationSpec,
) -> PreTrainedModel:
    """Build the model at the start of a fine-tuning, from scratch or from a checkpoint, with a long-tail head."""
    path, labels = spec.pretrained, build_label_config(train)
    long_tail = build_head_config(train, loss, optimization, augmentation)
    if path != "none" and not is_livit_compatible(read_config(path)):
        return _build_backbone_classifier(spec, long_tail, labels)
    options = {"pooling": spec.pooling, "drop_path_rate": spec.drop_path} | dict(long_tail) | labels
    if path == "none":
        return LiViTForImageClassification(LiViTConfig.preset(spec.model_size, **spec.sizes, **options))
    if spec.image_size is not None:
        options["image_size"] = spec.image_size
    with explain_load_errors(path):
        model = LiViTForImageClassification.from_pretrained(path, dtype=torch.float32, **options)
    size = get_size_name(model.config.to_dict())
    if size != spec.model_size:
        raise LiVTError(f"{path} is of size {size}; leave model_size out.", argument="model_size")
    if spec.patch_size not in (None, model.config.patch_size):
        message = f"{path} has patches of {model.config.patch_size}; leave patch_size out."
        raise LiVTError(message, argument="patch_size")
    return model


def store_shot_counts(model: PreTrainedModel, dataset: DatasetDict) -> None:
    """Store in the head how many images each class had before some were held out, which make the shot groups."""
    counts, settings = shot_counts(dataset).tolist(), model.config.long_tail
    if counts != settings.class_counts:
        model.config.long_tail = LongTailConfig.from_dict({**settings, "shot_counts": counts})


def build_head_config(
    train: Dataset, loss: LossSpec, optimization: FinetuneOptimizationSpec, augmentation: FinetuneAugmentationSpec
) -> LongTailConfig:
    """Build the config of the head from the options of the loss and the training images."""
    counts, names = class_counts(train), class_feature(train).names
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
        num_train_images=len(train) if is_multi_label(train) else None,
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


def _build_backbone_classifier(spec: FinetuneModelSpec, long_tail: LongTailConfig, labels: dict) -> PreTrainedModel:
    """Build an image classifier of any family with a long-tail head.

    A classifier that was balanced for the same labels is kept, so that one can train the head first and then
    everything; any other is replaced by a fresh one.
    """
    path = spec.pretrained
    with explain_load_errors(path):
        config = load_config(path)
        drops = {"drop_path_rate": spec.drop_path} if _has_drop_path(config) else {}
    fresh = getattr(config, "long_tail", None) is None or config.id2label != labels["id2label"]
    for name, value in labels.items():
        setattr(config, name, value)
    if spec.drop_path and not drops:
        message, about = "%s has no stochastic depth: drop_path %g does nothing.", {"arguments": ("drop_path",)}
        logger.info(message, path, spec.drop_path, extra=about)
    if isinstance(config, TimmWrapperConfig):
        config.label_names = list(labels["id2label"].values())  # loaded with labels, it would save those again
        config.model_args = (config.model_args or {}) | drops
        if spec.image_size is not None:
            config.pretrained_cfg["input_size"] = (3, spec.image_size, spec.image_size)
    else:
        config.update(drops)
    return balance(load_image_classifier(path, config), fresh_classifier=fresh, **long_tail)


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
    """Build the image processor to train with and to publish, with the framing of the checkpoint.

    A backbone keeps its own. A LiViT gets one with the statistics of its checkpoint, or of the dataset of that name.
    """
    if not isinstance(model, LiViTForImageClassification):
        processor = load_processor(spec.pretrained)
        if spec.image_size is not None:
            processor = resize_processor(processor, spec.image_size)
        check_image_side(model, read_input_spec(processor).size, "image_size")
        return processor
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


def apply_framing(model: PreTrainedModel, processor: BaseImageProcessor, framing: str) -> BaseImageProcessor:
    """Return the processor with a framing; "own" and "auto" leave it as it is.

    The config of a timm model holds the framing too, and is changed in place.
    """
    if framing not in FRAMINGS:
        return processor
    processor = frame_processor(processor, framing)
    if isinstance(model.config, TimmWrapperConfig):
        config = {name: processor.data_config[name] for name in ("crop_mode", "crop_pct")}
        model.config.pretrained_cfg = model.config.pretrained_cfg | config
    return processor


def check_image_side(model: PreTrainedModel, side: int, argument: str) -> None:
    """Raise an error, which names an argument, where a model does not take images of a size."""
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, side, side, device=model.device))
    except (ValueError, RuntimeError, AssertionError) as error:  # the last is timm's
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        kind = model.config.model_type
        message = f"this {kind} does not take images of {side} pixels ({reason}); leave {argument} out."
        raise LiVTError(message, argument=argument) from error


def freeze_unused_parameters(model: PreTrainedModel, side: int) -> None:
    """Freeze parameters that no logit depends on, such as the mask token of a DINOv2 or the last norm of a CLIP.

    Several processes would wait for their gradients in vain.
    """
    model.eval()(torch.zeros(1, 3, side, side)).logits.sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
