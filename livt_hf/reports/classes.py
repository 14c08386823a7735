"""Pictures of classes: calibration, accuracy from head to tail, confusions, best and worst, sizes and logit biases.

They draw what `livt_hf.metrics` tells: `LongTailMetrics.bins`, `LongTailMetrics.per_class(names)` and
`confusions`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from livt_hf.errors import LiVTError
from livt_hf.long_tail.losses import balanced_bce_bias, balanced_ce_bias
from livt_hf.metrics import GROUPS, shot_groups
from livt_hf.reports.sheets import labelled_rows
from livt_hf.reports.style import (
    BLUE,
    GROUP_COLOURS,
    GROUP_MARKERS,
    NAMED,
    PALETTE,
    SKY,
    VERMILLION,
    label_classes,
    new_figure,
    plain,
    save,
    shade_groups,
    shorten,
)

# With many classes the two nearly coincide: thin dashes over a wide line show both.
CE_LINE = {"color": BLUE, "linestyle": "--", "linewidth": 1.6, "label": "softmax losses (Theorem 1)"}
BCE_LINE = {"color": VERMILLION, "linestyle": "-", "linewidth": 3, "label": "sigmoid losses (Theorem 3)"}


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
    words = f"ECE {100 * (gaps * images).sum() / total:.1f} %, MCE {100 * gaps.max():.1f} %"

    figure = new_figure(4.8, 5.4)
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
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)  # a bar may stand anywhere
    return save(figure, path, vector=True)


def accuracy_by_frequency(
    per_class: Sequence[Mapping], path: str | Path, measure: str = "accuracy", intervals: np.ndarray | None = None
) -> Path:
    """Plot the accuracy, or another measure, of each class against its training images, with the means of the groups.

    Args:
        per_class: rows of the classes.
        path: the picture.
        measure: a column of the rows.
        intervals: lower and upper bounds by row, (C, 2), drawn where there are few classes.
    """
    kept = [number for number, row in enumerate(per_class) if row[measure] is not None]
    if not kept:
        raise LiVTError("no class has a test image; update the metrics before drawing them.")
    rows = [per_class[number] for number in kept]
    counts = np.array([max(row["count"], 0.7) for row in rows])
    values, groups = 100 * np.array([row[measure] for row in rows]), np.array([row["group"] for row in rows])
    figure = new_figure(4.8, 3.4)
    ax = plain(figure.add_subplot(), "training images of the class", f"{measure.replace('_', ' ')} (%)")
    ax.set_xscale("log")
    # Classes of equal numbers would hide each other: spread them by up to 4 % of their number, and by 2 points.
    order = np.arange(len(rows)) * 0.618034 % 1 - 0.5
    spread_x, spread_y = counts * (1 + 0.08 * order), values + (4 * order if len(rows) > 1000 else 0)
    size, alpha = np.clip(4000 / len(rows), 2, 30), np.clip(700 / len(rows), 0.15, 0.85)
    for group in dict.fromkeys(groups.tolist()):
        own, colour = groups == group, GROUP_COLOURS[group]
        marker = dict(s=size, color=colour, alpha=alpha, marker=GROUP_MARKERS[group], linewidths=0)
        ax.scatter(
            spread_x[own], spread_y[own], label=f"{group} ({own.sum():,})", rasterized=len(rows) > 1000, **marker
        )
        ends = [counts[own].min() / 1.1, counts[own].max() * 1.1]
        ax.hlines(values[own].mean(), *ends, color=colour, linewidth=1.5, linestyle="--")
        if intervals is not None and len(rows) <= NAMED:
            low, high = 100 * intervals[kept][own].T
            ax.vlines(spread_x[own], low, high, color=colour, linewidth=1, alpha=0.45)
    ax.set_ylim(-3, 103)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save(figure, path, vector=True)


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
        total = round(pair["images"] / pair["share"])
        ax.text(100 * pair["share"], place, f" {pair['images']} of {total}", va="center", fontsize=9, color="0.3")
    labels = [f"{shorten(pair['label_name'], 26)} → {shorten(pair['predicted_name'], 26)}" for pair in pairs]
    ax.set_yticks(places, labels, parse_math=False, fontsize=9)
    ax.invert_yaxis()
    ax.set_ylim(len(pairs) - 0.5, -0.5)
    ax.margins(x=0.2)
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


def class_counts_chart(counts: Mapping[str, np.ndarray], path: str | Path, names: Sequence[str]) -> Path:
    """Plot the number of images of each class as horizontal bars, the largest class on top, one bar per split.

    With more classes than have room, the largest and the smallest ones are shown.
    """
    ranked = np.argsort(-counts["train"], kind="stable")
    shown = ranked if len(ranked) <= NAMED else np.r_[ranked[: NAMED // 2], ranked[-NAMED // 2 :]]
    figure = new_figure(8, 1.2 + 0.24 * len(shown))
    ax = plain(figure.add_subplot(), xlabel="images")
    ax.grid(visible=False)
    height = 0.8 / len(counts)
    for number, (split, own) in enumerate(counts.items()):
        offset = (number - (len(counts) - 1) / 2) * height
        bars = ax.barh(np.arange(len(shown)) + offset, own[shown], height, color=PALETTE[number], label=split)
        ax.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=7)
    ax.set_yticks(range(len(shown)), [shorten(names[c], 28) for c in shown], parse_math=False)
    ax.tick_params(axis="y", labelsize=9)
    ax.margins(y=0.01)
    ax.invert_yaxis()
    if len(shown) < len(ranked):
        ax.axhline(NAMED // 2 - 0.5, color="0.5", linestyle=":")
        look = dict(transform=ax.get_yaxis_transform(), ha="right", va="bottom", color="0.4", fontsize=9)
        ax.text(1, NAMED // 2 - 0.5, f"{len(ranked) - NAMED:,} more classes", **look)
    if len(counts) > 1:
        figure.legend(loc="outside lower center", ncols=len(counts), frameon=False)
    return save(figure, path)


def logit_biases(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two biases of each class, both for a uniform test prior."""
    counts = counts.tolist()
    return balanced_ce_bias(counts, test_prior="uniform").numpy(), balanced_bce_bias(counts, "uniform").numpy()


def class_distribution(
    counts: Sequence[int], path: str | Path, names: Sequence[str] | None = None, biases: bool = True
) -> Path:
    """Plot the number of training images of each class from head to tail, and its biases (right axis).

    The shot groups are shaded. A class without a training image has no bias: where there is one, the right axis is
    left out. Pass `biases=False` where images have several labels, whose biases need the number of images too.
    """
    counts = np.asarray(counts)
    order = np.argsort(-counts, kind="stable")
    sizes = counts[order]
    ranks = np.arange(len(sizes))
    figure = new_figure(9, 4.5)
    ax = plain(figure.add_subplot(), ylabel="training images")
    ax.grid(False)
    shade_groups(ax, [GROUPS[group] for group in shot_groups(sizes)])
    if len(sizes) <= NAMED:
        ax.bar(ranks, sizes, width=0.75, color="0.78")
    else:
        ax.fill_between(ranks, sizes, step="mid", color="0.78", linewidth=0)
    if sizes[0] > 10 * max(sizes[-1], 1):
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.7)
    label_classes(ax, order if names is None else [names[i] for i in order])
    if biases and sizes[-1] > 0:
        right = ax.twinx()
        right.spines["top"].set_visible(False)
        right.set_ylabel("logit bias")
        ce, bce = logit_biases(sizes)
        right.plot(ranks, bce, **BCE_LINE)
        right.plot(ranks, ce, **CE_LINE)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)  # balanced classes fill the axes
    return save(figure, path)
