"""What the paper's training costs, on paper: operations, memory and hours on GPUs, without running it.

    python recipes/paper/scale.py                          # eight GPUs of 80 GB and 312 TFLOP/s (A100, bfloat16)
    python recipes/paper/scale.py --gpus 16 --tflops 990 --utilisation 0.4

Operations and activations are counted on tensors without data that go through our own models, forward and backward
under bfloat16 autocast. Hours are operations over a rate, and two rates are shown: the one of the authors' log, and
the given share of a GPU's peak. The truth lies between: the first includes their input pipeline, the second none. What
either rate asks of the processors is told in cores, each preparing as many images per second as `recipes/benchmark.py
data` recorded.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, pretraining_config
from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.reports import markdown_table
from livt_hf.settings import FinetuneSettings, PretrainSettings

RECIPES = Path(__file__).parents[1]
CONFIGS = RECIPES / "configs"
CLASSES = {"imagenet-lt": 1000, "inat18": 8142}
RUNS = [
    (PretrainSettings, "imagenet-lt", "base"),
    (FinetuneSettings, "imagenet-lt", "base"),
    (PretrainSettings, "imagenet-lt", "large"),
    (FinetuneSettings, "imagenet-lt", "large"),
    (PretrainSettings, "inat18", "base"),
    (FinetuneSettings, "inat18", "base"),
]
AUTHORS_GPU_HOURS = 4 * 23.5  # their log of fine-tuning ViT-B on iNat18 at 224 pixels
BYTES_A_PARAMETER = 16  # float32 weight, gradient and AdamW's two moments


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--memory", type=float, default=80, help="of a GPU, GB")
    parser.add_argument("--tflops", type=float, default=312, help="peak of a GPU, 10^12 operations a second")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of the peak")
    parser.add_argument("--output", default=None, help="JSON file for the rows")
    arguments = parser.parse_args(argv)
    rows = [cost(*run) for run in RUNS]
    authors_rate = rows[-1]["operations"] / (AUTHORS_GPU_HOURS * 3600)
    rate = arguments.utilisation * arguments.tflops * 1e12
    prepared = images_a_core()
    for row in rows:
        row["images_that_fit"] = int((arguments.memory * 1e9 - row["state_bytes"]) // row["bytes_an_image"])
        row["hours_at_authors_rate"] = row["operations"] / (authors_rate * arguments.gpus * 3600)
        row["hours_at_share_of_peak"] = row["operations"] / (rate * arguments.gpus * 3600)
        for name, speed in (("authors_rate", authors_rate), ("share_of_peak", rate)):
            needed = speed * arguments.gpus / row["operations_an_image"]  # images per second
            row[f"cores_at_{name}"] = needed / prepared[row["stage"]]
    said = {name: getattr(arguments, name) for name in ("gpus", "memory", "tflops", "utilisation")}
    said |= {"authors_tflops": authors_rate / 1e12, "rows": rows}
    said["table"] = table_rows(said)
    print(markdown_table(said["table"]))
    print(f"\nThe authors' rate: {said['authors_tflops']:.1f} TFLOP/s a GPU, from {AUTHORS_GPU_HOURS:g} GPU-hours.")
    if arguments.output is not None:
        Path(arguments.output).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def cost(stage, dataset: str, size: str) -> dict:
    """One stage of the paper on one dataset, as its config sets it."""
    large = size == "large" and stage is FinetuneSettings  # the one that has a config of its own
    words = ["--config", str(CONFIGS / "finetune-imagenet-lt-large.yaml")] if large else ["--dataset", dataset]
    settings = stage.parse([*words, "--model_size", size], CONFIGS)
    pixels = settings.image_size or 224
    few, many = (step_cost(stage, size, pixels, CLASSES[dataset], images) for images in (8, 16))
    operations = (many["operations"] - few["operations"]) / 8
    return {
        "stage": "MGP" if stage is PretrainSettings else "BFT",
        "dataset": dataset,
        "model_size": size,
        "image_size": pixels,
        "epochs": settings.epochs,
        "parameters": many["parameters"],
        "operations_an_image": operations,
        "operations": operations * settings.epochs * BENCHMARKS[dataset].train_images,
        "state_bytes": BYTES_A_PARAMETER * many["parameters"],
        "bytes_an_image": (many["bytes"] - few["bytes"]) / 8,
    }


def step_cost(stage, size: str, pixels: int, classes: int, images: int) -> dict:
    """Operations of forward and backward and the bytes autograd keeps between them, of a model that has no data."""
    if stage is PretrainSettings:
        kind, config = LiViTForPreTraining, pretraining_config(size, image_size=pixels)
    else:
        kind = LiViTForImageClassification
        config = LiViTConfig.preset(
            size, image_size=pixels, class_counts=[10] * classes
        )  # stochastic depth saves some
    with torch.device("meta"):
        model = kind(config).train()
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that no other storage gets its address
        return tensor

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False) as counter:
        # On the meta device attention would not be the fused one; tensors without data of the CPU have it.
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        weights = {name: torch.empty(t.shape, dtype=t.dtype, requires_grad=t.requires_grad) for name, t in named}
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = functional_call(model, weights, torch.empty(images, 3, pixels, pixels))
            loss = output.logits.sum() if output.loss is None else output.loss  # the loss has no matrix product
        loss.backward()
    return {
        "operations": counter.get_total_flops(),
        "bytes": sum(storage.nbytes() for storage in kept.values()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def images_a_core() -> dict[str, float]:
    """Images a second that one core decodes and augments for each stage, from the recorded benchmark."""
    recorded = json.loads((RECIPES / "results" / "benchmark.json").read_text(encoding="utf-8"))
    stages = ("MGP", "BFT")
    return {stage: next(r["ours"] for r in recorded if r["question"].startswith(f"{stage} input")) for stage in stages}


def table_rows(said: dict) -> list[dict]:
    gpus = said["gpus"]
    return [
        {
            "stage": f"{row['stage']}, ViT-{row['model_size'][0].upper()}, {row['image_size']} px",
            "data": f"{row['dataset']}, {row['epochs']} epochs",
            "GFLOP an image": f"{row['operations_an_image'] / 1e9:.0f}",
            "state, GB": f"{row['state_bytes'] / 1e9:.1f}",
            "MB an image": f"{row['bytes_an_image'] / 1e6:.0f}",
            f"images in {said['memory']:g} GB": row["images_that_fit"],
            f"hours on {gpus}, authors' rate": f"{row['hours_at_authors_rate']:.1f}",
            f"hours on {gpus}, {said['utilisation']:.0%} of peak": f"{row['hours_at_share_of_peak']:.1f}",
            "cores to feed them": f"{row['cores_at_authors_rate']:.0f}, {row['cores_at_share_of_peak']:.0f}",
        }
        for row in said["rows"]
    ]


if __name__ == "__main__":
    main()
