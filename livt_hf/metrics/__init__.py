"""Metrics of long-tailed classification; they live in `livt_hf.predictions`."""

from livt_hf.predictions.bootstrap import bootstrap_intervals
from livt_hf.predictions.metrics import LongTailMetrics, confusions, long_tail_metrics
from livt_hf.predictions.multi_label import MultiLabelMetrics, best_thresholds
from livt_hf.predictions.ranking import one_against_rest, ranking_means
from livt_hf.predictions.shot_groups import GROUPS, THRESHOLDS, group_sizes, shot_groups

__all__ = [
    "GROUPS",
    "THRESHOLDS",
    "LongTailMetrics",
    "MultiLabelMetrics",
    "best_thresholds",
    "bootstrap_intervals",
    "confusions",
    "group_sizes",
    "long_tail_metrics",
    "one_against_rest",
    "ranking_means",
    "shot_groups",
]
