"""The verdict that opens a report: accuracy by group, the least reliable classes and why, and recommendations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.rules import ARGMAX
from livt_hf.predictions.shot_groups import GROUPS
from livt_hf.reports.style import GROUP_COLOURS
from livt_hf.text import format_percent, shell_line

MAX_CLASSES, MAX_RECOMMENDATIONS = 6, 3  # they fit one screen
LOW_ACCURACY = 0.5  # of an unreliable class
OVERCONFIDENCE = 0.15  # of an unreliable class: mean confidence above accuracy
MIN_IMAGES = 10  # test images from which on a class can be called overconfident
CONFUSED_SHARE = 0.2  # of a class's images predicted as one other class: worth mentioning
MIN_GAIN = 0.01  # of a recommendation, as a fraction of correct predictions or of calibration


@dataclass(frozen=True)
class Verdict:
    """What opens a report; `unreliable` lists all such classes, of which a page shows `max_classes`."""

    lead: str
    groups: list[dict]
    unreliable: list[dict]
    recommendations: list[str]
    max_classes: int = MAX_CLASSES


def judge(report: EvaluationReport) -> Verdict:
    """Return the verdict on an evaluation of images with one label each."""
    numbers = report.default_metrics.compute()
    lead = f"Accuracy {format_percent(numbers['accuracy'])} % on {numbers['num_images']:,} test images"
    mean = format_percent(numbers["mean_class_accuracy"])
    if mean != format_percent(numbers["accuracy"]):  # an imbalanced test set
        lead += f", mean class accuracy {mean} %"
    lead += f" (decision rule: {report.default_label})."
    return Verdict(lead, summarize_groups(report), find_unreliable_classes(report), recommend(report))


def _tested_classes(report: EvaluationReport) -> list[dict]:
    """Return rows of the classes that have test images, each with its most frequent confusion, or None."""
    confused: dict[int, dict] = {}
    for pair in report.confusions:
        confused.setdefault(pair["label"], pair)
    return [row | {"confused": confused.get(row["class"])} for row in report.per_class if row["images"]]


def summarize_groups(report: EvaluationReport) -> list[dict]:
    """Return accuracy and interval of each shot group that has classes."""
    metrics, groups = report.default_metrics, [row["group"] for row in _tested_classes(report)]
    numbers, intervals = metrics.compute(), report.summary["intervals"][report.summary["default_rule"]]
    many, few = metrics.many_above, metrics.few_below
    sizes = (f"more than {many}", f"{few} to {many}", f"fewer than {few}")
    return [
        {
            "name": name,
            "colour": GROUP_COLOURS[name],
            "description": f"{_count(groups.count(name), 'class', 'classes')} with {size} training images",
            "accuracy": numbers[name],
            "interval": intervals.get(name),
        }
        for name, size in zip(GROUPS, sizes, strict=True)
        if numbers[name] is not None
    ]


def find_unreliable_classes(report: EvaluationReport) -> list[dict]:
    """Return classes of low accuracy or high overconfidence with the reasons, the least accurate first.

    A class with a single test image counts only where no class has more.
    """
    rows = _tested_classes(report)
    rows = [row for row in rows if row["images"] > 1] or rows
    found = [(row, _explain(row)) for row in sorted(rows, key=lambda row: (row["accuracy"], -row["images"]))]
    return [{"name": row["name"], "accuracy": row["accuracy"], "reason": reason} for row, reason in found if reason]


def _explain(row: Mapping) -> str | None:
    """Return why the predictions of a class are unreliable, or None where they are reliable."""
    confidence = row["confidence"]
    measurable = confidence is not None and row["images"] >= MIN_IMAGES
    overconfident = measurable and confidence - row["accuracy"] > OVERCONFIDENCE
    if row["accuracy"] >= LOW_ACCURACY and not overconfident:
        return None
    reasons = []
    if row["group"] == "few":
        reasons.append(f"only {_count(row['count'], 'training image', 'training images')}")
    pair = row["confused"]
    if pair is not None and pair["share"] >= CONFUSED_SHARE:
        reasons.append(f"{format_percent(pair['share'])} % are predicted as {pair['predicted_name']}")
    if overconfident:
        reasons.append(f"overconfident (mean confidence {format_percent(confidence)} %)")
    return "; ".join(reasons) or "no single reason was found"


def recommend(report: EvaluationReport) -> list[str]:
    """Return recommendations, the most promising first."""
    kinds = (_change_rule, _label_more, _calibrate, _train_longer, _check_labels, _test_more)
    found = [item for kind in kinds if (item := kind(report)) is not None and item[0] >= MIN_GAIN]
    return [text for _, text in sorted(found, key=lambda item: -item[0])[:MAX_RECOMMENDATIONS]]


def _change_rule(report: EvaluationReport) -> tuple[float, str]:
    """Compare the rules under the given prior or, without one, by mean class accuracy."""
    accuracy = {rule: metric.compute()["mean_class_accuracy"] for rule, metric in report.metrics.items()}
    measure = "a mean class accuracy of {} %"
    if "under_prior" in report.summary:
        under = report.summary["under_prior"]
        accuracy = {rule: under["accuracy"].get(rule, 0.0) for rule in accuracy}
        measure = f"an accuracy of {{}} % under the {under['prior']}"
    default, best = report.summary["default_rule"], max(accuracy, key=accuracy.get)
    labels = report.summary["rule_labels"]
    reached = measure.format(format_percent(accuracy[best]))
    text = f"Use another decision rule: “{labels[best]}” reaches {reached}, “{labels[default]}” "
    return accuracy[best] - accuracy[default], f"{text}{format_percent(accuracy[default])} %."


def _label_more(report: EvaluationReport) -> tuple[float, str] | None:
    numbers, rows = report.default_metrics.compute(), _tested_classes(report)
    rare, many = [row for row in rows if row["group"] == "few"], numbers["many"]
    if not rare or many is None:
        return None
    weak = sorted((row for row in rare if row["accuracy"] < many), key=lambda row: row["accuracy"])
    text = f"Label more images of {_list_names([row['name'] for row in weak])}: classes with fewer than "
    text += f"{report.default_metrics.few_below} training images reach an accuracy of "
    text += f"{format_percent(numbers['few'])} %, frequent classes {format_percent(many)} %."
    return (many - numbers["few"]) * len(rare) / len(rows), text


def _calibrate(report: EvaluationReport) -> tuple[float, str] | None:
    numbers = report.default_metrics.compute()
    if "folds" in report.summary or numbers["ece"] is None:  # a cross-validation has no model of its own
        return None
    if len(report.metrics) == 1 or report.summary["default_rule"] != ARGMAX:  # without probabilities, or calibrated
        return None
    direction = "overconfident" if numbers["mean_confidence"] > numbers["accuracy"] else "underconfident"
    command = f"livt calibrate {shell_line([report.summary['model']])} --dataset FOLDER --split all"
    text = f"Calibrate the model on other labelled images ({command}): it is {direction} by "
    return numbers["ece"] / 2, f"{text}{format_percent(numbers['ece'])} points on average."


def _train_longer(report: EvaluationReport) -> tuple[float, str] | None:
    metrics = report.default_metrics
    many = metrics.compute()["many"]
    if many is None or many > 0.7:
        return None
    text = f"Train longer, or start from a better pretraining: even classes with more than {metrics.many_above}"
    return (1 - many) / 2, f"{text} training images reach only {format_percent(many)} %."


def _check_labels(report: EvaluationReport) -> tuple[float, str] | None:
    pair = next((pair for pair in report.confusions[:50] if pair["share"] >= CONFUSED_SHARE), None)
    if pair is None:
        return None
    text = f"Compare images of {pair['label_name']} and {pair['predicted_name']}: {pair['images']} of the first are "
    return pair["images"] / report.default_metrics.num_images, f"{text}predicted as the second. Check their labels."


def _test_more(report: EvaluationReport) -> tuple[float, str]:
    rows = _tested_classes(report)
    small = sum(row["images"] < MIN_IMAGES for row in rows)
    text = f"Test on more images: {small:,} of {len(rows):,} classes have fewer than {MIN_IMAGES} test images, so "
    return 0.02 * small / len(rows), f"{text}their accuracies are uncertain."


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def _list_names(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
