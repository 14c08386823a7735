"""Masks and other companions are named or left out; `exclude`, `where` and `group_from` choose and group images."""

import csv
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageColumn
from PIL import Image
from refusals import refusal

from livt_hf.cli.settings import InspectDataSettings
from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.data import load_dataset, load_long_tailed
from livt_hf.data.companions import find_companions, is_two_valued
from livt_hf.data.load import load_pool
from livt_hf.data.spec import DataSpec


def write_image(path: Path, seed: int, two_valued: bool = False) -> None:
    """Write an image of noise, or of black and white dots."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.RandomState(seed).randint(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray((noise > 127).astype(np.uint8) * 255 if two_valued else noise).save(path)


@pytest.fixture
def parts(tmp_path) -> Path:
    """Return a folder of two classes with three sites each, three images of a site, and no companions."""
    for label in ("dent", "scratch"):
        for site in range(3):
            for number in range(3):
                path = tmp_path / "parts" / label / f"site{site}" / f"{label}-{site}-{number}.jpg"
                write_image(path, 100 * (label == "dent") + 10 * site + number)
    return tmp_path / "parts"


def add_masks(images: Path, folder: Path, name: str, two_valued: bool = True) -> None:
    for seed, image in enumerate(sorted(images.rglob("*.jpg"))):
        path = image.relative_to(images).with_suffix("").as_posix()
        write_image((images if name.startswith("{path}") else folder) / name.format(path=path), seed, two_valued)


def images_of(folder: Path, **options) -> set[str]:
    splits = load_dataset(DataSpec(dataset=str(folder), test_fraction=None, **options)).values()
    return {Path(image["path"]).name for part in splits for image in part.data.table["image"].to_pylist()}


@pytest.mark.parametrize("name", ["{path}.png", "{path}_mask.png", "masks/{path}.png", "ground_truth/{path}-seg.png"])
def test_masks_beside_every_image_are_left_out_and_said_so(parts, name, caplog):
    before = images_of(parts)
    if not name.startswith("{path}"):  # a folder of masks stands beside one of images
        parts = parts.rename(parts.with_name("images")).parent
    images = parts / "images" if (parts / "images").is_dir() else parts
    add_masks(images, parts, name)
    assert images_of(parts) == before and "left out 18 masks" in caplog.text
    if images == parts:
        assert len(images_of(parts, exclude=["none"])) == 36


@pytest.mark.parametrize(
    ("name", "two_valued", "pattern"),
    [("{path}.png", False, "*.png"), ("{path}_thumb.png", True, "*_thumb.*"), ("{path}_aug1.jpg", False, "*_aug*.*")],
)
def test_other_companions_are_named_with_a_pattern_that_leaves_them_out(parts, name, two_valued, pattern, caplog):
    before = images_of(parts)
    add_masks(parts, parts, name, two_valued)
    (parts / "dent" / "site0" / "alone.jpg").write_bytes((parts / "dent" / "site0" / "dent-0-0.jpg").read_bytes())
    assert len(images_of(parts)) == 37  # one image has no companion, so none are taken for masks
    assert "18 of 37 images are named like masks" in caplog.text and pattern in caplog.text
    assert images_of(parts, exclude=[pattern]) == before | {"alone.jpg"}


def test_images_that_only_share_a_name_are_no_companions():
    assert find_companions(["a/1.jpg", "b/1.jpg", "images/a/1.jpg", "mask/2.jpg", "no mask/3.jpg", "x_mask.png"]) == {}
    assert find_companions(["a/1.jpg", "a/1.png", "a/2_aug1.png", "a/2_aug2.png"]) == {1: 0, 2: None, 3: None}
    assert find_companions(["x/7.png", "masks/7.png", "masks/8.png"]) == {1: None, 2: None}


def test_a_mask_stored_as_jpeg_has_two_values_and_a_photograph_has_more(tmp_path):
    square = np.zeros((64, 64), dtype=np.uint8)
    square[16:48, 16:48] = 255
    Image.fromarray(square).save(tmp_path / "mask.jpg", quality=95)
    Image.fromarray(np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)).save(tmp_path / "ramp.jpg")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    for name in ("mask", "ramp", "broken"):
        assert is_two_valued(str(tmp_path / f"{name}.jpg")) == (name == "mask")


@pytest.mark.parametrize(
    ("options", "argument", "value"),
    [
        (dict(exclude=["*.tif"]), "exclude", "'*.tif'"),
        (dict(exclude=["dent/*", "scratch/*"]), "exclude", "all 18"),
        (dict(group_from="(site"), "group_from", "'(site'"),
        (dict(group_from="patient"), "group_from", "'patient'"),
        (dict(group_from="site"), "group_from", "one group, site"),
        (dict(group_from="missing.csv"), "group_from", "missing.csv"),
        (dict(group_from="parent", group_column="site"), "group_from", "parent"),
        (dict(where=["site=1"]), "where", "site=1"),
    ],
)
def test_a_folder_rejects(parts, options, argument, value):
    with refusal(argument, value):
        load_dataset(DataSpec(dataset=str(parts), **options))


@pytest.mark.parametrize(
    ("group_from", "number"),
    [("parent", 3), (r"/(\w+-\d)-\d\.jpg$", 6), ("groups.csv", 6)],  # a site has images of both classes
)
def test_groups_from_paths_stay_together_in_splits_and_folds(parts, group_from, number, tmp_path):
    if group_from == "groups.csv":
        group_from = str(tmp_path / group_from)
        with open(group_from, "w", newline="") as file:
            csv.writer(file).writerows(
                [("path", "group"), *((p.relative_to(parts), p.parent) for p in parts.rglob("*.jpg"))]
            )
    spec = DataSpec(dataset=str(parts), group_from=group_from)
    data = load_dataset(spec)
    train, test = (set(data[split]["group"]) for split in ("train", "test"))
    assert len(train | test) == number and not train & test
    pool = load_pool(spec.replace(fold="1/3"))
    folds = {(group, fold) for group, fold in zip(pool.splits["train"]["group"], pool.fold, strict=True)}
    assert len(folds) == number


def test_the_folder_of_a_class_is_no_group_however_its_letters_are_spelt(tmp_path):
    for label in ("o\u0308l", "wasser"):  # as macOS spells ö
        for number in range(6):
            write_image(tmp_path / "own" / label / f"site{number % 3}" / f"{number}.png", number + 10 * len(label))
    data = load_dataset(DataSpec(dataset=str(tmp_path / "own"), group_from="parent", test_fraction=None))
    assert set(data["train"]["group"]) == {"site0", "site1", "site2"}


def test_images_that_match_no_group_stay_alone(parts, caplog):
    data = load_dataset(DataSpec(dataset=str(parts), group_from=r"(dent-\d)"))
    assert len(set(data["train"]["group"]) | set(data["test"]["group"])) == 3 + 9
    assert "9 of 18 images do not match group_from" in caplog.text


def test_rows_of_a_table_are_filtered(tmp_path):
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "finding", "view", "year"])
        for i in range(12):
            write_image(tmp_path / f"{i}.png", i)
            table.writerow([f"{i}.png", "ab"[i % 2], ["front", "side", "top"][i % 3], 2020 + i // 6])
    dataset = str(tmp_path / "labels.csv")
    assert len(images_of(dataset, where=["view=front"])) == 4
    assert len(images_of(dataset, where=["view=front", "view=side", "year=2021"])) == 4
    for where, value in ((["sight=front"], "sight=front"), (["view"], "'view'"), (["view=back"], "view=back")):
        with refusal("where", value):
            images_of(dataset, where=where)
    for pattern in (["1?.png"], "1?.png"):
        assert len(images_of(dataset, exclude=pattern)) == 10


def test_a_value_that_where_asks_for_may_be_in_one_split_alone_and_labels_may_be_hidden(tmp_path):
    def part(labels, sites):
        columns = {"image": [Image.new("RGB", (8, 8))] * len(labels), "label": labels, "site": sites}
        features = Features(image=ImageColumn(), label=ClassLabel(names=["cat", "dog"]), site=Value("string"))
        return Dataset.from_dict(columns, features=features)

    parts = DatasetDict(train=part([0, 1, 0], ["a", "b", "a"]), test=part([0, 1], ["c", "c"]))
    parts.save_to_disk(tmp_path / "own")
    data = load_long_tailed(str(tmp_path / "own"), where=["site=a", "site=c"], drop_empty=True, exclude_labels="dog")
    assert (len(data["train"]), len(data["test"])) == (2, 1)
    parts["test"] = part([-1, -1], ["a", "a"])
    parts.save_to_disk(tmp_path / "hidden")
    with refusal("dataset", 'split "test" has no image'):
        load_long_tailed(str(tmp_path / "hidden"), where=["label=cat"])


def test_patterns_may_be_given_several_times():
    words = ["F", "--exclude", "masks/*", "--where=a=b", "--exclude", "*_aug*", "*_flip*", "--group_from", "parent"]
    for settings in (InspectDataSettings.parse(words), FinetuneSettings.parse([*words, "--pretrained", "none"])):
        assert settings.data.exclude == ["masks/*", "*_aug*", "*_flip*"] and settings.data.where == ["a=b"]
        assert settings.data.group_from == "parent"
