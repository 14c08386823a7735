"""`livt data` names what is wrong with labels, files and splits, and ends with a command that works well."""

import logging
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusals import refusal
from test_near_copies import draw_part

from livt_hf.cli.copies import warn_about_copies
from livt_hf.cli.training_settings import TrainSettings
from livt_hf.data import load_dataset, load_long_tailed
from livt_hf.data.first_look import find_doubtful_labels, find_similar_labels, suggest_groups
from livt_hf.data.spec import DataSpec
from livt_hf.recipes import train, train_backbone
from livt_hf.recipes.data import main
from livt_hf.runs import data_folder, dataset_name


@pytest.fixture
def factory(tmp_path) -> Path:
    """Return a folder of 3 classes with 8 parts of 3 exposures each, and one of two images."""
    for label in range(3):
        (tmp_path / "factory" / f"defect{label}").mkdir(parents=True)
        for part in range(8):
            for shot in range(3):
                noise = np.random.RandomState(shot).randn(96, 96, 3) * 5
                picture = (draw_part(100 * label + part) * (1 - shot / 10) + noise).clip(0, 255).astype(np.uint8)
                Image.fromarray(picture).save(tmp_path / f"factory/defect{label}/{label}{part}_{shot}.jpg")
    (tmp_path / "factory" / "Todo").mkdir()
    for number in range(2):
        Image.fromarray(draw_part(1000 + number).astype(np.uint8)).save(tmp_path / f"factory/Todo/a{number}.png")
    return tmp_path / "factory"


def test_the_first_look_finds_the_leak_and_the_next_command_mends_it(factory, tmp_path, capsys):
    look = ["--output", str(tmp_path / "look")]
    main([str(factory), *look])
    printed = capsys.readouterr().out
    assert "Todo (2); min_images 5" in printed and "may be no classes: Todo (2)" in printed
    assert "Near copies in two splits" in printed and "Theorem" not in printed
    assert "file names are alike but for a last number" in printed
    assert (tmp_path / "look/near_copies.png").exists()
    words = shlex.split(printed.splitlines()[-1])
    assert words[words.index("--group_from") + 1] == "near_copies" and "--pretrained" in words

    main([str(factory), "--group_from", "near_copies", *look])
    printed = capsys.readouterr().out
    assert "No copies found in two splits." in printed and "groups.csv" in printed
    main([str(factory), "--group_from", str(tmp_path / "look/groups.csv"), *look])
    assert "No copies found in two splits." in capsys.readouterr().out


def test_a_training_warns_of_near_copies_once_and_not_where_they_are_grouped(factory, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    for group_from, warned in ((None, True), ("near_copies", False), (r"(\d+)_\d", False)):
        caplog.clear()
        spec = DataSpec(dataset=str(factory), group_from=group_from)
        data = load_dataset(spec)
        with caplog.at_level(logging.WARNING):
            warn_about_copies(data, spec)
        assert ("Near copies in two splits" in caplog.text) == warned
    assert (data_folder(str(factory)) / "near_copies.png").exists()


@pytest.mark.parametrize("start", [train.write_plan, train_backbone.Session.open])
def test_train_warns_of_near_copies_as_finetune_does(factory, caplog, monkeypatch, tmp_path, start):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    with caplog.at_level(logging.WARNING):
        start(TrainSettings.build(dataset=str(factory), pretrained="none", threads=1))
    assert caplog.text.count("Near copies in two splits") == 1


@pytest.mark.parametrize(
    ("names", "doubtful"),
    [
        (["owl", "TODO", "Unknown", "test"], ["TODO", "Unknown", "test"]),
        (["not_sure", "n/a", "New folder", "none of it"], ["not_sure", "n/a", "New folder"]),
        (["unknown soldier", "test tube"], []),
    ],
)
def test_labels_that_name_no_class_are_found(names, doubtful):
    assert find_doubtful_labels(names) == doubtful


@pytest.mark.parametrize(
    ("names", "similar"),
    [
        (["Black rot", "black_rot", "Black-Rots", "rot"], [["Black rot", "black_rot", "Black-Rots"]]),
        (["fox", "foxes", "Fox "], [["fox", "foxes", "Fox "]]),
        (["bus", "bu", "grass", "gras", "1", "2", "11"], []),
        (["black rot", "rot black"], []),
    ],
)
def test_labels_that_may_be_one_class_are_found(names, similar):
    assert find_similar_labels(names) == similar


@pytest.mark.parametrize(
    ("paths", "option"),
    [
        ([f"{c}/site{s}/{i}.jpg" for c in "ab" for s in range(4) for i in range(3)], "parent"),
        ([f"{c}/{c}{s}_{i}.jpg" for c in "ab" for s in range(6) for i in range(3)], r"([^/]+)[ _-]\d+\.\w+$"),
        ([f"{c}/{c}_{i}.jpg" for c in "ab" for i in range(9)], None),
        ([f"{c}/IMG_{i:04d}.jpg" for c in "ab" for i in range(9)], None),
        ([f"{c}/{c}{i}.jpg" for c in "ab" for i in range(9)], None),
        ([None, "a/b.jpg"], None),
    ],
)
def test_names_that_look_like_sites_or_bursts_suggest_groups(paths, option):
    images = load_long_tailed("glyphs")["test"].select(range(len(paths)))
    suggestion = suggest_groups(paths, [str(path)[0] for path in paths], images)
    assert (suggestion and suggestion[0]) == option


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("parts/labels.csv", "parts"),
        ("parts/train_labels.CSV", "parts"),
        ("parts/metadata.jsonl", "parts"),
        ("parts/train.txt.xz", "parts"),
        ("parts/annotations/instances_train2017.json", "parts"),
        ("parts/train/_annotations.coco.json", "parts"),
        ("parts/annotations", "annotations"),
        ("parts/scratches.csv", "scratches.csv"),
        ("cifar10-lt", "cifar10-lt"),
        (".", Path.cwd().name),
        ("..", Path.cwd().parent.name),
    ],
)
def test_runs_of_a_table_with_a_common_name_are_named_after_its_folder(dataset, name):
    assert dataset_name(dataset) == name


def test_images_without_class_folders_get_advice(tmp_path):
    for number in range(3):
        Image.new("L", (8, 8)).save(tmp_path / f"{number}.png")
    with refusal("dataset", "3 images", "labels.csv"):
        load_long_tailed(str(tmp_path))
