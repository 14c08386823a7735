"""The balanced head on image classifiers of every family: loss, gradients, probabilities, saving, layers."""

import copy
import inspect
import json
import pickle
import threading

import pytest
import torch
import transformers
from refusals import refusal
from test_trainer import train
from transformers import AutoModelForImageClassification, BeitForImageClassification, PreTrainedModel

from livt_hf import LiViTConfig, LiViTForImageClassification, LongTailConfig, balance
from livt_hf.conversion import to_beit
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.structure import extract_features, get_classifier, parameter_depths, parameters_without_decay
from livt_hf.training.optim import layer_decay_groups

COUNTS = [60, 30, 10]
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
VIT = SIZES | dict(image_size=16, patch_size=4)
TEXT = dict(text_config=SIZES | dict(vocab_size=50, bos_token_id=0, eos_token_id=1, pad_token_id=2))
SWIN = dict(image_size=32, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4)
STAGES = dict(hidden_sizes=[8, 16], depths=[1, 2])
TIMM_VIT = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4)


def of(kind: str, head: str = "ForImageClassification", **sizes):
    """Make models of a kind of transformers, whose config has these sizes."""
    model, config_kind = (getattr(transformers, f"{kind}{end}") for end in (head, "Config"))
    return lambda **config: model(config_kind(**sizes, **config))


def of_timm(architecture: str, **arguments):
    return of("TimmWrapper", architecture=architecture, model_args=arguments)


PVT = dict(num_encoder_blocks=3, patch_sizes=[4, 2, 2], strides=[4, 2, 2], sequence_reduction_ratios=[2, 2, 1])
PVT |= dict(image_size=32, hidden_sizes=[8] * 3, depths=[1, 2, 1], num_attention_heads=[1] * 3, mlp_ratios=[2] * 3)
FAMILIES = {
    "livit": lambda **config: LiViTForImageClassification(LiViTConfig(**VIT, **config)),
    "vit": of("ViT", **VIT),
    "deit": of("DeiT", **VIT),
    "beit": of("Beit", **VIT, use_relative_position_bias=True),
    "dinov2": of("Dinov2", **VIT),
    "dinov2 registers": of("Dinov2WithRegisters", **VIT),
    "siglip": of("Siglip", vision_config=VIT, **TEXT),
    "siglip2": of("Siglip2", vision_config=SIZES | dict(patch_size=4, num_patches=16), **TEXT),
    "clip": of("CLIP", vision_config=VIT, **TEXT),
    "swin": of("Swin", **SWIN),
    "convnext": of("ConvNext", **STAGES, num_stages=2),
    "convnext v2": of("ConvNextV2", **STAGES, num_stages=2),
    "resnet": of("ResNet", **STAGES, embedding_size=8),
    "pvt": of("Pvt", **PVT),
    "poolformer": of("PoolFormer", **STAGES, num_encoder_blocks=2),
    "timm vit": of_timm("vit_tiny_patch16_224", **TIMM_VIT),
    "timm dinov3": of_timm("vit_small_patch16_dinov3", **TIMM_VIT),
    "timm resnet": of_timm("resnet10t", channels=(8, 8, 16, 16)),
    "timm convnext": of_timm("convnext_atto", depths=(1, 1, 2, 1), dims=(4, 8, 8, 16)),
}
LABELS = torch.tensor([0, 1, 2, 0])


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def build(family: str, **config) -> PreTrainedModel:
    """A random model whose classifier tells images apart."""
    model = FAMILIES[family](**({"num_labels": 3} | config)).eval()
    if model.config.num_labels != config.get("num_labels", 3):
        pytest.skip(f"this version of transformers gives a {family} another number of labels than asked")
    torch.nn.init.normal_(get_classifier(model).weight)
    return model


def inputs(family: str, images: int = 4) -> dict[str, torch.Tensor]:
    if family == "siglip2":  # takes patches
        shapes = torch.full((images, 2), 4)
        mask = torch.ones(images, 16, dtype=torch.long)
        return dict(pixel_values=torch.randn(images, 16, 48), pixel_attention_mask=mask, spatial_shapes=shapes)
    size = 32 if family in ("swin", "pvt", "poolformer", "resnet", "timm resnet", "timm convnext") else 16
    return dict(pixel_values=torch.randn(images, 3, size, size))


