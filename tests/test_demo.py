"""The functions behind the demo, and its server asked directly; tests/test_demo_browser.py drives a real browser."""

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features
from datasets import Image as ImageFeature
from hub_server import TOKEN, hub_server
from huggingface_hub import HfApi, SpaceCard
from packaging.version import Version
from PIL import Image
from refusals import refusal
from test_cards import PRETRAINING, RESULTS
from test_hub import SIZES, make_run
from transformers import ViTConfig, ViTForImageClassification, ViTMAEConfig

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining
from livt_hf.data import eval_processor
from livt_hf.demo.classes import ROWS, Classes
from livt_hf.demo.serving import (
    ARGMAX,
    DEPLOYMENT,
    UNIFORM,
    ServedClassifier,
    ServedPretraining,
    UnlabelledImages,
    read_unlabelled,
)
from livt_hf.hub import Publication, prepare_space, publish, publish_space
from livt_hf.predictions import Predictions
from livt_hf.predictions.decisions import load_prior
from livt_hf.predictions.record import FOLDER, as_lists
from livt_hf.recipes.demo import load_run_data
from livt_hf.recipes.demo import main as demo_command
from livt_hf.recipes.publish import main as publish_command
from livt_hf.reports.mistakes import Mistakes, find_newest_predictions, load_predictions

ROOT = Path(__file__).parents[1]
NAMES = ["cat", "dog", "newt <b>"]
COUNTS = [900, 90, 10]


@pytest.fixture
def three() -> Classes:
    return Classes(NAMES, np.array(COUNTS, dtype=float), 1000, multi_label=False)


def save_model(folder, tiny, counts=COUNTS, names=NAMES, **settings):
    torch.manual_seed(0)
    config = LiViTConfig(**tiny, class_counts=counts, id2label=dict(enumerate(names)), **settings)
    model = LiViTForImageClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    return save(model, folder)


def save(model, folder):
    model.save_pretrained(folder)
    eval_processor(16, (0.5,) * 3, (0.5,) * 3).save_pretrained(folder)
    return folder


