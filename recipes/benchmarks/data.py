"""The input pipelines and the splits against what people use otherwise, on one core, in the same run.

Ours is the whole way from encoded bytes to normalised float32 batches; so is every peer. Images per second count the
processor's seconds of this one-threaded process, so that other work on the machine does not blur them; latencies and
the split are wall time.
"""

import csv
import io
import json
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from timm.data import create_transform
from timm.data.constants import IMAGENET_DEFAULT_MEAN as MEAN
from timm.data.constants import IMAGENET_DEFAULT_STD as STD
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from livt_hf.data import (
    Batches,
    DeviceTransform,
    FinetuneAugmentation,
    PretrainAugmentation,
    class_counts,
    exponential_counts,
    long_tail_indices,
    train_loader,
)
from livt_hf.data.labels import labels_of
from livt_hf.recipes.benchmarks.measuring import (
    compared,
    median_seconds,
    peak_megabytes,
    processor_seconds,
    say,
    seconds,
)

BATCH, SMALL_BATCH = 32, 128


def run(quick: bool = False) -> list[dict]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [*photos(Path(folder), quick), *small_images(quick), *splits(quick)]
    finally:
        torch.set_num_threads(threads)


def picture(generator: np.random.RandomState, height: int, width: int) -> PILImage.Image:
    """Shapes at several scales and some grain: compresses about as a photograph does."""
    total = np.zeros((height, width, 3))
    for cells in (3, 12, 48):
        noise = PILImage.fromarray(generator.randint(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += np.asarray(noise.resize((width, height), PILImage.Resampling.BICUBIC), dtype=float) / cells**0.5
    total += generator.normal(0, 6, total.shape)
    return PILImage.fromarray(np.clip((total - total.min()) / np.ptp(total) * 255, 0, 255).astype(np.uint8))


def as_dataset(encoded: list[bytes]) -> Dataset:
    features = Features(image=Image(), label=ClassLabel(num_classes=2))
    rows = {
        "image": [{"bytes": data, "path": None} for data in encoded],
        "label": [i % 2 for i in range(len(encoded))],
    }
    return Dataset.from_dict(rows, features=features)


def encode(image: PILImage.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photos(folder: Path, quick: bool) -> list[dict]:
    count, repeats = (64, 5) if quick else (256, 7)
    generator = np.random.RandomState(0)
    encoded = [encode(picture(generator, 375, 500), "JPEG", quality=90) for _ in range(count)]
    for i, data in enumerate(encoded):
        (folder / str(i % 2)).mkdir(exist_ok=True)
        (folder / str(i % 2) / f"{i}.jpg").write_bytes(data)
    dataset = as_dataset(encoded)

    finetune = create_transform(
        224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", re_prob=0.25,
        re_mode="pixel", mean=MEAN, std=STD, color_jitter=None,
    )  # fmt: skip
    rows = []
    for stage, augmentation, erase, theirs in (
        ("MGP", PretrainAugmentation(224), 0.0, stock_pretrain_transform(224)),
        ("BFT", FinetuneAugmentation(224), 0.25, finetune),
    ):
        makers = {
            "ours": lambda a=augmentation, e=erase: OurBatches(dataset, a, e),
            "ImageFolder and Pillow (torchvision v1)": lambda t=theirs: DataLoader(
                ImageFolder(folder, t), batch_size=BATCH, shuffle=True
            ),
            "datasets, set_transform and Pillow": lambda t=theirs: set_transform_batches(dataset, t),
        }
        question = f"{stage} input, 500x375 JPEG at 224 px, per core"
        say(f"{question}: three ways in turn, {count} images each")
        rows += compared(question, rates(makers, count, repeats), "images/s")
        if stage == "MGP":
            latency = latencies(makers, repeats)
            rows += compared("time to the first batch, 500x375 JPEG", latency, "s", smaller_is_better=True)
    return rows


def small_images(quick: bool) -> list[dict]:
    count, repeats = (1920, 3) if quick else (9984, 5)  # whole batches
    say(f"CIFAR-size input: two ways in turn, {count} images each")
    generator = np.random.RandomState(0)
    dataset = as_dataset([encode(picture(generator, 32, 32), "PNG") for _ in range(count)])
    theirs = stock_pretrain_transform(32)
    makers = {
        "ours": lambda: OurBatches(dataset, PretrainAugmentation(32), 0.0, SMALL_BATCH),
        "datasets, set_transform and Pillow, PNGs decoded every epoch": lambda: set_transform_batches(
            dataset, theirs, SMALL_BATCH
        ),
    }
    first = f"time to the first batch, {count} CIFAR-size images (ours decodes all)"
    return [
        *compared("CIFAR-size input, per core", rates(makers, count, repeats), "images/s"),
        *compared(first, latencies(makers, repeats), "s", smaller_is_better=True),
    ]


def stock_pretrain_transform(size: int) -> transforms.Compose:
    """Return the augmentation of MAE."""
    crop = transforms.RandomResizedCrop(size, scale=(0.2, 1.0), interpolation=transforms.InterpolationMode.BICUBIC)
    flip, normalize = transforms.RandomHorizontalFlip(), transforms.Normalize(MEAN, STD)
    return transforms.Compose([crop, flip, transforms.ToTensor(), normalize])


class OurBatches:
    """The loader and the transform of the training device, as the training loop composes them."""

    def __init__(self, dataset: Dataset, augmentation, erase: float, batch_size: int = BATCH):
        self.loader = train_loader(dataset, augmentation, Batches(batch_size))
        self.transform = DeviceTransform(MEAN, STD, erase=erase)

    def __iter__(self) -> Iterator[dict]:
        for update, batch in enumerate(self.loader.epoch(0)):
            yield self.transform(batch, epoch=0, update=update)


def set_transform_batches(dataset: Dataset, transform, batch_size: int = BATCH) -> DataLoader:
    def apply(rows: dict) -> dict:
        return {"pixel_values": [transform(image.convert("RGB")) for image in rows["image"]], "label": rows["label"]}

    return DataLoader(dataset.with_transform(apply), batch_size=batch_size, shuffle=True)


def rates(makers: dict[str, Callable], count: int, repeats: int) -> dict[str, float]:
    """Measure images per second of an epoch."""
    ways = {name: partial(deque, make(), maxlen=0) for name, make in makers.items()}
    return {name: count / time for name, time in median_seconds(ways, repeats, processor_seconds).items()}


def latencies(makers: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Seconds from nothing to the first batch."""
    return median_seconds({name: lambda make=make: next(iter(make())) for name, make in makers.items()}, repeats)


def splits(quick: bool) -> list[dict]:
    """Measure a derived split of a table as long as ImageNet with as many classes as iNaturalist 2018."""
    rows, classes = 1_281_167, 8_142
    say(f"derived split of {rows:,} rows")
    labels = np.random.RandomState(0).permutation(np.arange(rows) % classes)
    dataset = Dataset.from_dict({"label": labels}, features=Features(label=ClassLabel(num_classes=classes)))
    counts = exponential_counts(classes, rows // classes, 100)

    def ours() -> Dataset:
        part = dataset.select(long_tail_indices(labels_of(dataset).values, counts))
        assert class_counts(part).tolist() == counts.tolist()
        return part

    def row_loop(few: int) -> None:
        by_class = {}
        for i in range(few):
            by_class.setdefault(dataset[i]["label"], []).append(i)

    # First of all, before freed memory lies ready to be used again.
    memory = {"ours": max(1.0, peak_megabytes(ours)), "the bound this project set itself": 300.0}
    few = 10_000 if quick else 40_000
    loop = seconds(lambda: row_loop(few)) * rows / few
    times = median_seconds({"ours": ours}, 3) | {f"a loop over rows, {few} of them timed and extrapolated": loop}
    size = f"{rows:,} rows x {classes:,} classes"
    return [
        *compared(f"derived split of {size}", times, "s", smaller_is_better=True),
        *compared(f"its peak memory on top of the table, {size}", memory, "MB", smaller_is_better=True),
    ]


# Reads a dataset in a process of its own: prints the processor's seconds and the peak of its resident memory in MB.
READ = """
import resource, sys, time
from livt_hf.data import class_counts, load_long_tailed
start = time.process_time()
class_counts(load_long_tailed(sys.argv[1])["train"])
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def run_boxes(quick: bool = False) -> list[dict]:
    """Measure reading, locating and splitting the boxes of a COCO file and of a table, ten to a picture."""
    most, rows = 20_000 if quick else 1_000_000, []
    for kind, name in {"a COCO file": "coco.json", "a table": "boxes.csv"}.items():
        found = {}
        for count in (most // 10, most):
            say(f"reading {count:,} boxes of {kind}")
            with tempfile.TemporaryDirectory() as folder:
                file = write_boxes(Path(folder), name, count)
                printed = subprocess.run([sys.executable, "-c", READ, file], check=True, stdout=subprocess.PIPE)
            found[count] = [float(number) for number in printed.stdout.split()]
        (small, _), (large, peak) = found.values()
        times = {"ours": large, f"ten times the time of {most // 10:,}": 10 * small}
        memory = {"ours": peak, "the bound this project set itself": 2048.0}
        question = f"reading {most:,} boxes of {kind}"
        rows += compared(question, times, "s", smaller_is_better=True)
        rows += compared(f"peak memory of a process {question}", memory, "MB", smaller_is_better=True)
    return rows


def write_boxes(folder: Path, name: str, count: int) -> Path:
    """Write boxes of 100 long-tailed classes, and empty files for their pictures."""
    generator = np.random.RandomState(0)
    pictures = [f"{number // 1000}/{number}.jpg" for number in range(count // 10)]
    for picture in pictures:
        path = folder / picture
        path.parent.mkdir(exist_ok=True)
        path.touch()
    picture, label = generator.randint(len(pictures), size=count), (100 * generator.rand(count) ** 3).astype(int)
    box = np.concatenate([generator.randint(0, 400, (count, 2)), generator.randint(20, 100, (count, 2))], axis=1)
    boxes = zip(picture.tolist(), label.tolist(), box.tolist(), strict=True)
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        if name.endswith(".csv"):
            csv.writer(file).writerows([["image", "label", "x", "y", "width", "height"]])
            csv.writer(file).writerows([pictures[one], f"class {c}", *corners] for one, c, corners in boxes)
        else:
            keys = ("id", "image_id", "category_id", "bbox")
            content = {
                "images": [{"id": number, "file_name": picture} for number, picture in enumerate(pictures)],
                "annotations": [dict(zip(keys, (n, *one), strict=True)) for n, one in enumerate(boxes)],
                "categories": [{"id": number, "name": f"class {number}"} for number in range(100)],
            }
            file.write(json.dumps(content))
    return folder / name
