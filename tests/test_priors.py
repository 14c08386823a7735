"""The posterior rule on classes whose densities are known, and the priors behind it."""

import dataclasses
import math

import pytest
import torch
from refusals import refusal

from livt_hf import LiViTConfig
from livt_hf.long_tail.calibration import Calibration
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.label_shift import PriorEstimate, estimate_prior
from livt_hf.long_tail.losses import LOSSES
from livt_hf.long_tail.priors import as_prior, class_prior, log_odds, read_numbers, read_prior

CLASSES = 10
COUNTS = [round(5000 * 100 ** (-i / (CLASSES - 1))) for i in range(CLASSES)]  # imbalance factor 100
PI = class_prior(COUNTS)
UNIFORM = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
SERVING = {
    "uniform": UNIFORM,
    "training": PI,
    "reversed": PI.flip(0),
    "one class gone": torch.tensor([0.0] + [1 / 9] * 9, dtype=torch.float64),
}


def gaussian_classes(prior: torch.Tensor, images: int = 20_000, spread: float = 0.5):
    """Points of ten overlapping Gaussian classes drawn under `prior`: log densities (B, C) and labels (B,)."""
    generator = torch.Generator().manual_seed(0)
    means = spread * torch.randn(CLASSES, 8, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(prior, images, replacement=True, generator=generator)
    points = means[labels] + torch.randn(images, 8, generator=generator, dtype=torch.float64)
    return -0.5 * torch.cdist(points, means) ** 2, labels


def perfect_logits(log_density: torch.Tensor, head: LongTailHead) -> torch.Tensor:
    """The z of a network that has learned the training posterior exactly."""
    log_posterior = (log_density + PI.log()).log_softmax(-1)
    smooth = head.settings.label_smoothing
    fitted = log_posterior.exp() * (1 - smooth) + smooth / CLASSES
    if head.definition.activation == "softmax":
        return fitted.log() - head.logit_bias
    return torch.logit(fitted) - head.logit_bias


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return (scores.argmax(-1) == labels).double().mean().item()


def head(loss="bal_bce", **config) -> LongTailHead:
    return LongTailHead(LiViTConfig(loss=loss, class_counts=COUNTS, **config))


@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("loss", ["bal_bce", "bce", "bal_ce", "ce"])
def test_exact_posteriors_reach_bayes_accuracy_under_any_serving_prior(loss, serving):
    q = SERVING[serving]
    log_density, labels = gaussian_classes(q)
    rule = head(loss)
    served = rule.posterior(perfect_logits(log_density, rule), q)
    bayes = (log_density + q.log()).softmax(-1)
    torch.testing.assert_close(served, bayes.float(), atol=1e-4, rtol=1e-3)
    assert accuracy(served, labels) == pytest.approx(accuracy(bayes, labels), abs=2e-4)


@pytest.mark.parametrize("config", [dict(tau=1.5), dict(bias="ce"), dict(test_prior=None), dict(label_smoothing=0.1)])
def test_the_rule_holds_for_every_tau_bias_test_prior_and_smoothing(config):
    log_density, labels = gaussian_classes(UNIFORM)
    rule = head(**config)
    served = rule.posterior(perfect_logits(log_density, rule), "uniform")
    assert accuracy(served, labels) == pytest.approx(accuracy(log_density, labels), abs=2e-3)


def test_classes_that_are_all_less_likely_than_label_smoothing_made_them_keep_their_order():
    rule = head(label_smoothing=0.1)
    fitted = torch.linspace(8e-3, 1e-3, CLASSES)[None]  # smoothing alone gives each class 0.01
    served = rule.posterior(torch.logit(fitted) - rule.logit_bias, rule.training_prior())
    torch.testing.assert_close(served, fitted / fitted.sum())


def test_without_a_prior_the_config_s_test_prior_is_served():
    log_density, _ = gaussian_classes(UNIFORM, 50)
    reversed_prior = PI.flip(0).tolist()
    for test_prior, meant in (("uniform", "uniform"), (None, "uniform"), (reversed_prior, reversed_prior)):
        rule = head(test_prior=test_prior)
        z = perfect_logits(log_density, rule)
        torch.testing.assert_close(rule.posterior(z), rule.posterior(z, meant))


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_losses_without_posteriors_say_why_they_refuse(loss):
    rule, logits = head(loss), torch.zeros(2, CLASSES)
    if loss in ("focal", "ldam", "ib", "lade", "cb_ce", "cb_bce", "nt_bce", "bal_nt_bce"):
        with refusal(None, f"'{loss}'"):
            rule.posterior(logits)
    else:
        torch.testing.assert_close(rule.posterior(logits).sum(-1), torch.ones(2))


def test_options_give_a_posterior_or_take_it_away_and_there_is_none_without_counts():
    assert head("nt_bce", nt_lambda=1).posterior(torch.zeros(2, CLASSES)).shape == (2, CLASSES)
    assert "class weights" in head("ce", drw_start=0.8).no_posterior and head("ce").no_posterior is None
    with refusal(None, "class_counts"):
        LongTailHead(LiViTConfig(loss="ce", num_labels=3)).posterior(torch.zeros(2, 3))


# Estimating the prior of unlabelled images


@pytest.mark.parametrize("truth", ["uniform", "reversed"])
def test_em_on_the_training_posterior_finds_the_prior_and_on_softmax_z_does_not(truth):
    q = SERVING[truth]
    log_density, _ = gaussian_classes(q)
    z = perfect_logits(log_density, head())
    estimate = estimate_prior((z + head().logit_bias).sigmoid(), PI).prior
    wrong = estimate_prior(z.softmax(-1), PI).prior
    assert (estimate - q).abs().sum() < 0.1
    assert (wrong - q).abs().sum() > 0.4


def test_em_returns_the_training_prior_where_nothing_shifted():
    log_density, _ = gaussian_classes(PI)
    posterior = (log_density + PI.log()).softmax(-1)
    assert (estimate_prior(posterior, PI).prior - PI).abs().sum() < 0.05


@pytest.mark.parametrize("truth", SERVING)
def test_a_shifted_prior_is_reliable_from_clear_evidence_and_not_from_a_weak_biased_model(truth):
    log_density, _ = gaussian_classes(SERVING[truth], spread=1.5)
    calibrated = (log_density + PI.log()).softmax(-1)
    assert estimate_prior(calibrated, PI).reliable == (truth not in ("uniform", "training"))  # these are known
    # Sees little of the image and likes some classes better than they deserve: each step of EM likes them more.
    weak = (0.01 * log_density + torch.linspace(0, 0.5, CLASSES) + PI.log()).softmax(-1)
    assert not estimate_prior(weak, PI).reliable


def test_a_class_that_looks_absent_keeps_the_share_of_one_image_added_per_class():
    posterior = torch.tensor([[1.0, 0.0]]).repeat(8, 1)
    estimate = estimate_prior(posterior, torch.tensor([0.5, 0.5])).prior
    assert estimate.tolist() == pytest.approx([9 / 10, 1 / 10], abs=1e-4)


@pytest.mark.parametrize("truth", ["uniform", "training"])
@pytest.mark.parametrize("number", [10, 100, 1000])
def test_chance_is_not_offered_as_a_prior(number, truth):
    """Without the noise of few images in it, 10 images of a uniform prior got an offer in 92 % of the cases."""
    log_density, _ = gaussian_classes(SERVING[truth], 20 * number, spread=0.8)
    offers = [estimate_prior((part + PI.log()).softmax(-1), PI).reliable for part in log_density.split(number)]
    assert sum(offers) <= 2  # of 20; at 5 % there are more in 8 of 100 cases


def test_an_offered_prior_is_not_below_the_uniform_one():
    log_density, labels = gaussian_classes(SERVING["reversed"], 8 * 1000, spread=0.8)
    gains = []
    for part, truth in zip(log_density.split(1000), labels.split(1000), strict=True):
        estimate = estimate_prior((part + PI.log()).softmax(-1), PI)
        if estimate.reliable:
            gains.append(accuracy(part + estimate.prior.log(), truth) - accuracy(part, truth))
    assert len(gains) >= 6 and min(gains) > 0.03


def test_a_calibration_that_leaves_much_open_makes_no_offer():
    log_density, _ = gaussian_classes(SERVING["reversed"], 1000, spread=0.8)
    posterior = (log_density + PI.log()).softmax(-1)
    for error, offered in ((0.1, True), (1.5, False)):
        calibration = Calibration(1.0, 0.0, [0.0] * CLASSES, 100, offset_errors=[error] * CLASSES, scale_error=0.1)
        assert estimate_prior(posterior, PI, calibration).reliable == offered


@pytest.mark.parametrize(
    ("p_uniform", "p_training", "gain", "reliable"),
    [
        (0.05, 0.01, -0.001, True),
        (0.06, 0.01, 0.1, False),
        (0.05, 0.02, 0.1, False),
        (0.01, 0.01, -0.002, False),
    ],
)
def test_an_offer_excludes_both_known_priors_and_does_no_harm(p_uniform, p_training, gain, reliable):
    prior = torch.tensor([0.7, 0.3])
    estimate = PriorEstimate(prior, torch.stack([prior, prior]), 0.4, 0.1, p_uniform, p_training, gain)
    assert estimate.reliable == reliable


def test_an_uncertain_scale_makes_an_uncertain_estimate():
    log_density, _ = gaussian_classes(SERVING["reversed"], 300, spread=0.8)
    posterior = (log_density + PI.log()).softmax(-1)
    known = Calibration(1.0, 0.0, [0.0] * CLASSES, 100, offset_errors=[0.01] * CLASSES)
    calibrations = [dataclasses.replace(known, scale_error=error) for error in (0.01, 0.5)]
    variations = [estimate_prior(posterior, PI, calibration).variation for calibration in calibrations]
    assert variations[1] > 1.1 * variations[0]


def test_a_file_of_numbers_has_them_by_name_or_in_the_order_of_the_classes(tmp_path):
    for name, content in (("named.yaml", "cat: 1\nnewt: 3\n"), ("ordered.json", "[3, 1]")):
        (tmp_path / name).write_text(content)
        assert read_numbers(str(tmp_path / name), ["newt", "cat"], "counts") == [3, 1]
        assert read_prior(str(tmp_path / name), ["newt", "cat"]) == [0.75, 0.25]
    (tmp_path / "shares.json").write_text("[0.5, 0.7]")  # of images that have each of several labels
    assert read_prior(str(tmp_path / "shares.json"), ["newt", "cat"], multi_label=True) == [0.5, 0.7]
    with refusal(None, "1 to 3"):
        read_prior(str(tmp_path / "ordered.json"), ["newt", "cat"], multi_label=True)


@pytest.mark.parametrize(
    ("name", "content", "values"),
    [
        ("a.json", '{"cat": 1, "cat": 2, "newt": 3}', ["'cat'", "twice"]),
        ("a.yaml", "cat: 1\nnewt: 3\ncat: 1\n", ["'cat'", "twice"]),
        ("a.json", '{"cat": NaN, "newt": 3}', ["nan"]),
        ("a.json", f"[1, 1{'0' * 400}]", ["1000"]),
        ("a.json", '{"cat": -1, "newt": 3}', ["negative"]),
        ("a.json", "[0, 0]", ["zero"]),
        ("a.json", "[true, 1]", ["2 numbers"]),
        ("a.json", "[6, 3, 1]", ["2 numbers"]),
        ("a.yaml", "newt: 1\ncow: 3\n", ["['cat']", "['cow']"]),
    ],
)
def test_a_file_that_holds_no_prior_is_refused(tmp_path, name, content, values):
    (tmp_path / name).write_text(content)
    with refusal(None, name, *values):
        read_prior(str(tmp_path / name), ["cat", "newt"])


def test_bounds_hold_the_estimate_and_most_of_the_truth():
    log_density, _ = gaussian_classes(SERVING["reversed"], 2000, spread=0.8)
    estimate = estimate_prior((log_density + PI.log()).softmax(-1), PI)
    low, high = estimate.bounds
    assert (low <= high).all() and ((low <= PI.flip(0)) & (PI.flip(0) <= high)).sum() >= 8


def test_a_million_images_are_tested_by_some_thousand():
    log_density, _ = gaussian_classes(SERVING["reversed"], 4_000, spread=1.5)
    few = (log_density + PI.log()).softmax(-1)
    many = few.repeat(50, 1)  # 200,000: every 50th is looked at
    assert estimate_prior(many, PI).reliable
    torch.testing.assert_close(estimate_prior(many, PI).prior, estimate_prior(few, PI).prior, atol=5e-3, rtol=0)


def test_a_row_of_zeros_says_nothing():
    log_density, _ = gaussian_classes(SERVING["reversed"], 500)
    posterior = (log_density + PI.log()).softmax(-1)
    with_zeros = torch.cat([posterior, torch.zeros(5, CLASSES, dtype=posterior.dtype)])
    torch.testing.assert_close(estimate_prior(with_zeros, PI).prior, estimate_prior(posterior, PI).prior)
    for wrong, value in ((posterior[:3] * 0, "zero"), (posterior[:2] * math.nan, "NaN"), (posterior[:0], (0, 10))):
        with refusal(None, value):
            estimate_prior(wrong, PI)


def test_blocks_of_images_do_not_change_the_estimate(monkeypatch):
    log_density, _ = gaussian_classes(SERVING["reversed"])
    posterior = (log_density + PI.log()).softmax(-1)
    whole = estimate_prior(posterior, PI)
    monkeypatch.setattr("livt_hf.long_tail.label_shift._BLOCK", 1_000 * CLASSES)
    torch.testing.assert_close(estimate_prior(posterior, PI).prior, whole.prior)


# Several labels per image


def multi_label(**config) -> LongTailHead:
    several = dict(problem_type="multi_label_classification", test_prior=None, num_train_images=100)
    return LongTailHead(LiViTConfig(class_counts=[50, 20, 1], **(several | config)))


def test_multi_label_zero_logits_predict_each_label_s_frequency():
    rule = multi_label()
    torch.testing.assert_close(rule.posterior(torch.zeros(1, 3)), torch.tensor([[0.5, 0.2, 0.01]]))


def test_multi_label_serving_multiplies_odds_by_the_ratio_of_prior_odds():
    served = multi_label().posterior(torch.tensor([[1.0, -2.0, 0.5]]), [0.2, 0.2, 0.5])
    odds = [math.e * (0.2 / 0.8), math.exp(-2) * (0.2 / 0.8), math.exp(0.5)]
    torch.testing.assert_close(served, torch.tensor([[o / (1 + o) for o in odds]]))


def test_multi_label_probabilities_are_not_normalised_over_labels_and_have_no_uniform_prior():
    assert multi_label().posterior(torch.full((1, 3), 9.0)).sum() > 2
    with refusal(None, "'uniform'"):
        multi_label().posterior(torch.zeros(1, 3), "uniform")


# The pieces


def test_class_prior_and_log_odds_agree():
    torch.testing.assert_close(torch.logit(class_prior(COUNTS)), log_odds(COUNTS))
    torch.testing.assert_close(torch.logit(class_prior([3, 4], 20)), log_odds([3, 4], 20))


@pytest.mark.parametrize(
    ("prior", "value"),
    [
        ("balanced", "'balanced'"),
        ([0.5, 0.5], "(2,)"),
        ([0.5, 0.6, -0.1], "-0.1 to 0.6"),
        ([0.5, float("nan"), 0.5], "nan"),
        ([0.5, 0.4, 0.3], "1.2"),
        ({"cat": 0.5, "newt": 0.3, "dog": 0.2}, "3 numbers as a list"),
    ],
)
def test_a_prior_that_is_none_is_refused(prior, value):
    with refusal(None, value):
        as_prior(prior, 3)
