"""`--tune head` with a convex loss: solved, calibrated out of fold, with a deployment prior for an objective."""

import json

import numpy as np
import pytest
import torch
from recipe_runs import RecipeRun
from test_tuning import pictures, resnet, trained  # noqa: F401
from transformers import AutoModelForImageClassification

from livt_hf.classifiers import load_model
from livt_hf.runs import Run


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


def weights(run: Run) -> dict[str, torch.Tensor]:
    return AutoModelForImageClassification.from_pretrained(run.folder).state_dict()


def test_nothing_is_held_out_and_every_training_image_calibrates(pictures, tmp_path):  # noqa: F811
    run = trained(pictures, resnet(tmp_path / "resnet"), tmp_path / "run", "--tune", "head", "--loss", "bal_ce")
    results = run.results
    assert results.num_train_images == results.calibrated_on == 64 and not results.validation_carved
    assert results.head["solver"] == "exact" and "exact" in results.selection and results.updates == 0
    assert results.head["strength"] in [row["strength"] for row in results.head["path"]]


@pytest.mark.parametrize("loss", ["bal_ce", "bal_bce", "ce"])
def test_the_objective_chooses_the_test_prior_and_leaves_the_posterior(pictures, tmp_path, loss):  # noqa: F811
    path, runs = resnet(tmp_path / "resnet"), {}
    for objective in ("accuracy", None):
        named = ["--objective", objective] if objective else []
        runs[objective] = trained(pictures, path, tmp_path / f"{objective}", "--tune", "head", "--loss", loss, *named)
    head = runs["accuracy"].results.head
    assert head["objective"] == "accuracy" and len(head["curve"]) == 21
    prior = np.array([30, 18, 10, 6]) ** head["exponent"]
    chosen, plain = (load_model(str(runs[objective].folder)) for objective in ("accuracy", None))
    np.testing.assert_allclose(chosen.config.long_tail["test_prior"], prior / prior.sum(), rtol=1e-6)
    assert runs["accuracy"].results.own_prior is not None
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for name in ("uniform", [0.7, 0.1, 0.1, 0.1]):
        one, two = (model.probabilities(images, prior=name) for model in (chosen, plain))
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)


def test_a_loss_that_is_not_convex_keeps_the_loop(pictures, tmp_path):  # noqa: F811
    run = trained(pictures, resnet(tmp_path / "resnet"), tmp_path / "run", "--tune", "head", "--loss", "ldam")
    assert run.results.head is None and run.results.updates > 0
    run = trained(pictures, resnet(tmp_path / "again"), tmp_path / "loop", "--tune", "head", "--solver", "loop")
    assert run.results.head is None and run.results.updates > 0


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
