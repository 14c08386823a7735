"""Images per second from file to label: `livt_hf.predict` against two stock ways, same model, same files."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, pipeline

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.conversion import to_beit
from livt_hf.data import eval_processor
from livt_hf.precision import has_fast_cpu_bf16
from livt_hf.predictions.predict import Predictor
from livt_hf.recipes.benchmarks.measuring import compared, median_seconds, processor_seconds, say

BATCH = 32
# One layer of 64: what is left is reading, decoding, resizing and normalising.
SMALL = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=256)


def run(quick: bool = False) -> list[dict]:
    """One thread and the processor's seconds: what an image costs, whatever else the machine does."""
    torch.set_num_threads(1)
    # Images and rounds.
    models = {"a one-layer ViT (the input path)": (LiViTConfig(**SMALL, class_counts=[9] * 10), 96, 7)}
    if not quick:
        models["ViT-Tiny"] = (LiViTConfig.preset("tiny", class_counts=[9] * 10), 64, 5)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        files = write_jpegs(Path(temporary) / "images", 96)
        for name, (config, count, repeats) in models.items():
            folder = Path(temporary) / name.split()[0]
            to_beit(LiViTForImageClassification(config)).save_pretrained(folder)
            eval_processor(224, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]).save_pretrained(folder)
            question = f"file to label, {name}, 500x375 JPEG at 224 px, per core"
            say(f"{question}: three ways in turn, {count} images each")
            times = median_seconds(ways(folder, files[:count]), 3 if quick else repeats, processor_seconds)
            rows += compared(question, {way: count / time for way, time in times.items()}, "images/s")
    return rows + (run_precision() if not quick and has_fast_cpu_bf16() else [])


def run_precision(count: int = 32) -> list[dict]:
    """What bfloat16 does for prediction on a CPU that computes in it."""
    torch.set_num_threads(1)
    efficientnet = TimmWrapperConfig(architecture="tf_efficientnet_lite0", num_labels=100)
    models = {
        "ViT-S/16": to_beit(LiViTForImageClassification(LiViTConfig.preset("small", class_counts=[9] * 10))),
        "EfficientNet-Lite0": TimmWrapperForImageClassification(efficientnet),
    }
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        files = write_jpegs(Path(temporary) / "images", count)
        for number, (name, model) in enumerate(models.items()):
            folder = Path(temporary, str(number))
            model.save_pretrained(folder)
            eval_processor(224, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]).save_pretrained(folder)
            predictors = {way: Predictor(str(folder), precision=way) for way in ("bfloat16", "float32")}
            ways = {way: partial(_predict_all, predictor, files) for way, predictor in predictors.items()}
            question = f"file to label, {name}, 500x375 JPEG at 224 px, per core, bf16"
            say(f"{question}: two precisions in turn, {count} images each")
            times = median_seconds(ways, 3, processor_seconds)
            values = {"ours": count / times["bfloat16"], "the same in float32": count / times["float32"]}
            rows += compared(question, values, "images/s")
    return rows


def ways(folder: Path, files: list[Path]) -> dict[str, Callable[[], object]]:
    predictor, classify = Predictor(str(folder)), pipeline("image-classification", model=str(folder))
    model, processor = classify.model, classify.image_processor

    @torch.inference_mode()
    def by_hand() -> None:
        for start in range(0, len(files), BATCH):
            images = [Image.open(path).convert("RGB") for path in files[start : start + BATCH]]
            model(**processor(images, return_tensors="pt")).logits.softmax(-1)

    return {
        "ours": lambda: list(predictor.predict(files, BATCH, workers=1)),
        'pipeline("image-classification")': lambda: classify([str(path) for path in files], batch_size=BATCH),
        "Pillow, image processor and model in batches": by_hand,
    }


def _predict_all(predictor: Predictor, files: list[Path]) -> None:
    for _ in predictor.predict(files, BATCH, workers=1):
        pass


def write_jpegs(folder: Path, count: int) -> list[Path]:
    """Smooth random pictures of ImageNet's usual size."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{i:04}.jpg", quality=90)
    return sorted(folder.iterdir())
