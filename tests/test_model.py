"""LiViT as a transformers model: forward, loss, loading from every start, saving, serving."""

import json
import math

import pytest
import torch
from PIL import Image
from recipe_runs import Trap
from refusals import refusal
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTMAEForPreTraining,
    ViTModel,
    pipeline,
)

from livt_hf import (
    LiViTConfig,
    LiViTForImageClassification,
    LiViTForPreTraining,
    LiViTModel,
    LongTailConfig,
    pretraining_config,
)
from livt_hf.conversion import to_beit

COUNTS = [60, 30, 10]


READERS = pytest.mark.parametrize("reader", [LiViTForImageClassification, AutoModelForImageClassification])


@pytest.fixture
def build(tiny):
    def build(**config) -> LiViTForImageClassification:
        return LiViTForImageClassification(LiViTConfig(**(tiny | dict(class_counts=COUNTS) | config))).eval()

    return build


@pytest.fixture
def mgp(tiny, tmp_path):
    """A saved pretraining checkpoint."""
    decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
    config = pretraining_config("micro", **tiny, **decoder, decoder_intermediate_size=32)
    model = LiViTForPreTraining(config)
    with torch.no_grad():
        model.vit.layernorm.weight.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path / "mgp")
    return tmp_path / "mgp"


def pixels(images=4, size=16) -> torch.Tensor:
    return torch.randn(images, 3, size, size)


def shared_and_new(model: LiViTForImageClassification, source: torch.nn.Module) -> tuple[set[str], set[str]]:
    """Names of parameters that equal the source encoder's, and of those the source does not have."""
    theirs = source.state_dict()
    shared, new = set(), set()
    for name, value in model.state_dict().items():
        if name in theirs and torch.equal(value, theirs[name]):
            shared.add(name)
        else:
            new.add(name)
    return shared, new


# Forward


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_features_are_the_normed_patch_mean_or_the_normed_class_token(build, pooling):
    model = build(pooling=pooling)
    x = pixels()
    outputs = model.vit(x, output_hidden_states=True)
    tokens = outputs.hidden_states[-1]
    if pooling == "mean":
        expected = model.vit.fc_norm(tokens[:, 1:].mean(1))
    else:
        expected = model.vit.layernorm(tokens)[:, 0]
    assert torch.equal(outputs.pooler_output, expected)
    assert torch.equal(model(x).logits, model.classifier(expected))


def test_cls_pooling_is_stock_vit_for_image_classification(build, tiny):
    model = build(pooling="cls", loss="ce")
    stock = ViTForImageClassification(ViTConfig(**tiny, num_labels=3, layer_norm_eps=1e-6)).eval()
    stock.load_state_dict(model.state_dict())
    x, labels = pixels(), torch.tensor([0, 1, 2, 1])
    ours, theirs = model(x, labels=labels), stock(x, labels=labels)
    torch.testing.assert_close(ours.logits, theirs.logits)
    torch.testing.assert_close(ours.loss, theirs.loss)


def test_sdpa_and_eager_agree(build):
    model, x = build(), pixels()
    model.set_attn_implementation("sdpa")
    fused = model(x).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(x).logits, fused, atol=1e-6, rtol=1e-4)


def test_hidden_states_and_attentions_come_back_when_asked(build):
    model = build(attn_implementation="eager")
    outputs = model(pixels(), output_hidden_states=True, output_attentions=True)
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(4, 17, 32)] * 3
    assert [tuple(attention.shape) for attention in outputs.attentions] == [(4, 4, 17, 17)] * 2
    torch.testing.assert_close(outputs.attentions[0].sum(-1), torch.ones(4, 4, 17))
    plain = model(pixels())
    assert plain.hidden_states is None and plain.attentions is None


def test_logits_never_contain_the_bias(build):
    x = pixels()
    balanced = build()
    plain = build(loss="ce")
    plain.load_state_dict(balanced.state_dict())
    assert torch.equal(balanced(x).logits, plain(x).logits)


@pytest.mark.parametrize("size", [(16, 16), (32, 32), (16, 24)])
def test_any_resolution_of_whole_patches_is_accepted(build, size):
    assert build()(torch.randn(2, 3, *size)).logits.shape == (2, 3)


