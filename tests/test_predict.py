"""`livt predict`: files, folders, patterns, broken files, priors, and agreement with the pipeline."""

import csv
import io
import json
import logging
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image
from refusals import refusal
from safetensors.torch import load_file, save_file
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTMAEConfig,
    ViTModel,
    pipeline,
)

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTModel
from livt_hf.classifiers import choose_device
from livt_hf.cli.console import run_command
from livt_hf.conversion import to_beit
from livt_hf.data import eval_processor
from livt_hf.errors import LiVTError
from livt_hf.predictions import DecisionRule, Predictions, decide
from livt_hf.predictions.predict import Predictor, find_images
from livt_hf.predictions.rules import ARGMAX
from livt_hf.predictions.tables import TableWriter
from livt_hf.recipes.predict import main
from livt_hf.text import path_to_text, text_to_path

NAMES = ["cat", "dog", "newt"]
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
SIZES |= dict(image_size=16, patch_size=4)
LABELS = dict(id2label=dict(enumerate(NAMES)), label2id={name: i for i, name in enumerate(NAMES)})


@pytest.fixture(scope="module")
def livit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("livit")
    torch.manual_seed(0)
    model = LiViTForImageClassification(LiViTConfig(**SIZES, **LABELS, class_counts=[50, 40, 5]))
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    model.save_pretrained(folder)
    eval_processor(16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    BeitForImageClassification(BeitConfig(**SIZES, **LABELS, use_absolute_position_embeddings=True)).save_pretrained(
        folder
    )
    eval_processor(16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Ten readable pictures of several kinds, three broken files and one that is no picture."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "below").mkdir()
    noise = torch.rand(30, 50, 3, generator=torch.Generator().manual_seed(0))
    picture = Image.fromarray((noise * 255).byte().numpy())
    for i in range(7):
        picture.rotate(i).save(folder / f"{i}.jpg")
    picture.convert("L").save(folder / "grey.png")
    picture.convert("RGBA").save(folder / "below" / "transparent.webp")
    picture.convert("P").save(folder / "below" / "palette.gif")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.png").write_text("not a picture")
    (folder / "below" / "cut.jpg").write_bytes((folder / "0.jpg").read_bytes()[:900])
    (folder / "notes.txt").write_text("left alone")
    return folder


def predictions_of(model: Path, paths, **options) -> Predictions:
    return Predictions.concatenate(list(Predictor(str(model)).predict(paths, **options)))


def lines_of(capsys) -> tuple[list[dict], list[str]]:
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err.splitlines()


def test_good_files_are_answered_bad_ones_named_and_the_exit_code_says_so(livit, pictures, capsys):
    with pytest.raises(SystemExit, match="1"):
        main([str(livit), str(pictures), "--format", "jsonl", "--batch_size", "4"])
    answers, errors = lines_of(capsys)
    broken = {Path(line["file"]).name for line in answers if "error" in line}
    assert broken == {"empty.jpg", "text.png", "cut.jpg"}
    assert len(answers) == 13 and all(len(line["predictions"]) == 3 for line in answers if "error" not in line)
    for name in broken:
        assert sum(line.startswith("cannot read") and f"{name}:" in line for line in errors) == 1
    assert errors[-1] == "3 of 13 files could not be read" and not any("LiVTError" in line for line in errors)


def test_files_and_patterns_are_answered_in_order_with_one_line_each(livit, pictures, capsys):
    main([str(livit), "--top_k", "1", str(pictures / "0.jpg"), str(pictures / "[12].jpg")])
    out = capsys.readouterr().out.splitlines()
    assert [Path(line.split()[0]).name for line in out] == ["0.jpg", "1.jpg", "2.jpg"]
    assert all(line.split()[1] in NAMES and len(line.split()) == 3 for line in out)


def save_timm_model(folder: Path) -> Path:
    cfg = {"input_size": (3, 32, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3), "num_classes": 3}
    sizes = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "stem_width": 8}
    config = TimmWrapperConfig(architecture="resnet18", num_labels=3, pretrained_cfg=cfg, model_args=sizes)
    TimmWrapperForImageClassification(config).save_pretrained(folder)
    return folder


def test_a_stock_classifier_and_one_of_timm_get_the_scores_of_the_pipeline(stock, pictures, tmp_path):
    paths = [pictures / f"{i}.jpg" for i in range(7)]
    for folder in (stock, save_timm_model(tmp_path)):
        classify = pipeline("image-classification", model=str(folder))
        scores = predictions_of(folder, paths, batch_size=3).scores()
        for row, theirs in zip(scores.tolist(), classify([str(path) for path in paths], top_k=3), strict=True):
            expected = {classify.model.config.id2label[label]: score for label, score in enumerate(row)}
            assert {answer["label"]: answer["score"] for answer in theirs} == pytest.approx(expected, abs=1e-5)


def test_a_command_says_nothing_of_how_timm_models_keep_their_processor(pictures, tmp_path, monkeypatch):
    said = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [said])
    type(logging.getLogger()).warning_once.cache_clear()  # transformers says each warning once
    save_timm_model(tmp_path)

    def load_and_save():
        Predictor(str(tmp_path)).processor.save_pretrained(tmp_path)

    run_command(load_and_save)
    assert said.stream.getvalue() == ""


