"""The first screen of a report: is the model good enough, which classes are in doubt and why, and what to do next."""

import html
from collections.abc import Mapping, Sequence

from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.rules import ARGMAX
from livt_hf.predictions.shot_groups import GROUPS
from livt_hf.reports.page import plain_markdown
from livt_hf.reports.style import GROUP_COLOURS
from livt_hf.text import format_percent, shell_line

DOUBTED, ACTIONS = 6, 3  # at most: one screen
POOR = 0.5  # a class that is right less often is in doubt
OVERCONFIDENT = 0.15  # and so is one whose mean confidence is that much above its accuracy
ENOUGH = 10  # test images, to say so
CONFUSED = 0.2  # the share of a class's images taken for one other class that is worth a word
WORTH = 0.01  # what an action must promise, as a share of right answers or of calibration


def _classes(report: EvaluationReport) -> list[dict]:
    """Rows of the classes that have test images, each with the class it is taken for most often, or None."""
    confused: dict[int, dict] = {}
    for pair in report.confusions:
        confused.setdefault(pair["label"], pair)
    return [row | {"confused": confused.get(row["class"])} for row in report.per_class if row["images"]]


def groups(report: EvaluationReport) -> list[dict]:
    """How often each group of classes is right, with its interval; groups without classes are left out."""
    first, counted = report.default_metrics, [row["group"] for row in _classes(report)]
    numbers, intervals = first.compute(), report.summary["intervals"][report.summary["default_rule"]]
    many, few = first.many_above, first.few_below
    sizes = (f"more than {many}", f"{few} to {many}", f"fewer than {few}")
    return [
        {"group": name, "classes": counted.count(name), "words": f"{size} training images"}
        | {"accuracy": numbers[name], "interval": intervals.get(name)}
        for name, size in zip(GROUPS, sizes, strict=True)
        if numbers[name] is not None
    ]


def doubts(row: Mapping) -> list[str]:
    """Why the predictions of a class are not to be relied on, in words; nothing where they are."""
    sure = row["confidence"]
    over = sure is not None and row["images"] >= ENOUGH and sure - row["accuracy"] > OVERCONFIDENT
    if row["accuracy"] >= POOR and not over:
        return []
    words = []
    if row["group"] == "few":
        words.append(f"only {_counted(row['count'], 'training image', 'training images')}")
    pair = row["confused"]
    if pair is not None and pair["share"] >= CONFUSED:
        words.append(f"{format_percent(pair['share'])} % are taken for {pair['predicted_name']}")
    if over:
        words.append(f"overconfident ({format_percent(sure)} % sure)")
    return words or ["no single reason was found"]


def doubtful(report: EvaluationReport) -> list[dict]:
    """The classes to distrust, the worst first; one test image says too little where others have more."""
    rows = _classes(report)
    rows = [row for row in rows if row["images"] > 1] or rows
    found = [(row, doubts(row)) for row in sorted(rows, key=lambda row: (row["accuracy"], -row["images"]))]
    return [
        {"class": row["name"], "right (%)": format_percent(row["accuracy"]), "why": "; ".join(why)}
        for row, why in found
        if why
    ]


def actions(report: EvaluationReport) -> list[str]:
    """What would help most, the most promising first."""
    kinds = (_better_rule, _more_labels, _calibration, _more_training, _look_alikes, _larger_test)
    found = [action for kind in kinds for action in kind(report)]
    return [words for worth, words in sorted(found, key=lambda action: -action[0]) if worth >= WORTH][:ACTIONS]


def _better_rule(report: EvaluationReport) -> list[tuple[float, str]]:
    """By the class frequencies that were asked for with --prior, or with every class counting the same."""
    accuracy = {rule: metric.compute()["mean_class_accuracy"] for rule, metric in report.metrics.items()}
    counted = "the images of an average class"
    if "under_prior" in report.summary:
        accuracy = {rule: report.summary["under_prior"]["accuracy"].get(rule, 0.0) for rule in accuracy}
        counted = "the images where classes are as frequent as you said"
    first, best = report.summary["default_rule"], max(accuracy, key=accuracy.get)
    gain, labels = accuracy[best] - accuracy[first], report.summary["rule_labels"]
    words = f"Serve by another rule: {labels[best]} is right for {format_percent(accuracy[best])} % of {counted},"
    return [(gain, f"{words} {labels[first]} for {format_percent(accuracy[first])} %.")]


def _more_labels(report: EvaluationReport) -> list[tuple[float, str]]:
    numbers, rows = report.default_metrics.compute(), _classes(report)
    rare, many = [row for row in rows if row["group"] == "few"], numbers["many"]
    if not rare or many is None:
        return []
    gain = (many - numbers["few"]) * len(rare) / len(rows)
    weak = sorted((row for row in rare if row["accuracy"] < many), key=lambda row: row["accuracy"])
    named = _listed([row["name"] for row in weak])
    words = f"Label more images of {named}: classes with fewer than {report.default_metrics.few_below} training images"
    return [
        (gain, f"{words} are right in {format_percent(numbers['few'])} %, frequent ones in {format_percent(many)} %.")
    ]