def test_pixels_of_another_shape_are_refused(build):
    assert build(num_channels=1)(torch.zeros(2, 1, 16, 16)).logits.shape == (2, 3)
    for shape, named in (((2, 1, 16, 16), (2, 1, 16, 16)), ((3, 16, 16), (3, 16, 16)), ((2, 3, 3, 16), "3x16 pixels")):
        with refusal(None, named):
            build()(torch.zeros(shape))


# Labels


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (torch.tensor([0, 1, 2, 3]), "0 to 3"),
        (torch.tensor([0, -1, 2, 1]), "-1 to 2"),
        (torch.tensor([0, 1]), "(2,)"),
        (torch.tensor([0]), "(1,)"),
        (torch.full((1, 3), 1 / 3), "(1, 3)"),
        (torch.full((4, 5), 0.2), "(4, 5)"),
        (torch.zeros(4), "torch.float32"),
        (torch.tensor([[0.5, float("nan"), 0.5]] * 4), "NaN"),
        (torch.tensor([[1.5, -0.5, 0.0]] * 4), "outside"),
        (torch.tensor([[1, 1, 0]] * 4), "problem_type"),
    ],
)
@pytest.mark.parametrize("loss", ["bal_bce", "bal_ce"])
def test_wrong_labels_are_refused_by_their_values(build, loss, labels, named):
    with refusal(None, named):
        build(loss=loss)(pixels(), labels=labels)


def test_multi_label_models_take_multi_hot_labels_and_refuse_ids(build):
    model = build(problem_type="multi_label_classification", test_prior=None, num_train_images=100, loss="bal_bce")
    x, labels = pixels(), torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    shifted = model(x).logits + torch.tensor([math.log(60 / 40), math.log(30 / 70), math.log(10 / 90)])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(shifted, labels.float(), reduction="none")
    torch.testing.assert_close(model(x, labels=labels).loss, expected.sum(-1).mean())
    with refusal(None, "multi-hot", (4, 3)):
        model(x, labels=torch.tensor([0, 1, 2, 0]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_class_ids_may_be_any_integers(build, dtype):
    model, x = build(), pixels()
    expected = model(x, labels=torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]])).loss
    torch.testing.assert_close(model(x, labels=torch.tensor([0, 1, 2, 0], dtype=dtype)).loss, expected)


# The start of the head and what follows from it


def test_the_classifier_starts_at_the_prior_that_its_sigmoid_loss_means_and_at_zero_otherwise(build):
    uniform, training = torch.full((3,), -math.log(2)), torch.logit(torch.tensor([0.6, 0.3, 0.1]))
    losses = {"bal_bce": uniform, "bal_nt_bce": uniform, "bce": training, "cb_bce": training, "nt_bce": training}
    for loss, start in losses.items():
        torch.testing.assert_close(build(loss=loss).classifier.bias.data, start)
        assert not build(loss=loss, head_start="zero").classifier.bias.any()
    for loss in ("ce", "bal_ce", "ldam"):
        assert not build(loss=loss).classifier.bias.any()
    prior = [0.2, 0.3, 0.5]
    torch.testing.assert_close(build(test_prior=prior).classifier.bias.data, torch.logit(torch.tensor(prior)))


@pytest.mark.parametrize("loss", ["bce", "bal_bce", "nt_bce", "bal_nt_bce"])
@pytest.mark.parametrize(("several", "test_prior"), [(False, None), (True, None), (False, "uniform")])
def test_a_fresh_sigmoid_model_predicts_the_training_prior(build, loss, several, test_prior):
    config = dict(loss=loss, test_prior=test_prior)
    if several:
        config |= dict(problem_type="multi_label_classification", num_train_images=200)
    model = build(**config)
    predicted = (model(pixels()).logits + model.head.logit_bias).sigmoid()
    frequency = torch.tensor([0.3, 0.15, 0.05] if several else [0.6, 0.3, 0.1])
    torch.testing.assert_close(predicted, frequency.expand(4, 3), atol=1e-3, rtol=0)
    assert not build(**config, head_start="zero").classifier.bias.any()


