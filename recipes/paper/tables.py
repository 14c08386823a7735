"""Write the tables of README.md, the READMEs of recipes and docs/ from the result files in recipes/results.

    python recipes/paper/tables.py            # rewrites them between their markers
    python recipes/paper/tables.py --check    # fails where they are out of date

A marker says what goes before its closing one: `<!-- results cifar100-lt/losses -->` the sweeps it names,
`<!-- short from scratch: cifar100-lt/losses; a head: cifar100-lt/head ce bal_bce -->` one table of several sweeps, or
of some of their variants, under words of yours,
`<!-- benchmark MGP input; BFT -->` the questions that begin so; without names all.
`<!-- text Bal-BCE has {cifar100-lt/half_hour[bal_bce][accuracy]:.1f} %. -->` a sentence with numbers of result files:
of a variant and a column, or of the difference of two of them, `[bal_ce - ce]`.
"""

import os
import re
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from livt_hf.files import read_values
from livt_hf.metrics import GROUPS
from livt_hf.recipes.ablations import table_rows
from livt_hf.recipes.benchmarks.measuring import ratio_words
from livt_hf.recipes.benchmarks.race import race_table
from livt_hf.recipes.paper.idea import KEPT
from livt_hf.reports import markdown_table
from livt_hf.text import format_percent

RECIPES = Path(__file__).parents[1]
RESULTS = RECIPES / "results"
_NLL = {"NLL before": "nll_before", "after": "nll_after", "largest loss": "largest_loss"}
ROOT = RECIPES.parent
PAGES = (ROOT / "README.md", RESULTS / "README.md", RECIPES / "configs" / "README.md")
PAGES += tuple(ROOT / "docs" / name for name in ("results/index.md", "guides/own-loss.md", "guides/time-budget.md"))


def results_section(which: str, page: Path) -> str:
    """Render one table per sweep: results/<dataset>/<sweep>.json, of `livt sweep`, or with a `table` of its own."""
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
    """Return the picture beside a result file, if there is one."""
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


def statistics_section(_which: str, _page: Path) -> str:
    """Render the simulations of `recipes/benchmarks/simulations.py`: intervals, calibration, offers."""
    path = RESULTS / "statistics.json"
    if not path.exists():
        return ""
    rows = {name: part["rows"] for name, part in read_values(path).items()}
    tables = [
        [
            {"test set": row["test_set"], "coverage, %": format_percent(row["coverage"])}
            | {"within classes, %": format_percent(row["coverage_within_classes"]), "trials": row["trials"]}
            for row in rows.get("intervals", ())
        ],
        [
            {"head": row["head"], "images": row["images"]}
            | {name: "refused" if row[key] is None else f"{row[key]:.3f}" for name, key in _NLL.items()}
            for row in rows.get("calibration", ())
        ],
        [
            {"classes": row["classes"], "truth": row["truth"], "images": row["images"], "trials": row["trials"]}
            | {"offered, %": format_percent(row["offers"] / row["trials"])}
            | {"gain, points": format_percent(row["mean_gain"]), "least": format_percent(row["least_gain"])}
            for row in rows.get("offers", ())
        ],
    ]
    return "\n\n".join(markdown_table(table).strip() for table in tables if table)


def framing_section(_which: str, _page: Path) -> str:
    """Render the sets and framings of `recipes/benchmarks/framing.py`."""
    rows = []
    for name, measured in read_values(RESULTS / "framing.json").items():
        chosen, words = measured["auto"], name
        for framing, numbers in measured["framings"].items():
            taken = f"{chosen.count(framing.split()[0])} of {len(chosen)}"
            row = {"images": words, "framing": framing}
            row |= {key.replace("_", " "): f"{mean:.1f} ± {std:.1f}" for key, (mean, std) in numbers.items()}
            rows.append(row | {"taken by auto": taken if chosen else "-"})
            words = ""
    return markdown_table(rows).strip()


