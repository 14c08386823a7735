"""Draw sheets of images: samples with captions, and reconstructions side by side."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from livt_hf.errors import LiVTError
from livt_hf.reports.style import DPI, save, shorten

_GAP = 8


def _as_bytes(image) -> np.ndarray:
    """Return an RGB image (PIL, or H x W x 3 of bytes or of floats in [0, 1]) as H x W x 3 bytes."""
    array = np.asarray(image)
    if array.dtype != np.uint8:  # reconstructions leave [0, 1] a little
        array = (np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255).round().astype(np.uint8)
    return array


def _fit(image, cell: int) -> np.ndarray:
    """Fit an image into a white square: small ones enlarged by whole pixels, large ones smoothly reduced."""
    picture = Image.fromarray(_as_bytes(image))
    scale = cell / max(picture.size)
    size = [max(1, round(side * scale)) for side in picture.size]
    picture = picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
    square = Image.new("RGB", (cell, cell), "white")
    square.paste(picture, ((cell - size[0]) // 2, cell - size[1]))  # down to its caption
    return np.asarray(square)


def _sheet(
    rows: list[list], cell: int, above: int = 0, below: int = 0, left: int = 0
) -> tuple[Figure, list[list[tuple[int, int]]]]:
    """Return a figure of squares in rows, with room for text beside and below them, and their corners."""
    columns = max(len(row) for row in rows)
    width = left + columns * (cell + _GAP) + _GAP
    height = above + len(rows) * (cell + below + _GAP) + _GAP
    canvas = np.full((height, width, 3), 255, dtype=np.uint8)
    corners = []
    for r, row in enumerate(rows):
        top = above + _GAP + r * (cell + below + _GAP)
        corners.append([(left + _GAP + c * (cell + _GAP), top) for c in range(len(row))])
        for (x, y), image in zip(corners[-1], row, strict=True):
            canvas[y : y + cell, x : x + cell] = _fit(image, cell)
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.imshow(canvas, interpolation="none", extent=(0, width, height, 0))
    ax.axis("off")
    return figure, corners


def contact_sheet(images: Sequence, captions: Sequence[str], path: str | Path, columns: int = 8) -> Path:
    """Draw images in rows of `columns`, each over its caption of at most two lines."""
    if len(images) == 0 or len(images) != len(captions):
        raise LiVTError(
            f"{len(images)} images and {len(captions)} captions; give at least one image, and one caption per image."
        )
    cell, letters = 128, 18
    rows = [list(images[i : i + columns]) for i in range(0, len(images), columns)]
    figure, corners = _sheet(rows, cell, below=36)
    for corner, caption in zip([corner for row in corners for corner in row], captions, strict=True):
        lines = textwrap.wrap(str(caption), letters)
        words = "\n".join(lines[:1] + [shorten(" ".join(lines[1:]), letters)])
        x, y = corner[0] + cell / 2, corner[1] + cell + 4
        figure.axes[0].text(x, y, words, ha="center", va="top", fontsize=7.5, parse_math=False)
    return save(figure, path)


def labelled_rows(rows: Sequence[tuple[str, str, Sequence]], path: str | Path) -> Path:
    """Draw rows of images, each with its text to the left in its colour."""
    cell = 112
    figure, corners = _sheet([list(images) for *_, images in rows], cell, left=230)
    for (words, colour, _), line in zip(rows, corners, strict=True):
        y = line[0][1] + cell / 2
        figure.axes[0].text(_GAP + 4, y, words, va="center", fontsize=9, color=colour, parse_math=False)
    return save(figure, path)


def reconstruction_sheet(rows: Sequence[Sequence], path: str | Path, titles: Sequence[str]) -> Path:
    """Draw one row per image (image, masked, reconstruction, perhaps another model's), one title per column."""
    widths = {len(row) for row in rows}
    if widths != {len(titles)}:
        raise LiVTError(f"rows of {sorted(widths)} images under {len(titles)} titles; give one title per column.")
    cell = 144
    figure, corners = _sheet([list(row) for row in rows], cell, above=24)
    for (x, _), title in zip(corners[0], titles, strict=True):
        figure.axes[0].text(
            x + cell / 2, 26, shorten(title, 19), ha="center", va="bottom", fontsize=9, parse_math=False
        )
    return save(figure, path)
