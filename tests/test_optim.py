"""Learning rates by batch, by depth and by update."""

import math

import pytest
import torch
from transformers import SwinConfig, SwinForImageClassification

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, balance, pretraining_config
from livt_hf.training.optim import layer_decay_groups, scale_lr, set_lr, split_muon_groups, warmup_cosine


@pytest.fixture
def twelve_layers(tiny):
    return LiViTForImageClassification(LiViTConfig(**(tiny | dict(num_hidden_layers=12)), class_counts=[9, 3, 1]))


def by_parameter(model, groups) -> dict[str, dict]:
    """Name -> its group; fails if a parameter is in two."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    placed = [(names[id(parameter)], group) for group in groups for parameter in group["params"]]
    assert len(placed) == len({name for name, _ in placed})
    return dict(placed)


def expected_exponent(name: str) -> int:
    """decay^(13 - id): embeddings have id 0, block i has i + 1, the rest 13."""
    if name.startswith("vit.embeddings."):
        return 13
    if name.startswith("vit.layers."):
        return 12 - int(name.split(".")[2])
    assert name.split(".")[-2] in ("fc_norm", "classifier")
    return 0


def test_rates_and_weight_decays_of_twelve_layers_for_every_parameter(twelve_layers, tiny):
    found = layer_decay_groups(twelve_layers, 0.05, 0.75)
    groups, parameters = by_parameter(twelve_layers, found), dict(twelve_layers.named_parameters())
    assert set(groups) == set(parameters) and len(found) == 28
    for name, group in groups.items():
        free = parameters[name].ndim == 1 or name.endswith(("cls_token", "position_embeddings"))
        assert group["weight_decay"] == (0.0 if free else 0.05), name
        assert group["lr_scale"] == pytest.approx(0.75 ** expected_exponent(name)), name
    assert groups["vit.layers.0.mlp.fc1.weight"]["lr_scale"] == pytest.approx(0.03167635)
    assert groups["vit.embeddings.cls_token"]["lr_scale"] == pytest.approx(0.02375726)
    twelve_layers.vit.embeddings.requires_grad_(False)  # frozen parameters are in no group
    groups = by_parameter(twelve_layers, layer_decay_groups(twelve_layers, 0.05, 0.75))
    assert set(groups) == {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert groups["classifier.weight"]["lr_scale"] == 1
    pooled = LiViTForImageClassification(LiViTConfig(**tiny, num_labels=3, pooling="cls"))
    assert by_parameter(pooled, layer_decay_groups(pooled, 0.05, 0.75))["vit.layernorm.weight"]["lr_scale"] == 1


@pytest.mark.parametrize("decay", [1.0, 0.75])
def test_muon_moves_the_matrices_of_the_blocks_and_nadamw_vectors_tables_and_what_follows_the_blocks(tiny, decay):
    swin = SwinConfig(image_size=32, embed_dim=16, depths=[1, 2], num_heads=[4, 4], window_size=4, num_labels=3)
    for model in (
        LiViTForImageClassification(LiViTConfig(**tiny, class_counts=[9, 3, 1])),
        balance(SwinForImageClassification(swin), class_counts=[9, 3, 1]),  # its tables are 49 x 4
    ):
        groups = by_parameter(model, split_muon_groups(model, layer_decay_groups(model, 0.05, decay)))
        matrices = {name for name, p in model.named_parameters() if p.ndim > 1 and "position" not in name}
        matrices -= {"vit.embeddings.cls_token", "classifier.weight"}
        assert {name for name, group in groups.items() if not group["use_fallback"]} == matrices


def test_pretraining_decays_weights_but_neither_vectors_nor_frozen_tables(tiny):
    sizes = tiny | dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
    model = LiViTForPreTraining(pretraining_config("micro", **sizes, decoder_intermediate_size=32))
    groups = by_parameter(model, layer_decay_groups(model, 0.05))
    assert not any("pos" in name and "embed" in name and "patch" not in name for name in groups)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert groups[name]["weight_decay"] == (0.0 if parameter.ndim == 1 else 0.05), name
            assert groups[name]["lr_scale"] == 1


def test_the_rate_scales_with_the_batch_over_256():
    assert scale_lr(1.5e-4, 4096) == pytest.approx(2.4e-3)
    assert scale_lr(1e-3, 64) == pytest.approx(2.5e-4)


def test_the_schedule_at_chosen_updates():
    def rate(step):
        return warmup_cosine(step, warmup=10, total=110, peak=2.0, floor=0.5)

    assert [rate(step) for step in (0, 1, 5, 10)] == pytest.approx([0.0, 0.2, 1.0, 2.0])
    assert rate(35) == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert [rate(step) for step in (60, 110, 500)] == pytest.approx([1.25, 0.5, 0.5])
    assert warmup_cosine(0, warmup=0, total=10, peak=2.0, floor=0.0) == 2.0
    assert warmup_cosine(10, warmup=10, total=10, peak=2.0, floor=0.0) == 2.0


def test_peak_and_floor_are_scaled_in_every_group(twelve_layers):
    optimizer = torch.optim.AdamW(layer_decay_groups(twelve_layers, 0.05, 0.75), lr=1.0)
    for unscaled in (1.0, 2.0, 0.5):
        set_lr(optimizer, unscaled)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(unscaled * group["lr_scale"])
    assert min(group["lr"] for group in optimizer.param_groups) == pytest.approx(0.5 * 0.75**13)
