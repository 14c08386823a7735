"""Images with several labels, from a parquet file to a measured model."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, Image, List
from PIL import Image as PILImage
from recipe_runs import TINY

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.classifiers import load_classifier
from livt_hf.hub import Publication, prepare_publication
from livt_hf.long_tail.head import LongTailHead
from livt_hf.metrics import MultiLabelMetrics, best_thresholds
from livt_hf.precision import FLOAT32
from livt_hf.predictions import Predictions
from livt_hf.predictions.calibrate import calibrate
from livt_hf.predictions.rules import PER_LABEL, UNIFORM
from livt_hf.recipes import finetune
from livt_hf.recipes.eval import main as evaluate
from livt_hf.recipes.predict import main as predict
from livt_hf.runs import Run

NAMES = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Of a fine-tuning on 96 pictures that have any of three colours."""
    folder = tmp_path_factory.mktemp("several")
    rng = np.random.RandomState(0)
    present = rng.rand(96, 3) < (0.6, 0.3, 0.15)
    pixels = [rng.randint(0, 100, (8, 8, 3)) + 150 * row for row in present]
    pictures = [PILImage.fromarray(picture.astype(np.uint8)) for picture in pixels]
    rows = {
        "image": pictures,
        "label": [np.flatnonzero(row).tolist() for row in present],
    }
    features = Features(image=Image(), label=List(ClassLabel(names=NAMES)))
    Dataset.from_dict(rows, features=features).to_parquet(folder / "train.parquet")
    words = ["--dataset", folder / "train.parquet", *TINY, "--pretrained", "none"]
    return [str(word) for word in (*words, "--mixup", 0, "--cutmix", 0)]


