"""Curves: of training runs over time, and of results over a swept setting."""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from .style import GROUP_COLOURS, GROUP_MARKERS, GROUP_NAMES, PALETTE, new_figure, plain, save, shorten

_LINES = ("-", "--", ":", "-.")


def read_log(path: str | Path) -> list[dict]:
    """The lines of a log.jsonl in the order of training.

    A resumed run repeats updates its interrupted part had logged: the later line counts. A last line that a killed
    process left unfinished is dropped.
    """
    lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
    rows: dict[tuple[bool, int], dict] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {path} is not JSON; mend or remove it.") from error
        if "update" in row:
            rows[("eval" in row, row["update"])] = row
    return sorted(rows.values(), key=lambda row: row["update"])


def training_curves(logs: Mapping[str, str | Path], path: str | Path) -> Path:
    """Loss, learning rate and accuracies of one or several runs from their log.jsonl.

    One run: its groups share a panel. Several: a panel a group, a colour and line style a run.
    """
    runs = {name: read_log(log) for name, log in logs.items()}
    if not any(runs.values()):
        raise ValueError(
            f"no line with an update in {[str(log) for log in logs.values()]}; give the log.jsonl of runs."
        )
    by_epoch = all("epoch" in row for rows in runs.values() for row in rows)
    x, xlabel = ("epoch", "epoch") if by_epoch else ("update", "update")
    evaluations = {name: [row for row in rows if "eval" in row] for name, rows in runs.items()}
    found = [g for g in GROUP_NAMES if any(row["eval"].get(g) is not None for e in evaluations.values() for row in e)]
    if len(runs) == 1:
        panels = ["loss", "lr"] + (["groups"] if found else [])
    else:
        panels = ["loss", "lr", *found]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, 3.3 * lines)
    axes = {panel: figure.add_subplot(lines, columns, i) for i, panel in enumerate(panels, start=1)}
    plain(axes["loss"], xlabel, "training loss")
    plain(axes["lr"], xlabel, "learning rate")
    for panel in panels[2:]:
        plain(axes[panel], xlabel, "accuracy (%)", None if panel == "groups" else GROUP_NAMES[panel])

    for i, (name, rows) in enumerate(runs.items()):
        look = {"color": PALETTE[i % len(PALETTE)], "linestyle": _LINES[i // len(PALETTE) % len(_LINES)]}
        label = shorten(name, 40)
        losses = [(row[x], row["loss"]) for row in rows if row.get("loss") is not None]
        _draw_loss(axes["loss"], losses, label, look)
        rates = [(row[x], row["lr"]) for row in rows if row.get("lr") is not None]
        axes["lr"].plot(*_columns(rates), **look)
        for group in found:
            points = [(r[x], 100 * r["eval"][group]) for r in evaluations[name] if r["eval"].get(group) is not None]
            if len(runs) == 1:
                colour, marker = GROUP_COLOURS[group], GROUP_MARKERS[group]
                axes["groups"].plot(*_columns(points), color=colour, marker=marker, ms=4, label=GROUP_NAMES[group])
            else:
                axes[group].plot(*_columns(points), marker="o", markersize=3, **look)
    for panel in panels[1:]:
        axes[panel].set_ylim(bottom=0)
    if len(runs) == 1 and found:
        axes["groups"].legend(frameon=False, ncols=2)
    if len(runs) > 1:
        for text in figure.legend(loc="outside lower center", ncols=min(3, len(runs)), frameon=False).get_texts():
            text.set_parse_math(False)
    return save(figure, path)


def _columns(points: list[tuple]) -> tuple[list, list]:
    return [a for a, _ in points], [b for _, b in points]


def _draw_loss(ax: Axes, points: list[tuple], label: str, look: dict) -> None:
    """The loss as logged, faint, under its running mean; a short log is drawn as it is."""
    xs, ys = (np.array(column, dtype=float) for column in _columns(points))
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


def sweep_plot(
    values: Sequence,
    means: Mapping[str, Sequence[float | None]],
    path: str | Path,
    *,
    deviations: Mapping[str, Sequence[float | None]] | None = None,
    paper: Mapping[str, Sequence[float | None]] | None = None,
    xlabel: str = "",
    ylabel: str = "accuracy (%)",
    title: str | None = None,
) -> Path:
    """Results over a swept setting: a line for all and for each group, bars of one standard deviation over seeds.

    `means`, `deviations` and `paper` map "accuracy", "many", "medium", "few" (others too) to a fraction a value, None
    where there is none. Numbers on the x axis keep their distances, words stand side by side. Numbers of the paper
    are hollow.
    """
    for name, series in [*means.items(), *(deviations or {}).items(), *(paper or {}).items()]:
        if len(series) != len(values):
            raise ValueError(
                f"{name!r} has {len(series)} results for {len(values)} values; give None where one lacks."
            )
    numeric = all(isinstance(v, Real) and not isinstance(v, bool) for v in values) and len(set(values)) > 1
    xs = np.array(values, dtype=float) if numeric else np.arange(len(values))
    figure = new_figure(max(6, min(12, 0.9 * len(values) + 2.5)), 4.2)
    ax = plain(figure.add_subplot(), xlabel, ylabel, title)
    fallback = iter([c for c in PALETTE if c not in GROUP_COLOURS.values()] * 3)
    drawn = list(means)
    for place, name in enumerate(drawn):
        colour, marker = GROUP_COLOURS.get(name) or next(fallback), GROUP_MARKERS.get(name, "v")
        # Words have room beside each other, so that bars of deviation do not lie over one another.
        shift = 0 if numeric else 0.12 * (place - (len(drawn) - 1) / 2)
        ours, spread = _percent(means[name]), _percent((deviations or {}).get(name, [None] * len(values)))
        line = {"linestyle": "-"} if numeric else {"linestyle": "none"}
        ax.errorbar(
            xs + shift, ours, yerr=np.nan_to_num(spread), color=colour, marker=marker, markersize=6, capsize=3,
            label=GROUP_NAMES.get(name, name), **line,
        )  # fmt: skip
        if paper and name in paper:
            hollow = {"markerfacecolor": "none", "markeredgecolor": colour, "markersize": 9, "linestyle": "none"}
            ax.plot(xs + shift, _percent(paper[name]), marker=marker, **hollow)
    if paper:
        ax.plot([], [], "o", markerfacecolor="none", markeredgecolor="0.3", markersize=9, label="paper")
    if not numeric:
        labels = [shorten(value, 24) for value in values]
        crowded = len(labels) * max(map(len, labels)) > 70
        ax.set_xticks(xs, labels, rotation=30 if crowded else 0, ha="right" if crowded else "center", parse_math=False)
        ax.set_xlim(-0.5, len(values) - 0.5)
        ax.vlines(xs[1:] - 0.5, 0, 1, transform=ax.get_xaxis_transform(), color="0.93", linewidth=1, zorder=0)
    elif xs.min() > 0 and xs.max() / xs.min() >= 50:
        ax.set_xscale("log")
    elif np.diff(np.unique(xs)).min() >= 0.06 * np.ptp(xs):  # labels at the values themselves, where they fit
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
    handles, labels = ax.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i] == "paper")
    figure.legend([handles[i] for i in order], [labels[i] for i in order], loc="outside right center", frameon=False)
    return save(figure, path)


def _percent(series: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else 100 * value for value in series])
