"""Cards, results files and the paper's tables."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hub_server import TOKEN, hub_server
from huggingface_hub import HfApi, ModelCard, parse_eval_result_entries

from livt_hf.errors import LiVTError
from livt_hf.hub import Publication, eval_result_files, model_card
from livt_hf.hub.paper import paper_result, paper_table
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.losses import LOSSES, LossDefinition
from livt_hf.recipes.paper.cards import converted_card, converted_names
from livt_hf.results import UNIFORM, Results
from livt_hf.settings import FinetuneSettings
from livt_hf.training.checkpoints import Progress
from livt_hf.training.results import build_common_results, is_local

CARDS = Path(__file__).parents[1] / "model_cards"
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
    metrics=METRICS,
    posterior=METRICS | {"accuracy": 0.433, "ece": 0.021},
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


@pytest.fixture(scope="module")
def api():
    with hub_server() as server:
        yield HfApi(endpoint=server.endpoint, token=TOKEN)


def card_of(
    results: Results = RESULTS, form: str = "transformers", head: dict | None = None, **arguments
) -> ModelCard:
    """Of a run whose head has these settings beside its loss, tau and class counts."""
    several = {"num_train_images": 99, "test_prior": None} if "map" in results.metrics else {}
    settings = {"loss": results.loss, "tau": results.tau, "class_counts": [9, 3]} | several | (head or {})
    problem = "multi_label_classification" if several else None
    publication = Publication("org/name", license="apache-2.0", form=form)
    if results.stage == "pretrain":
        return model_card(results, arguments, publication)
    config = SimpleNamespace(long_tail=LongTailConfig(**settings), num_labels=2, problem_type=problem)
    return model_card(results, arguments, publication, LongTailHead(config))


def row_of(card: ModelCard, label: str) -> list[str]:
    line = next(line for line in card.text.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_card_shows_the_measured_groups_beside_the_papers():
    card = card_of(epochs=10)
    assert row_of(card, "this model, paper (argmax z)") == ["61.2", "40.8", "-", "42.1"]
    assert row_of(card, "this model, posterior") == ["61.2", "40.8", "-", "43.3"]
    assert row_of(card, "the paper, ViT-Base at 224 px") == ["-", "-", "-", "58.2"]
    assert row_of(card, "class probabilities") == ["2.1", "10.1"]


def test_the_card_of_a_calibrated_model_judges_it_by_its_posterior():
    card = card_of(replace(RESULTS, headline=UNIFORM))
    rows = [line for line in card.text.splitlines() if line.startswith("| this model")]
    assert "posterior, uniform prior" in rows[0] and "argmax z" in rows[1]
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert found["Top-1 accuracy, posterior, uniform prior"] == 0.433 and "Top-1 accuracy" not in found


def test_the_model_index_holds_every_metric_that_was_measured():
    card = card_of()
    found = {result.metric_name: result.metric_value for result in ModelCard(str(card)).data.eval_results}
    assert found["Top-1 accuracy"] == 0.421 and found["Expected calibration error"] == 0.054
    assert "Few-shot accuracy" not in found  # no class of that group: absent, not zero
    assert card.data.license == "apache-2.0" and card.data.pipeline_tag == "image-classification"
    assert card.data.datasets == ["uoft-cs/cifar100"] and card.data.base_model == "org/micro-mgp"


def test_a_multi_label_card_reports_precision_and_no_accuracy():
    metrics = {"map": 0.31, "many": 0.5, "medium": 0.3, "few": None, "num_images": 50}
    card = card_of(replace(RESULTS, dataset="photos", dataset_local=True, metrics=metrics, posterior=None))
    assert row_of(card, "this model") == ["50.0", "30.0", "-", "31.0"]
    assert {r.metric_type for r in card.data.eval_results} == {"mean_average_precision"}
    assert "accuracy, %" not in card.text and 'prior="uniform"' not in card.text


def test_a_run_whose_test_images_have_none_of_its_labels_has_a_card_without_numbers():
    metrics = {"map": None, "many": None, "medium": None, "few": None, "num_images": 50}
    card = card_of(replace(RESULTS, dataset="photos", dataset_local=True, metrics=metrics, posterior=None))
    assert row_of(card, "this model") == ["-"] * 4 and not card.data.eval_results


@pytest.mark.parametrize("loss", LOSSES)
def test_the_card_says_of_each_loss_what_its_spec_says(loss):
    results = replace(RESULTS, loss=loss)
    text, why = card_of(results).text, LOSSES[loss].why_no_posterior(LongTailConfig(loss))
    assert ("a bias that depends on the class counts is added" in text) == LOSSES[loss].balanced
    assert ("No bias is added" in text) == (not LOSSES[loss].balanced)
    assert ("model.probabilities" in text) == (why is None)
    assert why is None or f"no probabilities under any prior (it was trained with loss '{loss}': {why})" in text
    sigmoid = LOSSES[loss].balanced and LOSSES[loss].activation == "sigmoid"
    assert ("With a sigmoid head" in text) == (sigmoid and why is None)
    calibrated = {"calibration": {"scale": 1.0, "odds": 0.0, "offsets": [0.0, 0.0], "num_images": 7}}
    timm = card_of(results, form="timm", head=calibrated).text
    assert "probabilities(" not in timm and "`probabilities`" not in timm and "`pipeline`" not in timm


def test_the_settings_of_a_loss_may_decide_whether_it_has_a_posterior():
    results = replace(RESULTS, loss="bal_nt_bce")
    assert "model.probabilities" in card_of(results, head={"nt_lambda": 1.0}).text
    assert "model.probabilities" not in card_of(results, head={"nt_lambda": 2.0}).text


def test_a_run_with_class_weights_from_a_file_has_a_card_that_promises_no_probabilities():
    card = card_of(head={"class_weights": [1.0, 3.0]}, class_weights="(local)/weights.json")
    assert "its class weights change what the outputs estimate" in card.text and "model.probabilities" not in card.text
    assert "| the paper" not in card.text


def test_a_loss_of_a_plugin_that_is_not_loaded_is_refused_with_the_option_that_loads_it(monkeypatch):
    monkeypatch.setitem(LOSSES, "my_focal", LossDefinition(None, activation="softmax"))
    head = LongTailHead(SimpleNamespace(long_tail=LongTailConfig("my_focal"), num_labels=2, problem_type=None))
    monkeypatch.delitem(LOSSES, "my_focal")
    with pytest.raises(LiVTError, match="'my_focal', which is not registered.* --plugin"):
        model_card(replace(RESULTS, loss="my_focal"), {}, Publication("org/name", license="mit"), head)


PRIOR = "the classes are as frequent as the test prior of the training says"


@pytest.mark.parametrize(
    ("loss", "head", "world"),
    [
        ("bal_bce", {}, "every class is equally frequent"),
        ("bal_ce", {"seen_counts": [6, 6]}, "every class is equally frequent"),
        ("bal_bce", {"test_prior": [0.7, 0.3]}, f"{PRIOR} (`test_prior` in `config.json`)"),
        ("bal_bce", {"tau": 0.0}, "the classes have the shares of the training data"),
        ("ce", {}, "the classes have the shares of the training data"),
        ("ce", {"seen_counts": [6, 6]}, "the classes have the shares that the sampler showed in training"),
        ("bal_ce", {"tau": 0.5}, "class j has a share in proportion to pi_j^0.5, pi the class shares of the training"),
    ],
)
def test_the_card_names_the_world_for_which_the_logits_are_meant(loss, head, world):
    text = card_of(replace(RESULTS, loss=loss), head=head).text
    assert f"The largest z is the prediction for a world in which {world}" in text
    assert ("pi that the sampler showed in training" in text) == ("seen_counts" in head)
    assert ("No bias is added" in text) == (loss == "ce" or head.get("tau") == 0)
    timm = card_of(replace(RESULTS, loss=loss), form="timm", head=head).text
    assert "in `config.json`" not in timm  # that of timm does not have it


def test_a_record_of_an_older_version_reads_without_the_fields_that_it_lacks():
    old = {"stage": "finetune", "dataset": "data/birds", "model_size": "micro", "parameters": 1000, "image_size": 32}
    old |= {"loss": "ce", "tau": 1.0, "metrics": METRICS, "epoch": 1, "epochs": 1, "pretrained": "models/mgp"}
    data = card_of(Results.from_dict(old | {"a_field_of_then": 1})).data
    assert data.datasets is None and data.base_model is None  # it did not record where they lie: nothing is claimed


def test_eval_result_files_parse_back_to_the_same_numbers():
    files = eval_result_files(RESULTS, {})
    entries = parse_eval_result_entries(yaml.safe_load(files[".eval_results/cifar100.yaml"]))
    assert {entry.dataset_id for entry in entries} == {"uoft-cs/cifar100"}
    assert {entry.task_id: entry.value for entry in entries}["accuracy"] == 0.421


def test_data_without_a_hub_id_gets_no_results_file_under_an_invented_one():
    assert eval_result_files(replace(RESULTS, dataset="glyphs"), {}) == {}
    assert eval_result_files(replace(RESULTS, dataset="data/birds", dataset_local=True), {}) == {}


def test_a_relative_folder_is_not_taken_for_an_id_on_the_hub():
    results = replace(RESULTS, dataset="data/birds", pretrained="models/mgp", imbalance_factor=None)
    local = card_of(replace(results, dataset_local=True, pretrained_local=True)).data
    assert (local.datasets, local.base_model, local.eval_results[0].dataset_type) == (None, None, "birds")
    hub = card_of(results).data
    assert (hub.datasets, hub.base_model) == (["data/birds"], "models/mgp")
    assert hub.eval_results[0].dataset_type == "data/birds"


def test_a_configuration_is_no_part_of_the_id_of_a_dataset():
    assert card_of(replace(RESULTS, dataset="org/birds:large")).data.datasets == ["org/birds"]


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


def test_cifar_is_measured_on_the_published_test_split():
    assert card_of().data.eval_results[0].dataset_split == "test"


def test_a_test_split_that_was_carved_out_of_the_training_data_is_not_called_the_datasets_own():
    results = replace(RESULTS, dataset="org/birds", imbalance_factor=None, test_carved=True)
    card = card_of(results)
    assert {result.dataset_split for result in card.data.eval_results} == {"held-out part of train"}
    assert "test split" not in card.text and "without the images that were set aside for testing," in card.text
    assert "set aside for testing and validation," in card_of(replace(results, validation_carved=True)).text


def test_no_leaderboard_gets_numbers_of_images_that_nobody_else_has_set_aside():
    hub = replace(RESULTS, dataset="org/birds", imbalance_factor=None)
    unchosen = {"min_images": None, "drop_empty": False, "on_broken": "error", "rare_classes": "drop"}
    assert set(eval_result_files(hub, unchosen)) == {".eval_results/birds.yaml"}
    assert eval_result_files(replace(hub, test_carved=True), unchosen) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("exclude_labels", "todo"), ("min_images", 5), ("on_broken", "skip"), ("label_column", "coarse_label")],
)
def test_no_leaderboard_gets_numbers_of_images_or_classes_that_an_option_chose(name, value):
    assert eval_result_files(RESULTS, {name: value}) == {}
    card, chosen = card_of(**{name: value}), f"--{name} {value}"
    assert f"were chosen by `{chosen}`" in card.text
    assert {result.dataset_split for result in card.data.eval_results} == {f"test, chosen by {chosen}"}


@pytest.mark.parametrize(
    ("results", "arguments"),
    [
        ({"pretrained": "none"}, {}),
        ({"tau": 1.5}, {}),
        ({"model_type": "convnext"}, {}),
        ({}, {"pooling": "cls"}),
        ({}, {"bias": "ce"}),
        ({}, {"test_prior": "prior.json"}),
        ({}, {"sampler": "balanced"}),
        ({}, {"tune": "head"}),
        ({"loss": "ldam"}, {"normalised_classifier": True, "drw_start": 0.8}),
    ],
)
def test_the_paper_is_not_quoted_beside_another_experiment(results, arguments):
    assert "| the paper" not in card_of(replace(RESULTS, **results), **arguments).text


@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 100), ({"imbalance_factor": 10}, 10), ({"rule": "balanced"}, None), ({"dataset": "data/birds"}, None)],
)
def test_a_run_records_the_imbalance_of_its_benchmark_where_none_was_asked_for(options, factor):
    loop = SimpleNamespace(progress=Progress(update=1, seconds=1.0))
    model = SimpleNamespace(config=SimpleNamespace(model_type="livit"), parameters=list)
    settings = FinetuneSettings(**{"dataset": "cifar100-lt"} | options)
    assert build_common_results(settings, loop, model)["imbalance_factor"] == factor


def test_a_card_writes_epochs_in_full():
    assert "after epoch 1200 of 1200." in card_of(replace(RESULTS, epoch=1200.0, epochs=1200)).text
    assert "after epoch 3.33 of 10." in card_of(replace(RESULTS, epoch=10 / 3)).text


def test_the_paper_is_quoted_where_tau_is_its_own_or_plays_no_part():
    places = {"dataset": "places-lt", "imbalance_factor": None, "tau": 1.05}
    for results in (places, {"loss": "ce", "tau": 1.5}):
        assert "| the paper" in card_of(replace(RESULTS, **results), pooling="mean").text


def test_a_card_says_on_how_many_images_its_probabilities_were_calibrated():
    head = {"calibration": {"scale": 1.0, "odds": 0.0, "offsets": [0.0, 0.0], "num_images": 1068}}
    several = replace(RESULTS, metrics={"map": 0.3, "many": 0.5, "medium": 0.3, "few": None}, posterior=None)
    for results in (RESULTS, several):
        assert "calibrated on 1,068 labelled images" in card_of(results, head=head).text
        assert "calibrated on" not in card_of(results).text


def test_a_run_on_a_benchmark_has_a_licence_and_one_on_other_data_or_weights_needs_it_named():
    benchmark = replace(RESULTS, pretrained="none")
    assert Publication("org/name").licensed(benchmark).license == "apache-2.0"
    assert Publication("org/name", license="mit").licensed(benchmark).license == "mit"
    for results in (replace(benchmark, dataset="org/birds"), replace(benchmark, pretrained="org/mae")):
        with pytest.raises(LiVTError, match="org/(birds|mae).*--license"):
            Publication("org/name").licensed(results)
        assert Publication("org/name", license="mit").licensed(results).license == "mit"
    downloaded = replace(benchmark, pretrained="downloads/mae", pretrained_local=True, pretrained_own=False)
    with pytest.raises(LiVTError, match="from the weights of downloads/mae.*--license"):
        Publication("org/name").licensed(downloaded)


@pytest.mark.parametrize("repo_id", ["leaves", "me/my leaves", "a/b/c", "https://hub/me/leaves", ""])
def test_a_repository_is_named_by_its_owner_and_its_name(repo_id):
    with pytest.raises(LiVTError, match="is no repository on the Hub; name it organisation/name"):
        Publication(repo_id)


def test_the_hub_accepts_every_card(api):
    cards = [card_of(), card_of(PRETRAINING)]
    cards += [card_of(form="timm")]
    for card in cards + [converted_card(name) for name in converted_names()]:
        api._validate_yaml(str(card), repo_type="model")


def test_a_local_dataset_is_named_without_its_folder():
    card = str(card_of(replace(RESULTS, dataset="/home/jane/images", dataset_local=True, pretrained=None)))
    assert "jane" not in card and "images (imbalance 100)" in card


def test_the_use_section_has_eight_lines():
    code = re.search(r"```python\n(.*?)```", card_of().text, flags=re.DOTALL)[1]
    assert len(code.splitlines()) == 8


def test_the_finished_cards_are_what_the_functions_write():
    for name in converted_names():
        assert (CARDS / f"{name}.md").read_text(encoding="utf-8") == str(converted_card(name))


def test_converted_weights_never_carry_our_licence():
    for name in converted_names():
        card = converted_card(name)
        assert card.data.license == "other" and card.data.license_link
        assert "apache" not in str(card).lower() and "publishing needs their permission" in card.text


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
        paper_table("nothing")
