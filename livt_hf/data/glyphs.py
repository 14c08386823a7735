"""Glyphs: the embedded dataset, made on the spot from the fonts that matplotlib ships.

A real, if small, long-tailed problem for a first run without a download: 32 x 32 images of letters and digits in 16
fonts under random pose, colour, shading, strokes, noise and with a part of another glyph in sight. The 40 classes stay
distinct under the pose range (no b/d, 6/9, O/0, c/C; I and 1 look like strokes), but not under a mirror: train with
`flip=False`. Every number is a function of (seed, split, class, k), and only operations that IEEE 754 defines exactly
are used, so the images are the same on every machine with the same Pillow.
"""

from pathlib import Path

import matplotlib
import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Image, NamedSplit
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from livt_hf.data.spec import DataSpec
from livt_hf.data.subsample import exponential_counts
from livt_hf.errors import LiVTError
from livt_hf.randomness import keyed_uniform

# In order of frequency. Mixed on purpose, so that a group of classes is not a kind of character.
CLASSES = "Ka7RtW3eMgB2nXQ5SdGh8EPrZ4ULYDAF6TJOHVNC"
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif"),
    *("DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic"),
    *("cmr10", "cmss10", "cmtt10", "cmb10", "cmti10"),
)
SIZE = 32
CANVAS = 40  # a mask, with the glyph's longer side scaled to GLYPH and a margin around it
GLYPH = 28
NUMBERS_PER_IMAGE = 64
LUMA = (0.299, 0.587, 0.114)


def load_glyphs(spec: DataSpec) -> DatasetDict:
    """Make the dataset that a spec describes."""
    for argument, allowed in (("rule", "exponential"), ("source", None)):
        if getattr(spec, argument) not in (None, allowed):
            raise LiVTError(f"glyphs are made by the exponential rule, without a source: drop {argument}.", argument)
    options = {"imbalance_factor": spec.imbalance_factor, "max_count": spec.images_per_class}
    return glyphs(seed=spec.split_seed, **{name: value for name, value in options.items() if value is not None})


def glyphs(
    imbalance_factor: float = 100, max_count: int = 800, test_per_class: int = 50, seed: int = 0
) -> DatasetDict:
    """Make a training set by the exponential rule and a balanced test set.

    The images of a larger imbalance factor are a subset of those of a smaller one.
    """
    masks = _masks()
    train = exponential_counts(len(CLASSES), max_count, imbalance_factor)
    test = exponential_counts(len(CLASSES), test_per_class, 1)
    return DatasetDict(train=_split(masks, train, seed, "train"), test=_split(masks, test, seed, "test"))


def _split(masks: np.ndarray, counts: np.ndarray, seed: int, name: str) -> Dataset:
    labels = np.repeat(np.arange(len(counts)), counts)
    number_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    keys = labels * 2**32 + number_in_class
    images = np.empty((len(labels), SIZE, SIZE, 3), dtype=np.uint8)
    for start in range(0, len(labels), 128):  # small enough for the processor's cache
        rows = slice(start, start + 128)
        numbers = keyed_uniform(seed, {"train": 0, "test": 1}[name], keys[rows], NUMBERS_PER_IMAGE)
        images[rows] = _draw(masks, labels[rows], numbers)
    features = Features(image=Image(), label=ClassLabel(names=list(CLASSES)))
    table = pa.table({"image": _as_ppm(images), "label": pa.array(labels, type=pa.int64())})
    return Dataset(table.cast(features.arrow_schema), info=DatasetInfo(features=features), split=NamedSplit(name))


