"""The prediction record: what is saved is loaded, what is joined is kept, what is decided later is decided at once."""

import dataclasses
import doctest
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from refusals import refusal

from livt_hf.errors import LiVTError
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.predictions import DecisionRule, Predictions, PredictionsInfo, decide, record
from livt_hf.predictions.decisions import load_prior
from livt_hf.predictions.evaluate import Evaluator
from livt_hf.predictions.record import ModelInfo, as_lists, read_parts, write_part
from livt_hf.predictions.rules import ARGMAX, PER_LABEL, TEST_PRIOR, UNIFORM, rule_for_prior

NAMES, COUNTS = ["cat", "dog", "crane", "crane"], [60, 30, 9, 1]  # ImageNet has two classes called crane


def made(images: int = 50, seed: int = 0, **changes) -> Predictions:
    rng = np.random.default_rng(seed)
    options = dict(class_names=NAMES, class_counts=COUNTS, path=[f"{seed}-{i}.png" for i in range(images)])
    options |= dict(group=rng.choice(["p", "q"], images)) | changes
    return Predictions.from_arrays(rng.normal(size=(images, 4)), rng.integers(0, 4, images), **options)


def calibrated(predictions: Predictions, scale: float, **changes) -> Predictions:
    """Return the same logits of a model with another calibration."""
    calibration = {"scale": scale, "odds": 0.0, "offsets": [0.0] * 4, "num_images": 9, "thresholds": None}
    tail = LongTailConfig.from_dict(dict(predictions.info.long_tail) | {"calibration": calibration} | changes)
    info = PredictionsInfo(predictions.info.class_names, (ModelInfo(f"model {scale}", tail),))
    return Predictions(predictions.table, info)


def test_the_posterior_is_bayes_rule():
    predictions = made()
    softmax = torch.from_numpy(predictions.logits.copy()).softmax(-1).numpy()
    assert np.allclose(predictions.posterior("training"), softmax, atol=1e-6)
    weighted = softmax / np.array(COUNTS)
    uniform = weighted / weighted.sum(1, keepdims=True)
    assert np.allclose(predictions.posterior("uniform"), uniform, atol=1e-6)
    assert np.allclose(predictions.posterior(), uniform, atol=1e-6)
    prior = np.array([0.1, 0.2, 0.3, 0.4])
    assert np.allclose(predictions.posterior(prior), (uniform * prior) / (uniform @ prior)[:, None], atol=1e-6)


def test_the_example_of_the_docstring_runs():
    assert doctest.run_docstring_examples(Predictions, vars(record), name="Predictions") is None


