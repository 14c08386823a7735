"""Image processors: what they make of an image, and the same processor for another size or framing."""

import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from transformers import BaseImageProcessor, ViTImageProcessor

from livt_hf.errors import LiVTError
from livt_hf.text import format_error

MAX_SIDE = 2**13
FRAMINGS = ("crop", "squash", "pad")
# Names of framings in timm's `crop_mode`.
_CROP_MODES = {"crop": "center", "squash": "squash", "pad": "border"}
_RAMP = (512, 256)  # width and height of the image that a framing is measured on


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


def check_side(processor: BaseImageProcessor) -> None:
    """Raise an error for a processor that asks for images larger than any model takes."""
    config = getattr(processor, "data_config", None)  # of timm
    sizes = [dict(getattr(processor, name, None) or {}) for name in ("size", "crop_size", "pad_size")]
    sides = config["input_size"] if config else [side or 0 for size in sizes for side in size.values()]
    if max(sides, default=0) > MAX_SIDE:
        raise LiVTError(
            f"the image processor asks for images of {max(sides):,} pixels a side, and {MAX_SIDE:,} are the most; "
            "correct preprocessor_config.json."
        )


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


def to_portable_processor(values: dict) -> dict:
    """Return the JSON of a processor as other tools understand it.

    transformers 4 and transformers.js know no ViT processor that crops; BiT's makes the same pixels.
    """
    crops = values.get("do_center_crop") and "shortest_edge" in values.get("size", {})
    is_vit = str(values.get("image_processor_type", "")).startswith("ViTImageProcessor")
    return values | ({"image_processor_type": "BitImageProcessor"} if crops and is_vit else {})


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


@dataclass(frozen=True)
class Framing:
    """What an image processor does with the proportions of an image.

    Attributes:
        name: "crop" resizes the shorter side and crops the centre, "squash" resizes the whole image to a square, "pad"
            resizes it with its proportions and fills the rest of the square.
        margin: the side of the square that is seen, as a share of the side that is resized to; 0.875 where 224 of 256
            pixels are cropped.
        fill: RGB colour of the padding.

    Example:
        >>> Framing("crop", margin=0.875).seen_share(width=400, height=300).round(3)
        0.574
    """

    name: Literal["crop", "squash", "pad"] = "crop"
    margin: float = 1.0
    fill: tuple[int, int, int] = (0, 0, 0)

    def seen_sides(self, width: np.ndarray | int, height: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Return the seen shares of the width and of the height, around the centre."""
        sides = np.asarray(width, dtype=np.float64), np.asarray(height, dtype=np.float64)
        square = {"crop": np.minimum(*sides), "pad": np.maximum(*sides)}
        seen_width, seen_height = (np.minimum(self.margin * square.get(self.name, side) / side, 1) for side in sides)
        return seen_width, seen_height

    def seen_share(self, width: np.ndarray | int, height: np.ndarray | int) -> np.ndarray:
        """Return the share of the area of images that is seen."""
        seen_width, seen_height = self.seen_sides(width, height)
        return seen_width * seen_height


def read_framing(processor: BaseImageProcessor) -> Framing:
    """Return the framing of a processor, measured on a wide image whose red grows to the right and green downwards."""
    inputs, (width, height) = read_input_spec(processor), _RAMP
    ramp = np.full((height, width, 3), 255, dtype=np.uint8)
    ramp[..., 0], ramp[..., 1] = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (inputs.mean, inputs.std))
    red, green, blue = _prepared(processor, [Image.fromarray(ramp)])[0] * std + mean
    fill = tuple(round(255 * colour.item()) for colour in (red[0, 0], green[0, 0], blue[0, 0]))
    if blue[0, 0] < 0.99:  # the image has no other blue than 1
        return Framing("pad", fill=fill)
    # Of n pixels the middles of the first and the last are n - 1 apart.
    factor = inputs.size / (inputs.size - 1)
    seen_width, seen_height = (factor * float(seen.max() - seen.min()) for seen in (red, green))
    is_squashed = abs(seen_width - seen_height) < abs(seen_width * width / height - seen_height)
    return Framing("squash" if is_squashed else "crop", margin=min(round(seen_height, 2), 1.0))


def frame_processor(processor: BaseImageProcessor, name: str) -> BaseImageProcessor:
    """Return the processor with another framing; one that crops already keeps its margin.

    Stock transformers load it: timm's names the framing in its config, all others become a `ViTImageProcessor` of the
    same normalisation, whose padding is a centre crop larger than the image.

    Args:
        processor: of any family.
        name: "crop", "squash" or "pad".
    """
    own = read_framing(processor)
    if own.name == name and (name == "crop" or own.margin > 0.98):  # the others are of the whole image
        return processor
    if hasattr(processor, "data_config"):
        config = processor.data_config | {"crop_mode": _CROP_MODES[name], "crop_pct": 1.0}
        return type(processor)(pretrained_cfg=config, architecture=processor.architecture)
    inputs = read_input_spec(processor)
    square = {"height": inputs.size, "width": inputs.size}
    within = {"max_height": inputs.size, "max_width": inputs.size}
    return ViTImageProcessor(
        size={"crop": {"shortest_edge": inputs.size}, "squash": square, "pad": within}[name],
        do_center_crop=name != "squash",
        crop_size=square,
        resample=getattr(processor, "resample", Image.Resampling.BICUBIC),
        do_convert_rgb=True,
        image_mean=[round(value, 6) for value in inputs.mean],
        image_std=[round(value, 6) for value in inputs.std],
    )