def _masks() -> np.ndarray:
    """Return the coverage of every (class, font): (classes * fonts, CANVAS, CANVAS) in 0 .. 1."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # The basic layout engine: Raqm, where it is installed, may place a glyph elsewhere.
    fonts = [ImageFont.truetype(folder / f"{name}.ttf", 72, layout_engine=ImageFont.Layout.BASIC) for name in FONTS]
    masks = np.zeros((len(CLASSES), len(FONTS), CANVAS, CANVAS), dtype=np.float32)
    for c, character in enumerate(CLASSES):
        for f, font in enumerate(fonts):
            picture = PILImage.new("L", (144, 144))
            ImageDraw.Draw(picture).text((72, 72), character, fill=255, font=font, anchor="mm")
            picture = picture.crop(picture.getbbox())
            shrink = GLYPH / max(picture.size)
            picture = picture.resize([max(1, round(side * shrink)) for side in picture.size], PILImage.Resampling.BOX)
            left, top = (CANVAS - picture.width) // 2, (CANVAS - picture.height) // 2
            masks[c, f, top : top + picture.height, left : left + picture.width] = np.asarray(picture) / 255
    return masks.reshape(-1, CANVAS, CANVAS)


def _draw(masks: np.ndarray, labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Draw images (B, SIZE, SIZE, 3) in uint8 of labels (B,) and numbers (B, NUMBERS_PER_IMAGE) in [0, 1)."""
    draws = iter(numbers.T.astype(np.float32))

    def uniform(low: float, high: float) -> np.ndarray:  # (B, 1, 1)
        return (low + (high - low) * next(draws))[:, None, None]

    def colour() -> np.ndarray:  # (B, 3, 1, 1)
        return np.stack([next(draws) for _ in range(3)], axis=1)[:, :, None, None]

    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32) - (SIZE - 1) / 2  # (SIZE, SIZE), the centre of the image is 0
    font = (next(draws) * len(FONTS)).astype(np.int64)
    glyph = _place(
        masks[labels * len(FONTS) + font], (x, y),
        half_angle_tangent=uniform(-0.09, 0.09),  # 10 degrees to both sides
        size=uniform(22, 27), stretch=uniform(0.9, 1.15), shear=uniform(-0.1, 0.1),
        left=uniform(-1.5, 1.5), top=uniform(-1.5, 1.5),
    )  # fmt: skip
    # Another glyph, pushed to the border so that the one that counts is the central one.
    horizontal = next(draws)[:, None, None] < 0.5
    sign = np.where(next(draws) < 0.5, -1, 1).astype(np.float32)[:, None, None]
    along, across = uniform(-12, 12), sign * uniform(20, 26)
    other = (next(draws) * len(masks)).astype(np.int64)
    neighbour = _place(
        masks[other], (x, y), half_angle_tangent=uniform(-0.13, 0.13), size=uniform(19, 27),
        left=np.where(horizontal, across, along), top=np.where(horizontal, along, across),
    )  # fmt: skip

    background, foreground = _colours(colour(), colour(), uniform(0.45, 0.6))
    shade = ((uniform(-1, 1) * x + uniform(-1, 1) * y) / SIZE * uniform(0, 0.1))[:, None]
    picture = background + shade  # (B, 3, SIZE, SIZE)
    picture += neighbour[:, None] * (colour() - picture) * 0.3
    stroke = _stroke(x, y, uniform, thickness=uniform(0.0, 1.0))
    picture += stroke[:, None] * (colour() - picture)
    picture += (glyph * uniform(0.8, 1.0))[:, None] * (foreground + shade - picture)
    occluder = _stroke(x, y, uniform, thickness=uniform(0.0, 0.5))
    picture += occluder[:, None] * (colour() - picture)
    keys = (next(draws) * 2**24).astype(np.int64)
    noise = keyed_uniform(0, 0, keys, SIZE * SIZE).astype(np.float32).reshape(-1, SIZE, SIZE) - 0.5
    picture += (noise * uniform(0, 0.1))[:, None]
    return np.rint(np.clip(picture, 0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)


def _place(masks, at, half_angle_tangent, size, left, top, stretch=1.0, shear=0.0) -> np.ndarray:
    """Turn, scale, stretch, shear and shift masks (B, CANVAS, CANVAS); values at points (x, y): (B, SIZE, SIZE)."""
    square = half_angle_tangent * half_angle_tangent  # rational rotation: sine and cosine differ between machines
    cosine, sine = (1 - square) / (1 + square), 2 * half_angle_tangent / (1 + square)
    step = GLYPH / size  # mask pixels per image pixel
    x, y = at[0] - left, at[1] - top
    u, v = (cosine * x + sine * y) * step * stretch, (cosine * y - sine * x) * step
    u = np.clip(u + shear * v + (CANVAS - 1) / 2, 0, CANVAS - 1.001)
    v = np.clip(v + (CANVAS - 1) / 2, 0, CANVAS - 1.001)
    column, row = u.astype(np.int32), v.astype(np.int32)
    u, v = u - column, v - row
    flat, first = masks.reshape(-1), np.arange(len(masks), dtype=np.int32)[:, None, None] * CANVAS**2
    upper_left = first + row * CANVAS + column
    upper = flat[upper_left] * (1 - u) + flat[upper_left + 1] * u
    lower = flat[upper_left + CANVAS] * (1 - u) + flat[upper_left + CANVAS + 1] * u
    return upper * (1 - v) + lower * v


def _colours(first: np.ndarray, second: np.ndarray, contrast: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return background and foreground of any hue; the foreground is lighter by `contrast`."""
    contrast = contrast[:, None]
    low = 0.2 + (0.6 - contrast) * 0.5
    luma = [(c[:, 0] * LUMA[0] + c[:, 1] * LUMA[1] + c[:, 2] * LUMA[2])[:, None] for c in (first, second)]
    return (first - luma[0]) * 0.3 + low, (second - luma[1]) * 0.3 + low + contrast


def _stroke(x, y, uniform, thickness) -> np.ndarray:
    """Return the coverage of a straight line between two random points: (B, SIZE, SIZE)."""
    half = SIZE / 2
    x0, y0, x1, y1 = (uniform(-half, half) for _ in range(4))
    dx, dy = x1 - x0, y1 - y0
    along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy + 1e-6), 0, 1)
    ex, ey = x - x0 - along * dx, y - y0 - along * dy
    return np.clip(thickness - np.sqrt(ex * ex + ey * ey), 0, 1)


def _as_ppm(images: np.ndarray) -> pa.StructArray:
    """Encode images as PPM files in one go: a fixed header, then the pixels. PNGs would take most of the time."""
    header = np.frombuffer(f"P6 {SIZE} {SIZE} 255\n".encode(), dtype=np.uint8)
    files = np.empty((len(images), len(header) + images[0].size), dtype=np.uint8)
    files[:, : len(header)] = header
    files[:, len(header) :] = images.reshape(len(images), -1)
    offsets = np.arange(len(images) + 1, dtype=np.int32) * files.shape[1]
    encoded = pa.Array.from_buffers(pa.binary(), len(images), [None, pa.py_buffer(offsets), pa.py_buffer(files)])
    return pa.StructArray.from_arrays([encoded, pa.nulls(len(images), pa.string())], names=["bytes", "path"])
