"""Near copies are found in pixels and features, random images are not, and groups of them stay together."""

import csv
from pathlib import Path

import numpy as np
import pytest
from datasets import concatenate_datasets
from PIL import Image

from livt_hf.data import load_long_tailed
from livt_hf.data.groups import write_groups
from livt_hf.data.labels import image_paths, labels_of
from livt_hf.data.near_copies import (
    compare,
    connected_copies,
    feature_vectors,
    find_leaks,
    nearest_other,
    pixel_vectors,
    scale_by_chance,
    standardize,
)
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError

PARTS, EXPOSURES = 60, 4


def draw_part(seed: int) -> np.ndarray:
    """Return a smooth random picture."""
    coarse = np.random.RandomState(seed).randint(0, 256, (12, 12, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((96, 96), Image.Resampling.BICUBIC), dtype=np.float32)


@pytest.fixture(scope="module")
def bursts(tmp_path_factory) -> Path:
    """Return a folder of 60 parts of three classes; every third part has four exposures, moved and brightened."""
    folder, generator = tmp_path_factory.mktemp("parts"), np.random.RandomState(0)
    for part in range(PARTS):
        for shot in range(EXPOSURES if part % 3 == 0 else 1):
            picture = draw_part(part) * generator.uniform(0.7, 1) + generator.randn(96, 96, 3) * 5
            left, top = generator.randint(0, 2, 2)
            path = folder / f"class{part % 5 % 3}" / f"part{part:02d}_{shot}.jpg"
            path.parent.mkdir(exist_ok=True)
            cut = picture.clip(0, 255).astype(np.uint8)[top : top + 95, left : left + 95]
            Image.fromarray(cut).save(path, quality=85)
    return folder


def part_numbers(dataset) -> np.ndarray:
    return np.array([Path(path).name[:6] for path in image_paths(dataset).to_pylist()])


def test_exposures_of_a_part_are_one_group_and_other_parts_are_alone(bursts):
    images = load_long_tailed(str(bursts), test_fraction=None)["train"]
    vectors = standardize(pixel_vectors(images))
    groups = connected_copies(*scale_by_chance(vectors, labels_of(images).values))
    parts = part_numbers(images)
    assert len(set(zip(parts, groups, strict=True))) == len(set(groups)) == PARTS


def test_grouped_by_near_copies_no_part_is_on_both_sides_and_the_table_says_the_same(bursts, tmp_path):
    leaking = load_long_tailed(str(bursts))
    leaks = find_leaks(leaking, standardize(pixel_vectors(concatenate_datasets(list(leaking.values())))))
    train, test = (part_numbers(leaking[split]) for split in ("train", "test"))
    assert leaks.counts["test"] == np.isin(test, train).sum() and leaks.counts["train"] == np.isin(train, test).sum()
    for (one, row), (other, copy), cosine in leaks.pairs:
        assert part_numbers(leaking[one])[row] == part_numbers(leaking[other])[copy] and cosine > leaks.threshold

    data = load_long_tailed(str(bursts), group_from="near_copies")
    assert not set(part_numbers(data["train"])) & set(part_numbers(data["test"]))
    table = write_groups(data.values(), DataSpec(dataset=str(bursts)), tmp_path / "groups.csv")
    again = load_long_tailed(str(bursts), group_from=str(table))
    assert {split: part["group"][:] for split, part in again.items()} == {s: p["group"][:] for s, p in data.items()}
    with open(table, newline="") as file:
        assert len(list(csv.DictReader(file))) == 20 * EXPOSURES + 40


def test_blank_and_broken_images_are_no_copies_of_each_other(tmp_path):
    for label, values in (("a", (0, 0)), ("b", (255, 255))):
        (tmp_path / label).mkdir()
        for number, value in enumerate(values):
            Image.new("L", (40, 40), value).save(tmp_path / label / f"{number}.png")
        (tmp_path / label / "broken.png").write_bytes(b"no image")
        Image.fromarray(draw_part(ord(label)).astype(np.uint8)).save(tmp_path / label / "part.png")
    images = load_long_tailed(str(tmp_path), test_fraction=None)["train"]
    vectors = standardize(pixel_vectors(images))
    assert len(set(connected_copies(*scale_by_chance(vectors, labels_of(images).values)))) == 8


@pytest.mark.parametrize("seed", range(3))
def test_vectors_of_noise_have_no_copies_and_planted_ones_are_found_exactly_or_by_sorting(seed):
    generator = np.random.RandomState(seed)
    noise, labels = standardize(generator.randn(2000, 100).astype(np.float32)), generator.randint(0, 5, 2000)
    noise, threshold = scale_by_chance(noise, labels)
    assert len(set(connected_copies(noise, threshold))) == 2000
    planted = np.concatenate([noise, standardize(noise[:100] + 0.04 * generator.randn(100, 100).astype(np.float32))])
    side = np.repeat([0, 1], [2000, 100])
    for exact, least in ((5000, 100), (0, 97)):
        cosine, nearest = nearest_other(compare(planted, exact), side)
        assert (nearest[2000:] == np.arange(100)).sum() >= least and (cosine[2000:] >= threshold).sum() >= least


@pytest.mark.parametrize("exact", [5000, 0])
def test_copies_are_found_among_images_that_differ_in_few_directions(exact):
    generator = np.random.RandomState(0)
    pictures, labels = generator.randn(200, 8), generator.randint(0, 5, 200)
    again, labels = pictures[:50] + 0.03 * generator.randn(50, 8), np.r_[labels, labels[:50]]
    vectors, threshold = scale_by_chance(standardize(np.concatenate([pictures, again]).astype(np.float32)), labels)
    similarity, nearest = nearest_other(compare(vectors, exact), np.repeat([0, 1], [200, 50]))
    is_near = similarity >= threshold
    assert (nearest[200:] == np.arange(50)).all() and is_near[200:].all() and is_near[50:200].sum() <= 1


def test_images_that_resemble_many_others_need_more_similarity_to_be_copies():
    generator = np.random.RandomState(0)
    labels, noise = generator.randint(0, 5, 2000), generator.randn(2000, 100)
    noise[:40] += 1.5 * generator.randn(100)  # round objects on white, of all classes
    noise[:2], noise[50] = noise[0] + 0.1 * generator.randn(2, 100), noise[51] + 0.1 * generator.randn(100)
    vectors, threshold = scale_by_chance(standardize(noise.astype(np.float32)), labels)
    groups = connected_copies(vectors, threshold)
    assert len(set(groups)) == 1998 and groups[0] == groups[1] and groups[50] == groups[51]


def test_what_images_of_a_class_have_in_common_makes_no_copies_of_features():
    generator = np.random.RandomState(0)
    labels = np.repeat(np.arange(6), [400, 200, 100, 50, 20, 6])
    centres, noise = 3 * generator.randn(6, 64), generator.randn(len(labels), 64)
    features = (centres[labels] + noise).astype(np.float32)
    features[1:4] = features[0] + 0.1 * generator.randn(3, 64)
    groups = connected_copies(*scale_by_chance(standardize(feature_vectors(features, labels)), labels))
    sizes = np.bincount(groups)
    by_chance = sizes.sum() - len(sizes[sizes > 0]) - 3  # one or two in the mean of many seeds
    assert len(set(groups[:4])) == 1 and sizes[groups[0]] == 4 and by_chance <= 3


def test_capture_times_make_bursts_of_one_camera_in_one_folder(tmp_path, caplog):
    shots = [
        ("a", "one", 0),
        ("a", "one", 50),
        ("a", "one", 100),
        ("a", "one", 300),
        ("a", "two", 60),
        ("b", "one", 55),
    ]
    for number, (label, camera, second) in enumerate([*shots, ("b", None, 0)]):
        exif = Image.Exif()
        if camera is not None:
            exif[0x0110] = camera
            exif[0x8769] = {0x9003: f"2024:05:01 10:{second // 60:02d}:{second % 60:02d}"}
        (tmp_path / label).mkdir(exist_ok=True)
        Image.fromarray(draw_part(number).astype(np.uint8)).save(tmp_path / label / f"{number}.jpg", exif=exif)
    images = load_long_tailed(str(tmp_path), group_from="capture_time", test_fraction=None)["train"]
    assert images["group"][:] == [f"{p}.jpg" for p in ("a/0", "a/0", "a/0", "a/3", "a/4", "b/5", "b/6")]
    assert "1 of 7 images have no time" in caplog.text


def test_images_without_exif_have_no_capture_times(bursts):
    with pytest.raises(LiVTError) as error:
        load_long_tailed(str(bursts), group_from="capture_time")
    assert error.value.argument == "group_from" and "capture_time" in str(error.value)
