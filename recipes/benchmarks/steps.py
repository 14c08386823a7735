"""Whole training steps (forward, backward, AdamW) against stock models taking the same step.

Every step has one thread, as `livt` gives each of its processes, and its time is the processor's, so that a busy
machine disturbs it little.
"""

from collections.abc import Callable

import timm
import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn
from transformers import (
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEForPreTraining,
)

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, balance, pretraining_config
from livt_hf.precision import has_fast_cpu_bf16
from livt_hf.recipes.benchmarks.measuring import compared, median_seconds, processor_seconds, say
from livt_hf.training.autotune import count_layer_flops
from livt_hf.training.optim import layer_decay_groups

# Preset, images per step.
SHAPES = {"micro at 32 px": ("micro", 128), "ViT-S/16 at 224 px": ("small", 4)}
STOCK_MAE, STOCK_VIT = "stock ViTMAEForPreTraining (sdpa)", "stock ViTForImageClassification, CE"
TIMM, FLOAT32 = "timm's ViT, BCE", "the same step in float32"
UNIT = "images per second of one core"


def run_pretrain(quick: bool = False) -> list[dict]:
    torch.set_num_threads(1)
    rows, bf16 = [], not quick and has_fast_cpu_bf16()
    for shape, (size, images) in list(SHAPES.items())[: 1 if quick else None]:
        config = pretraining_config(size)
        pixels = torch.randn(images, 3, config.image_size, config.image_size)

        def loss_of(model: nn.Module, x=pixels) -> Tensor:
            return model(x).loss

        ways = {STOCK_MAE: _step(ViTMAEForPreTraining(config), loss_of, fused=False)}
        for ratio in (1.0, 0.5, 0.25):
            ways[f"decode_ratio {ratio:g}"] = _step(LiViTForPreTraining(config, decode_ratio=ratio), loss_of)
        if not quick and size == "micro":  # compiling ViT-S takes a minute
            model = LiViTForPreTraining(config)
            model.compile()
            ways["decode_ratio 1, compiled"] = _step(model, loss_of)
        if bf16:
            ways["bf16"] = _step(LiViTForPreTraining(config), loss_of, bf16=True)
        speed = _speed(f"MGP step, {shape}", ways, images, quick)
        for name in [name for name in ways if name.startswith("decode_ratio")]:
            rows += compared(f"MGP step, {shape}, {name}", {"ours": speed[name], STOCK_MAE: speed[STOCK_MAE]}, UNIT)
        if bf16:
            pair = {"ours": speed["bf16"], FLOAT32: speed["decode_ratio 1"]}
            rows += compared(f"MGP step, {shape}, bf16", pair, UNIT)
        share = speed["decode_ratio 1"] * _flops(config) / _gemm_peak()
        bound = {"ours": share, "the GEMM peak measured in this run": 1.0}
        rows += compared(f"share of the machine's peak, {shape}", bound, "of 1")
    return rows


