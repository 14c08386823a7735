"""The authors' `.pth` files to LiViT, and LiViT to the forms others serve: stock BEiT and timm."""

import argparse
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import timm
import torch
from PIL.Image import Resampling
from timm.models import VisionTransformer, save_for_hf
from torch import Tensor
from transformers import BaseImageProcessor, BeitConfig, BeitForImageClassification, PreTrainedModel, ViTMAEConfig

from livt_hf.configuration_livit import LiViTConfig, get_size_name
from livt_hf.errors import LiVTError
from livt_hf.files import read_record, write_values
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.modeling_livit_mae import LiViTForPreTraining, pretraining_config
from livt_hf.pretrained import format_names

# How many classes the heads of the authors' files have.
OFFICIAL_CLASSES = {"imagenet-lt": 1000, "inat18": 8142, "places-lt": 365}
# Our names into those of timm, which the authors (and MAE) use, applied one after the other.
_TIMM_NAMES = {
    "vit.embeddings.patch_embeddings.projection.": "patch_embed.proj.",
    "vit.embeddings.position_embeddings": "pos_embed",
    "vit.embeddings.cls_token": "cls_token",
    "vit.layers.": "blocks.",
    "vit.fc_norm.": "fc_norm.",
    "vit.layernorm.": "norm.",
    "classifier.": "head.",
    "decoder.decoder_layers.": "decoder_blocks.",
    "decoder.": "",
    ".layernorm_before.": ".norm1.",
    ".layernorm_after.": ".norm2.",
    ".attention.o_proj.": ".attn.proj.",
    ".attention.q_proj.": ".attn.qkv.",
    ".attention.k_proj.": ".attn.qkv.",
    ".attention.v_proj.": ".attn.qkv.",
}
_FUSED = (".q_proj.", ".k_proj.", ".v_proj.")


