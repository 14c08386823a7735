"""The deployment prior pi^t for an objective, on cases that can be worked out by hand."""

import numpy as np
import pytest
import torch
from refusals import refusal

from livt_hf.long_tail.objectives import (
    OBJECTIVES,
    choose_exponents,
    decide,
    expected_exponent,
    score_predictions,
)
from livt_hf.long_tail.priors import shift_prior, tempered_prior

PRIOR = torch.tensor([0.8, 0.2])


def two_kinds(repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8 images of class 0 with p = (.9, .1) and 2 of class 1 with p = (.6, .4), so many times.

    Class 1 is decided on where p_1 / p_0 * 4^(1 - t) > 1: for the second kind where t < .7075, for the first never.
    """
    posterior = torch.tensor([[0.9, 0.1]] * 8 + [[0.6, 0.4]] * 2, dtype=torch.float64)
    labels = torch.tensor([0] * 8 + [1] * 2)
    return posterior.log().repeat(repeats, 1), labels.repeat(repeats)


def test_exponents_lead_from_the_uniform_to_the_training_prior():
    torch.testing.assert_close(tempered_prior(PRIOR, 0), torch.tensor([0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(tempered_prior(PRIOR, 1), PRIOR.double())
    torch.testing.assert_close(tempered_prior(PRIOR, 0.5), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))


def test_deciding_under_a_tempered_prior_is_the_posterior_rule():
    log_posterior = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    prior = torch.tensor([0.5, 0.3, 0.1, 0.07, 0.03])
    for exponent in (0.0, 0.3, 1.0):
        expected = shift_prior(log_posterior, prior, tempered_prior(prior, exponent)).argmax(-1)
        assert torch.equal(decide(log_posterior, prior, exponent), expected)


def test_scores_by_hand():
    """Class 0: 3 of 4 right, class 1: 1 of 1, class 2 has no image and one prediction."""
    scores = score_predictions(np.array([0, 0, 0, 2, 1]), np.array([0, 0, 0, 0, 1]), 3)
    assert scores == pytest.approx(
        {"accuracy": 4 / 5, "mean_class_accuracy": 7 / 8, "macro_f1": (6 / 7 + 1) / 2, "balanced": (4 / 5 + 7 / 8) / 2}
    )


def test_the_trade_off_curve_by_hand():
    with refusal("objective", "auroc"):
        choose_exponents(*two_kinds(1), PRIOR, ["auroc"])
    for row in choose_exponents(*two_kinds(1), PRIOR)["balanced"].curve:
        right = row["exponent"] < 0.7075
        assert row["accuracy"] == pytest.approx(1 if right else 0.8)
        assert row["mean_class_accuracy"] == pytest.approx(1 if right else 0.5)
        assert row["macro_f1"] == pytest.approx(1 if right else (16 / 18) / 2)


def test_the_exponent_that_posteriors_expect_needs_no_label():
    log_posterior, _ = two_kinds(1)
    assert expected_exponent(log_posterior, PRIOR, "accuracy") == 1
    assert expected_exponent(log_posterior, PRIOR, "mean_class_accuracy") == 0
    # Expected macro F1 below t = .7075: (2 * 7.2 / (8.4 + 8) + 2 * .8 / (1.6 + 2)) / 2 = .661, above it
    # 2 * 8.4 / (8.4 + 10) / 2 = .457.
    assert expected_exponent(log_posterior, PRIOR, "macro_f1") < 0.7075
    # A class that is never likely costs more F1 of the other than it brings.
    unsure = torch.tensor([[0.9, 0.1]] * 10, dtype=torch.float64).log()
    assert expected_exponent(unsure, torch.tensor([0.9, 0.1]), "macro_f1", (0.0, 0.5, 1.0)) in (0.5, 1.0)


@pytest.mark.parametrize(("repeats", "exponent"), [(1, 1.0), (50, 0.7)])
def test_labels_move_the_exponent_only_where_they_are_clear(repeats, exponent):
    """Ten images gain .2 in accuracy with a standard error of .13, five hundred with one of .02."""
    choice = choose_exponents(*two_kinds(repeats), PRIOR)["accuracy"]
    assert choice.exponent == exponent and choice.expected == 1 and choice.best == 0.7
    assert choice.gain == pytest.approx(0.2)
    assert choice.standard_error == pytest.approx((0.2 * 0.8 / (10 * repeats)) ** 0.5, rel=0.15)


def test_images_of_one_group_count_once():
    """Five hundred images of ten patients say no more than ten images."""
    log_posterior, labels = two_kinds(50)
    groups = np.tile(np.arange(10), 50)
    alone, grouped = (choose_exponents(log_posterior, labels, PRIOR, groups=g)["accuracy"] for g in (None, groups))
    assert grouped.standard_error > 5 * alone.standard_error
    assert (alone.exponent, grouped.exponent) == (0.7, 1.0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_right_posterior_is_decided_on_by_the_exponent_of_its_objective(objective):
    """Three Gaussian classes of 80, 15 and 5 %: the choice is nearly as good as the best one on new images."""
    rng = np.random.default_rng(0)
    prior, means = torch.tensor([0.8, 0.15, 0.05]), np.array([-1.0, 0.5, 1.5])

    def draw(number):
        labels = rng.choice(3, number, p=prior.numpy() / prior.numpy().sum())
        x = means[labels] + rng.normal(size=number)
        log_posterior = torch.from_numpy(-((x[:, None] - means) ** 2) / 2) + prior.log()
        return log_posterior.log_softmax(-1), torch.from_numpy(labels)

    choice = choose_exponents(*draw(2000), prior)[objective]
    new = {row["exponent"]: row[objective] for row in choose_exponents(*draw(50_000), prior)[objective].curve}
    assert new[choice.exponent] > max(new.values()) - 0.005


def test_images_of_other_class_frequencies_choose_as_natural_ones():
    """Four copies of the rare class make it as frequent as the other: weights undo that."""
    log_posterior, labels = two_kinds(50)
    rows = torch.cat([torch.where(labels == 0)[0], torch.where(labels == 1)[0].repeat(4)])
    natural, even = (choose_exponents(log_posterior[r], labels[r], PRIOR) for r in (slice(None), rows))
    for name in OBJECTIVES:
        assert even[name].exponent == natural[name].exponent and even[name].expected == natural[name].expected
        for one, other in zip(even[name].curve, natural[name].curve, strict=True):
            assert one == pytest.approx(other)
