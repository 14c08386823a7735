"""The verdict of a report, and the comparison of two reports."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from livt_hf.errors import LiVTError
from livt_hf.metrics import GROUPS, LongTailMetrics, confusions
from livt_hf.predictions import Predictions
from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.rules import ARGMAX, UNIFORM
from livt_hf.recipes.eval import main
from livt_hf.reports.comparison import describe_difference
from livt_hf.reports.page import escape_markdown, render
from livt_hf.reports.report import write_classes
from livt_hf.reports.verdict import find_unreliable_classes, judge, recommend, summarize_groups

NAMES = ["common <b>", "usual", "rare", "rarer"]
COUNTS = [500, 200, 12, 6]


def measured(*rules, counts=COUNTS, names=NAMES, **thresholds) -> EvaluationReport:
    """Return the report of rules given as (label, prediction, confidence) of every image."""
    metrics, pairs = {}, None
    for number, rows in enumerate(rules):
        label, predicted, confidence = (torch.tensor(column) for column in zip(*rows, strict=True))
        scores = torch.zeros(len(rows), len(counts)).scatter_(1, predicted[:, None], confidence[:, None].float())
        metrics[f"rule {number}"] = LongTailMetrics(counts, confidence="given", **thresholds)
        metrics[f"rule {number}"].update(scores, label)
        if pairs is None:
            pairs = confusions(predicted, label, counts, names)
    return report_of(metrics, pairs, names)


def report_of(metrics, pairs, names) -> EvaluationReport:
    intervals = {rule: dict.fromkeys(GROUPS, (0.1, 0.9)) for rule in metrics}
    per_class = next(iter(metrics.values())).per_class(names)
    labels, default = {rule: rule for rule in metrics}, list(metrics)[0]
    summary = {"model": "runs/my model", "intervals": intervals, "default_rule": default, "rule_labels": labels}
    return EvaluationReport(summary, per_class, metrics, confusions=pairs)


def render_verdict(report: EvaluationReport) -> tuple[str, str]:
    """Return the verdict in HTML and the report in Markdown."""
    verdict = judge(report)
    return render("verdict.html", verdict=verdict), render("report.md", verdict=verdict, title="", tables={})


# Ten images per class: the frequent ones right, most of the rare ones predicted as a frequent class.
WEAK = [(0, 0, 0.9)] * 10 + [(1, 1, 0.9)] * 9 + [(1, 0, 0.5)] + [(2, 0, 0.8)] * 7 + [(2, 2, 0.6)] * 3
WEAK += [(3, 1, 0.2)] * 4 + [(3, 0, 0.2)] * 2 + [(3, 3, 0.3)] * 4
BETTER = [(label, label, 0.9) for label, _, _ in WEAK]


def test_the_verdict_opens_with_accuracy_images_and_decision_rule():
    assert judge(measured(WEAK)).lead == "Accuracy 65.0 % on 40 test images (decision rule: rule 0)."
    imbalanced = judge(measured(WEAK[:10] + [(3, 0, 0.5)] * 2)).lead
    assert imbalanced.startswith("Accuracy 83.3 % on 12 test images, mean class accuracy 50.0 % (")


def test_the_accuracy_of_a_group_is_the_mean_of_its_classes():
    many, few = summarize_groups(measured(WEAK))
    assert (many["name"], many["accuracy"]) == ("many", pytest.approx(0.95))
    assert (few["name"], few["accuracy"]) == ("few", pytest.approx(0.35))
    assert many["description"] == "2 classes with more than 100 training images"


def test_groups_follow_the_given_thresholds():
    found = measured(WEAK, many_above=300, few_below=10)
    for group, size in zip(summarize_groups(found), ("more than 300", "10 to 300", "fewer than 10"), strict=True):
        assert f" with {size} training images" in group["description"]
    rare, rarer = find_unreliable_classes(found)
    assert "training images" not in rare["reason"] and "only 6 training images" in rarer["reason"]
    assert any(text.startswith("Label more images of rarer: classes with fewer than 10 ") for text in recommend(found))
    assert not any("Label more" in text for text in recommend(measured(WEAK, few_below=5)))  # 6 images are not few


def test_a_class_is_unreliable_for_few_images_for_a_confusion_and_for_overconfidence():
    rare, rarer = find_unreliable_classes(measured(WEAK))
    reasons = "only 12 training images; 70.0 % are predicted as common <b>; overconfident (mean confidence 74.0 %)"
    assert rare["reason"] == reasons
    assert rarer["reason"] == "only 6 training images; 40.0 % are predicted as usual"
    assert find_unreliable_classes(measured([(label, label, 0.95) for label in range(4) for _ in range(10)])) == []


def test_one_class_and_one_image_are_singular():
    found = measured(WEAK, counts=[500, 200, 30, 1])
    assert find_unreliable_classes(found)[1]["reason"].startswith("only 1 training image;")
    assert all("few" in text and "1 class with fewer than 20" in text for text in render_verdict(found))


def test_more_images_are_recommended_of_classes_below_the_accuracy_of_frequent_ones():
    rows = [(label, 2 if label == 3 else label, 0.9) for label, _, _ in WEAK]
    assert any(text.startswith("Label more images of rarer: ") for text in recommend(measured(rows)))


def test_the_most_promising_recommendation_comes_first():
    texts = recommend(measured(WEAK, BETTER))
    assert "“rule 1” reaches a mean class accuracy of 100.0 %, “rule 0” 65.0 %." in texts[0]
    assert texts[1].startswith("Label more images of rare, rarer: ")
    assert len(texts) == 3
    assert not any("another decision rule" in text for text in recommend(measured(WEAK)))


def test_rules_are_compared_under_the_given_prior():
    found = measured(WEAK, BETTER)
    accuracy = {"rule 0": 0.9, "rule 1": 0.8}
    found.summary["under_prior"] = {"prior": "training prior", "accuracy": accuracy}
    assert not any("another decision rule" in text for text in recommend(found))
    accuracy["rule 1"] = 0.95
    assert "“rule 1” reaches an accuracy of 95.0 % under the training prior" in " ".join(recommend(found))


def test_calibration_is_recommended_for_an_uncalibrated_model_only():
    """A cross-validation has no model of its own."""
    found = measured(WEAK, WEAK)
    metrics = dict(zip((ARGMAX, UNIFORM), found.metrics.values(), strict=True))
    summary = found.summary | {"default_rule": ARGMAX, "rule_labels": {rule: rule for rule in metrics}}
    named = replace(found, metrics=metrics, summary=summary | {"intervals": dict.fromkeys(metrics, {})})
    calibrated = replace(named, summary=named.summary | {"default_rule": UNIFORM})
    told = [
        any("livt calibrate 'runs/my model' --dataset" in text for text in recommend(one))
        for one in (named, calibrated, replace(named, summary=named.summary | {"folds": {}}))
    ]
    assert told == [True, False, False]


def test_a_perfect_model_has_no_unreliable_class_and_no_recommendation():
    perfect = measured([(label, label, 1.0) for label in range(4) for _ in range(10)])
    assert recommend(perfect) == [] and find_unreliable_classes(perfect) == []
    assert [text.count("None.") for text in render_verdict(perfect)] == [2, 2]


def test_names_are_never_read_as_html_and_both_texts_agree():
    page, text = render_verdict(measured(WEAK))
    assert "common &lt;b&gt;" in page and "<b>common" not in page
    assert "70.0 % are predicted as common &lt;b&gt;" in text
    assert all(escape_markdown(item) in text for item in recommend(measured(WEAK)))
    assert "- few (2 classes with fewer than 20 training images): accuracy 35.0 %" in text


def test_thousands_of_classes_still_fit_one_screen():
    classes, rng = 8142, np.random.default_rng(0)
    counts = (1000 * 500 ** (-np.arange(classes) / (classes - 1))).astype(int).tolist()
    label = np.arange(classes).repeat(2)
    predicted = np.where(rng.random(len(label)) < 0.5, label, rng.integers(classes, size=len(label)))
    metric, names = LongTailMetrics(counts, confidence="given"), [f"species {i}" for i in range(classes)]
    for start in range(0, len(label), 1000):
        rows = torch.zeros(len(label[start : start + 1000]), classes)
        rows[torch.arange(len(rows)), torch.from_numpy(predicted[start : start + 1000])] = 0.5
        metric.update(rows, torch.from_numpy(label[start : start + 1000]))
    pairs = confusions(torch.from_numpy(predicted), torch.from_numpy(label), counts, names)
    page, _ = render_verdict(report_of({"rule": metric}, pairs, names))
    assert page.count("<li>") <= 9 and "more are in the table of classes" in page


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
    assert page.count("data:image/png") == 2 and "<script" not in page
    assert "50.0" in page and "75.0" in page and "+25.0" in page
    assert "the second is significantly better" in page
    main(["--compare", "other/report-2", "one", "--report", "again"])
    assert "-25.0" in (tmp_path / "again" / "report.html").read_text()


def test_a_difference_within_the_margin_is_not_significant():
    first, second = {"accuracy": 0.50, "num_images": 100}, {"accuracy": 0.55, "num_images": 100}
    assert "the difference is not significant (95 % margin if their errors are independent: 13.8 points)" in (
        describe_difference(first, second)
    )


def test_models_on_the_same_images_are_compared_by_those_that_only_one_has_right(tmp_path, monkeypatch, capsys):
    """1000 images, 700 and 735 right: significant for the same images, not for independent errors."""
    monkeypatch.chdir(tmp_path)
    index = torch.arange(1000)
    for name, right in {"one": 700, "other": 735}.items():
        logits = torch.eye(2)[(index >= right).long()]
        write_report(tmp_path / name, right / 1000)
        Predictions.from_arrays(logits, [0] * 1000, class_names="ab").save(tmp_path / name / "predictions")
    main(["--compare", "one", "other", "--report", "paired"])
    assert "the second is significantly better (95 % margin: 1.1 points)." in capsys.readouterr().out
    shutil.rmtree(tmp_path / "one" / "predictions")
    main(["--compare", "one", "other", "--report", "independent"])
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
    assert not (tmp_path / "comparison").exists()


def test_two_runs_are_compared_not_one():
    with pytest.raises(LiVTError, match="compare"):
        main(["--compare", "one"])