def test_probabilities_apply_the_posterior_rule_to_the_logits(build):
    model, x = build(), pixels()
    with torch.no_grad():
        model.classifier.weight.normal_()
    p = (model(x).logits + model.head.logit_bias).sigmoid()
    for prior in ([0.1, 0.1, 0.8], [1 / 3] * 3):
        unnormalised = p * torch.tensor(prior) / torch.tensor([0.6, 0.3, 0.1])
        expected = unnormalised / unnormalised.sum(-1, keepdim=True)
        torch.testing.assert_close(model.probabilities(x, prior=prior), expected.detach())
    assert torch.equal(model.probabilities(x), model.probabilities(x, prior="uniform"))
    with refusal(None, 1.5):
        model.probabilities(x, prior=[0.5, 0.5, 0.5])


# The normalised classifier


def test_a_normalised_classifier_gives_cosines_and_survives_saving(build, tmp_path):
    model, x = build(loss="ldam", normalised_classifier=True), pixels()
    features = model.vit(x).pooler_output
    cosines = torch.nn.functional.cosine_similarity(features[:, None], model.classifier.weight[None], dim=-1)
    torch.testing.assert_close(model(x).logits, cosines)
    torch.testing.assert_close(model.classifier.weight.norm(dim=-1), torch.ones(3), atol=0.5, rtol=0)
    model.save_pretrained(tmp_path)
    loaded = LiViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded(x).logits, model(x).logits)
    labels = torch.tensor([0, 1, 2, 0])
    assert torch.equal(loaded(x, labels=labels).loss, model(x, labels=labels).loss)


def test_a_normalised_classifier_over_a_linear_one_is_new(build, tmp_path):
    first = build()
    first.save_pretrained(tmp_path)
    second = LiViTForImageClassification.from_pretrained(tmp_path, normalised_classifier=True, loss="ldam")
    assert shared_and_new(second, first)[1] == {"classifier.weight"} and second.classifier.bias is None


# Stochastic depth, checkpointing, precision, compilation


def test_drop_path_rates_rise_linearly_from_zero(build):
    model = build(num_hidden_layers=5, drop_path_rate=0.2)
    rates = [layer.drop_path for layer in model.vit.layers]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])


def test_drop_path_acts_in_training_only(build):
    model, x = build(drop_path_rate=0.9), pixels(32)
    assert torch.equal(model(x).logits, model(x).logits)
    tokens = [model.train().vit(x).last_hidden_state for _ in range(2)]
    assert not torch.equal(*tokens)


def test_drop_path_drops_the_whole_branch_of_an_image_and_rescales_the_others(build):
    layer = build(drop_path_rate=0.5).train().vit.layers[-1]
    added = layer._add_branch(torch.ones_like, torch.zeros(1000, 17, 32))
    kept = added[:, 0, 0]
    assert torch.equal(added, kept[:, None, None].expand_as(added))
    assert set(kept.tolist()) == {0.0, 2.0} and 400 < (kept == 0).sum() < 600


def test_an_image_whose_branch_is_dropped_is_not_computed_and_nothing_else_changes(build, monkeypatch):
    """For the same draws: skipped on a CPU, multiplied by zero where a graph is compiled. One image: none may stay."""
    model, labels = build(drop_path_rate=0.8).train(), torch.tensor([0, 1, 2, 0, 1, 2])
    for images in (1, 6):
        x, answers = pixels(images), []
        for compiling in (False, True):
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=compiling: answer)
            torch.manual_seed(1)
            model.zero_grad()
            loss = model(x, labels=labels[:images]).loss
            loss.backward()
            answers.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        torch.testing.assert_close(*answers)
    computed = []
    model.vit.layers[-1].mlp.register_forward_hook(lambda _m, inputs, _o: computed.append(len(inputs[0])))
    monkeypatch.undo()
    model(pixels(500))
    assert 70 < computed[0] < 130  # a fifth of them


# Patches that are left out


def test_a_model_that_keeps_all_patches_sees_the_image(build):
    model, x = build(), pixels()
    every = torch.arange(model.config.num_patches).expand(len(x), -1)
    assert torch.equal(model(x, kept=every).logits, model(x).logits)
    torch.testing.assert_close(model(x, kept=every.flip(1)).logits, model(x).logits)  # positions came first


