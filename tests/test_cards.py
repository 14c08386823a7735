"""Cards, results files and the paper's tables."""

import copy
import re
from pathlib import Path

import pytest
import yaml
from hub_server import TOKEN, hub_server
from huggingface_hub import HfApi, ModelCard, parse_eval_result_entries

from livt_hf.commands import local_places
from livt_hf.hub import eval_result_files, model_card
from livt_hf.hub.converted import converted_card, converted_names
from livt_hf.hub.paper import paper_result, paper_table
from livt_hf.settings import FinetuneArguments

CARDS = Path(__file__).parents[1] / "model_cards"
METRICS = {"accuracy": 0.421, "top5": 0.7, "many": 0.612, "medium": 0.408, "few": None, "mean_class_accuracy": 0.42}
METRICS |= {"worst_class_accuracy": 0.0, "ece": 0.054, "mce": 0.101, "num_images": 10000, "num_nan": 0}
RESULTS = {
    "stage": "finetune",
    "model_size": "micro",
    "parameters": 1_216_996,
    "image_size": 32,
    "dataset": "cifar100-lt",
    "dataset_local": False,
    "imbalance_factor": 100,
    "split": "test",
    "num_images": 10000,
    "num_train_images": 10847,
    "num_classes": 100,
    "class_counts": {"max": 500, "min": 5, "imbalance": 100.0, "many": 35, "medium": 35, "few": 30},
    "loss": "bal_bce",
    "tau": 1.0,
    "epoch": 10,
    "epochs": 10,
    "selection": "last epoch",
    "weights": "model",
    "seed": 0,
    "pretrained": "org/micro-mgp",
    "pretrained_local": False,
    "metrics": METRICS,
    "posterior": {**METRICS, "accuracy": 0.433, "ece": 0.021},
    "versions": {"torch": "2.15.0"},
    "git_revision": None,
    "seconds": 700.0,
}
PRETRAINING = {
    "stage": "pretrain",
    "model_size": "micro",
    "parameters": 1_500_000,
    "image_size": 32,
    "dataset": "glyphs",
    "dataset_local": False,
    "imbalance_factor": 100,
    "num_train_images": 5000,
    "num_classes": 40,
    "mask_ratio": 0.75,
    "decode_ratio": 1.0,
    "epochs": 5,
    "seed": 0,
    "metrics": {"loss": 0.58, "zero_prediction_loss": 1.0},
    "versions": {},
    "git_revision": None,
    "seconds": 100.0,
}


@pytest.fixture(scope="module")
def api():
    with hub_server() as server:
        yield HfApi(endpoint=server.endpoint, token=TOKEN)