def livit_head(**config) -> LongTailHead:
    return LongTailHead(LiViTConfig(class_counts=COUNTS, **config))


# Loss and gradients


@pytest.mark.parametrize(
    ("family", "last"), [("resnet", True), ("timm resnet", True), ("vit", False), ("livit", False)]
)
def test_convolutional_models_compute_with_channels_last(family, last):
    model, batch, seen = balance(build(family), class_counts=COUNTS), inputs(family), []
    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(lambda _, arguments, __: seen.append(arguments[0]))
    model(batch["pixel_values"])
    model(**batch)
    assert {pixels.is_contiguous(memory_format=torch.channels_last) for pixels in seen} == {last}


@pytest.mark.parametrize("loss", ["bal_bce", "bal_ce", "cb_bce", "ib"])  # biased, weighted, with features
def test_loss_and_gradients_are_those_of_the_livit_head_on_the_same_features(family, loss):
    model, batch = build(family), inputs(family)
    plain = model(**batch).logits
    assert balance(model, class_counts=COUNTS, loss=loss) is model
    outputs = model(**batch, labels=LABELS)
    torch.testing.assert_close(outputs.logits, plain)  # convolutions add up in another order
    features = extract_features(model, **batch)
    expected = livit_head(loss=loss)(get_classifier(model)(features), LABELS, features)
    torch.testing.assert_close(outputs.loss, expected)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(value, parameters, allow_unused=True) for value in (outputs.loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_soft_labels_are_the_mixture_of_the_hard_ones(family):
    model, batch = balance(build(family), class_counts=COUNTS), inputs(family)
    other = LABELS.flip(0)
    one_hot = torch.nn.functional.one_hot
    mixed = model(**batch, labels=0.7 * one_hot(LABELS, 3) + 0.3 * one_hot(other, 3)).loss
    first, second = model(**batch, labels=LABELS).loss, model(**batch, labels=other).loss
    torch.testing.assert_close(mixed, 0.7 * first + 0.3 * second)


def test_multi_hot_labels_have_the_loss_of_the_livit_head(family):
    several = dict(problem_type="multi_label_classification")
    settings = dict(class_counts=COUNTS, num_train_images=200, test_prior=None)
    own = dict(test_prior=None) if family == "livit" else {}  # its config asks for a head that fits at once
    model, batch = balance(build(family, **several, **own), **settings), inputs(family)
    labels = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    outputs = model(**batch, labels=labels)
    head = LongTailHead(LiViTConfig(**several, **settings))
    torch.testing.assert_close(outputs.loss, head(outputs.logits, labels))
    torch.testing.assert_close(model.probabilities(**batch), head.posterior(outputs.logits).detach())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_a_head_of_its_own_and_no_features_are_kept(family, copied):
    model, batch = balance(build(family), class_counts=COUNTS, loss="ib"), inputs(family)
    before = model(**batch, labels=LABELS).loss
    model(**batch)
    twin = copied(model)
    assert type(twin) is type(model) and torch.equal(twin(**batch, labels=LABELS).loss, before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    balance(twin, ib_alpha=10.0)
    assert torch.equal(model(**batch, labels=LABELS).loss, before) and model.head.features is None
    assert not torch.equal(twin(**batch, labels=LABELS).loss, before)
    assert twin.head is not model.head and twin.head.config is twin.config


@pytest.mark.parametrize("family", ["vit", "convnext", "timm vit"])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2), (2, 4)])
def test_trainer_has_the_gradients_of_one_batch_however_it_accumulates(tmp_path, family, batch_size, accumulation):
    model = balance(build(family), class_counts=COUNTS)
    looped = copy.deepcopy(model).train()
    pixels, labels = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
    gradients, _ = train(model, labels, tmp_path, batch_size, accumulation)
    looped(pixel_values=pixels[:8], labels=labels[:8]).loss.backward()
    expected = {name: p.grad for name, p in looped.named_parameters()}
    torch.testing.assert_close(gradients[0], expected, rtol=1e-3, atol=1e-5)


# Probabilities and saving


