"""Model cards, results files and the paper's tables. One golden card per kind is in `golden/`."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hub_server import TOKEN, hub_server
from huggingface_hub import HfApi, ModelCard, parse_eval_result_entries
from refusals import refusal
from transformers import TimmWrapperConfig

from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.errors import LiVTError
from livt_hf.hub import Publication, eval_result_files, model_card
from livt_hf.hub.contents import public_arguments, public_config, public_evaluation, public_results
from livt_hf.hub.names import shorten_path
from livt_hf.hub.paper import paper_result, paper_table
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.losses import LOSSES, LossDefinition
from livt_hf.predictions.rules import ARGMAX, PER_LABEL, UNIFORM
from livt_hf.recipes.paper.cards import converted_card, converted_names
from livt_hf.results import Results
from livt_hf.training.checkpoints import Progress
from livt_hf.training.results import build_common_results, is_local

CARDS = Path(__file__).parents[1] / "model_cards"
GOLDEN = Path(__file__).parent / "golden"
METRICS = {"accuracy": 0.421, "top5": 0.7, "many": 0.612, "medium": 0.408, "few": None, "mean_class_accuracy": 0.42}
METRICS |= {"worst_class_accuracy": 0.0, "ece": 0.054, "mce": 0.101, "num_images": 10000, "num_nan": 0}
RESULTS = Results(
    stage="finetune",
    model_size="micro",
    parameters=1_216_996,
    image_size=32,
    dataset="cifar100-lt",
    dataset_local=False,
    imbalance_factor=100,
    split="test",
    num_images=10000,
    num_train_images=10847,
    num_classes=100,
    class_counts={"max": 500, "min": 5, "imbalance": 100.0, "many": 35, "medium": 35, "few": 30},
    loss="bal_bce",
    tau=1.0,
    epoch=10,
    epochs=10,
    selection="last epoch",
    weights="model",
    seed=0,
    pretrained="org/micro-mgp",
    pretrained_local=False,
    rules={ARGMAX: METRICS, UNIFORM: METRICS | {"accuracy": 0.433, "ece": 0.021}},
    versions={"torch": "2.15.0"},
    git_revision=None,
    seconds=700.0,
)
PRETRAINING = Results(
    stage="pretrain",
    model_size="micro",
    parameters=1_500_000,
    image_size=32,
    dataset="glyphs",
    dataset_local=False,
    imbalance_factor=100,
    num_train_images=5000,
    num_classes=40,
    mask_ratio=0.75,
    decode_ratio=1.0,
    epochs=5,
    seed=0,
    metrics={"loss": 0.58, "zero_prediction_loss": 1.0},
    versions={},
    git_revision=None,
    seconds=100.0,
)
PHOTOS = replace(RESULTS, dataset="photos", dataset_local=True, imbalance_factor=None, rules={ARGMAX: METRICS})
MULTI_LABEL = replace(
    PHOTOS, rules={PER_LABEL: {"map": 0.31, "many": 0.5, "medium": 0.3, "few": None, "num_images": 50}}
)
CALIBRATED = {"calibration": {"scale": 1.0, "odds": 0.0, "offsets": [0.0, 0.0], "num_images": 1068}}


def card_of(
    results: Results = RESULTS, form: str = "transformers", head: dict | None = None, **arguments
) -> ModelCard:
    """Return the card of a run whose head has these settings beside its loss, tau and class counts."""
    multi_label = {"num_train_images": 99, "test_prior": None} if "map" in results.metrics else {}
    settings = {"loss": results.loss, "tau": results.tau, "class_counts": [9, 3]} | multi_label | (head or {})
    problem = "multi_label_classification" if multi_label else None
    publication = Publication("org/name", license="apache-2.0", form=form)
    if results.stage == "pretrain":
        return model_card(results, arguments, publication)
    config = SimpleNamespace(long_tail=LongTailConfig(**settings), num_labels=2, problem_type=problem)
    return model_card(results, arguments, publication, LongTailHead(config), ["report/frequency.png"], "counts.png")


GOLDEN_CARDS = {
    "classifier": lambda: card_of(epochs=10, base_lr=1e-3),
    "calibrated": lambda: card_of(replace(RESULTS, default_rule=UNIFORM), head=CALIBRATED, exclude_labels="todo"),
    "timm": lambda: card_of(form="timm"),
    "multi_label": lambda: card_of(MULTI_LABEL, head=CALIBRATED),
    "other_backbone": lambda: card_of(replace(PHOTOS, model_type="timm_wrapper", model_size="resnet18", loss="ldam")),
    "pretraining": lambda: card_of(PRETRAINING, mask_ratio=0.75),
}


@pytest.mark.parametrize("name", GOLDEN_CARDS)
def test_the_card_is_the_golden_one(name):
    """After an intended change: write str(GOLDEN_CARDS[name]()) to the file, and read it."""
    assert str(GOLDEN_CARDS[name]()) == (GOLDEN / f"{name}.md").read_text(encoding="utf-8")


def test_the_finished_cards_are_what_the_functions_write():
    for name in converted_names():
        card = converted_card(name)
        assert (CARDS / f"{name}.md").read_text(encoding="utf-8") == str(card)
        assert card.data.license == "other" and card.data.license_link
        assert card.data.eval_results is None and card.text.split("\n\n")[1].startswith("**Draft**")
        assert "apache" not in str(card).lower() and "publishing needs their permission" in card.text


def test_the_hub_accepts_every_card():
    with hub_server() as server:
        api = HfApi(endpoint=server.endpoint, token=TOKEN)
        for card in [make() for make in GOLDEN_CARDS.values()] + [converted_card(name) for name in converted_names()]:
            api._validate_yaml(str(card), repo_type="model")


def test_the_model_index_holds_every_metric_that_was_measured():
    found = {result.metric_name: result.metric_value for result in ModelCard(str(card_of())).data.eval_results}
    assert found["Top-1 accuracy"] == 0.421 and found["Expected calibration error"] == 0.054
    assert "Few-shot accuracy" not in found  # no class of that group: absent, not zero
    of_posterior = card_of(replace(RESULTS, default_rule=UNIFORM)).data.eval_results
    assert {r.metric_name: r.metric_value for r in of_posterior}["Top-1 accuracy, posterior, uniform prior"] == 0.433


def test_a_run_whose_test_images_have_none_of_its_labels_has_a_card_without_numbers():
    metrics = dict.fromkeys(("map", "many", "medium", "few")) | {"num_images": 50}
    card = card_of(replace(MULTI_LABEL, rules={PER_LABEL: metrics}))
    assert "| this model | - | - | - | - |" in card.text and not card.data.eval_results


@pytest.mark.parametrize("loss", LOSSES)
def test_the_card_agrees_with_the_properties_of_each_loss(loss):
    results = replace(RESULTS, loss=loss)
    text, reason = card_of(results).text, LOSSES[loss].why_no_posterior(LongTailConfig(loss))
    assert ("a bias that depends on the class counts is added" in text) == LOSSES[loss].balanced
    assert ("No bias is added" in text) == (not LOSSES[loss].balanced)
    assert ("model.probabilities" in text) == (reason is None)
    assert reason is None or f"not probabilities under any prior (it was trained with loss '{loss}': {reason})" in text
    sigmoid = LOSSES[loss].balanced and LOSSES[loss].activation == "sigmoid"
    assert ("With a sigmoid head" in text) == (sigmoid and reason is None)
    timm = card_of(results, form="timm", head=CALIBRATED).text
    assert "probabilities(" not in timm and "`pipeline`" not in timm


@pytest.mark.parametrize(
    ("loss", "head", "has_posterior"),
    [
        ("bal_nt_bce", {"nt_lambda": 1.0}, True),
        ("bal_nt_bce", {"nt_lambda": 2.0}, False),
        ("bal_bce", {"class_weights": [1.0, 3.0]}, False),
    ],
)
def test_the_settings_of_a_head_decide_whether_the_card_promises_probabilities(loss, head, has_posterior):
    assert ("model.probabilities" in card_of(replace(RESULTS, loss=loss), head=head).text) == has_posterior


@pytest.mark.parametrize(
    ("loss", "head", "prior"),
    [
        ("bal_bce", {}, "a uniform class prior"),
        ("bal_ce", {"seen_counts": [6, 6]}, "a uniform class prior"),
        ("bal_bce", {"test_prior": [0.7, 0.3]}, "the test prior of the training (`test_prior` in `config.json`)"),
        ("bal_bce", {"tau": 0.0}, "the class prior of the training data"),
        ("ce", {}, "the class prior of the training data"),
        ("ce", {"seen_counts": [6, 6]}, "the class prior that the sampler produced in training"),
        ("bal_ce", {"tau": 0.5}, "a prior proportional to pi_j^0.5, pi the class prior of the training data"),
    ],
)
def test_the_card_names_the_prior_of_the_logits(loss, head, prior):
    text = card_of(replace(RESULTS, loss=loss), head=head).text
    assert f"The largest z is the prediction under {prior}." in text
    assert ("pi that the sampler produced in training" in text) == ("seen_counts" in head)
    assert ("No bias is added" in text) == (loss == "ce" or head.get("tau") == 0)
    assert "in `config.json`" not in card_of(replace(RESULTS, loss=loss), form="timm", head=head).text


def test_a_loss_that_is_not_registered_names_the_option_that_loads_it(monkeypatch):
    monkeypatch.setitem(LOSSES, "my_focal", LossDefinition(None, activation="softmax"))
    head = LongTailHead(SimpleNamespace(long_tail=LongTailConfig("my_focal"), num_labels=2, problem_type=None))
    monkeypatch.delitem(LOSSES, "my_focal")
    with refusal("plugin", "my_focal"):
        model_card(replace(RESULTS, loss="my_focal"), {}, Publication("org/name", license="mit"), head)


def test_a_record_of_an_older_version_reads_without_the_fields_that_it_lacks():
    old = {"stage": "finetune", "dataset": "data/birds", "model_size": "micro", "parameters": 1000, "image_size": 32}
    old |= {"loss": "ce", "tau": 1.0, "metrics": METRICS, "epoch": 1, "epochs": 1, "pretrained": "models/mgp"}
    data = card_of(Results.from_dict(old | {"a_field_of_then": 1})).data
    assert data.datasets is None and data.base_model is None  # whether they are on the Hub was not recorded


def test_results_files_parse_back_to_the_same_numbers():
    files = eval_result_files(RESULTS, {})
    entries = parse_eval_result_entries(yaml.safe_load(files[".eval_results/cifar100.yaml"]))
    assert {entry.dataset_id for entry in entries} == {"uoft-cs/cifar100"}
    assert {entry.task_id: entry.value for entry in entries}["accuracy"] == 0.421


BIRDS = {"dataset": "org/birds", "imbalance_factor": None}


@pytest.mark.parametrize(
    ("changes", "arguments", "has_file"),
    [
        (BIRDS, {"min_images": None, "drop_empty": False, "on_broken": "error", "rare_classes": "drop"}, True),
        (BIRDS | {"test_carved": True}, {}, False),
        ({"dataset": "glyphs"}, {}, False),
        ({"dataset": "data/birds", "dataset_local": True}, {}, False),
        ({}, {"exclude_labels": "todo"}, False),
        ({}, {"min_images": 5}, False),
        ({}, {"on_broken": "skip"}, False),
        ({}, {"label_column": "coarse_label"}, False),
    ],
)
def test_the_leaderboard_gets_numbers_only_of_a_published_split_as_it_is(changes, arguments, has_file):
    results = replace(RESULTS, **changes)
    assert bool(eval_result_files(results, arguments)) == has_file
    for name, value in arguments.items():
        if not has_file:
            card = card_of(results, **arguments)
            assert f"were selected by `--{name} {value}`" in card.text
            assert {r.dataset_split for r in card.data.eval_results} == {f"test, selected by --{name} {value}"}


@pytest.mark.parametrize(
    ("changes", "datasets", "base_model", "dataset_type"),
    [
        ({"dataset": "data/birds", "pretrained": "models/mgp"}, ["data/birds"], "models/mgp", "data/birds"),
        ({"dataset": "org/birds:large"}, ["org/birds"], "org/micro-mgp", "org/birds"),
        ({"dataset": "data/birds", "dataset_local": True, "pretrained_local": True}, None, None, "birds"),
        ({"dataset": "/home/jane/images", "dataset_local": True, "pretrained": None}, None, None, "images"),
    ],
)
def test_only_names_that_were_not_on_the_disk_are_hub_ids(changes, datasets, base_model, dataset_type):
    card = card_of(replace(RESULTS, **changes))
    found = (card.data.datasets, card.data.base_model, card.data.eval_results[0].dataset_type)
    assert found == (datasets, base_model, dataset_type) and "jane" not in str(card)


@pytest.mark.parametrize(
    ("path", "published"),
    [
        ("/Users/jane/birds", "(local)/birds"),
        ("/Users/jane/", "(local)"),
        ("/data/birds", "(local)/birds"),
        ("clinic/ward 3/x", "(local)/x"),
        (r"C:\Users\jane\birds", "(local)/birds"),
        (r"C:\Users\jane", "(local)"),
        ("/home/jane/runs/finetune-birds/1", "(local)/finetune-birds/1"),
    ],
)
def test_nothing_of_a_home_folder_of_any_system_is_published(path, published):
    results = public_results(replace(RESULTS, dataset=path, dataset_local=True))
    arguments = public_arguments({"dataset": path, "epochs": 3}, replace(RESULTS, dataset=path, dataset_local=True))
    assert results.dataset == arguments["dataset"] == published
    assert shorten_path("~jane") == "(local)"


def test_of_what_timm_knows_of_its_weights_and_of_foreign_fields_nothing_unknown_is_published():
    written = {"architecture": "resnet18", "note": "from /home/jane", "num_labels": 3}
    written["pretrained_cfg"] = {"input_size": [3, 8, 8], "file": "/home/jane/x.pth", "url": "https://intranet"}
    kept = public_config(written, TimmWrapperConfig(architecture="resnet18"))
    assert kept == {"architecture": "resnet18", "num_labels": 3, "pretrained_cfg": {"input_size": [3, 8, 8]}}


def test_numbers_under_a_prior_of_a_file_are_not_published():
    rules = {"argmax": {"accuracy": 0.5, "note": "x"}, "given": {"accuracy": 0.9}}
    summary = {"split": "test", "rules": rules, "intervals": rules, "shifted": [{"imbalance": 50, "rules": rules}]}
    found = public_evaluation(summary, RESULTS)
    assert found["rules"] == found["intervals"] == found["shifted"][0]["rules"] == {"argmax": {"accuracy": 0.5}}


def test_a_name_is_local_where_the_disk_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("data/birds", "models/mgp", "glyphs"):
        (tmp_path / folder).mkdir(parents=True)
    assert is_local("data/birds") and is_local("models/mgp")
    assert not is_local("glyphs") and not is_local("org/mgp")  # a benchmark goes before a folder


@pytest.mark.parametrize("dataset", ["imagenet-lt", "imagenet-bal", "imagenet-1k", "inat18"])
def test_what_the_paper_reports_on_is_called_validation_as_its_publisher_does(dataset):
    results = replace(RESULTS, dataset=dataset, imbalance_factor=None)
    card = card_of(results)
    assert {result.dataset_split for result in card.data.eval_results} == {"validation"}
    assert "Measured on the validation split" in card.text
    assert all("validation split" in text for text in eval_result_files(results, {}).values())


def test_a_test_split_that_was_held_out_of_the_training_data_is_not_called_the_datasets_own():
    results = replace(RESULTS, **BIRDS, test_carved=True)
    card = card_of(results)
    assert {result.dataset_split for result in card.data.eval_results} == {"held-out part of train"}
    assert "test split" not in card.text and "without the images that were held out for testing," in card.text
    assert "held out for testing and validation," in card_of(replace(results, validation_carved=True)).text


@pytest.mark.parametrize(
    ("changes", "arguments", "is_quoted"),
    [
        ({}, {"pooling": "mean"}, True),
        ({"dataset": "places-lt", "imbalance_factor": None, "tau": 1.05}, {}, True),
        ({"loss": "ce", "tau": 1.5}, {}, True),  # which has no bias
        ({"pretrained": "none"}, {}, False),
        ({"tau": 1.5}, {}, False),
        ({"model_type": "convnext"}, {}, False),
        ({}, {"pooling": "cls"}, False),
        ({}, {"bias": "ce"}, False),
        ({}, {"test_prior": "prior.json"}, False),
        ({}, {"sampler": "balanced"}, False),
        ({}, {"tune": "head"}, False),
        ({}, {"class_weights": "(local)/weights.json"}, False),
        ({"loss": "ldam"}, {"normalised_classifier": True, "drw_start": 0.8}, False),
    ],
)
def test_the_paper_is_quoted_only_beside_its_own_experiment(changes, arguments, is_quoted):
    assert ("| the paper" in card_of(replace(RESULTS, **changes), **arguments).text) == is_quoted


@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 100), ({"imbalance_factor": 10}, 10), ({"rule": "balanced"}, None), ({"dataset": "data/birds"}, None)],
)
def test_a_run_records_the_imbalance_of_its_benchmark_where_none_was_given(options, factor):
    model = SimpleNamespace(config=SimpleNamespace(model_type="livit"), parameters=list)
    settings = FinetuneSettings.build(**{"dataset": "cifar100-lt"} | options)
    loop = SimpleNamespace(progress=Progress(update=1, seconds=1.0), optimization=settings.optimization)
    loop.accelerator = SimpleNamespace(mixed_precision="no")
    assert build_common_results("finetune", settings.data, "base", loop, model)["imbalance_factor"] == factor


def test_a_card_writes_epochs_in_full():
    assert "after epoch 1200 of 1200." in card_of(replace(RESULTS, epoch=1200.0, epochs=1200)).text
    assert "after epoch 3.33 of 10." in card_of(replace(RESULTS, epoch=10 / 3)).text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pretrained": "none"}, None),
        ({"pretrained": "none", "dataset": "org/birds"}, "org/birds"),
        ({"pretrained": "org/mae"}, "org/mae"),
        ({"pretrained": "downloads/mae", "pretrained_local": True, "pretrained_own": False}, "downloads/mae"),
    ],
)
def test_the_licence_must_be_named_for_data_or_weights_of_others(changes, named):
    results = replace(RESULTS, **changes)
    assert Publication("org/name", license="mit").licensed(results).license == "mit"
    if named is None:
        assert Publication("org/name").licensed(results).license == "apache-2.0"
        return
    with refusal("license", named):
        Publication("org/name").licensed(results)


@pytest.mark.parametrize("repo_id", ["leaves", "me/my leaves", "a/b/c", "https://hub/me/leaves", ""])
def test_a_repository_is_named_by_its_owner_and_its_name(repo_id):
    with refusal("repo_id", repr(repo_id)):
        Publication(repo_id)


def test_the_papers_groups_add_up_to_its_overall_accuracy():
    groups = {"imagenet-lt": (385, 479, 136), "places-lt": (131, 163, 71)}  # balanced test sets
    for table in ("performance-imagenet-lt", "performance-place"):
        for row in paper_table(table):
            sizes = groups[row["dataset"]]
            mean = sum(row[g] * n for g, n in zip(("many", "medium", "few"), sizes, strict=True)) / sum(sizes)
            assert mean == pytest.approx(row["accuracy"], abs=0.35), row


def test_the_papers_row_of_another_size_is_found_by_size():
    assert paper_result("imagenet-lt", model_size="large")["accuracy"] == 62.6
    assert paper_result("inat18", image_size=384)["accuracy"] == 81.0
    assert paper_result("cifar10-lt", imbalance_factor=10, loss="ldam", model_size="micro")["accuracy"] == 88.6
    assert paper_result("cifar10-lt", imbalance_factor=50) is None
    assert paper_result("glyphs") is None


@pytest.mark.parametrize(("find", "name"), [(paper_table, "nothing"), (converted_card, "livt-huge-inat18")])
def test_an_unknown_table_or_checkpoint_is_named(find, name):
    with pytest.raises(LiVTError, match=name):
        find(name)