def row_of(card: ModelCard, label: str) -> list[str]:
    line = next(line for line in card.text.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_card_shows_the_measured_groups_beside_the_papers():
    card = model_card(RESULTS, {"epochs": 10}, "org/name")
    assert row_of(card, "this model, argmax z") == ["61.2", "40.8", "–", "42.1"]
    assert row_of(card, "this model, posterior") == ["61.2", "40.8", "–", "43.3"]
    assert row_of(card, "the paper, ViT-Base at 224 px") == ["–", "–", "–", "58.2"]
    assert row_of(card, "`probabilities`") == ["2.1", "10.1"]


def test_the_model_index_holds_every_metric_that_was_measured():
    card = model_card(RESULTS, {}, "org/name")
    found = {result.metric_name: result.metric_value for result in ModelCard(str(card)).data.eval_results}
    assert found["Top-1 accuracy"] == 0.421 and found["Expected calibration error"] == 0.054
    assert "Few-shot accuracy" not in found  # no class of that group: absent, not zero
    assert card.data.license == "apache-2.0" and card.data.pipeline_tag == "image-classification"
    assert card.data.datasets == ["uoft-cs/cifar100"] and card.data.base_model == "org/micro-mgp"


def test_a_multi_label_card_reports_precision_and_no_accuracy():
    metrics = {"map": 0.31, "many": 0.5, "medium": 0.3, "few": None, "num_images": 50}
    local = {"dataset": "photos", "dataset_local": True}
    card = model_card(RESULTS | local | {"metrics": metrics, "posterior": None}, {}, "org/name")
    assert row_of(card, "this model") == ["50.0", "30.0", "–", "31.0"]
    assert {r.metric_type for r in card.data.eval_results} == {"mean_average_precision"}
    assert "accuracy, %" not in card.text and 'prior="uniform"' not in card.text


def test_the_card_promises_probabilities_only_where_the_loss_gives_them():
    ldam = model_card(RESULTS | {"loss": "ldam", "posterior": None}, {}, "org/name").text
    assert "model.probabilities" not in ldam and "not probabilities under any prior" in ldam
    assert "bias that depends on the class counts" not in ldam
    plain = model_card(RESULTS | {"loss": "ce"}, {}, "org/name").text
    assert "model.probabilities" in plain and "favour the classes that were frequent" in plain


def test_eval_result_files_parse_back_to_the_same_numbers():
    files = eval_result_files(RESULTS)
    entries = parse_eval_result_entries(yaml.safe_load(files[".eval_results/cifar100.yaml"]))
    assert {entry.dataset_id for entry in entries} == {"uoft-cs/cifar100"}
    assert {entry.task_id: entry.value for entry in entries}["accuracy"] == 0.421


def test_data_without_a_hub_id_gets_no_results_file_under_an_invented_one():
    assert eval_result_files(RESULTS | {"dataset": "glyphs"}) == {}
    assert eval_result_files(RESULTS | {"dataset": "data/birds", "dataset_local": True}) == {}


def test_a_relative_folder_is_not_taken_for_an_id_on_the_hub():
    results = RESULTS | {"dataset": "data/birds", "pretrained": "models/mgp", "imbalance_factor": None}
    local = model_card(results | {"dataset_local": True, "pretrained_local": True}, {}, "org/name").data
    assert (local.datasets, local.base_model, local.eval_results[0].dataset_type) == (None, None, "birds")
    hub = model_card(results, {}, "org/name").data
    assert (hub.datasets, hub.base_model, hub.eval_results[0].dataset_type) == (
        ["data/birds"],
        "models/mgp",
        "data/birds",
    )


def test_a_run_that_did_not_record_its_places_names_nothing_on_the_hub():
    old = {name: value for name, value in RESULTS.items() if not name.endswith("_local")}
    data = model_card(old | {"dataset": "data/birds"}, {}, "org/name").data
    assert data.datasets is None and data.base_model is None


def test_a_configuration_is_no_part_of_the_id_of_a_data_set():
    assert model_card(RESULTS | {"dataset": "org/birds:large"}, {}, "org/name").data.datasets == ["org/birds"]


def test_a_name_is_local_where_the_disk_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("data/birds", "models/mgp", "glyphs"):
        (tmp_path / folder).mkdir(parents=True)
    local = local_places(FinetuneArguments(dataset="data/birds", pretrained="models/mgp"))
    assert local == {"dataset_local": True, "pretrained_local": True}
    hub = local_places(FinetuneArguments(dataset="glyphs", pretrained="org/mgp"))  # a benchmark goes before a folder
    assert hub == {"dataset_local": False, "pretrained_local": False}


@pytest.mark.parametrize("dataset", ["imagenet-lt", "imagenet-bal", "imagenet-1k", "inat18"])
def test_what_the_paper_reports_on_is_called_validation_as_its_publisher_does(dataset):
    results = RESULTS | {"dataset": dataset, "imbalance_factor": None}
    card = model_card(results, {}, "org/name")
    assert {result.dataset_split for result in card.data.eval_results} == {"validation"}
    assert "Measured on the validation split" in card.text
    assert all("validation split" in text for text in eval_result_files(results).values())


def test_cifar_is_measured_on_the_published_test_split():
    assert model_card(RESULTS, {}, "org/name").data.eval_results[0].dataset_split == "test"


@pytest.mark.parametrize(
    ("results", "arguments"),
    [
        ({"pretrained": "none"}, {}),
        ({"tau": 1.5}, {}),
        ({}, {"pooling": "cls"}),
        ({}, {"bias": "ce"}),
        ({}, {"test_prior": "prior.json"}),
    ],
)
def test_the_paper_is_not_quoted_beside_another_experiment(results, arguments):
    assert "| the paper" not in model_card(RESULTS | results, arguments, "org/name").text


def test_the_paper_is_quoted_where_tau_is_its_own_or_plays_no_part():
    places = {"dataset": "places-lt", "imbalance_factor": None, "tau": 1.05}
    for results in (places, {"loss": "ce", "tau": 1.5}):
        assert "| the paper" in model_card(RESULTS | results, {"pooling": "mean"}, "org/name").text


def test_the_hub_accepts_every_card(api):
    cards = [model_card(RESULTS, {}, "org/name"), model_card(PRETRAINING, {}, "org/name")]
    cards += [model_card(RESULTS, {}, "org/name-timm", form="timm")]
    for card in cards + [converted_card(name) for name in converted_names()]:
        api._validate_yaml(str(card), repo_type="model")


def test_a_local_data_set_is_named_without_its_folder():
    results = copy.deepcopy(RESULTS) | {"dataset": "/home/jane/pictures", "imbalance_factor": None, "pretrained": None}
    results["dataset_local"] = True
    card = str(model_card(results, {}, "org/name"))
    assert "jane" not in card and "pictures" in card


def test_the_use_section_has_eight_lines():
    code = re.search(r"```python\n(.*?)```", model_card(RESULTS, {}, "org/name").text, flags=re.DOTALL)[1]
    assert len(code.splitlines()) == 8


def test_the_finished_cards_are_what_the_functions_write():
    for name in converted_names():
        assert (CARDS / f"{name}.md").read_text(encoding="utf-8") == str(converted_card(name))


def test_converted_weights_never_carry_our_licence():
    for name in converted_names():
        card = converted_card(name)
        assert card.data.license == "other" and card.data.license_link
        assert "apache" not in str(card).lower() and "publishing needs their leave" in card.text


def test_an_unknown_checkpoint_has_no_card():
    with pytest.raises(ValueError, match="livt-base-inat18-384"):
        converted_card("livt-huge-inat18")


def test_the_papers_groups_add_up_to_its_overall_accuracy():
    groups = {
        "imagenet-lt": (385, 479, 136),
        "places-lt": (131, 163, 71),
    }  # balanced test sets
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


def test_an_unknown_table_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="loss-on-vit"):
        paper_table("tab:nothing")
