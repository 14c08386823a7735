"""The most probable classes as bars in HTML: one panel per decision rule, each class in the colour of its group."""

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from livt_hf.reports.style import GROUP_COLOURS

STYLE = """
.panels { display: flex; flex-wrap: wrap; gap: 1rem; }
.panel { flex: 1 1 12rem; min-width: 0; }
.panel h4 { margin: 0; font-size: 1rem; }
.panel p { margin: 0 0 .4rem; font-size: .8rem; opacity: .75; min-height: 2.4em; }
.bar { margin: .35rem 0; }
.bar .words { display: flex; justify-content: space-between; gap: .5rem; font-size: .9rem; }
.bar .words span { white-space: nowrap; }
.bar .name { overflow: hidden; text-overflow: ellipsis; }
.bar .track { background: rgba(128, 128, 128, .18); border-radius: 3px; }
.bar .fill { height: .6rem; border-radius: 3px; min-width: 1px; }
.bar .note { font-size: .75rem; opacity: .75; }
@media (max-width: 600px) { .panel:last-child { order: -1; } }  /* a phone shows first what the slider moves */
"""
PLAIN = "#777777"  # of a model that does not know how many training images a class had


class Bar(NamedTuple):
    name: str
    value: float
    group: str | None = None
    note: str = ""


def panels(content: Mapping[str, tuple[str, Sequence[Bar]]]) -> str:
    """Title -> (what the numbers are, bars)."""
    return f'<div class="panels">{"".join(_panel(title, *rest) for title, rest in content.items())}</div>'


def _panel(title: str, words: str, bars: Sequence[Bar]) -> str:
    inside = "".join(map(_bar, bars))
    return f'<div class="panel"><h4>{html.escape(title)}</h4><p>{html.escape(words)}</p>{inside}</div>'


def _bar(bar: Bar) -> str:
    name, note = html.escape(bar.name), html.escape(bar.note)
    colour = GROUP_COLOURS.get(bar.group, PLAIN)
    return (
        f'<div class="bar" data-value="{bar.value:.6f}"><div class="words"><span class="name" title="{name}">{name}'
        f'</span><span>{100 * bar.value:.1f} %</span></div><div class="track"><div class="fill" '
        f'style="width: {100 * bar.value:.2f}%; background: {colour}"></div></div>'
        f'<div class="note">{note}</div></div>'
    )
