"""recipes/eval.py on tiny runs: what it measures, what it writes, what it refuses."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import config as datasets_config
from PIL import Image
from recipe_runs import RECIPES, TINY, RecipeRun, make_pictures
from transformers import ViTConfig, ViTForImageClassification

from livt_hf import LiViTForImageClassification
from livt_hf.conversion import to_beit
from livt_hf.data import eval_processor
from livt_hf.evaluation.running import inherited_eval_options
from livt_hf.long_tail.priors import read_prior

CLASSES = 4
PAPER, UNIFORM = "paper (argmax z)", "posterior, uniform prior"
PICTURES = {"frequency.png", "classes.png", "confused.png", "reliability-0.png", "reliability-1.png", "training.png"}
FINETUNE = [*TINY, *"--base_lr 1e-2 --pretrained none --mixup 0 --cutmix 0".split()]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> SimpleNamespace:
    """A folder of pictures, a fine-tuning and a pretraining on it, made at the same time."""
    place = tmp_path_factory.mktemp("eval")
    pictures = make_pictures(place / "pictures")
    finetuning = RecipeRun("finetune", place / "finetuned", "--dataset", pictures, *FINETUNE)
    pretraining = RecipeRun("pretrain", place / "pretrained", "--dataset", pictures, *TINY, "--epochs", 8)
    runs = finetuning.finish().folder, pretraining.finish().folder
    return SimpleNamespace(place=place, pictures=pictures, finetuned=runs[0], pretrained=runs[1])


@pytest.fixture
def evaluate(workplace, monkeypatch, capfd, tmp_path):
    """eval.py in this process; the report goes to tmp_path/report unless told otherwise. Returns what it wrote."""
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", workplace.place / "cache")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")

    def run(*options, report: Path | None = tmp_path / "report") -> SimpleNamespace:
        where = [] if report is None else ["--report", str(report)]
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, options), "--threads", "1", *where])
        AcceleratorState._reset_state(reset_partial_state=True)
        capfd.readouterr()
        runpy.run_path(str(RECIPES / "eval.py"), run_name="__main__")
        written = json.loads((report / "evaluation.json").read_text()) if report else None
        return SimpleNamespace(printed=capfd.readouterr().out, summary=written, report=report)

    return run


@pytest.fixture
def refused(evaluate, tmp_path):
    """eval.py that ends in a sentence and leaves nothing behind. Returns the sentence."""

    def run(*options, report: Path = tmp_path / "refused") -> str:
        existed = report.exists()
        with pytest.raises(SystemExit) as stopped:
            evaluate(*options, report=report)
        assert report.exists() == existed
        return str(stopped.value)

    return run


def saved(folder: Path, model) -> Path:
    """A model with the processor of pictures of 8 x 8 pixels."""
    model.save_pretrained(folder)
    eval_processor(8, [0.5] * 3, [0.25] * 3, native=True).save_pretrained(folder)
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
    assert summary["rules"] == {PAPER: results["metrics"], UNIFORM: results["posterior"]}
    assert results["metrics"]["num_images"] == 44
    assert results["metrics"]["accuracy"] > 0.5  # four classes: the model has learned something to be measured
    assert f"accuracy {100 * results['metrics']['accuracy']:.1f}" in result.printed
    assert f"Report: {folder / 'report.html'}" in result.printed

    assert {path.name for path in folder.iterdir()} == PICTURES | {"report.md", "report.html", "evaluation.json"}
    for name in PICTURES:
        with Image.open(folder / name) as picture:
            assert min(picture.size) > 100 and len(picture.convert("RGB").getcolors(2**24)) > 5
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert page.count('src="data:image/png;base64,') == len(PICTURES) == page.count("<img")
    assert "http://" not in page and "https://" not in page and "href=" not in page and "<script" not in page
    assert not re.search(r'src="(?!data:)', page)
    for rule in (PAPER, UNIFORM):
        assert rule in page and rule in text
    for label, count in enumerate((30, 18, 10, 6)):
        assert re.search(rf"\| {label} \| class{label} \| {count} \| ", text)

    evaluate("--model", workplace.finetuned, report=None)
    assert (workplace.finetuned / "report-2" / "report.html").exists()
    assert {path.name for path in workplace.finetuned.glob("report*")} == {"report", "report-2"}


def test_without_a_model_the_newest_finished_finetuning_is_measured_on_its_own_data(workplace, tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))
    with pytest.raises(ValueError, match="no finished fine-tuning under"):
        inherited_eval_options([])
    for number in (1, 2):
        run = tmp_path / "finetune-pictures-micro" / str(number)
        run.mkdir(parents=True)
        (run / "arguments.yaml").write_text((workplace.finetuned / "arguments.yaml").read_text())
    (run.with_name("1") / "results.json").write_text("{}")  # the second is not finished
    words = inherited_eval_options([])
    assert words[:2] == ["--model", str(run.with_name("1"))]
    assert words[words.index("--dataset") + 1] == str(workplace.pictures)
    with pytest.raises(ValueError, match=r"2 is not a finished run here; say what to measure it on with --dataset"):
        inherited_eval_options(["--model", str(run)])
    assert inherited_eval_options(["--model", str(run), "--dataset", "glyphs"]) == []


def test_what_a_config_file_says_of_an_evaluation_counts_as_said(workplace, tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "none"))
    config = tmp_path / "eval.yaml"
    config.write_text(f"model: {workplace.finetuned}\ndataset: glyphs\n")
    assert inherited_eval_options(["--config", str(config)]) == []
    config.write_text(f"model: {workplace.finetuned}\nsplit_seed: 3\n")
    words = inherited_eval_options([f"--config={config}"])
    assert words[words.index("--dataset") + 1] == str(workplace.pictures)
    assert "--model" not in words and "--split_seed" not in words
    with pytest.raises(ValueError, match="no finished fine-tuning under"):
        inherited_eval_options(["--model", "auto"])


def test_an_existing_report_folder_is_refused_before_the_model_is_read(workplace, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "livt_hf.evaluation.running.load_checkpoint_and_processor", lambda path: pytest.fail("was read")
    )
    sentence = refused("--model", workplace.finetuned, report=tmp_path)
    assert sentence == f"error: the report folder {tmp_path} exists; pass another --report."


def test_a_class_with_prior_zero_is_never_predicted(workplace, evaluate, tmp_path):
    prior = written(tmp_path / "prior.json", [0, 0, 0, 1])
    result = evaluate("--model", workplace.finetuned, "--prior", prior, "--adapt_prior")
    rules = result.summary["rules"]
    assert list(rules) == [PAPER, UNIFORM, "posterior, prior of prior.json", "posterior, estimated prior"]
    served = rules["posterior, prior of prior.json"]
    # Always "class3", one of three few-shot classes: right on a quarter of the balanced test set, wherever it is.
    assert (served["accuracy"], served["medium"], served["few"]) == pytest.approx((0.25, 0, 1 / 3))
    estimated = result.summary["estimated_prior"]
    assert len(estimated) == CLASSES and sum(estimated) == pytest.approx(1)
    names = [f"class{label}" for label in range(CLASSES)]
    assert read_prior(str(result.report / "prior.json"), names) == pytest.approx(estimated)
    assert rules["posterior, estimated prior"]["mean_confidence"] != rules[UNIFORM]["mean_confidence"]


def test_a_prior_may_be_given_as_frequencies_by_class_name(workplace, evaluate, tmp_path):
    prior = written(tmp_path / "even.yaml", "class3: 7\nclass1: 7\nclass0: 7\nclass2: 7\n")
    rules = evaluate("--model", workplace.finetuned, "--prior", prior).summary["rules"]
    assert rules["posterior, prior of even.yaml"] == rules[UNIFORM]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[0.5, 0.5", "is no readable JSON or YAML file with a number for each class"),
        ([0.5, 0.5], "must hold 4 numbers"),
        (["a", "b", "c", "d"], "must hold 4 numbers"),
        ([0.5, 0.75, -0.25, 0], "none negative"),
        ({"class0": 1, "class9": 1}, r"disagree on the classes \['class1', 'class2', 'class3', 'class9'\]"),
    ],
)
def test_a_malformed_prior_is_refused(workplace, refused, tmp_path, content, complaint):
    path = written(tmp_path / "prior.json", content)
    sentence = refused("--model", workplace.finetuned, "--prior", path)
    assert re.search(complaint, sentence) and str(path) in sentence


def test_a_prior_file_that_does_not_exist_is_refused(workplace, refused, tmp_path):
    sentence = refused("--model", workplace.finetuned, "--prior", tmp_path / "nowhere.json")
    assert "nowhere.json is no readable JSON or YAML file" in sentence


def test_no_prior_is_estimated_from_smoothed_labels_or_scores(workplace, refused, tmp_path):
    data = ["--dataset", workplace.pictures]
    model = LiViTForImageClassification.from_pretrained(workplace.finetuned, label_smoothing=0.1)
    sentence = refused("--model", saved(tmp_path / "smooth", model), *data, "--adapt_prior")
    assert "was trained with label_smoothing 0.1" in sentence
    model = LiViTForImageClassification.from_pretrained(workplace.finetuned, loss="ldam")
    sentence = refused("--model", saved(tmp_path / "ldam", model), *data, "--adapt_prior")
    assert "gives no probabilities under a prior (its margins and scale make the outputs scores)" in sentence
    prior = written(tmp_path / "prior.json", [0.25] * 4)
    sentence = refused("--model", workplace.pretrained, *data, "--prior", prior)
    assert "gives no probabilities under a prior (it is no classifier)" in sentence


def test_a_loss_without_posterior_is_measured_by_the_paper_s_rule_alone(workplace, evaluate, tmp_path):
    model = LiViTForImageClassification.from_pretrained(workplace.finetuned, loss="ldam")
    result = evaluate("--model", saved(tmp_path / "ldam", model), "--dataset", workplace.pictures)
    assert list(result.summary["rules"]) == [PAPER]


def test_the_published_form_gives_the_metrics_of_the_run(workplace, evaluate, tmp_path):
    model = LiViTForImageClassification.from_pretrained(workplace.finetuned)
    to_beit(model).save_pretrained(tmp_path / "published")
    processor = workplace.finetuned / "preprocessor_config.json"
    (tmp_path / "published" / processor.name).write_text(processor.read_text())
    rules = evaluate("--model", tmp_path / "published", "--dataset", workplace.pictures).summary["rules"]
    results = json.loads((workplace.finetuned / "results.json").read_text())
    assert numbers(rules[PAPER]) == pytest.approx(numbers(results["metrics"]), rel=1e-4)
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
    assert list(result.summary["rules"]) == [PAPER]
    measured = result.summary["rules"][PAPER]
    # It answers "class2" every time, one of three few-shot classes.
    assert measured["many"] is None
    assert (measured["accuracy"], measured["medium"], measured["few"]) == pytest.approx((0.25, 0, 1 / 3))
    assert "it does not know its training prior" in refused(*options, "--adapt_prior")


def test_a_model_of_other_classes_is_refused_by_name(workplace, refused, stock, tmp_path):
    other = saved(tmp_path / "other", stock(**names(["class0", "newt", "class2", "class3"])))
    sentence = refused("--model", other, "--dataset", workplace.pictures)
    assert "class 1 is 'newt' to the model and 'class1' in the data" in sentence
    fewer = saved(tmp_path / "fewer", stock(**names(["class0", "class1", "class2"])))
    sentence = refused("--model", fewer, "--dataset", workplace.pictures)
    assert "the model has 3 classes and the data 4" in sentence


def test_unknown_splits_and_folders_without_a_model_are_refused(workplace, refused, tmp_path):
    sentence = refused("--model", workplace.finetuned, "--split", "valid")
    assert "has no split 'valid'; it has train, test" in sentence
    (tmp_path / "empty").mkdir()
    sentence = refused("--model", tmp_path / "empty", "--dataset", workplace.pictures)
    assert "empty holds no model: it has no config.json" in sentence
    sentence = refused("--model", tmp_path / "nowhere", "--dataset", workplace.pictures)
    assert "nowhere is neither a checkpoint folder nor a model the Hub has" in sentence
    model = LiViTForImageClassification.from_pretrained(workplace.finetuned)
    model.save_pretrained(tmp_path / "bare")
    sentence = refused("--model", tmp_path / "bare", "--dataset", workplace.pictures)
    assert "bare has no image processor (preprocessor_config.json)" in sentence


def test_a_pretraining_is_judged_by_knn_and_a_linear_probe(workplace, evaluate):
    result = evaluate("--model", workplace.pretrained)
    for name in ("kNN", "linear probe"):
        measured = result.summary[name]
        assert measured["num_images"] == 44
        assert measured["accuracy"] > 0.5  # chance is 0.25, and the classes differ in colour
        assert f"{name:14s} accuracy {100 * measured['accuracy']:.1f}" in result.printed
        assert 0 <= measured["ece"] <= 1
    again = evaluate("--model", workplace.pretrained, report=result.report.with_name("again"))
    assert again.summary == result.summary


def test_nan_logits_are_reported_and_not_averaged_away(workplace, evaluate, tmp_path):
    model = LiViTForImageClassification.from_pretrained(workplace.finetuned)
    model.classifier.bias.data[1] = torch.nan
    result = evaluate("--model", saved(tmp_path / "nan", model), "--dataset", workplace.pictures)
    assert "44 images gave NaN logits and count as wrong (100.0 %)" in result.printed
    measured = result.summary["rules"][PAPER]
    assert (measured["accuracy"], measured["num_nan"], measured["ece"]) == (0.0, 44, None)
    assert (result.report / "report.html").exists()


def test_two_processes_count_each_image_once_and_measure_what_one_measures(workplace):
    options = ["--model", workplace.finetuned, "--batch_size", 5, "--threads", 1]
    run = RecipeRun("eval", workplace.place / "together", *options, processes=2)
    rules = json.loads((run.finish().folder / "evaluation.json").read_text())["rules"]
    results = json.loads((workplace.finetuned / "results.json").read_text())
    assert numbers(rules[PAPER]) == pytest.approx(numbers(results["metrics"]), rel=1e-5)
    assert numbers(rules[UNIFORM]) == pytest.approx(numbers(results["posterior"]), rel=1e-5)
    assert rules[PAPER]["num_images"] == 44
    assert run.printed.count("44 images of") == run.printed.count("Report: ") == 1


def test_what_looks_at_all_images_at_once_is_refused_on_two_processes(workplace):
    options = ["--model", workplace.finetuned, "--adapt_prior", "--threads", 1]
    run = RecipeRun("eval", workplace.place / "adapting", *options, processes=2)
    assert run.wait() == 1
    assert "--adapt_prior looks at all images at once; run it on one process." in run.printed
    assert "Traceback" not in run.printed and not run.folder.exists()
