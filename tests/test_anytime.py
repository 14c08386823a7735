"""`livt train --pretrained`: the plan, the head first, the network for the time left, the choice, and resuming."""

import contextlib
import itertools
import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from recipe_runs import RecipeRun, assert_same_weights, make_pictures
from test_tuning import resnet
from transformers import (
    AutoModelForImageClassification,
    LevitConfig,
    LevitForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from livt_hf import LiViTConfig, balance
from livt_hf.classifiers import load_classifier, load_processor
from livt_hf.errors import Interrupted, LiVTError
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.structure import extract_features
from livt_hf.processors import read_framing
from livt_hf.recipes import train, train_backbone
from livt_hf.runs import Run
from livt_hf.training import anytime, recipe
from livt_hf.training.anytime import Rates, UpdateFitter, choose_held_out_fraction, plan_tuning
from livt_hf.training.framing import FramingTrial

RATES = Rates(read=0.01, forward=0.03, crop_forward=0.02)  # a step costs 0.07 s an image, a feature 0.04 s


@pytest.mark.parametrize(("images", "held_out"), [(100, 20), (400, 80), (800, 100), (2321, 232), (100_000, 2000)])
def test_a_tenth_is_held_out_but_not_too_few_or_too_many(images, held_out):
    assert round(images * choose_held_out_fraction(images)) == held_out


@pytest.mark.parametrize(
    ("seconds", "held_out", "updates", "averages"),
    [
        (1000, 100, (1000 - 12) / 2.24, True),  # three passes over the held-out images take 12 s
        (70, 100, (70 - 4) / 2.24, False),  # two more would take more than a tenth
        (20, 100, 0, False),  # seven updates
        (-5, 100, 0, False),
        (1000, 0, 0, False),
    ],
)
def test_the_whole_network_gets_the_time_left_but_for_the_choice(seconds, held_out, updates, averages):
    plan = plan_tuning(seconds, RATES, 900, held_out)
    assert (plan.updates, plan.averages, plan.why is None) == (int(updates), averages, updates > 0)


def fitted(per_update: float, seconds: float, total: int) -> list[int | None]:
    """Return what the fitter says after each update of a loop whose updates take so long, the first ten times that."""
    now = [0.0]
    fitter, loop = UpdateFitter(seconds, lambda: now[0]), SimpleNamespace(total=total, progress=SimpleNamespace())
    loop.progress.total, answers = None, []
    for update in range(1, total // 2):
        now[0] += per_update * (10 if update == 1 else 1)
        loop.progress.update = update
        answers.append(fitter(loop))
        loop.progress.total = loop.progress.total or answers[-1]
    return answers


@pytest.mark.parametrize(("per_update", "total"), [(1.0, 100), (1.015625, 100), (2.0, 50), (0.5, 200), (0.75, 133)])
def test_after_a_tenth_the_updates_are_fitted_once_to_the_time_they_take(per_update, total):
    answers = fitted(per_update, seconds=100, total=100)
    assert [answer for answer in answers if answer is not None] == [total]
    assert answers[9] == total  # after ten of a hundred updates


def test_options_are_a_schedule_in_updates():
    options = recipe.build_options(80, num_images=640, learning_rate=1e-3)
    assert (options["batch_size"], options["max_steps"], options["epochs"]) == (32, 80, 4)
    assert options["base_lr"] * 32 / 256 == pytest.approx(1e-3)
    assert options["warmup_epochs"] * 20 == 4  # updates: 5 %
    assert recipe.build_options(3, 9, 1e-3)["batch_size"] == 4


@pytest.mark.parametrize(("side", "crop_size"), [(224, 160), (128, 96), (300, 224), (96, None), (32, None)])
def test_convolutional_networks_train_on_smaller_crops_than_they_are_served_with(tmp_path, side, crop_size):
    network = AutoModelForImageClassification.from_pretrained(resnet(tmp_path / "resnet"))
    assert recipe.choose_crop_size(network, side) == crop_size
    config = ViTConfig(image_size=side, patch_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    assert recipe.choose_crop_size(ViTForImageClassification(config), side) is None


def test_a_batch_norm_does_not_make_a_network_take_every_size(tmp_path):
    config = LevitConfig(image_size=224, hidden_sizes=[16] * 3, num_attention_heads=[1] * 3, depths=[1] * 3)
    assert recipe.choose_crop_size(LevitForImageClassification(config), 224) is None


def test_a_model_that_starts_from_a_head_has_its_posterior(tmp_path):
    model = AutoModelForImageClassification.from_pretrained(resnet(tmp_path / "resnet"))
    model = balance(model, [30, 10, 5], loss="bal_ce").eval()
    weight, bias = torch.randn(3, 16), torch.tensor([0.0, 1.0, -1e4])  # of the last class no image was known
    anytime.start_from_head(model, weight, bias)
    pixels = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        features = extract_features(model, pixels)
        adjusted = model(pixels).logits + model.head.logit_bias
    expected = features @ weight.T + bias
    torch.testing.assert_close(adjusted[:, :2], expected[:, :2])
    assert (adjusted[:, 2] > -100).all()


class Linear(torch.nn.Module):
    """A classifier of one feature whose sign tells the class if the weight is positive."""

    def __init__(self, head):
        super().__init__()
        self.scale, self.head = torch.nn.Parameter(torch.tensor(-1.0)), head

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.scale * pixel_values * torch.tensor([1.0, -1.0]))


def test_an_average_is_kept_where_it_is_better_on_held_out_images(tmp_path):
    module = Linear(LongTailHead(LiViTConfig.preset("micro", class_counts=[10, 10], loss="ce")))
    batch = {"pixel_values": torch.tensor([[2.0], [-2.0]] * 8), "labels": torch.tensor([0, 1] * 8)}
    accelerator = Accelerator(cpu=True)
    for start, tuned, kept in ((1.0, 3.0, 1.0), (3.0, -1.0, 0.5), (3.0, -5.0, 0.5)):
        first = {"scale": torch.tensor(start)}
        module.scale.data.fill_(tuned)
        found = anytime.choose_weights(module, first, lambda: [batch], accelerator, averages=True)
        assert found[0].share == kept and found[0].scores["nll"] == min(one.scores["nll"] for one in found)
        assert module.scale.item() == start + kept * (tuned - start)
    assert len(anytime.choose_weights(module, first, lambda: [batch], accelerator, averages=False)) == 1
    module.scale.data.fill_(torch.inf)
    with pytest.raises(LiVTError, match="Lower base_lr"):
        anytime.choose_weights(module, first, lambda: [batch], accelerator, averages=True)


@pytest.fixture
def backbone(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    return resnet(tmp_path / "resnet")


@pytest.fixture
def pictures(tmp_path) -> Path:
    return make_pictures(tmp_path / "pictures", train=(60, 30, 15, 10))


@pytest.fixture
def ticking(monkeypatch):
    """A clock that stands in, so that the updates planned do not depend on how fast or busy the machine is."""
    ticks = itertools.count()
    monkeypatch.setattr(train_backbone, "work_clock", lambda *_: lambda: 0.01 * next(ticks))
    monkeypatch.setattr(anytime, "REFIT_TOLERANCE", 1e9)


def train_for(pictures: Path, backbone: Path, folder: Path, seconds: float, *options) -> Run:
    words = [pictures, "--pretrained", backbone, "--hours", seconds / 3600, "--threads", 1, "--output_dir", folder]
    train.main([str(word) for word in (*words, *options)])
    return Run(folder / "finetune")


def test_with_no_time_the_head_of_all_images_is_kept(pictures, backbone, tmp_path, capsys):
    run = train_for(pictures, backbone, tmp_path / "run", 0)
    assert [(part["part"], part["kept"]) for part in run.results.parts] == [("head", True)]
    assert run.results.num_train_images == 115 and run.results.calibration_split == "train, out of fold"
    assert run.results.head["solver"] == "exact" and run.results.updates == 0
    assert (run.arguments["tune"], run.arguments["validation_fraction"]) == ("head", 0)
    assert (run.folder / "report" / "report.html").exists()
    printed = capsys.readouterr().out
    assert "The whole network is not trained: the time left holds 0 updates" in printed and "livt demo" in printed
    assert "a smaller backbone or fewer images fit" not in printed  # it was asked for no hours


def test_a_training_is_served_for_the_objective_that_is_named(pictures, backbone, tmp_path):
    run = train_for(pictures, backbone, tmp_path / "run", 0, "--objective", "accuracy")
    assert load_classifier(str(run.folder)).config.long_tail.calibration["objective"] == "accuracy"


def test_shot_groups_count_the_images_that_the_test_split_was_made_of(backbone, tmp_path):
    """Of 22 images of the second class 18 are left to train on, which would be few."""
    folder = make_pictures(tmp_path / "pictures", train=(60, 22, 15, 10)) / "train"
    run = train_for(folder, backbone, tmp_path / "run", 0)
    assert "medium (2 classes" in (run.folder / "report" / "report.md").read_text()
    measured = json.loads((run.folder / "report" / "evaluation.json").read_text())["rules"]
    assert run.results.class_counts["medium"] == 2
    for rule, metrics in run.results.rules.items():
        assert (metrics["medium"], metrics["few"]) == (measured[rule]["medium"], measured[rule]["few"])


def test_the_time_left_goes_into_the_whole_network_and_the_best_part_is_kept(
    pictures, backbone, ticking, tmp_path, capsys
):
    run = train_for(pictures, backbone, tmp_path / "run", 1)
    parts = run.results.parts
    assert [part["part"] for part in parts[:2]] == ["head", "tuned"] and sum(part["kept"] for part in parts) == 1
    kept = next(part for part in parts if part["kept"])
    assert kept["scores"]["nll"] == min(part["scores"]["nll"] for part in parts)  # never worse than the head
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert run.results.updates > 0 and plan["tuning"]["updates"] > 0
    assert f"{kept['scores']['nll']:.3f} on held-out images  <- kept" in capsys.readouterr().out
    model = load_classifier(str(run.folder))
    held_out = 0 if kept["part"] == "head" else round(115 * choose_held_out_fraction(115))
    assert abs(sum(model.config.long_tail.class_counts) - (115 - held_out)) <= 2


def test_a_network_that_is_worse_on_held_out_images_is_not_kept(pictures, backbone, ticking, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "LEARNING_RATE", 1e3)
    run = train_for(pictures, backbone, tmp_path / "run", 1)
    kept = next(part for part in run.results.parts if part["kept"])
    assert kept["part"] == "head" and run.arguments["tune"] == "head"
    head = train_for(pictures, backbone, tmp_path / "head", 0)
    assert_same_weights(run.folder, head.folder)


def test_a_training_that_is_interrupted_goes_on_with_its_plan(pictures, backbone, tmp_path, monkeypatch):
    """The first part is not done again, and the weights are those of the same number of updates in one go."""
    folder = tmp_path / "run"
    plan_once = {"updates": 12, "seconds": 5.0, "averages": True, "why": None}
    monkeypatch.setattr(train_backbone, "plan_tuning", lambda *_: anytime.TuningPlan(**plan_once))
    monkeypatch.setattr(anytime, "REFIT_TOLERANCE", 1e9)
    whole = train_for(pictures, backbone, tmp_path / "whole", 5)
    fit = train_backbone.TrainingLoop.fit

    def stopping(loop, **options):
        loop.checkpointing = loop.checkpointing.replace(max_hours=0.0)
        fit(loop, **options)

    with monkeypatch.context() as patched, pytest.raises(Interrupted) as stopped:
        patched.setattr(train_backbone.TrainingLoop, "fit", stopping)
        train_for(pictures, backbone, folder, 5)
    assert stopped.value.args == ("train", "--resume", folder)
    assert load_classifier(str(folder / "finetune")) is not None  # the head, while the rest is not done
    assert [path.name for path in (folder / "finetune" / "checkpoints").glob("step-*")] == ["step-1"]
    solved = (folder / "finetune" / "checkpoints" / "head.json").stat().st_mtime_ns
    monkeypatch.setattr(train_backbone, "plan_tuning", lambda *_: pytest.fail("the plan is recorded"))
    train.main(["--resume", str(folder)])
    assert (folder / "finetune" / "checkpoints" / "head.json").stat().st_mtime_ns == solved
    assert_same_weights(folder / "finetune", whole.folder)
    assert Run(folder / "finetune").results.metrics == whole.results.metrics


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 2, 4, 6])
def test_a_training_that_is_killed_at_any_time_resumes(pictures, backbone, tmp_path, seconds):
    words = [pictures, "--pretrained", backbone, "--hours", 6 / 3600, "--threads", 1]
    run = RecipeRun("train", tmp_path / "run", *words)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "plan.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # on a fast machine it has ended
        run.signal(signal.SIGKILL)
    run.processes[0].join()
    if not Run(tmp_path / "run" / "finetune").finished:
        train.main(["--resume", str(tmp_path / "run")])
    assert Run(tmp_path / "run" / "finetune").finished


def test_few_images_that_cannot_be_spared_leave_the_head_alone(backbone, tmp_path, capsys):
    pictures = make_pictures(tmp_path / "few", train=(4, 2))
    run = train_for(pictures, backbone, tmp_path / "run", 3, "--validation_fraction", "0")
    assert [part["part"] for part in run.results.parts] == ["head"]
    assert "no image is held out" in capsys.readouterr().out


def test_the_dataset_s_own_validation_images_are_what_is_chosen_by(pictures, backbone, tmp_path):
    for label in range(4):
        shutil.copytree(pictures / "test" / f"class{label}", pictures / "validation" / f"class{label}")
    run = train_for(pictures, backbone, tmp_path / "run", 2)
    assert run.results.num_train_images == 115 and not run.results.validation_carved
    assert np.isfinite(run.results.parts[0]["scores"]["nll"])


def test_the_framing_that_a_trial_chose_is_that_of_all_parts(pictures, backbone, tmp_path, monkeypatch):
    trial = FramingTrial("squash", "crop", "squash", 0.4, "accuracy", 0.1, 0.01, 115)
    monkeypatch.setattr(train_backbone, "try_framings", lambda *_, **options: trial)
    run = train_for(pictures, backbone, tmp_path / "run", 2)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["framing"] == "squash"
    assert run.arguments["framing"] == "squash" and run.results.framing["chosen"] == "squash"
    assert read_framing(load_processor(str(run.folder))).name == "squash"