@pytest.mark.parametrize("rows", [1, 7, 50, 1000])
def test_a_saved_record_is_loaded_whole_in_parts_of_any_size(tmp_path, rows):
    predictions = calibrated(made(site=np.arange(50), date=["2024"] * 50), scale=2.0)
    loaded = Predictions.load(predictions.save(tmp_path / "record", rows_per_part=rows))
    assert loaded.table.equals(predictions.table) and loaded.info == predictions.info
    assert len(list((tmp_path / "record").iterdir())) == -(-50 // rows)
    assert sum(map(len, read_parts(tmp_path / "record"))) == 50
    assert loaded.labels.dtype == np.int64 and loaded.class_names == NAMES


def test_a_record_without_images_or_labels_is_saved_too(tmp_path):
    empty = Predictions.from_arrays(np.zeros((0, 2)), class_names=["a", "b"])
    loaded = Predictions.load(empty.save(tmp_path / "empty"))
    assert len(loaded) == 0 and loaded.labels is None and loaded.logits.shape == (0, 2)
    assert len(decide(loaded).labels) == 0


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_parts_of_any_number_of_processes_make_the_same_record(tmp_path, processes):
    predictions, bounds = made(), np.linspace(0, 50, processes + 1).astype(int)
    for start, stop in reversed(list(zip(bounds[:-1], bounds[1:], strict=True))):  # in any order
        write_part(tmp_path, predictions.take(np.arange(start, stop)), int(start), 50)
    loaded = Predictions.load(tmp_path)
    assert loaded.table.equals(predictions.table) and loaded.info == predictions.info


def test_saving_again_completes_a_record_and_spares_its_finished_parts(tmp_path):
    predictions = made()
    parts = sorted(predictions.save(tmp_path / "record", rows_per_part=20).iterdir())
    parts[1].unlink()
    before = [part.stat().st_mtime_ns for part in (parts[0], parts[2])]
    with pytest.raises(LiVTError, match="rows from 20"):
        Predictions.load(tmp_path / "record")
    predictions.save(tmp_path / "record", rows_per_part=20)
    assert [part.stat().st_mtime_ns for part in (parts[0], parts[2])] == before
    assert Predictions.load(tmp_path / "record").table.equals(predictions.table)
    with refusal("path", "another record"):
        made(seed=1).save(tmp_path / "record", rows_per_part=20)
    parts[2].unlink()
    with pytest.raises(LiVTError, match="40 of 50"):
        Predictions.load(tmp_path / "record")


RULES = [
    DecisionRule.named(ARGMAX),
    DecisionRule.named(UNIFORM, "uniform"),
    DecisionRule("a", "a", "training"),
    DecisionRule("b", "b", (0.7, 0.1, 0.1, 0.1)),
]


@pytest.mark.parametrize("rule", RULES)
def test_what_is_decided_later_is_decided_at_once(tmp_path, rule):
    predictions = calibrated(made(200), 0.7)
    predictions.save(tmp_path / "record", rows_per_part=33)
    at_once, later = decide(predictions, rule), decide(tmp_path / "record", rule)
    assert torch.equal(at_once.labels, later.labels) and torch.equal(at_once.scores, later.scores)
    assert torch.equal(at_once.scores, predictions.scores(rule).amax(-1))
    assert not torch.equal(decide(predictions, RULES[1]).labels, decide(predictions, RULES[2]).labels)


def test_joined_records_decide_as_their_parts_do(tmp_path):
    parts = [calibrated(made(30, seed), scale) for seed, scale in enumerate((0.5, 2.0, 0.5))]
    joined = Predictions.concatenate([part.with_column("fold", [i] * 30) for i, part in enumerate(parts)])
    joined.save(tmp_path / "joined", rows_per_part=13)
    joined = Predictions.load(tmp_path / "joined")
    assert [model.name for model in joined.info.models] == ["model 0.5", "model 2.0"]
    assert joined.column("fold").tolist() == [0] * 30 + [1] * 30 + [2] * 30
    assert np.array_equal(joined.labels, np.concatenate([part.labels for part in parts]))
    for rule in joined.info.rules:
        assert torch.equal(joined.scores(rule), torch.cat([part.scores(rule) for part in parts]))
        assert torch.equal(decide(joined, rule).labels, torch.cat([decide(part, rule).labels for part in parts]))
    whole = Predictions.concatenate([joined, parts[0]])  # the models keep their numbers when joined again
    assert torch.equal(whole.scores()[-30:], parts[0].scores()) and len(whole.info.models) == 2


def test_joined_records_share_the_rules_that_all_models_have():
    plain, fitted = made(5), calibrated(made(5, 1), 2.0)
    assert [rule.name for rule in plain.info.rules] == [ARGMAX, UNIFORM]
    assert [rule.name for rule in fitted.info.rules] == [UNIFORM, ARGMAX]
    for parts, default in (([plain, fitted], ARGMAX), ([fitted, plain], UNIFORM)):
        assert Predictions.concatenate(parts).info.default_rule.name == default
    unknown = made(5, 2, class_counts=None)
    assert [rule.name for rule in Predictions.concatenate([fitted, unknown]).info.rules] == [ARGMAX]


def test_the_default_rule_is_the_posterior_of_a_calibrated_model():
    fitted = calibrated(made(), 2.0, test_prior=[0.4, 0.3, 0.2, 0.1])
    assert [rule.name for rule in fitted.info.rules] == [TEST_PRIOR, ARGMAX, UNIFORM]
    assert fitted.info.default_rule.name == TEST_PRIOR
    assert np.array_equal(fitted.scores().numpy(), fitted.posterior([0.4, 0.3, 0.2, 0.1]))
    assert np.array_equal(fitted.posterior(), fitted.posterior([0.4, 0.3, 0.2, 0.1]))


def test_several_labels_of_an_image_are_rows_of_zero_and_one(tmp_path):
    labels = np.array([[1, 0, 1], [0, 0, 0]])
    options = dict(class_names="abc", class_counts=[5, 3, 2], loss="bce", num_train_images=20)
    predictions = Predictions.from_arrays(np.eye(2, 3), labels, **options)
    loaded = Predictions.load(predictions.save(tmp_path / "record"))
    assert np.array_equal(loaded.labels, labels) and [rule.name for rule in loaded.info.rules] == [PER_LABEL]
    assert np.allclose(loaded.posterior("training"), 1 / (1 + np.exp(-np.eye(2, 3))), atol=1e-6)
    assert loaded.info.thresholds().tolist() == [0.5] * 3


def test_a_record_of_files_that_cannot_be_read_is_completed_and_no_other_one_takes_its_place(tmp_path):
    predictions = made()
    logits = predictions.logits.copy()
    logits[3] = np.nan
    table = predictions.table.drop_columns("logits").append_column("logits", as_lists(logits))
    predictions = Predictions(table.append_column("error", pa.array(["damaged"] * 50)), predictions.info)
    predictions.save(tmp_path, rows_per_part=20)
    (tmp_path / "part-000000000040.parquet").unlink()  # as a kill leaves it
    assert len(Predictions.load(predictions.save(tmp_path, rows_per_part=20))) == 50
    with pytest.raises(LiVTError, match="another record"):
        made().save(tmp_path, rows_per_part=20)


@pytest.mark.parametrize("prior", ["uniform", "training"])
def test_the_folds_of_a_cross_validation_are_decided_under_a_prior_together(prior):
    parts = [calibrated(made(seed=0), 2.0), calibrated(made(seed=1), 3.0)]
    joined = Predictions.concatenate(parts)
    rule = rule_for_prior(prior, load_prior(prior, joined.info).tolist())
    alone = torch.cat([decide(part, prior=prior).labels for part in parts])
    assert torch.equal(decide(joined, rule).labels, alone)


def test_a_record_without_labels_is_not_measured():
    unlabelled = Predictions.from_arrays(np.eye(4), class_names=NAMES, class_counts=COUNTS)
    with pytest.raises(LiVTError, match="no labels") as error:
        Evaluator(unlabelled, COUNTS).evaluate()
    assert error.value.argument == "labels"


def test_thresholds_chosen_under_the_own_prior_do_not_hold_under_another_one():
    options = dict(class_names="ab", class_counts=[10, 10], loss="bce", num_train_images=20)
    record = Predictions.from_arrays([[1.0, -1.0], [-1.0, 1.0]], np.eye(2, dtype=int), **options)
    calibration = {"scale": 1.0, "odds": 1.0, "offsets": [0.0] * 2, "num_images": 9, "thresholds": [0.9] * 2}
    tail = LongTailConfig.from_dict(dict(record.info.long_tail) | {"calibration": calibration, "class_counts": [9, 9]})
    record = Predictions(record.table, PredictionsInfo(("a", "b"), (ModelInfo(None, tail),), multi_label=True))
    own, other = record.info.default_rule, rule_for_prior([0.4, 0.4])
    measured = Evaluator(record, [9, 9]).measure([own, other])  # scores of .73 and .27 under the first
    assert [measured[rule.name].compute()["macro_recall"] for rule in (own, other)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "argument", "value"),
    [
        (dict(logits=[[0.0, np.nan]]), "logits", "row 0"),
        (dict(logits=[[0.0, np.inf]]), "logits", "row 0"),
        (dict(logits=[0.0, 1.0]), "logits", "(2,)"),
        (dict(logits=[["x", "y"]]), "logits", "numbers"),
        (dict(class_names=["a", "b", "c"]), "logits", "3"),
        (dict(labels=[0, 1]), "labels", "(2,)"),
        (dict(labels=[2]), "labels", "2"),
        (dict(labels=[0.5]), "labels", "float64"),
        (dict(labels=[[0, 7]], loss="bce"), "labels", "7"),
        (dict(class_counts=[1, 2, 3]), "class_counts", "3"),
        (dict(label=["a"]), "label", "label"),
        (dict(model=["a"]), "model", "model"),
        (dict(path=["a", "b"]), "path", "2"),
        (dict(site=[object()]), "site", "site"),
    ],
)
def test_from_arrays_rejects(changes, argument, value):
    with refusal(argument, value):
        Predictions.from_arrays(**(dict(logits=[[0.0, 1.0]], class_names=["a", "b"]) | changes))


