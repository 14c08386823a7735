"""Shared style of all figures: a palette for colour-blind readers, group colours, saving.

Figures are made directly (`matplotlib.figure.Figure`), never through pyplot: no backend is chosen, no window opened,
no global list of figures grows, and pictures can be drawn from any thread.
"""

import functools
import html
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.text import Text

from livt_hf.text import escape_controls

# Okabe and Ito's colours but for yellow, which is too pale for a line.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
DPI = 120
NAMED = 40  # up to so many classes have room for a bar and a name each
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
# Fonts of Linux and macOS with East Asian letters, which matplotlib's own font lacks.
EAST_ASIAN = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "PingFang SC")
EAST_ASIAN += ("Hiragino Sans", "Apple SD Gothic Neo")

# Colour is never the only sign: each group has a marker of its own too.
GROUP_COLOURS = {"accuracy": BLACK, "many": BLUE, "medium": GREEN, "few": VERMILLION}
GROUP_MARKERS = {"accuracy": "o", "many": "s", "medium": "^", "few": "D"}
_PAGE_COLOURS = {"#000000": "currentColor", "#e6e6e6": "var(--line)", "#ffffff": "var(--paper)"}
_PAGE_COLOURS |= {BLUE: "var(--blue)", GREEN: "var(--green)", VERMILLION: "var(--red)"}
GROUP_NAMES = {"accuracy": "all", "many": "many", "medium": "medium", "few": "few"}


def new_figure(width: float, height: float) -> Figure:
    """Create a white figure of this size in inches, with a layout that avoids overlaps."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Figure, path: str | Path, vector: bool = False) -> Path:
    """Write the figure in the format of the path's suffix and return the path; the folder is made.

    With `vector` an SVG is written beside it, with its text as text: pages show that.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(Text):
        if not text.get_text().isascii():
            text.set_fontfamily(font_families())
    figure.savefig(path, dpi=DPI)
    if vector:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None}, transparent=True)
    return path


def read_svg(path: Path, title: str) -> str:
    """Return a saved SVG to stand inside a page: in the page's font, and in colours that follow light and dark."""
    text = "<svg" + path.read_text(encoding="utf-8").partition("<svg")[2]
    text = re.sub(r'<metadata>.*?</metadata>| xmlns(:xlink)?="[^"]*"', "", text, flags=re.DOTALL)
    text = re.sub(r'font: [^;"]*?([\d.]+px)[^;"]*', r"font-size: \1", text)
    text = re.sub(r'font-family: [^;"]*(; )?', "", text)
    for colour, name in _PAGE_COLOURS.items():
        text = re.sub(colour, name, text, flags=re.IGNORECASE)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{html.escape(title)}"', text, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)


@functools.cache
def font_families() -> list[str]:
    """Return the default font, followed by fonts of this machine with more letters."""
    known = set(get_font_names())
    return ["sans-serif", *(name for name in EAST_ASIAN if name in known)]


def plain(ax: Axes, xlabel: str = "", ylabel: str = "", title: str | None = None) -> Axes:
    """Style axes without a box, with a faint grid; titles are never parsed as mathematics."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if title:
        ax.set_title(title, loc="left", fontsize=11, parse_math=False)
    return ax


def shorten(text: object, length: int) -> str:
    """Shorten a long text in the middle: species names tend to differ at their ends."""
    text = escape_controls(str(text))
    if len(text) <= length:
        return text
    front = (length - 1) // 2
    return f"{text[:front]}…{text[len(text) - (length - 1 - front) :]}"


def shade_groups(ax: Axes, groups: Sequence[str]) -> None:
    """Shade stretches of the x axis where classes, in their order along it, belong to many, medium or few."""
    starts = [0] + [i for i in range(1, len(groups)) if groups[i] != groups[i - 1]] + [len(groups)]
    for low, high in zip(starts[:-1], starts[1:], strict=True):
        name = groups[low]
        ax.axvspan(low - 0.5, high - 0.5, color=GROUP_COLOURS[name], alpha=0.09, linewidth=0)
        # A stretch too narrow for its words goes without: 6 % of the axis holds "medium" and its number.
        if high - low >= 0.06 * len(groups):
            label = f"{name}\n{high - low:,}"
            ax.text((low + high) / 2 - 0.5, 1.01, label, transform=ax.get_xaxis_transform(), ha="center", va="bottom")
            ax.texts[-1].set(color=GROUP_COLOURS[name], fontsize=9)


def label_classes(ax: Axes, names: Sequence[object]) -> None:
    """Name the classes under the axis when there is room for all of them."""
    ax.set_xlim(-0.5, len(names) - 0.5)
    if len(names) > NAMED:
        ax.set_xlabel("class, by number of training images")
        return
    labels = [shorten(name, 18) for name in names]
    crowded = len(labels) * (max(map(len, labels)) + 1) > 90  # letters beside each other on one line
    ax.set_xticks(range(len(labels)), labels, rotation=90 if crowded else 0, parse_math=False)
    ax.tick_params(axis="x", labelsize=9)
