"""The first screen of a report: is the model good enough, which classes are in doubt and why, and what to do next."""

import functools
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from livt_hf.metrics import GROUPS, LongTailMetrics
from livt_hf.reports.page import plain_markdown
from livt_hf.reports.style import GROUP_COLOURS
from livt_hf.results import PAPER, percent
from livt_hf.system import shell_line

DOUBTED, ACTIONS = 6, 3  # at most: one screen
POOR = 0.5  # a class that is right less often is in doubt
OVERCONFIDENT = 0.15  # and so is one whose mean confidence is that much above its accuracy
ENOUGH = 10  # test images, to say so
CONFUSED = 0.2  # the share of a class's images taken for one other class that is worth a word
WORTH = 0.01  # what an action must promise, as a share of right answers or of calibration


@dataclass(frozen=True)
class Measured:
    """What a report knows about a model: metrics by rule, the first being the one it is judged by, and confusions."""

    model: str | None  # its folder or id; a cross-validation has none of its own
    rules: Mapping[str, LongTailMetrics]
    pairs: Sequence[dict]  # as `livt_hf.metrics.confusions` gives them
    names: Sequence[str]
    intervals: Mapping[str, tuple[float, float] | None]  # of the first rule's accuracies

    @property
    def first(self) -> LongTailMetrics:
        return next(iter(self.rules.values()))

    @functools.cached_property
    def classes(self) -> list[dict]:
        """Rows of the classes that have test images, each with the class it is taken for most often, or None."""
        confused: dict[int, dict] = {}
        for pair in self.pairs:
            confused.setdefault(pair["label"], pair)
        rows = [row for row in self.first.per_class(self.names) if row["images"]]
        return [row | {"confused": confused.get(row["class"])} for row in rows]


