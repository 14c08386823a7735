"""recipes/eval.py on tiny runs: what it measures, what it writes, what it refuses."""

import contextlib
import importlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.csv as csv
import pyarrow.parquet as parquet
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import ClassLabel, Dataset, Features, List
from datasets import config as datasets_config
from PIL import Image
from recipe_runs import RecipeRun, make_pictures
from refusals import refusal
from transformers import ViTConfig, ViTForImageClassification

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, pretraining_config
from livt_hf.classifiers import balance_by_counts, check_classes_match, load_classifier
from livt_hf.cli.inherit import inherit_from_run
from livt_hf.cli.options import write_config
from livt_hf.cli.settings import EvalSettings
from livt_hf.cli.training_settings import FinetuneSettings, PretrainSettings
from livt_hf.conversion import to_beit
from livt_hf.data import Batches, eval_loader, eval_processor, load_dataset, load_evaluation_data, load_long_tailed
from livt_hf.data.labels import digest_of
from livt_hf.long_tail.priors import numbers_by_name, read_prior
from livt_hf.metrics import long_tail_metrics
from livt_hf.predictions.record import FOLDER, Predictions
from livt_hf.predictions.rules import ARGMAX, GIVEN, TRUE, UNIFORM
from livt_hf.predictions.rules import LABELS as RULE_LABELS
from livt_hf.recipes.calibrate import main as calibrate
from livt_hf.recipes.eval import main
from livt_hf.recipes.predict import main as predict
from livt_hf.reports.mistakes import Mistakes
from livt_hf.results import Results
from livt_hf.run_data import check_split_unseen
from livt_hf.runs import Run

CLASSES = 4
PICTURES = {"frequency.png", "classes.png", "confused.png", "reliability-0.png", "reliability-1.png", "training.png"}
PICTURES |= {"trade_off.png"}
NAMES = [f"class{label}" for label in range(CLASSES)]


