import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from livt_hf.data.labels import Labels, class_counts, digest_of
from livt_hf.data.spec import DataSpec
from livt_hf.data.splitting import (
    _keep_classes_in_training,
    grouped_split,
    split_test,
    stratified_folds,
    stratified_split,
)
from livt_hf.data.subsample import (
    exponential_counts,
    label_counts,
    largest_fitting,
    long_tail_indices,
    pareto_counts,
)
from livt_hf.errors import LiVTError


@pytest.mark.parametrize(
    ("num_classes", "max_count", "sizes"),
    [(10, 5000, {100: 12406, 50: 13996, 10: 20431}), (100, 500, {100: 10847, 50: 12608, 10: 19573})],
)
def test_cifar_lt_has_the_sizes_everyone_reports(num_classes, max_count, sizes):
    for gamma, size in sizes.items():
        counts = exponential_counts(num_classes, max_count, gamma)
        assert counts.sum() == size
        assert counts.tolist() == [int(max_count * gamma ** (-i / (num_classes - 1))) for i in range(num_classes)]
    assert all(exponential_counts(10, factor, factor)[-1] == 1 for factor in range(2, 200))  # whatever rounding does


def test_the_picks_are_those_of_the_loop_everyone_uses():
    labels = np.random.RandomState(3).randint(0, 12, size=3000)
    counts = exponential_counts(12, 100, 20)
    state = np.random.RandomState(0)  # the community's code: np.random.seed(0), np.where and shuffle per class
    expected = []
    for c in range(12):
        rows = np.where(labels == c)[0]
        state.shuffle(rows)
        expected.extend(rows[: counts[c]])
    assert long_tail_indices(labels, counts).tolist() == expected
    milder = long_tail_indices(labels, exponential_counts(12, 100, 10))
    assert set(expected) < set(milder.tolist())


def test_picks_leave_the_global_generator_alone():
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    long_tail_indices(np.arange(100) % 10, np.full(10, 3))
    assert np.random.rand() == expected


def test_asking_for_more_than_a_class_has_is_an_error_unless_capped():
    labels = np.array([0, 0, 0, 1])
    with pytest.raises(LiVTError, match="class 1 has 1"):
        long_tail_indices(labels, [2, 2])
    assert np.bincount(labels[long_tail_indices(labels, [2, 2], cap=True)]).tolist() == [2, 1]


def test_the_largest_fitting_count_is_the_last_that_no_class_falls_short_of():
    def exponential(count):
        return exponential_counts(3, count, 4)

    assert largest_fitting(exponential, np.array([5, 100, 30]), 4, 100) == 23  # 23, 11, 5; 24 would ask for 6
    assert largest_fitting(exponential, np.array([5, 100, 30]), 4, 20) == 20
    assert largest_fitting(exponential, np.array([1, 1, 100]), 4, 100) == 0  # 4 asks for 2 of the second


def test_pareto_goes_from_the_largest_to_the_smallest_count_and_resembles_imagenet_lt():
    counts = pareto_counts(1000, 1280, 256)
    assert counts[0] == 1280 and counts[-1] == 5
    assert (np.diff(counts) <= 0).all()
    assert 100_000 < counts.sum() < 120_000  # ImageNet-LT has 115,846


@pytest.mark.skipif("LIVT_DATA" not in os.environ, reason="needs the published class counts (LIVT_DATA)")
def test_pareto_is_closer_to_imagenet_lt_than_the_exponential_rule():
    path = Path(os.environ["LIVT_DATA"]) / "splits" / "ImageNet_LT_train_cls_num.json"
    real = np.sort(json.loads(path.read_text()))[::-1]
    pareto, exponential = pareto_counts(1000, 1280, 256), exponential_counts(1000, 1280, 256)
    assert np.abs(pareto - real).sum() < 0.15 * real.sum() < np.abs(exponential - real).sum()


@pytest.mark.parametrize("rule", [exponential_counts, pareto_counts])
def test_a_rule_refuses_an_imbalance_that_empties_the_last_class(rule):
    assert rule(10, 100, 100)[-1] == 1
    assert rule(1, 100, 10).tolist() == [100]
    for factor, named in ((101, "at most 100"), (0.01, "largest / smallest")):
        with pytest.raises(LiVTError) as error:
            rule(10, 100, factor)
        assert named in str(error.value)


def test_a_label_outside_the_names_is_named_with_its_row():
    for labels, classes, named in (
        ([0, 1, 7], 3, "row 2 has label 7"),
        ([-1, -1], 0, "-1"),
        ([-1, 1], 3, "row 0 has"),
    ):
        with pytest.raises(LiVTError) as error:
            label_counts(np.array(labels), classes)
        assert named in str(error.value)


def test_the_stratified_split_takes_a_fifth_of_each_class_and_leaves_one_for_training():
    labels = np.repeat([0, 1, 2, 3], [50, 10, 2, 1])
    train, test = stratified_split(labels, 0.2, seed=0)
    assert np.bincount(labels[test], minlength=4).tolist() == [10, 2, 0, 0]
    assert sorted(np.concatenate([train, test])) == list(range(63))
    halves = stratified_split(labels, 0.9, seed=0)[0]
    assert np.bincount(labels[halves]).tolist() == [5, 1, 1, 1]
    assert not np.array_equal(test, stratified_split(labels, 0.2, seed=1)[1])


