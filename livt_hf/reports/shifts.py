"""The picture of shifted test sets: accuracy from forward to backward long tails, one line per rule."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from livt_hf.reports.style import PALETTE, new_figure, plain, save
from livt_hf.results import percent

_MARKERS = "os^Dv"


def shift_name(imbalance: float) -> str:
    if abs(imbalance) == 1:
        return "balanced"
    return f"{abs(imbalance):g} {'forward' if imbalance > 0 else 'backward'}"


def _rules(shifts: Sequence[Mapping]) -> list[str]:
    return list(dict.fromkeys(name for shift in shifts for name in shift["rules"]))


def shift_rows(shifts: Sequence[Mapping]) -> list[dict]:
    """One row per test set: its images and the accuracy of each rule; a dash where no prior could be estimated."""
    return [
        {"test set": shift_name(shift["imbalance"]), "images": shift["num_images"]}
        | {name: percent(shift["rules"].get(name, {}).get("accuracy")) for name in _rules(shifts)}
        for shift in shifts
    ]


def accuracy_by_shift(shifts: Sequence[Mapping], path: str | Path) -> Path:
    """Accuracy on every test set; `shifts` are entries of `evaluation.json`, from forward to backward."""
    figure = new_figure(8, 4.5)
    ax = plain(figure.add_subplot(), xlabel="imbalance of the test set", ylabel="accuracy (%)")
    for number, name in enumerate(_rules(shifts)):
        found = [(place, shift["rules"][name]) for place, shift in enumerate(shifts) if name in shift["rules"]]
        places, values = [place for place, _ in found], [100 * metrics["accuracy"] for _, metrics in found]
        marker = _MARKERS[number % len(_MARKERS)]
        ax.plot(places, values, marker=marker, color=PALETTE[number % len(PALETTE)], label=name, alpha=0.85)
    ax.set_xticks(range(len(shifts)), [shift_name(shift["imbalance"]) for shift in shifts], rotation=30, ha="right")
    ax.set_ylim(bottom=0)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return save(figure, path)
