"""Encoded images to RGB tensors: plain JPEGs and PNGs by torchcodec, all others by Pillow.

What torchcodec is given comes out equal to Pillow bit by bit: 1.5 times as fast for the photographs of PlantDoc, twice
for the PNGs of CIFAR. It needs no FFmpeg for images. Its Linux wheels on PyPI are built for one CUDA, that of PyPI's
torch, and do not load beside a torch without it or before 2.11; Pillow then decodes everything.
"""

import functools
import hashlib
import io
import itertools
import logging
import os
import stat
import struct
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, TypeVar

import fsspec
import numpy as np
import torch
from datasets import Dataset
from datasets import Image as ImageColumn
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm.auto import tqdm

from livt_hf.data.labels import BOX, BOX_MARGIN, MAX_NAMED, embedded_sizes, image_paths
from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_last = threading.local()

# What Pillow raises on damaged files, depending on the format: OSError also covers files that are missing, truncated
# or of unknown format, SyntaxError is its word for a broken PNG, RuntimeError for a broken AVIF.
DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, RuntimeError),
    *(struct.error, Image.DecompressionBombError),
)
MIN_CROP = 32  # pixels of the side of a crop, where the image has as many
MAX_BYTES = 2**30  # of a file
MAX_RATIO = 500  # of the sides: resized to 256 pixels on the shorter one, a whole image takes 400 MB as floats
SKIP = "or leave such images out with on_broken skip."
WAY_OUT = f". Repair or remove it, {SKIP}"
# Others say transparency, a palette or how to turn the image, or make libpng complain on the terminal.
_PLAIN_CHUNKS = {b"IHDR", b"sRGB", b"gAMA", b"pHYs", b"IDAT", b"IEND"}


class BrokenImageError(LiVTError):
    """An image that cannot be read: `finding` says which one and why, the message also the way out."""

    def __init__(self, finding: str, way_out: str = ""):
        super().__init__(f"{finding}{way_out}", argument="on_broken")
        self.finding = finding


def image_suffixes() -> set[str]:
    """Return the suffixes of files that Pillow opens. It opens an .mpo as the JPEG that it is."""
    Image.init()
    return {suffix for suffix, kind in Image.registered_extensions().items() if kind in {*Image.OPEN, "MPO"}}


def read_rgb(source: str | os.PathLike | bytes | BinaryIO | Image.Image) -> torch.Tensor:
    """Read an image as training, evaluation and prediction see it.

    Args:
        source: a path or URL, the bytes of an image file, an open file or a Pillow image.

    Returns:
        A uint8 tensor (3, H, W): RGB, upright as its EXIF data says, transparency laid over white, 16-bit grey scaled.

    Example:
        >>> read_rgb(PIL.Image.new("L", (32, 24))).shape
        torch.Size([3, 24, 32])
    """
    named = source if isinstance(source, str | os.PathLike) else f"the {type(source).__name__}"
    try:
        if isinstance(source, Image.Image):
            return _from_pillow(source)
        if isinstance(source, str | os.PathLike):
            return decode_rgb(read_file(os.fspath(source)))
        return decode_rgb(source if isinstance(source, bytes) else source.read())
    except DAMAGED as error:
        raise BrokenImageError(f"{named} cannot be read: {error}") from error


def read_image(image: Mapping | None, index: int) -> torch.Tensor:
    """Decode a stored image (bytes or path), or the box to cut out of it, to a uint8 RGB tensor (3, H, W)."""
    return process_stored(image, index, decode_rgb, crop_box)


def process_stored(image: Mapping | None, index: int, decode: Callable[[bytes], T], cut: Callable[..., T]) -> T:
    """Return what `decode` makes of the bytes of a stored image, and `cut` of that where it has a box.

    None is an empty cell of a table.
    """
    data, path = (image["bytes"], image["path"]) if image is not None else (None, None)
    try:
        if image is not None and image.get(BOX) is not None:
            return cut(_last_picture(path, decode), image[BOX], image[BOX_MARGIN])
        return decode(read_file(path) if data is None else data)
    except DAMAGED as error:
        # The number is that of a row in a split, which a file on the disk does not need.
        named = path if data is None and path else f"image {index} ({path or 'embedded bytes'})"
        raise BrokenImageError(f"{named} cannot be read: {error}", WAY_OUT) from error


