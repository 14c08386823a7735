"""Structure of image classifiers: their classifier, blocks and embeddings.

For transformers' classes and, through their wrapper, for the models of timm.
"""

import threading

import torch
from timm.models import group_parameters
from torch import Tensor, nn
from transformers import PreTrainedModel, TimmWrapperForImageClassification

from livt_hf.errors import LiVTError


def get_classifier(model: PreTrainedModel) -> nn.Linear:
    """Return the linear layer that turns features into logits."""
    if isinstance(model, TimmWrapperForImageClassification):
        place, found = "timm_model.get_classifier()", model.timm_model.get_classifier()
    else:
        place, found = "classifier", getattr(model, "classifier", None)
    # A distilled model of timm has a tuple of two.
    parts = found.modules() if isinstance(found, nn.Module) else ()
    layers = [layer for layer in parts if isinstance(layer, nn.Linear)]
    if not layers or layers[-1].out_features != model.config.num_labels:
        what = "missing" if found is None else f"a {type(found).__name__}"
        raise LiVTError(
            f"{type(model).__name__} is not a known kind of image classifier: `{place}` should be or end in a linear "
            f"layer with {model.config.num_labels} outputs, one per label, and it is {what}; take a model without "
            "distillation or of another kind."
        )
    return layers[-1]


def extract_features(model: PreTrainedModel, pixel_values: Tensor, **inputs) -> Tensor:
    """Return the features of images: the input of the model's classifier. (B, D)

    Another thread, such as that of a second visitor of the demo, may be using the model at the same time.
    """
    seen: list[Tensor] = []
    here = threading.get_ident()

    def see(_, arguments: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == here:
            seen.append(arguments[0])

    hook = get_classifier(model).register_forward_pre_hook(see)
    try:
        model(pixel_values, **inputs)
    finally:
        hook.remove()
    return seen[0]


def parameter_depths(model: PreTrainedModel) -> dict[str, int]:
    """Return the layer of each parameter: 0 for embeddings, i + 1 for block i, one more for what follows the blocks.

    What lies between two blocks belongs to the second one. Most models of timm say themselves how they are layered.
    """
    timm_model = getattr(model, "timm_model", None)
    if hasattr(timm_model, "group_matcher"):
        depths = group_parameters(timm_model, timm_model.group_matcher(coarse=False), reverse=True)
        return {f"timm_model.{name}": depth for name, depth in depths.items()}
    layers = _layers(model)
    last = len(layers) + 1
    known = {id(p): i for i, parts in enumerate(layers, 1) for part in parts for p in part.parameters()}
    known |= {id(p): last for p in get_classifier(model).parameters()}
    depths, passed = {}, 0
    for name, parameter in model.named_parameters():  # in the order of the layers
        passed = known.get(id(parameter), passed)
        between = passed + 1 if 0 < passed < last else passed
        depths[name] = known.get(id(parameter), between)
    return depths


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Return the names of biases, norms, tokens and positions: all but linear, convolution and attention matrices."""
    decayed = set()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            decayed.add(id(layer.weight))
        elif isinstance(layer, nn.MultiheadAttention):
            decayed.add(id(layer.in_proj_weight))
    return {name for name, p in model.named_parameters() if p.ndim <= 1 or id(p) not in decayed}


def use_channels_last(model: nn.Module) -> None:
    """Convert the pixels of a convolutional model to channels-last, in which convolutions are fastest.

    The patch embedding of a transformer has its patches side by side, and gains nothing.
    """
    convolutions = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    if any(layer.kernel_size > layer.stride for layer in convolutions):
        model.register_forward_pre_hook(_channels_last, with_kwargs=True)


def _channels_last(_model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    args = tuple(value.contiguous(memory_format=torch.channels_last) for value in args[:1]) + args[1:]
    if "pixel_values" in kwargs:
        kwargs["pixel_values"] = kwargs["pixel_values"].contiguous(memory_format=torch.channels_last)
    return args, kwargs


def _layers(model: nn.Module) -> list[list[nn.Module]]:
    """Return the blocks in order, each with what leads into it: the elements of the largest list, or of its stages.

    PVT and PoolFormer have the patch embeddings of all stages in a list of their own; those of the first are layer 0.
    """
    outer: list[nn.ModuleList | nn.Sequential] = []
    for kind in (nn.ModuleList, nn.Sequential):  # MetaFormers of timm have no list
        for module in model.modules() if not outer else ():  # a list comes before the lists within it
            if isinstance(module, kind) and not any(module in list(other.modules()) for other in outer):
                outer.append(module)
    if not outer:
        raise LiVTError(
            f"{type(model).__name__} has no list of layers, so its layers cannot be counted; pass layer_decay 1.",
            "layer_decay",
        )
    stages = max(outer, key=lambda layers: sum(p.numel() for p in layers.parameters()))
    beside = [other for other in outer if other is not stages and len(other) == len(stages)]
    layers: list[list[nn.Module]] = []
    for number, stage in enumerate(stages):
        parts = [stage if isinstance(stage, nn.ModuleList) else None]
        parts += [getattr(stage, name, None) for name in ("layers", "blocks")]
        first = len(layers)
        layers += [
            [b] for b in next((part for part in parts if isinstance(part, nn.ModuleList | nn.Sequential)), [stage])
        ]
        if number:
            layers[first] += [other[number] for other in beside]
    return layers