def groups(measured: Measured) -> list[dict]:
    """How often each group of classes is right, with its interval; groups without classes are left out."""
    first, numbers, counted = measured.first, measured.first.compute(), [row["group"] for row in measured.classes]
    sizes = (
        f"more than {first.many_above}",
        f"{first.few_below} to {first.many_above}",
        f"fewer than {first.few_below}",
    )
    return [
        {"group": name, "classes": counted.count(name), "words": f"{size} training images"}
        | {"accuracy": numbers[name], "interval": measured.intervals.get(name)}
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
        words.append(f"{percent(pair['share'])} % are taken for {pair['predicted_name']}")
    if over:
        words.append(f"overconfident ({percent(sure)} % sure)")
    return words or ["no single reason was found"]


def doubtful(measured: Measured) -> list[dict]:
    """The classes to distrust, the worst first; one test image says too little where others have more."""
    rows = [row for row in measured.classes if row["images"] > 1] or measured.classes
    found = [(row, doubts(row)) for row in sorted(rows, key=lambda row: (row["accuracy"], -row["images"]))]
    return [
        {"class": row["name"], "right (%)": percent(row["accuracy"]), "why": "; ".join(why)}
        for row, why in found
        if why
    ]


def actions(measured: Measured) -> list[str]:
    """What would help most, the most promising first."""
    found = [*_better_rule(measured), *_more_labels(measured), *_calibration(measured), *_more_training(measured)]
    found += [*_look_alikes(measured), *_larger_test(measured)]
    return [words for worth, words in sorted(found, key=lambda action: -action[0]) if worth >= WORTH][:ACTIONS]


def _better_rule(measured: Measured) -> list[tuple[float, str]]:
    accuracy = {rule: metric.compute()["mean_class_accuracy"] for rule, metric in measured.rules.items()}
    first, best = next(iter(accuracy)), max(accuracy, key=accuracy.get)
    gain = accuracy[best] - accuracy[first]
    words = (
        f"Serve by another rule: {best} is right for {percent(accuracy[best])} % of the images of an average class,"
    )
    return [(gain, f"{words} {first} for {percent(accuracy[first])} %.")]


def _more_labels(measured: Measured) -> list[tuple[float, str]]:
    numbers, rows = measured.first.compute(), measured.classes
    rare, many = [row for row in rows if row["group"] == "few"], numbers["many"]
    if not rare or many is None:
        return []
    gain = (many - numbers["few"]) * len(rare) / len(rows)
    weak = sorted((row for row in rare if row["accuracy"] < many), key=lambda row: row["accuracy"])
    named = _listed([row["name"] for row in weak])
    words = f"Label more images of {named}: classes with fewer than {measured.first.few_below} training images"
    return [(gain, f"{words} are right in {percent(numbers['few'])} %, frequent ones in {percent(many)} %.")]


def _calibration(measured: Measured) -> list[tuple[float, str]]:
    numbers = measured.first.compute()
    if measured.model is None or numbers["ece"] is None or len(measured.rules) == 1:  # one: without probabilities
        return []
    if next(iter(measured.rules)) != PAPER:  # a calibrated model is judged by another
        return []
    over = "sure" if numbers["mean_confidence"] > numbers["accuracy"] else "unsure"
    command = f"livt calibrate {shell_line([measured.model])} --dataset FOLDER --split all"
    words = f"Calibrate it with other labelled images ({command}): it is too {over} of its answers, by"
    return [(numbers["ece"] / 2, f"{words} {percent(numbers['ece'])} points on average.")]


def _more_training(measured: Measured) -> list[tuple[float, str]]:
    many = measured.first.compute()["many"]
    if many is None or many > 0.7:
        return []
    words = "Train longer, or start from a better pretraining: even classes with more than"
    return [
        ((1 - many) / 2, f"{words} {measured.first.many_above} training images are right in only {percent(many)} %.")
    ]


def _look_alikes(measured: Measured) -> list[tuple[float, str]]:
    images = measured.first.num_images
    pairs = [pair for pair in measured.pairs[:50] if pair["share"] >= CONFUSED]
    if not pairs:
        return []
    pair = pairs[0]
    words = f"Look at images of {pair['label_name']} and {pair['predicted_name']} side by side:"
    words += f" {pair['images']} of the first are taken for the second. Are the labels right?"
    return [(pair["images"] / images, words)]


def _larger_test(measured: Measured) -> list[tuple[float, str]]:
    rows = measured.classes
    rough = sum(row["images"] < ENOUGH for row in rows)
    words = f"Test on more images: {rough:,} of {len(rows):,} classes have fewer than {ENOUGH} test images, so that"
    return [(0.02 * rough / len(rows), f"{words} their numbers are rough.")]


def first_screen(measured: Measured) -> str:
    """All of it as HTML."""
    numbers = measured.first.compute()
    rule, escape = next(iter(measured.rules)), html.escape
    lead = f"{percent(numbers['accuracy'])} % of {numbers['num_images']:,} test images are right"
    if percent(numbers["accuracy"]) != percent(numbers["mean_class_accuracy"]):  # the test set is imbalanced
        lead += f", and {percent(numbers['mean_class_accuracy'])} % in an average class"
    lead += f", by the rule “{rule}”."
    cards = "".join(map(_card, groups(measured)))
    found = doubtful(measured)
    items = "".join(
        f"<li><b>{escape(row['class'])}</b>: {row['right (%)']} % right; {escape(row['why'])}</li>"
        for row in found[:DOUBTED]
    )
    more = f"<p>and {len(found) - DOUBTED:,} more, in the table of classes.</p>" if len(found) > DOUBTED else ""
    steps = "".join(f"<li>{escape(words)}</li>" for words in actions(measured))
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


def first_screen_text(measured: Measured) -> str:
    """The same in Markdown."""
    lines = [
        f"- {row['group']} ({_counted(row['classes'], 'class', 'classes')}, {row['words']}): "
        f"{percent(row['accuracy'])} % right"
        for row in groups(measured)
    ]
    doubted = [f"{row['class']}: {row['right (%)']} % right; {row['why']}" for row in doubtful(measured)[:DOUBTED]]
    found = [f"- {plain_markdown(words)}" for words in doubted]
    steps = [f"{number}. {plain_markdown(words)}" for number, words in enumerate(actions(measured), start=1)]
    parts = {"Is it good enough?": lines, "Classes to distrust": found, "What to do next": steps}
    return "\n\n".join(f"## {title}\n\n" + "\n".join(rows or ["Nothing stands out."]) for title, rows in parts.items())


def _counted(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