def save_image(path, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def served(tmp_path, tiny) -> ServedClassifier:
    save_model(tmp_path / "model", tiny)
    return ServedClassifier(str(tmp_path / "model"))


# The slider, the table and the file


def test_the_slider_goes_from_the_training_prior_over_equal_classes_to_its_reverse(three):
    assert three.tilt(1).tolist() == pytest.approx(COUNTS)
    assert three.tilt(0).tolist() == pytest.approx([1000 / 3] * 3)
    reversed_shares = three.prior(three.tilt(-1))
    assert reversed_shares[2] / reversed_shares[0] == pytest.approx(90)
    assert three.tilt(-1).sum() == pytest.approx(1000)


def test_an_edited_cell_changes_its_class_alone_and_the_shares_of_all(three):
    rows = three.rows(three.tilt(1))
    assert [row[1] for row in rows] == NAMES
    rows[2][3] = "1000"  # newts, as somebody types it
    edited = three.apply_edits(three.tilt(1), rows)
    assert edited.tolist() == pytest.approx([900, 90, 1000])
    assert [row[4] for row in three.rows(edited)] == pytest.approx([45.2261, 4.52261, 50.2513])


def test_numbers_that_the_table_rounds_are_kept_exactly_when_another_is_edited(three):
    frequencies = three.tilt(1 / 3)
    rows = three.rows(frequencies)
    rows[0][3] = 5
    assert three.apply_edits(frequencies, rows)[1:].tolist() == frequencies[1:].tolist()


@pytest.mark.parametrize("cell", ["many", "", None, -1, "nan", "inf"])
def test_a_frequency_that_is_no_number_is_refused_by_the_name_of_its_class(three, cell):
    rows = three.rows(three.tilt(1))
    rows[1][3] = cell
    with refusal(None, f"dog is {cell!r}"):
        three.apply_edits(three.tilt(1), rows)


def test_the_table_of_thousands_of_classes_shows_the_frequent_ones_and_those_searched_for():
    many = Classes([f"species {i}" for i in range(8142)], np.arange(1.0, 8143), 8142 * 8143 // 2, multi_label=False)
    rows = many.rows(many.tilt(0))
    assert len(rows) == ROWS and rows[0][:2] == [8141, "species 8141"]
    assert [row[0] for row in many.rows(many.tilt(0), " SPECIES 777")] == [7779, *range(7778, 7769, -1), 777]


def test_the_file_of_a_prior_is_read_back_and_is_what_the_option_prior_takes(three, tmp_path, served):
    path = tmp_path / "prior.json"
    path.write_text(three.to_json(three.tilt(-0.5)))
    assert three.read_file(path).tolist() == pytest.approx(three.tilt(-0.5).tolist())
    taken = load_prior(str(path), served.predictor.info)
    assert taken.tolist() == pytest.approx(three.prior(three.tilt(-0.5)).tolist())
    path.write_text('{"cat": 1, "dog": 2, "wolf": 3}')
    with refusal(None, path, "newt", "wolf"):
        three.read_file(path)
    twins = Classes(["a", "a"], np.array([3.0, 1.0]), 4, multi_label=False)
    assert json.loads(twins.to_json(twins.tilt(1))) == [0.75, 0.25]  # in order, for they share a name


# Posteriors from logits that are kept


def test_each_rule_says_what_probabilities_says_and_no_forward_pass_is_needed_again(served, tmp_path):
    path = save_image(tmp_path / "image.png")
    logits = served.logits(path)
    pixels = served.predictor.finish(served.predictor.read(path)[None])
    frequencies = served.classes.tilt(-1)
    expected = {
        ARGMAX: served.model(pixels).logits.softmax(-1),
        UNIFORM: served.model.probabilities(pixels, prior="uniform"),
        DEPLOYMENT: served.model.probabilities(pixels, prior=served.classes.prior(frequencies)),
    }
    served.predictor.model = served.model.forward = None
    scores = served.scores(logits, frequencies)
    assert list(scores) == list(expected)
    for rule, answer in expected.items():
        torch.testing.assert_close(scores[rule], answer[0])


def test_bars_carry_the_probabilities_and_names_are_never_read_as_html(served, tmp_path):
    logits = served.logits(save_image(tmp_path / "image.png"))
    text = served.panels(logits, served.classes.tilt(1))
    assert text.count('class="panel"') == 3
    assert f'data-value="{served.scores(logits, served.classes.tilt(1))[DEPLOYMENT].max():.6f}"' in text
    assert "newt &lt;b&gt;" in text and "<b>" not in text
    assert "few: 10 in training" in text


def test_a_model_without_class_counts_works_and_says_what_is_missing(tmp_path, tiny):
    save(ViTForImageClassification(ViTConfig(**tiny, num_labels=3)), tmp_path)
    served = ServedClassifier(str(tmp_path))
    assert served.classes is None and "does not know its training prior" in served.warning
    assert list(served.scores(torch.zeros(3), None)) == [ARGMAX]
    assert served.panels(torch.zeros(3), None).count('class="bar"') == 3


def test_a_model_that_needs_calibration_says_so_and_estimates_no_prior(tmp_path, tiny):
    save_model(tmp_path, tiny, trained_with={"mixup": 0.8})
    served = ServedClassifier(str(tmp_path))
    assert "it was trained with mixup 0.8" in served.warning
    assert list(served.scores(torch.zeros(3), served.classes.tilt(1))) == [ARGMAX, UNIFORM, DEPLOYMENT]
    with refusal(None, "mixup 0.8", "livt calibrate"):
        read_unlabelled(served, [tmp_path / "image.png"])


def test_several_labels_per_image_are_judged_one_by_one(tmp_path, tiny):
    several = dict(problem_type="multi_label_classification", num_train_images=1000, test_prior=None)
    save_model(tmp_path, tiny, **several)
    served = ServedClassifier(str(tmp_path))
    logits = torch.tensor([0.5, -1.0, 2.0])
    scores = served.scores(logits, served.classes.counts)
    assert list(scores) == [ARGMAX, DEPLOYMENT]
    torch.testing.assert_close(scores[DEPLOYMENT], (logits + served.model.head.logit_bias).sigmoid())
    rows = served.classes.rows(served.classes.counts)
    rows[0][3] = 1001
    with refusal(None, "1001", "1,000 images"):
        served.classes.apply_edits(served.classes.counts, rows)


# Bad files


def test_an_image_of_100_megapixels_is_classified_and_what_is_no_image_or_of_200_is_refused_by_name(served, tmp_path):
    Image.new("L", (10_000, 10_000)).save(tmp_path / "large.png")
    assert served.logits(tmp_path / "large.png").shape == (3,)
    Image.new("1", (20_000, 10_000)).save(tmp_path / "huge.png")
    (tmp_path / "notes.png").write_text("not an image")
    for name, value in {"huge.png": "bomb", "notes.png": "not an image"}.items():
        with refusal("on_broken", name, value):
            served.logits(tmp_path / name)
    with refusal(None, "no image"):
        read_unlabelled(served, [tmp_path / "notes.txt"])


# Images without labels


def test_an_estimate_that_the_images_do_not_bear_out_is_warned_of(tmp_path, tiny):
    save_model(tmp_path, tiny, counts=[9] * 50, names=[f"class {i}" for i in range(50)])
    noise = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))  # of a model that knows nothing
    found = UnlabelledImages(ServedClassifier(str(tmp_path)), [], noise, {})
    assert not found.estimate.reliable and "not reliable" in found.describe()


