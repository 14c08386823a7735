"""Pictures of an evaluation: calibration, accuracy from head to tail, confusions, the best and the worst classes.

They draw what `livt_hf.metrics` tells: `LongTailMetrics.bins`, `LongTailMetrics.per_class(names)` and
`confusions`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from livt_hf.errors import LiVTError
from livt_hf.reports.sheets import labelled_rows
from livt_hf.reports.style import (
    BLUE,
    GROUP_COLOURS,
    NAMED,
    SKY,
    VERMILLION,
    label_classes,
    new_figure,
    plain,
    save,
    shade_groups,
    shorten,
)


def reliability_diagram(bins: Sequence[Mapping], path: str | Path, title: str | None = None) -> Path:
    """Plot accuracy against confidence in each bin and, below, the share of images in each bin."""
    total = sum(row["images"] for row in bins)
    if total == 0:
        raise LiVTError("no bin holds an image; update the metrics before drawing them.")
    filled = [row for row in bins if row["images"]]
    width = bins[0]["high"] - bins[0]["low"]
    lows, accuracy, confidence, images = (
        np.array([row[name] for row in filled]) for name in ("low", "accuracy", "confidence", "images")
    )
    gaps = np.abs(confidence - accuracy)
    over = "over" if (confidence * images).sum() > (accuracy * images).sum() else "under"
    words = f"ECE {100 * (gaps * images).sum() / total:.1f} %, MCE {100 * gaps.max():.1f} %, {over}-confident"

    figure = new_figure(5, 6.4)
    upper, lower = figure.subplots(2, 1, height_ratios=[4, 1], sharex=True)
    plain(upper, ylabel="accuracy", title=f"{title}\n{words}" if title else words)
    upper.bar(lows, accuracy, width, align="edge", color=SKY, edgecolor="white", label="accuracy")
    upper.bar(
        lows, confidence - accuracy, width, accuracy, align="edge", facecolor="none", edgecolor=VERMILLION,
        hatch="///", linewidth=1, label="gap to mean confidence",
    )  # fmt: skip
    upper.plot([0, 1], [0, 1], "--", color="0.4", label="calibrated")
    upper.set(xlim=(0, 1), ylim=(0, 1))
    plain(lower, xlabel="confidence", ylabel="images (%)")
    lower.bar(lows, 100 * images / total, width, align="edge", color="0.6", edgecolor="white")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)  # a bar may stand anywhere in the axes
    return save(figure, path)


def accuracy_by_frequency(per_class: Sequence[Mapping], path: str | Path, measure: str = "accuracy") -> Path:
    """Plot the accuracy, or another measure, of each class from head to tail, with groups shaded and their means.

    Many classes also get a running mean.
    """
    rows = sorted((row for row in per_class if row[measure] is not None), key=lambda row: -row["count"])
    if not rows:
        raise LiVTError("no class has a test image; update the metrics before drawing them.")
    ranks, accuracy = np.arange(len(rows)), 100 * np.array([row[measure] for row in rows])
    groups = [row["group"] for row in rows]
    figure = new_figure(9, 4.5)
    ax = plain(figure.add_subplot(), ylabel=f"{measure.replace('_', ' ')} (%)")
    shade_groups(ax, groups)
    colours = [GROUP_COLOURS[group] for group in groups]
    named = len(rows) <= NAMED
    if named:
        ax.bar(ranks, accuracy, width=0.75, color=colours, alpha=0.75)
    else:
        # Three test images per class give only four accuracies: spread by 2 points so that crowds show as such.
        spread = 4 * (ranks * 0.618034 % 1 - 0.5) if len(rows) > 1000 else 0
        size, alpha = np.clip(4000 / len(rows), 2, 24), np.clip(700 / len(rows), 0.15, 0.7)
        ax.scatter(ranks, accuracy + spread, s=size, c=colours, alpha=alpha, linewidths=0)
        window = max(5, len(rows) // 20)
        weights = np.ones(window)
        mean = np.convolve(accuracy, weights, "same") / np.convolve(np.ones(len(rows)), weights, "same")
        ax.plot(ranks, mean, color="black", linewidth=2, label=f"mean of {window} neighbours")
    for group in dict.fromkeys(groups):
        members = [i for i, name in enumerate(groups) if name == group]
        level = accuracy[members].mean()
        ax.hlines(
            level, members[0] - 0.5, members[-1] + 0.5, color=GROUP_COLOURS[group], linewidth=2, linestyle="--",
            label=f"{group}: {level:.1f}",
        )  # fmt: skip
    ax.set_ylim(0 if named else -3, 103)
    label_classes(ax, [row["name"] for row in rows])
    if named:  # names need the room below the axis
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    else:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)
    return save(figure, path)


def confused_classes(pairs: Sequence[Mapping], path: str | Path) -> Path:
    """Plot the most frequent confusions, "label → prediction", with the share and number of the label's images."""
    if not pairs:
        figure = new_figure(8, 1)
        figure.text(0.5, 0.5, "no test image is taken for another class", ha="center", va="center")
        return save(figure, path)
    figure = new_figure(8, 1.2 + 0.3 * len(pairs))
    ax = plain(figure.add_subplot(), xlabel="share of the label's test images taken for the other (%)")
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color="0.9")
    towards_head = [pair["predicted_count"] > pair["label_count"] for pair in pairs]
    places = np.arange(len(pairs))
    for towards, colour, label in ((True, VERMILLION, "taken for a more frequent class"),
                                   (False, BLUE, "taken for an equally or less frequent class")):  # fmt: skip
        chosen = [i for i in places if towards_head[i] == towards]
        ax.barh(chosen, [100 * pairs[i]["share"] for i in chosen], color=colour, label=label, height=0.7)
    for place, pair in zip(places, pairs, strict=True):
        ax.text(100 * pair["share"], place, f" {pair['images']}", va="center", fontsize=9, color="0.3")
    labels = [f"{shorten(pair['label_name'], 26)} → {shorten(pair['predicted_name'], 26)}" for pair in pairs]
    ax.set_yticks(places, labels, parse_math=False, fontsize=9)
    ax.invert_yaxis()
    ax.set_ylim(len(pairs) - 0.5, -0.5)
    ax.margins(x=0.08)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return save(figure, path)


