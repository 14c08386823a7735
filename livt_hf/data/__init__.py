"""Long-tailed image data: datasets, splits, transforms and loaders. Names are looked up when they are first used."""

from livt_hf.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "batches": "Batches",
        "benchmarks": "normalization register_dataset",
        "decoding": "find_broken find_copies read_rgb",
        "labels": "class_counts",
        "load": "load_dataset load_evaluation_data load_long_tailed",
        "loading": "eval_loader train_loader",
        "splitting": "is_made_split shot_counts",
        "subsample": "exponential_counts long_tail_indices pareto_counts",
        "transforms": "DeviceTransform FinetuneAugmentation PretrainAugmentation eval_processor",
    },
)
