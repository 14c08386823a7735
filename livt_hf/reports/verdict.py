"""The verdict that opens a report: accuracy against baselines and by group, weak classes, and advice.

What is said of a class or of another decision rule has passed a test (`livt_hf.predictions.significance`), and each
piece of advice has its command.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.metrics import GROUPS
from livt_hf.predictions.rules import ARGMAX, ESTIMATED, GIVEN, LARGEST, TRAINING, UNIFORM
from livt_hf.predictions.significance import (
    LEVEL,
    MIN_UNITS,
    below_the_rest,
    calibration_p_value,
    class_gains,
    paired_p_value,
    significant,
)
from livt_hf.reports.style import GROUP_COLOURS
from livt_hf.text import format_percent, shell_line

MAX_CLASSES, MAX_ADVICE = 6, 4  # they fit one screen
MIN_DIFFERENCE = 0.1  # of a weak class: accuracy below that of the other images
MIN_CONFIDENCE_GAP = 0.02
CONFUSED_SHARE = 0.2  # of a class's images predicted as one other class: worth mentioning
MIN_IMAGES = 10  # test images below which hardly any class can be told to be weak


@dataclass(frozen=True)
class Advice:
    """What to do, why, and the command for it."""

    title: str
    reason: str
    command: str


@dataclass(frozen=True)
class Verdict:
    """What opens a report.

    `weak` lists all weak classes, of which a page shows `max_classes`; `baselines` compare with the default rule.
    """

    lead: str
    summary: str
    baselines: list[dict]
    groups: list[dict]
    weak: list[dict]
    advice: list[Advice]
    max_classes: int = MAX_CLASSES


def judge(report: EvaluationReport) -> Verdict:
    """Return the verdict on an evaluation of images with one label each."""
    return _Judge(report).verdict()


def find_weak_classes(report: EvaluationReport) -> list[dict]:
    """Return the classes that are significantly less accurate than the other images, the weakest first."""
    tested = [row for row in report.per_class if row["images"]]
    right, images = count_correct(report, tested)
    found = significant(below_the_rest(images, right))
    others = (right.sum() - right) / np.maximum(images.sum() - images, 1)
    confused: dict[int, dict] = {}
    for pair in report.confusions:
        confused.setdefault(pair["label"], pair)
    weak = [
        row | {"reason": _explain(row, confused.get(row["class"]))}
        for row, is_low, other in zip(tested, found, others, strict=True)
        if is_low and row["accuracy"] <= other - MIN_DIFFERENCE
    ]
    return sorted(weak, key=lambda row: (row["accuracy"], -row["images"]))


def count_correct(report: EvaluationReport, rows: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Return right predictions and test images of classes, in groups of images where images belong together."""
    images = report.units[[row["class"] for row in rows]]
    return np.array([row["accuracy"] or 0 for row in rows]) * images, images


