"""How cost grows: time and memory at 1x, 2x, 4x, 8x images, classes or processes, with the exponent of a power law."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from datasets import ClassLabel, Dataset, Features

from livt_hf.data import class_counts, exponential_counts, load_long_tailed, long_tail_indices
from livt_hf.data.labels import labels_of
from livt_hf.metrics import LongTailMetrics
from livt_hf.recipes.benchmarks.launch import launch_ours
from livt_hf.recipes.benchmarks.measuring import compared, median_seconds, peak_megabytes, say
from livt_hf.threads import available_cores

FACTORS = (1, 2, 4, 8)


def run(quick: bool = False) -> list[dict]:
    rows = 20_000 if quick else 160_000
    images, classes = (2_000, 100) if quick else (6_000, 500)
    return [
        _grow("deriving a split, by images", lambda factor: _split(rows * factor, 500)),
        _grow("deriving a split, by classes", lambda factor: _split(rows * 8, 250 * factor)),
        *_tables(2_500 if quick else 125_000),
        _grow("metrics, by images", lambda factor: _metrics(images * factor, classes)),
        _grow("metrics, by classes", lambda factor: _metrics(images, classes * factor)),
        _by_processes(10 if quick else 30, FACTORS[:2] if quick else FACTORS[:3]),
    ]


def _grow(question: str, make) -> dict:
    say(question)
    works = {factor: make(factor) for factor in FACTORS}
    times = median_seconds(works, 5)
    return _row(question, times, {factor: peak_megabytes(work) for factor, work in works.items()})


def _by_processes(steps: int, factors: tuple[int, ...]) -> dict:
    """The same updates shared by more processes: the exponent is negative until the cores are used up."""
    times, memory = {}, {}

    def work(count: int) -> None:
        times[count] = launch_ours(steps, count)

    for count in factors:
        say(f"{steps} launched MGP updates on {count} processes")
        memory[count] = peak_megabytes(lambda count=count: work(count), children=True)
    return _row(f"{steps} launched MGP updates, by processes on {available_cores()} cores", times, memory)


def _row(question: str, times: dict[int, float], memory: dict[int, float]) -> dict:
    slope = np.polyfit(np.log(list(times)), np.log(list(times.values())), 1)[0]
    (row,) = compared(question, {"ours": float(slope), "linear growth": 1.0}, "exponent of time")
    return row | {"ratio": None, "seconds": times, "megabytes": memory}


def _split(rows: int, classes: int):
    labels = np.random.RandomState(0).permutation(np.arange(rows) % classes)
    dataset = Dataset.from_dict({"label": labels}, features=Features(label=ClassLabel(num_classes=classes)))
    counts = exponential_counts(classes, rows // classes, 10)
    return lambda: class_counts(dataset.select(long_tail_indices(labels_of(dataset).values, counts)))


def _tables(rows: int) -> list[dict]:
    """Reading a table of labels, finding its files, dividing it and counting its classes."""
    with tempfile.TemporaryDirectory() as folder:
        for factor in FACTORS:
            _write_table(Path(folder, f"{factor}.csv"), rows * factor)
        return [
            _grow(f"loading, dividing and counting a table{words}, by rows", lambda f, o=options: _table(folder, f, o))
            for words, options in (("", {}), (" with groups", {"group_column": "patient"}))
        ]


def _write_table(file: Path, rows: int, classes: int = 100, images_per_folder: int = 1000) -> None:
    generator = np.random.RandomState(0)
    for number in range(0, rows, images_per_folder):
        (file.parent / str(number // images_per_folder)).mkdir(exist_ok=True)
    paths = [f"{number // images_per_folder}/{number}.jpg" for number in range(rows)]
    for path in paths:
        (file.parent / path).touch()
    label = (classes * generator.rand(rows) ** 3).astype(int)  # a long tail
    columns = {"path": paths, "label": label, "patient": generator.randint(rows // 5, size=rows)}
    pyarrow.csv.write_csv(pa.table(columns), file)


def _table(folder: str, factor: int, options: dict):
    return lambda: class_counts(load_long_tailed(f"{folder}/{factor}.csv", split_column="none", **options)["train"])


def _metrics(images: int, classes: int):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(images, classes, generator=generator)
    labels = torch.randint(classes, (images,), generator=generator)

    def work() -> None:
        metrics = LongTailMetrics([10] * classes)
        for batch, answer in zip(logits.split(256), labels.split(256), strict=True):
            metrics.update(batch, answer)
        metrics.compute()

    return work