def trained_classifier(pictures: Path, updates: int = 3) -> LiViTForImageClassification:
    """Enough updates to tell most of the colours."""
    torch.manual_seed(0)
    config = LiViTConfig.preset("micro", image_size=8, class_counts=[30, 18, 10, 6], **names(NAMES))
    model = LiViTForImageClassification(config)
    data = load_long_tailed(str(pictures))["train"]
    batch = whole_batch(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(updates):
        model(batch["pixel_values"], labels=batch["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def whole_batch(data) -> dict:
    [batch] = eval_loader(data, processor(), Batches(len(data)))
    return batch


@torch.no_grad()
def build_results(model: LiViTForImageClassification, pictures: Path) -> dict:
    """Metrics of the test set under both rules, all images at once."""
    batch = whole_batch(load_long_tailed(str(pictures))["test"])
    logits, counts = model(batch["pixel_values"]).logits, model.config.long_tail.class_counts
    posterior = model.head.posterior(logits, "uniform")
    return {
        "metrics": long_tail_metrics(logits, batch["labels"], counts),
        "posterior": long_tail_metrics(posterior, batch["labels"], counts, confidence="given"),
    }


def finished_run(folder: Path, settings, model, results: dict) -> Path:
    """As a training leaves it."""
    saved(folder, model)
    write_config(settings, folder / "arguments.yaml")
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "log.jsonl").write_text('{"update": 1, "epoch": 1, "loss": 2.0, "lr": 0.1}\n')
    return folder


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> SimpleNamespace:
    """A folder of pictures, and a fine-tuning and a pretraining on it."""
    place = tmp_path_factory.mktemp("eval")
    pictures = make_pictures(place / "pictures")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets_config, "HF_DATASETS_CACHE", place / "cache")
        model = trained_classifier(pictures)
        results = build_results(model, pictures)
    of_pictures = dict(dataset=str(pictures), model_size="micro")
    finetuned = finished_run(place / "finetuned", FinetuneSettings.build(**of_pictures), model, results)
    encoder = LiViTForPreTraining(pretraining_config("micro", image_size=8))
    pretrained = finished_run(place / "pretrained", PretrainSettings.build(**of_pictures), encoder, {})
    return SimpleNamespace(place=place, pictures=pictures, finetuned=finetuned, pretrained=pretrained)


@pytest.fixture(autouse=True)
def _here(workplace, monkeypatch):
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", workplace.place / "cache")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


def run_eval(report: Path | None, *options) -> SimpleNamespace:
    """`livt eval` in this process. Returns what it printed and wrote."""
    where = [] if report is None else ["--report", str(report)]
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([*map(str, options), "--threads", "1", *where])
    written = json.loads((report / "evaluation.json").read_text()) if report else None
    return SimpleNamespace(printed=printed.getvalue(), summary=written, report=report)


@pytest.fixture
def evaluate(tmp_path):
    """`livt eval`, whose report goes to tmp_path/report unless told otherwise."""
    return lambda *options, report=tmp_path / "report": run_eval(report, *options)


@pytest.fixture(scope="module")
def measured(workplace) -> SimpleNamespace:
    """The evaluation of the fine-tuning, with a table of its predictions beside the report."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets_config, "HF_DATASETS_CACHE", workplace.place / "cache")
        patched.setenv("ACCELERATE_USE_CPU", "1")
        options = ["--model", workplace.finetuned, "--predictions", workplace.place / "measured.parquet"]
        return run_eval(workplace.place / "measured", *options)


@pytest.fixture
def refused(evaluate, tmp_path):
    """`livt eval` that is refused for this argument with these values, and leaves nothing behind."""

    def run(argument: str | None, values: list, *options, report: Path = tmp_path / "refused") -> None:
        existed = report.exists()
        with refusal(argument, *values):
            evaluate(*options, report=report)
        assert report.exists() == existed

    return run


def processor():
    return eval_processor(8, [0.5] * 3, [0.25] * 3, native=True)


def saved(folder: Path, model) -> Path:
    """A model with the processor of pictures of 8 x 8 pixels."""
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sure(workplace) -> Path:
    """The classifier, trained on until it tells the colours almost without fail."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets_config, "HF_DATASETS_CACHE", workplace.place / "cache")
        return saved(workplace.place / "sure", trained_classifier(workplace.pictures, updates=30))


def saved_copy(workplace, folder: Path, **settings) -> Path:
    """The fine-tuned model, which is no run, with other settings of its head."""
    return saved(folder, LiViTForImageClassification.from_pretrained(workplace.finetuned, **settings))


def calibrated(folder: Path, dataset: Path, *options, split: str = "test") -> dict:
    """`livt calibrate` of a folder; returns the calibration that it wrote."""
    words = [folder, "--dataset", dataset, "--split", split, "--threads", 1, *options]
    calibrate([str(word) for word in words])
    return json.loads((folder / "config.json").read_text())["long_tail"]["calibration"]


def copied_run(workplace, folder: Path, dataset: str = "pictures") -> Run:
    """The fine-tuning with the record that the package writes today."""
    run = Run(shutil.copytree(workplace.finetuned, folder))
    measured = json.loads((folder / "results.json").read_text())
    run.write_results(Results.from_dict({"stage": "finetune", "dataset": dataset, "seconds": 5.0} | measured))
    return run


def renamed_copy(source: Path, folder: Path) -> Path:
    """The pictures of a folder as other files."""
    for path in sorted(source.glob("*/*")):
        (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.parent.name / f"other-{path.name}")
    return folder


def written(path: Path, content) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def numbers(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if value is not None}


def names(labels: list[str]) -> dict:
    return {"id2label": dict(enumerate(labels)), "label2id": {name: label for label, name in enumerate(labels)}}


def test_evaluating_a_run_gives_its_results_and_a_report_beside_it(workplace, evaluate):
    result = evaluate("--model", workplace.finetuned, report=None)
    folder = workplace.finetuned / "report"
    summary = json.loads((folder / "evaluation.json").read_text())
    results = json.loads((workplace.finetuned / "results.json").read_text())
    assert summary["rules"] == {ARGMAX: results["metrics"], UNIFORM: results["posterior"]}
    assert results["metrics"]["num_images"] == 44
    assert results["metrics"]["accuracy"] > 0.5  # four classes: the model has learned something to be measured
    assert f"accuracy {100 * results['metrics']['accuracy']:.1f}" in result.printed
    assert f"Report: {folder / 'report.html'}" in result.printed

    vectors = {name.replace(".png", ".svg") for name in PICTURES - {"classes.png", "confused.png"}}
    assert {path.name for path in folder.iterdir()} == PICTURES | vectors | {
        "report.md",
        "report.html",
        "evaluation.json",
        "classes.csv",
        FOLDER,
    }
    for name in PICTURES:
        with Image.open(folder / name) as picture:
            assert min(picture.size) > 100 and len(picture.convert("RGB").getcolors(2**24)) > 5
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert page.count("<svg") == 4 and page.count("<img") == page.count('src="data:image/jpeg;base64,') > 8
    assert "http://" not in page and "https://" not in page and page.count("<script") == 1
    assert (
        not re.search(r'(src="(?!data:)|href="(?!#))', page) and str(workplace.place) not in page.partition("<pre>")[0]
    )
    for rule in (ARGMAX, UNIFORM):
        assert RULE_LABELS[rule] in page and RULE_LABELS[rule] in text
    for label, count in enumerate((30, 18, 10, 6)):
        assert re.search(rf"\| {label} \| class{label} \| {count} \| ", text)

    evaluate("--model", workplace.finetuned, report=None)
    assert (workplace.finetuned / "report-2" / "report.html").exists()
    assert {path.name for path in workplace.finetuned.glob("report*")} == {"report", "report-2"}


def test_without_a_model_the_newest_finished_finetuning_is_measured_on_its_own_data(workplace, tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))
    with refusal("model", tmp_path):
        inherit_from_run({})
    places = [tmp_path / place for place in ("train-pictures/1/finetune", "finetune-x/1", "finetune-x/2")]
    for run, finished in zip(places, (True, True, False), strict=True):
        run.mkdir(parents=True)
        shutil.copy(workplace.finetuned / "arguments.yaml", run)
        if finished:  # what `livt train` ends with is one too
            (run / "results.json").write_text("{}")
            assert inherit_from_run({})["model"] == str(run)
    assert inherit_from_run({})["dataset"] == str(workplace.pictures)
    with refusal("dataset", run):
        inherit_from_run({"model": str(run)})
    assert inherit_from_run({"model": str(run), "dataset": "glyphs"}) == {"plugin": None}


def test_what_a_config_file_says_of_an_evaluation_counts_as_said(workplace, tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "none"))
    config = tmp_path / "eval.yaml"
    config.write_text(f"model: {workplace.finetuned}\ndataset: glyphs\n")
    assert EvalSettings.parse(["--config", str(config)], inherit=inherit_from_run).data.dataset == "glyphs"
    config.write_text(f"model: {workplace.finetuned}\nsplit_seed: 3\n")
    settings = EvalSettings.parse([f"--config={config}"], inherit=inherit_from_run)
    assert (settings.data.dataset, settings.data.split_seed) == (str(workplace.pictures), 3)
    with refusal("model", tmp_path / "none"):
        EvalSettings.parse(["--model", "auto"], inherit=inherit_from_run)


