"""Tables in Markdown, and pages rendered by Jinja templates: one HTML file that needs nothing but itself."""

import base64
import hashlib
import html
import mimetypes
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from livt_hf.errors import LiVTError
from livt_hf.reports import files
from livt_hf.reports.style import read_svg
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


def data_url(content: bytes, kind: str) -> str:
    """Return a picture as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _picture(path: str | Path, title: str) -> Markup:
    """Return the markup of a figure: its SVG where it was saved with one, else the picture inside a data URL."""
    path = Path(path)
    if path.with_suffix(".svg").is_file():
        return Markup(read_svg(path.with_suffix(".svg"), title))
    kind = mimetypes.guess_type(str(path))[0]
    if kind is None or not kind.startswith("image/"):
        raise LiVTError(f"{path} is not a picture that a browser shows; save it as .png or .svg.")
    return Markup('<img alt="{}" src="{}">').format(title, data_url(path.read_bytes(), kind))


def _csp_hash(script: str) -> str:
    """Return what a content security policy calls a script that it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def render(template: str, **context) -> str:
    """Render a template of this package."""
    environment = Environment(
        loader=PackageLoader("livt_hf.reports"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _format_cell, "percent": format_percent, "picture": _picture}
    environment.filters |= {"markdown": escape_markdown, "markdown_table": markdown_table, "csp_hash": _csp_hash}
    environment.globals |= {"columns_of": _columns_of, "script": environment.get_template("sort.js").render()}
    return environment.get_template(template).render(**context)


def write_page(folder: str | Path, template: str = "page.html", **context) -> Path:
    """Write `report.html` into a folder: one file that needs nothing but itself.

    Args:
        folder: where the page goes.
        template: "page.html" shows a `title`, a `lead`, `tables` (rows by heading) and `pictures` (lists of files by
            caption, side by side).
        **context: what the template shows.

    Returns:
        The page.
    """
    path = Path(folder, files.PAGE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(template, **{"lead": "", "tables": {}, "pictures": {}} | context), encoding="utf-8")
    return path
