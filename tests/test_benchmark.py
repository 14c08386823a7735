"""recipes/benchmarks/run.py runs and says what it measured. Nothing here is a test of speed."""

import importlib
import json
import math
import os
from functools import partial
from pathlib import Path

import pytest

from livt_hf.recipes.benchmarks import run as recipe

ROW = {"question", "ours", "peer", "peer_name", "ratio", "unit"}


@pytest.fixture
def benchmark(monkeypatch, tmp_path, capsys):
    """recipes/benchmarks/run.py --quick in this process on one core; returns its rows and what it printed."""
    monkeypatch.setattr(recipe, "available_cores", lambda: 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none

    def run(question: str) -> tuple[list[dict], str]:
        output = tmp_path / "rows.json"
        recipe.main([question, "--quick", "--runs", "1", "--output", str(output)])
        return json.loads(output.read_text()), capsys.readouterr().out

    return run


def assert_readable(rows: list[dict], printed: str) -> None:
    assert rows
    for row in rows:
        assert row.keys() >= ROW
        assert all(math.isfinite(row[name]) for name in ("ours", "peer"))
        assert row["ratio"] is None or 0 < row["ratio"] < math.inf
        (line,) = {
            line
            for line in printed.splitlines()
            if line.startswith(f"| {row['question']} |") and row["peer_name"] in line
        }
        assert row["unit"] in line
    assert printed.splitlines()[0] == "| question | ours | peer | ratio |"


def test_a_ratio_above_one_is_in_our_favour():
    compared = importlib.import_module("livt_hf.recipes.benchmarks.measuring").compared
    speed, slower = compared("speed", {"ours": 30.0, "stock": 10.0, "other": 60.0}, "images/s")
    assert (speed["ratio"], speed["peer_name"], slower["ratio"], slower["peer_name"]) == (3, "stock", 0.5, "other")
    (time,) = compared("time", {"ours": 30.0, "stock": 10.0}, "s", smaller_is_better=True)
    assert time["ratio"] == pytest.approx(1 / 3)


def test_a_ratio_of_several_runs_is_their_median_and_says_its_range():
    rows = [{"question": "speed", "ours": r, "peer": 1.0, "ratio": r, "unit": "s"} for r in (1.2, 0.9, 1.1)]
    row = recipe.merged(rows)
    assert (row["ours"], row["ratio"], row["ratio_range"], row["runs"]) == (1.1, 1.1, [0.9, 1.2], 3)
    assert recipe.ratio_words(row) == "1.10 (0.90 to 1.20, no difference)"
    assert recipe.ratio_words(recipe.merged([rows[0], rows[2]])) == "1.15 (1.10 to 1.20)"
    assert recipe.ratio_words(rows[0]) == "1.20"


def test_only_what_every_run_measured_is_reported(monkeypatch):
    """Whether there are rows of bf16 is a trial's to say, in each run."""
    runs = iter([["step", "bf16"], ["step"], ["bf16", "step"]])

    def run(command: list[str], **_) -> None:
        rows = [{"question": q, "peer_name": "p", "ours": 2.0, "peer": 1.0, "ratio": 2.0} for q in next(runs)]
        Path(command[command.index("--output") + 1]).write_text(json.dumps(rows))

    monkeypatch.setattr(recipe.subprocess, "run", run)
    (row,) = recipe.answered("pretrain", quick=True, runs=3)
    assert (row["question"], row["runs"]) == ("step", 3)


def test_ways_take_turns_and_end_when_they_have_taken_long_enough(monkeypatch):
    measuring = importlib.import_module("livt_hf.recipes.benchmarks.measuring")
    turns = []
    ways = {name: partial(turns.append, name) for name in "ab"}
    assert measuring.median_seconds(ways, 5, clock=lambda work: (work(), len(turns))[1]) == {"a": 7, "b": 8}
    assert turns == ["a", "b"] * 6  # the first to warm up
    monkeypatch.setattr(measuring, "PATIENCE", 0)
    measuring.median_seconds(ways, 50)
    assert turns == ["a", "b"] * (6 + 1 + measuring.FEWEST)


def test_training_steps_are_compared_with_stock_ones(benchmark, monkeypatch):
    steps = importlib.import_module("livt_hf.recipes.benchmarks.steps")
    monkeypatch.setattr(steps, "SHAPES", {"micro, two images": ("micro", 2)})
    rows, printed = benchmark("pretrain")
    assert_readable(rows, printed)
    assert [row["question"] for row in rows[:3]] == [
        f"MGP step, micro, two images, decode_ratio {ratio}" for ratio in ("1", "0.5", "0.25")
    ]
    assert 0 < rows[3]["ours"] < 1  # of the machine's peak


@pytest.mark.slow
@pytest.mark.parametrize("question", recipe.BENCHMARKS)
def test_each_question_is_answered(benchmark, question):
    if question == "metrics":
        pytest.importorskip("sklearn")
    assert_readable(*benchmark(question))


def test_recorded_rows_replace_all_that_was_said_when_the_same_was_asked(tmp_path):
    file = tmp_path / "rows.json"
    one, renamed, other = ({"asked": a, "question": q} for a, q in (("a", "x"), ("a", "y"), ("b", "x")))
    recipe.record(file, [one, other])
    recipe.record(file, [renamed])
    assert json.loads(file.read_text()) == [other, renamed]
