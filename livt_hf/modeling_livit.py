"""LiViT: transformers' ViT with stochastic depth, mean pooling and a head that carries its long-tail loss."""

import contextlib
import copy
import logging
from dataclasses import fields

import torch
from safetensors import SafetensorError
from timm.layers import DropPath
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.models.vit.modeling_vit import ViTEmbeddings, ViTLayer, ViTPreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from livt_hf.configuration_livit import LiViTConfig
from livt_hf.errors import LiVTError
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.priors import Prior

logger = logging.getLogger(__name__)

# What a checkpoint of another model may hold that a LiViT encoder has no use for.
_NOT_ENCODER = ("decoder.", "classifier.", "pooler.", "layernorm.", "fc_norm.", "embeddings.mask_token")
_ENCODER_TYPES = ("livit", "vit", "vit_mae", "beit")
# The stock-BEiT form a LiViT is published in (see conversion.to_beit), read back under our names.
_BEIT_KEYS = {r"^beit\.pooler\.layernorm\.": "vit.fc_norm.", r"^beit\.": "vit."}
_LABEL_FIELDS = ("id2label", "label2id", "num_labels", "class_counts", "num_train_images", "test_prior")
_LABEL_FIELDS += ("problem_type",)


class LiViTPreTrainedModel(ViTPreTrainedModel):
    config: LiViTConfig
    # Trainer divides the loss by the accumulation steps only if forward does not claim to do it.
    accepts_loss_kwargs = False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Load a LiViT, its published BEiT form, or the encoder of any ViT or ViTMAE checkpoint.

        Fields of `LiViTConfig` may be given as keywords. The checkpoint is read in its own geometry, the set of new
        parameters is checked, and only then are positions resized (`image_size`) and a new classifier made (other
        labels). A `.bin` file is read only with `use_safetensors=False`, and then with `weights_only`.
        """
        if kwargs.get("weights_only") is False:
            raise LiVTError("weights_only=False would let the checkpoint run code; convert it to safetensors instead.")
        kwargs.setdefault("use_safetensors", True)
        if config is not None:  # not a field, so the copy made of the config would lose it
            kwargs.setdefault("attn_implementation", config._attn_implementation)
        known = {field.name for field in fields(LiViTConfig)} | {"num_labels"}
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in known and name != "dtype"}
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        source, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **hub)
        target = _target_config(config or source, overrides, pretrained_model_name_or_path)
        return cls._from_source(pretrained_model_name_or_path, source, target, **kwargs)

    @classmethod
    def _load(cls, path, source: dict, config: LiViTConfig, new: set[str], output_loading_info=False, **kwargs):
        """transformers' loading, then a check that exactly `new` was not in the file."""
        beit = source.get("model_type") == "beit"
        if beit:
            kwargs["key_mapping"] = _BEIT_KEYS
        kwargs["ignore_mismatched_sizes"] = True  # so that they are listed, and refused below in our words
        try:
            with _without_load_report():
                model, info = super().from_pretrained(path, config=config, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise LiVTError(f"the weights in {path} are damaged ({error}); copy or download them again.") from error
        if info["mismatched_keys"]:
            key, stored, wanted = min(info["mismatched_keys"])
            raise LiVTError(
                f"{path} has other sizes: {key} is {tuple(stored)} in the file and {tuple(wanted)} in the model asked "
                "for; of a checkpoint's sizes only image_size can be changed."
            )
        missing = {key for key in info["missing_keys"] if not (beit and key.endswith("k_proj.bias"))}
        unknown = [key for key in info["unexpected_keys"] if not key.removeprefix("vit.").startswith(_NOT_ENCODER)]
        if missing != new or unknown:
            raise LiVTError(
                f"{path} is not a ViT encoder of these sizes: it lacks {_shorten(missing - new)} and has unknown "
                f"{_shorten(unknown)}; pass a LiViT, ViT or ViTMAE checkpoint."
            )
        model._weight_conversions = None  # save under our own names, whatever names were read
        return (model, info) if output_loading_info else model

    def parameter_depths(self) -> dict[str, int]:
        """The layer each parameter belongs to: 0 for embeddings, i + 1 for block i, depth + 1 for what follows."""
        vit = self if isinstance(self, LiViTModel) else self.vit
        depths = {id(p): 0 for p in vit.embeddings.parameters()}
        depths |= {id(p): i + 1 for i, layer in enumerate(vit.layers) for p in layer.parameters()}
        return {name: depths.get(id(p), len(vit.layers) + 1) for name, p in self.named_parameters()}

    def no_weight_decay(self) -> set[str]:
        """1-D tensors, the class token and the positions."""
        names = self.named_parameters()
        return {n for n, p in names if p.ndim <= 1 or n.endswith(("cls_token", "position_embeddings"))}


class LiViTModel(LiViTPreTrainedModel):
    """The encoder: tokens as `last_hidden_state`, pooled features as `pooler_output`."""

    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^classifier\.", r"pooler\.", r"layernorm\."]

    def __init__(self, config: LiViTConfig):
        super().__init__(config)
        self.embeddings = ViTEmbeddings(config)
        self.layers = nn.ModuleList([ViTLayer(config) for _ in range(config.num_hidden_layers)])
        rates = torch.linspace(0, config.drop_path_rate, config.num_hidden_layers, device="cpu").tolist()
        for layer, rate in zip(self.layers, rates, strict=True):
            # ViTLayer applies `dropout` to each residual branch just before adding it: the place of drop path.
            layer.dropout = nn.Sequential(nn.Dropout(config.hidden_dropout_prob), DropPath(rate))
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.pooling == "mean":
            self.fc_norm = norm
        else:
            self.layernorm = norm
        self.post_init()

    @classmethod
    def _from_source(cls, path, source: dict, target: LiViTConfig, **kwargs) -> "LiViTModel":
        model = cls._load_encoder(path, source, target, **kwargs)
        model.resize_positions(target.image_size)
        return model

    @classmethod
    def _load_encoder(cls, path, source: dict, target: LiViTConfig, **kwargs) -> "LiViTModel":
        """The encoder at the source's resolution; new are only the norms that the source's pooling did not have."""
        config = copy.deepcopy(target)
        config.image_size = source["image_size"]
        new = set()
        if target.pooling == "mean" and _source_pooling(source) != "mean":
            new = {"fc_norm.weight", "fc_norm.bias"}
        if target.pooling == "cls" and _source_pooling(source) == "mean":
            new = {"layernorm.weight", "layernorm.bias"}
        return cls._load(path, source, config, new, **kwargs)

    def resize_positions(self, image_size: int) -> None:
        """Change the native resolution, interpolating positions as forward would for an input of that size."""
        if image_size == self.config.image_size:
            return
        config = copy.deepcopy(self.config)
        config.image_size = image_size
        grid = torch.empty(1, config.num_patches + 1, config.hidden_size, device=self.device)
        positions = self.embeddings.interpolate_pos_encoding(grid, image_size, image_size)
        self.embeddings.position_embeddings = nn.Parameter(positions.detach().clone())
        self.embeddings.image_size = self.embeddings.patch_embeddings.image_size = (image_size, image_size)
        self.embeddings.patch_embeddings.num_patches = config.num_patches
        self.config.image_size = image_size

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor, **kwargs) -> BaseModelOutputWithPooling:
        _check_pixels(pixel_values, self.config)
        x = self.embeddings(pixel_values.to(self.dtype), interpolate_pos_encoding=True)  # (B, 1 + patches, D)
        for layer in self.layers:
            x = layer(x, **kwargs)
        if self.config.pooling == "mean":
            features = self.fc_norm(x[:, 1:].mean(dim=1))  # (B, D)
        else:
            x = self.layernorm(x)
            features = x[:, 0]  # (B, D)
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=features)


