"""Evaluate a cross-validation: out-of-fold records joined, and the spread over folds.

Every image is predicted once, by a model that saw neither it nor its group.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from livt_hf.predictions.evaluate import EvaluationReport, Evaluator
from livt_hf.predictions.record import Predictions


def join_folds(folders: Sequence[Path]) -> Predictions:
    """Join the records of all folds, with the number of the fold as a column."""
    parts = [Predictions.load(folder) for folder in folders]
    return Predictions.concatenate([part.with_column("fold", [n] * len(part)) for n, part in enumerate(parts, 1)])


def evaluate_folds(predictions: Predictions, class_counts: np.ndarray, **summary) -> EvaluationReport:
    """Evaluate all test images together and fold by fold.

    Args:
        predictions: what `join_folds` returns.
        class_counts: images of each class in all folds, which make the shot groups.
        **summary: what else evaluation.json should say.

    Returns:
        The report; its summary has the metrics of each fold, their mean and standard deviation under "folds".
    """
    evaluator = Evaluator(predictions, class_counts)
    report, info, fold = evaluator.evaluate(**summary), predictions.info, predictions.column("fold")
    each = []
    for number in np.unique(fold):
        rows = fold == number
        if info.multi_label:
            each.append(evaluator.measure_multi_label(rows).compute())
        else:
            each.append(evaluator.measure([info.default_rule], rows)[info.default_rule.name].compute())
    report.summary["folds"] = _summarize_spread(each)
    return report


def _summarize_spread(each: list[dict]) -> dict:
    """Return mean and standard deviation over folds; a number that some folds lack is that of the others."""
    values = {name: [row[name] for row in each if row[name] is not None] for name in each[0]}
    mean = {name: statistics.mean(some) if some else None for name, some in values.items()}
    deviation = {name: statistics.stdev(some) if len(some) > 1 else None for name, some in values.items()}
    return {"each": each, "mean": mean, "deviation": deviation}
