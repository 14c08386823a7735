"""`--tune head` with a convex loss: solved, calibrated out of fold, with a deployment prior for an objective."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from recipe_runs import RecipeRun
from test_tuning import pictures, resnet, trained  # noqa: F401
from transformers import AutoModelForImageClassification

from livt_hf.classifiers import load_model
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.predictions import Predictions, decide
from livt_hf.predictions.rules import TEST_PRIOR
from livt_hf.recipes.calibrate import main as calibrate
from livt_hf.runs import Run
from livt_hf.training import solve
from livt_hf.training.exact_head import ExactHead


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


def weights(run: Run) -> dict[str, torch.Tensor]:
    return AutoModelForImageClassification.from_pretrained(run.folder).state_dict()


def test_nothing_is_held_out_every_training_image_calibrates_and_a_solution_is_no_average(pictures, tmp_path):  # noqa: F811
    path, words = resnet(tmp_path / "resnet"), ["--tune", "head", "--loss", "bal_ce"]
    plain = trained(pictures, path, tmp_path / "plain", *words)
    results = plain.results
    assert results.num_train_images == results.calibrated_on == 64 and not results.validation_carved
    assert results.head["solver"] == "exact" and "exact" in results.selection and results.updates == 0
    assert results.head["strength"] in [row["strength"] for row in results.head["path"]]
    averaged = trained(pictures, path, tmp_path / "averaged", *words, "--ema_decay", "0.9")
    assert all(torch.equal(weights(plain)[name], value) for name, value in weights(averaged).items())


@pytest.mark.parametrize("loss", ["bal_bce", "ce"])
def test_the_objective_chooses_the_deployment_prior_and_leaves_the_model(pictures, tmp_path, loss):  # noqa: F811
    path, runs = resnet(tmp_path / "resnet"), {}
    for objective in ("accuracy", "none"):
        runs[objective] = trained(
            pictures, path, tmp_path / f"{objective}", "--tune", "head", "--loss", loss, "--objective", objective
        )
    found = runs["accuracy"].results.trade_off
    assert found["objective"] == "accuracy" and len(found["curve"]) == 21
    prior = np.array([30, 18, 10, 6]) ** found["exponent"]
    chosen, plain = (load_model(str(runs[objective].folder)) for objective in ("accuracy", "none"))
    np.testing.assert_allclose(chosen.config.long_tail.deployment_prior, prior / prior.sum(), rtol=1e-6)
    assert TEST_PRIOR in runs["accuracy"].results.rules and plain.config.long_tail.deployment_prior == "uniform"
    assert all(torch.equal(weights(runs["none"])[name], value) for name, value in weights(runs["accuracy"]).items())
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    named = chosen.probabilities(images, prior=(prior / prior.sum()).tolist())
    torch.testing.assert_close(chosen.probabilities(images), named)


def test_an_objective_of_a_loss_without_a_posterior_is_said_to_have_no_effect(pictures, tmp_path, caplog):  # noqa: F811
    words = ["--tune", "head", "--loss", "cb_ce", "--objective", "accuracy"]
    assert trained(pictures, resnet(tmp_path / "resnet"), tmp_path / "run", *words).results.trade_off is None
    assert "objective accuracy has no effect" in caplog.text


def test_a_loop_chooses_on_its_validation_split_and_calibrate_chooses_again(pictures, tmp_path, capsys):  # noqa: F811
    words = ["--tune", "head", "--solver", "loop", "--validation_fraction", "0.4", "--objective", "macro_f1"]
    run = trained(pictures, resnet(tmp_path / "resnet"), tmp_path / "run", *words)
    found, before = run.results.trade_off, weights(run)
    assert run.results.head is None and run.results.updates > 0
    assert (found["objective"], found["split"], found["num_images"]) == ("macro_f1", "validation", 25)
    assert found["exponent"] == found["exponents"]["macro_f1"] and run.results.default_rule == "test_prior"
    capsys.readouterr()
    calibrate([str(run.folder), "--objective", "accuracy"])  # of which the exponents are stored
    results, said = run.results, capsys.readouterr().out
    assert results.trade_off == found | {"objective": "accuracy", "exponent": found["exponents"]["accuracy"]}
    assert f"objective accuracy: deployment prior pi^{results.trade_off['exponent']:g}" in said
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())
    record = Predictions.load(run.folder / "predictions")
    assert record.info.default_rule.label == "posterior, prior for accuracy"
    right = (decide(record).labels.numpy() == record.labels).mean()
    assert results.metrics["accuracy"] == pytest.approx(right) and results.default_rule == "test_prior"


def test_a_loss_that_is_not_convex_keeps_the_loop(pictures, tmp_path):  # noqa: F811
    run = trained(pictures, resnet(tmp_path / "resnet"), tmp_path / "run", "--tune", "head", "--loss", "ldam")
    assert run.results.head is None and run.results.updates > 0


def fit(folder: Path, features: np.ndarray, labels: np.ndarray, groups=None, held_out=None) -> ExactHead:
    """The head that is solved on features (views, images, D)."""
    config = LongTailConfig(loss="bal_ce", class_counts=np.bincount(labels).tolist())
    return solve._fit(features, labels, groups, held_out, cache=folder / "checkpoints", seed=0, **config)


def test_views_of_an_image_and_images_of_a_group_stay_in_one_fold(tmp_path):
    labels, groups = np.repeat([0, 1, 2], [30, 20, 1]), np.arange(51) // 2
    features = np.random.default_rng(0).normal(size=(3, 51, 4)).astype(np.float32) + np.eye(4)[labels][None]
    for name, groups_of_images in (("alone", None), ("groups", groups)):
        head = fit(tmp_path / name, features, labels, groups_of_images)
        fold = head.fold.reshape(3, 51)
        assert (fold == fold[0]).all() and len(set(fold[0])) == 5
        assert head.unseen.tolist() == 3 * [label == 2 for label in labels]
    assert (fold[0][:-1:2] == fold[0][1::2]).all()


def test_held_out_images_are_the_first_fold_and_groups_of_the_rest_stay_together(tmp_path):
    labels, groups = np.repeat([0, 1], [40, 20]), np.arange(60) // 2
    features = np.random.default_rng(0).normal(size=(1, 60, 4)).astype(np.float32)
    held_out = groups % 7 == 3
    head = fit(tmp_path, features, labels, groups, held_out)
    assert ((head.fold == 0) == held_out).all() and set(head.fold) == {0, 1, 2, 3, 4}
    assert (head.fold[::2] == head.fold[1::2]).all()


def test_two_processes_solve_the_same_head(pictures, tmp_path):  # noqa: F811
    path = resnet(tmp_path / "resnet")
    words = ["--dataset", pictures, "--pretrained", path, "--tune", "head", "--threads", 1]
    one, two = (
        Run(RecipeRun("finetune", tmp_path / f"{number}", *words, processes=number).finish().folder)
        for number in (1, 2)
    )
    first, second = weights(one), weights(two)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((one.folder / "results.json").read_text())["head"]["strength"] == two.results.head["strength"]