def test_unlabelled_images_name_those_whose_class_changes_and_leaves_out_what_it_cannot_read(served, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for seed in range(12):
        save_image(folder / f"{seed}.png", seed)
    (folder / "broken.png").write_text("broken")
    (folder / "notes.txt").write_text("not meant")
    found = read_unlabelled(served, sorted(folder.iterdir()))
    assert len(found.files) == 12 and [path.name for path in found.broken] == ["broken.png"]
    assert "the first is broken.png" in found.describe()
    logits = torch.stack([served.logits(path) for path in found.files])
    before, after = (served.posterior(logits, prior).argmax(-1) for prior in ("uniform", found.estimate.prior))
    assert sum(row[-1] == "yes" for row in found.change_rows()) == (before != after).sum()
    lines = found.to_csv().splitlines()
    assert len(lines) == 13 and lines[0].startswith("file,class (uniform prior),probability")


# Errors


def save_record(folder, label, predicted, names=NAMES):
    """Write a record as `livt eval` does, with names of classes; a predicted None is an image without logits."""
    logits = np.zeros((len(label), len(names)))
    for row, name in enumerate(predicted):
        logits[row, names.index(name or names[0])] = 2
    labels = [names.index(name) for name in label]
    record = Predictions.from_arrays(logits, labels, class_names=names, split=["test"] * len(label))
    missing = torch.tensor([name is None for name in predicted])
    logits = torch.from_numpy(record.logits.copy()).masked_fill(missing[:, None], torch.nan)
    table = record.table.set_column(record.table.column_names.index("logits"), "logits", as_lists(logits))
    return Predictions(table, record.info).save(folder / FOLDER)


def mistakes_of(path) -> Mistakes:
    predictions = load_predictions(path, NAMES)
    return Mistakes.of(predictions, predictions.info.default_rule)


def test_predictions_are_read_by_rule_and_images_without_one_are_left_out(tmp_path):
    found = mistakes_of(save_record(tmp_path, ["cat", "dog", "dog"], ["cat", None, "cat"]))
    assert found.split == "test"
    assert found.index.tolist() == [0, 2] and found.label.tolist() == [0, 1] and found.predicted.tolist() == [0, 0]
    assert found.confidence.tolist() == pytest.approx([math.exp(2) / (math.exp(2) + 2)] * 2)


def test_a_record_of_another_model_is_refused(tmp_path):
    path = save_record(tmp_path, ["cat"], ["dog"])
    with refusal("report", path):
        load_predictions(path, ["wolf", "dog"])
    (tmp_path / "run").mkdir()
    with refusal("report", "livt eval "):  # which writes one
        find_newest_predictions(tmp_path / "run")


def test_predictions_about_other_images_are_noticed(tmp_path):
    features = Features({"label": ClassLabel(names=NAMES)})
    data = DatasetDict(test=Dataset.from_dict({"label": [0, 1, 1]}, features))
    for number, (label, mine) in enumerate([(["cat", "dog"], True), (["dog"], False), (["cat"] + ["dog"] * 3, False)]):
        assert mistakes_of(save_record(tmp_path / str(number), label, ["cat"] * len(label))).belong_to(data) == mine


def test_classes_are_listed_from_worst_to_best_with_what_they_are_taken_for():
    label, predicted = np.array([0, 0, 1, 1, 1, 2]), np.array([0, 0, 0, 2, 2, 2])
    confidence = np.array([0.9, 0.7, 0.6, 0.5, 0.8, 1.0])
    predictions = Mistakes(np.arange(6), label, predicted, confidence, "test")
    rows = predictions.class_rows(NAMES, np.array(COUNTS))
    assert rows[0] == [1, "dog", 90, 3, 0.0, 63.3, "newt <b> (2)"]
    assert [row[4] for row in rows] == [0, 100, 100]
    assert predictions.predicted_as(1) == [(2, 2), (0, 1)]
    assert predictions.errors_of(1).tolist() == [4, 2, 3]  # the surest mistake first
    bins = predictions.bins(0)
    assert sum(row["images"] for row in bins) == 2 and bins[13]["confidence"] == pytest.approx(0.9)


def test_names_of_classes_are_no_markup_in_the_words_about_their_errors(served):
    gradio, tabs = pytest.importorskip("gradio"), pytest.importorskip("livt_hf.demo.tabs")
    predictions = {"rule": Mistakes(np.arange(2), np.array([1, 2]), np.array([2, 2]), np.array([0.5, 0.6]), "test")}
    with gradio.Blocks():
        tab = tabs.ErrorsTab(tabs.DemoModel(served, "model", predictions=predictions))
    taken, right = (tab.choose("rule", None, SimpleNamespace(row_value=[label]))[1] for label in (1, 2))
    assert "Misclassified as newt &lt;b&gt; (1)." in taken and right.startswith("### newt &lt;b&gt;\n")


def test_an_image_that_is_clicked_is_the_one_shown_whatever_rule_was_chosen_since(served, tmp_path):
    gradio, tabs = pytest.importorskip("gradio"), pytest.importorskip("livt_hf.demo.tabs")
    images = [str(save_image(tmp_path / f"{seed}.png", seed)) for seed in range(3)]
    features = Features(image=ImageFeature(), label=ClassLabel(names=NAMES))
    split = Dataset.from_dict({"image": images, "label": [0, 1, 2]}, features=features)
    label, sure = np.arange(3), np.full(3, 0.5)
    predictions = {
        rule: Mistakes(np.arange(3), label, np.array(predicted), sure, "test")
        for rule, predicted in {"one": [0, 2, 2], "other": [0, 1, 2]}.items()
    }
    with gradio.Blocks():
        data = DatasetDict(train=split, test=split)
        tab = tabs.ErrorsTab(tabs.DemoModel(served, "model", data=data, predictions=predictions))
    chosen, _, wrong, _, near = tab.choose("one", None, SimpleNamespace(row_value=[1]))
    tab.rows("other")  # under which no image is wrong
    again = tab.neighbours(chosen, SimpleNamespace(index=0))
    assert len(wrong) == 1 and [words for _, words in again] == [words for _, words in near] != []


# Reconstruction


def save_pretraining(folder, tiny):
    decoder = dict(decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4)
    return save(LiViTForPreTraining(ViTMAEConfig(**tiny, **decoder, norm_pix_loss=True)), folder)


def test_a_seed_and_a_ratio_decide_which_patches_are_hidden(tmp_path, tiny):
    served = ServedPretraining(str(save_pretraining(tmp_path, tiny)))
    path = save_image(tmp_path / "image.png")

    def hidden(ratio, seed):
        image, masked, _ = served.reconstruct(path, ratio, seed)
        return (image != masked).any(-1)

    assert hidden(0.75, 0).mean() == pytest.approx(12 / 16, abs=0.02)
    assert hidden(0.5, 0).mean() == pytest.approx(8 / 16, abs=0.02)
    assert (hidden(0.5, 0) == hidden(0.5, 0)).all() and (hidden(0.5, 0) != hidden(0.5, 1)).any()
    with refusal(None, "0.99", "0 of 16"):
        served.reconstruct(path, 0.99, 0)
    for seed in (None, -1, 10**20):
        with refusal(None, "seed"):
            served.reconstruct(path, 0.5, seed)


# The server


@pytest.fixture
def app():
    pytest.importorskip("gradio")
    import livt_hf.demo.app

    return livt_hf.demo.app


def test_a_busy_port_and_one_that_does_not_exist_are_refused_with_a_sentence(app):
    with refusal("port", "70000"):
        app.check_port(70000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with refusal("port", port):
            app.check_port(port)


@pytest.fixture
def asked(monkeypatch) -> set[str]:
    """The hosts that this process asks for anything."""
    hosts, find = set(), socket.getaddrinfo

    def recorded(host, *rest, **more):
        hosts.add(host)
        return find(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", recorded)
    return hosts


def test_the_server_gives_files_from_its_own_folder_only_and_tells_browsers_to_stay(
    app, asked, tmp_path, monkeypatch, tiny
):
    monkeypatch.chdir(tmp_path)  # the folder that somebody works in is not served either
    save_model(tmp_path / "model", tiny)
    (tmp_path / "given").mkdir()
    example = save_image(tmp_path / "given" / "image.png")
    (tmp_path / "secret.txt").write_text("secret")
    with app.private_files():
        demo = app.show(str(tmp_path / "model"), images=str(tmp_path / "given"))
        blocks = app.start([demo])
        try:
            url = blocks.local_url

            def status(path):
                try:
                    return urllib.request.urlopen(f"{url}gradio_api/file={urllib.parse.quote(str(path))}").status
                except urllib.error.HTTPError as error:
                    return error.code

            assert status(tmp_path / "secret.txt") == status("secret.txt") == 403
            assert status("/etc/passwd") == 403
            assert status(tmp_path / "model" / "config.json") == 403
            assert status(f"{tmp_path}/given/../secret.txt") == 403
            assert status(example) == 403 and status(demo.examples[0]) == 200  # a copy of it
            answer = urllib.request.urlopen(url)
            assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
            page = answer.read().decode()
            assert "fonts.googleapis.com" not in page and "cdnjs" not in page
            assert blocks.share_url is None and not blocks.analytics_enabled
            assert url.startswith("http://127.0.0.1:") and asked <= {"127.0.0.1", "localhost"}
            body = {"data": [{"path": str(tmp_path / "secret.txt"), "meta": {"_type": "gradio.FileData"}}, None]}
            answer = call(url, body)
            assert "secret" not in json.dumps(answer.get("data")) and "not uploaded by a user" in json.dumps(answer)
        finally:
            blocks.close()
    assert not demo.examples[0].exists()  # nothing is left


def call(url, body):
    """Ask the app's first function over HTTP, as its own page would."""
    request = urllib.request.Request(f"{url}gradio_api/run/predict", json.dumps(body | {"fn_index": 0}).encode())
    request.add_header("Content-Type", "application/json")
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return json.load(error)


def test_a_public_link_is_made_only_on_request_and_shows_no_images_of_the_dataset(app, tmp_path, tiny, monkeypatch):
    save_model(tmp_path, tiny)
    (tmp_path / "arguments.yaml").write_text("dataset: glyphs\n")
    (tmp_path / "results.json").write_text("{}")
    started = []

    def start(models, _port, share, browser):
        started.append((share, browser, models[0].data is not None, len(models[0].examples) > 0))

    monkeypatch.setattr(app, "start", start)
    monkeypatch.setattr(app, "serve", lambda _: None)
    demo_command([str(tmp_path)])
    demo_command([str(tmp_path), "--share", "--browser", "no"])
    assert started == [(False, True, True, True), (True, False, False, False)]


def test_a_public_link_does_not_tell_where_the_model_lies(app, tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("jane's clinic", "runs", "finetune-x", "1")
    save_model(path, tiny)

    def page(path: Path, private: bool) -> str:
        return json.dumps(app.build([app.show(str(path), private=private)]).config, default=str)

    assert "jane's clinic" in page(path, private=True)
    for named in (path, path.resolve()):
        assert "(local)/finetune-x/1" in page(named, private=False) and "jane" not in page(named, private=False)


def test_a_folder_of_examples_without_images_is_refused(app, tmp_path, tiny):
    save_model(tmp_path / "model", tiny)
    for folder in ("model", "nowhere"):
        with refusal("images", tmp_path / folder):
            app.show(str(tmp_path / "model"), images=str(tmp_path / folder))


@pytest.mark.parametrize(("streaming", "reason"), [(True, "stream"), (None, "not the folder of a finished run")])
def test_no_data_are_loaded_of_a_stream_or_without_a_run(tmp_path, capsys, streaming, reason):
    if streaming:
        (tmp_path / "arguments.yaml").write_text("dataset: larger/than-the-disk\nstreaming: true\n")
        (tmp_path / "results.json").write_text("{}")
    assert load_run_data(str(tmp_path), has_examples=False, is_public=False) is None
    printed = capsys.readouterr().out
    assert reason in printed and "--images" in printed and str(tmp_path) in printed


def test_a_model_that_is_no_run_is_shown_with_what_is_missing(app, tmp_path, tiny):
    save_model(tmp_path, tiny)
    demo = app.show(str(tmp_path))
    assert demo.examples == [] and demo.predictions is None
    assert any("no predictions" in note and f"livt eval {tmp_path}" in note for note in demo.notes)
    app.build([demo, demo])


# The Space


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    names = {0: "cat", 1: "dog", 2: "newt"}
    model = LiViTForImageClassification(LiViTConfig(**SIZES, class_counts=[500, 40, 5], id2label=names)).eval()
    return make_run(tmp_path_factory.mktemp("runs") / "finetune" / "1", RESULTS, model)


def test_a_space_is_an_app_its_requirements_and_a_card_with_the_metadata_that_the_hub_reads(finished_run, tmp_path):
    folder = prepare_space(finished_run, tmp_path / "space", Publication("org/livt", license="mit"))
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "app.py", "requirements.txt"]
    card = SpaceCard.load(folder / "README.md").data
    assert (card.sdk, card.app_file, card.models, card.license) == ("gradio", "app.py", ["org/livt"], "mit")
    (bound,) = re.findall(r'"gradio>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert Version(card.sdk_version) >= Version(bound)
    assert (folder / "requirements.txt").read_text().startswith("livt-hf[demo]>=")
    assert "image-classification" in card.tags
    assert "HF_TOKEN" in (folder / "README.md").read_text()  # a private model
    with refusal("folder", folder):
        prepare_space(finished_run, folder, Publication("org/livt", license="mit"))


def test_the_space_of_a_pretraining_promises_no_classes(finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "results.json").write_text(PRETRAINING.to_json())
    card = SpaceCard.load(prepare_space(run, tmp_path / "space", Publication("org/mgp")) / "README.md")
    assert "image-classification" not in card.data.tags and "probable classes" not in card.text


def test_the_published_space_runs_as_it_is_and_serves_the_published_model(finished_run, tmp_path):
    pytest.importorskip("gradio")
    with hub_server() as hub, socket.socket() as free:
        api, publication = HfApi(hub.endpoint, TOKEN), Publication("org/livt", license="mit")
        publish(finished_run, publication, api)
        url = publish_space(finished_run, publication, api).commit_url
        assert url.startswith(f"{hub.endpoint}/spaces/org/livt/commit/")
        files = hub.files("org/livt", "spaces")
        assert files.keys() == {".gitattributes", "README.md", "app.py", "requirements.txt"}
        (tmp_path / "app.py").write_bytes(files["app.py"])
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        environment = hub.environment(tmp_path) | {"GRADIO_SERVER_PORT": port, "GRADIO_ANALYTICS_ENABLED": "False"}
        app = subprocess.Popen(
            [sys.executable, "app.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            assert app.stdout.readline().startswith(f"Open http://127.0.0.1:{port}/")
            config = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/config"))
        finally:
            app.terminate()
            app.wait()
    shown = {part["props"].get("label") for part in config["components"]}
    assert {"Try", "Deployment prior", "Image"} <= shown and "Errors" not in shown
    headings = [part["props"].get("value") for part in config["components"] if part["type"] == "markdown"]
    assert "## org/livt" in headings


def test_a_space_that_cannot_be_published_leaves_the_command_to_do_it_later(finished_run):
    with hub_server() as hub:
        api = HfApi(hub.endpoint, "hf_wrong")
        with refusal(None, "org/livt --license mit --space"):
            publish_space(finished_run, Publication("org/livt", license="mit"), api)


def test_publish_lists_the_space_of_a_dry_run_and_uploads_nothing(finished_run, tmp_path, capsys):
    options = [str(finished_run), "org/livt", "--license", "mit", "--space", "--folder", str(tmp_path / "out")]
    publish_command(options)
    printed = capsys.readouterr().out
    assert "bytes  app.py" in printed and "Nothing was uploaded" in printed
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out-space" / "app.py").is_file()
