"""Low-rank adaptation (LoRA) of a backbone, through peft."""

from torch import nn
from transformers import PreTrainedModel

from livt_hf.errors import LiVTError
from livt_hf.long_tail.structure import get_classifier
from livt_hf.plugins import find_module


def check_lora(or_else: str = "") -> None:
    """Refuse LoRA where its library is missing."""
    if find_module("peft") is None:
        raise LiVTError(f"LoRA needs peft; install it with: pip install 'livt-hf[lora]'.{or_else}")


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """Freeze a model and give each linear layer of its backbone a trainable product of two thin matrices.

    A convolution of single pixels is a linear layer over channels; most of an EfficientNet's weights are in such.
    """
    check_lora()
    from peft import LoraConfig, inject_adapter_in_model

    classifier = get_classifier(model)
    linear = [name for name, layer in model.named_modules() if _is_linear(layer) and layer is not classifier]
    if not linear:
        raise LiVTError(
            f"{type(model).__name__} has no linear layer besides its classifier, so LoRA has nothing to add to; use "
            "--tune head or --tune full."
        )
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear), model)
    for parameter in classifier.parameters():
        parameter.requires_grad_(True)


def _is_linear(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.kernel_size == (1, 1) and layer.groups == 1
    return isinstance(layer, nn.Linear)


def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Add the products to the layers they belong to; the model is of its own kind again."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    return model
