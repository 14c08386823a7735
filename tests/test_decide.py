"""`livt decide`, and the outputs of other frameworks: what is decided later is what is decided at once."""

import json
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from needs import needs_linux
from refusals import refusal
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score
from transformers.trainer_utils import PredictionOutput

from livt_hf.errors import LiVTError
from livt_hf.long_tail.calibration import Calibration
from livt_hf.long_tail.objectives import choose_exponents
from livt_hf.predictions import Predictions, decide
from livt_hf.predictions.decisions import rule_for_objective
from livt_hf.predictions.logit_files import read_logit_file
from livt_hf.predictions.record import as_lists
from livt_hf.recipes.decide import main
from livt_hf.recipes.eval import main as evaluate

NAMES, COUNTS = ["cat", "dog", "newt"], [80, 15, 5]


def draw(images: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits and labels of images whose classes are as frequent as in training."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(3, images, p=np.array(COUNTS) / 100)
    return (rng.normal(size=(images, 3)) + 2 * np.eye(3)[labels] + np.log(COUNTS)).astype(np.float32), labels


def record(folder: Path, seed: int = 0, exponents=None, labelled: bool = True, **columns) -> Path:
    """Write a record in parts of 64 rows, of a model that is calibrated where exponents are given."""
    logits, labels = draw(seed=seed)
    made = Predictions.from_arrays(
        logits, labels if labelled else None, class_names=NAMES, class_counts=COUNTS, **columns
    )
    if exponents:
        tail = made.info.long_tail
        calibration = vars(Calibration(1.0, 0.0, [0.0] * 3, 100, exponents=exponents, objective="accuracy"))
        values = made.info.to_json()
        values["models"][0]["long_tail"] = {**tail, "calibration": calibration}
        del values["default_rule"]
        default = {"name": "test_prior", "label": "", "prior": "model"}
        info = type(made.info).from_json(values | {"default_rule": default})
        made = Predictions(made.table, info)
    return made.save(folder, rows_per_part=64)


@pytest.mark.parametrize("words", [[], ["--prior", "training"], ["--prior", "uniform"], ["--prior", "FILE"]])
def test_what_is_decided_later_is_decided_at_once(tmp_path, capsys, words):
    prior = {"training": "training", "uniform": "uniform", "FILE": (0.2, 0.3, 0.5)}.get(words[-1] if words else "")
    (tmp_path / "prior.json").write_text(json.dumps(dict(zip(NAMES, (0.2, 0.3, 0.5), strict=True))))
    words = [str(tmp_path / "prior.json") if word == "FILE" else word for word in words]
    folder = record(tmp_path / "run" / "predictions", split=["test"] * 200)
    main([str(tmp_path / "run"), *words, "--output", str(tmp_path / "again")])
    said = capsys.readouterr().out
    at_once = decide(folder, prior=prior)
    again = Predictions.load(tmp_path / "again")
    assert torch.equal(decide(again).labels, at_once.labels) and torch.equal(decide(again).scores, at_once.scores)
    predicted = [NAMES[label] for label in at_once.labels]
    main([str(folder), *words, "--output", str(tmp_path / "table.parquet")])
    assert pq.read_table(tmp_path / "table.parquet")["prediction"].to_pylist() == predicted
    labels = draw()[1]
    numbers = accuracy_score(labels, at_once.labels), balanced_accuracy_score(labels, at_once.labels)
    numbers += (f1_score(labels, at_once.labels, average="macro"),)
    shown = [f"{100 * number:.1f} %" for number in numbers]
    assert said.startswith(f"Split test, 200 images: accuracy {shown[0]}, mean class accuracy {shown[1]}")
    assert f"macro F1 {shown[2]} (decision rule: " in said


def test_an_objective_takes_the_exponent_that_is_stored_with_the_model(tmp_path, capsys):
    folder = record(tmp_path / "record", exponents={"macro_f1": 0.4, "accuracy": 1.0})
    prior = np.array(COUNTS) ** 0.4
    main([str(folder), "--objective", "macro_f1"])
    assert "decision rule: posterior, prior for macro F1, pi^0.4" in capsys.readouterr().out
    rule = rule_for_objective(Predictions.load(folder).info, "macro_f1")
    assert torch.equal(decide(folder, rule).labels, decide(folder, prior=tuple(prior / prior.sum())).labels)


def test_an_exponent_is_chosen_on_a_labelled_record_only_where_it_is_named(tmp_path, capsys):
    tested, held_out = record(tmp_path / "test"), record(tmp_path / "validation", seed=1, group=["p", None] * 100)
    logits, labels = draw(seed=1)
    prior = torch.tensor(COUNTS) / 100
    expected = choose_exponents(torch.from_numpy(logits).log_softmax(-1), torch.from_numpy(labels), prior)["macro_f1"]
    main([str(tested), "--objective", "macro_f1", "--choose_on", str(held_out)])
    assert f"pi^{expected.exponent:g})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        (["--objective", "macro_f1"], "objective"),
        (["--objective", "macro_f1", "--choose_on", "RECORD"], "choose_on"),
        (["--objective", "macro_f1", "--choose_on", "TESTED"], "choose_on"),
        (["--objective", "macro_f1", "--choose_on", "UNLABELLED"], "choose_on"),
        (["--objective", "macro_f1", "--choose_on", "OTHERS"], "choose_on"),
        (["--choose_on", "TESTED"], "choose_on"),
        (["--prior", "training", "--objective", "macro_f1"], "prior"),
        (["--class_counts", "counts.json"], "class_counts"),
        (["--values", "logits"], "values"),
        (["--output", "table.xlsx"], "output"),
    ],
)
def test_decide_rejects(tmp_path, words, argument):
    places = {"RECORD": record(tmp_path / "record"), "TESTED": record(tmp_path / "tested", 1, split=["test"] * 200)}
    places["UNLABELLED"] = record(tmp_path / "unlabelled", labelled=False)
    others = Predictions.from_arrays(*draw(), class_names=["ant", "bee", "emu"], class_counts=COUNTS)
    places["OTHERS"] = others.save(tmp_path / "others")
    with refusal(argument):
        main([str(places["RECORD"]), *(str(places.get(word, word)) for word in words)])


