"""A move of the demo's slider with 8,142 classes: what the server does for it, against classifying the image again.

On one thread, so that a busy machine disturbs it little. The way to the browser and back comes on top.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torchvision.io import write_png

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.data import eval_processor
from livt_hf.demo.serving import ServedClassifier
from livt_hf.recipes.benchmarks.measuring import compared, median_seconds

CLASSES = 8_142


def run(quick: bool = False) -> list[dict]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(repeats=5 if quick else 40)
    finally:
        torch.set_num_threads(threads)


def measure(repeats: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        counts = (1000 * 500 ** (-np.arange(CLASSES) / (CLASSES - 1))).astype(int).tolist()
        LiViTForImageClassification(LiViTConfig.preset("tiny", class_counts=counts)).save_pretrained(folder)
        eval_processor(224, (0.5,) * 3, (0.5,) * 3).save_pretrained(folder)
        write_png(torch.randint(0, 256, (3, 375, 500), dtype=torch.uint8), str(folder / "image.png"))
        served = ServedClassifier(str(folder))
        logits, places = served.logits(folder / "image.png"), iter(np.linspace(-1, 1, 1000))

        def move(logits: torch.Tensor) -> None:
            frequencies = served.classes.tilted(next(places))
            served.panels(logits, frequencies)
            served.classes.rows(frequencies)

        ways = {
            "ours": lambda: move(logits),
            "ViT-Ti sees it again": lambda: move(served.logits(folder / "image.png")),
        }
        times = median_seconds(ways, repeats)
    question = f"a move of the demo's slider, {CLASSES:,} classes"
    return compared(question, {name: 1000 * value for name, value in times.items()}, "ms", smaller_is_better=True)