def test_images_set_aside_anew_from_a_folder_that_has_changed_are_not_measured_on(workplace, tmp_path):
    pictures, own, run = workplace.pictures / "train", tmp_path / "own", tmp_path / "run"
    shutil.copytree(pictures, own)
    settings = FinetuneSettings.build(dataset=str(own), model_size="micro", validation_fraction=0.2)
    results = Results(stage="finetune", dataset=str(own), trained_on=digest_of(load_dataset(settings.data)["train"]))
    run.mkdir()
    write_config(settings, run / "arguments.yaml")
    Run(run).write_results(results)

    def check(*options: str) -> None:
        asked = EvalSettings.parse([str(run), *options], inherit=inherit_from_run)
        check_split_unseen(asked.model, asked.data, asked.split, load_dataset(asked.data))

    check()
    shutil.copy(pictures / "class0/0.png", own / "class0/new.png")
    for split in ("test", "validation"):
        with refusal(None, own, run, f"{split} split"):
            check("--split", split)
    check("--dataset", str(pictures))
    Run(run).write_results(replace(results, trained_on=None))  # of a run from before, nothing is known
    check()
    Run(run).write_results(replace(results, trained_on=None, num_train_images=40))  # or the number of its images
    with refusal(None, own):
        check()


def test_a_dataset_of_test_images_alone_is_not_measured_on_a_part_of_it(workplace, tmp_path):
    shutil.copytree(workplace.pictures / "test", tmp_path / "own/test")
    asked = EvalSettings.build(model=str(tmp_path), dataset=str(tmp_path / "own"))
    with refusal(None, tmp_path / "own", "--split all"):
        check_split_unseen(asked.model, asked.data, asked.split, load_dataset(asked.data))
    check_split_unseen(asked.model, asked.data, "all", load_evaluation_data(asked.data, "all"))


def run_with_plugin(folder: Path, plugin) -> dict:
    folder.mkdir(exist_ok=True)
    (folder / "arguments.yaml").write_text(f"plugin: {plugin}\n")
    return {"model": str(folder), "dataset": "glyphs"}


def test_the_plugin_of_a_run_is_inherited_and_the_one_that_was_asked_for_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))
    asked = run_with_plugin(tmp_path / "run", written(tmp_path / "mine.py", ""))
    assert inherit_from_run(asked) == {"plugin": str(tmp_path / "mine.py")}
    assert inherit_from_run(asked | {"plugin": "other"}) == {}
    monkeypatch.delenv("LIVT_RUNS")  # elsewhere the same folder may be a download
    with refusal(None, "--plugin", tmp_path / "mine.py"):
        inherit_from_run(asked)


@pytest.mark.parametrize("plugin", ["inside.py", "RUN/inside.py", "inside", "inside.deeper"])
def test_code_in_the_model_s_own_folder_is_not_run_unasked(tmp_path, monkeypatch, plugin):
    """A downloaded folder must not bring code: neither by path nor as a module found from inside the folder."""
    folder = tmp_path / "run"
    asked = run_with_plugin(folder, plugin.replace("RUN", str(folder)))
    written(folder / "inside.py", "raise SystemError('was run')")
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    with refusal(None, "--plugin", asked["model"]):
        EvalSettings.parse(["--model", str(folder), "--dataset", asked["dataset"]], inherit=inherit_from_run)


@pytest.mark.parametrize(
    ("command", "name", "content", "argument", "value"),
    [
        ("finetune", "arguments.yaml", {"loss": "ce", "plugin": "PLUGIN"}, None, "inside.py"),
        ("train", "plan.json", {"why": "", "train": {"plugin": "PLUGIN"}}, None, "inside.py"),
        ("train", "plan.json", {"why": "", "stages": {"finetune": ["--plugin", "PLUGIN"]}}, None, "inside.py"),
        ("train", "plan.json", {"why": "", "stages": {"finetune": ["--config", "PLUGIN"]}}, "resume", "plan.json"),
    ],
)
def test_a_downloaded_training_brings_no_code_when_it_is_resumed(
    tmp_path, monkeypatch, command, name, content, argument, value
):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "download"
    folder.mkdir()
    plugin = str(written(folder / "inside.py", "raise SystemError('was run')"))
    (folder / name).write_text(json.dumps(content).replace("PLUGIN", plugin))
    main = importlib.import_module(f"livt_hf.recipes.{command}").main
    with refusal(argument, folder / value):
        main(["--resume", str(folder)])


def test_an_existing_report_folder_is_refused_before_the_model_is_read(workplace, refused, tmp_path):
    refused("report", [tmp_path], "--model", tmp_path, "--dataset", workplace.pictures, report=tmp_path)  # no model


def test_a_class_with_prior_zero_is_never_predicted(workplace, evaluate, tmp_path):
    prior = written(tmp_path / "prior.json", [0, 0, 0, 1])
    told = evaluate("--model", workplace.finetuned, "--prior", prior)
    rules, report = told.summary["rules"], (told.report / "report.md").read_text()
    assert list(rules) == [GIVEN, ARGMAX, UNIFORM] and told.summary["default_rule"] == GIVEN
    assert "decision rule: posterior, prior of prior.json" in told.printed.splitlines()[1]
    assert Predictions.load(told.report / "predictions").info.default_rule.name == GIVEN
    table = report.partition("## Accuracy under the prior of prior.json (percent)\n\n")[2]
    assert "| posterior, prior of prior.json | 100.0 |" in table.partition("##")[0]  # there is no other class
    served = rules[GIVEN]
    # Always "class3", one of three few-shot classes: right on a quarter of the balanced test set, wherever it is.
    assert (served["accuracy"], served["medium"], served["few"]) == pytest.approx((0.25, 0, 1 / 3))


