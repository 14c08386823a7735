"""Evaluation that streams, groups, probes and shifted test sets."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from accelerate import Accelerator
from refusals import refusal
from torch import Tensor, nn

from livt_hf.long_tail.config import LongTailConfig
from livt_hf.predictions import Predictions, PredictionsInfo
from livt_hf.predictions.evaluate import Evaluator, accuracy_under_prior, measure_batches
from livt_hf.predictions.predict import predict_batches
from livt_hf.predictions.probes import Features, knn_scores, linear_probe_scores
from livt_hf.predictions.record import ModelInfo, stack_on_disk
from livt_hf.predictions.shifts import build_shifted_sets


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
    for imbalance, values in {"2,-5": ["-5", "has 4"], "0.5": ["'0.5'"], "fifty": ["'fifty'"]}.items():
        with refusal("test_imbalance", *values):
            build_shifted_sets(imbalance, labels, counts)


def test_rows_on_disk_come_back_as_they_were():
    rows = [torch.randn(n, 3) for n in (5, 2)]
    assert torch.equal(stack_on_disk(rows, 3), torch.cat(rows))
    assert stack_on_disk([], 3).shape == (0, 3)
