"""How cost grows: time and memory at 1x, 2x, 4x, 8x images, classes or processes, with the exponent of a power law."""

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features

from livt_hf.data import class_counts, exponential_counts, long_tail_indices
from livt_hf.data.labels import labels_of
from livt_hf.metrics import LongTailMetrics
from livt_hf.recipes.benchmarks.launch import launch_ours
from livt_hf.recipes.benchmarks.measuring import median_seconds, peak_megabytes
from livt_hf.training.machine import available_cores

FACTORS = (1, 2, 4, 8)


def run(quick: bool = False) -> list[dict]:
    rows = 20_000 if quick else 160_000
    images, classes = (2_000, 100) if quick else (6_000, 500)
    return [
        _grow("deriving a split, by images", lambda factor: _split(rows * factor, 500)),
        _grow("deriving a split, by classes", lambda factor: _split(rows * 8, 250 * factor)),
        _grow("metrics, by images", lambda factor: _metrics(images * factor, classes)),
        _grow("metrics, by classes", lambda factor: _metrics(images, classes * factor)),
        _by_processes(10 if quick else 60, FACTORS[:2] if quick else FACTORS),
    ]


def _grow(question: str, make) -> dict:
    works = {factor: make(factor) for factor in FACTORS}
    times = median_seconds(works, 5)
    return _row(question, times, {factor: peak_megabytes(work) for factor, work in works.items()})


def _by_processes(steps: int, factors: tuple[int, ...]) -> dict:
    """The same updates shared by more processes: the exponent is negative until the cores are used up."""
    times, memory = {}, {}

    def work(count: int) -> None:
        times[count] = launch_ours(steps, count)

    for count in factors:
        memory[count] = peak_megabytes(lambda count=count: work(count), children=True)
    return _row(f"{steps} launched MGP updates, by processes on {available_cores()} cores", times, memory)


def _row(question: str, times: dict[int, float], memory: dict[int, float]) -> dict:
    slope = np.polyfit(np.log(list(times)), np.log(list(times.values())), 1)[0]
    return {
        "question": question,
        "ours": float(slope),
        "peer": 1.0,
        "peer_name": "linear growth",
        "ratio": None,
        "unit": "exponent of time",
        "seconds": times,
        "megabytes": memory,
    }


def _split(rows: int, classes: int):
    labels = np.random.RandomState(0).permutation(np.arange(rows) % classes)
    dataset = Dataset.from_dict({"label": labels}, features=Features(label=ClassLabel(num_classes=classes)))
    counts = exponential_counts(classes, rows // classes, 10)
    return lambda: class_counts(dataset.select(long_tail_indices(labels_of(dataset).values, counts)))


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
