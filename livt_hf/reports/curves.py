"""Plot training runs over time, results over a swept option, and accuracy on shifted test sets."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from livt_hf.errors import LiVTError
from livt_hf.files import read_log
from livt_hf.predictions.rules import LABELS
from livt_hf.reports.style import (
    BLUE,
    GROUP_COLOURS,
    GROUP_MARKERS,
    GROUP_NAMES,
    PALETTE,
    VERMILLION,
    new_figure,
    plain,
    save,
    shorten,
)
from livt_hf.text import format_percent

_LINES = ("-", "--", ":", "-.")


def training_curves(logs: Mapping[str, str | Path], path: str | Path, columns: int = 3) -> Path:
    """Plot loss, learning rate and accuracies of one or several runs from their log.jsonl.

    The groups of one run share a panel. Several runs have one panel per group, and each run has its colour and line.
    Up to `columns` panels stand side by side.
    """
    runs = {name: read_log(log) for name, log in logs.items()}
    if not any(runs.values()):
        raise LiVTError(f"{', '.join(map(str, logs.values()))}: no line to draw; give the log.jsonl of runs.")
    x = "epoch" if all("epoch" in row for rows in runs.values() for row in rows) else "update"
    evaluations = {name: [row["eval"] | {x: row[x]} for row in rows if "eval" in row] for name, rows in runs.items()}
    found = [g for g in GROUP_NAMES if any(row.get(g) is not None for rows in evaluations.values() for row in rows)]
    alone = len(runs) == 1
    panels = ["loss", "lr", *(["groups"] if alone and found else found)]
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, (3.3 if columns > 1 else 2.2) * lines)
    axes = {panel: figure.add_subplot(lines, columns, i) for i, panel in enumerate(panels, start=1)}
    plain(axes["loss"], x, "training loss")
    plain(axes["lr"], x, "learning rate")
    for panel in panels[2:]:
        plain(axes[panel], x, "accuracy (%)", None if panel == "groups" else GROUP_NAMES[panel])

    for i, (name, rows) in enumerate(runs.items()):
        look = {"color": PALETTE[i % len(PALETTE)], "linestyle": _LINES[i // len(PALETTE) % len(_LINES)]}
        _draw_loss(axes["loss"], *_series(rows, x, "loss"), shorten(name, 40), look)
        axes["lr"].plot(*_series(rows, x, "lr"), **look)
        for group in found:
            xs, shares = _series(evaluations[name], x, group)
            if alone:
                colour, marker = GROUP_COLOURS[group], GROUP_MARKERS[group]
                axes["groups"].plot(xs, 100 * shares, color=colour, marker=marker, ms=4, label=GROUP_NAMES[group])
            else:
                axes[group].plot(xs, 100 * shares, marker="o", markersize=3, **look)
    for panel in panels[1:]:
        axes[panel].set_ylim(bottom=0)
    if alone and found:
        axes["groups"].legend(frameon=False, ncols=2)
    if not alone:
        for text in figure.legend(loc="outside lower center", ncols=min(3, len(runs)), frameon=False).get_texts():
            text.set_parse_math(False)
    return save(figure, path, vector=True)


def _series(rows: Sequence[Mapping], x: str, y: str) -> list[np.ndarray]:
    """Return two columns of a log, without the rows that have no `y`."""
    found = [row for row in rows if row.get(y) is not None]
    return [np.array([row[name] for row in found], dtype=float) for name in (x, y)]


def _draw_loss(ax: Axes, xs: np.ndarray, ys: np.ndarray, label: str, look: dict) -> None:
    """Plot the running mean of the loss over the faint loss itself; a short log is drawn as it is."""
    window = len(ys) // 25
    if window < 3:
        ax.plot(xs, ys, label=label, **look)
        return
    ax.plot(xs, ys, color=look["color"], alpha=0.25, linewidth=0.8)
    ax.plot(xs[window - 1 :], np.convolve(ys, np.ones(window) / window, "valid"), label=label, **look)
    # Mixed batches make a few losses tower above the rest: they may leave the picture.
    low, high = np.nanquantile(ys, [0, 0.995])
    bottom, top = ax.get_ylim()
    first = len(ax.lines) == 2
    ax.set_ylim(low if first else min(bottom, low), (1.02 * high) if first else max(top, 1.02 * high))


def sweep_plot(rows: Sequence[Mapping], path: str | Path, xlabel: str, title: str | None = None) -> Path:
    """Plot accuracies over a swept option, overall and by group, with bars of one standard deviation.

    A row has its `variant` and its `accuracy`, `many`, `medium` and `few` in percent, None where there is none. It may
    also have their deviations (`accuracy_deviation` and so on) and, as `paper`, the same numbers of the paper, which
    are drawn hollow. Variants that are all numbers keep their distances and are joined by lines; words are named
    beside horizontal bars.
    """
    labels = [str(row["variant"]) for row in rows]
    groups = [name for name in GROUP_NAMES if any(row.get(name) is not None for row in rows)]
    if not groups:
        raise LiVTError("no row has an accuracy; run the sweep before drawing it.")
    values = _numbers(labels)
    if values is None:
        figure = new_figure(6, 1.2 + len(rows) * (0.14 * len(groups) + 0.16))
        ax = plain(figure.add_subplot(), "accuracy (%)", "", title)
        _draw_bars(ax, rows, groups)
    else:
        figure = new_figure(max(6, min(12, 0.9 * len(rows) + 2.5)), 4.2)
        ax = plain(figure.add_subplot(), xlabel, "accuracy (%)", title)
        _draw_lines(ax, rows, groups, np.array(values, dtype=float))
    handles, names = ax.get_legend_handles_labels()
    if any(row.get("paper") for row in rows):
        handles.append(
            Line2D([], [], marker="o", markerfacecolor="none", markersize=10, color="0.3", linestyle="none")
        )
        names.append("paper")
    side = "outside right center" if values else "outside lower center"
    figure.legend(handles, names, loc=side, ncols=1 if values else len(names), frameon=False)
    return save(figure, path)


def _draw_lines(ax: Axes, rows: Sequence[Mapping], groups: Sequence[str], xs: np.ndarray) -> None:
    """Draw a line for each group over variants that are numbers."""
    for name in groups:
        colour, marker = GROUP_COLOURS[name], GROUP_MARKERS[name]
        deviation = np.nan_to_num(_column(rows, f"{name}_deviation"))
        look = dict(color=colour, marker=marker, markersize=6, capsize=3, label=GROUP_NAMES[name])
        ax.errorbar(xs, _column(rows, name), yerr=deviation, **look)
        ax.plot(xs, _paper(rows, name), marker, markerfacecolor="none", markeredgecolor=colour, markersize=10)
    if xs.min() > 0 and xs.max() / xs.min() >= 50:
        ax.set_xscale("log")
    elif np.diff(np.unique(xs)).min() >= 0.06 * np.ptp(xs):  # labels at the values themselves, where they fit
        ax.set_xticks(xs, [f"{x:g}" for x in xs])


def _draw_bars(ax: Axes, rows: Sequence[Mapping], groups: Sequence[str]) -> None:
    """Draw a bar for each group beside the name of each variant, from top to bottom."""
    height, ys = 0.84 / len(groups), np.arange(len(rows), dtype=float)
    for i, name in enumerate(groups):
        shifted, colour = ys + height * (i - (len(groups) - 1) / 2), GROUP_COLOURS[name]
        deviation = np.nan_to_num(_column(rows, f"{name}_deviation"))
        error = dict(xerr=deviation, error_kw=dict(ecolor="0.5", capsize=2)) if deviation.any() else {}
        ax.barh(shifted, _column(rows, name), 0.9 * height, color=colour, label=GROUP_NAMES[name], **error)
        ax.plot(_paper(rows, name), shifted, "o", markerfacecolor="none", markeredgecolor=colour, markersize=6)
    ax.set_yticks(ys, [shorten(str(row["variant"]), 32) for row in rows], parse_math=False)
    ax.set_ylim(len(rows) - 0.4, -0.6)


def _paper(rows: Sequence[Mapping], name: str) -> np.ndarray:
    """Return the numbers of the paper for a group."""
    return _column([row.get("paper") or {} for row in rows], name)


def _shift_name(imbalance: float) -> str:
    if abs(imbalance) == 1:
        return "balanced"
    return f"{abs(imbalance):g} {'forward' if imbalance > 0 else 'backward'}"


def _rules(shifts: Sequence[Mapping]) -> list[str]:
    return list(dict.fromkeys(name for shift in shifts for name in shift["rules"]))


def shift_rows(shifts: Sequence[Mapping]) -> list[dict]:
    """Return a row per test set with the accuracy of each rule; a dash where no prior could be estimated."""
    return [
        {"test set": _shift_name(shift["imbalance"]), "images": shift["num_images"]}
        | {LABELS[name]: format_percent(shift["rules"].get(name, {}).get("accuracy")) for name in _rules(shifts)}
        for shift in shifts
    ]


def accuracy_by_shift(shifts: Sequence[Mapping], path: str | Path) -> Path:
    """Plot the accuracy on every test set, one line per rule, from the `shifted` sets of `evaluation.json`."""
    figure = new_figure(4.8, 4)
    ax = plain(figure.add_subplot(), xlabel="imbalance of the test set", ylabel="accuracy (%)")
    for name, marker, colour in zip(_rules(shifts), itertools.cycle("os^Dv"), itertools.cycle(PALETTE), strict=False):
        shares = _column([shift["rules"].get(name, {}) for shift in shifts], "accuracy")
        places = np.flatnonzero(~np.isnan(shares))
        ax.plot(places, 100 * shares[places], marker=marker, color=colour, label=LABELS[name], alpha=0.85)
    ax.set_xticks(range(len(shifts)), [_shift_name(shift["imbalance"]) for shift in shifts], rotation=30, ha="right")
    ax.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return save(figure, path, vector=True)


def trade_off(
    path: str | Path, chosen_on: Sequence[Mapping] = (), exponent: float | None = None, test: Sequence[Mapping] = ()
) -> Path:
    """Plot accuracy against mean class accuracy over the exponent t of the deployment prior pi^t.

    Args:
        path: the picture.
        chosen_on: the curve on out-of-sample posteriors of training images, by which `exponent` was chosen.
        exponent: the chosen t.
        test: the same curve on the test images, a check that chooses nothing.
    """
    figure = new_figure(4.8, 3.6)
    ax = plain(figure.add_subplot(), "mean class accuracy (%)", "accuracy (%)")
    for curve, label, colour, line, side in (
        (chosen_on, "training images, out of sample", BLUE, "-", 8),
        (test, "test images (check)", VERMILLION, "--", -15),
    ):
        if not curve:
            continue
        xs, ys = (100 * _column(curve, name) for name in ("mean_class_accuracy", "accuracy"))
        ax.plot(xs, ys, line, color=colour, label=label, marker="o", markersize=3)
        for row in (0, -1):
            name = f"t = {curve[row]['exponent']:g}"
            ax.annotate(name, (xs[row], ys[row]), (0, side), textcoords="offset points", fontsize=9, ha="center")
        if exponent is not None:
            place = int(np.abs(_column(curve, "exponent") - exponent).argmin())
            ax.plot(xs[place], ys[place], "D", color=colour, markersize=9, markerfacecolor="none", markeredgewidth=2)
    if exponent is not None:
        ax.plot([], [], "D", color="black", markerfacecolor="none", label=f"chosen, t = {exponent:g}")
    ax.margins(0.12)
    for axis in (ax.xaxis, ax.yaxis):  # ten points at least: noise must not look like a trade-off
        low, high = axis.get_view_interval()
        middle, half = (low + high) / 2, max((high - low) / 2, 5)
        axis.set_view_interval(middle - half, middle + half, ignore=True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return save(figure, path, vector=True)


def _numbers(labels: list[str]) -> list[float] | None:
    """Return the labels as numbers if they are at least two different ones, else None."""
    if len(set(labels)) < 2 or not all(re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", label) for label in labels):
        return None
    return [float(label) for label in labels]


def _column(rows: Sequence[Mapping], name: str) -> np.ndarray:
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], dtype=float)
