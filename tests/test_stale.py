"""Published models that other tools have trained on: their old long-tail settings are noticed and ignored."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageClassification,
    BeitForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from livt_hf import LiViTConfig, LiViTForImageClassification, balance
from livt_hf.classifiers import balance_by_counts, load_model
from livt_hf.conversion import to_beit

COUNTS = [60, 30, 10]


def save_classifier(kind: str, folder, tiny: dict) -> None:
    """Save a classifier as users get it from us: published as a BEiT, or a balanced ViT."""
    if kind == "beit":
        model = to_beit(LiViTForImageClassification(LiViTConfig(**tiny, class_counts=COUNTS, loss="bal_ce")))
    else:
        model = balance(ViTForImageClassification(ViTConfig(**tiny, num_labels=3)), COUNTS, loss="bal_ce")
    model.save_pretrained(folder)


def train_with_stock_tools(folder, **labels) -> None:
    """Fine-tune with plain cross-entropy, by a class of transformers that knows nothing of long tails."""
    model = AutoModelForImageClassification.from_pretrained(folder, ignore_mismatched_sizes=True, **labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 3, 16, 16), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def warnings_of_ours(caplog) -> list:
    return [record for record in caplog.records if record.name.startswith("livt_hf")]


@pytest.fixture(params=["beit", "vit"])
def published(request, tmp_path, tiny):
    save_classifier(request.param, tmp_path, tiny)
    return tmp_path


def test_a_model_as_it_was_saved_keeps_its_settings(published, caplog):
    assert load_model(str(published)).head.settings.class_counts == COUNTS
    assert not warnings_of_ours(caplog)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_half_precision_is_no_training(published, dtype, caplog):
    AutoModelForImageClassification.from_pretrained(published).to(dtype).save_pretrained(published)
    assert load_model(str(published)).head.settings.class_counts == COUNTS and not warnings_of_ours(caplog)


@pytest.mark.parametrize("labels", [{}, dict(num_labels=4), dict(id2label={0: "oak", 1: "elm", 2: "ash"})])
def test_settings_from_before_another_training_are_ignored_with_a_warning(published, labels, caplog):
    train_with_stock_tools(published, **labels)
    model = load_model(str(published))
    head = getattr(model, "head", None)
    assert head is None or head.settings.class_counts is None
    (record,) = warnings_of_ours(caplog)
    assert "class_counts" in record.getMessage() and "loss" in record.getMessage()


@pytest.mark.parametrize("labels", [{}, dict(num_labels=4)])
def test_class_counts_of_the_new_training_give_its_posterior(published, labels, tmp_path):
    train_with_stock_tools(published, **labels)
    model = load_model(str(published))
    counts = [1, 2, 3, 4][: model.config.num_labels]
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    model = balance_by_counts(model, str(tmp_path / "counts.json"), None).eval()
    images = torch.randn(2, 3, 16, 16)
    prior = torch.tensor(counts) / sum(counts)
    torch.testing.assert_close(model.probabilities(images, prior=prior), model(images).logits.softmax(-1))


@pytest.mark.parametrize(
    "given", [dict(class_counts=[1, 2, 3], loss="ce"), dict(class_counts=[1, 2, 3]), dict(loss="ce")]
)
def test_settings_that_are_named_are_believed(tmp_path, tiny, given, caplog):
    """A LiViT whose settings are replaced has the counts and the loss that are named, the old counts otherwise."""
    save_classifier("beit", tmp_path, tiny)
    train_with_stock_tools(tmp_path)
    settings = LiViTForImageClassification.from_pretrained(tmp_path, **given).head.settings
    assert (settings.class_counts, settings.loss) == (given.get("class_counts", COUNTS), "ce")
    stock = BeitForImageClassification.from_pretrained(tmp_path)
    assert balance(stock, **given).head.settings.class_counts == given.get("class_counts", COUNTS)
    assert len(warnings_of_ours(caplog)) == ("loss" not in given)


def test_a_model_without_a_fingerprint_loads_as_it_did_in_0_2(published, caplog):
    train_with_stock_tools(published)
    config = json.loads((published / "config.json").read_text())
    del config["long_tail"]["fingerprint"]
    (published / "config.json").write_text(json.dumps(config))
    assert load_model(str(published)).head.settings.class_counts == COUNTS and not warnings_of_ours(caplog)


def test_our_own_training_renews_the_fingerprint(tmp_path, tiny, caplog):
    model = LiViTForImageClassification(LiViTConfig(**tiny, class_counts=COUNTS))
    for _ in range(2):
        model.save_pretrained(tmp_path)
        model = LiViTForImageClassification.from_pretrained(tmp_path)
        torch.nn.init.normal_(model.classifier.weight)
    assert model.head.settings.class_counts == COUNTS and not warnings_of_ours(caplog)


def test_one_weight_that_another_tool_has_changed_is_noticed(tmp_path, tiny, caplog):
    LiViTForImageClassification(LiViTConfig(**tiny, class_counts=COUNTS)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["classifier.weight"][1, 2] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_model(str(tmp_path)).head.settings.class_counts is None and len(warnings_of_ours(caplog)) == 1