def read_file(path: str | None) -> bytes:
    """Read the file of an image. A pipe or device, which would be read for ever, is an error."""
    if path is None:
        raise LiVTError("it has neither bytes nor a path")
    is_url = "://" in path
    if not is_url:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise LiVTError("it is not a regular file")
        if found.st_size > MAX_BYTES:
            raise LiVTError(f"it has {found.st_size:,} bytes, and images have at most {MAX_BYTES:,}")
    with (fsspec.open if is_url else open)(path, "rb") as file:
        return file.read()


def _last_picture(path: str, decode: Callable[[bytes], T]) -> T:
    """Return what `decode` makes of a file; that of the last file is kept, for boxes of one picture are neighbours."""
    key = (path, decode, os.stat(path).st_mtime_ns)
    if getattr(_last, "key", None) != key:
        _last.key, _last.value = None, decode(read_file(path))
        _last.key = key
    return _last.value


def crop_box(image: torch.Tensor, box: Sequence[float], margin: float) -> torch.Tensor:
    """Cut a box with a margin out of an image, square where the image allows.

    Args:
        image: pixels (3, H, W).
        box: left, top, right and bottom in pixels, or relative to the image where none of them is above 1.
        margin: the crop is longer than the longer side of the box by this share, and at least 32 pixels long.

    Returns:
        A copy of the pixels. The crop is moved into the image, and shortened where that is not enough.

    Example:
        >>> crop_box(torch.zeros(3, 100, 200), [0, 0, 50, 40], margin=0.3).shape
        torch.Size([3, 65, 65])
    """
    size = np.array([image.shape[-1], image.shape[-2]] * 2)
    # Rounded, so that relative numbers and pixels give the same crop.
    left, top, right, bottom = np.round(np.array(box) * (size if max(box) <= 1 else 1), 3)
    if left >= size[0] or top >= size[1]:
        raise LiVTError(f"its box at ({left:g}, {top:g}) lies outside of its {size[0]} x {size[1]} pixels")
    right, bottom = min(right, size[0]), min(bottom, size[1])
    side = max(MIN_CROP, int(np.rint(max(right - left, bottom - top) * (1 + margin))))
    width, height = min(side, size[0]), min(side, size[1])
    x = int(np.clip(np.rint((left + right - width) / 2), 0, size[0] - width))
    y = int(np.clip(np.rint((top + bottom - height) / 2), 0, size[1] - height))
    return image[:, y : y + height, x : x + width].clone()