@pytest.mark.parametrize("num_groups", [30, 5000])  # more than are divided one by one
def test_folds_of_groups_share_no_group_and_divide_each_class(num_groups):
    rng = np.random.RandomState(0)
    groups, labels = rng.randint(num_groups, size=20_000), rng.choice(3, size=20_000, p=[0.8, 0.15, 0.05])
    folds = stratified_folds(labels, groups, 5, seed=1)
    assert len(np.unique(groups * 5 + folds)) == len(np.unique(groups))
    for label in range(3):
        shares = np.bincount(folds[labels == label], minlength=5) / (labels == label).sum()
        assert np.allclose(shares, 0.2, atol=0.03)
    tests = [grouped_split(labels, groups, 0.2, seed)[1] for seed in (1, 1, 2)]
    assert np.array_equal(tests[0], tests[1]) and not np.array_equal(tests[0], tests[2])


@pytest.mark.parametrize("fraction", [0.01, 0.03, 0.05, 0.2])
def test_a_small_fraction_of_many_groups_is_met(fraction):
    rng = np.random.RandomState(0)
    groups, labels = rng.randint(1000, size=20_000), rng.choice(3, size=20_000, p=[0.8, 0.15, 0.05])
    train, test = grouped_split(labels, groups, fraction)
    assert abs(len(test) / 20_000 - fraction) < 0.1 * fraction and not set(groups[train]) & set(groups[test])


def test_folds_and_the_only_division_of_two_groups_go_by_the_seed():
    labels = np.arange(40) % 2
    first, again, other = (stratified_folds(labels, None, 4, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    tests = {tuple(grouped_split([0, 0, 0, 0], [0, 0, 1, 1], 0.5, seed)[1]) for seed in range(4)}
    assert tests == {(0, 1), (2, 3)}


def test_a_division_of_groups_alone_keeps_every_class():
    rng = np.random.RandomState(0)
    for seed in range(200):
        labels, groups = rng.randint(4, size=10), rng.randint(6, size=10)
        train, _ = grouped_split(labels, groups, (0.5, 0.9)[seed % 2], seed)
        assert set(labels[train]) == set(labels), seed


def test_many_classes_whose_images_would_all_be_held_out_take_no_longer_than_few():
    """Twenty thousand classes of ten images in two groups each, all in fold 0; their first groups stay in training."""
    labels = np.arange(200_000) // 10
    fold, groups = np.zeros(200_000, dtype=int), np.arange(200_000) // 5
    started = time.monotonic()
    _keep_classes_in_training(fold, Labels(labels), groups)
    assert time.monotonic() - started < 5
    assert np.array_equal(fold, np.where(groups % 2 == 0, -1, 0))


@pytest.mark.parametrize(
    ("labels", "groups"),
    [
        ([0] * 20 + [1, 2, 3] * 2, [*range(20), *[20] * 3, *[21] * 3]),  # two groups, each of the same three classes
        ([0] * 12 + [1, 1, 2, 2, 3, 3], [*range(12), 12, 13, 13, 14, 14, 12]),  # two of three groups for each class
    ],
)
def test_every_class_keeps_one_of_its_two_groups_in_training(labels, groups):
    features = Features(label=ClassLabel(num_classes=4), group=Value("string"))
    train = Dataset.from_dict({"label": labels, "group": map(str, groups)}, features=features)
    for fraction in (0.2, 0.5, 0.9):
        for seed in range(10):
            settings = DataSpec(group_column="group", test_fraction=fraction, split_seed=seed)
            parts = split_test({"train": train}, settings)
            assert set(parts["train"]["label"]) == {0, 1, 2, 3} and len(parts["test"])
            assert not set(parts["train"]["group"]) & set(parts["test"]["group"])


def test_labels_without_names_are_refused_with_the_way_to_give_them_some():
    dataset = Dataset.from_dict({"label": [0, 1, 1]})
    with pytest.raises(LiVTError, match="class_encode_column"):
        class_counts(dataset)
    assert class_counts(dataset.class_encode_column("label")).tolist() == [1, 2]


def test_images_are_known_again_by_their_labels_and_file_names_or_lengths_wherever_they_lie():
    def digest(paths, labels, images=(b"1", b"22", b"333"), rows=(0, 1, 2)):
        stored = [{"bytes": image, "path": path} for image, path in zip(images, paths, strict=True)]
        features = Features(image=Image(), label=ClassLabel(num_classes=2))
        return digest_of(Dataset.from_dict({"image": stored, "label": labels}, features=features).select(rows))

    named = digest(["a/1.png", "a/2.png", None], [0, 1, 1])
    assert named == digest(["b/c/1.png", "b\\2.png", None], [0, 1, 1], images=(None, b"", b"444"))
    others = [
        digest(["a/1.png", "a/3.png", None], [0, 1, 1]),
        digest(["a/1.png", "a/2.png", None], [0, 0, 1]),
        digest(["a/1.png", "a/2.png", None], [0, 1, 1], images=(b"1", b"22", b"4444")),
        digest(["a/1.png", "a/2.png", None], [0, 1, 1], rows=(1, 0, 2)),
    ]
    assert len({named, *others}) == 5
