"""A classifier under examination: one pass over the images of a split, and all that is asked of its logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from livt_hf.classifiers import get_head
from livt_hf.evaluation.estimation import estimated_prior
from livt_hf.evaluation.running import Outputs, Rule, evaluate_rules, on_disk, scores_under
from livt_hf.long_tail.priors import PriorEstimate
from livt_hf.metrics import (
    LongTailMetrics,
    bootstrap_intervals,
    confusions,
    one_against_rest,
    ranking_means,
    shot_groups,
)


class Answers(NamedTuple):
    """The class that a rule chose for each image, -1 where there is no score, and the score of that class. (N,)"""

    labels: Tensor
    scores: Tensor


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

    def metrics(self, rules: dict[str, Rule], chosen: Tensor | None = None) -> dict[str, LongTailMetrics]:
        batches = self.outputs.batches(chosen)
        return evaluate_rules(batches, self.accelerator, self.train_counts, rules, **self.thresholds)

    def estimated_prior(self, chosen: Tensor | None = None) -> PriorEstimate:
        return estimated_prior(get_head(self.model), self.outputs.batches(chosen), self.accelerator)

    @cached_property
    def index(self) -> Tensor:
        """The rows of the dataset that `labels` belong to."""
        return self._gathered(self.outputs.index)

    def answers(self, rules: dict[str, Rule]) -> dict[str, Answers]:
        """What every rule says of the images of all processes."""
        return {
            name: Answers(*map(self._gathered, map(torch.cat, zip(*self._answers(rule), strict=True))))
            for name, rule in rules.items()
        }

    def intervals(self, answers: dict[str, Answers]) -> dict[str, dict]:
        """Bootstrap intervals of the numbers under every rule, over clusters where there are any."""
        clusters = None if self.clusters is None else self.clusters[self.index.numpy()]
        return {
            name: bootstrap_intervals(self.labels.numpy(), answer.labels.numpy(), self.shots, clusters)
            for name, answer in answers.items()
        }

    def rankings(self, rule: Rule) -> dict[str, Tensor]:
        """AUROC and average precision of every class against the rest, by the scores of a rule."""
        batches = (scores_under(rule, logits) for logits, _ in self.outputs.batches())
        return one_against_rest(on_disk(batches, len(self.train_counts)), self.outputs.labels, self._gathered)

    def _answers(self, rule: Rule) -> Iterator[Answers]:
        yield Answers(torch.zeros(0, dtype=torch.long), torch.zeros(0))
        for logits, _ in self.outputs.batches():
            scores = scores_under(rule, logits)
            ranked = logits if rule is None else scores
            best = ranked.argmax(-1, keepdim=True)
            labels = best[:, 0].masked_fill(ranked.isnan().any(-1), -1)
            yield Answers(labels.cpu(), scores.gather(-1, best)[:, 0].float().cpu())

    def _gathered(self, part: Tensor) -> Tensor:
        """The parts of all processes, one after another."""
        return torch.cat(gather_object([part]))


@dataclass
class Findings:
    """What an evaluation found: the contents of evaluation.json, and what its pictures are drawn from.

    `per_class` and `pairs` are those of the first rule. `answers` are those to the images `index` of the dataset.
    Images with several labels have neither pairs nor answers.
    """

    summary: dict
    measured: dict[str, LongTailMetrics]
    pairs: list[dict] | None
    per_class: list[dict]
    answers: dict[str, Answers] = field(default_factory=dict)
    index: Tensor | None = None


def accuracy_under_prior(measured: dict[str, LongTailMetrics], prior: Tensor) -> dict[str, float]:
    """By rule, the accuracy where classes are as frequent as a prior says, of those that have test images.

    Empty where the prior allows for no class that has any.
    """
    weighted = {}
    for rule, metric in measured.items():
        accuracy, *_ = metric.by_class()
        tested = ~accuracy.isnan()
        weights = prior.double()[tested]
        if weights.any():
            weighted[rule] = (weights @ accuracy[tested] / weights.sum()).item()
    return weighted


def examine(exam: Exam, rules: dict[str, Rule], names: Sequence[str], summary: dict) -> Findings:
    """All numbers of the test set as it is: under every rule, and class by class under the first."""
    measured = exam.metrics(rules)
    rankings, answers = exam.rankings(next(iter(rules.values()))), exam.answers(rules)
    summary["rules"] = {name: metric.compute() for name, metric in measured.items()}
    summary["intervals"] = exam.intervals(answers)
    summary["rankings"] = ranking_means(rankings, exam.shots)
    pairs = confusions(next(iter(answers.values())).labels, exam.labels, exam.train_counts, names)
    per_class = next(iter(measured.values())).per_class(names, **rankings)
    return Findings(summary, measured, pairs, per_class, answers, exam.index)
