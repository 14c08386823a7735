"""A classifier under examination: one pass over the images of a split, and all that is asked of its logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from livt_hf.evaluation.estimation import estimated_prior
from livt_hf.evaluation.models import head_of
from livt_hf.evaluation.running import Outputs, Rule, evaluate_rules, on_disk, scores_under
from livt_hf.long_tail.priors import PriorEstimate
from livt_hf.metrics import (
    ConfusionPairs,
    LongTailMetrics,
    bootstrap_intervals,
    one_against_rest,
    ranking_means,
    shot_groups,
)


@dataclass
class Exam:
    """What is asked of the logits of a model, or of the pooled scores of several models, which belong to none.

    `thresholds` are those of the shot groups; `clusters` say what each row of the dataset belongs to: a patient.
    """

    model: PreTrainedModel | None
    outputs: Outputs
    train_counts: np.ndarray
    accelerator: Accelerator
    thresholds: dict[str, int] = field(default_factory=dict)
    clusters: np.ndarray | None = None

    @property
    def shots(self) -> Tensor:
        return shot_groups(self.train_counts, **self.thresholds)

    @cached_property
    def labels(self) -> Tensor:
        """Those of all processes."""
        return self._gathered(self.outputs.labels)

    def metrics(
        self, rules: dict[str, Rule], chosen: Tensor | None = None
    ) -> tuple[dict[str, LongTailMetrics], ConfusionPairs]:
        batches = self.outputs.batches(chosen)
        return evaluate_rules(batches, self.accelerator, self.train_counts, rules, **self.thresholds)

    def estimated_prior(self, chosen: Tensor | None = None) -> PriorEstimate:
        return estimated_prior(head_of(self.model), self.outputs.batches(chosen), self.accelerator)

    def intervals(self, rules: dict[str, Rule]) -> dict[str, dict]:
        """Bootstrap intervals of the numbers under every rule, over clusters where there are any."""
        clusters = None if self.clusters is None else self.clusters[self._gathered(self.outputs.index).numpy()]
        labels, found = self.labels.numpy(), {}
        for name, rule in rules.items():
            predictions = self._gathered(torch.cat(list(self._predictions(rule))))
            found[name] = bootstrap_intervals(labels, predictions.numpy(), self.shots, clusters)
        return found

    def rankings(self, rule: Rule) -> dict[str, Tensor]:
        """AUROC and average precision of every class against the rest, by the scores of a rule."""
        batches = (scores_under(rule, logits) for logits, _ in self.outputs.batches())
        return one_against_rest(on_disk(batches, len(self.train_counts)), self.outputs.labels, self._gathered)

    def _predictions(self, rule: Rule) -> Iterator[Tensor]:
        """Class ids; -1 where there is no score."""
        yield torch.zeros(0, dtype=torch.long)
        for logits, _ in self.outputs.batches():
            scores = logits if rule is None else rule(logits)
            yield torch.where(scores.isnan().any(-1), -1, scores.argmax(-1)).cpu()

    def _gathered(self, part: Tensor) -> Tensor:
        """The parts of all processes, one after another."""
        return torch.cat(gather_object([part])) if self.accelerator.num_processes > 1 else part


@dataclass
class Findings:
    """What an evaluation found: the contents of evaluation.json, and what its pictures are drawn from.

    `per_class` and `pairs` are those of the first rule; images with several labels have no pairs.
    """

    summary: dict
    measured: dict[str, LongTailMetrics]
    pairs: ConfusionPairs | None
    per_class: list[dict]


def examine(exam: Exam, rules: dict[str, Rule], names: Sequence[str], summary: dict) -> Findings:
    """All numbers of the test set as it is: under every rule, and class by class under the first."""
    measured, pairs = exam.metrics(rules)
    rankings = exam.rankings(next(iter(rules.values())))
    summary["rules"] = {name: metric.compute() for name, metric in measured.items()}
    summary["intervals"] = exam.intervals(rules)
    summary["rankings"] = ranking_means(rankings, exam.labels, exam.shots)
    per_class = next(iter(measured.values())).per_class(names)
    for row in per_class:
        values = {name: values[row["class"]].item() for name, values in rankings.items()}
        row |= {name: value if row["images"] and isfinite(value) else None for name, value in values.items()}
    return Findings(summary, measured, pairs, per_class)