def test_patches_that_are_not_kept_are_not_seen(build):
    model, x = build(), pixels(1)
    kept = torch.tensor([[0, 5, 6]])
    changed = x.clone()
    changed[..., -4:, -4:] += 1  # the last patch
    assert torch.equal(model(x, kept=kept).logits, model(changed, kept=kept).logits)
    assert not torch.equal(model(x).logits, model(changed).logits)


def test_gradient_checkpointing_gives_the_same_gradients(build):
    model, x, labels = build(drop_path_rate=0.5), pixels(), torch.tensor([0, 1, 2, 0])
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(3)
        model.train()(x, labels=labels).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_bfloat16_model_keeps_the_head_s_constants_in_float32(build, tmp_path):
    build(class_counts=[10_000_000, 1000, 1]).save_pretrained(tmp_path)
    exact = build(class_counts=[10_000_000, 1000, 1]).head.logit_bias
    model = LiViTForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and torch.equal(model.head.logit_bias, exact)
    logits = torch.zeros(3, 3, dtype=torch.bfloat16)
    assert torch.isfinite(model.head(logits, torch.tensor([0, 1, 2]), logits))


@pytest.mark.slow
def test_the_model_compiles_without_graph_breaks_to_the_same_loss(build):
    model, x, labels = build(), pixels(), torch.tensor([0, 1, 2, 0])
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x, labels=labels).loss, model(x, labels=labels).loss)


# The hand-over


def test_mean_pooling_after_pretraining_has_exactly_fc_norm_and_classifier_new(mgp):
    model = LiViTForImageClassification.from_pretrained(mgp, class_counts=COUNTS)
    shared, new = shared_and_new(model, LiViTForPreTraining.from_pretrained(mgp))
    assert new == {"vit.fc_norm.weight", "vit.fc_norm.bias", "classifier.weight", "classifier.bias"}
    assert len(shared) == 4 + 2 * 16
    assert (model.vit.fc_norm.weight == 1).all() and not model.vit.fc_norm.bias.any()
    torch.testing.assert_close(model.classifier.bias.data, torch.full((3,), -math.log(2)))
    assert model.classifier.weight.abs().max() < 1e-3 and model.classifier.weight.any()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training and model.config.layer_norm_eps == 1e-6
    model = LiViTForImageClassification.from_pretrained(mgp, class_counts=COUNTS, pooling="cls")
    _, new = shared_and_new(model, LiViTForPreTraining.from_pretrained(mgp))  # MAE's final norm is kept
    assert new == {"classifier.weight", "classifier.bias"}


def test_a_pretraining_loaded_without_a_word_about_classes_warns_of_its_two_untrained_ones(mgp, caplog):
    assert LiViTForImageClassification.from_pretrained(mgp).config.num_labels == 2
    assert "has no classifier, so this one has two untrained classes" in caplog.text
    caplog.clear()
    LiViTForImageClassification.from_pretrained(mgp, class_counts=COUNTS)
    LiViTForImageClassification.from_pretrained(mgp, num_labels=5)
    assert caplog.text == ""