def near_copies_section(_which: str, _page: Path) -> str:
    """Bursts, splits that others made, scaling, and a count by eye of `recipes/benchmarks/near_copies.py`."""
    results = read_values(RESULTS / "near_copies.json")
    tables: list[list[dict]] = [
        [
            {"strength of the changes": row["strength"], "images with a copy": row["with_a_copy_on_the_other_side"]}
            | {"found, %": format_percent(row["found"]), "false alarms, %": format_percent(row["false_alarms"])}
            | {"bursts in one group, %": format_percent(row["bursts_in_one_group"]), "seconds": row["seconds"]}
            for row in results["pixels"]["bursts"]
        ],
        [
            {"images": name, "training": row["images"]["train"], "test": row["images"]["test"]}
            | {"test images with a near copy in training": row["found"]["test"]}
            | {"pairs of two classes, %": format_percent(row["pairs_of_different_classes"]), "seconds": row["seconds"]}
            for name, row in results["pixels"].items()
            if name != "bursts"
        ],
        [
            {
                "vectors": f"{row['images']:,}",
                "found, %": format_percent(row["found"]),
                "groups, seconds": row["seconds"],
            }
            | {"leaks, seconds": row["seconds_of_leaks"], "peak MB": row["megabytes"]}
            for row in results["scaling"]
        ],
        [
            {"similarity from": row["from"], "same photograph": row["same_photograph"]}
            | {"same series": row["same_series"], "false alarms": row["false_alarms"]}
            for row in results["checked"]["cifar100-lt"]["bands"]
        ],
    ]
    return "\n\n".join(markdown_table(table).strip() for table in tables)


def race_section(_which: str, page: Path) -> str:
    """Render the rows of `recipes/benchmarks/run.py race --output recipes/results/race.json`, and its picture."""
    path = RESULTS / "race.json"
    if not path.exists():
        return ""
    table = markdown_table(race_table(read_values(path))).strip()
    return "\n\n".join([table, *_picture(path, page, 560, "accuracy over core-minutes")])


def idea_section(_which: str, _page: Path) -> str:
    """Return what the figure of the idea shows, in a sentence."""
    result = read_values(RESULTS / "idea.json")
    plain, balanced = ({name: f"{100 * result[rule][name]:.1f}" for name in KEPT} for rule in ("plain", "balanced"))
    return (
        "One frozen backbone, one linear head, CIFAR-100-LT: correcting for the class frequencies takes\n"
        f"accuracy on the balanced test set from {plain['accuracy']} to {balanced['accuracy']} %, and that of\n"
        f"classes with fewer than 20 images from {plain['few']} to {balanced['few']} %."
    )


def heads_section(_which: str, _page: Path) -> str:
    """Return a row per dataset and objective: our score, and the difference to both baselines with its error."""
    path, rows = RESULTS / "heads.json", []
    for name, methods in (read_values(path) if path.exists() else {}).items():
        ours = methods["exact bal_ce"]
        for objective, label in HEAD_OBJECTIVES.items():
            minus = {
                f"minus {peer}": "{:+.1f} ± {:.1f}".format(*ours["minus"][full][objective][objective])
                for peer, full in (("plain", "LogisticRegression"), ("balanced", "LogisticRegression balanced"))
            }
            seconds = [methods[method]["seconds"] for method in methods if method != "exact bal_bce"]
            rows.append(
                {"features": name, "objective": label, "ours": f"{ours['scores'][objective][objective]:.1f}", **minus}
                | {"seconds: ours, plain, balanced": ", ".join(f"{value:.1f}" for value in seconds)}
            )
    return markdown_table(rows).strip() if rows else ""


class Values(dict):
    """Values by name; `a - b` is the difference of two of them, also of two rows."""

    def __missing__(self, name: str) -> "float | Values":
        first, second = (self[part] for part in name.split(" - "))
        if isinstance(first, dict):
            return Values({key: first[key] - second[key] for key in first if isinstance(first[key], float)})
        return first - second


class Sweeps(dict):
    """The rows of result files by variant, read where they are named."""

    def __missing__(self, name: str) -> Values:
        rows = read_values(RESULTS / f"{name}.json")["rows"]
        return Values({row["variant"]: Values(row) for row in rows})