def test_a_record_that_was_decided_otherwise_is_not_taken_for_done(tmp_path):
    folder = record(tmp_path / "record")
    words = [str(folder), "--output", str(tmp_path / "decided"), "--prior"]
    for prior in ("training", "training"):
        main([*words, prior])
    with refusal("path", tmp_path / "decided"):
        main([*words, "uniform"])


def test_images_without_a_prediction_are_counted_and_told(tmp_path, capsys):
    made = Predictions.load(record(tmp_path / "record"))
    logits = made.logits.copy()
    logits[:3] = np.nan
    table = made.table.drop_columns("logits").append_column("logits", as_lists(logits))
    main([str(Predictions(table, made.info).save(tmp_path / "holes"))])
    assert "; 3 without numbers as logits count as wrong (decision rule:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "output",
    ["FILE", "FILE/record", *(pytest.param(f"/proc/x{end}", marks=needs_linux) for end in ("", ".csv", ".parquet"))],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, output):
    (tmp_path / "Makefile").touch()
    with refusal("output"):
        main([str(tmp_path / "nowhere"), "--output", output.replace("FILE", str(tmp_path / "Makefile"))])


def test_a_record_without_labels_needs_an_output(tmp_path):
    with refusal("output"):
        main([str(record(tmp_path / "record", labelled=False))])


def trainer(folder: Path, logits, labels) -> Path:
    output = PredictionOutput(predictions=logits, label_ids=labels, metrics={})
    np.savez(folder / "trainer.npz", predictions=output.predictions, label_ids=output.label_ids)
    return folder / "trainer.npz"


def timm_csv(folder: Path, logits, labels) -> Path:
    """Write what inference.py --topk 0 --results-separate-col --output-type logit writes; it knows no label."""
    columns = {"filename": [f"{row}.jpg" for row in range(len(logits))]}
    pd.DataFrame(columns | {f"logit_{i}": logits[:, i] for i in range(3)}).to_csv(folder / "timm.csv", index=False)
    return folder / "timm.csv"


def timm_parquet(folder: Path, logits, labels) -> Path:
    """Write what inference.py --topk 0 --results-format parquet writes: one list of probabilities per image."""
    prob = list(torch.from_numpy(logits).softmax(-1).numpy())
    pd.DataFrame({"filename": [f"{row}.jpg" for row in range(len(logits))], "prob": prob}).set_index(
        "filename"
    ).to_parquet(folder / "timm.parquet")
    return folder / "timm.parquet"


def ultralytics(folder: Path, logits, labels) -> Path:
    """Write probs.data of each result under the model's names, rounded as its tables are."""
    table = pd.DataFrame(torch.from_numpy(logits).softmax(-1).numpy().round(5), columns=NAMES)
    table.insert(0, "path", [f"{row}.jpg" for row in range(len(logits))])
    table.assign(label=[NAMES[label] for label in labels]).to_csv(folder / "yolo.tsv", sep="\t", index=False)
    return folder / "yolo.tsv"


@pytest.mark.parametrize(
    ("write", "has_labels"), [(trainer, True), (timm_csv, False), (timm_parquet, False), (ultralytics, True)]
)
def test_outputs_of_other_frameworks_are_decided_as_their_logits_are(tmp_path, write, has_labels):
    logits, labels = draw()
    (tmp_path / "counts.json").write_text(json.dumps(COUNTS))
    read = read_logit_file(write(tmp_path, logits, labels), str(tmp_path / "counts.json"))
    plain = Predictions.from_arrays(logits, labels, class_names=NAMES, class_counts=COUNTS)
    np.testing.assert_allclose(read.posterior("uniform"), plain.posterior("uniform"), atol=2e-3)
    assert (read.labels is not None) == has_labels
    assert not has_labels or read.labels.tolist() == labels.tolist()
    if write is not trainer:
        assert read.column("path")[3] == "3.jpg"