def test_the_encoder_gives_the_tokens_of_the_pretraining_encoder(mgp):
    source = LiViTForPreTraining.from_pretrained(mgp).eval()
    source.config.mask_ratio = 0.0  # only to look at the encoder: the loss would be 0 / 0
    encoder = LiViTModel.from_pretrained(mgp, pooling="cls")
    x = pixels()
    noise = torch.arange(16.0).expand(4, -1)  # keeps the order of the patches
    expected = source.vit(x, noise=noise).last_hidden_state
    torch.testing.assert_close(encoder(x).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


def test_positions_are_resized_as_forward_would_interpolate_them_and_saved_so(mgp, tmp_path):
    native = LiViTForImageClassification.from_pretrained(mgp, class_counts=COUNTS)
    resized = LiViTForImageClassification.from_pretrained(mgp, class_counts=COUNTS, image_size=32)
    assert resized.config.image_size == 32 and resized.config.num_patches == 64
    assert resized.vit.embeddings.position_embeddings.shape == (1, 65, 32)
    assert resized.vit.embeddings.position_embeddings.requires_grad
    assert resized.vit.config is resized.config
    x = pixels(size=32)
    torch.testing.assert_close(resized.vit(x).pooler_output, native.vit(x).pooler_output)
    resized.save_pretrained(tmp_path / "resized")
    loaded = LiViTForImageClassification.from_pretrained(tmp_path / "resized")
    assert torch.equal(loaded(x).logits, resized(x).logits)


@READERS
def test_an_attention_implementation_and_a_dtype_survive_however_they_are_asked_for(build, mgp, tmp_path, reader):
    build().save_pretrained(tmp_path)
    config = LiViTConfig.from_pretrained(tmp_path, attn_implementation="eager")
    for model in (
        reader.from_pretrained(tmp_path, config=config),
        reader.from_pretrained(tmp_path, attn_implementation="eager"),
        LiViTForImageClassification.from_pretrained(mgp, class_counts=COUNTS, attn_implementation="eager"),
    ):
        assert model.config._attn_implementation == model.vit.config._attn_implementation == "eager"
        assert model.vit.layers[0].attention.config._attn_implementation == "eager"
    assert reader.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    model = LiViTForImageClassification.from_pretrained(mgp, class_counts=COUNTS, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.head.logit_bias.dtype == torch.float32


@READERS
def test_another_label_set_makes_only_the_classifier_new(build, tmp_path, reader):
    first = build()
    first.save_pretrained(tmp_path)
    second, info = reader.from_pretrained(tmp_path, class_counts=[9, 8, 7, 6], output_loading_info=True)
    _, new = shared_and_new(second, first)
    assert new == info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert second.config.long_tail.class_counts == [9, 8, 7, 6] and second.config.long_tail.num_images == 30
    torch.testing.assert_close(second.classifier.bias.data, torch.full((4,), -math.log(3)))


@READERS
@pytest.mark.parametrize(
    ("asked", "names", "counts"),
    [
        (dict(num_labels=5), [f"LABEL_{i}" for i in range(5)], None),
        (dict(id2label={0: "oak", 1: "elm"}, label2id={"oak": 0, "elm": 1}), ["oak", "elm"], None),
        (dict(id2label={0: "oak", 1: "elm", 2: "ash"}, class_counts=[3, 2, 1]), ["oak", "elm", "ash"], [3, 2, 1]),
    ],
)
def test_other_labels_forget_the_old_ones_and_their_counts(build, tmp_path, reader, asked, names, counts):
    first = build()
    first.classifier.bias.data.normal_()
    first.save_pretrained(tmp_path)
    second = reader.from_pretrained(tmp_path, **asked)
    _, new = shared_and_new(second, first)
    assert new == {"classifier.weight", "classifier.bias"}
    assert second.config.id2label == dict(enumerate(names)) and second.config.long_tail.class_counts == counts


@READERS
def test_other_names_or_counts_of_the_same_labels_keep_the_classifier(build, tmp_path, reader, caplog):
    first = build(loss="ce")
    first.save_pretrained(tmp_path)
    second = reader.from_pretrained(tmp_path, id2label={0: "oak", 1: "elm", 2: "ash"})
    assert shared_and_new(second, first)[1] == set() and not caplog.records
    assert second.config.label2id == {"oak": 0, "elm": 1, "ash": 2}
    assert second.config.long_tail == first.config.long_tail and second.config.long_tail.class_counts == COUNTS
    third = reader.from_pretrained(tmp_path, class_counts=[1, 2, 3], loss="bal_bce", tau=0.5)
    assert shared_and_new(third, first)[1] == set()
    assert third.config.long_tail == LongTailConfig(class_counts=[1, 2, 3], loss="bal_bce", tau=0.5)


@pytest.mark.parametrize("names", [["oak", "elm"], ["elm", "oak", "ash"]])
def test_another_number_or_order_of_labels_is_warned_about(build, tmp_path, caplog, names):
    first = build(id2label={0: "oak", 1: "elm", 2: "ash"})
    first.save_pretrained(tmp_path)
    second = LiViTForImageClassification.from_pretrained(tmp_path, id2label=dict(enumerate(names)))
    assert "classifier.weight" in shared_and_new(second, first)[1]
    (record,) = caplog.records
    assert f"3 labels; the one of these {len(names)} labels is new" in record.getMessage()


@pytest.mark.parametrize(("before", "after", "norm"), [("mean", "cls", "layernorm"), ("cls", "mean", "fc_norm")])
def test_another_pooling_makes_its_norm_and_the_classifier_new(build, tmp_path, before, after, norm):
    first = build(pooling=before)
    with torch.no_grad():
        first.classifier.weight.normal_()
    first.save_pretrained(tmp_path)
    second = LiViTForImageClassification.from_pretrained(tmp_path, pooling=after)
    _, new = shared_and_new(second, first)
    assert new == {f"vit.{norm}.weight", f"vit.{norm}.bias", "classifier.weight"}  # the bias starts where it started


def test_the_encoder_alone_loads_from_a_classifier_and_starts_another_one(build, tmp_path):
    model, x = build(), pixels()
    model.save_pretrained(tmp_path)
    encoder = LiViTModel.from_pretrained(tmp_path)
    encoder.save_pretrained(tmp_path / "encoder")
    again = LiViTForImageClassification.from_pretrained(tmp_path / "encoder", class_counts=COUNTS)
    for loaded in (encoder, again.vit):
        assert torch.equal(loaded(x).pooler_output, model.vit(x).pooler_output)


@pytest.mark.parametrize("kind", ["vit", "vit classifier", "vit mae"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_stock_checkpoints_are_starts_too(tiny, tmp_path, kind, pooling):
    if kind == "vit mae":
        stock = LiViTForPreTraining(pretraining_config("micro", **tiny))
        theirs = ViTMAEForPreTraining(stock.config)
        theirs.load_state_dict(stock.state_dict())
        theirs.save_pretrained(tmp_path)
    elif kind == "vit":
        stock = ViTModel(ViTConfig(**tiny))
        stock.save_pretrained(tmp_path)
    else:
        stock = ViTForImageClassification(ViTConfig(**tiny, num_labels=7))
        stock.save_pretrained(tmp_path)
    model = LiViTForImageClassification.from_pretrained(tmp_path, class_counts=COUNTS, pooling=pooling)
    encoder = stock if kind == "vit" else stock.vit
    for name, value in model.vit.state_dict().items():
        if not name.startswith("fc_norm"):
            assert torch.equal(value, encoder.state_dict()[name]), name
    assert model.config.num_labels == 3 and model.config.layer_norm_eps == encoder.config.layer_norm_eps


def old_names(key: str) -> str:
    for new, old in (
        (r"layers.", "encoder.layer."),
        ("attention.q_proj", "attention.attention.query"),
        ("attention.k_proj", "attention.attention.key"),
        ("attention.v_proj", "attention.attention.value"),
        ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
    ):
        key = key.replace(new, old)
    return key


def test_key_names_of_older_transformers_are_read(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    weights = {old_names(name): value for name, value in model.state_dict().items()}
    assert "vit.encoder.layer.0.attention.attention.query.weight" in weights
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = LiViTForImageClassification.from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


# Checkpoints that are not


def test_a_checkpoint_of_another_kind_is_refused_by_its_name(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=10)
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    with refusal(None, "'bert'", "livit, vit, vit_mae"):
        LiViTForImageClassification.from_pretrained(tmp_path, class_counts=COUNTS)


def test_missing_and_unknown_weights_are_named_and_a_truncated_file_is_damaged(build, tmp_path):
    build().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["vit.registers"] = weights.pop("vit.encoder.layer.1.intermediate.dense.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for options in ({}, {"class_counts": [5, 4, 3, 2]}):
        with refusal(None, "lacks ", "layers.1.mlp.fc1.weight", "unknown ", "registers"):
            LiViTForImageClassification.from_pretrained(tmp_path, **options)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with refusal(None, "damaged"):
        LiViTForImageClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("size", "argument", "values"),
    [
        (dict(patch_size=8), None, ["patch_embeddings.projection.weight", (32, 3, 4, 4), (32, 3, 8, 8)]),
        (dict(hidden_size=64), None, ["embeddings.cls_token", (1, 1, 32), (1, 1, 64)]),
        (dict(num_hidden_layers=1), None, ["unknown vit.layers.1"]),
        (dict(image_size=18), "image_size", [18, 16]),
    ],
)
def test_a_checkpoint_of_other_sizes_is_refused_with_what_differs(mgp, size, argument, values):
    with refusal(argument, *values):
        LiViTForImageClassification.from_pretrained(mgp, class_counts=COUNTS, **size)


def test_a_misspelt_option_is_an_error(mgp):
    with pytest.raises(TypeError, match="class_count"):
        LiViTForImageClassification.from_pretrained(mgp, class_count=COUNTS)


# Saving


def test_save_load_save_is_bit_equal_and_safetensors_only(build, tmp_path):
    model = build(test_prior=[0.2, 0.3, 0.5], drop_path_rate=0.1)
    model.save_pretrained(tmp_path / "first")
    loaded = LiViTForImageClassification.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    names = {path.name for path in (tmp_path / "first").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    assert not any(name.startswith("head.") for name in load_file(tmp_path / "first" / "model.safetensors"))
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    x, labels = pixels(), torch.tensor([0, 1, 2, 0])
    assert torch.equal(model(x, labels=labels).loss, loaded(x, labels=labels).loss)


def test_a_model_read_from_its_beit_form_saves_under_its_own_names(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "livit")
    to_beit(model).save_pretrained(tmp_path / "beit")
    LiViTForImageClassification.from_pretrained(tmp_path / "beit").save_pretrained(tmp_path / "again")
    own, again = (load_file(tmp_path / name / "model.safetensors") for name in ("livit", "again"))
    assert own.keys() == again.keys()


def test_a_bin_is_read_only_alone_and_when_asked_and_never_runs_code(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    torch.save({"x": Trap(tmp_path / "opened")}, tmp_path / "pytorch_model.bin")
    loaded = LiViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="model.safetensors"):
        LiViTForImageClassification.from_pretrained(tmp_path)
    loaded = LiViTForImageClassification.from_pretrained(tmp_path, use_safetensors=False)
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)
    with refusal(None, "weights_only=False"):
        LiViTForImageClassification.from_pretrained(tmp_path, use_safetensors=False, weights_only=False)
    torch.save(model.state_dict() | {"x": Trap(tmp_path / "opened")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match="(?i)weights.only"):
        LiViTForImageClassification.from_pretrained(tmp_path, use_safetensors=False)
    assert not (tmp_path / "opened").exists()


# The Auto classes and the pipeline


@pytest.fixture
def published(build, tmp_path):
    model = build(id2label={0: "oak", 1: "elm", 2: "ash"}, label2id={"oak": 0, "elm": 1, "ash": 2})
    with torch.no_grad():
        model.classifier.weight.normal_()
    model.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    return model, tmp_path


def test_auto_classes_find_livit_after_the_import(published):
    model, folder = published
    assert isinstance(AutoConfig.from_pretrained(folder), LiViTConfig)
    loaded = AutoModelForImageClassification.from_pretrained(folder)
    assert isinstance(loaded, LiViTForImageClassification)
    x = pixels()
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert isinstance(AutoModel.from_pretrained(folder), LiViTModel)
    processor = AutoImageProcessor.from_pretrained(folder)
    assert processor(Image.new("RGB", (40, 30)))["pixel_values"][0].shape == (3, 16, 16)
    path = folder / "preprocessor_config.json"  # also without a named class
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if "processor" not in k}))
    assert "ViTImageProcessor" in type(AutoImageProcessor.from_pretrained(folder)).__name__


def test_the_image_classification_pipeline_serves_names(published):
    model, folder = published
    picture = Image.new("RGB", (40, 30), (200, 30, 90))
    served = pipeline("image-classification", model=str(folder), device="cpu")(picture)
    processor = AutoImageProcessor.from_pretrained(folder)
    logits = model(processor(picture, return_tensors="pt")["pixel_values"]).logits[0]
    assert [entry["label"] for entry in served] == [
        model.config.id2label[i] for i in logits.argsort(descending=True).tolist()
    ]
    assert served[0]["score"] == pytest.approx(logits.softmax(-1).max().item(), abs=1e-4)