def test_what_pillow_only_writes_or_is_hidden_is_no_image_of_a_folder(tmp_path):
    for name in ("a.jpg", "b.MPO", "invoice.pdf", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "runs" / "train-birds").mkdir(parents=True)
    for hidden in ("._a.jpg", "__MACOSX/a.jpg", "runs/train-birds/confused.png"):
        (tmp_path / hidden).touch()
    assert find_images([str(tmp_path)]) == [tmp_path / "a.jpg", tmp_path / "b.MPO"]
    (tmp_path / "a[1].png").touch()  # a file whose name looks like a pattern
    assert find_images([str(tmp_path / "a[1].png")]) == [tmp_path / "a[1].png"]


def test_a_livit_and_its_published_form_get_equal_probabilities(livit, pictures, tmp_path):
    to_beit(LiViTForImageClassification.from_pretrained(livit)).save_pretrained(tmp_path)
    eval_processor(16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]).save_pretrained(tmp_path)
    paths = find_images([str(pictures / "*.jpg")])
    ours, published = (predictions_of(folder, paths) for folder in (livit, tmp_path))
    readable = ~np.isnan(ours.logits).any(1)
    assert readable.sum() == 7
    for prior in (None, [0.7, 0.2, 0.1]):
        np.testing.assert_allclose(published.posterior(prior), ours.posterior(prior), rtol=1e-4)
        assert ours.posterior(prior)[readable].sum(1) == pytest.approx(1, abs=1e-5)
    moved = ours.posterior("uniform") * [0.7, 0.2, 0.1]  # by the ratio of the priors
    np.testing.assert_allclose(ours.posterior([0.7, 0.2, 0.1]), moved / moved.sum(1, keepdims=True), rtol=1e-5)


