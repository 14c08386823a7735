"""Reading checkpoints: a LiViT, its published BEiT form, the encoder of any ViT or ViTMAE, other classifiers."""

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import timm
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
    TimmWrapperConfig,
)

from livt_hf.configuration_livit import LABEL_FIELDS, LiViTConfig, get_label_names, is_same_labels, merge_config_values
from livt_hf.errors import LiVTError, did_you_mean, is_path_not_hub_id
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.fingerprint import (
    OTHER_LABELS,
    find_stale_reason,
    has_other_labels,
    warn_about_stale_settings,
)
from livt_hf.long_tail.structure import get_classifier, use_channels_last
from livt_hf.text import format_error, shell_line

logger = logging.getLogger(__name__)

# What a checkpoint of another model may hold that a LiViT encoder has no use for.
_NOT_ENCODER = ("decoder.", "classifier.", "pooler.", "layernorm.", "fc_norm.", "embeddings.mask_token")
_ENCODER_TYPES = ("livit", "vit", "vit_mae")
# The stock-BEiT form a LiViT is published in (see conversion.to_beit), read back under our names.
_BEIT_KEYS = {r"^beit\.pooler\.layernorm\.": "vit.fc_norm.", r"^beit\.": "vit."}
_PICKLE = "pytorch_model.bin"
NO_REMOTE_CODE = {"trust_remote_code": False}  # by default, transformers asks on the terminal whether to run it
_CONVERT_PICKLE = (
    "import torch; from safetensors.torch import save_file; folder = {folder!r}; "
    f"weights = torch.load(folder + '/{_PICKLE}', map_location='cpu', weights_only=True); "
    "save_file({{name: value.clone() for name, value in weights.items()}}, folder + '/model.safetensors', "
    "{{'format': 'pt'}})"
)
_SET_BY_WRAPPER = ("model_name", "pretrained", "num_classes")  # arguments of timm.create_model
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
        if path is None and config is not None:  # transformers loads the state_dict
            source = config.to_dict() | {"architectures": [cls.__name__]}
        else:
            source = _config_dict(path, **kwargs)
        values = _drop_settings_of_other_labels(source if config is None else config.to_dict(), path)
        target = _target_config(values, overrides, path)
        whole = cls.encoder_class is not None and _keeps_classifier(source, target, overrides)
        read = cls._read_encoder if cls.encoder_class is None else cls._read if whole else cls._add_classifier
        result = read(path, source, target, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        getattr(model, model.base_model_prefix, model).resize_positions(target.image_size)
        if whole:
            _replace_stale_settings(model, values.get("long_tail") or {}, overrides)
        return result

    @classmethod
    def _read_encoder(cls, path, source: dict, target: LiViTConfig, **kwargs):
        """Load the encoder at the checkpoint's resolution; only norms that its pooling lacked may be new."""
        norm = "fc_norm" if target.pooling == "mean" else "layernorm"
        new = set() if _source_pooling(source) == target.pooling else {f"{norm}.weight", f"{norm}.bias"}
        return cls._read(path, source, target, new=new, **kwargs)

    @classmethod
    def _add_classifier(cls, path, source: dict, target: LiViTConfig, **kwargs):
        """Load the encoder of a checkpoint under a fresh classifier."""
        labels = [get_label_names(values) for values in (source, target.to_dict())]
        if _has_our_head(source) and labels[0] != labels[1]:
            message = "%s has a classifier of %d labels; the one of these %d labels is new and untrained."
            logger.warning(message, path, *map(len, labels))
        elif target.long_tail.class_counts is None and get_label_names(target.to_dict()) == get_label_names({}):
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
    def _read(cls, path, source: dict, target: LiViTConfig, output_loading_info=False, new=frozenset(), **kwargs):
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
        if timm.is_model(str(path)) and "." not in str(path):
            hub_id = timm.get_pretrained_cfg(path).hf_hub_id
            known = f"its default weights are {hub_id}" if hub_id else "timm has no weights of it on the Hub"
            raise LiVTError(f"{path} is an architecture of timm, not a checkpoint; {known}.{near}")
    try:
        yield
    except LiVTError:
        raise
    except Exception as error:  # a damaged config comes to light in any line of the model that it describes
        if "trust_remote_code" in str(error):
            raise LiVTError(
                f"{path} brings the code of its model with it, and such code is not run; take a model of a family of "
                "transformers or timm."
            ) from error
        if Path(path, _PICKLE).exists() and not any(Path(path).glob("*.safetensors")):
            raise LiVTError(
                f"{path} has its weights in {_PICKLE} alone, a pickle, which could run code; this converts it without "
                f"running any:\n  {shell_line(['python', '-c', _CONVERT_PICKLE.format(folder=str(path))])}"
            ) from error
        raise LiVTError(f"{away}: {format_error(error)}{near}") from error


def load_config(path: str) -> PreTrainedConfig:
    """Load the config of a checkpoint with what its model needs.

    timm's `save_for_hf` writes `model_args` that transformers passes on beside the same arguments of its own.
    """
    config = AutoConfig.from_pretrained(path, **NO_REMOTE_CODE)
    if isinstance(config, TimmWrapperConfig) and config.model_args:
        config.model_args = {name: value for name, value in config.model_args.items() if name not in _SET_BY_WRAPPER}
    return config


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


def _drop_settings_of_other_labels(values: dict, path) -> dict:
    """Return the values of a config without long-tail settings for another number of labels, and warn of them.

    Other tools give a published model a new classifier and keep what they do not know.
    """
    if not has_other_labels(values.get("long_tail") or {}, len(get_label_names(values))):
        return values
    warn_about_stale_settings(path, OTHER_LABELS)
    return values | {"long_tail": {"loss": "ce"}}


def _target_config(values: dict, overrides: dict, path) -> LiViTConfig:
    """Return the config of the model to build: the checkpoint's or the given one, with overrides."""
    kind = values.get("model_type")
    if kind == "beit" and "livit" in values:
        values = values | values["livit"]
    elif kind is None and path is not None and Path(path, "adapter_config.json").exists():
        raise LiVTError(
            f"{path} holds an adapter (LoRA) and no model; load the model that it was trained on and pass both to "
            "peft.PeftModel.from_pretrained, or save what its merge_and_unload() returns."
        )
    elif kind not in _ENCODER_TYPES:
        raise LiVTError(
            f"{path} is a {kind!r} checkpoint; LiViT can start from {', '.join(_ENCODER_TYPES)}. Load it with "
            "AutoModelForImageClassification and pass it to livt_hf.balance."
        )
    values = merge_config_values(values, {})
    # Entries that no class declares stay, such as somebody's own and the settings of a quantisation.
    dropped = {"architectures", "transformers_version", "model_type", "livit"}
    if kind != "livit":
        dropped |= CONFIG_MAPPING[kind]().to_dict().keys() - _FIELDS
    if kind in ("vit", "vit_mae"):
        dropped |= LABEL_FIELDS | {"dtype"}
    values = {name: value for name, value in values.items() if name not in dropped}
    return LiViTConfig(**merge_config_values(values, overrides))


def _has_our_head(source: dict) -> bool:
    classifier = any("Classification" in name for name in source.get("architectures") or ())
    return classifier and source["model_type"] in ("livit", "beit")


def _keeps_classifier(source: dict, target: LiViTConfig, overrides: dict) -> bool:
    """Return True if the classifier of a checkpoint is that of the model to build."""
    saved, head = merge_config_values(source, {}), target.long_tail
    same_head = _has_our_head(source) and _source_pooling(source) == target.pooling
    same_head &= saved.get("normalised_classifier", False) == head.normalised_classifier
    other_counts = "class_counts" in overrides or head.class_counts != saved.get("class_counts")
    names = get_label_names(source), get_label_names(target.to_dict())
    return same_head and is_same_labels(*names, other_counts)


def _replace_stale_settings(model: PreTrainedModel, saved: dict, overrides: dict) -> None:
    """Replace settings of another classifier than was loaded, by those named or by those of other tools."""
    reason = find_stale_reason(model, saved)
    if reason is None or saved.get("normalised_classifier"):
        return
    several = model.config.problem_type == "multi_label_classification"
    settings = dict(loss="bce", test_prior=None) if several else dict(loss="ce")
    named = {name: value for name, value in overrides.items() if name in LongTailConfig.names()}
    if "loss" in named:
        settings |= {name: saved.get(name) for name in ("class_counts", "num_train_images")}
    else:
        warn_about_stale_settings(model.name_or_path, reason)
    model.config.long_tail = LongTailConfig.from_dict(settings | named)
    model.head.update_buffers(model.device)


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
        config = load_config(path)
    model = load_image_classifier(path, config)
    use_channels_last(model)
    return model.eval()


def load_image_classifier(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Load the image classifier of a checkpoint; only its classifier may be missing or of other labels."""
    # Weights that were saved in half precision are trained in full: small updates would be rounded away.
    options = dict(config=config, dtype=torch.float32, use_safetensors=True)
    options |= dict(ignore_mismatched_sizes=True, output_loading_info=True) | NO_REMOTE_CODE
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
