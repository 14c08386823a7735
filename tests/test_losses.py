"""The biases by hand, every loss against a slow obvious version of itself, and what soft labels mean."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from refusals import refusal

from livt_hf import LiViTConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.losses import (
    LOSSES,
    balanced_bce_bias,
    balanced_ce_bias,
    binary_cross_entropy,
    cross_entropy,
    effective_number_weights,
    focal,
    influence_balanced,
    inverse_count_weights,
    lade_regulariser,
    ldam,
    ldam_margins,
    negative_tolerant_bce,
    register_loss,
)

COUNTS = [60, 30, 10]
SOFT = sorted(name for name, spec in LOSSES.items() if spec.soft_labels)
HARD_ONLY = sorted(name for name, spec in LOSSES.items() if not spec.soft_labels)


def head(loss="bal_bce", counts=COUNTS, **config) -> LongTailHead:
    return LongTailHead(LiViTConfig(loss=loss, class_counts=counts, **config))


def batch(images=6, classes=3, dtype=torch.float32):
    logits = torch.randn(images, classes, dtype=dtype) * 3
    labels = torch.arange(images) % classes
    return logits, labels, torch.nn.functional.one_hot(labels, classes).to(dtype)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# The biases


LOG_ODDS = [math.log(60 / 40), math.log(30 / 70), math.log(10 / 90)]


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        (balanced_ce_bias(COUNTS), [math.log(0.6), math.log(0.3), math.log(0.1)]),  # theorem 1
        (balanced_ce_bias(COUNTS, [0.2, 0.3, 0.5]), [math.log(3), 0.0, math.log(0.2)]),
        (balanced_bce_bias(COUNTS, test_prior=None), LOG_ODDS),  # theorem 2
        (balanced_bce_bias(COUNTS, [0.2, 0.3, 0.5]), [LOG_ODDS[0] + math.log(4), 0.0, LOG_ODDS[2]]),  # theorem 3
        (balanced_bce_bias([50, 20], None, num_images=100), [0.0, math.log(20 / 80)]),  # of images, not of labels
        (balanced_bce_bias([50, 20], [0.5, 0.2], num_images=100), [0.0, 0.0]),
        (balanced_bce_bias([10_000_000, 1], None), [math.log(1e7), -math.log(1e7)]),  # no digit is lost
        (head(tau=1.05).logit_bias, [1.05 * (odds + math.log(2)) for odds in LOG_ODDS]),
        (head(bias="ce", test_prior=None).logit_bias, [math.log(0.6), math.log(0.3), math.log(0.1)]),
    ],
)
def test_the_biases_are_those_one_works_out(bias, expected):
    torch.testing.assert_close(bias, torch.tensor(expected), atol=1e-6, rtol=1e-6)


# Every loss against loops


def slow_bce(logits, labels, weights=(1, 1, 1)) -> float:
    """An image counts as much as the weight of its label says, in the terms of all classes."""
    total = 0.0
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        for c in range(3):
            p = sigmoid(z[c])
            total -= weights[y] * math.log(p if c == y else 1 - p)
    return total / len(logits)


def slow_ce(logits, labels, weights=(1, 1, 1)) -> float:
    total = 0.0
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        total -= weights[y] * math.log(math.exp(z[y]) / sum(math.exp(v) for v in z))
    return total / len(logits)


def slow_ldam(logits, labels, weights=(1, 1, 1)) -> float:
    margins, total = ldam_margins(COUNTS, 0.5).tolist(), 0.0
    for z, y in zip(logits.double().tolist(), labels.tolist(), strict=True):
        z[y] -= margins[y]
        total += weights[y] * (math.log(sum(math.exp(30 * (v - max(z))) for v in z)) + 30 * (max(z) - z[y]))
    return total / len(logits)


def slow_focal(logits, labels, weights=(1, 1, 1)) -> float:
    total = 0.0
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        p = math.exp(z[y]) / sum(math.exp(v) for v in z)
        total -= weights[y] * (1 - p) ** 2 * math.log(p)
    return total / len(logits)


SLOW = {"ce": slow_ce, "bce": slow_bce, "ldam": slow_ldam, "focal": slow_focal}


@pytest.mark.parametrize("loss", ["bal_bce", "bal_ce"])
def test_balanced_losses_are_plain_losses_of_shifted_logits(loss):
    logits, labels, targets = batch()
    if loss == "bal_bce":
        shift = [math.log(p / (1 - p)) + math.log(2) for p in (0.6, 0.3, 0.1)]
        expected = slow_bce(logits + torch.tensor(shift), labels)
    else:
        shift = [math.log(3 * p) for p in (0.6, 0.3, 0.1)]
        expected = cross_entropy(logits + torch.tensor(shift), targets).mean().item()
    assert head(loss)(logits, labels, logits).item() == pytest.approx(expected, rel=1e-5)


def test_class_balanced_weights_are_inverse_effective_numbers_that_sum_to_the_classes():
    raw = [(1 - 0.99) / (1 - 0.99**n) for n in COUNTS]
    expected = torch.tensor([3 * w / sum(raw) for w in raw])
    torch.testing.assert_close(effective_number_weights(COUNTS, 0.99), expected)


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_class_balanced_losses_weigh_an_image_by_its_label_in_all_terms(loss):
    logits, labels, _ = batch()
    expected = SLOW[loss](logits, labels, effective_number_weights(COUNTS, 0.9999).tolist())
    assert head(f"cb_{loss}")(logits, labels, logits).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", SLOW)
def test_deferred_reweighting_is_plain_until_its_share_of_the_epochs_and_class_balanced_after(loss):
    logits, labels, _ = batch()
    rule = head(loss, drw_start=0.8)
    weights = effective_number_weights(COUNTS, 0.9999).tolist()
    for epoch in range(10):
        rule.set_epoch(epoch, 10)
        expected = SLOW[loss](logits, labels, weights if epoch >= 8 else (1, 1, 1))
        assert rule(logits, labels, logits).item() == pytest.approx(expected, rel=1e-5)


def test_the_focal_loss_forgives_what_is_right_and_both_it_and_nt_bce_have_plain_losses_as_limits():
    logits, _, targets = batch()
    torch.testing.assert_close(focal(logits, targets, 0.0), cross_entropy(logits, targets))
    torch.testing.assert_close(negative_tolerant_bce(logits, targets, 1.0), binary_cross_entropy(logits, targets))
    even = torch.zeros(1, 2, requires_grad=True)  # p = 1/2: a quarter of the cross-entropy at gamma 2
    assert focal(even, torch.tensor([[1.0, 0.0]]), 2.0).item() == pytest.approx(math.log(2) / 4)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_the_focal_loss_and_its_gradient_are_finite_where_the_answer_is_certain(gamma):
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    loss = focal(logits, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), gamma)
    assert loss.tolist() == pytest.approx([0.0, 400.0])
    assert torch.autograd.grad(loss.sum(), logits)[0].isfinite().all()


def test_ldam_margins_fall_with_the_fourth_root_of_the_count():
    torch.testing.assert_close(ldam_margins([16, 1, 256], 0.5), torch.tensor([0.25, 0.5, 0.125]))


@pytest.mark.parametrize("max_margin", [0.5, 5.0])
def test_ldam_is_finite_where_one_class_has_all_the_probability(max_margin):
    logits = torch.tensor([[40.0, -40.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    for y in range(3):
        targets = torch.nn.functional.one_hot(torch.tensor([y, y]), 3)
        loss = ldam(logits, targets, ldam_margins(COUNTS, max_margin), 30).mean()
        shifted = 30 * (logits - ldam_margins(COUNTS, max_margin) * targets)
        expected = cross_entropy(shifted, targets).mean()
        torch.testing.assert_close(loss, expected)
        fast, slow = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0]
        torch.testing.assert_close(fast, slow)


def test_lade_adds_a_tenth_of_its_regulariser_to_balanced_ce():
    logits, labels, targets = batch(images=5)
    prior = [0.6, 0.3, 0.1]
    f, y, images = logits.tolist(), labels.tolist(), len(logits)
    bracket = 0.0
    for c in range(3):
        of_class = [f[i][c] for i in range(images) if y[i] == c]
        partition = math.log(sum(math.exp(f[i][c] - math.log(prior[c]) - math.log(3)) for i in range(images)) / images)
        bracket += prior[c] * (sum(of_class) / len(of_class) - partition - 0.01 * partition**2)
    assert lade_regulariser(logits, targets, torch.tensor(prior), 0.01).item() == pytest.approx(-bracket, rel=1e-4)
    expected = head("bal_ce")(logits, labels, logits).item() - 0.1 * bracket
    assert head("lade")(logits, labels, logits).item() == pytest.approx(expected, rel=1e-4)


def test_ib_weighs_each_cross_entropy_by_its_class_and_divides_it_by_its_influence():
    logits, labels, targets = batch()
    features = torch.randn(len(logits), 7)
    inverse = [1 / n for n in COUNTS]
    slow = 0.0
    for z, y, h in zip(logits.tolist(), labels.tolist(), features.tolist(), strict=True):
        p = [math.exp(v) / sum(math.exp(u) for u in z) for v in z]
        influence = sum(abs(p[c] - (c == y)) for c in range(3)) * sum(abs(v) for v in h)
        weight = 3 * inverse[y] / sum(inverse)
        slow += -weight * math.log(p[y]) * 1000 / (influence + 0.001) / len(logits)
    weights = inverse_count_weights(COUNTS)
    assert influence_balanced(logits, targets, features, weights, 1000).mean().item() == pytest.approx(slow, rel=1e-4)
    assert head("ib")(logits, labels, features).item() == pytest.approx(slow, rel=1e-4)


def test_ib_is_plain_cross_entropy_until_its_share_of_the_epochs_is_over():
    logits, labels, targets = batch()
    rule, plain = head("ib", ib_warmup=0.3), cross_entropy(logits, targets).mean()
    started = rule(logits, labels, logits)
    for epoch in range(10):
        rule.set_epoch(epoch, 10)
        assert torch.equal(rule(logits, labels, logits), plain if epoch < 3 else started)
    assert not torch.equal(started, plain)


@pytest.mark.parametrize("loss", ["nt_bce", "bal_nt_bce"])
def test_nt_bce_softens_the_negative_term_by_lambda(loss):
    logits, labels, targets = batch()
    bias = balanced_bce_bias(COUNTS).tolist() if loss == "bal_nt_bce" else [0.0] * 3
    slow = 0.0
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        for c in range(3):
            v = z[c] + bias[c]
            slow += math.log(1 + math.exp(-v)) if c == y else math.log(1 + math.exp(2 * v)) / 2
    assert head(loss)(logits, labels, logits).item() == pytest.approx(slow / len(logits), rel=1e-5)


# Soft labels


@pytest.mark.parametrize(("loss", "settings"), [*((loss, {}) for loss in SOFT), ("ldam", {"drw_start": 0.5})])
def test_soft_label_gradients_are_the_mixture_of_the_hard_ones(loss, settings):
    start, labels, _ = batch()
    other = (labels + 1) % 3
    mixed = 0.7 * torch.nn.functional.one_hot(labels, 3) + 0.3 * torch.nn.functional.one_hot(other, 3)

    def value_and_gradient(targets):
        logits = start.clone().requires_grad_()
        value = head(loss, **settings)(logits, targets, logits)
        return value.detach(), torch.autograd.grad(value, logits)[0]

    value, gradient = value_and_gradient(mixed)
    (first, of_first), (second, of_second) = value_and_gradient(labels), value_and_gradient(other)
    torch.testing.assert_close(value, 0.7 * first + 0.3 * second)
    torch.testing.assert_close(gradient, 0.7 * of_first + 0.3 * of_second, rtol=1e-4, atol=1e-6)


def test_losses_defined_on_class_ids_refuse_soft_labels_by_name():
    logits, _, targets = batch()
    for loss in HARD_ONLY:
        with refusal(None, loss):
            head(loss)(logits, targets, logits)
    assert HARD_ONLY == ["ib", "lade"]


def test_label_smoothing_is_applied_once_and_only_in_training():
    logits, labels, targets = batch()
    smooth = head(label_smoothing=0.1)
    expected = head()(logits, targets * 0.9 + 0.1 / 3, logits)
    torch.testing.assert_close(smooth(logits, labels, logits), expected)
    torch.testing.assert_close(smooth.eval()(logits, labels, logits), head()(logits, labels, logits))


# Numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_half_precision_and_extreme_counts_stay_finite_and_close_to_float32(loss, dtype):
    logits, labels, _ = batch()
    logits = (4 * logits).to(dtype)
    extreme = head(loss, counts=[10_000_000, 1000, 1]).to(dtype)
    logits.requires_grad_()
    value = extreme(logits, labels, logits.detach())
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(logits.grad).all()
    exact = head(loss, counts=[10_000_000, 1000, 1])(logits.detach().float(), labels, logits.detach().float())
    torch.testing.assert_close(value, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_pure_functions_compute_half_precision_logits_in_float32(dtype):
    logits, _, targets = batch()
    logits, features = logits.to(dtype), torch.randn(6, 7)
    margins, prior = ldam_margins(COUNTS, 0.5), torch.tensor([0.6, 0.3, 0.1])
    for function, more in (
        (cross_entropy, ()),
        (binary_cross_entropy, ()),
        (negative_tolerant_bce, (2.0,)),
        (ldam, (margins, 30)),
        (lade_regulariser, (prior, 0.01)),
        (influence_balanced, (features, inverse_count_weights(COUNTS), 1000)),
    ):
        value = function(logits, targets, *more)
        assert value.dtype == torch.float32, function
        torch.testing.assert_close(value, function(logits.float(), targets, *more))


def test_counts_of_a_head_stay_float32_in_a_half_precision_model():
    half = head(counts=[10_000_000, 1]).to(torch.float16)
    torch.testing.assert_close(half.logit_bias, balanced_bce_bias([10_000_000, 1]))
    assert half.prior[1] > 0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_loss_works_without_counts_or_says_that_it_needs_them(loss):
    logits, labels, _ = batch()
    expected = refusal(None, loss, "class_counts") if LOSSES[loss].uses_counts else nullcontext()
    with expected:
        assert torch.isfinite(LongTailHead(LiViTConfig(loss=loss, num_labels=3))(logits, labels, logits))


def test_a_loss_of_a_known_name_or_with_more_than_one_number_per_image_is_refused(monkeypatch):
    with refusal(None, "'ce'"):
        register_loss("ce", activation="softmax")(lambda *_: None)
    monkeypatch.setitem(LOSSES, "square", replace(LOSSES["ce"], function=lambda inputs: inputs.logits))
    logits, labels, _ = batch()
    with refusal(None, "square", (6, 3)):
        LongTailHead(LiViTConfig(loss="square", num_labels=3))(logits, labels, logits)