def test_an_estimated_prior_is_offered_where_the_images_tell_it_and_else_refused(workplace, sure, evaluate, tmp_path):
    """The test images are balanced, the training images have the training prior, and others neither."""
    sure = shutil.copytree(sure, tmp_path / "sure")
    calibrated(sure, workplace.pictures)
    options = ["--model", sure, "--adapt_prior", "--dataset"]
    others = make_pictures(tmp_path / "others", train=(10, 20, 60, 200)) / "train"
    told = evaluate(*options, others, "--split", "all", report=tmp_path / "told")
    estimated = told.summary["estimated_prior"]["prior"]
    assert list(told.summary["rules"])[-1] == "estimated"
    assert estimated == pytest.approx([11 / 294, 21 / 294, 61 / 294, 201 / 294], abs=0.05)
    assert read_prior(str(told.report / "prior.json"), NAMES) == pytest.approx(estimated)
    assert f"--prior {told.report / 'prior.json'}" in told.printed
    for split in ("test", "train"):
        none = evaluate(*options, workplace.pictures, "--split", split, report=tmp_path / split)
        assert none.summary["estimated_prior"]["prior"] is None and list(none.summary["rules"]) == [UNIFORM, ARGMAX]
        assert "No prior is offered" in none.printed and not (none.report / "prior.json").exists()


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (None, ["does not exist"]),
        ("[0.5, 0.5", ["JSON"]),
        ([0.5, 0.5], ["4"]),
        (["a", "b", "c", "d"], ["4 numbers"]),
        ([0.5, 0.75, -0.25, 0], ["none negative"]),
        ({"class0": 1, "class9": 1}, [["class1", "class2", "class3"], ["class9"]]),
    ],
)
def test_a_malformed_prior_is_refused(tmp_path, content, values):
    path = tmp_path / "prior.json"
    if content is not None:
        written(path, content)
    with refusal(None, path, *values):
        read_prior(str(path), NAMES)


def test_no_prior_is_estimated_from_smoothed_labels_or_scores(workplace, refused, tmp_path):
    data, prior = ["--dataset", workplace.pictures], written(tmp_path / "prior.json", [0.25] * 4)
    smooth = saved_copy(workplace, tmp_path / "smooth", label_smoothing=0.1)
    values = ["label_smoothing 0.1", "livt calibrate"]
    refused("adapt_prior", values, "--model", smooth, *data, "--adapt_prior")
    ldam = saved_copy(workplace, tmp_path / "ldam", loss="ldam")
    refused("adapt_prior", ["'ldam'"], "--model", ldam, *data, "--adapt_prior")
    refused("prior", ["kNN"], "--model", workplace.pretrained, *data, "--prior", prior)


def test_shot_groups_are_those_of_the_images_the_model_was_trained_on(workplace, evaluate, tmp_path):
    own = saved_copy(workplace, tmp_path / "own", class_counts=[500, 500, 50, 5])
    measured = evaluate("--model", own, "--dataset", workplace.pictures)
    rows = [line.split(",") for line in (measured.report / "classes.csv").read_text().splitlines()]
    counts = [int(row[rows[0].index("count")]) for row in rows[1:]]
    assert counts == [500, 500, 50, 5]  # the folder has others


def test_all_images_of_another_place_are_measured_and_none_set_aside(workplace, evaluate, caplog):
    result = evaluate("--model", workplace.finetuned, "--dataset", workplace.pictures / "test", "--split", "all")
    assert result.summary["split"] == "all" and result.summary["rules"][ARGMAX]["num_images"] == 44
    assert "set aside" not in caplog.text


def test_all_images_of_its_own_training_are_no_measure_of_a_run(workplace, refused):
    for same in ([], ["--dataset", workplace.pictures / "train"]):
        refused("split", [workplace.pictures], "--model", workplace.finetuned, *same, "--split", "all")


