"""Cross-validation: what folds are made of, and a run of each that together say one thing about every image."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from recipe_runs import TINY, RecipeRun, assert_same_weights, make_pictures
from refusals import refusal
from test_tuning import resnet

from livt_hf import LiViTForPreTraining, pretraining_config
from livt_hf.classifiers import load_classifier
from livt_hf.data import class_counts, eval_processor, load_long_tailed, shot_counts
from livt_hf.data.labels import labels_of
from livt_hf.data.splitting import assign_folds as folds_of_images
from livt_hf.errors import Interrupted, LiVTError
from livt_hf.metrics import long_tail_metrics
from livt_hf.predictions import Predictions
from livt_hf.predictions.rules import ARGMAX, UNIFORM
from livt_hf.recipes import eval as evaluation
from livt_hf.recipes import finetune
from livt_hf.runs import Run
from livt_hf.training.loop import TrainingLoop


def table(labels: list, groups: list | None = None, classes: int | None = None) -> Dataset:
    """A dataset without images, of one label or a list of labels each."""
    several = isinstance(labels[0], list)
    number = classes or 1 + max(label for row in labels for label in (row if several else [row]))
    kind = ClassLabel(names=[f"class{c}" for c in range(number)])
    columns, features = {"label": labels}, Features(label=List(kind) if several else kind)
    if groups is not None:
        columns["group"], features["group"] = [str(group) for group in groups], Value("string")
    return Dataset.from_dict(columns, features=features)


def test_a_data_set_has_one_count_of_each_class_however_its_images_are_held_out(tmp_path):
    """60, 22 and 19 images: fewer would be left in the training splits below, of other shot groups."""
    folder = make_pictures(tmp_path / "pictures", train=(60, 22, 19), test=0) / "train"
    options = [{}, {"validation_fraction": 0.3}, {"test_fraction": 0.4}, {"fold": "2/5"}, {"fold": "1/2"}]
    splits = [load_long_tailed(str(folder), **one) for one in options]
    assert [shot_counts(data).tolist() for data in splits] == [[60, 22, 19]] * 5
    assert all(class_counts(data["train"]).sum() < 101 for data in splits)
    subset = load_long_tailed(str(folder), rule=[10, 5, 3], test_fraction=0.2)
    assert shot_counts(subset).tolist() == [10, 5, 3]  # the rule chooses training images, not those to test on


def random_table(seed: int) -> Dataset:
    rng = np.random.RandomState(seed)
    rows, classes, groups = rng.randint(60, 200), rng.randint(1, 9), rng.randint(12, 80)
    labels = (classes * rng.rand(rows) ** 3).astype(int)
    group = (groups * rng.rand(rows) ** 2).astype(int).tolist() if seed % 3 else None
    if seed % 2:
        texts = [sorted({int(c), int(rng.randint(classes))}) for c in labels]
        return table(texts, group, classes)
    return table(labels.tolist(), group, classes)


@pytest.mark.parametrize("seed", range(60))
def test_no_group_is_in_two_folds_and_every_fold_trains_on_every_class(seed):
    dataset = random_table(seed)
    try:
        fold = folds_of_images(dataset, 3, seed)
    except LiVTError:
        assert seed % 3  # only groups can be too few
        return
    labels, present = labels_of(dataset), class_counts(dataset) > 0
    assert set(fold.tolist()) - {-1} == {0, 1, 2}
    if "group" in dataset.column_names:
        for group in set(dataset["group"]):
            assert len(set(fold[np.array(dataset["group"]) == group])) == 1
    for number in range(3):
        trained = labels.take(np.flatnonzero(fold != number)).counts(len(present))
        assert ((trained > 0) == present).all()
    np.testing.assert_array_equal(fold, folds_of_images(dataset, 3, seed))


def test_without_groups_every_class_is_spread_evenly_and_only_single_images_are_never_tested(caplog):
    fold = folds_of_images(table([0] * 50 + [1] * 10 + [2] * 3 + [3]), 5)
    assert np.bincount(fold[:50]).tolist() == [10] * 5 and np.bincount(fold[50:60]).tolist() == [2] * 5
    assert len(set(fold[60:63].tolist())) == 3 and fold[63] == -1
    assert "classes that are trained on in every fold and never tested" in caplog.text and "class3 (1)" in caplog.text
    assert "classes whose images are not in every fold: class2 (in 3)" in caplog.text
    assert "63 of 64 images are tested" in caplog.text


def test_a_class_of_one_group_is_never_tested_and_named_with_its_images(caplog):
    groups = [*range(20), *range(20), *[20] * 4]
    fold = folds_of_images(table([0] * 20 + [1] * 20 + [2] * 4, groups), 5)
    assert (fold[40:] == -1).all() and (fold[:40] >= 0).all()
    assert "for each depends on one group (images in brackets): class2 (4)" in caplog.text


def test_more_folds_than_groups_or_images_are_refused_with_the_number_there_is():
    with refusal("folds", "5 images", "4"):
        folds_of_images(table([0] * 4 + [1] * 3), 5)
    with refusal("folds", "5 groups", "3"):
        folds_of_images(table([0, 1] * 6, [0, 0, 1, 1, 2, 2] * 2), 5)


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "2", "a/b"])
def test_a_fold_that_is_no_part_of_several_is_refused(fold):
    with refusal("fold", repr(fold)):
        load_long_tailed("glyphs", fold=fold)


def test_folds_divide_training_and_validation_images_and_leave_a_test_split_alone(tmp_path, caplog):
    make_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / "train").rename(tmp_path / "pictures" / "val")
    make_pictures(tmp_path / "more", train=(8, 8, 8, 8))
    (tmp_path / "more" / "train").rename(tmp_path / "pictures" / "train")
    parts = [load_long_tailed(str(tmp_path / "pictures"), fold=f"{number}/4") for number in range(1, 5)]
    assert sum(class_counts(part["test"]) for part in parts).tolist() == [38, 26, 18, 14]
    for part in parts:
        assert (class_counts(part["train"]) + class_counts(part["test"])).tolist() == [38, 26, 18, 14]
    assert "the 44 images of the test split are in no fold" in caplog.text


# Runs


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


@pytest.fixture(scope="module")
def labels(tmp_path_factory) -> Path:
    """A table of 64 pictures; patients have up to three, all of one class."""
    folder = make_pictures(tmp_path_factory.mktemp("folds") / "pictures")
    rows = []
    for label, count in enumerate((30, 18, 10, 6)):
        rows += [(f"train/class{label}/{i}.png", f"class{label}", f"{label}-{i // 3}") for i in range(count)]
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "patient"), *rows])
    return folder / "labels.csv"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return resnet(tmp_path_factory.mktemp("backbone") / "resnet")


@pytest.fixture(scope="module")
def run(labels, backbone, tmp_path_factory) -> Run:
    """Two folds, all done."""
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIVT_RUNS", str(place))
        patched.setenv("ACCELERATE_USE_CPU", "1")
        return cross_validated(labels, backbone, place / "run")


SHORT = "--group_column patient --epochs 3 --warmup_epochs 1 --batch_size 16 --threads 1 --eval_epochs 3 --folds 2"


def cross_validated(labels: Path, backbone: Path, folder: Path, *options) -> Run:
    words = ["--dataset", labels, "--pretrained", backbone, "--output_dir", folder, "--image_size", 16]
    finetune.main([*map(str, words), "--tune", "head", "--solver", "loop", *SHORT.split(), *map(str, options)])
    return Run(folder)


def test_every_image_is_predicted_once_by_the_model_that_did_not_see_its_group(run):
    predictions = Predictions.load(run.folder / "predictions")
    assert len(set(predictions.column("path"))) == 64 == run.results.num_images
    group, fold = predictions.column("group"), predictions.column("fold")
    assert not set(group[fold == 1]) & set(group[fold == 2])
    right = predictions.logits.argmax(1) == predictions.labels
    assert run.results.rules[ARGMAX]["accuracy"] == pytest.approx(np.mean(right))
    summary = json.loads((run.folder / "report" / "evaluation.json").read_text())
    each = [run.fold(number).results.metrics["accuracy"] for number in (1, 2)]
    assert [row["accuracy"] for row in summary["folds"]["each"]] == pytest.approx(each)
    assert summary["folds"]["mean"]["accuracy"] == pytest.approx(np.mean(each))
    assert summary["folds"]["deviation"]["accuracy"] == pytest.approx(np.std(each, ddof=1))
    assert run.results.folds == summary["folds"]
    for name in ("updates", "seconds", "preparation_seconds"):
        assert getattr(run.results, name) == sum(getattr(run.fold(number).results, name) for number in (1, 2))
    page = (run.folder / "report" / "report.html").read_text()
    assert "mean ± std" in page and ">pooled<" in page
    with refusal("model"):  # there is no model to evaluate
        evaluation.main([])
    with refusal(None, run.folder, "fold-1"):
        evaluation.main(["--model", str(run.folder)])


def calibrate_on_few(monkeypatch) -> None:
    """Let ten images calibrate: what is tested is not how well."""
    for module in ("long_tail.calibration", "predictions.calibrate"):
        monkeypatch.setattr(f"livt_hf.{module}.MIN_IMAGES", 1)


def test_pooled_numbers_are_those_of_the_pooled_scores(labels, backbone, tmp_path, monkeypatch):
    calibrate_on_few(monkeypatch)
    run = cross_validated(labels, backbone, tmp_path / "run", "--validation_fraction", "0.3")
    predictions = Predictions.load(run.folder / "predictions")
    summary = json.loads((run.folder / "report" / "evaluation.json").read_text())
    assert summary["default_rule"] == "test_prior"  # calibrated, and served for macro F1
    assert list(summary["rules"]) == ["test_prior", "argmax", "uniform"]
    fold, models = predictions.column("fold"), [load_classifier(str(run.fold(n).folder)) for n in (1, 2)]
    for rule, measured in summary["rules"].items():
        scores = torch.tensor(predictions.logits).softmax(-1)
        if rule != "argmax":  # each image by the calibration of its own fold
            prior = "uniform" if rule == "uniform" else None
            for number, model in enumerate(models, 1):
                logits = torch.tensor(predictions.logits[fold == number])
                scores[torch.tensor(fold == number)] = model.head.posterior(logits, prior)
        expected = long_tail_metrics(scores, predictions.labels, [9] * 4, confidence="given")
        for name in ("accuracy", "mean_class_accuracy", "macro_f1", "ece"):
            assert measured[name] == pytest.approx(expected[name], abs=1e-6), (rule, name)


def test_folds_of_which_only_one_can_hold_out_images_to_calibrate_are_measured_together(
    labels, backbone, tmp_path, monkeypatch
):
    monkeypatch.setattr("livt_hf.data.splitting.MIN_IMAGES_TO_SPLIT", 10)
    calibrate_on_few(monkeypatch)
    sites = {0: "abcde", 1: "ab"}  # of two sites to train on, one alone has class 1, so that none can be spared
    rows = [
        f"train/class{label}/{i}.png,class{label},{own[i % len(own)]}\n"
        for label, own in sites.items()
        for i in range(10)
    ]
    table = labels.with_name("sites.csv")
    table.write_text("file,label,site\n" + "".join(rows))
    run = cross_validated(table, backbone, tmp_path / "run", "--group_column", "site", "--batch_size", "4")
    assert len({run.fold(number).results.default_rule for number in (1, 2)}) == 2
    assert run.results.num_images == 20 and UNIFORM in run.results.rules


def test_a_fold_is_a_run_that_can_be_evaluated_on_its_own_test_images(run, tmp_path):
    evaluation.main(["--model", str(run.fold(2).folder), "--report", str(tmp_path / "report"), "--threads", "1"])
    summary = json.loads((tmp_path / "report" / "evaluation.json").read_text())
    measured = summary["rules"]["argmax"]
    assert measured == pytest.approx(run.fold(2).results.metrics, abs=1e-6)


def test_an_interrupted_cross_validation_keeps_what_is_done_and_ends_as_it_would_have(
    run, labels, backbone, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(
            TrainingLoop,
            "_out_of_time",
            lambda loop, _: loop.run.folder.name == "fold-2" and loop.progress.update >= 2,
        )
        with pytest.raises(Interrupted) as stopped:
            cross_validated(labels, backbone, tmp_path / "cut")
    assert stopped.value.args == ("finetune", "--resume", tmp_path / "cut")
    cut = Run(tmp_path / "cut")
    done = (cut.fold(1).folder / "results.json").stat().st_mtime_ns
    assert cut.fold(1).finished and not cut.fold(2).finished and not cut.finished
    finetune.main(["--resume", str(cut.folder)])
    assert (cut.fold(1).folder / "results.json").stat().st_mtime_ns == done and cut.finished
    for number in (1, 2):
        assert_same_weights(cut.fold(number).folder, run.fold(number).folder)
    assert cut.results.metrics == run.results.metrics
    with refusal(None, cut.folder):
        finetune.main(["--resume", str(cut.folder)])


def test_a_livit_from_a_pretraining_is_cross_validated_on_a_folder(tmp_path, capsys):
    pretrained = tmp_path / "mgp"
    LiViTForPreTraining(pretraining_config("micro", image_size=8)).save_pretrained(pretrained)
    eval_processor(8, [0.5] * 3, [0.25] * 3, native=True).save_pretrained(pretrained)
    pictures = make_pictures(tmp_path / "pictures", train=(12, 6, 1)) / "train"
    options = ["--dataset", pictures, "--pretrained", pretrained, "--output_dir", tmp_path / "run", *TINY]
    finetune.main([*map(str, options), "--batch_size", "8", "--epochs", "1", "--folds", "2"])
    run = Run(tmp_path / "run")
    assert run.results.num_images == 18 and run.results.model_size == "micro"  # the class of one image is not tested
    printed = capsys.readouterr().out
    assert "Report:" in printed and "| pooled | 18 |" in printed


@pytest.mark.slow
def test_two_processes_cross_validate_to_the_same_numbers(labels, tmp_path):
    options = ["--dataset", labels, *TINY, "--pretrained", "none", *SHORT.split(), "--mixup", 0, "--cutmix", 0]
    options += ["--drop_path", 0, "--epochs", 1]
    places = {processes: tmp_path / str(processes) for processes in (1, 2)}
    one, two = (RecipeRun("finetune", place, *options, processes=n).finish() for n, place in places.items())
    assert two.results.metrics == pytest.approx(one.results.metrics, abs=0.02)
    assert two.results.metrics["num_images"] == 64
    records = [Predictions.load(one.folder / "predictions"), Predictions.load(two.folder / "predictions")]
    assert records[0].table["path"].equals(records[1].table["path"])


def test_identical_images_on_both_sides_are_named_before_training(tmp_path, caplog):
    pictures = make_pictures(tmp_path / "pictures", train=(12, 12)) / "train"
    for number in range(11):
        (pictures / "class0" / f"{number}.png").write_bytes((pictures / "class1" / "0.png").read_bytes())
    options = ["--dataset", str(pictures), "--pretrained", "none", *TINY, "--batch_size", "512"]
    for more in ([], ["--folds", "2"]):
        caplog.clear()
        with refusal(None, "batch_size", "512"):
            finetune.main([*options, *more])
        assert "in two splits:" in caplog.text and "0.png of " in caplog.text


@pytest.mark.parametrize(
    ("option", "value", "argument"), [("batch_size", "512", None), ("folds", "1", "folds"), ("fold", "1/2", "fold")]
)
def test_what_raises_an_error_leaves_no_folder_behind(labels, backbone, tmp_path, option, value, argument):
    with refusal(argument, option, value):
        cross_validated(labels, backbone, tmp_path / "run", f"--{option}", value)
    assert not (tmp_path / "run").exists()


def test_too_few_held_out_images_leave_a_model_uncalibrated(labels, backbone, tmp_path, caplog):
    run = cross_validated(labels, backbone, tmp_path / "run", "--validation_fraction", "0.3")
    for number in (1, 2):
        results = run.fold(number).results
        assert (results.default_rule, results.calibrated_on) == ("argmax", None)
    assert "calibration needs 20" in caplog.text