def run_finetune(quick: bool = False) -> list[dict]:
    torch.set_num_threads(1)
    rows, bf16 = [], not quick and has_fast_cpu_bf16()
    for shape, (size, images) in list(SHAPES.items())[: 1 if quick else None]:
        config = LiViTConfig.preset(size, class_counts=[100] * 100)
        dropping = LiViTConfig.preset(size, class_counts=[100] * 100, drop_path_rate=0.1)
        pixels, labels = torch.randn(images, 3, config.image_size, config.image_size), torch.arange(images) % 100
        sizes = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        sizes |= {name: getattr(config, name) for name in ("intermediate_size", "image_size", "patch_size")}
        kept = torch.rand(images, config.num_patches).argsort(dim=1)[:, : config.num_patches // 2]
        bce = BinaryCrossEntropy(smoothing=0.0)

        def loss_of(model: nn.Module, x=pixels, y=labels, **shown) -> Tensor:
            return model(x, labels=y, **shown).loss

        def timm_step(drop_path: float, config=config, x=pixels, y=labels, loss=bce) -> Callable[[], None]:
            return _step(create_timm_vit(config, drop_path), lambda m: loss(m(x), y), fused=False)

        ways = {
            "ours": _step(LiViTForImageClassification(config), loss_of),
            TIMM: timm_step(0.0),
            STOCK_VIT: _step(ViTForImageClassification(ViTConfig(num_labels=100, **sizes)), loss_of, fused=False),
            "drop path 0.1": _step(LiViTForImageClassification(dropping), loss_of),
            "timm's with drop path 0.1": timm_step(0.1),
            "half of the patches": _step(LiViTForImageClassification(config), lambda m, k=kept: loss_of(m, kept=k)),
        }
        if bf16:
            ways["bf16"] = _step(LiViTForImageClassification(config), loss_of, bf16=True)
        question = f"BFT step, {shape}"
        speed = _speed(question, ways, images, quick)
        rows += compared(question, {name: speed[name] for name in ("ours", TIMM, STOCK_VIT)}, UNIT)
        pairs = {"drop path 0.1": (TIMM, "timm's with drop path 0.1"), "half of the patches": (TIMM, TIMM)}
        pairs |= {"bf16": (FLOAT32, "ours")} if bf16 else {}
        for name, (peer, way) in pairs.items():
            rows += compared(f"{question}, {name}", {"ours": speed[name], peer: speed[way]}, UNIT)
    return rows + (_convolutions() if bf16 else [])


def _convolutions(images: int = 32) -> list[dict]:
    """What half precision does for a convolutional network on a CPU that computes in it."""
    pixels = torch.randn(images, 3, 128, 128).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(images) % 100

    def step(bf16: bool) -> Callable[[], None]:
        config = TimmWrapperConfig(architecture="tf_efficientnet_lite0", num_labels=100)
        model = balance(TimmWrapperForImageClassification(config), class_counts=[100] * 100)
        model = model.to(memory_format=torch.channels_last)
        return _step(model, lambda m: m(pixels, labels=labels).loss, bf16=bf16)

    question = "BFT step, EfficientNet-Lite0 at 128 px, bf16"
    return compared(question, _speed(question, {"ours": step(True), FLOAT32: step(False)}, images, quick=False), UNIT)


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


def _speed(question: str, ways: dict[str, Callable], images: int, quick: bool) -> dict[str, float]:
    say(f"{question}: {len(ways)} ways in turn, {images} images per step")
    times = median_seconds(ways, 3 if quick else 7, processor_seconds)
    return {name: images / time for name, time in times.items()}


def _step(model: nn.Module, loss_of: Callable, fused: bool = True, bf16: bool = False) -> Callable[[], None]:
    model.train()
    groups = layer_decay_groups(model, 0.05) if fused else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=fused or None)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _flops(config) -> float:
    """Floating-point operations of a training step for one image: three times the forward's matrix products."""
    patches = (config.image_size // config.patch_size) ** 2
    visible = int(patches * (1 - config.mask_ratio))
    pixels = config.patch_size**2 * config.num_channels
    encoder = config.num_hidden_layers * count_layer_flops(config.hidden_size, visible + 1)
    width, hidden = config.decoder_hidden_size, patches - visible
    decoder = (config.decoder_num_hidden_layers - 1) * count_layer_flops(width, patches + 1)
    # The last layer answers for hidden patches alone: only its keys and values are those of all.
    decoder += 4 * width**2 * (patches + 1) + 20 * width**2 * hidden + 4 * width * hidden * (patches + 1)
    ends = 2 * visible * pixels * config.hidden_size + 2 * hidden * pixels * width
    ends += 2 * (visible + 1) * config.hidden_size * width  # between encoder and decoder
    return 3 * (encoder + decoder + ends)


def _gemm_peak(side: int = 1024) -> float:
    """Operations per second of a large float32 matrix product."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    return 2 * side**3 / median_seconds({"product": lambda: a @ b}, 9, processor_seconds)["product"]
