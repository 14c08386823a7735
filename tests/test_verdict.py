"""The first screen of a report, and two reports side by side."""

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
from livt_hf.reports.comparison import difference, write_classes
from livt_hf.reports.page import plain_markdown
from livt_hf.reports.verdict import actions, doubtful, first_screen, first_screen_text, groups

NAMES = ["common <b>", "usual", "rare", "rarer"]
COUNTS = [500, 200, 12, 6]


def measured(*rules, counts=COUNTS, names=NAMES, **thresholds) -> EvaluationReport:
    """Of rules given as (label, prediction, confidence) of every image."""
    metrics, pairs = {}, None
    for number, rows in enumerate(rules):
        label, predicted, confidence = (torch.tensor(column) for column in zip(*rows, strict=True))
        scores = torch.zeros(len(rows), len(counts)).scatter_(1, predicted[:, None], confidence[:, None].float())
        metrics[f"rule {number}"] = LongTailMetrics(counts, confidence="given", **thresholds)
        metrics[f"rule {number}"].update(scores, label)
        if pairs is None:
            pairs = confusions(predicted, label, counts, names)
    return findings(metrics, pairs, names)


def findings(metrics, pairs, names) -> EvaluationReport:
    intervals = {rule: dict.fromkeys(GROUPS, (0.1, 0.9)) for rule in metrics}
    per_class = next(iter(metrics.values())).per_class(names)
    labels, default = {rule: rule for rule in metrics}, list(metrics)[0]
    summary = {"model": "runs/my model", "intervals": intervals, "default_rule": default, "rule_labels": labels}
    return EvaluationReport(summary, per_class, metrics, confusions=pairs)


# Ten images per class: the frequent ones right, of the rare ones most are taken for a frequent one.
WEAK = [(0, 0, 0.9)] * 10 + [(1, 1, 0.9)] * 9 + [(1, 0, 0.5)] + [(2, 0, 0.8)] * 7 + [(2, 2, 0.6)] * 3
WEAK += [(3, 1, 0.2)] * 4 + [(3, 0, 0.2)] * 2 + [(3, 3, 0.3)] * 4


def test_groups_are_right_as_often_as_their_classes_are_on_average():
    many, few = groups(measured(WEAK))
    assert (many["group"], many["classes"], many["accuracy"]) == ("many", 2, pytest.approx(0.95))
    assert (few["group"], few["classes"], few["accuracy"]) == ("few", 2, pytest.approx(0.35))


def test_frequent_and_rare_are_what_the_thresholds_say_that_were_asked_for():
    found = measured(WEAK, many_above=300, few_below=10)
    assert [row["words"].removesuffix(" training images") for row in groups(found)] == [
        "more than 300",
        "10 to 300",
        "fewer than 10",
    ]
    rare, rarer = doubtful(found)
    assert "training images" not in rare["why"] and "only 6 training images" in rarer["why"]
    assert any(step.startswith("Label more images of rarer: classes with fewer than 10 ") for step in actions(found))
    assert not any("Label more" in step for step in actions(measured(WEAK, few_below=5)))  # 6 images are no longer few


def test_a_class_is_doubted_for_few_images_for_a_class_it_is_taken_for_and_for_overconfidence():
    rare, rarer = doubtful(measured(WEAK))
    assert rare["why"] == "only 12 training images; 70.0 % are taken for common <b>; overconfident (74.0 % sure)"
    assert rarer["why"] == "only 6 training images; 40.0 % are taken for usual"
    assert doubtful(measured([(label, label, 0.95) for label in range(4) for _ in range(10)])) == []


def test_one_class_and_one_image_are_spoken_of_in_the_singular():
    found = measured(WEAK, counts=[500, 200, 30, 1])
    assert doubtful(found)[1]["why"].startswith("only 1 training image;")
    assert "few: 1 class with fewer" in first_screen(found) and "- few (1 class, fewer" in first_screen_text(found)


def test_more_images_are_asked_for_of_classes_that_are_right_less_often_than_frequent_ones():
    rows = [(label, 2 if label == 3 else label, 0.9) for label, _, _ in WEAK]
    assert any(step.startswith("Label more images of rarer: ") for step in actions(measured(rows)))


def test_what_is_to_be_done_is_what_promises_most():
    better = [(label, label, 0.9) for label, _, _ in WEAK]
    steps = actions(measured(WEAK, better))
    assert steps[0].startswith("Serve by another rule: rule 1 is right for 100.0 %")
    assert steps[1].startswith("Label more images of rare, rarer: ")
    assert len(steps) == 3
    assert not any("another rule" in step for step in actions(measured(WEAK)))


