"""Image processors: the size and the normalisation of what they make, and the same processor for another size."""

import copy
from dataclasses import dataclass

import torch
from PIL import Image
from transformers import BaseImageProcessor

from livt_hf.errors import LiVTError
from livt_hf.text import format_error


@dataclass(frozen=True)
class InputSpec:
    """Input of a model: pixels on a side, and mean and std of the normalisation."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_input_spec(processor: BaseImageProcessor) -> InputSpec:
    """Return the image size and the normalisation of a processor; it must make squares."""
    config = getattr(processor, "data_config", None)  # of timm
    if config is not None:
        return InputSpec(config["input_size"][-1], tuple(config["mean"]), tuple(config["std"]))
    sizes = measure_output_sizes(processor)
    side = min(min(sizes))
    if sizes != {(side, side)}:
        raise LiVTError(
            f"the image processor makes images whose shorter side has {side} pixels; have it crop squares "
            "(do_center_crop and crop_size in preprocessor_config.json)."
        )
    return InputSpec(side, *_normalisation(processor))


def measure_output_sizes(processor: BaseImageProcessor) -> set[tuple[int, int]]:
    """Return the heights and widths that a processor makes of a tall and of a wide image."""
    images = (Image.new("RGB", shape) for shape in ((300, 400), (400, 300)))
    return {tuple(_prepared(processor, [image]).shape[-2:]) for image in images}


def _prepared(processor: BaseImageProcessor, images: list[Image.Image], **options) -> torch.Tensor:
    try:
        return processor(images, return_tensors="pt", **options)["pixel_values"]
    except Exception as error:  # a damaged file comes to light in any line of the processor
        raise LiVTError(
            f"the image processor cannot prepare an image ({format_error(error)}); correct preprocessor_config.json."
        ) from error


def _normalisation(processor: BaseImageProcessor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of a processor, measured on black, white and red images.

    Its attributes do not say it all: EfficientNet's divides by the deviation twice, MobileViT's swaps the channels.
    """
    images = [Image.new("RGB", (8, 8), colour) for colour in ("black", "white", "red")]
    black, white, red = _prepared(processor, images, do_resize=False, do_center_crop=False)[:, :, 0, 0]  # (3,) each
    if not torch.allclose(red, torch.stack([white[0], black[1], black[2]]), atol=1e-4):
        raise LiVTError(
            f"{type(processor).__name__} does more than rescale and normalise the colours of a pixel, and training "
            "would not; take timm's form of the model if there is one (timm/...)."
        )
    std = 1 / (white - black)
    return tuple((-black * std).tolist()), tuple(std.tolist())


def resize_processor(processor: BaseImageProcessor, side: int) -> BaseImageProcessor:
    """Return the processor for another image size; a margin around the centre crop stays in proportion."""
    processor = copy.deepcopy(processor)
    if hasattr(processor, "data_config"):
        config = processor.data_config | {"input_size": (3, side, side)}
        return type(processor)(pretrained_cfg=config, architecture=processor.architecture)
    factor = side / read_input_spec(processor).size
    for name in ("size", "crop_size"):
        sizes = getattr(processor, name, None)
        if sizes is not None:
            setattr(processor, name, {key: round(value * factor) for key, value in dict(sizes).items() if value})
    return processor
