"""Runs, checkpoints, kept features and published models of version 0.2.0 load, resume and measure as they did then."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from livt_hf import LiViTForImageClassification
from livt_hf.metrics import GROUPS
from livt_hf.predictions.rules import ARGMAX, rule_name
from livt_hf.recipes import eval as evaluation
from livt_hf.recipes import finetune
from livt_hf.runs import Run

ARCHIVE = Path(__file__).parent / "data" / "runs-0.2.0.tar.xz"
HEAD = "pictures --pretrained start --tune head --solver loop --views 2"
HEAD += " --epochs 2 --warmup_epochs 1 --batch_size 16 --base_lr 1e-2"


@pytest.fixture(autouse=True)
def old(tmp_path, monkeypatch) -> None:
    """Work in a folder with pictures, runs/ and published models as version 0.2.0 left them."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIVT_RUNS", "runs")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


# What is trained again is compared with the torch that trained the fixture: other versions round differently.
SAME_TORCH = torch.__version__.startswith("2.15.")


def assert_same_weights(one: str, other: str) -> None:
    """Compare the models of two run folders, up to the rounding of another machine."""
    weights, expected = (load_file(Path(folder, "model.safetensors")) for folder in (one, other))
    assert weights.keys() == expected.keys()
    for name in expected:
        if not name.endswith("key.bias"):  # its gradient is a rounding error, which Adam makes a step of
            assert weights[name].shape == expected[name].shape, name
            if SAME_TORCH:
                torch.testing.assert_close(weights[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


def assert_same_metrics(metrics: dict, expected: dict) -> None:
    """Compare what does not depend on shot groups, which now count the images that were held out too."""
    metrics, expected = (
        {name: value for name, value in one.items() if value is not None and not name.startswith(tuple(GROUPS))}
        for one in (metrics, expected)
    )
    assert len(expected) > 5 and metrics == pytest.approx(expected, abs=1e-6)


def largest_logit_metrics(report: str) -> dict:
    """Return the numbers of a report by the largest logit, the rule that calibration does not change."""
    rules = json.loads(Path(report, "evaluation.json").read_text())["rules"]
    return next(metrics for rule, metrics in rules.items() if rule_name(rule) == ARGMAX)


def test_an_interrupted_run_resumes_to_the_weights_of_the_uninterrupted_one():
    log = Path("runs/interrupted/log.jsonl")
    before = log.read_text()
    finetune.main(["--resume", "runs/interrupted", "--max_hours", "1"])  # it had stopped at 0 hours
    assert log.read_text().startswith(before)  # nothing was trained anew
    assert_same_weights("runs/interrupted", "runs/finished")
    resumed, finished = (Run(Path("runs", name)).results.rules for name in ("interrupted", "finished"))
    if SAME_TORCH:
        assert_same_metrics(resumed[ARGMAX], finished[ARGMAX])


def test_a_finished_run_evaluates_to_the_recorded_numbers():
    evaluation.main(["runs/finished", "--threads", "1", "--report", "new"])
    assert_same_metrics(largest_logit_metrics("new"), largest_logit_metrics("runs/finished/report"))


def test_a_cross_validation_goes_on_with_the_next_fold():
    shutil.move("runs/folds/report", "recorded")
    shutil.move("runs/folds/fold-2", "fold-2")
    for name in ("results.json", "predictions.parquet"):
        Path("runs/folds", name).unlink()
    finetune.main(["--resume", "runs/folds"])
    assert_same_weights("runs/folds/fold-2", "fold-2")
    if SAME_TORCH:
        assert_same_metrics(largest_logit_metrics("runs/folds/report"), largest_logit_metrics("recorded"))


def test_features_of_unknown_libraries_are_computed_anew_and_kept():
    old = set(Path("runs/features").iterdir())
    finetune.main([*HEAD.split(), "--threads", "1", "--output_dir", "runs/again"])
    kept = {path: os.stat(path).st_mtime_ns for path in Path("runs/features").rglob("*.safetensors")}
    assert len(kept) > len(old) and {path.parent for path in kept} > old
    assert_same_weights("runs/again", "runs/head")
    finetune.main([*HEAD.split(), "--threads", "1", "--output_dir", "runs/once-more"])
    assert kept == {path: os.stat(path).st_mtime_ns for path in Path("runs/features").rglob("*.safetensors")}


@torch.no_grad()
def test_published_models_give_the_recorded_logits():
    recorded = {name: torch.tensor(values) for name, values in json.loads(Path("logits.json").read_text()).items()}
    pixels = torch.linspace(-2, 2, 3 * 3 * 8 * 8).reshape(3, 3, 8, 8)
    model = LiViTForImageClassification.from_pretrained("published").eval()
    torch.testing.assert_close(model(pixels).logits, recorded["logits"])
    torch.testing.assert_close(
        model.probabilities(pixels, prior="uniform"), recorded["uniform"], check_dtype=False, rtol=1e-5, atol=1e-6
    )
    beit = AutoModelForImageClassification.from_pretrained("published").eval()
    torch.testing.assert_close(beit(pixels).logits, recorded["beit"])
    plain = timm.create_model("local-dir:published-timm", pretrained=True).eval()
    torch.testing.assert_close(plain(pixels), recorded["timm"])