def test_the_report_on_a_model_that_is_no_run_leaves_its_folder_as_it_is(workplace, evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    downloaded = saved_copy(workplace, tmp_path / "downloaded")
    before = sorted(downloaded.rglob("*"))
    for probe in ([], ["--probe"]):
        evaluate("--model", downloaded, "--dataset", workplace.pictures, *probe, report=None)
    assert sorted(downloaded.rglob("*")) == before
    reports = {path.name for path in (tmp_path / "runs").iterdir()}
    assert reports == {"report-downloaded", "report-downloaded-2"}


def test_a_loss_without_posterior_is_measured_by_the_paper_s_rule_alone(workplace, evaluate, tmp_path):
    ldam = saved_copy(workplace, tmp_path / "ldam", loss="ldam")
    result = evaluate("--model", ldam, "--dataset", workplace.pictures)
    assert list(result.summary["rules"]) == [ARGMAX]


def test_the_published_form_gives_the_metrics_of_the_run(workplace, evaluate, tmp_path):
    model = LiViTForImageClassification.from_pretrained(workplace.finetuned)
    saved(tmp_path / "published", to_beit(model))
    rules = evaluate("--model", tmp_path / "published", "--dataset", workplace.pictures).summary["rules"]
    results = json.loads((workplace.finetuned / "results.json").read_text())
    assert numbers(rules[ARGMAX]) == pytest.approx(numbers(results["metrics"]), rel=1e-4)
    assert numbers(rules[UNIFORM]) == pytest.approx(numbers(results["posterior"]), rel=1e-4)


@pytest.fixture
def stock(tiny):
    """A stock ViT classifier for pictures of 8 x 8 pixels."""
    return lambda **labels: ViTForImageClassification(ViTConfig(**(tiny | {"image_size": 8}), **labels))


def test_a_stock_classifier_is_measured_by_its_own_logits(workplace, evaluate, refused, stock, tmp_path):
    model = stock(**names([f"class{label}" for label in range(CLASSES)]))
    torch.nn.init.zeros_(model.classifier.weight)
    torch.nn.init.zeros_(model.classifier.bias)
    model.classifier.bias.data[2] = 5.0
    options = ["--model", saved(tmp_path / "stock", model), "--dataset", workplace.pictures]
    result = evaluate(*options)
    assert list(result.summary["rules"]) == [ARGMAX]
    measured = result.summary["rules"][ARGMAX]
    # It answers "class2" every time, one of three few-shot classes.
    assert measured["many"] is None
    assert (measured["accuracy"], measured["medium"], measured["few"]) == pytest.approx((0.25, 0, 1 / 3))
    refused("adapt_prior", ["class_counts"], *options, "--adapt_prior")
    refused("class_counts", ["--split all"], *options, "--split", "all")  # none of these are training images


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_classifier_trained_elsewhere_gets_the_posterior_rule_from_its_class_counts(
    workplace, evaluate, refused, stock, tmp_path, place
):
    """Its logits are log (30, 18, 10, 6), the training prior itself: without it no class is preferred."""
    model = stock(**names(NAMES))
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([30.0, 18, 10, 6]).log()
    counts = workplace.pictures
    if place == "file":
        counts = tmp_path / "counts.json"
        counts.write_text(json.dumps(dict(zip(NAMES, [30, 18, 10, 6], strict=True))))
    options = ["--dataset", workplace.pictures, "--class_counts", counts]
    table = tmp_path / "predictions.csv"
    evaluate("--model", saved(tmp_path / "stock", model), *options, "--predictions", table)
    rows = csv.read_csv(table).to_pylist()
    assert len(rows) == 44
    assert all(row[f"score_{UNIFORM}_{name}"] == pytest.approx(0.25) for row in rows for name in NAMES)
    refused(None, [workplace.finetuned, "--class_counts"], "--model", workplace.finetuned, *options)
    refused("class_counts", ["kNN"], "--model", workplace.pretrained, *options)
    several = saved(tmp_path / "several", stock(**names(NAMES), problem_type="multi_label_classification"))
    refused(None, ["one label", "--class_counts"], "--model", several, *options)


def test_a_model_of_other_classes_is_refused_by_name(workplace, refused, stock, tmp_path):
    others = {"class0 newt class2 class3": ["'newt'", "'class1'"], "class0 class1 class2": ["3 classes", "4"]}
    for labels, values in others.items():
        other = saved(tmp_path / labels, stock(**names(labels.split())))
        refused(None, values, "--model", other, "--dataset", workplace.pictures)


def test_a_model_and_data_must_agree_on_one_label_or_several(workplace, refused, stock, tmp_path):
    several = saved(tmp_path / "several", stock(**names(NAMES), problem_type="multi_label_classification"))
    options = ["--model", several, "--dataset", workplace.pictures]
    refused(None, ["several labels to the model"], *options)
    refused("test_imbalance", ["one label"], *options, "--test_imbalance")
    labels = Dataset.from_dict({"label": [[0, 1], [3]]}, Features(label=List(ClassLabel(names=NAMES))))
    with refusal(None, "one label to the model"):
        check_classes_match(stock(**names(NAMES)), labels)


def test_a_livit_without_class_counts_is_given_them_and_keeps_its_loss(workplace, tmp_path, tiny):
    sizes = tiny | {"image_size": 8}
    model = LiViTForImageClassification(LiViTConfig(**sizes, **names(NAMES), loss="bce", test_prior=None))
    counts = written(tmp_path / "counts.json", [30, 18, 10, 6])
    given = balance_by_counts(model, str(counts), None).config.long_tail
    assert (given.class_counts, given.loss, given.test_prior) == ([30, 18, 10, 6], "bce", None)
    other = LiViTForImageClassification(LiViTConfig(**sizes, **names(NAMES), loss="bal_bce"))
    with refusal(None, "'bal_bce'", "--trained_with"):
        balance_by_counts(other, str(counts), "bce")
    with refusal("trained_with", "bce"):  # the loss of a model is named with its class counts
        EvalSettings.parse(["org/model", "--trained_with", "bce"])


def test_a_prior_of_classes_that_share_a_name_is_written_and_read_in_class_order(tmp_path):
    labels, prior = ["crane", "dog", "crane"], [0.7, 0.2, 0.1]
    path = written(tmp_path / "prior.json", numbers_by_name(prior, labels))
    assert read_prior(str(path), labels) == pytest.approx(prior)
    written(path, {"crane": 0.7, "dog": 0.3})
    with refusal(None, path, "'crane'"):
        read_prior(str(path), labels)


def test_unknown_splits_and_folders_without_a_model_are_refused(workplace, refused, tmp_path):
    (tmp_path / "empty").mkdir()
    LiViTForImageClassification.from_pretrained(workplace.finetuned).save_pretrained(tmp_path / "bare")
    refused("split", ["'valid'", "train, test"], "--model", workplace.finetuned, "--split", "valid")
    for folder, values in {
        tmp_path / "empty": ["config.json"],
        workplace.finetuned.parent: [f"did you mean {workplace.finetuned}?"],
        tmp_path / "nowhere": ["no such folder"],
        tmp_path / "bare": ["preprocessor_config.json"],
    }.items():
        refused(None, [folder, *values], "--model", folder, "--dataset", workplace.pictures)


def test_a_pretraining_is_judged_by_knn_and_a_linear_probe(workplace, evaluate):
    result = evaluate("--model", workplace.pretrained)
    for name in ("kNN", "linear probe"):
        measured = result.summary[name]
        assert measured["num_images"] == 44
        assert measured["accuracy"] > 0.5  # chance is 0.25, and the classes differ in colour
        assert f"{name:14s} accuracy {100 * measured['accuracy']:.1f}" in result.printed
        assert 0 <= measured["ece"] <= 1
    again = evaluate("--model", workplace.pretrained, report=result.report.with_name("again"))
    assert again.summary | {"command": None} == result.summary | {"command": None}


def test_a_probe_goes_by_the_classes_of_the_data_and_not_by_those_of_the_model(workplace, evaluate, tiny, tmp_path):
    config = LiViTConfig(**(tiny | {"image_size": 8}), class_counts=[500, 5])
    folder = saved(tmp_path / "two", LiViTForImageClassification(config))
    measured = evaluate("--model", folder, "--dataset", workplace.pictures, "--probe").summary["linear probe"]
    assert measured["many"] is None and None not in (measured["medium"], measured["few"])  # of 30, 18, 10 and 6


def test_nan_logits_are_reported_and_not_averaged_away(workplace, evaluate, tmp_path):
    model = LiViTForImageClassification.from_pretrained(workplace.finetuned)
    model.classifier.bias.data[1] = torch.nan
    result = evaluate("--model", saved(tmp_path / "nan", model), "--dataset", workplace.pictures)
    assert "44 images gave NaN logits and count as wrong (100.0 %)" in result.printed
    measured = result.summary["rules"][ARGMAX]
    assert (measured["accuracy"], measured["num_nan"], measured["ece"]) == (0.0, 44, None)
    assert (result.report / "report.html").exists()


def test_two_processes_count_each_image_once_and_measure_what_one_measures(workplace, evaluate):
    options = ["--model", workplace.finetuned, "--batch_size", 5, "--adapt_prior", "--threads", 1]
    run = RecipeRun("eval", workplace.place / "together", *options, processes=2)
    rules = json.loads((run.finish().folder / "evaluation.json").read_text())["rules"]
    results = json.loads((workplace.finetuned / "results.json").read_text())
    assert numbers(rules[ARGMAX]) == pytest.approx(numbers(results["metrics"]), rel=1e-5)
    assert numbers(rules[UNIFORM]) == pytest.approx(numbers(results["posterior"]), rel=1e-5)
    assert rules[ARGMAX]["num_images"] == 44
    result = evaluate("--model", workplace.finetuned, "--adapt_prior")
    alone = result.summary
    together = json.loads((run.folder / "evaluation.json").read_text())
    estimates = [numbers(one["estimated_prior"]) for one in (together, alone)]
    assert estimates[0] == pytest.approx(estimates[1], abs=1e-4)
    assert together["rules"].keys() == alone["rules"].keys()
    assert together["rankings"] == pytest.approx(alone["rankings"])
    assert together["intervals"][ARGMAX] == alone["intervals"][ARGMAX]
    mine, theirs = (Predictions.load(folder / FOLDER) for folder in (run.folder, result.report))
    assert mine.table["path"].equals(theirs.table["path"]) and np.allclose(mine.logits, theirs.logits, atol=1e-5)
    assert run.printed.count("on 44 images") == run.printed.count("Report: ") == 1


def test_knn_and_the_linear_probe_are_refused_on_two_processes(workplace):
    run = RecipeRun("eval", workplace.place / "probing", "--model", workplace.pretrained, "--threads", 1, processes=2)
    assert run.wait() == 1
    assert "kNN and the linear probe look at all images at once; run it on one process." in run.printed
    assert "Traceback" not in run.printed and not run.folder.exists()


def test_shifted_test_sets_compare_the_rules_under_the_true_prior(workplace, sure, evaluate, refused):
    options = ["--model", sure, "--dataset", workplace.pictures]
    result = evaluate(*options, "--test_imbalance=5,-5")
    forward, balanced, backward = result.summary["shifted"]
    assert [one["imbalance"] for one in result.summary["shifted"]] == [5, 1, -5]
    assert [one["num_images"] for one in result.summary["shifted"]] == [11 + 6 + 3 + 2, 44, 11 + 6 + 3 + 2]
    for one in result.summary["shifted"]:
        assert list(one["rules"])[:3] == [ARGMAX, UNIFORM, TRUE]
        assert one["rules"][TRUE]["accuracy"] >= one["rules"][UNIFORM]["accuracy"] - 0.1
    assert balanced["rules"][UNIFORM]["accuracy"] == result.summary["rules"][UNIFORM]["accuracy"]
    assert balanced["rules"][TRUE] == balanced["rules"][UNIFORM]
    assert (result.report / "shifts.png").exists()
    assert "| 5 forward | 22 |" in (result.report / "report.md").read_text()
    assert "| 5 backward | 22 |" in result.printed
    refused("test_imbalance", ["50", "11,-11"], *options, "--test_imbalance")


# The numbers people report


def test_numbers_of_a_report_are_those_of_scikit_learn(measured):
    sklearn = pytest.importorskip("sklearn.metrics")
    result = measured
    rows = parquet.read_table(measured.report.with_suffix(".parquet")).to_pydict()
    scores, labels = np.array(rows["scores"]), [NAMES.index(name) for name in rows["label"]]
    rankings, metrics = result.summary["rankings"], result.summary["rules"][ARGMAX]
    assert rankings["auroc"] == pytest.approx(sklearn.roc_auc_score(labels, scores, multi_class="ovr"))
    one_hot = np.eye(CLASSES)[labels]
    assert rankings["average_precision"] == pytest.approx(sklearn.average_precision_score(one_hot, scores))
    predicted = rows["prediction"]
    assert metrics["macro_f1"] == pytest.approx(sklearn.f1_score(rows["label"], predicted, average="macro"))
    low, high = result.summary["intervals"][ARGMAX]["macro_f1"]
    assert low <= metrics["macro_f1"] <= high
    assert "macro_f1" in (result.report / "report.md").read_text() and "macro_f1" in result.printed


def test_a_report_has_the_predictions_that_the_demo_shows(workplace, measured):
    result = measured
    predictions = Predictions.load(result.report / FOLDER)
    for rule in predictions.info.rules:
        found, metrics = Mistakes.of(predictions, rule), result.summary["rules"][rule.name]
        assert found.belong_to(load_long_tailed(str(workplace.pictures))) and len(found.label) == 44
        assert found.correct.mean() == pytest.approx(metrics["accuracy"])
        assert ((found.confidence > 0.2) & (found.confidence <= 1)).all()  # of four classes, the most probable


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_predictions_of_single_images_name_file_label_and_scores_under_each_rule(
    workplace, measured, evaluate, tmp_path, suffix
):
    result, table = measured, measured.report.with_suffix(".parquet")
    if suffix == "csv":
        table = tmp_path / "predictions.csv"
        result = evaluate("--model", workplace.finetuned, "--predictions", table)
    read = parquet.read_table if suffix == "parquet" else csv.read_csv
    rows = read(table).to_pylist()
    assert len(rows) == 44
    for rule, ending in {ARGMAX: "", UNIFORM: "_uniform"}.items():
        right = sum(row["label"] == row[f"prediction{ending}"] for row in rows) / 44
        assert right == pytest.approx(result.summary["rules"][rule]["accuracy"])
        for row in rows:
            assert Path(row["file"]).parent.name == row["label"] and Path(row["file"]).exists()
            each = [row[f"score{ending}_{name}"] for name in NAMES] if suffix == "csv" else row[f"scores{ending}"]
            scores = list(each)
            assert sum(scores) == pytest.approx(1, abs=1e-5)
            assert row[f"score{ending}"] == pytest.approx(max(scores))
            assert row[f"prediction{ending}"] == NAMES[scores.index(max(scores))]


def test_a_table_that_cannot_be_written_is_refused_before_the_data_are_read(workplace, refused, tmp_path):
    for path in (tmp_path / "table.xlsx", written(tmp_path / "a.csv", ""), tmp_path / "nowhere" / "a.csv"):
        options = ["--model", workplace.finetuned, "--dataset", tmp_path / "nothing", "--predictions", path]
        refused("predictions", [path], *options)


def test_shot_groups_follow_the_thresholds_that_were_asked_for(workplace, evaluate, refused):
    summary = evaluate("--model", workplace.finetuned, "--many_above", 15, "--few_below", 8).summary
    measured = summary["rules"][ARGMAX]
    assert summary["thresholds"] == {"many_above": 15, "few_below": 8}
    assert None not in (measured["many"], measured["medium"], measured["few"])  # classes of 30, 18 | 10 | 6 images
    refused("few_below", ["5"], "--model", workplace.finetuned, "--many_above", 5)


def test_intervals_are_over_groups_where_the_data_have_them(workplace, measured, evaluate, tmp_path):
    lines = []
    for number, path in enumerate(sorted(workplace.pictures.glob("*/*/*.png"))):
        split, name = path.parts[-3], path.parent.name
        patient = number if split == "train" else "abcdefgh"[number % 8]
        lines.append(f"{path.relative_to(workplace.pictures)},{name},{split},{patient}")
    labels = written(tmp_path / "labels.csv", "\n".join(["path,label,split,patient", *lines]))
    options = ["--model", workplace.finetuned, "--dataset", labels, "--source", workplace.pictures]
    options += ["--group_column", "patient"]
    result = evaluate(*options, "--predictions", tmp_path / "p.parquet")
    assert "95 % intervals over groups" in result.printed
    assert measured.summary["rules"][ARGMAX] == result.summary["rules"][ARGMAX]
    assert measured.summary["intervals"] != result.summary["intervals"]
    assert set(parquet.read_table(tmp_path / "p.parquet").to_pydict()["group"]) == set("abcdefgh")


# Calibration, and the default rule


def test_a_calibrated_model_is_judged_and_served_by_its_posterior(workplace, evaluate, tmp_path, capfd):
    folder = saved_copy(workplace, tmp_path / "model")
    image = str(workplace.pictures / "test" / "class0" / "0.png")
    predict([str(folder), image])
    assert RULE_LABELS[ARGMAX] in capfd.readouterr().err
    calibration = calibrated(folder, workplace.pictures)
    assert "Measured on these same images" in capfd.readouterr().out
    assert calibration["num_images"] == 44 and len(calibration["offsets"]) == CLASSES
    predict([str(folder), image])
    assert RULE_LABELS[UNIFORM] in capfd.readouterr().err
    result = evaluate("--model", folder, "--dataset", workplace.pictures)
    rules = result.summary["rules"]
    assert list(rules) == [UNIFORM, ARGMAX]
    before = json.loads((workplace.finetuned / "results.json").read_text())
    assert rules[ARGMAX] == before["metrics"]
    assert rules[UNIFORM]["ece"] < before["posterior"]["ece"]  # on the images it was calibrated on:
    assert result.summary["calibrated_on_these_images"] and "these very images" in result.printed


def test_the_images_that_a_default_run_held_out_are_found_again(tmp_path):
    write_config(FinetuneSettings.build(dataset="birds", test_fraction=0.3), tmp_path / "arguments.yaml")
    (tmp_path / "results.json").touch()
    lent = inherit_from_run({"model": str(tmp_path)})
    assert (lent["validation_fraction"], lent["test_fraction"]) == (None, 0.3)  # None: a tenth of own datasets


@pytest.mark.parametrize("written", ["table.csv", "./table.csv", "ABSOLUTE/table.csv", "LINK"])
def test_the_data_of_a_run_are_divided_as_in_its_training_also_where_they_are_named(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").touch()
    (tmp_path / "LINK").symlink_to("table.csv")
    run = tmp_path / "run"
    run.mkdir()
    write_config(
        FinetuneSettings.build(dataset="table.csv", group_column="patient", fold="1/5"), run / "arguments.yaml"
    )
    words = ["--model", "run", "--dataset", written.replace("ABSOLUTE", str(tmp_path))]
    settings = EvalSettings.parse(words, inherit=inherit_from_run)
    assert (settings.data.group_column, settings.data.fold) == ("patient", "1/5")
    assert EvalSettings.parse([*words, "--fold", "2/5"], inherit=inherit_from_run).data.fold == "2/5"
    assert inherit_from_run({"model": "run", "dataset": str(run)}) == {"plugin": None}


def test_a_folder_with_the_name_of_a_benchmark_is_not_the_benchmark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar100-lt").mkdir()
    write_config(FinetuneSettings.build(dataset="cifar100-lt", imbalance_factor=10), tmp_path / "arguments.yaml")
    assert inherit_from_run({"model": ".", "dataset": "./cifar100-lt"}) == {"plugin": None}
    assert inherit_from_run({"model": ".", "dataset": "cifar100-lt"})["imbalance_factor"] == 10


def test_the_results_of_a_run_are_those_of_its_calibrated_model(workplace, tmp_path):
    run = copied_run(workplace, tmp_path / "run")
    before = run.results
    write_config(FinetuneSettings.build(**run.arguments | {"plugin": "mine.py"}), run.folder / "arguments.yaml")
    others = renamed_copy(workplace.pictures / "test", tmp_path / "others")
    plugin = ["--plugin", written(tmp_path / "mine.py", "")]
    stored = calibrated(run.folder, others, *plugin, split="all")
    after = run.results
    assert (before.default_rule, after.default_rule) == (ARGMAX, UNIFORM)
    assert after.rules[ARGMAX] == before.rules[ARGMAX] and after.metrics == after.rules[UNIFORM]
    assert after.metrics["ece"] < before.rules[UNIFORM]["ece"]
    assert (after.seconds, after.dataset, after.calibration_split) == (5.0, "pictures", "all")
    assert calibrated(run.folder, others, *plugin, split="all") == stored  # the weights are what is calibrated


@pytest.mark.parametrize("split", ["test", "all"])
@pytest.mark.parametrize("kept", [True, False], ids=["with its predictions", "of 0.2"])
def test_results_are_never_measured_on_the_images_of_the_calibration(workplace, evaluate, tmp_path, split, kept):
    run = copied_run(workplace, tmp_path / "run")
    if kept:
        evaluate("--model", run.folder)
        shutil.copytree(tmp_path / "report" / "predictions", run.folder / "predictions")
    before = run.results
    stored = calibrated(run.folder, workplace.pictures / ("" if split == "test" else "test"), split=split)
    after = run.results
    assert after.metrics == before.metrics and UNIFORM in before.rules and UNIFORM not in after.rules
    assert (after.calibrated_on, after.calibration_split) == (44, split)
    assert (stored["split"], stored["num_images"]) == (split, 44) and len(stored["fingerprint"]) == 64


def test_where_the_data_of_a_run_are_gone_its_results_keep_what_calibration_does_not_change(
    workplace, tmp_path, capfd
):
    run = copied_run(workplace, tmp_path / "run", dataset="gone")
    gone = FinetuneSettings.build(**run.arguments | {"dataset": str(tmp_path / "gone")})
    write_config(gone, run.folder / "arguments.yaml")
    before = run.results
    stored = calibrated(run.folder, renamed_copy(workplace.pictures / "test", tmp_path / "others"), split="all")
    after, printed = run.results, capfd.readouterr().out
    assert "It is not measured again" in printed and "gone does not exist" in printed
    assert after.metrics == before.metrics and UNIFORM in before.rules and UNIFORM not in after.rules
    assert (after.default_rule, after.calibrated_on, list(after.rules)) == (UNIFORM, 44, [ARGMAX])
    assert stored["num_images"] == 44


def test_the_published_form_is_calibrated_in_place_and_stays_what_it_is(workplace, tmp_path):
    published = saved(tmp_path, to_beit(LiViTForImageClassification.from_pretrained(workplace.finetuned)))
    before = json.loads((tmp_path / "config.json").read_text())
    calibration = calibrated(published, workplace.pictures)
    after = json.loads((tmp_path / "config.json").read_text())
    assert after | {"long_tail": None} == before | {"long_tail": None} and calibration is not None
    assert LiViTForImageClassification.from_pretrained(tmp_path).config.long_tail.calibration == calibration


def test_calibration_wants_images_that_were_held_out(workplace, monkeypatch):
    finetuned, folder = str(workplace.finetuned), workplace.pictures
    monkeypatch.chdir(folder)
    with refusal(None, "'validation'", "train, test"):
        calibrate([finetuned])
    with refusal(None, "trained on"):
        calibrate([finetuned, "--split", "train"])
    for same in (folder, f"{folder}/../{folder.name}", folder / "train", folder.parent, "train"):
        with refusal(None, "trained on"):
            calibrate([finetuned, "--dataset", str(same), "--split", "all"])
    with refusal(None, workplace.pretrained):
        calibrate([str(workplace.pretrained)])


def test_a_model_from_elsewhere_is_calibrated_and_knows_its_class_counts_from_then_on(workplace, stock, tmp_path):
    folder = saved(tmp_path / "model", stock(**names(NAMES)))
    with refusal("prior", folder, "class_counts"):
        calibrated(folder, workplace.pictures)
    calibrated(folder, workplace.pictures, "--class_counts", workplace.pictures)
    known = load_classifier(str(folder)).head.settings
    assert (known.class_counts, known.loss) == ([30, 18, 10, 6], "ce") and known.calibration["num_images"] == 44


def test_what_mixup_did_to_a_posterior_is_said_until_it_is_calibrated(workplace, evaluate, refused, tmp_path):
    folder = saved_copy(workplace, tmp_path / "model", trained_with={"mixup": 0.8})
    options = ["--model", folder, "--dataset", workplace.pictures]
    assert "mixup 0.8" in evaluate(*options).printed
    refused("adapt_prior", ["mixup 0.8"], *options, "--adapt_prior")
    calibrated(folder, workplace.pictures)
    assert "mixup 0.8" not in evaluate(*options, "--adapt_prior", report=tmp_path / "again").printed
