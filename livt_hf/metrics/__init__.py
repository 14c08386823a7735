"""What a model does to head and tail: accuracy by shot group, calibration, confusions, mAP."""

from livt_hf.metrics.classification import LongTailMetrics, long_tail_metrics
from livt_hf.metrics.confusion import ConfusionPairs
from livt_hf.metrics.groups import GROUPS, group_sizes, shot_groups
from livt_hf.metrics.multilabel import MultiLabelMetrics

__all__ = [
    "GROUPS",
    "ConfusionPairs",
    "LongTailMetrics",
    "MultiLabelMetrics",
    "group_sizes",
    "long_tail_metrics",
    "shot_groups",
]
