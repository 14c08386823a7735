"""Results that both stages have in common, and where data and weights came from."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.data.load import resolve_benchmark_defaults
from livt_hf.data.spec import DataSpec
from livt_hf.metrics import group_sizes
from livt_hf.precision import PRECISION_NAMES
from livt_hf.results import provenance
from livt_hf.runs import Run
from livt_hf.training.loop import TrainingLoop


def summarize_class_counts(counts: np.ndarray) -> dict:
    """Summarise class counts: largest, smallest, imbalance factor, and the number of classes in each shot group."""
    sizes = {"max": int(counts.max()), "min": int(counts.min()), "imbalance": float(counts.max() / counts.min())}
    return sizes | group_sizes(counts)


def is_local(name: str) -> bool:
    """Return True if a dataset or checkpoint was read from a disk; `data/birds` could also be a Hub id."""
    return name not in BENCHMARKS and Path(name).exists()


def is_own(start: str | None) -> bool:
    """Return True if a training starts from scratch, or from runs of this package that did."""
    if start in (None, "none"):
        return True
    run = Run(Path(start))
    return run.finished and run.results.pretrained_own


def build_common_results(
    stage: str, data: DataSpec, model_size: str, loop: TrainingLoop, model: PreTrainedModel
) -> dict:
    """Collect the fields of `Results` that both stages have."""
    resolved = resolve_benchmark_defaults(data)
    optimization, progress = loop.optimization, loop.progress
    return {
        "stage": stage,
        "dataset": data.dataset,
        "dataset_local": is_local(data.dataset),
        "imbalance_factor": None if resolved.rule == "balanced" else resolved.imbalance_factor,
        "model_type": model.config.model_type,
        "model_size": model_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": optimization.epochs,
        "updates": progress.update,
        "trained_on": progress.trained_on,
        "weights": "model" if optimization.ema_decay is None else "ema",
        "seed": optimization.seed,
        "seconds": progress.seconds,
        "precision": PRECISION_NAMES[loop.accelerator.mixed_precision],
    } | provenance()
