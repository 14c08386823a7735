"""All long-tail metrics of a test set at once: ours against scikit-learn on the same logits, time and memory.

Both start from float32 logits and run on one thread; times are of the processor, so that a busy machine disturbs them
little. "Beyond the softmax" takes off what `logits.softmax(-1)` takes in the same run: the floor of whatever reports
calibration.
"""

import numpy as np
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, recall_score, top_k_accuracy_score

from livt_hf.metrics import LongTailMetrics, shot_groups
from livt_hf.recipes.benchmarks.measuring import peak_megabytes, processor_seconds, say

SIZES = {"ImageNet-LT": (50_000, 1_000), "iNat18": (24_426, 8_142)}


def run(quick: bool = False) -> list[dict]:
    torch.set_num_threads(1)
    rows = []
    for name, (images, classes) in SIZES.items():
        rows += compare(name, images // 10 if quick else images, classes, repeats=3 if quick else 7)
    return rows


def compare(name: str, images: int, classes: int, repeats: int) -> list[dict]:
    say(f"metrics of {images:,} images, {classes:,} classes")
    logits, labels, counts = test_set(images, classes)

    def ours() -> dict:
        metrics = LongTailMetrics(counts)
        metrics.update(logits, labels)
        return metrics.compute()

    def peer() -> dict:
        return with_scikit_learn(logits.softmax(-1).numpy(), labels.numpy(), counts)

    agree(ours(), peer())
    our_memory, memory = peak_megabytes(ours), peak_megabytes(peer)
    theirs = processor_seconds(peer)
    # In turn, so that a busy moment of the machine meets both; the least is what the work takes.
    pairs = [(processor_seconds(lambda: logits.softmax(-1)), processor_seconds(ours)) for _ in range(repeats)]
    softmax, mine = (min(column) for column in zip(*pairs, strict=True))
    size = f"{name}, {images:,} x {classes:,}"
    return [
        row(f"all metrics from logits, {size}", 1000 * mine, 1000 * theirs, "ms"),
        row(f"the same beyond the softmax, {size}", 1000 * (mine - softmax), 1000 * (theirs - softmax), "ms"),
        row(f"memory beside the logits, {size}", our_memory, memory, "MB"),
    ]


def row(question: str, ours: float, peer: float, unit: str) -> dict:
    """`ratio` says how many times less ours takes; None where ours is below 1: nothing, or less than a softmax."""
    values = {"ours": ours, "peer": peer, "peer_name": "scikit-learn", "ratio": peer / ours if ours > 1 else None}
    return {"question": question, **values, "unit": unit}


def test_set(images: int, classes: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Logits of a model that is right on roughly six images of ten."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) * classes // images  # from head to tail, whether or not each class has an image
    logits = torch.randn(images, classes, generator=generator)
    logits[torch.arange(images), labels] += 2 + 3 * torch.rand(images, generator=generator)
    return logits, labels, (1280 * 256 ** (-np.arange(classes) / (classes - 1))).astype(int)


def with_scikit_learn(probabilities: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> dict:
    """What one writes with scikit-learn's own functions; it has no ECE, but the curve it is the mean gap of."""
    predicted, confidence = probabilities.argmax(1), probabilities.max(1)
    recall = recall_score(labels, predicted, labels=range(len(counts)), average=None, zero_division=np.nan)
    groups = shot_groups(counts).numpy()
    right = predicted == labels
    accuracy, mean = calibration_curve(right, confidence, n_bins=15)
    sizes = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    sizes = sizes[sizes > 0]
    return {
        "accuracy": accuracy_score(labels, predicted),
        "top5": top_k_accuracy_score(labels, probabilities, k=5, labels=range(len(counts))),
        **{name: np.nanmean(recall[groups == i]) for i, name in enumerate(("many", "medium", "few"))},
        "ece": (np.abs(accuracy - mean) * sizes).sum() / len(labels),
        "mce": np.abs(accuracy - mean).max(),
    }


def agree(ours: dict, theirs: dict) -> None:
    for name, value in theirs.items():
        if abs(ours[name] - value) > 1e-4:
            raise AssertionError(f"{name} is {ours[name]} here and {value} with scikit-learn: not the same work.")