def test_saved_loaded_and_balanced_again_it_is_the_same(family, tmp_path):
    model = balance(build(family), class_counts=COUNTS, loss="bal_ce", tau=1.05, test_prior=[0.2, 0.3, 0.5])
    batch = inputs(family)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(FAMILIES[family](num_labels=3)).__name__]
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    balance(loaded)
    assert loaded.config.long_tail == model.config.long_tail
    assert torch.equal(loaded(**batch, labels=LABELS).loss, model(**batch, labels=LABELS).loss)
    for prior in (None, "uniform", [0.1, 0.1, 0.8]):
        torch.testing.assert_close(
            loaded.probabilities(**batch, prior=prior), model.probabilities(**batch, prior=prior)
        )


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_a_classifier_trained_elsewhere_gets_the_posterior_rule_without_training(family, loss):
    model, batch = balance(build(family), class_counts=COUNTS, loss=loss), inputs(family)
    logits = model(**batch).logits
    p = logits.softmax(-1) if loss == "ce" else logits.sigmoid()
    served = p * torch.tensor([0.2, 0.3, 0.5]) / torch.tensor([0.6, 0.3, 0.1])
    expected = served / served.sum(-1, keepdim=True)
    torch.testing.assert_close(model.probabilities(**batch, prior=[0.2, 0.3, 0.5]), expected.detach())


def test_a_fresh_classifier_starts_at_the_prior_and_otherwise_it_is_left_alone(family):
    model, batch = build(family), inputs(family)
    weight = get_classifier(model).weight.clone()
    balance(model, class_counts=COUNTS)
    assert torch.equal(get_classifier(model).weight, weight)
    balance(model, class_counts=COUNTS, fresh_classifier=True)
    predicted = (model(**batch).logits + model.head.logit_bias).sigmoid()
    torch.testing.assert_close(predicted, torch.tensor([[0.6, 0.3, 0.1]] * 4), atol=1e-2, rtol=0)


def test_the_published_form_of_a_livit_is_balanced_by_its_own_config(tmp_path):
    livit = FAMILIES["livit"](class_counts=COUNTS, tau=1.05).eval()
    torch.nn.init.normal_(livit.classifier.weight)
    to_beit(livit).save_pretrained(tmp_path)
    served, batch = balance(AutoModelForImageClassification.from_pretrained(tmp_path)), inputs("beit")
    assert isinstance(served, BeitForImageClassification)
    torch.testing.assert_close(served(**batch, labels=LABELS).loss, livit(**batch, labels=LABELS).loss)
    torch.testing.assert_close(served.probabilities(**batch), livit.probabilities(**batch))


def test_balancing_again_changes_the_settings_that_are_named():
    model, batch = build("vit"), inputs("vit")
    balance(model, class_counts=COUNTS, tau=2.0, loss="ib")
    balance(model, tau=0.5)
    assert model.config.long_tail == LongTailConfig(class_counts=COUNTS, loss="ib", tau=0.5)
    balance(model, class_counts=[1, 2, 3])  # other counts are no other loss: the classifier was trained with that one
    assert model.config.long_tail == LongTailConfig(class_counts=[1, 2, 3], loss="ib", tau=0.5)
    balance(model, class_counts=[1, 2, 3], fresh_classifier=True)
    assert model.config.long_tail == LongTailConfig(class_counts=[1, 2, 3])
    outputs = model(**batch, labels=LABELS)
    torch.testing.assert_close(outputs.loss, LongTailHead(model.config)(outputs.logits, LABELS))


def test_a_fresh_classifier_does_not_keep_the_calibration_of_the_old_one():
    calibration = dict(scale=5.0, odds=0.5, offsets=[2.0, -2.0, 0.0], num_images=50)
    model = balance(build("vit"), class_counts=COUNTS, tau=2.0, calibration=calibration)
    assert balance(model).config.long_tail.calibration is not None
    assert balance(model, fresh_classifier=True).config.long_tail == LongTailConfig(class_counts=COUNTS, tau=2.0)


def test_hidden_states_still_come_back_when_asked():
    model = balance(build("vit"), class_counts=COUNTS)
    assert len(model(**inputs("vit"), output_hidden_states=True).hidden_states) == 3


# What is refused


