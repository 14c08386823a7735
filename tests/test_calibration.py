"""Calibration and the estimated prior where the densities are known: Gaussian classes and a network of seconds."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal
from torch import Tensor, nn

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.data import exponential_counts
from livt_hf.long_tail.calibration import Calibration, apply_calibration, calibrate_odds, fit_calibration
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.label_shift import estimate_prior
from livt_hf.long_tail.priors import shift_prior
from livt_hf.predictions.calibrate import calibrate_logits

CLASSES, HELD_OUT, SERVED = 20, 2_000, 20_000
COUNTS = exponential_counts(CLASSES, 3_000, 100).tolist()
SOURCE = torch.tensor(COUNTS, dtype=torch.float64) / sum(COUNTS)
UNIFORM = torch.full_like(SOURCE, 1 / CLASSES)
PRIORS = {"uniform": UNIFORM, "training": SOURCE, "reversed": SOURCE.flip(0)}
# Under the uniform prior the Bayes rule is right on 82 %.
MEANS = 1.13 * torch.randn(CLASSES, 10, generator=torch.Generator().manual_seed(0))


def drawn(prior: Tensor, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the classes, which are as frequent as a prior says, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(prior, number, replacement=True, generator=generator)
    return MEANS[labels] + torch.randn(number, 10, generator=generator), labels


def true_posterior(points: Tensor, prior: Tensor) -> Tensor:
    """log P(j|x) under a prior. (N, C)"""
    return (-0.5 * torch.cdist(points.double(), MEANS.double()) ** 2 + prior.log()).log_softmax(-1)


def trained(mixup: float) -> tuple[LongTailHead, nn.Module]:
    """A head under Bal-BCE and a small network that learned from long-tailed points mixed by mixup."""
    torch.manual_seed(0)
    head = LongTailHead(LiViTConfig(class_counts=COUNTS, trained_with={"mixup": mixup}))
    points, labels = drawn(SOURCE, sum(COUNTS), seed=0)
    targets = F.one_hot(labels, CLASSES).float()
    model = nn.Sequential(nn.Linear(10, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, CLASSES))
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.copy_(head.initial_classifier_bias())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    for _ in range(600):
        rows = torch.randint(len(points), (256,))
        share = torch.distributions.Beta(mixup, mixup).sample() if mixup else 1.0
        x, y = (share * part[rows] + (1 - share) * part[rows].flip(0) for part in (points, targets))
        head(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return head, model.requires_grad_(False)


@pytest.fixture(scope="module")
def served() -> dict[tuple[float, str], SimpleNamespace]:
    """For each strength of mixup and each prior: accuracies of the rules and errors of the estimated prior."""
    torch.set_num_threads(1)  # before the fixture of every test does it
    results = {}
    for mixup in (0, 0.2, 0.8):
        head, model = trained(mixup)
        points, labels = drawn(SOURCE, HELD_OUT, seed=1)
        calibration = fit_calibration(head.fitted_posterior(model(points)), labels, SOURCE)
        for name, prior in PRIORS.items():
            points, labels = drawn(prior, SERVED, seed=2)
            logits = model(points)
            fitted = head.fitted_posterior(logits)
            corrected = apply_calibration(fitted, calibration, SOURCE)
            estimate = estimate_prior(corrected.exp(), SOURCE, calibration)
            results[mixup, name] = SimpleNamespace(
                bayes=accuracy(true_posterior(points, prior), labels),
                trained=accuracy(fitted, labels),
                paper=accuracy(logits, labels),
                fitted=accuracy(shift_prior(fitted, SOURCE, prior), labels),
                calibrated=accuracy(shift_prior(corrected, SOURCE, prior), labels),
                uniform=accuracy(shift_prior(corrected, SOURCE, UNIFORM), labels),
                estimated=accuracy(shift_prior(corrected, SOURCE, estimate.prior), labels),
                error=(estimate.prior - prior).abs().sum().item(),
                fitted_error=(estimate_prior(fitted.exp(), SOURCE).prior - prior).abs().sum().item(),
                offered=estimate.reliable,
            )
    return results


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(-1) == labels).double().mean().item()


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("mixup", [0, 0.2, 0.8])
def test_the_calibrated_posterior_rule_under_the_true_prior_is_at_least_argmax_z(served, mixup, prior):
    result = served[mixup, prior]
    assert result.calibrated > result.paper - 0.005  # noise of 20,000 points
    if prior != "uniform":  # argmax z cannot know that other classes are frequent now
        assert result.calibrated > result.paper + 0.01
        assert prior == "training" or result.trained < result.fitted - 0.15  # nor the training posterior
    assert mixup or abs(result.fitted - result.bayes) < 0.05


def test_without_calibration_mixup_makes_the_posterior_rule_worse_than_argmax_z(served):
    result = served[0.8, "uniform"]
    assert result.fitted < result.paper < result.calibrated


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("mixup", [0.2, 0.8])
def test_the_estimated_prior_is_at_most_twice_as_wrong_with_mixup_as_without(served, mixup, prior):
    assert served[mixup, prior].error < 2 * served[0, prior].error
    if (mixup, prior) == (0.8, "uniform"):  # what calibration is for
        assert served[mixup, prior].error < served[mixup, prior].fitted_error - 0.05


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("mixup", [0, 0.2, 0.8])
def test_an_estimated_prior_is_offered_where_it_helps_and_not_where_there_is_no_shift(served, mixup, prior):
    result = served[mixup, prior]
    assert result.offered == (prior == "reversed")  # the other two are there without an estimate
    if result.offered:
        assert result.estimated > result.uniform + 0.01


# What is fitted


def distorted(points: Tensor, scale: float, offsets: Tensor) -> Tensor:
    """The true posterior under the training prior with its evidence scaled and moved. (N, C)"""
    evidence = true_posterior(points, SOURCE) - SOURCE.log()
    return (SOURCE.log() + scale * evidence + offsets).log_softmax(-1)


def test_no_correction_changes_nothing():
    points, _ = drawn(SOURCE, 50, seed=3)
    posterior = distorted(points, 0.7, torch.linspace(-1, 1, CLASSES))
    nothing = Calibration(1.0, 0.0, [0.0] * CLASSES, 0)
    torch.testing.assert_close(apply_calibration(posterior, nothing, SOURCE), posterior, atol=1e-6, rtol=1e-6)


def test_a_flattened_posterior_is_made_right_again():
    points, labels = drawn(SOURCE, 6_000, seed=4)
    offsets = 0.5 * torch.randn(CLASSES, generator=torch.Generator().manual_seed(1)).double()
    calibration = fit_calibration(distorted(points, 0.5, offsets), labels, SOURCE)
    corrected = apply_calibration(distorted(points, 0.5, offsets), calibration, SOURCE)
    best = F.nll_loss(true_posterior(points, SOURCE), labels)
    assert F.nll_loss(distorted(points, 0.5, offsets), labels) > best + 0.1
    assert F.nll_loss(corrected, labels) < best + 0.01


def test_class_frequencies_among_the_held_out_images_do_not_matter():
    fits = {}
    for name in ("training", "uniform"):
        points, labels = drawn(PRIORS[name], 4_000, seed=5)
        fits[name] = fit_calibration(distorted(points, 0.5, torch.zeros(CLASSES)), labels, SOURCE)
    assert fits["training"].scale == pytest.approx(fits["uniform"].scale, rel=0.15)
    # A class taken for as rare as in training would get an offset of up to log 100.
    assert max(map(abs, fits["uniform"].offsets)) < 0.5


def test_what_the_images_leave_open_about_an_offset_is_kept_and_an_unseen_class_keeps_zero():
    points, labels = drawn(UNIFORM, 500, seed=7)
    posterior, seen = true_posterior(points, SOURCE)[labels != 3], labels[labels != 3]
    calibration = fit_calibration(posterior, seen, SOURCE)
    assert calibration.offsets[3] == 0 and calibration.offsets[4] != 0
    errors = torch.tensor(calibration.offset_errors)
    assert errors.argmax() == 3 and 0.3 < errors[3] <= 0.5
    fewer = fit_calibration(posterior[:100], seen[:100], SOURCE)
    assert (torch.tensor(fewer.offset_errors) >= errors).all()


def test_images_that_are_all_sure_and_right_leave_a_finite_temperature():
    posterior, prior = torch.tensor([[0.0, -50.0], [-50.0, 0.0]]).repeat(20, 1), torch.tensor([0.5, 0.5])
    calibration = fit_calibration(posterior, torch.tensor([0, 1]).repeat(20), prior)
    assert 0.5 < calibration.scale < 2
    assert torch.isfinite(apply_calibration(posterior, calibration, prior)).all()


@pytest.mark.parametrize("number", [20, 50, 300])
def test_an_exact_head_is_not_made_worse(number):
    """Shrunk towards odds of 1/2 instead of 0, it lost .02, .01 and .006 nats."""
    points, labels = drawn(SOURCE, 4_000, seed=99)
    exact, losses = true_posterior(points, SOURCE), []
    for seed in range(100, 110):
        held_out, truth = drawn(SOURCE, number, seed)
        calibration = fit_calibration(true_posterior(held_out, SOURCE), truth, SOURCE)
        losses.append(F.nll_loss(apply_calibration(exact, calibration, SOURCE), labels).item())
    assert sum(losses) / len(losses) < F.nll_loss(exact, labels) + 0.002


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_hundred_images_correct_a_wrong_temperature(scale):
    points, labels = drawn(SOURCE, 4_000, seed=99)
    wrong, best = distorted(points, scale, torch.zeros(CLASSES)), F.nll_loss(true_posterior(points, SOURCE), labels)
    held_out, truth = drawn(SOURCE, 100, seed=100)
    calibration = fit_calibration(distorted(held_out, scale, torch.zeros(CLASSES)), truth, SOURCE)
    assert calibration.scale == pytest.approx(1 / scale, rel=0.3) and calibration.odds < 0.1
    assert F.nll_loss(wrong, labels) > best + 0.08
    assert F.nll_loss(apply_calibration(wrong, calibration, SOURCE), labels) < best + 0.02


def test_the_spread_of_the_offsets_is_learned_and_few_images_leave_them_alone():
    points, labels = drawn(UNIFORM, 4_000, seed=7)
    wild = 1.5 * torch.randn(CLASSES, generator=torch.Generator().manual_seed(1)).double()
    found = torch.tensor(fit_calibration(distorted(points, 1.0, wild), labels, SOURCE).offsets)
    assert (found + wild - (found + wild).mean()).std() < 0.15  # a fixed spread of 0.3 would leave more behind
    points, labels = drawn(UNIFORM, 20, seed=6)
    few = fit_calibration(distorted(points, 0.5, torch.linspace(-0.5, 0.5, CLASSES)), labels, SOURCE)
    assert torch.tensor(few.offsets).std() < 0.1


@pytest.mark.parametrize("odds", [0.0, 0.3, 1.0])
def test_saturated_sigmoids_keep_their_order(odds):
    head = LongTailHead(LiViTConfig(loss="bce", class_counts=[10] * 5))
    logits = torch.tensor([[17.0, 17.1, 30.0, 60.0, 150.0]])
    posterior, log_odds = head.fitted_posterior(logits), head.fitted_log_odds(logits)
    order = apply_calibration(posterior, Calibration(1.0, odds, [0.0] * 5, 50), head.prior, log_odds)[0]
    assert (order.diff() > 0).all()
    assert (head.posterior(logits)[0].diff() > 0).all()  # not calibrated


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_log_odds_of_a_head_are_those_of_its_posterior(loss):
    head = LongTailHead(LiViTConfig(loss=loss, class_counts=[8, 4, 2]))
    logits = torch.tensor([[1.0, 0.5, -2.0], [0.0, 9.0, 0.0], [40.0, -60.0, 3.0]])
    exact = (logits.double().log_softmax(-1) if loss == "ce" else F.logsigmoid(logits.double())).exp()
    torch.testing.assert_close(head.fitted_log_odds(logits)[:2], torch.logit(exact).float()[:2], atol=1e-5, rtol=1e-5)
    assert head.fitted_log_odds(logits)[2, 0].item() == pytest.approx(37 if loss == "ce" else 40, abs=1e-4)


def test_the_fit_does_not_depend_on_the_blocks_it_is_made_in(monkeypatch):
    points, labels = drawn(SOURCE, 300, seed=8)
    posterior = distorted(points, 0.5, torch.zeros(CLASSES))
    whole = fit_calibration(posterior, labels, SOURCE)
    monkeypatch.setattr("livt_hf.long_tail.calibration._BLOCK", 7 * CLASSES)
    parts = fit_calibration(posterior, labels, SOURCE)
    assert parts.scale == pytest.approx(whole.scale, rel=1e-6)
    assert parts.offsets == pytest.approx(whole.offsets, abs=1e-5)


def test_several_labels_per_image_are_calibrated_one_by_one():
    generator = torch.Generator().manual_seed(0)
    prior = torch.tensor([0.4, 0.1, 0.01], dtype=torch.float64)
    odds = torch.logit(prior) + 2 * torch.randn(10_000, 3, generator=generator, dtype=torch.float64)
    labels = (torch.rand(10_000, 3, generator=generator) < odds.sigmoid()).float()
    unsure = torch.logit(prior) + 0.5 * (odds - torch.logit(prior)) + torch.tensor([0.3, -0.3, 0.0])
    calibration = fit_calibration(unsure, labels, labels.double().mean(0))
    corrected = calibrate_odds(unsure, calibration, labels.double().mean(0))
    assert calibration.scale == pytest.approx(2, rel=0.1)
    assert (corrected - odds).abs().mean() < 0.15 < (unsure - odds).abs().mean()


def test_nan_posteriors_and_too_few_images_are_refused():
    with refusal(None, "1 of 2"):
        fit_calibration(torch.tensor([[0.0, -1.0], [0.0, torch.nan]]), torch.tensor([0, 1]), torch.tensor([0.5, 0.5]))
    for number in (1, 19):
        points, labels = drawn(SOURCE, number, seed=1)
        with refusal(None, "at least 20", f" {number}"):
            fit_calibration(true_posterior(points, SOURCE), labels, SOURCE)


# In a model


@pytest.fixture
def calibration() -> dict:
    return asdict(Calibration(1.5, 0.3, [0.1, -0.2, 0.0], 40))


def test_probabilities_use_the_calibration_which_is_saved_and_loaded(tiny, calibration, tmp_path):
    config = LiViTConfig(**tiny, class_counts=[9, 3, 1], calibration=calibration)
    model = LiViTForImageClassification(config)
    logits, prior = torch.randn(4, 3), torch.tensor([9, 3, 1]) / 13
    expected = apply_calibration(model.head.fitted_posterior(logits), Calibration(**calibration), prior)
    torch.testing.assert_close(model.head.training_posterior(logits), expected)
    torch.testing.assert_close(model.head.posterior(logits, prior), expected.exp())
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["long_tail"]["calibration"] == calibration
    assert LiViTForImageClassification.from_pretrained(tmp_path).config.long_tail.calibration == calibration


def test_other_settings_of_the_head_make_a_calibration_void(tiny, calibration, tmp_path):
    config = LiViTConfig(**tiny, class_counts=[9, 3, 1], calibration=calibration)
    LiViTForImageClassification(config).save_pretrained(tmp_path)
    for setting in ({"loss": "ce"}, {"class_counts": [5, 5, 5]}, {"tau": 0.5}):
        loaded = LiViTForImageClassification.from_pretrained(tmp_path, **setting)
        assert loaded.config.long_tail.calibration is None


def test_labels_that_were_smoothed_are_calibrated_as_they_were_fitted(tiny, calibration):
    smoothed = dict(tiny, class_counts=[9, 3, 1], label_smoothing=0.1, calibration=calibration)
    head = LongTailHead(LiViTConfig(**smoothed))
    logits = torch.tensor([[9.0, -9.0, -9.0]])  # below the share of smoothing, where the inverse would be log 0
    assert torch.isfinite(head.training_posterior(logits)).all()
    assert head.training_posterior(logits).min() > -60


@pytest.mark.parametrize("sampler", [None, [40.0, 30.0, 30.0]])
def test_calibrating_twice_gives_the_same_calibration(tiny, sampler):
    config = LiViTConfig(**tiny, class_counts=[50, 30, 20], seen_counts=sampler, label_smoothing=0.1)
    model = LiViTForImageClassification(config)
    logits, labels = 3 * torch.randn(300, 3), torch.arange(300) % 3
    once = calibrate_logits(model, logits + 2 * F.one_hot(labels, 3), labels, "validation", "abc", "macro_f1")
    assert once.scale != 1 or any(once.offsets)
    assert calibrate_logits(model, logits + 2 * F.one_hot(labels, 3), labels, "validation", "abc", "macro_f1") == once