class LiViTForImageClassification(LiViTPreTrainedModel):
    """LiViT with a linear classifier. Its loss is always the configured one; its logits never contain the bias."""

    def __init__(self, config: LiViTConfig):
        super().__init__(config)
        self.vit = LiViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.head = LongTailHead(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if module is self.classifier:
            init.trunc_normal_(module.weight, std=2e-5)
            init.copy_(module.bias, self.head.classifier_start())
        elif module is self.head:
            for name, value in module.constants().items():
                init.copy_(getattr(module, name), value)
        else:
            super()._init_weights(module)

    @classmethod
    def _from_source(cls, path, source: dict, target: LiViTConfig, **kwargs):
        same_features = _has_our_head(source) and _source_pooling(source) == target.pooling
        if same_features and _labels_of(source) == _labels_of(target.to_dict()):
            config = copy.deepcopy(target)
            config.image_size = source["image_size"]
            result = cls._load(path, source, config, set(), **kwargs)
            model = result[0] if isinstance(result, tuple) else result
        else:
            if kwargs.pop("output_loading_info", False):
                raise LiVTError("output_loading_info is for a classifier loaded whole; this one gets a new head.")
            if target.class_counts is None and _labels_of(target.to_dict()) == _labels_of({}):
                logger.warning(
                    "%s has no classifier, so this one has two untrained classes; pass class_counts, id2label or "
                    "num_labels for yours.",
                    path,
                )
            encoder = LiViTModel._load_encoder(path, source, target, **kwargs)
            # One config object for model and encoder: attention layers hold it too.
            model = result = cls(encoder.config).to(device=encoder.device, dtype=encoder.dtype)
            model.vit = encoder
            model.eval()
        model.vit.resize_positions(target.image_size)
        return result

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs) -> ImageClassifierOutput:
        outputs = self.vit(pixel_values, **kwargs)
        features = outputs.pooler_output
        logits = self.classifier(features)  # (B, C)
        loss = None if labels is None else self.head(logits, labels, features)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    @torch.no_grad()
    def probabilities(self, pixel_values: Tensor, prior: Prior = None) -> Tensor:
        """Class probabilities under a serving prior (None: the config's test prior). (B, C)"""
        return self.head.posterior(self(pixel_values).logits, prior)


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


