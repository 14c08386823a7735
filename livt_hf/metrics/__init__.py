"""Metrics of long-tailed classification; they live in `livt_hf.predictions`."""

from livt_hf.predictions.metrics import (
    GROUPS,
    THRESHOLDS,
    LongTailMetrics,
    MultiLabelMetrics,
    best_thresholds,
    confusions,
    group_sizes,
    long_tail_metrics,
    one_against_rest,
    ranking_means,
    shot_groups,
)
from livt_hf.predictions.significance import bootstrap_intervals

__all__ = ["GROUPS", "THRESHOLDS", "LongTailMetrics", "MultiLabelMetrics", "best_thresholds", "bootstrap_intervals"]
__all__ += ["confusions", "group_sizes", "long_tail_metrics", "one_against_rest", "ranking_means", "shot_groups"]