def best_and_worst_classes(per_class: Sequence[Mapping], number: int = 5) -> tuple[list[int], list[int]]:
    """Return ids of the classes of highest and lowest accuracy; ties go to the class with more test images.

    One test image says next to nothing: such classes are ranked only where there are no others. No class is on both
    lists, none that is never right is among the best, and none that is always right is among the worst.
    """
    tested = [row for row in per_class if row["images"] and row["accuracy"] is not None]
    rows = [row for row in tested if row["images"] > 1] or tested

    def first(rows: list[Mapping], sign: int, number: int) -> list[int]:
        ranked = sorted(rows, key=lambda row: (sign * row["accuracy"], -row["images"], row["class"]))
        return [row["class"] for row in ranked[:number]]

    best = first([row for row in rows if row["accuracy"] > 0], -1, min(number, (len(rows) + 1) // 2))
    worst = first([row for row in rows if row["accuracy"] < 1 and row["class"] not in best], 1, number)
    return best, worst


def best_and_worst(per_class: Sequence[Mapping], samples: Callable[[int], Sequence], path: str | Path) -> Path:
    """Draw the five best and five worst classes with one row of images each, which `samples(class)` returns."""
    by_id, rows = {row["class"]: row for row in per_class}, []
    best, worst = best_and_worst_classes(per_class)
    for word, colour, ids in (("best", BLUE, best), ("worst", VERMILLION, worst)):
        for place, i in enumerate(ids, start=1):
            row = by_id[i]
            words = [f"{word} {place}", shorten(row["name"], 24), f"{100 * row['accuracy']:.0f} % of {row['images']}"]
            words.append(f"{row['count']:,} in training ({row['group']})")
            rows.append(("\n".join(words), colour, samples(i)))
    return labelled_rows(rows, path)
