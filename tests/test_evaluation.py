"""Serving rules on data whose Bayes rule is known, and evaluation that streams."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from livt_hf import LiViTConfig
from livt_hf.data import exponential_counts
from livt_hf.errors import LiVTError
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.label_shift import estimate_prior
from livt_hf.modeling_livit import LongTailHead
from livt_hf.predictions import Predictions, PredictionsInfo
from livt_hf.predictions.evaluate import Evaluator, accuracy_under_prior, measure_batches
from livt_hf.predictions.predict import predict_batches
from livt_hf.predictions.probes import Features, knn_scores, linear_probe_scores
from livt_hf.predictions.record import ModelInfo, stack_on_disk
from livt_hf.predictions.shifts import build_shifted_sets, estimate_record_prior

CLASSES = 10
COUNTS = exponential_counts(CLASSES, 14_000, 100).tolist()  # 34,741 points
# Round Gaussians on a circle; steps of three places put frequent classes beside rare ones.
_ANGLES = torch.arange(CLASSES) * 3 * 2 * math.pi / CLASSES
MEANS = 3 * torch.stack([_ANGLES.cos(), _ANGLES.sin()], dim=1)
SOURCE = torch.tensor(COUNTS, dtype=torch.float64) / sum(COUNTS)
PRIORS = {
    "uniform": torch.full_like(SOURCE, 1 / CLASSES),
    "training": SOURCE,
    "reversed": SOURCE.flip(0),
    "three classes": torch.tensor([0.02, 0.3, 0.02, 0.02, 0.02, 0.02, 0.3, 0.02, 0.02, 0.26], dtype=torch.float64),
}


def points_of(labels: Tensor, generator: torch.Generator) -> Tensor:
    return MEANS[labels] + torch.randn(len(labels), 2, generator=generator)


def log_density(points: Tensor) -> Tensor:
    """log p(x|j), up to a constant. (N, C)"""
    return -0.5 * torch.cdist(points.double(), MEANS.double()) ** 2


@pytest.fixture(scope="module")
def trained() -> tuple[LongTailHead, nn.Module]:
    """A head under Bal-BCE at tau 1 and a small network that learned from the long-tailed points: 400 updates."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(COUNTS))
    points = points_of(labels, generator)
    head = LongTailHead(LiViTConfig(class_counts=COUNTS, loss="bal_bce", tau=1.0))
    body = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    classifier = nn.Linear(64, CLASSES)
    with torch.no_grad():
        classifier.weight.zero_()
        classifier.bias.copy_(head.initial_classifier_bias())
    model = nn.Sequential(body, classifier)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for _ in range(400):
        rows = torch.randint(len(points), (1024,), generator=generator)
        features = body(points[rows])
        head(classifier(features), labels[rows], features).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return head, model.requires_grad_(False)


@pytest.fixture(scope="module", params=PRIORS)
def served(request, trained):
    """20,000 points drawn with one of the priors, what the model says of them, and the accuracy of any scores."""
    prior = PRIORS[request.param]
    generator = torch.Generator().manual_seed(1)
    labels = torch.multinomial(prior, 20_000, replacement=True, generator=generator)
    points = points_of(labels, generator)
    head, model = trained
    return SimpleNamespace(
        name=request.param,
        prior=prior,
        head=head,
        logits=model(points),
        density=log_density(points),
        accuracy=lambda scores: (scores.argmax(-1) == labels).double().mean().item(),
    )


def test_the_posterior_rule_comes_within_a_point_of_bayes_accuracy_under_any_prior(served):
    bayes = served.accuracy(served.density + served.prior.log())
    assert abs(served.accuracy(served.head.posterior(served.logits, served.prior)) - bayes) < 0.01


def test_argmax_z_comes_within_three_points_of_its_closed_form(served):
    posterior = (served.density + SOURCE.log()).softmax(-1)
    closed = torch.logit(posterior) - torch.logit(SOURCE)
    assert abs(served.accuracy(served.logits) - served.accuracy(closed)) < 0.03
    assert (served.logits.argmax(-1) == closed.argmax(-1)).double().mean() > 0.95


