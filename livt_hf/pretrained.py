"""Reading checkpoints: a LiViT, its published BEiT form, the encoder of any ViT or ViTMAE, other classifiers."""

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from livt_hf.configuration_livit import LABEL_FIELDS, LiViTConfig, get_label_names, merge_config_values
from livt_hf.errors import LiVTError, did_you_mean, is_path_not_hub_id
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.structure import get_classifier, use_channels_last
from livt_hf.text import format_error

logger = logging.getLogger(__name__)

# What a checkpoint of another model may hold that a LiViT encoder has no use for.
_NOT_ENCODER = ("decoder.", "classifier.", "pooler.", "layernorm.", "fc_norm.", "embeddings.mask_token")
_ENCODER_TYPES = ("livit", "vit", "vit_mae")
# The stock-BEiT form a LiViT is published in (see conversion.to_beit), read back under our names.
_BEIT_KEYS = {r"^beit\.pooler\.layernorm\.": "vit.fc_norm.", r"^beit\.": "vit."}
_FIELDS = {field.name for field in fields(LiViTConfig)} | {*LongTailConfig.names(), "num_labels"}


class CheckpointReader:
    """`from_pretrained` of the LiViT classes; a model with a head sets `encoder_class`."""

    encoder_class: type | None = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *_model_args, config=None, **kwargs):
        """Load a LiViT, its published BEiT form, or the encoder of any ViT or ViTMAE checkpoint.

        Fields of `LiViTConfig` and `LongTailConfig` may be given as keywords. The checkpoint is read in its own
        geometry, the set of new parameters is checked, and only then are positions resized (`image_size`) and a new
        classifier made (other labels). A `.bin` file is read only with `use_safetensors=False`, and then with
        `weights_only`.
        """
        path = pretrained_model_name_or_path
        if kwargs.get("weights_only") is False:
            raise LiVTError("weights_only=False would let the checkpoint run code; convert it to safetensors instead.")
        kwargs.setdefault("use_safetensors", True)
        if config is not None:  # not a field, so the copy made of the config would lose it
            kwargs.setdefault("attn_implementation", config._attn_implementation)
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in _FIELDS and name != "dtype"}
        source = _config_dict(path, **kwargs)
        target = _target_config(config or source, overrides, path)
        read = cls._read_encoder if cls.encoder_class is None else cls._read_classifier
        result = read(path, source, target, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        getattr(model, model.base_model_prefix, model).resize_positions(target.image_size)
        return result

    @classmethod
    def _read_encoder(cls, path, source: dict, target: LiViTConfig, **kwargs):
        """Load the encoder at the checkpoint's resolution; only norms that its pooling lacked may be new."""
        norm = "fc_norm" if target.pooling == "mean" else "layernorm"
        new = set() if _source_pooling(source) == target.pooling else {f"{norm}.weight", f"{norm}.bias"}
        return cls._read(path, source, target, new, **kwargs)

    @classmethod
    def _read_classifier(cls, path, source: dict, target: LiViTConfig, **kwargs):
        """Load the whole classifier if its head fits, else its encoder under a fresh head."""
        cosine = merge_config_values(source, {}).get("normalised_classifier", False)
        same_kind = _source_pooling(source) == target.pooling and cosine == target.long_tail.normalised_classifier
        if _has_our_head(source) and same_kind and get_label_names(source) == get_label_names(target.to_dict()):
            return cls._read(path, source, target, set(), **kwargs)
        if target.long_tail.class_counts is None and get_label_names(target.to_dict()) == get_label_names({}):
            logger.warning(
                "%s has no classifier, so this one has two untrained classes; pass class_counts, id2label or "
                "num_labels for yours.",
                path,
            )
        with_info = kwargs.pop("output_loading_info", False)
        encoder, info = cls.encoder_class._read_encoder(path, source, target, output_loading_info=True, **kwargs)
        # One config object for model and encoder: attention layers hold it too.
        model = cls(encoder.config).to(device=encoder.device, dtype=encoder.dtype)
        setattr(model, model.base_model_prefix, encoder)
        info["missing_keys"] = {f"{model.base_model_prefix}.{key}" for key in info["missing_keys"]}
        info["missing_keys"] |= {f"classifier.{name}" for name, _ in model.classifier.named_parameters()}
        return (model.eval(), info) if with_info else model.eval()

    @classmethod
    def _read(cls, path, source: dict, target: LiViTConfig, new: set[str], output_loading_info=False, **kwargs):
        """Load at the checkpoint's resolution and check that exactly `new` was not in the file."""
        config = copy.deepcopy(target)
        config.image_size = source["image_size"]
        beit = source.get("model_type") == "beit"
        if beit:
            kwargs["key_mapping"] = _BEIT_KEYS
        kwargs["ignore_mismatched_sizes"] = True  # so that they are format_names, and refused below in our words
        try:
            with hide_load_report():
                model, info = super().from_pretrained(path, config=config, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise LiVTError(
                f"the weights in {path} are damaged ({format_error(error)}); copy or download them again."
            ) from error
        if info["mismatched_keys"]:
            key, stored, wanted = min(info["mismatched_keys"])
            raise LiVTError(
                f"{path} has other sizes: {key} is {tuple(stored)} in the file and {tuple(wanted)} in the model asked "
                "for; of a checkpoint's sizes only image_size can be changed."
            )
        missing = {key for key in info["missing_keys"] if not (beit and key.endswith("k_proj.bias"))}
        info["missing_keys"] = missing
        unknown = [key for key in info["unexpected_keys"] if not key.removeprefix("vit.").startswith(_NOT_ENCODER)]
        if missing != new or unknown:
            raise LiVTError(
                f"{path} is not a ViT encoder of these sizes: it lacks {format_names(missing - new)} and has unknown "
                f"{format_names(unknown)}; pass a LiViT, ViT or ViTMAE checkpoint."
            )
        model._weight_conversions = None  # save under our own names, whatever names were read
        return (model, info) if output_loading_info else model


@contextlib.contextmanager
def explain_load_errors(path) -> Iterator[None]:
    """Turn what transformers raises on missing or damaged files into a `LiVTError`."""
    away, near = f"{path} could not be loaded as a checkpoint folder or from the Hub", ""
    if not Path(path).exists():
        near = did_you_mean(path)
        if is_path_not_hub_id(str(path)):
            raise LiVTError(f"{away}: there is no such folder.{near}")
    try:
        yield
    except LiVTError:
        raise
    except Exception as error:  # a damaged config comes to light in any line of the model that it describes
        raise LiVTError(f"{away}: {format_error(error)}{near}") from error


def read_config(path: str) -> dict:
    """Read the config of a checkpoint folder or of a model on the Hub."""
    with explain_load_errors(path):
        if not Path(path).exists() and "/" not in path and try_to_load_from_cache(path, "config.json") is None:
            # Perhaps a misspelt folder: one question, where loading asks many times.
            HfApi().model_info(path, timeout=10)
        return _config_dict(path)


def _config_dict(path, **kwargs) -> dict:
    config, _ = PreTrainedConfig.get_config_dict(path, **kwargs)  # which takes what it knows of the keywords
    if not isinstance(config, dict):
        raise LiVTError(f"the config.json of {path} holds a {type(config).__name__}; copy or download it again.")
    return config


@contextlib.contextmanager
def hide_load_report():
    """Suppress transformers' table of missing and unexpected keys; every such key is checked here."""
    transformers_logger = logging.getLogger("transformers.modeling_utils")

    def not_a_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    transformers_logger.addFilter(not_a_report)
    try:
        yield
    finally:
        transformers_logger.removeFilter(not_a_report)


def _target_config(base: dict | LiViTConfig, overrides: dict, path) -> LiViTConfig:
    """Return the config of the model to build: the checkpoint's or the given one, with overrides."""
    values = base if isinstance(base, dict) else base.to_dict()
    kind = values.get("model_type")
    if kind == "beit" and "livit" in values:
        values = values | values["livit"]
    elif kind not in _ENCODER_TYPES:
        raise LiVTError(
            f"{path} is a {kind!r} checkpoint; LiViT can start from {', '.join(_ENCODER_TYPES)}. Load it with "
            "AutoModelForImageClassification and pass it to livt_hf.balance."
        )
    values = merge_config_values(values, {})
    known = _FIELDS - {"architectures", "transformers_version", "dtype"}
    if kind in ("vit", "vit_mae"):
        known -= LABEL_FIELDS
    values = {name: value for name, value in values.items() if name in known}
    return LiViTConfig(**merge_config_values(values, overrides))


def _has_our_head(source: dict) -> bool:
    classifier = any("Classification" in name for name in source.get("architectures") or ())
    return classifier and source["model_type"] in ("livit", "beit")


def _source_pooling(source: dict) -> str:
    if source["model_type"] == "beit":
        return "mean" if source["use_mean_pooling"] else "cls"
    return source.get("pooling", "mean") if source["model_type"] == "livit" else "cls"


def format_names(names: Iterable[str]) -> str:
    """Return names for a sentence, the first five of them."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def load_backbone(path: str) -> PreTrainedModel:
    """Load a model of any family for its features; it may lack a classifier, but nothing else."""
    with explain_load_errors(path):
        config = AutoConfig.from_pretrained(path)
    model = load_image_classifier(path, config)
    use_channels_last(model)
    return model.eval()


def load_image_classifier(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Load the image classifier of a checkpoint; only its classifier may be missing or of other labels."""
    # Weights that were saved in half precision are trained in full: small updates would be rounded away.
    options = dict(config=config, dtype=torch.float32, use_safetensors=True)
    options |= dict(ignore_mismatched_sizes=True, output_loading_info=True)
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise LiVTError(
            f"{path} is a {config.model_type!r} checkpoint, for which transformers has no image classifier; take "
            "timm's form of it if there is one (timm/...), or the full checkpoint of a CLIP or SigLIP."
        )
    with explain_load_errors(path), hide_load_report():
        model, info = AutoModelForImageClassification.from_pretrained(path, **options)
    classifier = {id(parameter) for parameter in get_classifier(model).parameters()}
    fresh = {name for name, parameter in model.named_parameters() if id(parameter) in classifier}
    other = {key if isinstance(key, str) else key[0] for key in (*info["missing_keys"], *info["mismatched_keys"])}
    strange = sorted(key for key in other if not any(name.endswith(key) or key.endswith(name) for name in fresh))
    if strange:
        raise LiVTError(
            f"{path} lacks weights of the model it names, such as {', '.join(strange[:3])}; it cannot be a start."
        )
    return model
