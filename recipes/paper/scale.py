"""What the paper's training costs, on paper: operations, memory and GPU-hours of every config, without running it.

    python recipes/paper/scale.py                          # GPUs of 80 GB and 312 TFLOP/s (A100, bfloat16)
    python recipes/paper/scale.py --tflops 990 --utilisation 0.4 --cores 12

Operations and activations are counted on tensors without data that go through our own models, forward and backward
under bfloat16 autocast. Hours are operations over a rate, and two rates are shown: the one of the authors' log, which
includes their input pipeline, and the given share of a GPU's peak, which its cores may not be able to feed: each
prepares as many images per second as `recipes/benchmarks/run.py data` recorded, and whichever takes longer, computing
or preparing, is the time. Beside what the paper does stands what saves computation: `--decode_ratio` in the first
stage, `--keep_ratio` in the second. What `--compile` gains is not among it: that cannot be counted.
"""

import argparse
import itertools
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, pretraining_config
from livt_hf.cli.options import CONFIGS
from livt_hf.cli.training_settings import STAGES, FinetuneSettings, PretrainSettings
from livt_hf.data import exponential_counts
from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.files import read_values, write_values
from livt_hf.reports import markdown_table

RECIPES = Path(__file__).parents[1]
CLASSES = {"imagenet": 1000, "inat18": 8142, "places": 365, "cifar100": 100, "cifar10": 10}
# Shares of the hidden patches that are decoded, and of all patches that are seen; 1 is the paper.
SHARES = {"pretrain": (1, 0.5, 0.25), "finetune": (1, 0.5)}
# Their log of fine-tuning ViT-B on iNat18 at 224 pixels.
LOGGED, AUTHORS_GPU_HOURS = "finetune-inat18", 4 * 23.5
BYTES_A_PARAMETER = 16  # float32 weight, gradient and AdamW's two moments


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=80, help="of a GPU, GB")
    parser.add_argument("--tflops", type=float, default=312, help="peak of a GPU, 10^12 operations per second")
    parser.add_argument(
        "--utilisation", type=float, help="share of the peak; default: that of a recorded ViT-S step on a CPU, a bound"
    )
    parser.add_argument("--cores", type=int, default=16, help="of the machine, per GPU")
    parser.add_argument("--output", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args(argv)
    if arguments.utilisation is None:
        arguments.utilisation = recorded("share of the machine's peak, ViT-S")
    record = {name: getattr(arguments, name) for name in ("memory", "tflops", "utilisation", "cores")}
    record |= predicted(costs(), arguments)
    record["table"] = table_rows(record)
    print(markdown_table(record["table"]))
    print(
        f"\nThe authors' rate: {record['authors_tflops']:.1f} TFLOP/s per GPU, from {AUTHORS_GPU_HOURS:g} GPU-hours."
    )
    if arguments.output is not None:
        write_values(arguments.output, record)


def predicted(rows: list[dict], arguments: argparse.Namespace) -> dict:
    """Return the rows with their hours, cores and what bounds them, and the authors' rate."""
    logged = next(row for row in rows if LOGGED in row["configs"])
    authors_rate = logged["ways"][0]["operations"] / (AUTHORS_GPU_HOURS * 3600)
    rate = arguments.utilisation * arguments.tflops * 1e12
    prepared = {"pretrain": recorded("MGP input"), "finetune": recorded("BFT input")}
    for row in rows:
        row["images_that_fit"] = int((arguments.memory * 1e9 - row["state_bytes"]) // row["bytes_an_image"])
        preparing = row["images"] / (arguments.cores * prepared[row["stage"]])  # seconds
        for way in row["ways"]:
            computing = way["operations"] / rate
            way["gpu_hours_at_authors_rate"] = way["operations"] / authors_rate / 3600
            way["gpu_hours_at_share_of_peak"] = max(computing, preparing) / 3600
            way["bound_by"] = "input" if preparing > computing else "compute"
            way["cores"] = arguments.cores * preparing / computing
    return {"authors_tflops": authors_rate / 1e12, "rows": rows}


def costs() -> list[dict]:
    """Return a row for all configs of the paper that cost the same: the losses and rates of a training do not."""
    rows: dict[tuple, dict] = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        stage = path.stem.split("-")[0]
        settings = STAGES[stage].parse(["--config", str(path)])
        if settings.model.model_size == "micro":
            continue  # ours
        key = stage, settings.model.model_size, settings.model.image_size, num_classes(settings), images_seen(settings)
        if key not in rows:
            rows[key] = cost(settings)
        rows[key]["configs"].append(path.stem)
    return list(rows.values())


def cost(settings: PretrainSettings | FinetuneSettings) -> dict:
    """Compute the cost of one stage as its settings have it, and with what saves computation."""
    few, many = (step_cost(*model_of(settings), images=images) for images in (1, 2))
    ways = []
    for share in SHARES[settings.stage]:
        operations = step_cost(*model_of(settings), share=share)["operations"]
        # The last epochs of fine-tuning see all patches.
        whole = (
            settings.optimization.keep_all_epochs / settings.optimization.epochs if settings.stage == "finetune" else 0
        )
        mean = (1 - whole) * operations + whole * few["operations"]
        ways.append({"share": share, "operations_an_image": mean, "operations": mean * images_seen(settings)})
    return {
        "configs": [],
        "stage": settings.stage,
        "images": images_seen(settings),
        "parameters": few["parameters"],
        "state_bytes": BYTES_A_PARAMETER * few["parameters"],
        "bytes_an_image": many["bytes"] - few["bytes"],
        "ways": ways,
    }


def model_of(settings: PretrainSettings | FinetuneSettings) -> tuple[str, str, int, int]:
    return settings.stage, settings.model.model_size, settings.model.image_size, num_classes(settings)


def num_classes(settings: PretrainSettings | FinetuneSettings) -> int:
    """Of the classifier; pretraining has none."""
    return CLASSES[settings.data.dataset.split("-")[0]] if settings.stage == "finetune" else 0


def images_seen(settings: PretrainSettings | FinetuneSettings) -> int:
    """Over all epochs."""
    dataset, classes = settings.data.dataset, CLASSES[settings.data.dataset.split("-")[0]]
    if settings.data.images_per_class is not None:
        images = classes * settings.data.images_per_class
    elif dataset.startswith("cifar"):
        images = int(exponential_counts(classes, 50_000 // classes, settings.data.imbalance_factor).sum())
    else:
        images = BENCHMARKS[dataset].train_images or 1_281_167  # of ImageNet-1K
    return settings.optimization.epochs * images


def _counter() -> FlopCounterMode:
    """torch's, which learned of the CPU's fused attention after 2.8."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    formulas = {
        fused: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        backward: lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4]),
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


@cache
def step_cost(stage: str, size: str, pixels: int, classes: int, images: int = 1, share: float = 1) -> dict:
    """Operations of forward and backward and the bytes autograd keeps between them, of a model that has no data."""
    if stage == "pretrain":
        make = partial(LiViTForPreTraining, pretraining_config(size, image_size=pixels), decode_ratio=share)
    else:  # without stochastic depth, which saves nothing on GPUs
        config = LiViTConfig.preset(size, image_size=pixels, class_counts=[10] * classes)
        make = partial(LiViTForImageClassification, config)
    with torch.device("meta"):
        model = make().train()
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that no other storage gets its address
        return tensor

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), _counter() as counter:
        # On the meta device attention would not be the fused one; tensors without data of the CPU have it.
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        weights = {name: torch.empty(t.shape, dtype=t.dtype, requires_grad=t.requires_grad) for name, t in named}
        shown = {}
        if stage == "finetune" and share < 1:
            shown["kept"] = torch.zeros(images, round(share * config.num_patches), dtype=torch.int64)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = functional_call(model, weights, torch.empty(images, 3, pixels, pixels), shown)
            loss = output.logits.sum() if output.loss is None else output.loss  # the loss has no matrix product
        loss.backward()
    return {
        "operations": counter.get_total_flops(),
        "bytes": sum(storage.nbytes() for storage in kept.values()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def recorded(question: str) -> float:
    """Ours of the first recorded row of the benchmark that begins so."""
    rows = read_values(RECIPES / "results" / "benchmark.json")
    return next(row["ours"] for row in rows if row["question"].startswith(question))


def table_rows(record: dict) -> list[dict]:
    """Where one cell has several numbers, they are those of the shares, the paper's first."""

    def each(row: dict, name: str, scale: float = 1) -> str:
        values = [way[name] / scale for way in row["ways"]]
        return " / ".join(f"{value:.2g}" if value < 10 else f"{value:,.0f}" for value in values)

    rate = f"GPU-hours, {record['utilisation']:.0%} of peak and {record['cores']} cores per GPU"
    return [
        {
            "configs": ", ".join(row["configs"]),
            "GFLOP per image": each(row, "operations_an_image", 1e9),
            "MB per image": f"{row['bytes_an_image'] / 1e6:.0f}",
            f"images in {record['memory']:g} GB": row["images_that_fit"],
            "GPU-hours, authors' rate": each(row, "gpu_hours_at_authors_rate"),
            rate: each(row, "gpu_hours_at_share_of_peak"),
            "bound by": " / ".join(dict.fromkeys(way["bound_by"] for way in row["ways"])),
            "cores that feed a GPU": each(row, "cores"),
        }
        for row in record["rows"]
    ]


if __name__ == "__main__":
    main()
