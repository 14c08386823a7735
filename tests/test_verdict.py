"""The verdict of a report, and the comparison of two reports."""

import datetime
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal

from livt_hf.errors import LiVTError
from livt_hf.metrics import LongTailMetrics, confusions
from livt_hf.predictions import Predictions
from livt_hf.predictions.evaluate import EvaluationReport, Evaluator
from livt_hf.predictions.significance import paired_p_value
from livt_hf.recipes.eval import main
from livt_hf.reports import report as report_module
from livt_hf.reports.comparison import describe_difference
from livt_hf.reports.page import render
from livt_hf.reports.report import write_classes
from livt_hf.reports.verdict import find_weak_classes, judge

NAMES = ["common <b>", "usual", "rare", "rarer"]
COUNTS = [500, 200, 12, 6]


def measured(labels, predicted, counts=COUNTS, names=NAMES, *, loss="bal_ce", groups=None, scale=4.0, **summary):
    """Return the report on a model whose largest logit is that of the predicted class; `loss` says its prior."""
    logits = scale * torch.eye(len(counts))[torch.as_tensor(predicted)]
    columns = {} if groups is None else {"group": [str(group) for group in groups]}
    record = Predictions.from_arrays(
        logits, np.asarray(labels), class_names=names, class_counts=counts, loss=loss, **columns
    )
    thresholds = {name: summary.pop(name) for name in ("many_above", "few_below") if name in summary}
    described = {"model": "runs/my model", "dataset": "birds", "split": "test"}
    return Evaluator(record, counts, **thresholds).evaluate(**described | summary)


def pairs(*rows):
    """Return labels and predictions of rows (label, prediction, how many)."""
    label, predicted, times = zip(*rows, strict=True)
    return np.repeat(label, times), np.repeat(predicted, times)


def commands(report) -> list[str]:
    return [advice.command for advice in judge(report).advice]


EMPTY = dict.fromkeys(("figures", "confusions", "examples", "classes", "class_columns", "facts", "more_columns"), ())
EMPTY |= {"title": "", "command": None, "grouped": False, "tables": {}}


def render_verdict(report: EvaluationReport) -> tuple[str, str]:
    """Return the verdict in HTML and the report in Markdown."""
    verdict = judge(report)
    return render("report.html", verdict=verdict, **EMPTY), render("report.md", verdict=verdict, title="", tables={})


# Thirty images per class: the frequent ones right, most of the rare ones predicted as a frequent class.
WEAK = pairs((0, 0, 30), (1, 1, 27), (1, 0, 3), (2, 0, 21), (2, 2, 9), (3, 1, 12), (3, 0, 6), (3, 3, 12))


@pytest.fixture(scope="module")
def weak():
    return measured(*WEAK)


def test_the_verdict_opens_with_both_accuracies_images_split_and_decision_rule(weak):
    lead = judge(weak).lead
    assert lead == ("Accuracy 65.0 %, mean class accuracy 65.0 % on 120 images (test); decision rule: largest logit.")


def test_the_baselines_are_the_largest_class_and_the_same_model_under_the_training_prior(weak):
    """Under the training prior of 500 : 200 : 12 : 6 logits of 0 and 4 leave the rare classes to the largest."""
    own, largest, training = judge(weak).baselines
    assert "Always “common <b>”" in largest["label"] and largest["metrics"]["accuracy"] == 30 / 120
    assert own["metrics"]["accuracy"] == 78 / 120 and largest["signs"] == {"accuracy": 1, "mean_class_accuracy": 1}
    assert training["metrics"]["accuracy"] == pytest.approx((30 + 27 + 9) / 120)  # e^4 > 500 / 12, but not > 500 / 6
    assert training["signs"] == {"accuracy": 1, "mean_class_accuracy": 1}


