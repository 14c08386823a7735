import hashlib

import numpy as np
import pytest
from refusals import refusal

from livt_hf.data import class_counts, load_long_tailed, normalization
from livt_hf.data.glyphs import CLASSES, glyphs


@pytest.fixture(scope="module")
def data():
    return glyphs()


def pixels(dataset) -> np.ndarray:
    return np.stack([np.asarray(image) for image in dataset["image"]])


def test_many_medium_and_few_shot_classes_all_exist_and_the_test_set_is_balanced(data):
    counts = class_counts(data["train"])
    assert counts[0] / counts[-1] == 100
    assert min((counts > 100).sum(), ((counts >= 20) & (counts <= 100)).sum(), (counts < 20).sum()) >= 8
    assert class_counts(data["test"]).tolist() == [50] * len(CLASSES)
    assert data["train"].features["label"].names == list(CLASSES)


def test_no_two_classes_look_alike_under_the_poses():
    assert len(set(CLASSES)) == len(CLASSES) == 40
    for pair in ("bd", "69", "O0", "Cc", "I1", "pq", "Il"):
        assert not set(pair) <= set(CLASSES)


def test_pictures_are_32_pixel_rgb_and_the_published_statistics_are_theirs(data):
    images = pixels(data["train"])
    assert images.shape[1:] == (32, 32, 3)
    mean, std = normalization("glyphs")
    assert np.allclose(images.mean(axis=(0, 1, 2)) / 255, mean, atol=2e-3)
    assert np.allclose(images.std(axis=(0, 1, 2)) / 255, std, atol=2e-3)


def test_the_same_seed_gives_the_same_pictures_and_another_seed_others():
    small = {"max_count": 100, "test_per_class": 1}
    digests = [hashlib.sha256(pixels(glyphs(seed=s, **small)["train"]).tobytes()).digest() for s in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_a_stronger_imbalance_keeps_a_subset_of_the_pictures():
    mild, strong = (glyphs(g, max_count=100, test_per_class=1)["train"] for g in (10, 100))
    mild_pictures = {image.tobytes() for image in pixels(mild)}
    assert {image.tobytes() for image in pixels(strong)} < mild_pictures


def test_train_and_test_pictures_differ(data):
    train = {image.tobytes() for image in pixels(data["train"])}
    assert not train & {image.tobytes() for image in pixels(data["test"])}


def test_a_nearest_neighbour_finds_the_class_more_often_than_chance_but_not_always(data):
    def features(dataset):
        grey = pixels(dataset).mean(axis=3).reshape(len(dataset), -1)
        return (grey - grey.mean(axis=1, keepdims=True)) / grey.std(axis=1, keepdims=True)

    train, test = features(data["train"]), features(data["test"])
    guess = np.array(data["train"]["label"])[(test @ train.T).argmax(axis=1)]
    assert 0.1 < (guess == np.array(data["test"]["label"])).mean() < 0.9


def test_options_without_meaning_for_glyphs_are_refused():
    assert len(load_long_tailed("glyphs", imbalance_factor=1, images_per_class=2)["train"]) == 80
    for argument, value in {"rule": "pareto", "source": "somewhere"}.items():
        with refusal(argument):
            load_long_tailed("glyphs", **{argument: value})