def test_the_training_posterior_and_a_wrong_sign_stay_far_from_bayes(served):
    bayes = served.accuracy(served.density + served.prior.log())
    posterior = served.head.training_posterior(served.logits)
    times_pi_over_q = posterior + SOURCE.log() - served.prior.log()
    times_pi_times_q = posterior + SOURCE.log() + served.prior.log()
    assert served.accuracy(times_pi_times_q) < bayes - 0.04
    if served.name == "training":  # nothing to correct
        assert abs(served.accuracy(posterior) - bayes) < 0.01
    else:
        assert served.accuracy(posterior) < bayes - 0.15
        assert served.accuracy(times_pi_over_q) < bayes - 0.25
    if served.name == "uniform":
        # The paper's rule lies between the two: better than no correction, short of the exact one.
        assert served.accuracy(posterior) + 0.1 < served.accuracy(served.logits) < bayes - 0.03


def test_the_estimated_prior_is_within_a_sixth_of_the_true_one(served):
    names = [str(label) for label in range(CLASSES)]
    record = Predictions.from_arrays(served.logits, class_names=names, class_counts=COUNTS, loss="bal_bce")
    estimate = estimate_record_prior(record)  # no label in sight
    assert (estimate.prior - served.prior).abs().sum() < 0.16
    if served.name != "training":
        # EM on softmax(z) as if z came from balanced training does not find it.
        assert (estimate_prior(served.logits.softmax(-1), PRIORS["uniform"]).prior - served.prior).abs().sum() > 0.4


class Drawn(nn.Module):
    """A model whose logits are its input."""

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=pixel_values)


def evaluated(batches, counts) -> dict[str, dict]:
    accelerator, names = Accelerator(cpu=True), tuple(map(str, range(len(counts))))
    info = PredictionsInfo(names, (ModelInfo(None, LongTailConfig(class_counts=counts)),))
    return measure_batches(predict_batches(Drawn(), batches, accelerator), info, counts, accelerator)


def test_evaluating_8142_classes_on_24426_images_takes_less_than_200_megabytes():
    images, classes, batch = 24_426, 8_142, 128
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(batch, classes, generator=generator)  # the model's own memory
    counts = [200] * 842 + [50] * 4076 + [10] * 3224

    def batches():
        for start in range(0, images, batch):
            labels = torch.arange(start, min(start + batch, images)) % classes
            logits = noise[: len(labels)].roll(start, dims=1)
            logits[torch.arange(len(labels)), labels] += 3
            yield {"pixel_values": logits, "labels": labels}

    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    measured = evaluated(batches(), counts)
    done.set()
    watcher.join()
    assert [metrics["num_images"] for metrics in measured.values()] == [images] * 2
    assert (peak - before) / 2**20 < 200


def test_accuracy_under_a_prior_weighs_the_classes_by_it_whatever_the_test_set_has():
    # Three of four images of the first class are right, the one image of the second is wrong; the third has none.
    logits = torch.eye(3)[torch.tensor([0, 0, 0, 1, 0])]
    record = Predictions.from_arrays(logits, [0, 0, 0, 0, 1], class_names="abc")
    measured = Evaluator(record, [9, 3, 1]).measure(record.info.rules)
    assert accuracy_under_prior(measured, torch.tensor([0.2, 0.2, 0.6])) == {"argmax": pytest.approx(0.375)}


@pytest.mark.parametrize("names", [["b", "b", None, "a", None], [7, 7, None, 3, None], [0.5, 0.5, np.nan, 1, np.nan]])
def test_groups_may_be_text_or_numbers_and_an_image_without_one_is_its_own(names):
    record = Predictions.from_arrays(np.eye(2)[[0, 1, 0, 1, 0]], [0] * 5, class_names="ab", group=names)
    first, second, *others = Evaluator(record, [5, 5]).groups.tolist()
    assert first == second and len({first, *others}) == 4