def test_a_model_below_the_largest_class_that_finds_rare_ones_is_told_from_one_that_finds_none(weak):
    """Of 1,000 images 800 are of the largest class."""
    finds = measured(*pairs((0, 0, 400), (0, 1, 400), (1, 1, 180), (1, 0, 20)), [800, 100], ["a", "b"])
    guesses = measured(*pairs((0, 0, 400), (0, 1, 400), (1, 1, 100), (1, 0, 100)), [800, 100], ["a", "b"])
    assert "favours rare classes" in judge(finds).summary and "less often than" in judge(finds).summary
    assert judge(guesses).summary.startswith("Not better than always answering")
    assert judge(weak).summary.startswith("Better than always answering the largest class, which")


def test_more_training_is_advised_only_where_no_decision_rule_beats_the_largest_class(weak):
    labels, predicted = pairs((0, 1, 60), (0, 0, 20), (1, 1, 10), (1, 0, 10))
    told = measured(labels, predicted, [800, 100], ["a", "b"], scale=1.0)  # weak logits: the training prior rules
    assert told.summary["baselines"]["training"]["accuracy"] == told.summary["baselines"]["largest_class"]["accuracy"]
    advised = commands(told)
    assert "livt predict 'runs/my model' IMAGES --prior training" in advised[0]  # the prior is considered first
    assert any("livt train birds" in command for command in advised)
    assert not any("livt train" in command for command in commands(weak))


def test_a_handful_of_groups_gives_neither_a_verdict_nor_intervals_but_a_cross_validation(tmp_path):
    """All images are right. Two of the 2^5 flips of five signs are as far, which is more than 5 %."""
    (tmp_path / "arguments.yaml").touch()
    labels = np.repeat([0, 1], 30)
    five, six = (
        measured(labels, labels, [500, 50], ["a", "b"], groups=np.arange(60) % number, model=str(tmp_path))
        for number in (5, 6)
    )
    assert judge(five).summary.endswith("50.0 %; 5 groups of images are too few to compare them.")
    assert set(five.summary["intervals"]["argmax"].values()) == {None}
    (advice,) = judge(five).advice
    assert "--folds 5" in advice.command and advice.reason.startswith("The test images are of 5 groups, too few")
    assert judge(six).summary.startswith("Better than") and not judge(six).advice


def test_the_accuracy_of_a_group_is_the_mean_of_its_classes_beside_its_precision(weak):
    many, few = judge(weak).groups
    assert (many["name"], many["accuracy"]) == ("many", pytest.approx(0.95))
    assert (few["name"], few["accuracy"], few["precision"]) == ("few", pytest.approx(0.35), 1.0)
    assert many["description"] == "2 classes with more than 100 training images"
    found = judge(measured(*WEAK, many_above=300, few_below=10)).groups
    for group, size in zip(found, ("more than 300", "10 to 300", "fewer than 10"), strict=True):
        assert f" with {size} training images" in group["description"]
    few = judge(measured(*pairs((0, 0, 30), (1, 1, 30), (2, 2, 30)))).groups[1]
    assert few["description"] == "1 class with fewer than 20 training images; 1 more not tested"


def test_a_weak_class_has_its_numbers_and_what_it_is_confused_with(weak):
    rare, rarer = find_weak_classes(weak)
    assert rare["reason"] == "9 of 30 images right; only 12 training images; 21 predicted as common <b>"
    assert rarer["reason"] == "12 of 30 images right; only 6 training images; 12 predicted as usual"
    assert "only 1 training image;" in find_weak_classes(measured(*WEAK, [500, 200, 30, 1]))[1]["reason"]
    perfect = measured(*pairs(*[(label, label, 30) for label in range(4)]), scale=40.0)
    assert judge(perfect).advice == [] and find_weak_classes(perfect) == []


def test_images_of_one_patient_count_once_against_a_class():
    labels, predicted = pairs((0, 0, 45), (0, 1, 5), (1, 1, 4), (1, 0, 12))
    alone = measured(labels, predicted, [500, 50], ["a", "b"])
    together = measured(labels, predicted, [500, 50], ["a", "b"], groups=[*range(50), *[50] * 16])
    assert [row["name"] for row in find_weak_classes(alone)] == ["b"] and find_weak_classes(together) == []


