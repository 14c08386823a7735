"""Where fine-tuning starts: a LiViT, or any image classifier of transformers and timm, each under a balanced head."""

import copy
import inspect
import logging
from dataclasses import dataclass

import numpy as np
import timm
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    TimmWrapperConfig,
    ViTImageProcessor,
)

from livt_hf.configuration_livit import LiViTConfig, size_name
from livt_hf.data import class_counts, eval_processor, normalization
from livt_hf.data.labels import class_feature, is_multi_label
from livt_hf.data.sampling import seen_counts
from livt_hf.errors import LiVTError
from livt_hf.evaluation.models import load_processor
from livt_hf.long_tail.anatomy import classifier_of, prefer_channels_last
from livt_hf.long_tail.balance import balance
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.priors import read_numbers, read_prior
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.pretrained import read_config, reading_checkpoint, without_load_report
from livt_hf.records import in_words
from livt_hf.runs import lent_by_pretraining
from livt_hf.settings import FinetuneSettings
from livt_hf.stages import image_size, is_native

logger = logging.getLogger(__name__)


def becomes_livit(config: dict) -> bool:
    """Whether a checkpoint is read into a LiViT: every plain ViT is, for its patch tokens are pooled and dropped."""
    return config.get("model_type") in ("livit", "vit", "vit_mae") or "livit" in config


def lent_by_checkpoint(asked: dict) -> dict:
    """What fine-tuning takes over from where it starts: its size and, of a pretraining run, its data too."""
    lent, named = lent_by_pretraining(asked), asked.get("pretrained", "none")
    if not lent and named != "none":
        config = read_config(named)
        if becomes_livit(config):
            return {"model_size": size_name(config), "patch_size": config["patch_size"]}
        family = config.get("architecture") or config.get("model_type")
        own = {"model_size": family, "patch_size": None, "pooling": FinetuneSettings.pooling}
        for name in own.keys() & asked.keys():
            if asked[name] != own[name]:
                raise LiVTError(f"{named} is a {family}, which is as it is; leave --{name} out.")
        return {"model_size": family, "patch_size": None, "tune": "full"}
    return lent


def build_classifier(settings: FinetuneSettings, train: Dataset) -> PreTrainedModel:
    """The model at its start: from scratch or from a checkpoint, under a fresh head that knows the class counts."""
    head, labels = head_settings(settings, train), label_settings(train)
    if settings.pretrained != "none" and not becomes_livit(read_config(settings.pretrained)):
        return _backbone(settings, head, labels)
    encoder = {"pooling": settings.pooling, "drop_path_rate": settings.drop_path}
    if settings.pretrained == "none" or settings.image_size is not None:  # else that of the checkpoint
        encoder["image_size"] = image_size(settings)
    if settings.pretrained == "none":
        if settings.patch_size is not None:
            encoder["patch_size"] = settings.patch_size
        return LiViTForImageClassification(LiViTConfig.preset(settings.model_size, **encoder, **head, **labels))
    with reading_checkpoint(settings.pretrained):
        model = LiViTForImageClassification.from_pretrained(
            settings.pretrained, dtype=torch.float32, **encoder, **head, **labels
        )
    found = size_name(model.config.to_dict())
    if found != settings.model_size:
        raise LiVTError(f"{settings.pretrained} is of size {found}; leave --model_size out.")
    if settings.patch_size not in (None, model.config.patch_size):
        raise LiVTError(f"{settings.pretrained} has patches of {model.config.patch_size}; leave --patch_size out.")
    return model


def head_settings(settings: FinetuneSettings, train: Dataset) -> dict:
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


def label_settings(train: Dataset) -> dict:
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
    with reading_checkpoint(path):
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
    return balance(_image_classifier(path, config), fresh_classifier=fresh, **head)


def _has_drop_path(config: PreTrainedConfig) -> bool:
    """Whether a model has stochastic depth; some classes of timm hand it on to a parent."""
    if not isinstance(config, TimmWrapperConfig):
        return hasattr(config, "drop_path_rate")
    with torch.device("meta"):
        kinds = type(timm.create_model(config.architecture, **(config.model_args or {}))).__mro__
    return any("drop_path_rate" in inspect.signature(kind.__init__).parameters for kind in kinds)


def load_backbone(path: str) -> PreTrainedModel:
    """A model of any family whose features are asked for: it may lack a classifier, but nothing else."""
    with reading_checkpoint(path):
        config = AutoConfig.from_pretrained(path)
    model = _image_classifier(path, config)
    prefer_channels_last(model)
    return model.eval()


