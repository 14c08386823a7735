"""Plot the two logit biases of the paper: Theorem 1 (softmax losses) and Theorem 3 (sigmoid losses)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from livt_hf.reports.classes import BCE_LINE, CE_LINE, logit_biases
from livt_hf.reports.style import ORANGE, new_figure, plain, save


def bias_curves(path: str | Path, num_classes: int = 1000) -> Path:
    """Plot both biases over the training prior pi of a class (Fig. "val-ce-bce"); they differ for large classes."""
    # A class with share pi against the rest in equal parts, in units of 1e-9 of the images.
    shares = np.concatenate([np.geomspace(1e-5, 0.5, 120), np.linspace(0.5, 0.999, 80)[1:]])
    others = num_classes - 1
    mine = [round(share * 10**9 * others) for share in shares]
    counts = [np.array([count] + [(10**9 * others - count) // others] * others) for count in mine]
    ce, bce = zip(*((ce[0], bce[0]) for ce, bce in map(logit_biases, counts)), strict=True)
    figure = new_figure(9, 3.8)
    for position, scale in enumerate(("linear", "log"), start=1):
        ax = plain(figure.add_subplot(1, 2, position), xlabel="training prior π of the class", ylabel="logit bias")
        ax.plot(shares, bce, **BCE_LINE)
        ax.plot(shares, ce, **CE_LINE)
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
    biases = [logit_biases((5000 * gamma ** (-ranks / 9)).astype(np.int64)) for gamma in gammas]
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
        wide = ax.plot(ranks, bce, **BCE_LINE)
        dashed = ax.plot(ranks, ce, **CE_LINE)
        ax.set_xticks(ranks)
        ax.set_ylim(-limit, limit)
        right.set_ylim(-right_limit, right_limit)  # both axes have their zero in the middle
        ax.tick_params(labelleft=position == 1)
        right.tick_params(labelright=position == len(gammas))
        ax.set_ylabel("logit bias" if position == 1 else "")
        right.set_ylabel("difference" if position == len(gammas) else "")
    figure.legend(handles=[*wide, *dashed, bars], loc="outside lower center", ncols=3, frameon=False)
    return save(figure, path)
