"""Long-tailed image data: splits, benchmarks, transforms and loaders."""

from livt_hf.data.splits import balanced_counts, exponential_counts, long_tail_indices, pareto_counts

__all__ = ["balanced_counts", "exponential_counts", "long_tail_indices", "pareto_counts"]
