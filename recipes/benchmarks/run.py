"""How fast it is, against named peers in the same run.

    python recipes/benchmarks/run.py data            # input pipelines and splits
    python recipes/benchmarks/run.py pretrain        # MGP steps; also finetune, launch, predict, metrics, growth, demo
    python recipes/benchmarks/run.py all --output benchmark.json
    python recipes/benchmarks/run.py race --help     # accuracy against processor time: hours, not minutes

Ratios above 1 are in our favour; each is the median of several independent runs, with their range, and a range that
has 1 in it is called no difference. A question takes less than five minutes on two cores and says what it measures
meanwhile. Numbers of one machine say little about another: run it on yours.
"""

import argparse
import importlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from livt_hf.files import read_values, write_values
from livt_hf.recipes.benchmarks.measuring import ratio_words
from livt_hf.reports import markdown_table
from livt_hf.threads import available_cores, configure_threads

# Subcommand: module and function.
BENCHMARKS = {
    "data": ("data", "run"),
    "boxes": ("data", "run_boxes"),
    "pretrain": ("steps", "run_pretrain"),
    "finetune": ("steps", "run_finetune"),
    "launch": ("launch", "run"),
    "predict": ("predict", "run"),
    "metrics": ("metrics", "run"),
    "growth": ("growth", "run"),
    "demo": ("demo", "run"),
}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["race"]:
        from livt_hf.recipes.benchmarks import race

        race.main(argv[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=[*BENCHMARKS, "all"])
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller rounds: shows that it runs, not how fast"
    )
    parser.add_argument("--runs", type=int, default=3, help="independent runs of each question; ratios are medians")
    parser.add_argument("--output", type=Path, help="JSON file for the rows; those of other questions stay in it")
    arguments = parser.parse_args(argv)
    rows = []
    for name in BENCHMARKS if arguments.question == "all" else [arguments.question]:
        rows += [row | {"asked": name} for row in answered(name, arguments.quick, arguments.runs)]
    print(markdown_table([_readable(row) for row in rows]))
    if arguments.output is not None:
        record(arguments.output, rows)


def record(path: Path, rows: list[dict]) -> None:
    """What is asked again replaces all that it said before."""
    asked, old = {row["asked"] for row in rows}, read_values(path) if path.exists() else []
    kept = [row for row in old if row["asked"] not in asked]
    write_values(path, kept + rows)


def answered(name: str, quick: bool, runs: int) -> list[dict]:
    """Return the rows of a question; of several runs, each in a process of its own, what they have in common."""
    if runs == 1:
        configure_threads(torch.device("cpu"), available_cores())  # peers in the same process gain by it alike
        module, function = BENCHMARKS[name]
        return getattr(importlib.import_module(f"livt_hf.recipes.benchmarks.{module}"), function)(quick)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for run in range(runs):
            print(f"{name}, run {run + 1} of {runs}", file=sys.stderr, flush=True)
            words = [name, "--runs", "1", "--output", f"{folder}/rows.json", *["--quick"] * quick]
            command = [sys.executable, "-m", "livt_hf.recipes.benchmarks.run", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            rows = read_values(Path(folder, "rows.json"))
            found.append({(row["question"], row["peer_name"]): row for row in rows})
    # Whether a CPU computes in bf16 is found out by a trial, which need not end alike on a busy machine.
    common = [asked for asked in found[0] if all(asked in rows for rows in found)]
    return [merged([rows[asked] for rows in found]) for asked in common]


def merged(rows: Sequence[dict]) -> dict:
    """Merge one row of several runs: medians, and the range of the ratios."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    medians = {name: statistics.median(row[name] for row in rows) for name in ("ours", "peer")}
    found = {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]} if ratios else {}
    return rows[0] | medians | found | {"runs": len(rows)}


def _readable(row: dict) -> dict:
    def number(value) -> str:
        return "-" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"

    return {
        "question": row["question"],
        "ours": f"{number(row['ours'])} {row['unit']}",
        "peer": f"{number(row['peer'])} ({row['peer_name']})",
        "ratio": ratio_words(row) if row["ratio"] is not None else "-",
    }


if __name__ == "__main__":
    main()
