"""Samplers: which images an epoch draws, what a head must know of it, and weights of classes."""

import json

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, List
from PIL import Image as PILImage
from recipe_runs import TINY, make_pictures
from refusals import refusal

from livt_hf import LiViTConfig
from livt_hf.data import Batches, FinetuneAugmentation, train_loader
from livt_hf.data.sampling import Sampler, seen_counts
from livt_hf.errors import LiVTError
from livt_hf.long_tail.head import LongTailHead
from livt_hf.predictions.rules import UNIFORM
from livt_hf.randomness import keyed_seed, purpose_seed
from livt_hf.recipes import finetune
from livt_hf.runs import Run

COUNTS = np.array([60, 25, 10, 5])
LABELS = np.random.RandomState(0).permutation(np.repeat(np.arange(4), COUNTS))
NAMES = ("natural", "balanced", "sqrt", "progressive")


def drawn(name: str, epoch: int = 0, epochs: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """How often an epoch draws each image, and each class."""
    draws = Sampler(name, epochs).draws(LABELS, seed, epoch) % len(LABELS)
    return np.bincount(draws, minlength=len(LABELS)), np.bincount(LABELS[draws], minlength=4)


def test_the_natural_order_is_a_permutation_keyed_by_seed_and_epoch():
    key = keyed_seed(purpose_seed(3, "order"), 7)
    expected = np.random.RandomState(key).permutation(100)
    np.testing.assert_array_equal(Sampler().draws(LABELS, 3, 7), expected)


@pytest.mark.parametrize(("name", "share"), [("balanced", [1, 1, 1, 1]), ("sqrt", COUNTS**0.5), ("natural", COUNTS)])
def test_every_class_and_every_image_gets_its_expected_draws_rounded_up_or_down(name, share):
    expected = 100 * np.array(share) / np.sum(share)
    for epoch in range(20):
        images, classes = drawn(name, epoch)
        assert classes.sum() == 100
        assert (np.abs(classes - expected) < 1 + 1e-9).all()
        assert (np.abs(images - (expected / COUNTS)[LABELS]) < 1 + 1e-9).all()


def test_progressive_goes_from_natural_to_balanced_along_a_line():
    np.testing.assert_array_equal(drawn("progressive", epoch=0, epochs=10)[0], np.ones(100))
    for epoch in range(10):
        expected = (1 - epoch / 10) * COUNTS + epoch / 10 * 25
        assert (np.abs(drawn("progressive", epoch, epochs=10)[1] - expected) < 1 + 1e-9).all()


def test_no_image_of_a_class_is_drawn_more_often_than_another_in_the_long_run():
    total = sum(drawn("balanced", epoch)[0] for epoch in range(400)) / 400
    np.testing.assert_allclose(total, (25 / COUNTS)[LABELS], rtol=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_is_the_same_whenever_it_is_asked_for_and_unlike_any_other(name):
    sampler = Sampler(name, epochs=4)
    first = sampler.draws(LABELS, 0, 2)
    np.testing.assert_array_equal(sampler.draws(LABELS, 0, 2), first)
    assert not np.array_equal(sampler.draws(LABELS, 0, 3), first)
    assert not np.array_equal(sampler.draws(LABELS, 1, 2), first)
    assert len(set(first)) == 100  # each draw has a number of its own


@pytest.mark.parametrize("name", ["balanced", "sqrt", "progressive"])
def test_every_batch_of_a_sampler_mixes_classes(name):
    labels = np.repeat([0, 1], [320, 80])
    drawn = labels[Sampler(name, epochs=4).draws(labels, seed=0, epoch=3) % len(labels)]
    for batch in drawn.reshape(-1, 40):
        assert 4 <= batch.sum() <= 36  # of about 20, or 13 by the square root


def test_a_class_without_an_image_is_never_drawn():
    labels = np.array([0, 0, 0, 2])
    assert set(labels[Sampler("balanced").draws(labels, 0, 0) % 4]) == {0, 2}
    np.testing.assert_allclose(seen_counts(np.array([3, 0, 1]), "balanced", 1), [2, 0, 2])
    with pytest.raises(LiVTError, match="rare"):
        Sampler("rare")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("natural", [80, 20]),
        ("balanced", [50, 50]),
        ("sqrt", [100 * 2 / 3, 100 / 3]),  # sqrt 80 is twice sqrt 20
        ("progressive", [72.5, 27.5]),  # an epoch of 80 and 20, and one halfway to 50 and 50
    ],
)
def test_seen_counts_are_the_draws_of_a_class_on_average_over_the_epochs(name, expected):
    np.testing.assert_allclose(seen_counts(np.array([80, 20]), name, 2), expected)


# In the loader


