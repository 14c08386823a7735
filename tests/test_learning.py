"""What the method is for, on the embedded data with the shipped configs and three seeds: half an hour on two cores."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEEDS = ("0", "1", "2")


@pytest.mark.slow
def test_pretraining_learns_beats_scratch_and_bal_bce_saves_the_tail(tmp_path):
    command = [sys.executable, ROOT / "recipes" / "sweep.py", "stages", "--dataset", "glyphs", "--jobs", "2"]
    environment = os.environ | {"LIVT_RUNS": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "--seeds", *SEEDS], env=environment, check=True)
    pretraining = [json.loads(path.read_text()) for path in tmp_path.glob("sweeps/glyphs/mgp/*/results.json")]
    assert len(pretraining) == len(SEEDS)
    assert all(run["metrics"]["loss"] < 0.8 * run["metrics"]["zero_prediction_loss"] for run in pretraining)

    def few_and_all(folder: str) -> tuple[list[float], list[float]]:
        runs = [tmp_path / "sweeps" / "glyphs" / "bft" / f"{folder}seed={seed}" / "results.json" for seed in SEEDS]
        metrics = [json.loads(path.read_text())["metrics"] for path in runs]
        return [m["few"] for m in metrics], [m["accuracy"] for m in metrics]

    balanced_few, balanced = few_and_all("")
    plain_few, _ = few_and_all("loss=bce_")
    _, scratch = few_and_all("scratch_layer_decay=1.0_")
    assert all(ours > theirs for ours, theirs in zip(balanced, scratch, strict=True))
    assert statistics.fmean(balanced_few) > statistics.fmean(plain_few) + 0.1
