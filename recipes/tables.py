"""Write the tables of README.md from the result files in recipes/results.

python recipes/tables.py            # rewrites README.md between its markers
python recipes/tables.py --check    # fails where it is out of date
"""

import json
import re
import sys
from pathlib import Path

from livt_hf.reports import markdown_table
from livt_hf.sweeps import table_rows

HERE = Path(__file__).parent
README = HERE.parent / "README.md"


def results_section() -> str:
    """A table for each sweep: results/<dataset>/<sweep>.json, as recipes/sweep.py writes it."""
    parts = []
    for path in sorted((HERE / "results").glob("*/*.json")):
        sweep = json.loads(path.read_text())
        parts.append(f"**{sweep['title']}**, {path.parent.name}: {sweep['budget']}")
        parts.append(f"`{sweep['command']}`")
        parts.append(markdown_table(table_rows(sweep["rows"])).strip())
        plot = path.with_suffix(".png")
        if plot.exists():
            parts.append(f'<img src="{plot.relative_to(README.parent)}" width="420" alt="{sweep["title"]}">')
    return "\n\n".join(parts)


def benchmark_section() -> str:
    path = HERE / "results" / "benchmark.json"
    if not path.exists():
        return ""
    rows = [
        {"question": row["question"], "peer": row["peer_name"], "ratio": f"{row['ratio']:.2f}"}
        for row in json.loads(path.read_text())
        if row["ratio"] is not None
    ]
    return markdown_table(rows).strip()


def scale_section() -> str:
    path = HERE / "results" / "scale.json"
    return markdown_table(json.loads(path.read_text())["table"]).strip() if path.exists() else ""


def render(text: str) -> str:
    sections = {"results": results_section(), "benchmark": benchmark_section(), "scale": scale_section()}
    for name, section in sections.items():
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        body = section + "\n" if section else ""
        text = marked.sub(lambda match, body=body: match[1] + body + match[2], text)
    return text


if __name__ == "__main__":
    before = README.read_text()
    after = render(before)
    if "--check" in sys.argv[1:]:
        sys.exit("README.md is out of date; run python recipes/tables.py" if before != after else 0)
    README.write_text(after)
