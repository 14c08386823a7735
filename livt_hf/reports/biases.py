"""Plot class sizes and the two logit biases: Theorem 1 (softmax losses) and Theorem 3 (sigmoid losses)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from livt_hf.long_tail.losses import balanced_bce_bias, balanced_ce_bias
from livt_hf.metrics import GROUPS, shot_groups
from livt_hf.reports.style import BLUE, NAMED, ORANGE, VERMILLION, label_classes, new_figure, plain, save, shade_groups

# With many classes the two nearly coincide: thin dashes over a wide line show both.
_CE = {"color": BLUE, "linestyle": "--", "linewidth": 1.6, "label": "softmax losses (Theorem 1)"}
_BCE = {"color": VERMILLION, "linestyle": "-", "linewidth": 3, "label": "sigmoid losses (Theorem 3)"}


def _both(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
        ce, bce = _both(sizes)
        right.plot(ranks, bce, **_BCE)
        right.plot(ranks, ce, **_CE)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)  # balanced classes fill the axes
    return save(figure, path)


def bias_curves(path: str | Path, num_classes: int = 1000) -> Path:
    """Plot both biases over the training prior pi of a class (Fig. "val-ce-bce"); they differ for large classes."""
    # A class with share pi against the rest in equal parts, in units of 1e-9 of the images.
    shares = np.concatenate([np.geomspace(1e-5, 0.5, 120), np.linspace(0.5, 0.999, 80)[1:]])
    others = num_classes - 1
    mine = [round(share * 10**9 * others) for share in shares]
    counts = [np.array([count] + [(10**9 * others - count) // others] * others) for count in mine]
    ce, bce = zip(*((ce[0], bce[0]) for ce, bce in map(_both, counts)), strict=True)
    figure = new_figure(9, 3.8)
    for position, scale in enumerate(("linear", "log"), start=1):
        ax = plain(figure.add_subplot(1, 2, position), xlabel="training prior π of the class", ylabel="logit bias")
        ax.plot(shares, bce, **_BCE)
        ax.plot(shares, ce, **_CE)
        ax.axvline(1 / num_classes, color="0.6", linewidth=1)
        ax.annotate(
            "1/C, no bias", (1 / num_classes, 0.03), xycoords=ax.get_xaxis_transform(), xytext=(4, 0),
            textcoords="offset points", color="0.4", fontsize=9,
        )  # fmt: skip
        ax.set_xscale(scale)
        ax.legend(frameon=False, loc="center right" if scale == "linear" else "upper left")
    figure.suptitle(f"C = {num_classes:,} classes, uniform test prior", x=0.01, ha="left", fontsize=11)
    return save(figure, path)


def bias_by_gamma(path: str | Path, gammas: Sequence[float] = (10, 50, 100, 200)) -> Path:
    """Plot both biases and their difference for CIFAR-10-LT, one panel per imbalance (Fig. "vis-bias")."""
    ranks = np.arange(10)
    # The exponential rule from 5,000 images: int(n_max * gamma^(-i / (C - 1))).
    biases = [_both((5000 * gamma ** (-ranks / 9)).astype(np.int64)) for gamma in gammas]
    limit = 1.15 * max(np.abs(bias).max() for pair in biases for bias in pair)
    right_limit = 1.15 * max(np.abs(bce - ce).max() for ce, bce in biases)
    figure = new_figure(3.2 * len(gammas), 3.6)
    for position, (gamma, (ce, bce)) in enumerate(zip(gammas, biases, strict=True), start=1):
        ax = plain(figure.add_subplot(1, len(gammas), position), "class", title=f"γ = {gamma:g}")
        right = ax.twinx()
        right.spines["top"].set_visible(False)
        bars = right.bar(ranks, bce - ce, width=0.7, color=ORANGE, alpha=0.55, label="difference (right axis)")
        ax.set_zorder(right.get_zorder() + 1)  # lines over bars
        ax.patch.set_visible(False)
        wide = ax.plot(ranks, bce, **_BCE)
        dashed = ax.plot(ranks, ce, **_CE)
        ax.set_xticks(ranks)
        ax.set_ylim(-limit, limit)
        right.set_ylim(-right_limit, right_limit)  # both axes have their zero in the middle
        ax.tick_params(labelleft=position == 1)
        right.tick_params(labelright=position == len(gammas))
        ax.set_ylabel("logit bias" if position == 1 else "")
        right.set_ylabel("difference" if position == len(gammas) else "")
    figure.legend(handles=[*wide, *dashed, bars], loc="outside lower center", ncols=3, frameon=False)
    return save(figure, path)
