"""Tables in Markdown, and pages rendered by Jinja templates: one HTML file that needs nothing but itself."""

import base64
import html
import mimetypes
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from livt_hf.errors import LiVTError
from livt_hf.reports import files
from livt_hf.text import format_percent

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")


def _format_cell(value: object) -> str:
    """Return a value as text: a dash for None, floats to four figures."""
    if value is None:
        return "-"
    if isinstance(value, Real) and not isinstance(value, bool | int):
        return f"{float(value):.4g}"
    return str(value)


def _columns_of(rows: Sequence[Mapping]) -> list[tuple[str, bool]]:
    """Return the columns of a table in the order of their first appearance, and whether each holds text."""

    def is_text(cell: object) -> bool:
        return isinstance(cell, str) and cell != "-" and not _NUMBER.fullmatch(cell)

    names = dict.fromkeys(name for row in rows for name in row)
    return [(name, any(is_text(row.get(name)) for row in rows)) for name in names]


def escape_markdown(text: str) -> str:
    """Escape a text for Markdown. An underscore between letters, as in `bal_bce`, needs no escape."""
    return re.sub(r"[\\`*\[\]|$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", html.escape(text, quote=False))


def markdown_table(rows: Sequence[Mapping]) -> str:
    """Render rows as a Markdown table with one column per key, in the order in which the keys first appear.

    Example:
        >>> print(markdown_table([{"loss": "ce", "accuracy": 0.25}]))
        | loss | accuracy |
        | --- | ---: |
        | ce | 0.25 |
        <BLANKLINE>
    """
    columns = _columns_of(rows)
    if not columns:
        return ""

    def line(cells: list[str]) -> str:
        return f"| {' | '.join(escape_markdown(cell).replace(chr(10), ' ') for cell in cells)} |"

    rule = "|" + "|".join(" --- " if is_text else " ---: " for _, is_text in columns) + "|"
    body = [line([_format_cell(row.get(name)) for name, _ in columns]) for row in rows]
    return "\n".join([line([name for name, _ in columns]), rule, *body]) + "\n"


def _data_url(path: str | Path) -> str:
    """Return a picture as a data URL."""
    kind = mimetypes.guess_type(str(path))[0]
    if kind is None or not kind.startswith("image/"):
        raise LiVTError(f"{path} is not a picture that a browser shows; save it as .png or .svg.")
    return f"data:{kind};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


def render(template: str, **context) -> str:
    """Render a template of this package."""
    environment = Environment(
        loader=PackageLoader("livt_hf.reports"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _format_cell, "data_url": _data_url, "percent": format_percent}
    environment.filters |= {"markdown": escape_markdown, "markdown_table": markdown_table}
    environment.globals["columns_of"] = _columns_of
    return environment.get_template(template).render(**context)


def write_page(
    folder: str | Path,
    title: str,
    tables: Mapping[str, Sequence[Mapping]],
    pictures: Mapping[str, Sequence[str | Path]],
    *,
    lead: str = "",
    verdict: object = None,
) -> Path:
    """Write `report.html` into a folder: the first table, the pictures, then the other tables, all inside one file.

    Args:
        folder: where the page goes.
        title: heading of the page.
        tables: rows by heading; more than 50 rows start folded.
        pictures: files by caption; several stand side by side.
        lead: first sentence of the page.
        verdict: a `Verdict`, which opens the page.

    Returns:
        The page.
    """
    page = render("page.html", title=title, tables=tables, pictures=pictures, lead=lead, verdict=verdict)
    path = Path(folder) / files.PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
