"""Encoded images to RGB tensors: JPEGs by torchvision (libjpeg-turbo, equal to Pillow bit by bit), others by Pillow.

torchvision 0.29's PNG decoder is faster than Pillow's, but ends the process with a segmentation fault on some damaged
files.
"""

import io
import os
import struct
from collections.abc import Mapping

import fsspec
import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torchvision.io import ImageReadMode, decode_jpeg
from transformers.image_transforms import convert_to_rgb

from livt_hf.errors import LiVTError

# What Pillow raises on damaged files, depending on the format: OSError also covers files that are missing, truncated
# or of unknown format, SyntaxError is its word for a broken PNG, RuntimeError for a broken AVIF.
DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, RuntimeError),
    *(struct.error, Image.DecompressionBombError),
)


WAY_OUT = ". Repair or remove it, or leave such images out with --on_broken skip (in Python on_broken='skip')."


class BrokenImageError(LiVTError):
    """An image that cannot be read; the message says which one and why."""


def read_image(image: Mapping, index: int) -> torch.Tensor:
    """A row of an undecoded `datasets.Image` column (bytes or path) to a uint8 RGB tensor (3, H, W)."""
    data, path = image["bytes"], image["path"]
    try:
        if data is None:
            data = _read_file(path)
        return decode_rgb(data)
    except DAMAGED as error:
        raise BrokenImageError(
            f"image {index} ({path or 'embedded bytes'}) cannot be read: {error}{WAY_OUT}"
        ) from error


def _read_file(path: str | None) -> bytes:
    if path is None:
        raise LiVTError("it has neither bytes nor a path")
    if "://" in path:
        with fsspec.open(path, "rb") as file:
            return file.read()
    with open(path, "rb") as file:
        return file.read()


def decode_rgb(data: bytes) -> torch.Tensor:
    """Bytes of an image file to a uint8 RGB tensor (3, H, W), upright.

    Transparency is laid over white, as the image processors of transformers do it. 16-bit grey keeps its upper 8 bits
    (Pillow's own conversion would clip almost everything to white).
    """
    if data[:2] == b"\xff\xd8":
        height, width, components = _jpeg_frame(data)
        if components in (1, 3):  # CMYK: Adobe writes it inverted, which Pillow knows
            _refuse_bomb(height, width)
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            try:
                return decode_jpeg(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
            except RuntimeError:  # an exotic file, or a broken one: Pillow knows, and says what is wrong
                return _by_pillow(data)
    return _by_pillow(data)


def _by_pillow(data: bytes) -> torch.Tensor:
    try:
        opened = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:  # Pillow's words name a buffer in memory
        raise LiVTError("its format is not known; it may be no picture at all") from error
    with opened as image:
        image.load()
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise LiVTError("it holds floating-point values, whose range is unknown; convert it to 8 bits")
    opaque = image.mode == "RGB" and "transparency" not in image.info
    pixels = np.array(image) if opaque else convert_to_rgb(image, return_numpy=True)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _jpeg_frame(data: bytes) -> tuple[int, int, int]:
    """Height, width and number of components from the start-of-frame segment, without decoding."""
    position = 2
    while position + 10 <= len(data):
        if data[position] != 0xFF:
            break
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:  # stands alone
            position += 2
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return struct.unpack(">HHB", data[position + 5 : position + 10])
        else:
            position += 2 + struct.unpack(">H", data[position + 2 : position + 4])[0]
    return 0, 0, 0


def _refuse_bomb(height: int, width: int) -> None:
    """The limit at which Pillow refuses to decode: twice the size at which it warns."""
    if Image.MAX_IMAGE_PIXELS is not None and height * width > 2 * Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(
            f"its {width} x {height} pixels look like a decompression bomb; PIL.Image.MAX_IMAGE_PIXELS sets the limit"
        )


def read_rgb(path: str | os.PathLike) -> torch.Tensor:
    """An image file as training decodes it: a uint8 RGB tensor (3, H, W), upright."""
    return read_image({"bytes": None, "path": os.fspath(path)}, 0)