def _image_classifier(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The image classifier of a checkpoint, whose classifier alone may be missing or of other labels."""
    # Weights that were saved in half precision are trained in full: small updates would be rounded away.
    options = dict(config=config, dtype=torch.float32, use_safetensors=True)
    options |= dict(ignore_mismatched_sizes=True, output_loading_info=True)
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise LiVTError(
            f"{path} is a {config.model_type!r} checkpoint, for which transformers has no image classifier; take "
            "timm's form of it if there is one (timm/...), or the full checkpoint of a CLIP or SigLIP."
        )
    with reading_checkpoint(path), without_load_report():
        model, info = AutoModelForImageClassification.from_pretrained(path, **options)
    classifier = {id(parameter) for parameter in classifier_of(model).parameters()}
    fresh = {name for name, parameter in model.named_parameters() if id(parameter) in classifier}
    other = {key if isinstance(key, str) else key[0] for key in (*info["missing_keys"], *info["mismatched_keys"])}
    strange = sorted(key for key in other if not any(name.endswith(key) or key.endswith(name) for name in fresh))
    if strange:
        raise LiVTError(
            f"{path} lacks weights of the model it names, such as {', '.join(strange[:3])}; it cannot be a start."
        )
    return model


@dataclass(frozen=True)
class InputFacts:
    """How a model wants its images: pixels on a side, and the statistics they are normalised with."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def input_facts(processor: BaseImageProcessor) -> InputFacts:
    config = getattr(processor, "data_config", None)  # of timm
    if config is not None:
        return InputFacts(config["input_size"][-1], tuple(config["mean"]), tuple(config["std"]))
    sizes = made_sizes(processor)
    side = min(min(sizes))
    if sizes != {(side, side)}:
        raise LiVTError(
            f"the image processor makes images whose shorter side has {side} pixels; have it crop squares "
            "(do_center_crop and crop_size in preprocessor_config.json)."
        )
    return InputFacts(side, *_normalisation(processor))


def made_sizes(processor: BaseImageProcessor) -> set[tuple[int, int]]:
    """Heights and widths of what a processor makes of a tall and of a wide image."""
    images = (Image.new("RGB", shape) for shape in ((300, 400), (400, 300)))
    return {tuple(_prepared(processor, [image]).shape[-2:]) for image in images}


def _prepared(processor: BaseImageProcessor, images: list[Image.Image], **options) -> torch.Tensor:
    try:
        return processor(images, return_tensors="pt", **options)["pixel_values"]
    except Exception as error:  # a damaged file comes to light in any line of the processor
        raise LiVTError(
            f"the image processor cannot prepare an image ({in_words(error)}); correct preprocessor_config.json."
        ) from error


def _normalisation(processor: BaseImageProcessor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the deviation by which a processor normalises: seen in what it makes of black, white and red.

    Its attributes do not say it all: EfficientNet's divides by the deviation twice, MobileViT's swaps the channels.
    """
    images = [Image.new("RGB", (8, 8), colour) for colour in ("black", "white", "red")]
    black, white, red = _prepared(processor, images, do_resize=False, do_center_crop=False)[:, :, 0, 0]  # (3,) each
    if not torch.allclose(red, torch.stack([white[0], black[1], black[2]]), atol=1e-4):
        raise LiVTError(
            f"{type(processor).__name__} does more than rescale and normalise the colours of a pixel, and training "
            "would not; take timm's form of the model if there is one (timm/...)."
        )
    std = 1 / (white - black)
    return tuple((-black * std).tolist()), tuple(std.tolist())


def serving_processor(settings: FinetuneSettings, train: Dataset, model: PreTrainedModel) -> BaseImageProcessor:
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
        processor = resized(processor, settings.image_size)
    side = input_facts(processor).size
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, side, side))
    except (ValueError, RuntimeError, AssertionError) as error:  # the last is timm's
        words = str(error).splitlines()[0]
        raise LiVTError(
            f"{settings.pretrained} does not take images of {side} pixels ({words}); leave --image_size out."
        ) from error
    return processor


def resized(processor: BaseImageProcessor, side: int) -> BaseImageProcessor:
    """The same processor for another image size; a margin around the centre crop stays in proportion."""
    processor = copy.deepcopy(processor)
    if hasattr(processor, "data_config"):
        config = processor.data_config | {"input_size": (3, side, side)}
        return type(processor)(pretrained_cfg=config, architecture=processor.architecture)
    factor = side / input_facts(processor).size
    for name in ("size", "crop_size"):
        sizes = getattr(processor, name, None)
        if sizes is not None:
            setattr(processor, name, {key: round(value * factor) for key, value in dict(sizes).items() if value})
    return processor