def simulated(rng, images, accuracy):
    """Return a report on 30 classes with so many test images each, of which each is right with a probability."""
    classes = len(accuracy)
    labels = np.arange(classes).repeat(images)
    wrong = (labels + rng.integers(1, classes, len(labels))) % classes
    predicted = np.where(rng.random(len(labels)) < accuracy[labels], labels, wrong)
    metrics = LongTailMetrics([50] * classes)
    metrics.update(predicted, labels)
    found = confusions(torch.from_numpy(predicted), torch.from_numpy(labels), [50] * classes)
    return EvaluationReport({}, metrics.per_class(), confusions=found, labels=labels)


@pytest.mark.parametrize("images", [3, 10, 30])
@pytest.mark.parametrize("accuracy", [0.5, 0.8])
def test_hardly_any_of_thirty_equally_good_classes_is_called_weak(images, accuracy):
    rng, even = np.random.default_rng(0), np.full(30, accuracy)
    assert np.mean([len(find_weak_classes(simulated(rng, images, even))) for _ in range(200)]) < 0.1


def test_bad_classes_are_found_with_thirty_images_each():
    rng, accuracy = np.random.default_rng(0), np.where(np.arange(30) < 3, 0.3, 0.8)
    found = [{row["class"] for row in find_weak_classes(simulated(rng, 30, accuracy))} for _ in range(50)]
    assert np.mean([len(one & {0, 1, 2}) for one in found]) > 2.9
    assert np.mean([len(one - {0, 1, 2}) for one in found]) < 0.3


def test_another_rule_is_advised_only_if_a_paired_test_bears_it_out():
    """The uniform prior turns eight, or two, of the errors of a plain cross-entropy into right predictions."""
    advised = []
    for better in (8, 2):
        logits, labels = np.zeros((100, 2), dtype=np.float32), np.repeat([0, 1], 50)
        logits[:50, 0], logits[50:, 1] = 4.0, 4.0
        logits[50 : 50 + better, 1] = -0.5  # by z the first class, and by z - log pi the second
        record = Predictions.from_arrays(logits, labels, class_names="ab", class_counts=[80, 20], loss="ce")
        report = Evaluator(record, [80, 20]).evaluate(model="m", dataset="d", split="test")
        advised.append([advice for advice in judge(report).advice if "Decide by" in advice.title])
    assert advised[0][0].command == "livt predict m IMAGES --prior uniform" and advised[1] == []
    assert advised[0][0].reason == "Accuracy 100.0 instead of 92.0 %, mean class accuracy 100.0 instead of 92.0 %."


def test_the_training_prior_is_offered_to_those_who_count_images_where_it_has_more_of_them():
    labels, predicted = pairs((0, 0, 50), (0, 1, 40), (1, 1, 10))
    advice = judge(measured(labels, predicted, [900, 100], ["a", "b"], scale=1.0)).advice[0]
    assert advice.command == "livt predict 'runs/my model' IMAGES --prior training"
    assert advice.reason.startswith("Accuracy 90.0 instead of 60.0 %, mean class accuracy 50.0 instead of 77.8 %.")
    folds = measured(labels, predicted, [900, 100], ["a", "b"], scale=1.0, folds={})
    assert commands(folds)[0] == "livt decide 'runs/my model/predictions' --prior training --output decided"


def test_images_are_asked_for_only_where_rare_classes_are_less_accurate(tmp_path):
    (tmp_path / "arguments.yaml").write_text("")
    again = f"livt finetune --config {tmp_path / 'arguments.yaml'}"
    assert again in commands(measured(*WEAK, model=str(tmp_path)))
    assert again not in commands(measured(*WEAK, model=str(tmp_path), few_below=5))  # 6 images are not few
    alike = pairs(*[(label, label, 9) for label in range(4)], *[(label, 3 - label, 3) for label in range(4)])
    assert again not in commands(measured(*alike, model=str(tmp_path)))
    assert f"{again} --folds 5" not in commands(measured(*alike, model=str(tmp_path)))
    few = pairs(*[(label, label, 5) for label in range(4)])
    assert commands(measured(*few, model=str(tmp_path), scale=40.0)) == [f"{again} --folds 5"]


