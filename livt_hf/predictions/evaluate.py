"""Evaluate a record: accuracies, intervals, rankings and confusions by decision rule, and class by class."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.long_tail.priors import class_prior, tempered_prior
from livt_hf.predictions.decisions import Decisions, decide, rank_by
from livt_hf.predictions.metrics import (
    LongTailMetrics,
    MultiLabelMetrics,
    confusions,
    long_tail_metrics,
    one_against_rest,
    ranking_means,
    shot_groups,
)
from livt_hf.predictions.record import (
    Predictions,
    PredictionsInfo,
    Source,
    iterate_blocks,
    read_groups,
    read_parts,
    stack_on_disk,
)
from livt_hf.predictions.rules import GIVEN, LABELS, LARGEST, TRAINING, DecisionRule, rule_name
from livt_hf.predictions.significance import bootstrap_intervals

_EXPONENTS = tuple(step / 10 for step in range(11))


@dataclass(frozen=True)
class EvaluationReport:
    """Results of an evaluation: the contents of evaluation.json, and what its pictures are drawn from.

    `metrics` and `decisions` go by the names of the rules; `per_class` and `confusions` are those of the default rule.
    `decisions` has the baselines too: always the largest class, and the model under the training prior. Images with
    several labels have rows by class alone.
    """

    summary: dict[str, Any]
    per_class: list[dict]
    metrics: dict[str, LongTailMetrics] = field(default_factory=dict)
    decisions: dict[str, Decisions] = field(default_factory=dict)
    confusions: list[dict] = field(default_factory=list)
    labels: np.ndarray | None = None  # of the images, (N,)
    groups: np.ndarray | None = None  # images that belong together, (N,)

    @property
    def default_label(self) -> str:
        """Return the text of the default rule."""
        return self.summary["rule_labels"][self.summary["default_rule"]]

    @property
    def default_metrics(self) -> LongTailMetrics:
        """Return the metrics of the default rule."""
        return self.metrics[self.summary["default_rule"]]

    @cached_property
    def units(self) -> np.ndarray:
        """Return the number of test images of each class or, where images belong together, of their groups. (C,)"""
        if self.groups is None:
            return np.array([row["images"] for row in self.per_class])
        pairs = np.unique(np.stack([self.labels, self.groups]), axis=1)
        return np.bincount(pairs[0], minlength=len(self.per_class))


class Evaluator:
    """Measures a record with labels.

    Args:
        source: a record, or the folder of one.
        class_counts: training images of each class, which make the shot groups.
        **thresholds: `many_above` and `few_below` of the shot groups.
    """

    def __init__(self, source: Source, class_counts: Sequence[int] | np.ndarray, **thresholds: int):
        self.source, self.class_counts, self.thresholds = source, class_counts, thresholds
        self.info = next(read_parts(source)).info
        self.shots = shot_groups(class_counts, **thresholds)

    @cached_property
    def labels(self) -> Tensor:
        """Return the labels of all images: class ids (N,), or rows of 0 and 1 (N, C)."""
        return torch.cat([_labels_of(block) for block in iterate_blocks(self.source)])

    @cached_property
    def groups(self) -> np.ndarray | None:
        """Return the group of each image (patient, site, sequence) as a number, or None where there is none."""
        return read_groups(self.source)

    def measure(
        self, rules: Sequence[DecisionRule], rows: np.ndarray | None = None
    ) -> Mapping[str, LongTailMetrics | MultiLabelMetrics]:
        """Measure the decisions of every rule, on all images or on the rows of a mask."""
        if self.info.multi_label:
            counters = {rule.name: MultiLabelMetrics(self.class_counts, **self.thresholds) for rule in rules}
        else:
            counters = _counters(rules, self.class_counts, len(self.info.models) == 1, self.thresholds)
        for block in iterate_blocks(self.source, rows):
            for rule in rules:
                given = [block.scores(rule) >= block.thresholds(rule)] if self.info.multi_label else []
                counters[rule.name].update(rank_by(block, rule), _labels_of(block), *given)
        return counters

    def rank(self, rule: DecisionRule) -> dict[str, Tensor]:
        """Compute AUROC and average precision of every class against the rest, by the scores of a rule."""
        scores = (block.scores(rule) for block in iterate_blocks(self.source))
        return one_against_rest(stack_on_disk(scores, self.info.num_classes), self.labels)

    def evaluate(self, rules: Sequence[DecisionRule] | None = None, **summary) -> EvaluationReport:
        """Compute all numbers under some rules, by default the standard ones.

        Args:
            rules: decision rules.
            **summary: what else evaluation.json should say.

        Returns:
            The report.
        """
        rules, default = rules or self.info.rules, self.info.default_rule
        names = self.info.class_names
        summary |= {"default_rule": default.name, "rule_labels": {rule.name: rule.label for rule in rules}}
        if self.info.multi_label:
            ranked = self.measure([default])[default.name]
            return EvaluationReport(summary | {"rules": {default.name: ranked.compute()}}, ranked.per_class(names))
        compared, tempered = [], {}  # with the same model under the training prior, and under pi^t
        if self.info.no_posterior is None:
            prior = class_prior(np.maximum(self.class_counts, 1e-9))
            compared = [DecisionRule.named(TRAINING, "training")]
            tempered = {t: DecisionRule(f"pi^{t}", "", tuple(tempered_prior(prior, t).tolist())) for t in _EXPONENTS}
        metrics = self.measure([*rules, *compared, *tempered.values()])
        measured = {name: metric.compute() for name, metric in metrics.items()}
        rankings, labels = self.rank(default), self.labels.numpy()
        largest = torch.full_like(self.labels, int(np.argmax(self.class_counts)))
        decisions = {LARGEST: Decisions(largest, torch.full(largest.shape, torch.nan))}
        decisions |= {rule.name: decide(self.source, rule) for rule in (*compared, *rules)}
        summary["baselines"] = {LARGEST: long_tail_metrics(largest, labels, self.class_counts, **self.thresholds)}
        summary["baselines"] |= {rule.name: measured[rule.name] for rule in compared}
        if tempered:
            shown = ("accuracy", "mean_class_accuracy", "macro_f1")
            test = [{"exponent": t} | {n: measured[rule.name][n] for n in shown} for t, rule in tempered.items()]
            chosen = None if self.info.long_tail is None else self.info.long_tail.trade_off
            summary["trade_off"] = (chosen or {}) | {"test": test}
        summary["rules"] = {rule.name: measured[rule.name] for rule in rules}
        summary["intervals"] = {
            rule.name: bootstrap_intervals(labels, decisions[rule.name].labels.numpy(), self.shots, self.groups)
            for rule in rules
        }
        summary["rankings"] = ranking_means(rankings, self.shots)
        pairs = confusions(decisions[default.name].labels, self.labels, self.class_counts, names)
        per_class = metrics[default.name].per_class(names, **rankings)
        metrics = {rule.name: metrics[rule.name] for rule in rules}
        return EvaluationReport(summary, per_class, metrics, decisions, pairs, labels, self.groups)


def _labels_of(block: Predictions) -> Tensor:
    if block.labels is None:
        raise LiVTError("the record has no labels to measure it by; pass labels with the logits.", "labels")
    return torch.from_numpy(block.labels)


def _counters(rules: Iterable[DecisionRule], class_counts, logits: bool, thresholds: Mapping[str, int]) -> dict:
    kinds = {rule.name: "softmax" if rule.prior is None and logits else "given" for rule in rules}
    return {name: LongTailMetrics(class_counts, confidence=kind, **thresholds) for name, kind in kinds.items()}


def measure_batches(
    batches: Iterable[tuple[Tensor, dict]], info: PredictionsInfo, class_counts, accelerator: Accelerator
) -> dict[str, dict]:
    """Measure the logits of all processes by the standard rules while they are computed, without keeping them.

    Where images may have several labels the logits are kept, as a ranking needs them.

    Args:
        batches: pairs of logits (B, C) and what else is known of their images: "labels".
        info: of the model.
        class_counts: training images of each class.
        accelerator: each of its processes sees other images.

    Returns:
        Metrics by the name of the rule.
    """
    rules = info.rules
    if info.multi_label:
        metrics, thresholds = MultiLabelMetrics(class_counts), info.thresholds(rules[0])
        parts = [
            (logits.cpu(), batch["labels"].bool(), info.scores(logits, rules[0]).cpu() >= thresholds)
            for logits, batch in batches
        ]
        for part in gather_object(parts):
            metrics.update(*part)
        return {rules[0].name: metrics.compute()}
    counters = _counters(rules, class_counts, True, {})
    for logits, batch in batches:
        for rule in rules:
            scores = logits if rule.prior is None else info.scores(logits, rule)
            counters[rule.name].update(scores, batch["labels"].to(logits.device))
    for counter in counters.values():
        total = accelerator.reduce(counter.state_tensor().to(accelerator.device), "sum")
        counter.load_state_tensor(total.cpu())
    return {name: counter.compute() for name, counter in counters.items()}


def accuracy_under_prior(metrics: Mapping[str, LongTailMetrics], prior: Tensor) -> dict[str, float]:
    """Compute by rule the accuracy where classes are as frequent as a prior says, of those that have test images.

    Empty where the prior allows for no class that has any.
    """
    weighted = {}
    for rule, metric in metrics.items():
        accuracy, *_ = metric.by_class()
        tested = ~accuracy.isnan()
        weights = prior.double()[tested]
        if weights.any():
            weighted[rule] = (weights @ accuracy[tested] / weights.sum()).item()
    return weighted


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
    report, rule, fold = evaluator.evaluate(**summary), predictions.info.default_rule, predictions.column("fold")
    each = [evaluator.measure([rule], fold == number)[rule.name].compute() for number in np.unique(fold)]
    report.summary["folds"] = _summarize_spread(each)
    return report


def _summarize_spread(each: list[dict]) -> dict:
    """Return mean and standard deviation over folds; a number that some folds lack is that of the others."""
    values = {name: [row[name] for row in each if row[name] is not None] for name in each[0]}
    mean = {name: statistics.mean(some) if some else None for name, some in values.items()}
    deviation = {name: statistics.stdev(some) if len(some) > 1 else None for name, some in values.items()}
    return {"each": each, "mean": mean, "deviation": deviation}


def upgrade_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of an evaluation.json as this version writes them, also where 0.2 wrote them.

    There the label of a rule was its key, and the first rule the default.
    """
    rules = summary.get("rules")
    if "default_rule" in summary or not rules:
        return summary
    names = {key: rule_name(key) for key in rules}
    labels = {name: key if name == GIVEN else LABELS[name] for key, name in names.items()}
    renamed = {"default_rule": names[list(rules)[0]], "rule_labels": labels}
    for part in {"rules", "intervals"} & summary.keys():
        renamed[part] = {names[key]: value for key, value in summary[part].items()}
    return summary | renamed