def test_a_stock_classifier_that_is_told_its_class_counts_serves_under_any_prior(stock, pictures, tmp_path, capsys):
    """Trained with cross-entropy, its softmax is the posterior under its training prior, which it does not know."""
    with refusal("prior", "training prior"):
        main([str(stock), str(pictures / "0.jpg"), "--prior", "uniform"])
    (tmp_path / "counts.json").write_text('{"newt": 10, "cat": 60, "dog": 30}')
    [softmax] = predictions_of(stock, [pictures / "0.jpg"]).scores()
    served = {}
    for prior in ("training", "uniform"):
        options = ["--class_counts", str(tmp_path / "counts.json"), "--prior", prior, "--format", "jsonl"]
        main([str(stock), str(pictures / "0.jpg"), *options])
        [answer], _ = lines_of(capsys)
        scores = {row["label"]: row["score"] for row in answer["predictions"]}
        served[prior] = torch.tensor([scores[name] for name in NAMES])
    torch.testing.assert_close(served["training"], softmax, atol=1e-4, rtol=0)
    expected = softmax / torch.tensor([0.6, 0.3, 0.1])
    torch.testing.assert_close(served["uniform"], expected / expected.sum(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("lost", ["classifier", "layer"])
@pytest.mark.parametrize("model", ["livit", "stock"])
def test_a_model_that_lacks_weights_is_not_served(request, model, lost, tmp_path):
    folder = shutil.copytree(request.getfixturevalue(model), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if lost not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LiVTError, match="lacks"):
        Predictor(str(folder))


@pytest.mark.parametrize("kind", [LiViTModel, ViTModel])
def test_an_encoder_without_a_classifier_is_not_served(tiny, tmp_path, kind):
    kind(kind.config_class(**tiny)).save_pretrained(tmp_path)
    with refusal(None, "lacks", "classifier.bias, classifier.weight"):
        Predictor(str(tmp_path))
    ViTMAEConfig().save_pretrained(tmp_path)  # of a pretraining, which has no classes
    with refusal(None, "pretraining"):
        Predictor(str(tmp_path))


def test_pictures_of_several_sizes_pass_a_processor_that_does_not_resize(livit, tmp_path):
    folder = tmp_path / "model"
    LiViTForImageClassification.from_pretrained(livit).save_pretrained(folder)
    eval_processor(16, [0.5] * 3, [0.2] * 3, native=True).save_pretrained(folder)
    for size in (16, 24):
        Image.new("RGB", (size, size), "red").save(tmp_path / f"{size}.png")
    logits = predictions_of(folder, [tmp_path / "16.png", tmp_path / "24.png"]).logits
    assert logits.shape == (2, 3) and np.isfinite(logits).all()


def test_a_missing_file_is_a_broken_file_and_an_empty_folder_is_refused(livit, tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        main([str(livit), str(tmp_path / "missing.jpg")])
    assert "missing.jpg" in capsys.readouterr().err
    with refusal(None, tmp_path):
        main([str(livit), str(tmp_path)])


def test_a_name_that_is_not_utf8_is_escaped_in_every_output_and_a_pipe_ends_nothing(livit, tmp_path, capsys):
    odd, pipe = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.png")), tmp_path / "pipe.png"
    Image.new("RGB", (16, 16)).save(odd)
    os.mkfifo(pipe)
    texts = [path_to_text(path) for path in (odd, pipe)]
    printed = {}
    for kind in ("table", "jsonl", "csv"):
        with pytest.raises(SystemExit, match="1"):
            main([str(livit), str(odd), str(pipe), "--format", kind])
        out, err = capsys.readouterr()
        printed[kind] = out
        assert "it is not a regular file" in err and out.encode()
    assert printed["table"].splitlines()[0].startswith(texts[0].replace("\n", "\\n"))
    assert [json.loads(line)["file"] for line in printed["jsonl"].splitlines()] == texts
    assert [row[0] for row in csv.reader(io.StringIO(printed["csv"]))] == ["file", *texts]
    for output in ("new.csv", "new.parquet", "record", "record"):  # the second time its parts are read
        with pytest.raises(SystemExit, match="1"):
            main([str(livit), str(odd), str(pipe), "--output", str(tmp_path / output)])
    with (tmp_path / "new.csv").open(newline="") as file:
        assert [text_to_path(row[0]) for row in csv.reader(file)][1:] == [odd, pipe]
    assert parquet.read_table(tmp_path / "new.parquet")["file"].to_pylist() == texts
    assert list(Predictions.load(tmp_path / "record").column("path")) == texts


def test_labels_keep_their_accents_and_csv_quotes_its_commas(livit, pictures, tmp_path, capsys):
    model = LiViTForImageClassification.from_pretrained(livit)
    names = ["Hêtre, commun", "Öl", "鹿"]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
    model.save_pretrained(tmp_path)
    eval_processor(16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]).save_pretrained(tmp_path)
    main([str(tmp_path), str(pictures / "0.jpg"), "--format", "jsonl"])
    printed = capsys.readouterr().out
    assert [name in printed for name in names] == [True] * 3
    (tmp_path / "broken.jpg").write_text("no image")
    with pytest.raises(SystemExit):  # of the five best classes there are three
        main([str(tmp_path), str(pictures / "0.jpg"), str(tmp_path / "broken.jpg"), "--format", "csv"])
    header, row, broken = csv.reader(capsys.readouterr().out.splitlines())
    assert broken[2:] == [""] * 6 and broken[1]
    assert header == ["file", "error", "label_1", "score_1", "label_2", "score_2", "label_3", "score_3"]
    assert set(row[2::2]) == set(names) and row[1] == ""
    assert sum(map(float, row[3::2])) == pytest.approx(1, abs=1e-3)


def test_the_scores_of_a_model_without_class_counts_are_called_what_they_are(stock, pictures, capsys):
    main([str(stock), str(pictures / "0.jpg")])
    text = "scores are the softmax of the logits, not class probabilities (it does not know its training prior"
    assert text in capsys.readouterr().err


def test_the_scores_of_all_classes_are_written_to_a_table(livit, pictures, tmp_path, capsys):
    output = tmp_path / "scores.parquet"
    with pytest.raises(SystemExit, match="1"):
        main([str(livit), str(pictures), "--output", str(output), "--prior", "uniform"])
    printed, errors = capsys.readouterr()
    assert f"Predictions: {output}" in errors
    rows = {Path(row["file"]).name: row for row in parquet.read_table(output).to_pylist()}
    assert len(rows) == 13
    counts = Counter(row["prediction"] for row in rows.values() if not row["error"])
    assert printed == f"10 files: {', '.join(f'{name} {count}' for name, count in counts.most_common())}\n"
    good, broken = rows["0.jpg"], rows["empty.jpg"]
    assert sum(good["scores"]) == pytest.approx(1, abs=1e-5)
    assert good["error"] is None and good["prediction"] in NAMES and good["score"] == max(good["scores"])
    assert broken["error"] and broken["prediction"] is None and broken["scores"] == [None] * 3
    with refusal("output", output):
        main([str(livit), str(pictures), "--output", str(output)])


def test_classes_that_share_a_name_have_a_column_each_in_a_csv(tmp_path):
    names, scores = ["crane", "dog", "crane", "crane 2"], np.array([[0.1, 0.2, 0.4, 0.3]])
    with TableWriter(tmp_path / "p.csv", [DecisionRule.named(ARGMAX)]) as table:
        for file in ("a", "b"):
            table.write(Predictions.from_arrays(np.log(scores), [1], class_names=names, path=[file]))
    header, *rows = csv.reader((tmp_path / "p.csv").read_text().splitlines())
    assert header[:4] == ["file", "label", "prediction", "score"]
    assert header[4:] == ["score_crane", "score_dog", "score_crane 3", "score_crane 2"]
    assert [row[:3] for row in rows] == [["a", "dog", "crane"], ["b", "dog", "crane"]]
    assert [float(cell) for cell in rows[1][4:]] == pytest.approx(scores[0].tolist())


def test_a_record_of_files_is_completed_after_a_kill_and_decided_again(livit, pictures, tmp_path, capsys):
    words = [str(livit), str(pictures / "[0-6].jpg"), "--output", str(tmp_path / "record"), "--format", "jsonl"]
    main(words)
    before, (part,) = capsys.readouterr().out, (tmp_path / "record").iterdir()
    written = part.stat().st_mtime_ns
    main(words)  # nothing is left to predict
    assert capsys.readouterr().out == before and part.stat().st_mtime_ns == written
    record = Predictions.load(tmp_path / "record")
    assert record.info.class_names == tuple(NAMES) and [Path(p).name for p in record.column("path")][:2] == [
        "0.jpg",
        "1.jpg",
    ]
    main([*words[:2], "--prior", "training", "--format", "jsonl"])
    at_once = [json.loads(line)["predictions"][0]["label"] for line in capsys.readouterr().out.splitlines()]
    assert [NAMES[label] for label in decide(record, prior="training").labels] == at_once
    with refusal("path", "another record"):
        main([str(livit), str(pictures / "[1-6].jpg"), *words[2:]])


@pytest.mark.parametrize("device", ["abacus", "cpu:x", "cpu:7", "cpu:"])
def test_a_device_that_is_not_there_is_refused(device):
    with refusal("device", repr(device), "cpu"):
        choose_device(device)
    assert choose_device("cpu:0").type == choose_device("cpu").type == "cpu"
