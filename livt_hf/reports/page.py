"""Results as tables and as one HTML page that needs nothing but itself."""

import base64
import html
import mimetypes
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path

from livt_hf.errors import LiVTError

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th { border-bottom: 2px solid #888; } .text { text-align: left; }
.wide { overflow-x: auto; } details .wide { max-height: 30rem; overflow-y: auto; }
figure { margin: 1.5rem 0; } figcaption { color: #555; margin-bottom: .3rem; }
img { max-width: 100%; height: auto; border: 1px solid #eee; }
.lead { font-size: 1.15rem; } .cards, .halves { display: flex; flex-wrap: wrap; gap: 1rem 2rem; }
.card { flex: 1 1 14rem; border: 1px solid #ddd; border-radius: 4px; padding: .6rem .8rem; font-size: .9rem; }
.card b { font-size: 1.4rem; } .track { background: #eee; margin: .3rem 0; } .track div { height: .5rem; }
.halves > div { flex: 1 1 22rem; min-width: 0; overflow-wrap: anywhere; } li { margin: .3rem 0; }
"""
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
_LONG = 50  # a table of more rows starts folded


def _cell(value: object) -> str:
    """A value as text: a dash where there is none, floats to four figures."""
    if value is None:
        return "-"
    if isinstance(value, Real) and not isinstance(value, bool | int):
        return f"{float(value):.4g}"
    return str(value)


def _columns(rows: Sequence[Mapping]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _is_numeric(rows: Sequence[Mapping], column: str) -> bool:
    """Whether a column holds numbers, also where they are texts with a fixed number of digits."""
    cells = [row.get(column) for row in rows]
    return all(not isinstance(cell, str) or cell == "-" or _NUMBER.fullmatch(cell) for cell in cells)


def plain_markdown(text: str) -> str:
    """A text that Markdown shows as it is. An underscore between letters, as in `bal_bce`, is no markup."""
    return re.sub(r"[\\`*\[\]|$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", html.escape(text, quote=False))


def markdown_table(rows: Sequence[Mapping]) -> str:
    """Rows as a Markdown table with one column per key, in the order in which the keys first appear."""
    columns = _columns(rows)
    if not columns:
        return ""

    def line(cells: list[str]) -> str:
        safe = (plain_markdown(cell).replace("\n", " ") for cell in cells)
        return f"| {' | '.join(safe)} |"

    rule = "|" + "|".join(" ---: " if _is_numeric(rows, c) else " --- " for c in columns) + "|"
    return "\n".join([line(columns), rule, *(line([_cell(row.get(c)) for c in columns]) for row in rows)]) + "\n"


def _html_table(rows: Sequence[Mapping]) -> str:
    columns = _columns(rows)
    kinds = {c: "" if _is_numeric(rows, c) else ' class="text"' for c in columns}
    head = "".join(f"<th{kind}>{html.escape(c)}</th>" for c, kind in kinds.items())

    def line(row: Mapping) -> str:
        cells = (f"<td{kind}>{html.escape(_cell(row.get(c)))}</td>" for c, kind in kinds.items())
        return f"<tr>{''.join(cells)}</tr>"

    lines = "\n".join(map(line, rows))
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>'
    return f"<details><summary>{len(rows):,} rows</summary>{table}</details>" if len(rows) > _LONG else table


def _pictures(caption: str, paths: str | Path | Sequence[str | Path]) -> str:
    """One picture, or several beside each other."""
    if isinstance(paths, str | Path):
        return _picture(caption, paths)
    return f'<div class="halves">{"".join(f"<div>{_picture(caption, path)}</div>" for path in paths)}</div>'


def _picture(caption: str, path: str | Path) -> str:
    kind = mimetypes.guess_type(str(path))[0]
    if kind is None or not kind.startswith("image/"):
        raise LiVTError(f"{path} is not a picture that a browser shows; save it as .png or .svg.")
    data = base64.b64encode(Path(path).read_bytes()).decode()
    caption = html.escape(caption)
    return f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" src="data:{kind};base64,{data}"></figure>'


def html_report(
    folder: str | Path,
    title: str,
    tables: Mapping[str, Sequence[Mapping]],
    pictures: Mapping[str, str | Path | Sequence[str | Path]],
    first: str = "",
) -> Path:
    """Write `report.html` into the folder: tables (heading -> rows) and pictures (caption -> file), all inside it.

    `first` is HTML that comes first of all. The first table leads and the pictures follow; further tables, which may
    have one row per class, come last.
    """
    parts = [f"<h2>{html.escape(heading)}</h2>\n{_html_table(rows)}" for heading, rows in tables.items()]
    parts[1:1] = [_pictures(caption, paths) for caption, paths in pictures.items()]
    body = "\n".join(parts)
    # The policy makes the browser itself refuse anything that is not in this file.
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
{first}
{body}
</body>
</html>
"""
    path = Path(folder) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
