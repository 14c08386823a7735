"""Learning rates: scaled by the batch, decayed by depth, warmed up and lowered along a cosine."""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn


def scale_lr(base_lr: float, batch_size: int) -> float:
    """The linear rule of MAE: base rates are for 256 images per update."""
    return base_lr * batch_size / 256


class LayeredModel(Protocol):
    """A model that knows the layers of its parameters, and which of them weight decay leaves alone."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def parameter_depths(self) -> dict[str, int]: ...
    def no_weight_decay(self) -> set[str]: ...


def layer_decay_groups(model: LayeredModel, weight_decay: float, layer_decay: float = 1.0) -> list[dict]:
    """Parameter groups with `lr_scale` = decay^(depth + 1 - layer), without weight decay where the model says so.

    The model is asked (`parameter_depths`, `no_weight_decay`): every trainable parameter is in exactly one group.
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
        groups[key]["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def split_muon_groups(model: LayeredModel, groups: list[dict]) -> list[dict]:
    """The groups, with what follows the blocks marked for NAdamW: Muon is for matrices between features."""
    depths = model.parameter_depths()
    last = max(depths.values())
    after = {id(parameter) for name, parameter in model.named_parameters() if depths[name] == last}
    marked = []
    for group in groups:
        for fallback in (False, True):
            parameters = [parameter for parameter in group["params"] if (id(parameter) in after) == fallback]
            if parameters:
                marked.append(group | {"params": parameters, "use_fallback": fallback})
    return marked


def warmup_cosine(step: float, warmup: float, total: float, peak: float, floor: float) -> float:
    """The rate of update `step` (from 0): linear from 0 to `peak`, then half a cosine down to `floor`."""
    if step < warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """In every group, times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
