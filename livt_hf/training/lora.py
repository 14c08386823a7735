"""Low-rank adaptation (LoRA) of a backbone, through peft."""

from torch import nn
from transformers import PreTrainedModel

from livt_hf.errors import LiVTError
from livt_hf.long_tail.structure import get_classifier
from livt_hf.plugins import find_module


def check_lora(or_else: str = "") -> None:
    """Raise an error if peft is not installed."""
    if find_module("peft") is None:
        raise LiVTError(f"LoRA needs peft; install it with: pip install 'livt-hf[lora]'.{or_else}")


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """Freeze a model and add trainable low-rank matrices to each linear layer of its backbone.

    A 1x1 convolution is a linear layer over channels; most weights of an EfficientNet are in such layers.
    """
    check_lora()
    from peft import LoraConfig, inject_adapter_in_model

    classifier = get_classifier(model)
    linear = [name for name, layer in model.named_modules() if _is_linear(layer) and layer is not classifier]
    if not linear:
        raise LiVTError(
            f"{type(model).__name__} has no linear layer besides its classifier, so LoRA has nothing to add to; set "
            "tune to head or full.",
            argument="tune",
        )
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear), model)
    for parameter in classifier.parameters():
        parameter.requires_grad_(True)


def _is_linear(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.kernel_size == (1, 1) and layer.groups == 1
    return isinstance(layer, nn.Linear)


def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Merge the low-rank matrices into their layers; the model is of its stock class again."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    return model