def noise(count: int, labels: list) -> Dataset:
    rng = np.random.RandomState(0)
    images = [PILImage.fromarray(rng.randint(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(count)]
    label = ClassLabel(names=["a", "b", "c"])
    features = Features(image=Image(), label=List(label) if isinstance(labels[0], list) else label)
    return Dataset.from_dict({"image": images, "label": labels}, features=features)


@pytest.fixture(scope="module")
def pictures() -> Dataset:
    return noise(24, [0] * 17 + [1] * 5 + [2] * 2)


def epoch_of(dataset: Dataset, start_update: int = 0, name: str = "balanced", **shared) -> list[dict]:
    batches = Batches(8, sampler=Sampler(name, 4), **shared)
    return list(train_loader(dataset, FinetuneAugmentation(8), batches).epoch(2, start_update))


def together(batches: list[dict]) -> dict:
    order = torch.cat([batch["index"] for batch in batches]).argsort()
    return {key: torch.cat([batch[key] for batch in batches])[order] for key in batches[0]}


@pytest.mark.parametrize("name", NAMES)
def test_an_update_has_the_same_images_on_any_number_of_processes_and_workers_and_after_a_resume(pictures, name):
    expected = epoch_of(pictures, name=name)
    both = {"accumulation": 2, "world_size": 2}
    for update in range(3):
        for shared in ({"accumulation": 2}, {"world_size": 2}, both, {"world_size": 4, "num_workers": 1}):
            world, steps = shared.get("world_size", 1), shared.get("accumulation", 1)
            parts = [epoch_of(pictures, update, name, rank=rank, **shared)[:steps] for rank in range(world)]
            found = together([batch for part in parts for batch in part])
            assert all(torch.equal(found[key], value) for key, value in together([expected[update]]).items())


def test_an_image_that_is_drawn_again_has_another_crop_and_the_same_label(pictures):
    drawn = together(epoch_of(pictures))
    assert drawn["labels"].bincount().tolist() == [8, 8, 8]
    rows = drawn["index"] % 24
    assert drawn["labels"].tolist() == [pictures["label"][row] for row in rows.tolist()]
    crops = drawn["pixel_values"][rows == 23]  # one of the two images of the rarest class
    assert len(crops) == 4 and len({crop.numpy().tobytes() for crop in crops}) == 4


def test_images_with_several_labels_have_no_class_to_be_drawn_by():
    several = noise(8, [[0, 1], [2]] * 4)
    assert len(epoch_of(several, name="natural")) == 1
    with refusal(None, "'balanced'"):
        epoch_of(several)
    kind = dict(problem_type="multi_label_classification", test_prior=None)
    with refusal("sampler", "natural"):
        LiViTConfig(class_counts=[5, 3], seen_counts=[4, 4], num_train_images=8, **kind)


# In the head


def fitted_posterior(
    sampler: str, head: LongTailHead, labels: np.ndarray, points: torch.Tensor, prior
) -> torch.Tensor:
    """Posteriors at the points of a linear model that was fitted to what four epochs draw."""
    weight = torch.zeros(points.shape[1] + 1, head.config.num_labels, requires_grad=True)
    inputs = torch.cat([points, torch.ones(len(points), 1)], dim=1)
    rows = np.concatenate([Sampler(sampler, 4).draws(labels, 0, epoch) % len(labels) for epoch in range(4)])
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = head(inputs[rows] @ weight, torch.from_numpy(labels[rows]))
        loss.backward()
        return loss

    optimizer.step(closure)
    return head.posterior(inputs @ weight.detach(), prior=prior)


@pytest.mark.parametrize("sampler", NAMES[1:])
@pytest.mark.parametrize(("loss", "classes"), [("ce", 3), ("bal_ce", 3), ("bal_bce", 2)])
def test_probabilities_are_right_where_the_head_knows_what_it_was_shown_and_else_not(sampler, loss, classes, tiny):
    # Gaussians of one width: log posteriors are linear, and those of two classes are log-odds.
    counts = np.array([8000, 2000, 400])[:classes]
    labels = np.repeat(np.arange(classes), counts)
    means = torch.tensor([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5]])[:classes]
    points = means[labels] + torch.randn(len(labels), 2, generator=torch.Generator().manual_seed(0))
    prior = torch.from_numpy(counts / counts.sum())
    true = (prior.log() - torch.cdist(points, means).square() / 2).softmax(-1)

    def error(**known) -> float:
        head = LongTailHead(LiViTConfig(**tiny, loss=loss, class_counts=counts.tolist(), **known))
        found = fitted_posterior(sampler, head, labels, points, prior)
        return (found - true).abs().sum(-1).mean().item() / 2

    assert error(seen_counts=seen_counts(counts, sampler, 4).tolist()) < 0.02
    assert error() > 0.04


def test_a_head_under_balanced_sampling_adds_no_bias_and_keeps_the_margins_of_different_images(tiny):
    plain = LongTailHead(LiViTConfig(**tiny, class_counts=[80, 20, 20], loss="bal_bce"))
    seen = LongTailHead(LiViTConfig(**tiny, class_counts=[80, 20, 20], seen_counts=[40, 40, 40], loss="bal_bce"))
    torch.testing.assert_close(seen.logit_bias, torch.zeros(3))
    torch.testing.assert_close(seen.prior, torch.full((3,), 1 / 3))
    assert torch.equal(seen.margin, plain.margin)
    head = LongTailHead(LiViTConfig(loss="bce", class_counts=[90, 10], seen_counts=[75.0, 25.0], **tiny))
    torch.testing.assert_close(head.initial_classifier_bias().sigmoid(), torch.tensor([0.75, 0.25]))  # as it is shown


@pytest.mark.parametrize(
    ("argument", "wrong", "values"),
    [
        ("seen_counts", [40, 40], ["2 entries"]),
        ("seen_counts", [120, 0, 0], ["[0"]),
        ("seen_counts", [50, 50, 50], [150, 120]),
        ("class_weights", [1, 2], ["2 entries"]),
        ("class_weights", [1, 2, -1], [-1]),
    ],
)
def test_seen_counts_and_class_weights_that_cannot_be_are_refused(argument, wrong, values, tiny):
    with refusal(argument, *values):
        LiViTConfig(**tiny, class_counts=[80, 20, 20], **{argument: wrong})
    with refusal("class_weights", "'lade'"):
        LiViTConfig(**tiny, class_counts=[80, 20, 20], class_weights=[1, 2, 3], loss="lade")


def test_new_counts_forget_what_the_old_training_saw(tiny):
    old = LiViTConfig(**tiny, class_counts=[80, 20, 20], seen_counts=[40, 40, 40], class_weights=[1, 2, 3])
    new = LiViTConfig.from_dict(old.to_dict(), class_counts=[7, 8, 9])
    assert (new.long_tail.seen_counts, new.long_tail.class_weights) == (None, None)
    assert LiViTConfig.from_dict(old.to_dict()).long_tail == old.long_tail


def test_fine_tuning_tells_the_head_what_the_sampler_shows_and_groups_classes_by_their_true_counts(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    counts = (110, 22, 12, 6)  # many, medium, few, few
    pictures = make_pictures(tmp_path / "pictures", train=counts)
    (tmp_path / "weights.json").write_text(json.dumps({f"class{label}": label + 1 for label in range(4)}))
    words = [*TINY, "--dataset", str(pictures), "--pretrained", "none", "--max_steps", "2", "--mixup", "0"]
    words += ["--cutmix", "0", "--validation_fraction", "0", "--loss", "ce"]
    finetune.main([*words, "--sampler", "balanced", "--output_dir", str(tmp_path / "sampled")])
    finetune.main(
        [*words, "--class_weights", str(tmp_path / "weights.json"), "--output_dir", str(tmp_path / "weighted")]
    )
    sampled, weighted = (LiViTConfig.from_pretrained(tmp_path / name).long_tail for name in ("sampled", "weighted"))
    assert (sampled.class_counts, sampled.seen_counts) == (list(counts), [37.5] * 4)
    assert (weighted.class_counts, weighted.class_weights) == (list(counts), [1, 2, 3, 4])
    for name in ("sampled", "weighted"):
        results = Run(tmp_path / name).results
        groups = {group: results.class_counts[group] for group in ("many", "medium", "few")}
        assert groups == {"many": 1, "medium": 1, "few": 2}
        assert all(results.metrics[group] is not None for group in groups)
    assert UNIFORM in Run(tmp_path / "sampled").results.rules
    assert UNIFORM not in Run(tmp_path / "weighted").results.rules  # weights change what the outputs estimate


# Weights of classes


@pytest.mark.parametrize("loss", ["ce", "bal_bce", "ldam"])
def test_class_weights_multiply_the_loss_of_an_image_by_the_weight_of_its_label(loss, tiny):
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 2, 2])
    settings = dict(**tiny, class_counts=[80, 20, 20], loss=loss)
    plain = LongTailHead(LiViTConfig(**settings))
    weighted = LongTailHead(LiViTConfig(**settings, class_weights=[1, 2, 6]))  # scaled to sum 3
    by_image = torch.stack([plain(logits[i : i + 1], labels[i : i + 1]) for i in range(6)])
    by_hand = (by_image * torch.tensor([1, 1, 2, 2, 6, 6]) / 3).mean()
    torch.testing.assert_close(weighted(logits, labels), by_hand)
    assert "class weights" in weighted.no_posterior


def test_class_weights_take_the_place_of_those_of_cb_and_drw(tiny):
    logits, labels = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([2])
    settings = dict(**tiny, class_counts=[80, 20, 20], class_weights=[1, 2, 6])
    cb, ce = (LongTailHead(LiViTConfig(**settings, loss=loss)) for loss in ("cb_ce", "ce"))
    assert torch.equal(cb(logits, labels), ce(logits, labels))
    deferred = LongTailHead(LiViTConfig(**settings, loss="ce", drw_start=0.8))
    deferred.set_epoch(7, 10)
    torch.testing.assert_close(2 * deferred(logits, labels), ce(logits, labels))  # 6 of 9 is twice 3 of 9
    deferred.set_epoch(8, 10)
    assert torch.equal(deferred(logits, labels), ce(logits, labels))
