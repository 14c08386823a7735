"""What a model does to head and tail: accuracy by shot group, calibration, confusions, mAP."""

from .classification import LongTailMetrics, long_tail_metrics
from .confusion import ConfusionPairs
from .groups import GROUPS, group_sizes, shot_groups
from .multilabel import MultiLabelMetrics

__all__ = [
    "GROUPS",
    "ConfusionPairs",
    "LongTailMetrics",
    "MultiLabelMetrics",
    "group_sizes",
    "long_tail_metrics",
    "shot_groups",
]