@pytest.mark.parametrize(("logits", "warnings"), [([[0.25, 0.75]], 1), ([[-1.0, 2.0]], 0)])
def test_logits_that_look_like_probabilities_are_warned_of(caplog, logits, warnings):
    Predictions.from_arrays(logits, class_names=["a", "b"])
    assert caplog.text.count("probabilities=True") == warnings
    Predictions.from_arrays([[0.25, 0.75]], class_names=["a", "b"], probabilities=True)
    assert caplog.text.count("probabilities=True") == warnings


def test_a_column_is_not_added_twice_and_other_classes_are_not_joined():
    with refusal("path", "path"):
        made().with_column("path", ["x"] * 50)
    for parts in ([], [made(), made(class_names=list("wxyz"))]):
        with refusal("parts"):
            Predictions.concatenate(parts)


def damaged_info(change):
    """Return a function that changes what a part says of its record."""

    def damage(path):
        table = pq.read_table(path)
        values = json.loads(table.schema.metadata[b"livt_hf"])
        change(values)
        pq.write_table(table.replace_schema_metadata({b"livt_hf": json.dumps(values)}), path)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_text("no parquet"),
        lambda path: pq.write_table(pa.table({"a": [1]}), path),  # of somebody else
        lambda path: path.unlink(),
        damaged_info(lambda values: values.pop("info")),
        damaged_info(lambda values: values["info"].update(class_names=["a", "b"])),
        damaged_info(lambda values: values["info"].update(default_rule=None)),
        damaged_info(lambda values: values["info"]["models"][0]["long_tail"].update(loss="nothing")),
        damaged_info(lambda values: values.update(start="x")),
    ],
)
def test_a_damaged_or_foreign_file_is_one_sentence(tmp_path, damage):
    made(5).save(tmp_path / "record")
    (part,) = (tmp_path / "record").iterdir()
    damage(part)
    with pytest.raises(LiVTError) as error:
        Predictions.load(tmp_path / "record")
    assert error.value.argument == "path" and "\n" not in str(error.value)


def test_labels_that_are_no_classes_are_damage(tmp_path):
    wrong = dataclasses.replace(made(5), table=pa.table({"label": [9] * 5, "logits": made(5).table["logits"]}))
    wrong.save(tmp_path / "record")
    with refusal("path"):
        Predictions.load(tmp_path / "record")