@pytest.fixture(scope="module")
def folder(options, tmp_path_factory) -> Path:
    """Return the folder of a run whose thresholds are chosen on validation images."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "1")
        finetune.main([*options, "--validation_fraction", "0.3", "--output_dir", str(folder)])
    return folder


def test_fine_tuning_on_several_labels_an_image_reports_mean_average_precision(folder):
    results, config = Run(folder).results, LiViTForImageClassification.from_pretrained(folder).config
    assert 0 < results.metrics["map"] <= 1 and UNIFORM not in results.rules
    assert config.problem_type == "multi_label_classification"
    assert config.long_tail.num_images == results.num_train_images == pytest.approx(0.7 * 0.8 * 96, abs=2)
    assert config.long_tail.test_prior is None  # a uniform one has no meaning here
    assert results.precision == Predictions.load(folder / "predictions").info.precision == FLOAT32
    assert max(config.long_tail.class_counts) < sum(config.long_tail.class_counts)


def test_thresholds_are_chosen_on_validation_kept_with_the_model_and_used_everywhere(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    model, record = load_classifier(str(folder)), Predictions.load(folder / "predictions")
    thresholds = record.info.thresholds()
    assert thresholds.tolist() == model.config.long_tail.calibration["thresholds"] != [0.5] * 3
    logits = torch.from_numpy(record.logits.copy())
    assert torch.equal(record.scores(), model.head.posterior(logits).detach())
    table = tmp_path / "predictions.parquet"
    evaluate(["--model", str(folder), "--predictions", str(table), "--threads", "1"])
    rows = parquet.read_table(table).to_pydict()
    for scores, given in zip(rows["scores"], rows["labels"], strict=True):
        assert given == [name for name, score, t in zip(NAMES, scores, thresholds, strict=True) if score >= t]
    assert set("|".join(rows["label"]).split("|")) <= {*NAMES, ""}
    summary = json.loads((folder / "report" / "evaluation.json").read_text())
    assert summary["rules"][PER_LABEL] == pytest.approx(Run(folder).results.metrics, abs=1e-6)
    page = (folder / "report" / "report.html").read_text()
    assert "Average precision of each class" in page and all(f"</span>{name}</td>" in page for name in NAMES)
    printed = capsys.readouterr().out
    assert "on 20 images" in printed and "  mean average precision " in printed and ", macro F1 " in printed
    picture = str(tmp_path / "picture.png")
    PILImage.new("RGB", (8, 8), (200, 50, 50)).save(picture)
    predict([str(folder), picture, "--format", "jsonl"])
    answer = json.loads(capsys.readouterr().out)
    scores = {row["label"]: row["score"] for row in answer["predictions"]}
    expected = [name for name, t in zip(NAMES, thresholds.tolist(), strict=True) if scores[name] >= round(t, 4)]
    assert answer["labels"] == expected


def test_a_model_of_several_labels_is_published_with_its_report_and_without_the_biases_of_single_ones(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    drawn = []
    monkeypatch.setattr(
        "livt_hf.hub.publishing.class_distribution", lambda *said, biases: drawn.append((said, biases))
    )
    evaluate(["--model", str(folder), "--threads", "1"])
    published = prepare_publication(folder, tmp_path / "out", Publication("org/colours", license="mit"))
    assert (published / "report" / "evaluation.json").exists()
    (((_, _, names), biases),) = drawn
    assert names == NAMES and not biases and "logit biases" not in (published / "README.md").read_text()


def test_several_labels_are_cross_validated_too(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    finetune.main([*options, "--folds", "2", "--epochs", "1", "--output_dir", str(tmp_path / "run")])
    run = Run(tmp_path / "run")
    assert run.results.metrics["num_images"] == 96 and 0 < run.results.folds["mean"]["map"] <= 1
    assert "| pooled | 96 |" in capsys.readouterr().out
    assert "mean ± std" in (run.folder / "report" / "report.md").read_text()


def test_a_threshold_is_the_one_of_the_highest_f1():
    scores = torch.tensor([0.9, 0.8, 0.7, 0.4, 0.3, 0.2, 0.1, 0.05])[:, None].repeat(1, 2)
    targets = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0])[:, None].repeat(1, 2)
    assert best_thresholds(scores, targets) == pytest.approx([0.15, 0.15])  # five of six are right, none is missed
    for threshold in (0.01, 0.08, 0.25, 0.5, 0.75):
        assert f1(scores, targets, threshold) < f1(scores, targets, 0.15)


def f1(scores, targets, threshold) -> float:
    metrics = MultiLabelMetrics([5, 5])
    metrics.update(scores, targets, scores >= threshold)
    return metrics.compute()["macro_f1"]


def test_labels_that_few_images_have_share_a_threshold_and_one_without_images_does_no_harm():
    rng = torch.Generator().manual_seed(0)
    scores, targets = torch.rand(50, 3, generator=rng), torch.zeros(50, 3)
    targets[:20, 0] = targets[:2, 1] = 1
    chosen = best_thresholds(scores, targets)
    assert chosen[1] == chosen[2] != chosen[0]
    assert best_thresholds(scores, torch.zeros(50, 3)) == [0.5] * 3
    assert best_thresholds(scores, torch.ones(50, 3)) == [0.5] * 3


def test_an_image_that_counts_three_times_chooses_the_threshold_of_three_such_images():
    rng = torch.Generator().manual_seed(0)
    scores = torch.rand(200, 2, generator=rng)
    targets = (torch.rand(200, 2, generator=rng) < scores / 2).long()
    targets[:, 1] = targets[:, 0]
    rows = torch.arange(200).repeat_interleave(1 + 2 * targets[:, 0])
    weighted = best_thresholds(scores, targets, torch.tensor([3.0, 3.0]))
    assert weighted == best_thresholds(scores[rows], targets[rows])
    assert weighted != best_thresholds(scores, targets) == best_thresholds(scores, targets, torch.ones(2))


class Echo(torch.nn.Module):
    """A model whose logits are its input."""

    def __init__(self, config: LiViTConfig):
        super().__init__()
        self.config, self.head = config, LongTailHead(config)

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=pixel_values)


def test_a_label_is_given_more_often_where_the_test_prior_expects_it_more_often():
    rng = torch.Generator().manual_seed(0)
    labels = (torch.rand(4000, 2, generator=rng) < 0.05).long()
    evidence = torch.randn(4000, 2, generator=rng) * 1.5**0.5 + (2 * labels - 1) * 0.75

    def given(test_prior) -> list[int]:
        counts = dict(class_counts=[50, 50], num_train_images=1000, problem_type="multi_label_classification")
        config = LiViTConfig(**counts, loss="bce", test_prior=test_prior)
        logits = evidence + math.log(0.05 / 0.95)  # of plain BCE: the log-odds under the training prior
        model = Echo(config)
        thresholds = calibrate(model, [{"pixel_values": logits, "labels": labels}], Accelerator(cpu=True)).thresholds
        return (model.head.posterior(logits) >= torch.tensor(thresholds)).sum(0).tolist()

    (often, seldom), before = given([0.5, 0.05]), given(None)
    assert often > 3 * before[0] and seldom == before[1]


def test_a_threshold_never_lies_between_equal_scores():
    scores = torch.tensor([[0.8], [0.5], [0.5], [0.2]])
    for targets in ([1, 1, 0, 0], [1, 0, 1, 0]):  # whichever comes first: the second image is given with the third
        (threshold,) = best_thresholds(scores.repeat(100, 1), torch.tensor(targets)[:, None].repeat(100, 1).float())
        assert threshold == pytest.approx(0.35)
