"""What the two stages share around their models: sizes, batches, and the common part of their results."""

import math
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from transformers import PreTrainedModel

from livt_hf.configuration_livit import encoder_preset
from livt_hf.data import Batches
from livt_hf.data.benchmarks import BENCHMARKS, Benchmark
from livt_hf.data.sampling import Sampler
from livt_hf.data.sources import with_defaults
from livt_hf.metrics import group_sizes
from livt_hf.results import provenance
from livt_hf.runs import Run
from livt_hf.settings import FinetuneSettings, TrainingSettings
from livt_hf.training.loop import TrainingLoop


def image_size(settings: TrainingSettings) -> int:
    return settings.image_size or encoder_preset(settings.model_size)["image_size"]


def limit_epochs(settings: TrainingSettings, updates_per_epoch: int) -> None:
    """Of `--max_steps`: only the epochs that are reached, for what changes in the course of training goes by them."""
    if settings.max_steps is not None:
        settings.epochs = min(settings.epochs, math.ceil(settings.max_steps / updates_per_epoch))


def build_batches(settings: TrainingSettings, accelerator: Accelerator) -> Batches:
    """How the images of an update are shared out among processes and accumulation steps."""
    return Batches(
        settings.batch_size,
        settings.accumulation,
        settings.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        num_workers=settings.num_workers,
        sampler=Sampler(settings.sampler, settings.epochs) if isinstance(settings, FinetuneSettings) else Sampler(),
    )


def summarize_class_counts(counts: np.ndarray) -> dict:
    """The shape of a long tail in six numbers."""
    sizes = {"max": int(counts.max()), "min": int(counts.min()), "imbalance": float(counts.max() / counts.min())}
    return sizes | group_sizes(counts)


def is_local(name: str) -> bool:
    """Whether a dataset or checkpoint was read from a disk: `data/birds` could be either."""
    return name not in BENCHMARKS and Path(name).exists()


def is_own(start: str | None) -> bool:
    """Whether a training starts from nothing, or from a run that did so itself or through other runs."""
    if start in (None, "none"):
        return True
    run = Run(Path(start))
    return run.finished and run.results.pretrained_own


def build_common_results(settings: TrainingSettings, loop: TrainingLoop, model: PreTrainedModel) -> dict:
    """What the results of both stages say alike."""
    made = with_defaults(settings, BENCHMARKS.get(settings.dataset, Benchmark()))
    return {
        "stage": settings.stage,
        "dataset": settings.dataset,
        "dataset_local": is_local(settings.dataset),
        "imbalance_factor": None if made.rule == "balanced" else made.imbalance_factor,
        "model_type": model.config.model_type,
        "model_size": settings.model_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": settings.epochs,
        "updates": loop.progress.update,
        "trained_on": loop.progress.trained_on,
        "weights": "model" if settings.ema_decay is None else "ema",
        "seed": settings.seed,
        "seconds": loop.progress.seconds,
    } | provenance()