def decode_rgb(data: bytes) -> torch.Tensor:
    """Decode the bytes of an image file to a uint8 RGB tensor (3, H, W), upright."""
    for beginning, plain_size, decode in fast_decoders():
        if data.startswith(beginning) and (size := plain_size(data)):
            _check_pixels(*size)
            try:
                return decode(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            except RuntimeError:  # an exotic file, or a broken one: Pillow knows, and says what is wrong
                break
    try:
        opened = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:  # Pillow's words name a buffer in memory
        raise LiVTError("its format is not known; it may be no image at all") from error
    with opened as image:
        return _from_pillow(image)


def _from_pillow(image: Image.Image) -> torch.Tensor:
    """Convert a Pillow image to a uint8 RGB tensor (3, H, W), upright.

    Transparency is laid over white, as newer image processors of transformers do it. 16-bit grey keeps its upper 8
    bits (Pillow's own conversion would clip almost everything to white).
    """
    _check_sides(*image.size)
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        grey = np.asarray(image)
        low, high = grey.min(), grey.max()
        if image.mode == "I" and (low < 0 or (high > 0 and not 256 <= high <= 65535)):  # would be black, or white
            message = f"it holds 32-bit values from {low} to {high}, whose range is unknown; convert it to 8 bits"
            raise LiVTError(message)
        grey = np.clip(grey, 0, 65535)
        if grey.max() < 4096:
            warn_about_faint_images()
        image = Image.fromarray((grey >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise LiVTError("it holds floating-point values, whose range is unknown; convert it to 8 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


@functools.cache
def warn_about_faint_images() -> None:
    """Warn once about images of detectors of 10 or 12 bits, which fill the lower ones of 16."""
    logger.warning(
        "an image of 16 bits uses only the lower 12, and is nearly black where the upper 8 are kept, as here: stretch "
        "such images to all 16 bits, or convert them to 8, before training."
    )


@functools.cache
def fast_decoders() -> tuple[tuple[bytes, Callable, Callable], ...]:
    """Return (first bytes, size of a plain file or None, decoder) per kind of file; none if torchcodec cannot load."""
    try:
        from torchcodec.decoders import decode_jpeg, decode_png
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "torchcodec does not load beside torch %s, so Pillow decodes the images: they are the same, but take up "
            "to twice the time. Install torchcodec from where torch came from. (%s)",
            torch.__version__,
            str(error).partition("\n")[0],
        )
        return ()
    return (b"\xff\xd8", _plain_jpeg, decode_jpeg), (b"\x89PNG\r\n\x1a\n", _plain_png, decode_png)


def _plain_jpeg(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a grey or colour JPEG, from its start-of-frame segment; None for others.

    CMYK, which Adobe writes inverted, and XMP, which may say how to turn the image, are Pillow's.
    """
    position = 2
    while position + 10 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:  # stands alone
            position += 2
        elif marker == 0xE1 and data.startswith(b"http", position + 4):  # XMP
            return None
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, components = struct.unpack(">HHB", data[position + 5 : position + 10])
            return (height, width) if components in (1, 3) else None
        else:
            position += 2 + struct.unpack(">H", data[position + 2 : position + 4])[0]
    return None


def _plain_png(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a PNG of 8-bit grey or RGB that holds nothing else that changes its pixels."""
    position = 8
    while position + 12 <= len(data):
        length, name = struct.unpack(">I4s", data[position : position + 8])
        if name not in _PLAIN_CHUNKS:
            return None
        position += 12 + length
    if data[24:26] not in (b"\x08\x00", b"\x08\x02"):  # bits and kind of colour
        return None
    width, height = struct.unpack(">II", data[16:24])
    return height, width


def _check_sides(width: int, height: int) -> None:
    """Raise an error for an image so narrow that resizing its shorter side may take more memory than there is."""
    if max(width, height) > MAX_RATIO * min(width, height):
        raise LiVTError(f"of its {width} x {height} pixels one side is more than {MAX_RATIO} times the other")


def _check_pixels(height: int, width: int) -> None:
    """Raise an error at the limit at which Pillow refuses to decode: twice the size at which it warns."""
    _check_sides(width, height)
    if Image.MAX_IMAGE_PIXELS is not None and height * width > 2 * Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(
            f"its {width} x {height} pixels look like a decompression bomb; PIL.Image.MAX_IMAGE_PIXELS sets the limit"
        )


def select_stored_images(dataset: Dataset) -> Dataset:
    """Return the dataset with its images as they are stored and not decoded, and only what belongs to them: boxes."""
    columns = [name for name in ("image", BOX, BOX_MARGIN) if name in dataset.column_names]
    return dataset.select_columns(columns).cast_column("image", ImageColumn(decode=False)).with_format(None)


def list_stored_images(rows: Mapping[str, list]) -> list[dict]:
    """Return a batch of rows of `select_stored_images` as one dictionary per image, which `read_image` takes.

    It holds bytes or a path, and where there is one the box to cut out.
    """
    images = [image or {"bytes": None, "path": None} for image in rows["image"]]
    if BOX not in rows:
        return images
    crops = zip(images, rows[BOX], rows[BOX_MARGIN], strict=True)
    return [image | {BOX: box, BOX_MARGIN: margin} for image, box, margin in crops]


def read_images(dataset: Dataset, rows: Sequence[int]) -> list[torch.Tensor]:
    """Read the images of some rows as uint8 tensors (3, H, W); no other is read."""
    stored = list_stored_images(select_stored_images(dataset)[list(rows)]) if len(rows) else []
    return [read_image(image, row) for image, row in zip(stored, rows, strict=True)]


def iterate_stored(dataset: Dataset) -> Iterator[dict]:
    """Yield the images as they are stored, one by one: bytes or a path, and the box to cut out."""
    for rows in select_stored_images(dataset).iter(batch_size=256):
        yield from list_stored_images(rows)


def find_broken(dataset: Dataset) -> dict[int, str]:
    """Decode every image, with a progress bar, and return row number -> what is wrong with it."""
    images = tqdm(iterate_stored(dataset), "Looking for broken images", len(dataset), unit="images", disable=None)
    broken = {}
    with images, warnings.catch_warnings(action="ignore"):  # Pillow's, of which the findings say more
        for index, encoded in enumerate(images):
            try:
                read_image(encoded, index)
            except BrokenImageError as error:
                broken[index] = error.finding
    return broken


def check_readable(dataset: Dataset, which: str = "") -> None:
    """Raise an error that names all broken images of a dataset at once: one would mend them one by one."""
    findings = list(find_broken(dataset).values())
    if len(findings) == 1:
        raise BrokenImageError(f"{which}{findings[0]}", WAY_OUT)
    if findings:
        message = f"{which}{len(findings)} images cannot be read:{format_findings(findings)}"
        raise LiVTError(f"{message}\nRepair or remove them, {SKIP}", "on_broken")


def find_copies(splits: Mapping[str, Dataset]) -> list[tuple[str, str]]:
    """Return pairs of images in different splits that have the same bytes: ("a.png of train", "b.png of test").

    Only images of equal length are read.
    """
    sizes = {split: _stored_sizes(dataset) for split, dataset in splits.items()}
    several = {size for size, count in Counter(itertools.chain(*sizes.values())).items() if count > 1 and size != 0}
    seen: dict[bytes, tuple[str, str]] = {}
    pairs = []
    for split, dataset in splits.items():
        rows = [row for row, size in enumerate(sizes[split]) if size in several]
        for row, (path, digest) in zip(rows, image_digests(dataset.select(rows)), strict=True):
            named = f"{path or f'image {row}'} of {split}"
            first_split, first = seen.setdefault(digest, (split, named))
            if first_split != split:
                pairs.append((first, named))
    return pairs


def describe_copies(splits: Mapping[str, Dataset]) -> str | None:
    """Return a message about images that are in two splits, or None where there are none."""
    pairs = find_copies(splits)
    if not pairs:
        return None
    number = "1 image is" if len(pairs) == 1 else f"{len(pairs)} images are"
    findings = f"{number} in two splits:{format_findings(' = '.join(pair) for pair in pairs)}"
    return (
        f"{findings}\nLeave out one of each pair with exclude or, where the split is made here, keep both on one "
        "side with group_from near_copies; masks and blank images are better all left out."
    )


def stored_paths(dataset: Dataset) -> list[str]:
    """Return the files of images that are stored as such on this machine."""
    return [path for path, size in _paths_and_sizes(dataset) if size is None and path and "://" not in path]


def _stored_sizes(dataset: Dataset) -> list[int | None]:
    """Return the bytes of each image, 0 where there are none; None where asking would mean to fetch it."""
    sizes = []
    for path, size in _paths_and_sizes(dataset):
        if size is None and not (path and "://" in path):
            size = os.path.getsize(path) if path and os.path.isfile(path) else 0
        sizes.append(size)
    return sizes


def _paths_and_sizes(dataset: Dataset) -> Iterator[tuple[str | None, int | None]]:
    return zip(image_paths(dataset).to_pylist(), embedded_sizes(dataset).to_pylist(), strict=True)


def image_digests(dataset: Dataset) -> Iterator[tuple[str | None, bytes]]:
    """Yield the path of each image, where it has one, and a digest of its bytes as they are stored and its box."""
    for index, image in enumerate(iterate_stored(dataset)):
        yield image["path"], process_stored(image, index, _digest, _digest_box)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _digest_box(digest: bytes, box: Sequence[float], margin: float) -> bytes:
    return _digest(digest + np.array([*box, margin], dtype="<f8").tobytes())


def drop_broken(dataset: Dataset) -> Dataset:
    """Return the images that can be decoded; a warning names the others."""
    return dataset.select(readable_rows(dataset))


def readable_rows(dataset: Dataset) -> np.ndarray:
    """Return the rows of the images that can be decoded; a warning names the others."""
    broken = find_broken(dataset)
    if broken:
        logger.warning(
            "left out %d broken of %d images:%s", len(broken), len(dataset), format_findings(broken.values())
        )
    return np.setdiff1d(np.arange(len(dataset)), list(broken))


def format_findings(findings: Iterable[str]) -> str:
    """Return one line for each of the first ten findings, and how many more there are."""
    findings = list(findings)
    more = [f"and {len(findings) - MAX_NAMED} more"] if len(findings) > MAX_NAMED else []
    return "".join(f"\n  {finding}" for finding in findings[:MAX_NAMED] + more)


SAMPLE_SIZE = 16  # images that tell the sizes of all


def is_native(dataset: Dataset, image_size: int) -> bool:
    """Return True if images are small and have the model's own size, so that evaluation leaves them as they are."""
    return image_size <= 96 and set(sample_image_sizes(dataset)) == {(image_size, image_size)}


def sample_image_sizes(dataset: Dataset) -> list[tuple[int, ...]]:
    """Return height and width of some images, from the first to the last one of a dataset."""
    return [tuple(image.shape[-2:]) for image in read_images(dataset, spread_rows(dataset, SAMPLE_SIZE))]


def spread_rows(dataset: Dataset, count: int) -> list[int]:
    """Return `count` rows spread from the first to the last one of a dataset, or all."""
    return np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int).tolist()
