"""Images a second from file to label: `livt_hf.predict` against two stock ways, same model, same files."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import pipeline

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.conversion import to_beit
from livt_hf.data import eval_processor
from livt_hf.evaluation.prediction import Predictor

BATCH = 32
# One layer of 64: what is left is reading, decoding, resizing and normalising.
SMALL = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=256)


def run(quick: bool = False) -> list[dict]:
    count, repeats = (96, 3) if quick else (512, 5)
    models = {"a one-layer ViT (the input path)": LiViTConfig(**SMALL, class_counts=[9] * 10)}
    if not quick:
        models["ViT-Tiny"] = LiViTConfig.preset("tiny", class_counts=[9] * 10)
    with tempfile.TemporaryDirectory() as temporary:
        files = write_jpegs(Path(temporary) / "images", count)
        rows = []
        for name, config in models.items():
            folder = Path(temporary) / name.split()[0]
            to_beit(LiViTForImageClassification(config)).save_pretrained(folder)
            eval_processor(224, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]).save_pretrained(folder)
            for peer, (ours, theirs) in compare(folder, files, repeats).items():
                question = f"file to label, {name}, 500x375 JPEG at 224 px"
                row = {"question": question, "ours": ours, "peer": theirs, "peer_name": peer}
                rows.append(row | {"ratio": ours / theirs, "unit": "images/s"})
        return rows


def compare(folder: Path, files: list[Path], repeats: int) -> dict[str, tuple[float, float]]:
    """Ours and each peer in turn, so that a busy moment of the machine meets all; medians."""
    predictor, classify = Predictor(str(folder)), pipeline("image-classification", model=str(folder))
    model, processor = classify.model, classify.image_processor

    @torch.inference_mode()
    def by_hand() -> None:
        for start in range(0, len(files), BATCH):
            images = [Image.open(path).convert("RGB") for path in files[start : start + BATCH]]
            model(**processor(images, return_tensors="pt")).logits.softmax(-1)

    ways = {
        "ours": lambda: list(predictor.predict(files, BATCH)),
        'pipeline("image-classification")': lambda: classify([str(path) for path in files], batch_size=BATCH),
        "Pillow, image processor and model in batches": by_hand,
    }
    # Small tensor operations can lose by a second thread: each way is timed with one and with all, the better counts.
    threads = torch.get_num_threads()
    settings = [(name, count) for name in ways for count in sorted({1, threads})]
    rates = {setting: [] for setting in settings}
    for _ in range(repeats + 1):
        for name, count in settings:
            torch.set_num_threads(count)
            rates[name, count].append(rate(ways[name], len(files)))
    torch.set_num_threads(threads)
    best = dict.fromkeys(ways, 0.0)
    for (name, _), values in rates.items():
        best[name] = max(best[name], statistics.median(values[1:]))  # the first is a warm-up
    ours = best.pop("ours")
    return {name: (ours, theirs) for name, theirs in best.items()}


def rate(work: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def write_jpegs(folder: Path, count: int) -> list[Path]:
    """Smooth random pictures of ImageNet's usual size."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{i:04}.jpg", quality=90)
    return sorted(folder.iterdir())


if __name__ == "__main__":
    torch.manual_seed(0)
    for row in run(quick=True):
        print(row)
