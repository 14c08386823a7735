"""Long-tailed image data: splits, benchmarks, transforms and loaders."""

from livt_hf.data.benchmarks import normalization
from livt_hf.data.broken import find_broken
from livt_hf.data.decoding import read_rgb
from livt_hf.data.labels import class_counts, label_statistics
from livt_hf.data.loading import eval_loader, train_loader
from livt_hf.data.sources import load_long_tailed
from livt_hf.data.splits import balanced_counts, exponential_counts, long_tail_indices, pareto_counts
from livt_hf.data.transforms import DeviceTransform, FinetuneAugmentation, PretrainAugmentation, eval_processor

__all__ = [
    "DeviceTransform",
    "FinetuneAugmentation",
    "PretrainAugmentation",
    "balanced_counts",
    "class_counts",
    "eval_loader",
    "eval_processor",
    "exponential_counts",
    "find_broken",
    "label_statistics",
    "load_long_tailed",
    "long_tail_indices",
    "normalization",
    "pareto_counts",
    "read_rgb",
    "train_loader",
]