def test_calibration_is_advised_in_one_direction_and_only_where_the_gap_is_no_noise(weak):
    """A cross-validation has no model of its own."""
    titles = [
        [advice.reason for advice in judge(report).advice if "livt calibrate" in advice.command]
        for report in (
            weak,  # mean confidence 94.8 %, 65 % right
            measured(*pairs(*[(label, label, 30) for label in range(4)])),
            measured(*pairs((0, 0, 3), (1, 0, 1))),
            measured(*WEAK, folds={}),
            measured(*pairs((0, 0, 1), (0, 1, 1), (1, 0, 1))),  # 33 % right: three images
        )
    ]
    assert titles[0] == ["The model is overconfident: mean confidence 94.8 %, accuracy 65.0 %."]
    assert ["underconfident" in " ".join(found) for found in titles] == [False, True, False, False, False]
    assert titles[2:] == [[], [], []]


def test_names_are_never_read_as_html_and_both_texts_agree(weak):
    page, text = render_verdict(weak)
    assert "common &lt;b&gt;" in page and "<b>common" not in page
    assert "21 predicted as common &lt;b&gt;" in text
    assert all(command in text for command in commands(weak))
    assert "- few (2 classes with fewer than 20 training images): accuracy 35.0 %, precision 100.0 %" in text


def test_thousands_of_classes_still_fit_one_screen(weak):
    classes, rng = 8142, np.random.default_rng(0)
    report = simulated(rng, 2, np.where(np.arange(classes) % 2, 0.02, 1.0))
    assert len(find_weak_classes(report)) < classes
    verdict = replace(judge(weak), weak=[row | {"name": "x", "reason": "y"} for row in report.per_class])
    assert render("report.html", verdict=verdict, **EMPTY).count("<li>") <= 10


@pytest.mark.parametrize("units", [8, 400, 4000])
def test_the_paired_test_keeps_its_level_and_finds_a_real_gain(units):
    rng = np.random.default_rng(0)
    null = [paired_p_value(rng.choice([-1.0, 0.0, 1.0], units)) for _ in range(100)]
    assert np.mean(np.array(null) <= 0.05) <= 0.11
    assert paired_p_value(np.ones(units)) <= 2 * 0.5**units + 0.001 + 0.01 * (units == 8)


def test_images_of_one_group_count_as_one_in_the_paired_test():
    gains = np.ones(20)
    assert paired_p_value(gains) < 0.001 < 0.4 < paired_p_value(gains, np.repeat([0, 1], 10))


def test_a_report_names_its_date_its_images_and_the_command_that_writes_it_again(tmp_path, weak, monkeypatch):
    results = SimpleNamespace(model_size="micro", loss="bal_bce")
    monkeypatch.setattr(
        report_module, "Run", lambda folder: SimpleNamespace(folder=folder, finished=True, results=results)
    )
    today = datetime.date.today().isoformat()
    page = report_module.write_report(tmp_path, weak, None).read_text()
    assert "<h1>birds: micro, bal_bce</h1>" in page and "<code>livt eval &#39;runs/my model&#39;</code>" in page
    assert f"{today} · split: test, 120 images of 4 classes · training: 718 images, 6 to 500 per class" in page
    assert json.loads((tmp_path / "evaluation.json").read_text())["date"] == today
    folds = replace(weak, summary=weak.summary | {"folds": {"each": [], "mean": {}, "deviation": {}}})
    monkeypatch.setattr(report_module, "fold_rows", lambda summary: [])
    assert "livt eval" not in report_module.write_report(tmp_path / "folds", folds, None).read_text()