class _Judge:
    """What the parts of a verdict on one report have in common."""

    def __init__(self, report: EvaluationReport):
        self.report, self.default = report, report.summary["default_rule"]
        self.numbers = report.default_metrics.compute()
        self.tested = [row for row in report.per_class if row["images"]]
        self.num_units = len(report.labels if report.groups is None else np.unique(report.groups))

    def verdict(self) -> Verdict:
        split, numbers = self.report.summary["split"], self.numbers
        lead = f"Accuracy {format_percent(numbers['accuracy'])} %, mean class accuracy "
        lead += f"{format_percent(numbers['mean_class_accuracy'])} % on {numbers['num_images']:,} images "
        lead += f"({'images of all splits' if split == 'all' else split}); decision rule: {self.report.default_label}."
        weak = find_weak_classes(self.report)
        return Verdict(lead, self.summarize_baselines(), self.baselines, self.groups(), weak, self.advice())

    def test(self, rule: str, other: str, by_class: bool = False) -> float:
        """Return the p-value of a difference in accuracy, or in mean class accuracy, between two rules."""
        labels, groups = self.report.labels, self.report.groups
        one, two = (self.report.decisions[name].labels.numpy() for name in (rule, other))
        gains = class_gains(one, two, labels) if by_class else (one == labels).astype(float) - (two == labels)
        return paired_p_value(gains, groups)

    @cached_property
    def baselines(self) -> list[dict]:
        """Return rows of the default rule and the baselines, and how accuracies differ: 1 better, -1 worse, 0 open."""
        rows = [{"rule": self.default, "label": f"This model ({self.report.default_label})", "metrics": self.numbers}]
        largest = max(self.report.per_class, key=lambda row: row["count"])["name"]
        labels = {LARGEST: f"Always “{largest}”, the largest class", TRAINING: "The same model, training prior"}
        for rule, metrics in self.report.summary["baselines"].items():
            signs = {}
            for name in ("accuracy", "mean_class_accuracy"):
                gain, by_class = self.numbers[name] - metrics[name], name != "accuracy"
                signs[name] = int(np.sign(gain)) if self.test(self.default, rule, by_class) <= LEVEL else 0
            rows.append({"rule": rule, "label": labels[rule], "metrics": metrics, "signs": signs})
        return rows

    def summarize_baselines(self) -> str:
        """Return in a sentence whether the model is better than always answering the largest class."""
        row = next(row for row in self.baselines if row["rule"] == LARGEST)
        accuracy, mean = row["signs"]["accuracy"], row["signs"]["mean_class_accuracy"]
        share = f"{format_percent(row['metrics']['accuracy'])} %"
        if accuracy > 0:
            return f"Better than always answering the largest class, which is right in {share}."
        if mean > 0:
            text = "Tells the classes apart, but is right "
            text += "less often than" if accuracy < 0 else "about as often as"
            return f"{text} always answering the largest class ({share}): the decision rule favours rare classes."
        if self.num_units < MIN_UNITS:
            units = f"{self.num_units} {'images' if self.report.groups is None else 'groups of images'}"
            return f"Always answering the largest class is right in {share}; {units} are too few to compare them."
        return f"Not better than always answering the largest class, which is right in {share}."

    def groups(self) -> list[dict]:
        """Return recall, its interval, and precision of each shot group that has classes."""
        metrics, members = self.report.default_metrics, [row["group"] for row in self.tested]
        intervals, many, few = self.report.summary["intervals"][self.default], metrics.many_above, metrics.few_below
        sizes = (f"more than {many}", f"{few} to {many}", f"fewer than {few}")
        untested = Counter(row["group"] for row in self.report.per_class if not row["images"])
        return [
            {
                "name": name,
                "colour": GROUP_COLOURS[name],
                "description": f"{_count(members.count(name), 'class', 'classes')} with {size} training images"
                + f"; {untested[name]:,} more not tested" * (untested[name] > 0),
                "accuracy": self.numbers[name],
                "precision": self.numbers[f"{name}_precision"],
                "interval": intervals.get(name),
            }
            for name, size in zip(GROUPS, sizes, strict=True)
            if self.numbers[name] is not None
        ]

    def advice(self) -> list[Advice]:
        kinds = (self.change_rule, self.count_correct_images, self.tell_apart, self.label_more, self.calibrate)
        return list(filter(None, (kind() for kind in (*kinds, self.test_more))))[:MAX_ADVICE]

    def change_rule(self) -> Advice | None:
        """Advise another rule if it is better in one accuracy, by a paired test, and not worse in the other."""
        if self.default == GIVEN:  # the prior was given for images whose classes are frequent otherwise than here
            return None
        priors = {UNIFORM: "uniform", ESTIMATED: "prior.json"}
        rules = [rule for rule in self.report.metrics if rule in priors and rule != self.default]
        for rule in rules:
            metrics = self.report.metrics[rule].compute()
            gains = [metrics[name] - self.numbers[name] for name in ("accuracy", "mean_class_accuracy")]
            p_values = [self.test(rule, self.default, by_class) for by_class in (False, True)]
            if min(gains) >= 0 and min(p_values) <= LEVEL / (2 * len(rules)):
                label, reason = self.report.summary["rule_labels"][rule], self.compare(metrics)
                return Advice(f"Decide by “{label}”.", reason, self.redecide(priors[rule]))
        return None

    def count_correct_images(self) -> Advice | None:
        """Advise the training prior to those who count correct images, where it has more of them."""
        row = next((row for row in self.baselines if row["rule"] == TRAINING), None)
        if row is None or row["signs"]["accuracy"] >= 0:
            return None
        return Advice(
            "Use the training prior if the number of correct images is what counts.",
            f"{self.compare(row['metrics'])} This is for images whose classes are as frequent as in training.",
            self.redecide("training"),
        )

    def compare(self, metrics: dict) -> str:
        pairs = [(metrics[name], self.numbers[name]) for name in ("accuracy", "mean_class_accuracy")]
        (one, now), (mean, mean_now) = ([format_percent(value) for value in pair] for pair in pairs)
        return f"Accuracy {one} instead of {now} %, mean class accuracy {mean} instead of {mean_now} %."

    def redecide(self, prior: str) -> str:
        model = self.report.summary["model"]
        if "folds" in self.report.summary:
            return shell_line(["livt", "decide", Path(model, "predictions"), "--prior", prior, "--output", "decided"])
        return shell_line(["livt", "predict", model, "IMAGES", "--prior", prior])

    def tell_apart(self) -> Advice | None:
        """Advise more training only where no decision rule is at fault: not even the training prior is better."""
        best = TRAINING if TRAINING in self.report.decisions else self.default
        right = (self.report.decisions[best].labels.numpy() == self.report.labels).mean()
        share = self.report.summary["baselines"][LARGEST]["accuracy"]
        tells = right > share and self.test(best, LARGEST) <= LEVEL
        if tells or self.num_units < MIN_UNITS or self.summarize_baselines().startswith(("Better", "Tells")):
            return None
        return Advice(
            "Fine-tune the whole model, or start from a stronger one.",
            "Under no decision rule is it significantly better than always answering the largest class.",
            self.train_again("--pretrained", "MODEL", "--tune", "full")
            or shell_line(["livt", "train", self.report.summary["dataset"], "--pretrained", "MODEL", "--hours", "2"]),
        )

    def label_more(self) -> Advice | None:
        """Advise to label images of rare classes if rare classes are significantly below the other images."""
        rare = [row for row in self.tested if row["group"] == "few"]
        command = self.train_again()
        if not rare or len(rare) == len(self.tested) or command is None:
            return None
        others = [row for row in self.tested if row["group"] != "few"]
        right, images = np.array([np.sum(count_correct(self.report, rows), axis=1) for rows in (rare, others)]).T
        if below_the_rest(images, right)[0] > LEVEL:
            return None
        names = [row["name"] for row in sorted(rare, key=lambda row: row["accuracy"])]
        own, other = (format_percent(np.mean([row["accuracy"] for row in rows])) for rows in (rare, others))
        few = self.report.default_metrics.few_below
        return Advice(
            f"Label more images of {_list_names(names)}, then train again.",
            f"Classes with fewer than {few} training images have a mean accuracy of {own} %, others {other} %.",
            command,
        )

    def train_again(self, *options: str) -> str | None:
        """Return the command that trains the model again from the options of its run; None where there is no run."""
        arguments = Path(self.report.summary["model"], "arguments.yaml")
        return shell_line(["livt", "finetune", "--config", arguments, *options]) if arguments.is_file() else None

    def calibrate(self) -> Advice | None:
        if "folds" in self.report.summary or len(self.report.metrics) == 1 or self.default != ARGMAX:
            return None  # a cross-validation has no model of its own; without probabilities, or calibrated
        if self.num_units < MIN_UNITS:
            return None
        decided = self.report.decisions[self.default]
        gap = (self.numbers["mean_confidence"] or 0) - self.numbers["accuracy"]
        right, groups = decided.labels.numpy() == self.report.labels, self.report.groups
        if abs(gap) < MIN_CONFIDENCE_GAP or calibration_p_value(decided.scores.numpy(), right, groups) > LEVEL:
            return None
        direction = "over" if gap > 0 else "under"
        return Advice(
            "Calibrate the probabilities on other labelled images.",
            f"The model is {direction}confident: mean confidence {format_percent(self.numbers['mean_confidence'])} %, "
            f"accuracy {format_percent(self.numbers['accuracy'])} %.",
            shell_line(["livt", "calibrate", self.report.summary["model"], "--dataset", "FOLDER", "--split", "all"]),
        )

    def test_more(self) -> Advice | None:
        small = sum(row["images"] < MIN_IMAGES for row in self.tested)
        command = self.train_again("--folds", "5")
        few_groups = self.report.groups is not None and self.num_units < MIN_UNITS
        if not (small or few_groups) or "folds" in self.report.summary or command is None:
            return None
        reason = f"{small:,} of {len(self.tested):,} classes have fewer than {MIN_IMAGES} test images, "
        reason += "too few to tell whether one of them is weak."
        if few_groups:
            reason = f"The test images are of {self.num_units} groups, too few for intervals and tests."
        return Advice("Test on every image by cross-validation.", reason, command)


def _explain(row: dict, pair: dict | None) -> str:
    """Return what is known of a weak class: few training images, what it is confused with, how often it is found."""
    reasons = [f"{round(row['accuracy'] * row['images'])} of {_count(row['images'], 'image', 'images')} right"]
    if row["group"] == "few":
        reasons.append(f"only {_count(row['count'], 'training image', 'training images')}")
    if pair is not None and pair["share"] >= CONFUSED_SHARE and pair["images"] > 1:
        reasons.append(f"{pair['images']} predicted as {pair['predicted_name']}")
    return "; ".join(reasons)


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def _list_names(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
