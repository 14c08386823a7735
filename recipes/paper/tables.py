"""Write the tables of README.md, results/README.md and configs/README.md from the result files in recipes/results.

    python recipes/paper/tables.py            # rewrites them between their markers
    python recipes/paper/tables.py --check    # fails where they are out of date

A marker says what goes before its closing one: `<!-- results cifar100-lt/losses -->` the sweeps it names,
`<!-- short from scratch: cifar100-lt/losses; a head: cifar100-lt/head ce bal_bce -->` one table of several sweeps, or
of some of their variants, under words of yours,
`<!-- benchmark MGP input; BFT -->` the questions that begin so; without names all.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from livt_hf.files import read_values
from livt_hf.metrics import GROUPS
from livt_hf.recipes.ablations import table_rows
from livt_hf.recipes.benchmarks.measuring import ratio_words
from livt_hf.recipes.benchmarks.race import race_table
from livt_hf.reports import markdown_table

RECIPES = Path(__file__).parents[1]
RESULTS = RECIPES / "results"
PAGES = (RECIPES.parent / "README.md", RESULTS / "README.md", RECIPES / "configs" / "README.md")


def results_section(which: str, page: Path) -> str:
    """One table per sweep: results/<dataset>/<sweep>.json, as `livt sweep` writes it, or with a `table` as it is."""
    paths = [RESULTS / f"{name}.json" for name in which.split()] or sorted(RESULTS.glob("*/*.json"))
    parts = []
    for path in paths:
        sweep = read_values(path)
        parts.append(f"**{sweep['title']}**, {path.parent.name}: {sweep['budget']}")
        parts.append(f"`{sweep['command']}`")
        rows = sweep["table"] if "table" in sweep else table_rows(sweep["rows"])
        parts.append(markdown_table(rows).strip())
        parts += _picture(path, page, 420, sweep["title"])
    return "\n\n".join(parts)


def short_section(which: str, _page: Path) -> str:
    """Several sweeps, or some variants of each, in one table."""
    rows = []
    for part in which.split(";"):
        words, chosen = (text.strip() for text in part.rsplit(":", 1))
        name, *variants = chosen.split()
        table = table_rows(read_values(RESULTS / f"{name}.json")["rows"])
        for row in [row for row in table if row["variant"] in variants or not variants]:
            groups = {group: row[group].split(" ")[0] for group in GROUPS}
            first = {"images and model": words, "loss": row["variant"], "accuracy": row["accuracy"]}
            rows.append(first | groups | {"posterior rule": row["posterior rule"]})
            words = ""
    return markdown_table(rows).strip()


def _picture(path: Path, page: Path, width: int, words: str) -> list[str]:
    """The picture beside a result file, if there is one."""
    picture = path.with_suffix(".png")
    address = Path(os.path.relpath(picture, page.parent)).as_posix()
    return [f'<img src="{address}" width="{width}" alt="{words}">'] if picture.exists() else []


def benchmark_section(which: str, _page: Path) -> str:
    path = RESULTS / "benchmark.json"
    wanted = tuple(question.strip() for question in which.split(";"))  # every question begins with ""
    rows = [
        {"question": row["question"], "peer": row["peer_name"], "ratio": ratio_words(row)}
        for row in (read_values(path) if path.exists() else ())
        if row["ratio"] is not None and row["question"].startswith(wanted)
    ]
    return markdown_table(rows).strip() if rows else ""


def scale_section(_which: str, _page: Path) -> str:
    path = RESULTS / "scale.json"
    return markdown_table(read_values(path)["table"]).strip() if path.exists() else ""


def race_section(_which: str, page: Path) -> str:
    """The rows of `recipes/benchmarks/run.py race --output recipes/results/race.json`, and its picture."""
    path = RESULTS / "race.json"
    if not path.exists():
        return ""
    table = markdown_table(race_table(read_values(path))).strip()
    return "\n\n".join([table, *_picture(path, page, 560, "accuracy over core-minutes")])


SECTIONS = {
    "results": results_section,
    "short": short_section,
    "race": race_section,
    "benchmark": benchmark_section,
    "scale": scale_section,
}


def render(text: str, page: Path) -> str:
    def filled(match: re.Match) -> str:
        section = SECTIONS[match["name"]](match["which"], page)
        return match["start"] + (section + "\n" if section else "") + match["end"]

    name = "|".join(SECTIONS)
    marked = re.compile(
        rf"(?P<start><!-- (?P<name>{name})(?P<which>[^>]*) -->\n).*?(?P<end><!-- /(?P=name) -->)", re.DOTALL
    )
    return marked.sub(filled, text)


def main(argv: Sequence[str] | None = None) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    stale = [page for page, text in texts.items() if render(text, page) != text]
    if "--check" in (sys.argv[1:] if argv is None else argv):
        names = ", ".join(page.relative_to(RECIPES.parent).as_posix() for page in stale)
        sys.exit(f"{names}: out of date; run python recipes/paper/tables.py" if stale else 0)
    for page in stale:
        page.write_text(render(texts[page], page), encoding="utf-8")


if __name__ == "__main__":
    main()