def test_nan_logits_count_as_wrong_and_are_counted():
    logits = 40 * torch.eye(3)[torch.tensor([0, 1, 2, 0])] - 20
    logits[3, 2] = torch.nan
    batch = {"pixel_values": logits, "labels": torch.tensor([0, 1, 2, 0])}
    for metrics in evaluated([batch], [9, 3, 1]).values():
        assert (metrics["accuracy"], metrics["num_nan"], metrics["num_images"]) == (0.75, 1, 4)
        assert math.isfinite(metrics["ece"])


def test_neighbours_vote_in_proportion_to_their_similarity():
    # At k = 2 the first image sees itself (cosine 1, class 0) and an orthogonal one (cosine 0, class 1).
    train = Features(torch.tensor([[2.0, 0.0], [0.0, 5.0]]), torch.tensor([0, 1]))
    test = Features(torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 1]))
    shares = knn_scores(train, test, 3, k=20, temperature=0.5).softmax(-1)
    first = math.exp(2) / (math.exp(2) + 1)
    torch.testing.assert_close(shares, torch.tensor([[first, 1 - first, 0.0], [0.5, 0.5, 0.0]]))


def test_a_linear_probe_on_long_tailed_features_does_not_forget_the_rare_class():
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 500 + [1] * 10)
    features = torch.randn(510, 4, generator=generator) + 2 * labels[:, None]
    even = torch.tensor([0, 1] * 200)
    test = Features(torch.randn(400, 4, generator=generator) + 2 * even[:, None], even)
    scores = linear_probe_scores(Features(features, labels), test, 2)
    right = scores.argmax(-1) == even
    assert right[even == 1].double().mean() > 0.9
    assert right[even == 0].double().mean() > 0.9
    assert torch.equal(scores, linear_probe_scores(Features(features, labels), test, 2))


# Shifted test sets


def test_forward_and_backward_long_tails_follow_the_frequency_in_training():
    labels = np.repeat(np.arange(4), 20)
    train_counts = np.array([5, 500, 50, 10])
    forward, balanced, backward = build_shifted_sets("-10,10", labels, train_counts, seed=3)
    assert [one.imbalance for one in (forward, balanced, backward)] == [10, 1, -10]
    sizes = {one.imbalance: np.bincount(labels[one.rows]).tolist() for one in (forward, balanced, backward)}
    assert sizes == {10: [2, 20, 9, 4], 1: [20] * 4, -10: [20, 2, 4, 9]}
    for one in (forward, backward):
        assert one.prior.tolist() == pytest.approx((np.array(sizes[one.imbalance]) / 35).tolist())
        assert len(set(one.rows.tolist())) == 35
    again, other = (build_shifted_sets("10", labels, train_counts, seed)[0].rows for seed in (3, 4))
    assert np.array_equal(again, forward.rows) and not np.array_equal(other, forward.rows)


def test_an_imbalance_that_the_test_set_cannot_give_is_refused():
    labels, counts = np.repeat(np.arange(3), 4), np.array([9, 5, 1])
    with pytest.raises(LiVTError, match="test_imbalance -5 needs 5 test images of every class, but some class has 4"):
        build_shifted_sets("2,-5", labels, counts)
    with pytest.raises(LiVTError, match="'0.5'; largest over smallest class is at least 1"):
        build_shifted_sets("0.5", labels, counts)
    with pytest.raises(LiVTError, match="'fifty'; it must be numbers"):
        build_shifted_sets("fifty", labels, counts)


def test_rows_on_disk_come_back_as_they_were():
    rows = [torch.randn(n, 3) for n in (5, 2)]
    assert torch.equal(stack_on_disk(rows, 3), torch.cat(rows))
    assert stack_on_disk([], 3).shape == (0, 3)