def text_section(template: str, _page: Path) -> str:
    """Return a text with numbers of result files in place of its fields."""
    text = template.strip().format_map(Sweeps()).replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.fill(text, 139, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def peers_section(which: str, _page: Path) -> str:
    """Return the rows of `recipes/benchmarks/peers.py`: means ± std over seeds, and the paired tests against ours.

    `accuracy` is a short form: a row per entry, a column per dataset and time.
    """
    path = RESULTS / "peers.json"
    results = read_values(path) if path.exists() else {"rows": [], "tests": []}
    p_values = {(row["dataset"], row["minutes"], row["entry"]): row["p"] for row in results["tests"]}
    runs: dict[tuple, list[dict]] = {}
    for row in results["rows"]:
        runs.setdefault((row["dataset"], row["minutes"], row["entry"]), []).append(row)
    keys = sorted(runs, key=lambda key: (*key[:2], list(PEERS).index(key[2])))

    def cell(key: tuple, name: str, digits: int = 1) -> str:
        values = [run[name] for run in runs[key]]
        spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.{digits}f}{spread}"

    if which.strip() == "accuracy":
        lines: dict[str, dict] = {}
        for key in keys:
            mark = " *" if p_values.get(key, 1) < 0.05 else ""
            column = f"{key[0]}, {key[1]:g} minutes"
            lines.setdefault(key[2], {"trained by": PEERS[key[2]]})[column] = cell(key, "accuracy") + mark
        return markdown_table([lines[entry] for entry in PEERS if entry in lines]).strip()
    rows = [
        {"images": key[0], "core-minutes": f"{key[1]:g}", "trained by": PEERS[key[2]], "seeds": len(runs[key])}
        | {"accuracy": cell(key, "accuracy"), "mean class accuracy": cell(key, "mean_class_accuracy")}
        | {"NLL": cell(key, "nll", 2), "ECE": cell(key, "ece"), "seconds": cell(key, "seconds", 0)}
        | {"p": f"{p_values[key]:.3f}" if key in p_values else "-"}
        for key in keys
    ]
    return markdown_table(rows).strip()


def recipe_section(_which: str, _page: Path) -> str:
    """Return the rows of `recipes/benchmarks/recipe.py`, best first by the NLL of both kinds of held-out images."""
    path = RESULTS / "recipe.json"
    rows = read_values(path)["rows"] if path.exists() else []
    keys = ("dataset", "share", "updates", "seed")
    rows = sorted(rows, key=lambda row: (*(row[key] for key in keys), row["random"]["nll"] + row["clusters"]["nll"]))
    lines = []
    for row in rows:
        line = {"images": f"{row['dataset']}, {row['images']:,}", "updates": row["updates"], "variant": row["variant"]}
        for way in ("random", "clusters"):
            line[f"{way}: NLL"] = f"{row[way]['nll']:.2f}"
            line[f"{way}: accuracy"] = f"{row[way]['accuracy']:.1f}"
            line[f"{way}: mean class accuracy"] = f"{row[way]['mean_class_accuracy']:.1f}"
        lines.append(line | {"seconds": f"{row['seconds']:.0f}"})
    return markdown_table(lines).strip() if lines else ""


PEERS = {
    "ours": "livt train",
    "trainer": "Trainer, cross-entropy",
    "trainer_balance": 'Trainer, balance(loss="bal_ce")',
    "logreg": "LogisticRegression on frozen features",
    "logreg_balanced": "LogisticRegression, balanced weights",
    "fastai": "fastai",
    "autogluon": "AutoGluon",
}
HEAD_OBJECTIVES = {"accuracy": "accuracy", "mean_class_accuracy": "mean class accuracy", "macro_f1": "macro F1"}
SECTIONS = {
    "heads": heads_section,
    "peers": peers_section,
    "recipe": recipe_section,
    "idea": idea_section,
    "results": results_section,
    "short": short_section,
    "text": text_section,
    "race": race_section,
    "benchmark": benchmark_section,
    "scale": scale_section,
    "statistics": statistics_section,
    "framing": framing_section,
    "near_copies": near_copies_section,
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