@contextlib.contextmanager
def _without_load_report():
    """Hold back transformers' table of missing and unexpected keys: here every such key is expected or refused."""
    logger = logging.getLogger("transformers.modeling_utils")

    def not_a_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(not_a_report)
    try:
        yield
    finally:
        logger.removeFilter(not_a_report)


def _target_config(base: dict | LiViTConfig, overrides: dict, path) -> LiViTConfig:
    """The config asked for: the checkpoint's (or the given one), with the keywords over it."""
    values = base if isinstance(base, dict) else base.to_dict()
    kind = values.get("model_type")
    if kind not in _ENCODER_TYPES:
        raise LiVTError(f"{path} is a {kind!r} checkpoint; LiViT can start from {', '.join(_ENCODER_TYPES)}.")
    if kind == "beit":
        if "livit" not in values:
            raise LiVTError(f"{path} is a BEiT that was not exported by livt_hf; its attention is not a plain ViT's.")
        values = values | values["livit"]
    known = {field.name for field in fields(LiViTConfig)} - {"architectures", "transformers_version", "dtype"}
    values = {name: value for name, value in values.items() if name in known}
    if kind in ("vit", "vit_mae") or not _keeps_labels(values, overrides):
        # Nothing the old label set said about its classes holds for the new one.
        values = {name: value for name, value in values.items() if name not in _LABEL_FIELDS}
    elif "class_counts" in overrides:
        values.pop("num_train_images", None)
    return LiViTConfig(**(values | overrides))


def _keeps_labels(values: dict, overrides: dict) -> bool:
    if "id2label" in overrides:
        return _labels_of(values) == _labels_of(overrides)
    asked = overrides.get("num_labels") or len(overrides.get("class_counts") or ())
    return asked in (0, len(_labels_of(values)))


def _has_our_head(source: dict) -> bool:
    classifier = any("Classification" in name for name in source.get("architectures") or ())
    return classifier and source["model_type"] in ("livit", "beit")


def _source_pooling(source: dict) -> str:
    if source["model_type"] == "beit":
        return "mean" if source["use_mean_pooling"] else "cls"
    return source.get("pooling", "mean") if source["model_type"] == "livit" else "cls"


def _labels_of(config: dict) -> list[str]:
    """Label names in order of their ids; transformers leaves out the default two."""
    names = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    return [name for _, name in sorted((int(label), name) for label, name in names.items())]


def _check_pixels(pixel_values: Tensor, config: LiViTConfig) -> None:
    if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels:
        raise LiVTError(
            f"pixel_values have shape {tuple(pixel_values.shape)}; "
            f"expected (batch, {config.num_channels}, height, width)."
        )
    height, width = pixel_values.shape[2:]
    if height % config.patch_size or width % config.patch_size:
        raise LiVTError(
            f"images of {height}x{width} pixels do not divide into patches of {config.patch_size}; "
            "resize or crop them."
        )


def _shorten(keys) -> str:
    keys = sorted(keys)
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "") if keys else "nothing"


# Old and new key names of ViT checkpoints are the same for us.
register_checkpoint_conversion_mapping("LiViTModel", get_checkpoint_conversion_mapping("ViTModel"), overwrite=True)

__all__ = ["LiViTForImageClassification", "LiViTModel"]
