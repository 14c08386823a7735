"""Whole training steps (forward, backward, AdamW) against stock models taking the same step."""

from collections.abc import Callable
from functools import partial

import timm
import torch
from timm.loss import BinaryCrossEntropy
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTMAEForPreTraining

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, pretraining_config
from livt_hf.budget import layer_flops
from livt_hf.long_tail.head import LongTailHead
from livt_hf.recipes.benchmarks.measuring import compared, median_seconds
from livt_hf.training.optim import layer_decay_groups

# Preset, images a step.
SHAPES = {"micro at 32 px": ("micro", 128), "ViT-S/16 at 224 px": ("small", 16)}


def run_pretrain(quick: bool = False) -> list[dict]:
    rows = []
    for shape, (size, images) in list(SHAPES.items())[: 1 if quick else None]:
        config = pretraining_config(size)
        pixels = torch.randn(images, 3, config.image_size, config.image_size)
        stock = _step(ViTMAEForPreTraining(config), lambda model, x=pixels: model(x).loss, fused=False)
        ways = {"stock ViTMAEForPreTraining (sdpa)": stock}
        for ratio in (1.0, 0.5, 0.25):
            model = LiViTForPreTraining(config, decode_ratio=ratio)
            ways[f"decode_ratio {ratio:g}"] = _step(model, lambda model, x=pixels: model(x).loss)
        if not quick:
            model = LiViTForPreTraining(config)
            model.compile()
            ways["decode_ratio 1, compiled"] = _step(model, lambda model, x=pixels: model(x).loss)
        speed = {name: images / time for name, time in median_seconds(ways, 3 if quick else 7).items()}
        theirs = speed.pop("stock ViTMAEForPreTraining (sdpa)")
        for name, ours in speed.items():
            question = f"MGP step, {shape}, {name}"
            rows += compared(question, {"ours": ours, "stock ViTMAEForPreTraining (sdpa)": theirs}, "images/s")
        share = speed["decode_ratio 1"] * _flops(config) / _gemm_peak()
        bound = {"ours": share, "the GEMM peak measured in this run": 1.0}
        rows += compared(f"share of the machine's peak, {shape}", bound, "of 1")
    return rows


def run_finetune(quick: bool = False) -> list[dict]:
    rows = []
    for shape, (size, images) in list(SHAPES.items())[: 1 if quick else None]:
        config = LiViTConfig.preset(size, class_counts=[100] * 100)
        pixels, labels = torch.randn(images, 3, config.image_size, config.image_size), torch.arange(images) % 100
        sizes = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        sizes |= {name: getattr(config, name) for name in ("intermediate_size", "image_size", "patch_size")}
        bce = BinaryCrossEntropy(smoothing=0.0)

        def timm_step(drop_path: float, config=config, x=pixels, y=labels, loss=bce) -> Callable[[], None]:
            return _step(create_timm_vit(config, drop_path), lambda m: loss(m(x), y), fused=False)

        ways = {
            "ours": _step(LiViTForImageClassification(config), lambda m, x=pixels, y=labels: m(x, labels=y).loss),
            "timm's ViT, BCE": timm_step(0.0),
            "stock ViTForImageClassification, CE": _step(
                ViTForImageClassification(ViTConfig(num_labels=100, **sizes)),
                lambda m, x=pixels, y=labels: m(x, labels=y).loss,
                fused=False,
            ),
        }
        times = median_seconds(ways, 3 if quick else 7)
        rows += compared(f"BFT step, {shape}", {name: images / t for name, t in times.items()}, "images/s")
        kept = torch.rand(images, config.num_patches).argsort(dim=1)[:, : config.num_patches // 2]
        for question, drop_path, shown in (("drop path 0.1", 0.1, {}), ("half of the patches", 0.0, {"kept": kept})):
            config.drop_path_rate = drop_path
            model = LiViTForImageClassification(config)
            ours = _step(model, lambda m, x=pixels, y=labels, shown=shown: m(x, labels=y, **shown).loss)
            times = median_seconds({"ours": ours, "timm's ViT, BCE": timm_step(drop_path)}, 3 if quick else 7)
            speed = {name: images / time for name, time in times.items()}
            rows += compared(f"BFT step, {shape}, {question}", speed, "images/s")
    for classes in (1000, 8142):
        rows += _bias_cost(classes, quick)
    return rows


def create_timm_vit(config: LiViTConfig, drop_path: float) -> nn.Module:
    return timm.create_model(
        "vit_small_patch16_224",
        img_size=config.image_size,
        patch_size=config.patch_size,
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_classes=100,
        global_pool="avg",
        drop_path_rate=drop_path,
    )


def _bias_cost(classes: int, quick: bool) -> list[dict]:
    """The same step of one model under two heads: the bias is all that differs, and not where the weights lie."""
    size, images = ("micro", 32) if quick else ("tiny", 16)
    model = LiViTForImageClassification(LiViTConfig.preset(size, class_counts=[10] * classes))
    pixels = torch.randn(images, 3, model.config.image_size, model.config.image_size)
    labels = torch.arange(images) % classes
    heads = {"ours": model.head}
    heads["the same model with plain BCE"] = LongTailHead(
        LiViTConfig.preset(size, class_counts=[10] * classes, loss="bce")
    )

    step = _step(model, lambda model: model(pixels, labels=labels).loss)

    def under(head: LongTailHead) -> None:
        model.head = head
        step()

    ways = {name: partial(under, head) for name, head in heads.items()}
    times = median_seconds(ways, 5 if quick else 15)
    return compared(f"a Bal-BCE step, {size}, {classes:,} classes", times, "s", smaller_is_better=True)


def _step(model: nn.Module, loss_of: Callable, fused: bool = True) -> Callable[[], None]:
    model.train()
    groups = layer_decay_groups(model, 0.05) if fused else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=fused or None)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _flops(config) -> float:
    """Floating-point operations of a training step for one image: three times the forward's matrix products."""
    patches = (config.image_size // config.patch_size) ** 2
    visible = int(patches * (1 - config.mask_ratio))
    pixels = config.patch_size**2 * config.num_channels
    encoder = config.num_hidden_layers * layer_flops(config.hidden_size, visible + 1)
    decoder = config.decoder_num_hidden_layers * layer_flops(config.decoder_hidden_size, patches + 1)
    ends = 2 * visible * pixels * config.hidden_size + 2 * (patches - visible) * pixels * config.decoder_hidden_size
    return 3 * (encoder + decoder + ends)


def _gemm_peak(side: int = 1024) -> float:
    """Operations a second of a large float32 matrix product."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    return 2 * side**3 / median_seconds({"product": lambda: a @ b}, 9)["product"]