@pytest.mark.parametrize(
    ("settings", "argument", "value"),
    [
        ({}, "class_counts", "long_tail"),
        (dict(class_counts=[5, 4]), "class_counts", "2 entries for 3"),
        (dict(class_counts=COUNTS, loss="none"), "loss", "'none'"),
        (dict(class_counts=COUNTS, fresh_classifier=True, loss="typo"), "loss", "'typo'"),
        (dict(class_counts=COUNTS, los="ce"), None, "['los']"),
        (dict(class_counts=COUNTS, loss="ldam", normalised_classifier=True), "normalised_classifier", "LiViT"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_the_model_is_left_alone(settings, argument, value):
    model = build("vit")
    with refusal(argument, value):
        balance(model, **settings)
    assert type(model) is transformers.ViTForImageClassification and "long_tail" not in model.config.to_dict()
    if settings:
        before = dict(balance(model, class_counts=COUNTS).config.long_tail)
        with refusal(argument, value):
            balance(model, **settings)
        assert dict(model.config.long_tail) == before


@pytest.mark.parametrize(
    ("make", "argument", "values"),
    [
        (of("ViT", "Model", **VIT), None, ["ViTModel", "`classifier`", "missing"]),
        (of("DeiT", "ForImageClassificationWithTeacher", **VIT), None, ["WithTeacher", "`classifier`"]),
        (of("PPLCNet"), None, ["PPLCNetForImageClassification"]),
        (of_timm("deit_tiny_distilled_patch16_224", **TIMM_VIT), None, ["`timm_model.get_classifier()`", "tuple"]),
        (lambda: torch.nn.Linear(2, 2), "model", ["Linear", "timm"]),
    ],
)
def test_a_model_of_another_kind_is_refused_with_what_was_looked_for_and_left_alone(make, argument, values):
    model = make()
    with refusal(argument, *values):
        balance(model, class_counts=[5, 4])
    assert not hasattr(model, "config") or "long_tail" not in model.config.to_dict()


@pytest.mark.parametrize("family", ["vit", "swin", "resnet", "timm resnet"])
def test_labels_given_without_their_name_have_the_loss_of_the_head(family):
    model, labels = balance(build(family), COUNTS, loss="bal_ce").eval(), torch.tensor([0, 1, 2, 0])
    pixels = inputs(family)["pixel_values"]
    before = [None] * (list(inspect.signature(model.forward).parameters).index("labels") - 1)
    assert model(pixels, *before, labels).loss == model(pixels, labels=labels).loss


def test_a_model_that_computes_its_own_loss_gets_that_of_the_head():
    model = balance(of("Cvt", embed_dim=[8, 8, 8], num_heads=[1, 1, 1])(), class_counts=[5, 4])
    pixels, labels = torch.rand(3, 3, 32, 32), torch.tensor([0, 1, 1])
    for outputs in (model.eval()(pixels, labels=labels), model(pixels, labels=labels, return_dict=False)):
        loss, logits = outputs[:2] if isinstance(outputs, tuple) else (outputs.loss, outputs.logits)
        assert loss == model.head(logits, labels)


# Layers


def test_every_parameter_is_in_exactly_one_group_with_the_rate_of_its_depth(family):
    model = balance(build(family), class_counts=COUNTS)
    groups = layer_decay_groups(model, 0.05, 0.5)
    placed = [id(p) for group in groups for p in group["params"]]
    assert len(placed) == len(set(placed)) and set(placed) == {id(p) for p in model.parameters()}
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    names = {name: scales[id(p)] for name, p in model.named_parameters()}
    assert names[next(iter(names))] == min(scales.values()) < 1  # the embeddings come first
    assert all(scales[id(p)] == 1 for p in get_classifier(model).parameters())


@pytest.mark.parametrize(
    ("family", "depths"),
    [
        ("vit", {"vit.embeddings.cls_token": 0, "vit.layers.1.mlp.fc1.bias": 2, "vit.layernorm.weight": 3}),
        ("clip", {"vision_model.pre_layrnorm.weight": 0, "vision_model.post_layernorm.weight": 3}),
        ("siglip", {"vision_model.encoder.layers.0.mlp.fc1.weight": 1, "vision_model.head.probe": 3}),
        (
            "swin",
            {
                "swin.embeddings.norm.weight": 0,
                "swin.encoder.layers.0.blocks.0.mlp.fc1.weight": 1,
                "swin.encoder.layers.0.downsample.norm.weight": 2,
                "swin.encoder.layers.1.blocks.1.mlp.fc1.weight": 3,
                "swin.layernorm.weight": 4,
            },
        ),
        (
            "convnext",
            {
                "convnext.encoder.stages.0.layers.0.dwconv.weight": 1,
                "convnext.encoder.stages.1.downsampling_layer.1.weight": 2,
                "convnext.encoder.stages.1.layers.1.dwconv.weight": 3,
                "convnext.layernorm.weight": 4,
            },
        ),
        (
            "resnet",
            {
                "resnet.embedder.embedder.convolution.weight": 0,
                "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight": 1,
                "resnet.encoder.stages.1.layers.1.layer.2.convolution.weight": 3,
                "classifier.1.weight": 4,
            },
        ),
        (
            "pvt",
            {
                "pvt.encoder.patch_embeddings.0.projection.weight": 0,
                "pvt.encoder.block.0.0.mlp.dense1.weight": 1,
                "pvt.encoder.patch_embeddings.1.projection.weight": 2,
                "pvt.encoder.block.1.0.mlp.dense1.weight": 2,
                "pvt.encoder.patch_embeddings.2.cls_token": 4,
                "pvt.encoder.block.2.0.mlp.dense1.weight": 4,
                "classifier.weight": 5,
            },
        ),
        (
            "poolformer",
            {
                "poolformer.encoder.patch_embeddings.0.projection.weight": 0,
                "poolformer.encoder.patch_embeddings.1.projection.weight": 2,
                "poolformer.encoder.block.1.1.output.conv1.weight": 3,
                "classifier.weight": 4,
            },
        ),
        ("timm vit", {"timm_model.pos_embed": 0, "timm_model.blocks.1.mlp.fc1.weight": 2, "timm_model.head.bias": 3}),
    ],
)
def test_embeddings_are_layer_0_block_i_is_layer_i_plus_1_and_the_rest_is_last(family, depths):
    found = parameter_depths(build(family))
    assert {name: found[name] for name in depths} == depths
    assert max(found.values()) == max(depths.values())


def test_a_model_of_timm_that_does_not_say_how_it_is_layered_is_counted():
    found = parameter_depths(of_timm("poolformer_s12")(num_labels=3))  # stages of 2, 2, 6 and 2 blocks
    depths = {"stem.conv.weight": 0, "stages.0.blocks.1.mlp.fc1.weight": 2, "stages.1.downsample.conv.weight": 3}
    depths |= {"stages.2.blocks.0.mlp.fc1.weight": 5, "head.fc.weight": 13}
    assert {name: found[f"timm_model.{name}"] for name in depths} == depths
    with refusal("layer_decay", "Linear", "layer_decay 1"):
        parameter_depths(torch.nn.Linear(2, 2))


def test_tokens_positions_norms_and_biases_are_not_decayed_and_matrices_are(family):
    model = build(family)
    free = parameters_without_decay(model)
    words = ("token", "position", "pos_embed", "embedding.weight", "bias", "norm", "gamma", "probe", "grn", "lambda")
    for name, parameter in model.named_parameters():
        if "patch_embed" in name and name.endswith("weight"):
            assert (name in free) == (parameter.ndim == 1), name
        elif parameter.ndim <= 1 or any(word in name for word in words):
            assert name in free, name
        else:
            assert name not in free, name


def test_pooled_features_are_what_the_classifier_turns_into_logits(family):
    model, batch = build(family), inputs(family)
    torch.testing.assert_close(get_classifier(model)(extract_features(model, **batch)), model(**batch).logits)
    assert not get_classifier(model)._forward_pre_hooks


def test_features_are_those_of_the_own_thread_while_another_uses_the_model():
    model, batch = build("resnet"), inputs("resnet")
    alone = extract_features(model, **batch)

    def meanwhile(_, arguments):  # a second visitor, whose pass ends first
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: model(**{name: value[:1] for name, value in batch.items()}))
            other.start()
            other.join()

    hook = model.register_forward_pre_hook(meanwhile)
    torch.testing.assert_close(extract_features(model, **batch), alone)
    hook.remove()