def from_official(
    path: str | Path,
    *,
    class_counts: Sequence[int] | None = None,
    id2label: Mapping[int, str] | None = None,
    keep_class_order: bool = False,
    **config,
) -> LiViTForImageClassification | LiViTForPreTraining:
    """Convert a `.pth` file of the authors. No code in the file is run.

    Sizes are read from the tensors; heads are 64 wide (16 heads in the decoder).

    Args:
        path: the file.
        class_counts: training images per class, in the order of the resulting model.
        id2label: class names in the same order.
        keep_class_order: keep the rows of an iNaturalist 2018 head (8,142 classes) in the lexicographic order of
            category ids, which was read in the authors' code; by default they are moved to numeric order.
        **config: fields of the config. The default is what the released code computes: Bal-BCE, tau 1, no test prior.

    Returns:
        A classifier (BFT), or the pretraining model (MGP) if the file has a decoder.

    Example:
        >>> model = from_official("checkpoint.pth", class_counts=counts)  # doctest: +SKIP
    """
    official = _read_official(Path(path))
    needed = {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"}
    pretraining = "decoder_embed.weight" in official
    needed |= {"decoder_pos_embed", "decoder_blocks.0.mlp.fc1.weight"} if pretraining else {"head.weight", "head.bias"}
    if needed - official.keys():
        raise LiVTError(
            f"{path} lacks {format_names(needed - official.keys())}; pass a checkpoint of the authors' pretraining "
            "(with decoder) or fine-tuning (with head)."
        )
    config_class = ViTMAEConfig if pretraining else LiViTConfig
    known = {field.name for field in fields(config_class)}
    strange = config.keys() - (known if pretraining else known | set(LongTailConfig.names()))
    if strange:
        raise LiVTError(f"{format_names(strange)} is no field of {config_class.__name__}; check the spelling.")
    config = _sizes(official, path, known=config.keys()) | config
    if pretraining:
        if class_counts is not None or id2label is not None:
            raise LiVTError(f"{path} holds a pretraining, which has no classes; leave class_counts and id2label out.")
        official = {name: tensor for name, tensor in official.items() if not name.startswith("head.")}
        width, inner = len(official["decoder_embed.weight"]), len(official["decoder_blocks.0.mlp.fc1.weight"])
        decoder = dict(decoder_hidden_size=width, decoder_intermediate_size=inner, decoder_num_attention_heads=16)
        decoder["decoder_num_hidden_layers"] = _depth(official, "decoder_blocks.")
        model = LiViTForPreTraining(pretraining_config("base", **(decoder | config)))
    else:
        head = dict(loss="bal_bce", tau=1.0, test_prior=None, class_counts=class_counts)
        head["pooling"] = "mean" if "fc_norm.weight" in official else "cls"
        labels = _label_settings(official, id2label, keep_class_order)
        model = LiViTForImageClassification(LiViTConfig(**(head | config | labels)))
    model.load_state_dict(_from_timm_names(official, model, path))
    return model.eval()


def to_beit(model: LiViTForImageClassification) -> BeitForImageClassification:
    """Convert a LiViT to a stock BEiT with equal logits, which plain transformers serves at any resolution.

    Fields that BEiT lacks are kept in `config.livit` and `config.long_tail`, where `from_pretrained` of LiViT finds
    them. BEiT has no key bias: it adds the same to all scores of a query, so softmax cancels it; it comes back as 0.

    Args:
        model: the LiViT.

    Returns:
        The BEiT, in evaluation mode.

    Example:
        >>> model = LiViTForImageClassification(LiViTConfig.preset("micro", class_counts=[90, 10])).eval()
        >>> images = torch.rand(1, 3, 32, 32)
        >>> torch.allclose(to_beit(model)(images).logits, model(images).logits, atol=1e-5)
        True
    """
    _check_linear(model.config)
    model.sign_settings()
    values = model.config.to_dict()
    shared = {field.name for field in fields(BeitConfig)} - {"architectures", "transformers_version", "dtype"}
    ours = {field.name for field in fields(LiViTConfig)} - {field.name for field in fields(BeitConfig)} - {"long_tail"}
    if not model.config.qkv_bias:
        raise LiVTError("BEiT always has query and value biases; a model with qkv_bias=False has no BEiT form.")
    config = BeitConfig(
        **{name: value for name, value in values.items() if name in shared},
        use_absolute_position_embeddings=True,
        use_relative_position_bias=False,
        layer_scale_init_value=0.0,
        use_mean_pooling=model.config.pooling == "mean",
    )
    config.livit = {name: values[name] for name in sorted(ours)}
    config.long_tail = model.config.long_tail
    beit = BeitForImageClassification(config).to(device=model.device, dtype=model.dtype)
    state = {
        name.replace("vit.fc_norm.", "beit.pooler.layernorm.").replace("vit.", "beit."): tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith("k_proj.bias")
    }
    beit.load_state_dict(state)
    return beit.eval()


def to_timm(model: LiViTForImageClassification) -> VisionTransformer:
    """Convert a LiViT to timm's `VisionTransformer` with equal logits at the model's own resolution.

    Args:
        model: the LiViT.

    Returns:
        The timm model, in evaluation mode.

    Example:
        >>> model = LiViTForImageClassification(LiViTConfig.preset("micro", class_counts=[90, 10])).eval()
        >>> images = torch.rand(1, 3, 32, 32)
        >>> torch.allclose(to_timm(model)(images), model(images).logits, atol=1e-5)
        True
    """
    config = model.config
    _check_linear(config)
    if config.hidden_act != "gelu":
        raise LiVTError(f"hidden_act is {config.hidden_act!r}; timm's ViT form is written for 'gelu' only.")
    if config.layer_norm_eps != 1e-6:
        raise LiVTError(
            f"layer_norm_eps is {config.layer_norm_eps}, which timm's config cannot say: it is always 1e-06; "
            "load the model with layer_norm_eps=1e-6 to accept slightly other logits."
        )
    vit = timm.create_model(_architecture(config), num_classes=config.num_labels, **_timm_arguments(config))
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():  # q, k and v follow each other in this order
        parts.setdefault(_timm_name(name), []).append(tensor)
    vit = vit.to(device=model.device, dtype=model.dtype)
    vit.load_state_dict({name: torch.cat(tensors) for name, tensors in parts.items()})
    return vit.eval()


def _check_linear(config: LiViTConfig) -> None:
    if config.long_tail.normalised_classifier:
        raise LiVTError(
            "normalised_classifier=True divides by the length of the features, which the linear classifier of other "
            "forms cannot do; keep the LiViT form, which save_pretrained writes."
        )


def save_timm(model: LiViTForImageClassification, folder: str | Path, processor: BaseImageProcessor) -> None:
    """Write what `timm.create_model("local-dir:FOLDER", pretrained=True)` reads, or `hf-hub:` once it is uploaded."""
    config = model.config
    vit = to_timm(model)
    vit.pretrained_cfg = {
        "architecture": _architecture(config),
        "input_size": (config.num_channels, config.image_size, config.image_size),
        "fixed_input_size": True,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **_timm_preprocessing(processor),
    }
    labels = [config.id2label[label] for label in range(config.num_labels)]
    save_for_hf(vit, folder, {"label_names": labels}, model_args=_timm_arguments(config), safe_serialization=True)
    # timm 1.0.31 also writes the number of classes here, which transformers would pass a second time.
    path = Path(folder) / "config.json"
    written = read_record(path)
    written["model_args"].pop("num_classes", None)
    write_values(path, written)


def _read_official(path: Path) -> dict[str, Tensor]:
    """Read the tensors under `model`; only tensors, plain values and the authors' `argparse.Namespace` are allowed."""
    if not zipfile.is_zipfile(path):  # also of a truncated file, whose directory was at its end
        raise LiVTError(f"{path} is not a complete PyTorch checkpoint (missing, cut off or another kind of file).")
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            code = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if code:
                raise LiVTError(f"{path} asks for {format_names(code)}, which could run code; it was not opened.")
            content = torch.load(path, map_location="cpu", weights_only=True)
        except LiVTError:
            raise
        except Exception as error:  # what torch's unpickler makes of damage is no short list
            raise LiVTError(f"{path} is damaged; copy or download it again.") from error
    official = content.get("model") if isinstance(content, dict) else None
    if not isinstance(official, dict) or not all(isinstance(tensor, Tensor) for tensor in official.values()):
        raise LiVTError(f"{path} holds no tensors under the key 'model', where the authors' code saves them.")
    return official


def _sizes(official: dict[str, Tensor], path, known) -> dict[str, int]:
    width, channels, patch_size, _ = official["patch_embed.proj.weight"].shape
    patches = official["pos_embed"].shape[1] - 1
    grid = math.isqrt(patches)
    if grid**2 != patches:
        raise LiVTError(f"{path} has positions for {patches} patches, which is no square grid.")
    if width % 64 and "num_attention_heads" not in known:
        raise LiVTError(f"{path} is {width} wide, which does not divide into heads of 64; pass num_attention_heads.")
    return dict(
        hidden_size=width,
        num_hidden_layers=_depth(official, "blocks."),
        num_attention_heads=width // 64,
        intermediate_size=len(official["blocks.0.mlp.fc1.weight"]),
        image_size=grid * patch_size,
        patch_size=patch_size,
        num_channels=channels,
    )


def _depth(official: dict[str, Tensor], prefix: str) -> int:
    return len({name.split(".")[1] for name in official if name.startswith(prefix)})


def _label_settings(official: dict[str, Tensor], id2label: Mapping[int, str] | None, keep_class_order: bool) -> dict:
    """Return the label fields of a BFT file's config; puts the rows of an iNat18 head in order."""
    classes = len(official["head.bias"])
    if classes == OFFICIAL_CLASSES["inat18"]:
        categories = sorted(range(classes), key=str)  # category id of each row
        if not keep_class_order:
            rows = torch.tensor(categories).argsort()
            for name in ("head.weight", "head.bias"):
                official[name] = official[name][rows]
            categories = range(classes)
        if id2label is None:
            id2label = {row: str(category) for row, category in enumerate(categories)}
    if id2label is None:
        return dict(num_labels=classes)
    if set(id2label) != set(range(classes)):
        raise LiVTError(f"id2label names {len(id2label)} classes; give one name for each of 0 to {classes - 1}.")
    return dict(id2label=dict(id2label), label2id={name: label for label, name in id2label.items()})


def _from_timm_names(official: dict[str, Tensor], model: PreTrainedModel, path) -> dict[str, Tensor]:
    """Return the state of `model` from a file that has exactly its tensors."""
    expected = model.state_dict()
    sources = {name: _timm_name(name) for name in expected}
    missing, unknown = set(sources.values()) - official.keys(), official.keys() - set(sources.values())
    if missing or unknown:
        raise LiVTError(
            f"{path} is not a ViT of the authors: it lacks {format_names(missing)}, unknown: {format_names(unknown)}."
        )
    state = {}
    for name, source in sources.items():
        part = [index for index, fused in enumerate(_FUSED) if fused in name]
        state[name] = official[source].chunk(3)[part[0]] if part else official[source]
        if state[name].shape != expected[name].shape:
            found, wanted = tuple(state[name].shape), tuple(expected[name].shape)
            raise LiVTError(f"{source} in {path} makes a {name} of shape {found}; its other tensors ask for {wanted}.")
    return state


def _timm_name(name: str) -> str:
    for ours, theirs in _TIMM_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _architecture(config: LiViTConfig) -> str:
    """Return a registered timm name, the fitting one if there is; all sizes are passed as arguments too."""
    name = f"vit_{get_size_name(config.to_dict())}_patch{config.patch_size}_{config.image_size}"
    return name if timm.is_model(name) else "vit_base_patch16_224"


def _timm_arguments(config: LiViTConfig) -> dict:
    return dict(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.num_channels,
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
        qkv_bias=config.qkv_bias,
        global_pool="avg" if config.pooling == "mean" else "token",
    )


def _timm_preprocessing(processor: BaseImageProcessor) -> dict:
    size, resizes, crops = processor.size, processor.do_resize, processor.do_center_crop
    squashes = resizes and bool(size.height)
    if resizes and not (squashes or (crops and size.shortest_edge)):
        raise LiVTError("timm's form needs an image processor that crops the centre or squashes, and does not pad.")
    crop = (processor.crop_size if crops or not resizes else size).height
    edge = (size.height or size.shortest_edge) if resizes else crop
    crop_pct = crop / edge
    if math.floor(crop / crop_pct) != edge:  # timm divides and rounds down
        crop_pct = math.nextafter(crop_pct, 0)
    return dict(
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
        interpolation=Resampling(processor.resample).name.lower(),
        crop_pct=crop_pct,
        crop_mode="squash" if squashes else "center",
    )
