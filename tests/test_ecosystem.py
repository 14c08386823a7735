"""LiViT and `balance` in other people's hands: Trainer, accelerate, torch.func, peft, scripts of transformers."""

import json

import pytest
import torch
from accelerate import init_empty_weights
from refusals import refusal
from test_stale import warnings_of_ours
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTModel, LongTailConfig, balance

COUNTS = [60, 30, 10]
IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 3


@pytest.fixture
def model(tiny):
    return LiViTForImageClassification(LiViTConfig(**tiny, class_counts=COUNTS)).eval()


def stock_vit(tiny) -> ViTForImageClassification:
    return ViTForImageClassification(ViTConfig(**tiny, num_labels=3))


def fit(model, folder, **options) -> float:
    """Train two steps and return the first loss."""
    options |= dict(max_steps=2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
    data = [{"pixel_values": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    trainer = Trainer(model, TrainingArguments(folder, **options), train_dataset=data)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("kind", ["livit", "balanced"])
def test_trainer_s_own_label_smoothing_is_noticed_once_and_ours_is_not(tmp_path, tiny, model, kind, caplog):
    model = model if kind == "livit" else balance(stock_vit(tiny), COUNTS)
    fit(model, tmp_path, label_smoothing_factor=0.1)
    (record,) = warnings_of_ours(caplog)
    assert "label_smoothing_factor" in record.getMessage()
    caplog.clear()
    smoothed = balance(model, label_smoothing=0.1)
    smoothed.head.warns_without_labels = True
    fit(smoothed, tmp_path)
    assert not warnings_of_ours(caplog)


def test_features_in_evaluation_mode_need_no_labels(model, caplog):
    model(IMAGES)
    with torch.no_grad():
        model.train()(IMAGES)
    assert not warnings_of_ours(caplog)


def test_a_model_is_made_of_a_config_and_a_state_dict_alone(model):
    copied = LiViTForImageClassification.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(copied.eval()(IMAGES).logits, model(IMAGES).logits)


def test_entries_of_a_config_that_we_do_not_know_and_the_dtype_survive(model, tmp_path):
    entry = {"quantization_config": {"quant_method": "torchao"}}
    assert LiViTConfig(**model.config.to_dict() | entry).to_dict().items() >= entry.items()
    model.config.my_note = "field trip"
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = LiViTForImageClassification.from_pretrained(tmp_path)
    assert (loaded.config.my_note, loaded.dtype, loaded.config.dtype) == ("field trip", torch.bfloat16, torch.bfloat16)
    loaded.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (saved["my_note"], saved["dtype"]) == ("field trip", "bfloat16")


def test_an_int8_model_of_torchao_loads_again(model, tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    model.save_pretrained(tmp_path / "float")
    settings = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    quantised = LiViTForImageClassification.from_pretrained(tmp_path / "float", quantization_config=settings)
    quantised.save_pretrained(tmp_path / "int8")
    again = LiViTForImageClassification.from_pretrained(tmp_path / "int8")
    assert torch.equal(again(IMAGES).logits, quantised(IMAGES).logits)


@pytest.mark.parametrize(
    "settings", [{}, {"class_counts": COUNTS}, {"class_counts": COUNTS, "test_prior": [0.5, 0.3, 0.2]}]
)
def test_configs_and_models_are_built_without_memory(tiny, settings):
    with torch.device("meta"):
        models = [LiViTForImageClassification(LiViTConfig(**tiny, num_labels=3, **settings))]
    with init_empty_weights(include_buffers=True):
        models.append(LiViTForImageClassification(LiViTConfig(**tiny, num_labels=3, **settings)))
    for model in models:
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(
    ("change", "argument", "value"),
    [
        (dict(num_labels=5), "class_counts", "3 entries for 5"),
        (dict(num_labels=1), "num_labels", "is 1"),
        (dict(problem_type="regression"), "problem_type", "'regression'"),
        (dict(problem_type="multi_label_classification"), "test_prior", "'uniform'"),
    ],
)
def test_a_config_that_was_changed_after_it_was_made_is_checked_by_the_model(tiny, change, argument, value):
    livit, stock = LiViTConfig(**tiny, class_counts=COUNTS), stock_vit(tiny)
    for name, changed in change.items():
        setattr(livit, name, changed)
        setattr(stock.config, name, changed)
    with refusal(argument, value):
        LiViTForImageClassification(livit)
    if "num_labels" not in change:  # a stock model has its classifier already
        with refusal(argument):
            balance(stock, COUNTS)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_tokens_that_are_masked_from_attention_change_nothing(tiny, pooling):
    model = LiViTModel(LiViTConfig(**tiny, pooling=pooling)).eval()
    mask = torch.ones(8, 17, dtype=torch.long)
    features = model(IMAGES).pooler_output
    torch.testing.assert_close(model(IMAGES, attention_mask=mask).pooler_output, features)
    mask[:, -4:] = 0  # the last row of 4 patches
    painted = IMAGES.clone()
    painted[:, :, -4:] = 5
    masked = [model(images, attention_mask=mask).pooler_output for images in (IMAGES, painted)]
    torch.testing.assert_close(masked[0], masked[1])
    assert not torch.allclose(masked[0], features)
    with refusal(None, "attention_mask", "(8, 8)"):
        model(IMAGES, attention_mask=torch.ones(8, 8))


@pytest.mark.parametrize("labels", [LABELS, torch.eye(3)[LABELS]])
def test_vmap_gives_the_gradients_of_single_images(model, labels):
    parameters = dict(model.named_parameters())

    def loss(parameters, image, label):
        arguments = dict(pixel_values=image[None], labels=label[None])
        return torch.func.functional_call(model, parameters, kwargs=arguments).loss

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, IMAGES, labels)
    alone = torch.func.grad(loss)(parameters, IMAGES[3], labels[3])
    for name in ("classifier.weight", "vit.embeddings.cls_token"):
        torch.testing.assert_close(together[name][3], alone[name])


def test_a_folder_with_an_adapter_alone_is_called_that(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with refusal(None, "adapter", "merge_and_unload"):
        LiViTForImageClassification.from_pretrained(tmp_path)


def test_new_labels_without_counts_are_told_of_the_loss_that_needs_none(model, tmp_path):
    """What transformers' run_image_classification.py does: it knows label names only."""
    model.save_pretrained(tmp_path)
    names = dict(id2label={0: "oak", 1: "elm"}, label2id={"oak": 0, "elm": 1})
    other = LiViTForImageClassification.from_pretrained(tmp_path, **names, ignore_mismatched_sizes=True)
    with refusal(None, "class_counts", "loss='ce'"):
        other(IMAGES, labels=LABELS % 2)
    other = LiViTForImageClassification.from_pretrained(tmp_path, **names, loss="ce")
    assert other(IMAGES, labels=LABELS % 2).loss > 0
    assert other.config.long_tail == LongTailConfig(loss="ce")


@pytest.mark.parametrize("size", [(18, 18), (19, 16), (16, 19)])
def test_a_margin_around_whole_patches_is_cropped(model, size):
    """A processor with a margin gives 36 pixels for 32 to whoever reads its shortest edge only."""
    sides = [part // 2 for side in reversed(size) for part in (side - 16, side - 15)]
    margin = torch.nn.functional.pad(IMAGES, sides)
    assert margin.shape[-2:] == size
    assert torch.equal(model(margin).logits, model(IMAGES).logits)