def _calibration(report: EvaluationReport) -> list[tuple[float, str]]:
    numbers = report.default_metrics.compute()
    if "folds" in report.summary or numbers["ece"] is None:  # a cross-validation has no model of its own
        return []
    if len(report.metrics) == 1 or report.summary["default_rule"] != ARGMAX:  # without probabilities, or calibrated
        return []
    over = "sure" if numbers["mean_confidence"] > numbers["accuracy"] else "unsure"
    command = f"livt calibrate {shell_line([report.summary['model']])} --dataset FOLDER --split all"
    words = f"Calibrate it with other labelled images ({command}): it is too {over} of its answers, by"
    return [(numbers["ece"] / 2, f"{words} {format_percent(numbers['ece'])} points on average.")]


def _more_training(report: EvaluationReport) -> list[tuple[float, str]]:
    first = report.default_metrics
    many = first.compute()["many"]
    if many is None or many > 0.7:
        return []
    words = f"Train longer, or start from a better pretraining: even classes with more than {first.many_above}"
    return [((1 - many) / 2, f"{words} training images are right in only {format_percent(many)} %.")]


def _look_alikes(report: EvaluationReport) -> list[tuple[float, str]]:
    pair = next((pair for pair in report.confusions[:50] if pair["share"] >= CONFUSED), None)
    if pair is None:
        return []
    words = f"Look at images of {pair['label_name']} and {pair['predicted_name']} side by side:"
    words += f" {pair['images']} of the first are taken for the second. Are the labels right?"
    return [(pair["images"] / report.default_metrics.num_images, words)]


def _larger_test(report: EvaluationReport) -> list[tuple[float, str]]:
    rows = _classes(report)
    rough = sum(row["images"] < ENOUGH for row in rows)
    words = f"Test on more images: {rough:,} of {len(rows):,} classes have fewer than {ENOUGH} test images, so that"
    return [(0.02 * rough / len(rows), f"{words} their numbers are rough.")]


def first_screen(report: EvaluationReport) -> str:
    """All of it as HTML."""
    numbers = report.default_metrics.compute()
    escape = html.escape
    lead = f"Accuracy {format_percent(numbers['accuracy'])} % on {numbers['num_images']:,} test images"
    if format_percent(numbers["accuracy"]) != format_percent(numbers["mean_class_accuracy"]):  # an imbalanced test set
        lead += f", mean class accuracy {format_percent(numbers['mean_class_accuracy'])} %"
    lead += f" (decision rule: {report.default_label})."
    cards = "".join(map(_card, groups(report)))
    found = doubtful(report)
    items = "".join(
        f"<li><b>{escape(row['class'])}</b>: {row['right (%)']} % right; {escape(row['why'])}</li>"
        for row in found[:DOUBTED]
    )
    more = f"<p>and {len(found) - DOUBTED:,} more, in the table of classes.</p>" if len(found) > DOUBTED else ""
    steps = "".join(f"<li>{escape(words)}</li>" for words in actions(report))
    return (
        f'<section class="first"><p class="lead">{escape(lead)}</p><div class="cards">{cards}</div>'
        f'<div class="halves"><div><h2>Classes to distrust</h2>'
        f"{f'<ul>{items}</ul>{more}' if found else '<p>No class stands out.</p>'}</div>"
        f"<div><h2>What to do next</h2>"
        f"{f'<ol>{steps}</ol>' if steps else '<p>Nothing stands out.</p>'}</div></div></section>"
    )


def _card(group: Mapping) -> str:
    low_high = "" if group["interval"] is None else " to ".join(f"{100 * bound:.1f}" for bound in group["interval"])
    name, share = group["group"], 100 * group["accuracy"]
    return (
        f'<div class="card"><b>{share:.1f} %</b> <span>{low_high and f"({low_high})"}</span>'
        f'<div class="track"><div style="width: {share:.1f}%; background: {GROUP_COLOURS[name]}"></div></div>'
        f"<div>{name}: {_counted(group['classes'], 'class', 'classes')} with {group['words']}</div></div>"
    )


def first_screen_text(report: EvaluationReport) -> str:
    """The same in Markdown."""
    lines = [
        f"- {row['group']} ({_counted(row['classes'], 'class', 'classes')}, {row['words']}): "
        f"{format_percent(row['accuracy'])} % right"
        for row in groups(report)
    ]
    doubted = [f"{row['class']}: {row['right (%)']} % right; {row['why']}" for row in doubtful(report)[:DOUBTED]]
    found = [f"- {plain_markdown(words)}" for words in doubted]
    steps = [f"{number}. {plain_markdown(words)}" for number, words in enumerate(actions(report), start=1)]
    parts = {"Is it good enough?": lines, "Classes to distrust": found, "What to do next": steps}
    return "\n\n".join(f"## {title}\n\n" + "\n".join(rows or ["Nothing stands out."]) for title, rows in parts.items())


def _counted(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
