"""What a model does to head and tail: accuracy and F1 by shot group, calibration, confusions, rankings, intervals."""

from livt_hf.metrics.bootstrap import bootstrap_intervals
from livt_hf.metrics.classification import LongTailMetrics, confusions, long_tail_metrics
from livt_hf.metrics.groups import GROUPS, THRESHOLDS, group_sizes, shot_groups
from livt_hf.metrics.multilabel import MultiLabelMetrics, best_thresholds
from livt_hf.metrics.ranking import one_against_rest, ranking_means

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