def test_predict_proba_of_scikit_learn_and_priors_give_bayes_rule(tmp_path):
    logits, labels = draw(400)
    model = LogisticRegression().fit(logits, labels)
    probabilities = model.predict_proba(logits)
    read = Predictions.from_arrays(probabilities, labels, class_names=NAMES, class_counts=COUNTS, probabilities=True)
    shifted = probabilities / np.array(COUNTS)
    np.testing.assert_allclose(read.posterior("uniform"), shifted / shifted.sum(1, keepdims=True), rtol=1e-4)
    np.testing.assert_allclose(read.posterior("training"), probabilities, rtol=1e-4)


def test_sigmoid_probabilities_are_turned_into_their_logits():
    logits = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
    read = Predictions.from_arrays(
        1 / (1 + np.exp(-logits)), class_names=NAMES, class_counts=COUNTS, loss="bce", probabilities=True
    )
    np.testing.assert_allclose(read.logits, logits, rtol=1e-4)


def test_eval_writes_a_report_on_a_file_of_logits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    logits, labels = draw()
    (tmp_path / "counts.json").write_text(json.dumps(dict(zip(NAMES, COUNTS, strict=True))))
    words = [str(ultralytics(tmp_path, logits, labels)), "--class_counts", str(tmp_path / "counts.json")]
    evaluate([*words, "--prior", "training", "--report", str(tmp_path / "report")])
    summary = json.loads((tmp_path / "report" / "evaluation.json").read_text())
    again = shlex.split(summary["command"])
    assert summary["dataset"] == again[2] == words[0] and "--dataset" not in again  # which a file cannot be given
    metrics, predicted = summary["rules"]["given"], logits.argmax(1)
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    assert metrics["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert (tmp_path / "report" / "report.html").exists() and "need the model itself" in capsys.readouterr().out
    assert not (tmp_path / "report" / "classes.png").exists()
    for option in ("--probe", "--dataset=glyphs"):
        with refusal(option.strip("-").split("=")[0]):
            evaluate([*words, option, "--report", str(tmp_path / "other")])


ROW = "path,cat,dog,newt\n"


def test_a_file_of_logits_is_not_measured_by_shot_groups_that_nobody_knows(tmp_path):
    (tmp_path / "logits.csv").write_text("label,cat,dog\ncat,2.5,1\ndog,0,1\n")
    with refusal("class_counts"):
        evaluate([str(tmp_path / "logits.csv"), "--report", str(tmp_path / "report")])
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("content", "counts", "values", "argument", "value"),
    [
        (ROW + "a,1.5,nan,2\n", COUNTS, None, "logits", "row 0"),
        (ROW + "a,0.5,0.4,0.3\n", COUNTS, None, "values", "1.2"),
        (ROW + "a,0.5,0.4,0.3\n", COUNTS, "probabilities", "probabilities", "1.2"),
        (ROW + "a,1.5,0.4,0.3\n", COUNTS, "probabilities", "probabilities", "1.5"),
        (ROW + "a,1,2,3.5\n", [80, 20], None, "class_counts", "2"),
        (ROW + "a,1,2,3.5\n", {"cat": 8, "dog": 2, "emu": 2}, None, None, "emu"),
        ("path,cat,dog,cat\na,1,2,3.5\n", COUNTS, None, "predictions", "cat"),
        ("filename,label,prob\na.jpg,tabby,0.9\n", COUNTS, None, "predictions", "--topk 0"),
        ("filename,index_0,index_1,prob_0,prob_1\na.jpg,3,1,0.9,0.1\n", COUNTS, None, "predictions", "index_0"),
        ("path,cat,dog,newt,label\na,1,2,3.5,emu\n", COUNTS, None, "labels", "emu"),
        ("path,cat,dog,newt,label\na,1,2,3.5,3\n", COUNTS, None, "labels", "3"),
        (ROW + "a,1,2,3.5\n", [80.5, 15, 5], None, "class_counts", "80.5"),
    ],
)
def test_a_file_of_logits_is_rejected(tmp_path, content, counts, values, argument, value):
    path, numbers = tmp_path / "logits.csv", tmp_path / "counts.json"
    path.write_text(content)
    numbers.write_text(json.dumps(counts))
    with refusal(argument, value) as error:
        read_logit_file(path, str(numbers), values=values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arrays",
    [
        {"logits": np.ones((2, 1))},
        {"logits": np.array([["a", "b"]])},
        {"logits": np.ones((2, 2)) * 1j},
        {"features": np.ones((2, 2))},
        [[1.0, 2.0], None],
        [[1.0, 2.0], [3.0]],
        [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]],
    ],
)
def test_arrays_and_lists_that_are_no_logits_are_rejected(tmp_path, arrays):
    if isinstance(arrays, dict):
        path = tmp_path / "logits.npz"
        np.savez(path, **arrays)
    else:
        path = tmp_path / "logits.parquet"
        pq.write_table(pa.table({"logits": arrays}), path)
    with pytest.raises(LiVTError, match="logits"):
        read_logit_file(path)


@pytest.mark.parametrize("name", ["logits.npz", "logits.parquet", "logits.csv"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PAR1PAR1", b"\xff\xfe,\x00\n1,2\n"])
def test_damaged_files_are_one_sentence(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LiVTError, match=name):
        read_logit_file(tmp_path / name)