def write_report(folder, accuracy, dataset="glyphs", names=("a", "b"), **more):
    folder.mkdir(parents=True)
    shown = ("accuracy", "many", "medium", "few", "mean_class_accuracy", "worst_class_accuracy", "ece")
    metrics = dict.fromkeys(shown, accuracy) | {"few": None, "num_images": 1000}
    summary = {"dataset": dataset, "split": "test", "rules": {"paper (argmax z)": metrics}} | more
    (folder / "evaluation.json").write_text(json.dumps(summary))
    rows = [
        {"class": i, "name": name, "count": 9, "group": "few", "images": 5, "accuracy": value}
        for i, (name, value) in enumerate(zip(names, (accuracy, None), strict=True))
    ]
    write_classes(rows, folder / "classes.csv")
    Image.new("RGB", (30, 20), (255, 0, 255)).save(folder / "frequency.png")
    return folder


def test_two_reports_stand_side_by_side_with_their_differences(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIVT_RUNS", raising=False)
    write_report(tmp_path / "one" / "report", 0.5)
    write_report(tmp_path / "other" / "report-2", 0.75)
    main(["--compare", "one", "other"])
    sentence, page = capsys.readouterr().out.splitlines()
    assert "50.0 %" in sentence and "75.0 %" in sentence and page == "Comparison: runs/comparison/report.html"
    page = (tmp_path / "runs" / "comparison" / "report.html").read_text()
    assert page.count("data:image/png") == 2 and page.count("<script") == 1
    assert "50.0" in page and "75.0" in page and "+25.0" in page
    assert "the second is significantly better" in page
    main(["--compare", "other/report-2", "one", "--report", "again"])
    assert "-25.0" in (tmp_path / "again" / "report.html").read_text()


def test_a_handful_of_images_shows_no_difference_however_sure_it_looks():
    first, second = {"accuracy": 0.0, "num_images": 3}, {"accuracy": 1.0, "num_images": 3}
    gains = np.ones(3)  # all of them better, so their variance is 0
    answer = describe_difference(first, second, margin=0.0, p_value=paired_p_value(gains))
    assert "the difference is not significant (paired test, p = 0.2" in answer


def test_models_on_the_same_images_are_compared_by_those_that_only_one_has_right(tmp_path, monkeypatch, capsys):
    """1000 images, 700 and 735 right: significant for the same images, not for independent errors.

    50 images that are gained, all of five patients, are five of five: image by image, they would be significant.
    """
    monkeypatch.chdir(tmp_path)
    one_each, of_patients = {}, {"group": np.arange(1000) // 10}
    for name, right, columns in (
        *(("one", 700, one_each), ("two", 735, one_each)),
        *(("three", 700, of_patients), ("four", 750, of_patients)),
    ):
        logits = np.eye(2)[(np.arange(1000) >= right).astype(int)]
        write_report(tmp_path / name, right / 1000)
        record = Predictions.from_arrays(logits, [0] * 1000, class_names="ab", **columns)
        record.save(tmp_path / name / "predictions")
    main(["--compare", "one", "two", "--report", "paired"])
    assert "the second is significantly better (95 % margin: 1.1 points)." in capsys.readouterr().out
    main(["--compare", "three", "four", "--report", "patients"])
    assert "the difference is not significant (paired test, p = 0.06)." in capsys.readouterr().out
    shutil.rmtree(tmp_path / "one" / "predictions")
    main(["--compare", "one", "two", "--report", "independent"])
    printed = capsys.readouterr().out
    assert "not significant (95 % margin if their errors are independent: 3.9 points)." in printed


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        (None, ["other"]),
        ({"dataset": "birds"}, ["glyphs", "birds"]),
        ({"names": ("a", "c")}, ["one", "other"]),
        ({"thresholds": {"many_above": 50, "few_below": 20}}, ["50"]),
    ],
)
def test_reports_of_other_data_or_classes_are_not_compared(tmp_path, monkeypatch, changes, values):
    monkeypatch.chdir(tmp_path)
    write_report(tmp_path / "one" / "report", 0.5)
    if changes is not None:
        write_report(tmp_path / "other" / "report", 0.5, **changes)
    with pytest.raises(LiVTError) as error:
        main(["--compare", "one", "other"])
    assert error.value.argument == "compare" and all(value in str(error.value) for value in values)
    with refusal("compare"):
        main(["--compare", "one"])
    assert not (tmp_path / "comparison").exists()
