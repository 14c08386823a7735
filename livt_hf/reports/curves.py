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
from livt_hf.reports.style import GROUP_COLOURS, GROUP_MARKERS, GROUP_NAMES, PALETTE, new_figure, plain, save, shorten
from livt_hf.text import format_percent

_LINES = ("-", "--", ":", "-.")


def training_curves(logs: Mapping[str, str | Path], path: str | Path) -> Path:
    """Plot loss, learning rate and accuracies of one or several runs from their log.jsonl.

    The groups of one run share a panel. Several runs have one panel per group, and each run has its colour and line.
    """
    runs = {name: read_log(log) for name, log in logs.items()}
    if not any(runs.values()):
        raise LiVTError(f"{', '.join(map(str, logs.values()))}: no line to draw; give the log.jsonl of runs.")
    x = "epoch" if all("epoch" in row for rows in runs.values() for row in rows) else "update"
    evaluations = {name: [row["eval"] | {x: row[x]} for row in rows if "eval" in row] for name, rows in runs.items()}
    found = [g for g in GROUP_NAMES if any(row.get(g) is not None for rows in evaluations.values() for row in rows)]
    alone = len(runs) == 1
    panels = ["loss", "lr", *(["groups"] if alone and found else found)]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, 3.3 * lines)
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
    return save(figure, path)


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
    are drawn hollow. Variants that are all numbers keep their distances and are joined by lines; words stand side by
    side.
    """
    labels = [str(row["variant"]) for row in rows]
    places = _numbers(labels)
    numeric = places is not None
    xs = np.array(places if numeric else range(len(rows)), dtype=float)
    groups = [name for name in GROUP_NAMES if any(row.get(name) is not None for row in rows)]
    if not groups:
        raise LiVTError("no row has an accuracy; run the sweep before drawing it.")
    figure = new_figure(max(6, min(12, 0.9 * len(rows) + 2.5)), 4.2)
    ax = plain(figure.add_subplot(), xlabel, "accuracy (%)", title)
    for i, name in enumerate(groups):
        colour, marker = GROUP_COLOURS[name], GROUP_MARKERS[name]
        # Words have room beside each other, so that bars of deviation do not lie over one another.
        shifted = xs if numeric else xs + 0.12 * (i - (len(groups) - 1) / 2)
        ax.errorbar(
            shifted, _column(rows, name), yerr=np.nan_to_num(_column(rows, f"{name}_deviation")), color=colour,
            marker=marker, markersize=6, capsize=3, linestyle="-" if numeric else "none", label=GROUP_NAMES[name],
        )  # fmt: skip
        theirs = _column([row.get("paper") or {} for row in rows], name)
        ax.plot(shifted, theirs, marker, markerfacecolor="none", markeredgecolor=colour, markersize=10)
    if not numeric:
        short = [shorten(label, 24) for label in labels]
        crowded = len(short) * max(map(len, short)) > 56
        ax.set_xticks(xs, short, rotation=30 if crowded else 0, ha="right" if crowded else "center", parse_math=False)
        ax.set_xlim(-0.5, len(rows) - 0.5)
        ax.vlines(xs[1:] - 0.5, 0, 1, transform=ax.get_xaxis_transform(), color="0.93", linewidth=1, zorder=0)
    elif xs.min() > 0 and xs.max() / xs.min() >= 50:
        ax.set_xscale("log")
    elif np.diff(np.unique(xs)).min() >= 0.06 * np.ptp(xs):  # labels at the values themselves, where they fit
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
    handles, names = ax.get_legend_handles_labels()
    if any(row.get("paper") for row in rows):
        handles.append(
            Line2D([], [], marker="o", markerfacecolor="none", markersize=10, color="0.3", linestyle="none")
        )
        names.append("paper")
    figure.legend(handles, names, loc="outside right center", frameon=False)
    return save(figure, path)


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
    figure = new_figure(8, 4.5)
    ax = plain(figure.add_subplot(), xlabel="imbalance of the test set", ylabel="accuracy (%)")
    for name, marker, colour in zip(_rules(shifts), itertools.cycle("os^Dv"), itertools.cycle(PALETTE), strict=False):
        shares = _column([shift["rules"].get(name, {}) for shift in shifts], "accuracy")
        places = np.flatnonzero(~np.isnan(shares))
        ax.plot(places, 100 * shares[places], marker=marker, color=colour, label=LABELS[name], alpha=0.85)
    ax.set_xticks(range(len(shifts)), [_shift_name(shift["imbalance"]) for shift in shifts], rotation=30, ha="right")
    ax.set_ylim(bottom=0)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return save(figure, path)


def _numbers(labels: list[str]) -> list[float] | None:
    """Return the labels as numbers if they are at least two different ones, else None."""
    if len(set(labels)) < 2 or not all(re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", label) for label in labels):
        return None
    return [float(label) for label in labels]


def _column(rows: Sequence[Mapping], name: str) -> np.ndarray:
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], dtype=float)