def test_rules_are_compared_under_the_prior_that_was_asked_for():
    better = [(label, label, 0.9) for label, _, _ in WEAK]
    found = measured(WEAK, better)
    accuracy = {"rule 0": 0.9, "rule 1": 0.8}
    found.summary["under_prior"] = {"prior": "training prior", "accuracy": accuracy}
    assert not any("another rule" in step for step in actions(found))
    accuracy["rule 1"] = 0.95
    assert "rule 1 is right for 95.0 % of the images where classes are as frequent" in " ".join(actions(found))


def test_only_a_model_that_is_not_calibrated_is_told_to_calibrate():
    """A cross-validation has no model of its own."""
    found = measured(WEAK, WEAK)
    metrics = dict(zip((ARGMAX, UNIFORM), found.metrics.values(), strict=True))
    summary = found.summary | {"default_rule": ARGMAX, "rule_labels": {rule: rule for rule in metrics}}
    named = replace(found, metrics=metrics, summary=summary | {"intervals": dict.fromkeys(metrics, {})})
    calibrated = replace(named, summary=named.summary | {"default_rule": UNIFORM})
    told = [
        any("livt calibrate 'runs/my model' --dataset" in words for words in actions(one))
        for one in (named, calibrated, replace(named, summary=named.summary | {"folds": {}}))
    ]
    assert told == [True, False, False]


def test_a_perfect_model_has_nothing_to_be_done():
    perfect = measured([(label, label, 1.0) for label in range(4) for _ in range(10)])
    assert actions(perfect) == []
    assert "No class stands out" in first_screen(perfect) and "Nothing stands out" in first_screen(perfect)


def test_names_are_never_read_as_html_and_the_text_says_the_same():
    page, text = first_screen(measured(WEAK)), first_screen_text(measured(WEAK))
    assert "common &lt;b&gt;" in page and "<b>common" not in page
    assert "70.0 % are taken for common &lt;b&gt;" in text
    for step in actions(measured(WEAK)):
        assert plain_markdown(step) in text
    assert "- few (2 classes, fewer than 20 training images): 35.0 % right" in text


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
    page = first_screen(findings({"rule": metric}, pairs, names))
    assert page.count("<li>") <= 9 and "more, in the table of classes" in page


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
    assert "the second is better, by more than chance" in page
    main(["--compare", "other/report-2", "one", "--report", "again"])
    assert "-25.0" in (tmp_path / "again" / "report.html").read_text()


def test_what_chance_can_make_is_called_so():
    assert "no more apart than chance" in difference(
        {"accuracy": 0.50, "num_images": 100}, {"accuracy": 0.55, "num_images": 100}
    )


def test_two_models_on_the_same_images_differ_by_chance_only_where_one_of_them_is_right(tmp_path, monkeypatch, capsys):
    """1000 images, 700 and 735 right: 35 mended and none spoiled are no chance, but independent models differ so."""
    monkeypatch.chdir(tmp_path)
    index = torch.arange(1000)
    for name, right in {"one": 700, "other": 735}.items():
        logits = torch.eye(2)[(index >= right).long()]
        write_report(tmp_path / name, right / 1000)
        Predictions.from_arrays(logits, [0] * 1000, class_names="ab").save(tmp_path / name / "predictions")
    main(["--compare", "one", "other", "--report", "paired"])
    assert "the second is better, by more than chance could make (1.1 points)." in capsys.readouterr().out
    shutil.rmtree(tmp_path / "one" / "predictions")
    main(["--compare", "one", "other", "--report", "independent"])
    said = capsys.readouterr().out
    assert "no more apart than chance could make them if they err independently (3.9 points)." in said


def test_reports_of_other_data_or_classes_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_report(tmp_path / "one" / "report", 0.5)
    with pytest.raises(LiVTError, match="other has no report .*livt eval other"):
        main(["--compare", "one", "other"])
    write_report(tmp_path / "other" / "report", 0.5, dataset="birds")
    with pytest.raises(LiVTError, match="not of the same dataset .glyphs and birds."):
        main(["--compare", "one", "other"])
    shutil.rmtree(tmp_path / "other")
    write_report(tmp_path / "other" / "report", 0.5, names=("a", "c"))
    with pytest.raises(LiVTError, match="one and other have other classes"):
        main(["--compare", "one", "other"])
    shutil.rmtree(tmp_path / "other")
    write_report(tmp_path / "other" / "report", 0.5, thresholds={"many_above": 50, "few_below": 20})
    with pytest.raises(LiVTError, match="not of the same thresholds .* --few_below"):
        main(["--compare", "one", "other"])
    with pytest.raises(LiVTError, match="compare puts two runs side by side, not 1"):
        main(["--compare", "one"])
    assert not (tmp_path / "comparison").exists()
