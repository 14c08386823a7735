"""Optimizers and learning rates: scaled by the batch, decayed by depth, warm-up and cosine schedule."""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from livt_hf.training.spec import OptimizationSpec


def scale_lr(base_lr: float, batch_size: int) -> float:
    """Return the learning rate for a batch size by the linear rule of MAE; base rates are for 256 images."""
    return base_lr * batch_size / 256


class LayeredModel(Protocol):
    """Model that knows the layer of each parameter and which parameters weight decay leaves alone."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def parameter_depths(self) -> dict[str, int]: ...
    def no_weight_decay(self) -> set[str]: ...


def layer_decay_groups(
    model: LayeredModel, weight_decay: float, layer_decay: float = 1.0, lr: float | None = None
) -> list[dict]:
    """Group trainable parameters by layer for layer-wise learning rate decay.

    Args:
        model: a LiViT, a model from `balance`, or any module with `parameter_depths()` (only needed where
            `layer_decay` is not 1) and `no_weight_decay()`.
        weight_decay: decay of the parameters that `no_weight_decay` does not name.
        layer_decay: factor of the learning rate from each layer to the one below.
        lr: the highest learning rate; with it each group has its own `lr`, as Trainer's `optimizers=` wants it.

    Returns:
        Parameter groups for a torch optimizer; every trainable parameter is in exactly one. Multiply the learning
        rate of a group by its `lr_scale`, `layer_decay ** (depth + 1 - layer)`.

    Example:
        >>> from livt_hf import LiViTConfig, LiViTForImageClassification
        >>> model = LiViTForImageClassification(LiViTConfig.preset("micro", class_counts=[90, 10]))
        >>> groups = layer_decay_groups(model, weight_decay=0.05, layer_decay=0.75)
        >>> groups[0]["lr_scale"] == 0.75**7  # six layers lie between the embeddings and the classifier
        True
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    undecayed = model.no_weight_decay()
    depths = model.parameter_depths() if layer_decay != 1 else dict.fromkeys(trainable, 0)
    last = max(depths.values())
    groups: dict[tuple[int, bool], dict] = {}
    for name, parameter in trainable.items():
        key = depths[name], name in undecayed
        if key not in groups:
            scale = layer_decay ** (last - depths[name])
            groups[key] = {"params": [], "weight_decay": 0.0 if key[1] else weight_decay, "lr_scale": scale}
            groups[key] |= {} if lr is None else {"lr": lr * scale}
        groups[key]["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def split_muon_groups(model: LayeredModel, groups: list[dict]) -> list[dict]:
    """Split groups and mark what follows the blocks, and tables of positions, for NAdamW.

    Muon is for matrices between features: those that are decayed. Vectors it leaves to NAdamW by itself.
    """
    depths, undecayed = model.parameter_depths(), model.no_weight_decay()
    last = max(depths.values())
    after = {id(parameter) for name, parameter in model.named_parameters() if depths[name] == last}
    tables = {id(parameter) for name, parameter in model.named_parameters() if name in undecayed}
    marked = []
    for group in groups:
        for late in (False, True):
            parameters = [parameter for parameter in group["params"] if (id(parameter) in after) == late]
            if parameters:
                marked.append(group | {"params": parameters, "use_fallback": late or id(parameters[0]) in tables})
    return marked


def warmup_cosine(step: float, warmup: float, total: float, peak: float, floor: float) -> float:
    """Return the learning rate of update `step` (from 0): linear from 0 to `peak`, then a half cosine to `floor`."""
    if step < warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def make_optimizer(
    model: LayeredModel, spec: OptimizationSpec, name: str = "adamw", layer_decay: float = 1.0
) -> torch.optim.Optimizer:
    """Create the optimizer of a training: "adamw", "lamb" or "muon", with layer-wise learning rates."""
    groups = layer_decay_groups(model, spec.weight_decay, layer_decay)
    lr, betas = scale_lr(spec.base_lr, spec.batch_size), (0.9, spec.adam_beta2)
    if name == "lamb":
        from timm.optim import Lamb

        return Lamb(groups, lr=lr, betas=betas)
    if name == "muon":
        from timm.optim import Muon  # scaled so that rates and decay of AdamW fit it too

        return Muon(split_muon_groups(model, groups), lr=lr, betas=betas, nesterov=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
