import errno
import gzip
import io
import json
import lzma
import os
import unicodedata
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, LargeList, List, Value
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HTTPError
from needs import needs_linux
from PIL import Image as PILImage
from refusals import refusal

from livt_hf.cli.settings import PublishDataSettings
from livt_hf.data import (
    class_counts,
    exponential_counts,
    load_dataset,
    load_evaluation_data,
    load_long_tailed,
    normalization,
    register_dataset,
)
from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.data.load import ImagePool
from livt_hf.data.readers.image_list import read_list
from livt_hf.data.spec import DataSpec
from livt_hf.data.splitting import is_made_split, split_test, stratified_split
from livt_hf.errors import LiVTError, is_path_not_hub_id

needs_data = pytest.mark.skipif("LIVT_DATA" not in os.environ, reason="needs real data (LIVT_DATA)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def png(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    PILImage.new("RGB", (4, 4), (value % 256, value // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def rows(labels: list, image: str = "image", label: str = "label", paths=None) -> dict:
    paths = paths or [None] * len(labels)
    return {image: [{"bytes": png(i), "path": p} for i, p in enumerate(paths)], label: labels}


def write_parquet(file: Path, labels: list, names: list[str], image="image", label="label", paths=None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    features = Features({image: Image(), label: ClassLabel(names=names)})
    Dataset.from_dict(rows(labels, image, label, paths), features=features).to_parquet(file)


def write_images(folder: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (folder / name / f"{i:03d}.png").write_bytes(png(i))


# Named benchmarks


def test_cifar_lt_is_made_of_a_local_copy_in_the_hubs_layout(tmp_path):
    names = [f"class {c}" for c in range(10)]
    labels = np.random.RandomState(0).permutation(np.repeat(np.arange(10), 20)).tolist()
    write_parquet(tmp_path / "copy/plain_text/train-00000-of-00001.parquet", labels, names, image="img")
    write_parquet(tmp_path / "copy/plain_text/test-00000-of-00001.parquet", list(range(10)), names, image="img")
    data = load_long_tailed("cifar10-lt", imbalance_factor=10, source=tmp_path / "copy")
    assert list(data) == ["train", "test"] and data["train"].column_names == ["image", "label"]
    assert class_counts(data["train"]).tolist() == exponential_counts(10, 20, 10).tolist()
    assert data["train"].features["label"].names == names
    assert data["train"][0]["image"].size == (4, 4)
    assert len(load_long_tailed("cifar10-lt", imbalance_factor=1, source=tmp_path / "copy")["train"]) == 200


@needs_data
def test_real_cifar100_lt_has_the_community_counts_and_milder_splits_contain_it():
    source = Path(os.environ["LIVT_DATA"]) / "cifar100"
    strong = load_long_tailed("cifar100-lt", source=source)
    assert len(strong["train"]) == 10_847 and len(strong["test"]) == 10_000
    assert class_counts(strong["train"]).tolist() == [int(500 * 100 ** (-i / 99)) for i in range(100)]
    assert strong["train"].features["label"].names[:2] == ["apple", "aquarium_fish"]
    mild = load_long_tailed("cifar100-lt", imbalance_factor=10, source=source)
    assert len(mild["train"]) == 19_573
    rows_of = [set(d["train"]._indices.column(0).to_pylist()) for d in (strong, mild)]
    assert rows_of[0] < rows_of[1]


@needs_data
@pytest.mark.parametrize("style", ["Places_LT", "Places_LT_v2"])
def test_places_lt_comes_from_the_communitys_lists(tmp_path, style):
    splits = Path(os.environ["LIVT_DATA"]) / "splits"
    (tmp_path / "lists").mkdir()
    files = {split: splits / f"{style}_{split}.txt.xz" for split in ("train", "val", "test")}
    for file in files.values():
        (tmp_path / "lists" / file.name).symlink_to(file)
    lists = {split: read_list(file) for split, file in files.items()}
    for images in lists.values():  # only the names matter here: a folder's images are empty but for the first
        for folder in {path.rpartition("/")[0] for path in images.paths}:
            (tmp_path / "places" / folder).mkdir(parents=True, exist_ok=True)
        for path in images.paths:
            os.close(os.open(tmp_path / "places" / path, os.O_CREAT))
    (tmp_path / "places" / lists["train"].paths[0]).write_bytes(png())

    data = load_long_tailed("places-lt", source=tmp_path / "places", lists=tmp_path / "lists")
    assert {split: len(part) for split, part in data.items()} == {"train": 62_500, "validation": 7_300, "test": 36_500}
    counts = class_counts(data["train"])
    assert (len(counts), counts.min(), counts.max()) == (365, 5, 4980)
    assert ((counts > 100).sum(), ((counts >= 20) & (counts <= 100)).sum(), (counts < 20).sum()) == (131, 163, 71)
    assert counts.tolist() == json.loads((splits / "Places_LT_train_cls_num.json").read_text())
    names = data["train"].features["label"].names
    assert names[0] == "airfield" and len(set(names)) == 365
    assert data["train"][0]["image"].size == (4, 4)


@pytest.fixture
def imagenet(tmp_path) -> Path:
    """The Hub's layout of ImageNet with two classes, and lists that pick from it."""
    synsets = ["n01440764", "n01443537"]
    train = [f"{s}_{i}_{s}.JPEG" for s in synsets for i in (10, 26, 7)]
    write_parquet(tmp_path / "hub/data/train-0.parquet", [0, 0, 0, 1, 1, 1], ["tench", "goldfish"], paths=train)
    val = [f"ILSVRC2012_val_0000000{i}_{s}.JPEG" for i, s in enumerate(synsets)]
    write_parquet(tmp_path / "hub/data/validation-0.parquet", [0, 1], ["tench", "goldfish"], paths=val)
    write_parquet(tmp_path / "hub/data/test-0.parquet", [-1, -1], ["tench", "goldfish"])
    lists = {
        "train": "train/n01440764/n01440764_26.JPEG 0\ntrain/n01443537/n01443537_7.JPEG 1\n"
        "train/n01440764/n01440764_7.JPEG 0\n",
        "val": "train/n01440764/n01440764_10.JPEG 0\n",
        "test": "val/n01443537/ILSVRC2012_val_00000001.JPEG 1\nval/n01440764/ILSVRC2012_val_00000000.JPEG 0\n",
    }
    (tmp_path / "lists").mkdir()
    for split, text in lists.items():
        (tmp_path / "lists" / f"ImageNet_LT_{split}.txt").write_text(text)
    return tmp_path


def test_imagenet_lt_joins_the_lists_with_the_hubs_file_names(imagenet):
    data = load_long_tailed("imagenet-lt", source=imagenet / "hub", lists=imagenet / "lists")
    undecoded = data.cast_column("image", Image(decode=False))
    names = {split: [image["path"] for image in part["image"]] for split, part in undecoded.items()}
    assert names["train"] == [
        "n01440764_26_n01440764.JPEG",
        "n01443537_7_n01443537.JPEG",
        "n01440764_7_n01440764.JPEG",
    ]
    assert names["validation"] == ["n01440764_10_n01440764.JPEG"]
    assert data["train"]["label"][:] == [0, 1, 0] and data["test"]["label"][:] == [1, 0]
    assert data["train"].features["label"].names == ["tench", "goldfish"]
    full = load_long_tailed("imagenet-1k", source=imagenet / "hub")  # tested on the published validation set
    assert {split: len(part) for split, part in full.items()} == {"train": 6, "test": 2}
    balanced = load_long_tailed("imagenet-bal", source=imagenet / "hub", images_per_class=2)
    assert class_counts(balanced["train"]).tolist() == [2, 2]


def test_imagenet_lt_of_wrong_or_missing_lists_and_images_is_refused_by_their_names(imagenet):
    def text_of(**places) -> str:
        with pytest.raises(LiVTError) as error:
            load_long_tailed("imagenet-lt", **places)
        return str(error.value)

    both = dict(source=imagenet / "hub", lists=imagenet / "lists")
    assert "ImageNet_LT_train.txt" in text_of()
    assert "6 training images" in text_of(source=imagenet / "hub")
    for line, named in (("n01440764_99.JPEG 0", "_99.JPEG"), ("n01440764_26.JPEG 1", "disagree")):
        (imagenet / "lists" / "ImageNet_LT_train.txt").write_text(f"train/n01440764/{line}\n")
        assert named in text_of(**both)
    (imagenet / "lists" / "ImageNet_LT_train.txt").write_text("train/n01440764/n01440764_26.JPEG 0\n")
    for split in ("validation", "test"):
        (imagenet / f"hub/data/{split}-0.parquet").unlink()
    assert "2 of 2 images" in text_of(**both)


def test_inat18_reports_on_its_validation_list(tmp_path):
    write_images(tmp_path / "train_val2018/Plantae", {"0": 3, "1": 2})
    train = ["0/000.png 0", "0/001.png 0", "1/000.png 1"]
    for split, lines in (("train", train), ("val", ["0/002.png 0", "1/001.png 1"])):
        text = "".join(f"train_val2018/Plantae/{line}\n" for line in lines)
        (tmp_path / f"iNaturalist18_{split}.txt").write_text(text)
    data = load_long_tailed("inat18", source=tmp_path)
    assert {split: len(part) for split, part in data.items()} == {"train": 3, "test": 2}


def test_normalization_is_the_papers():
    assert normalization("imagenet-lt")[0] == (0.479672, 0.457713, 0.407721)
    assert normalization("inat18")[1] == (0.195, 0.194, 0.192)
    assert (
        normalization("cifar10-lt")
        == normalization("cifar100-lt")
        == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    )
    assert (
        normalization("places-lt") == normalization("some/own-data") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )


def test_a_function_registered_by_name_is_a_dataset_like_any_other(request):
    request.addfinalizer(lambda: BENCHMARKS.pop("mine"))
    asked = []

    @register_dataset("mine", mean=(0.1, 0.2, 0.3))
    def mine(settings: DataSpec) -> DatasetDict:
        asked.append(settings.split_seed)
        return DatasetDict(train=named_rows([0] * 20 + [1] * 10, ["a", "b"]))

    data = load_long_tailed("mine", imbalance_factor=4, seed=3)
    assert asked == [3] and normalization("mine")[0] == (0.1, 0.2, 0.3)
    assert class_counts(data["test"]).tolist() == [4, 2] and class_counts(data["train"]).tolist() == [16, 4]
    with pytest.raises(LiVTError, match="'mine' exists already"):
        register_dataset("mine")(mine)


def test_of_a_registered_dataset_images_are_held_out_and_a_licence_is_asked_for_as_of_any_own_data(
    request, monkeypatch
):
    request.addfinalizer(lambda: BENCHMARKS.pop("mine"))
    register_dataset("mine")(lambda settings: DatasetDict(train=named_rows([0, 1] * 20, ["a", "b"])))
    monkeypatch.setattr("livt_hf.data.splitting.MIN_IMAGES_TO_SPLIT", 20)
    assert is_made_split(load_long_tailed("mine", validation_fraction=None), "validation")
    with refusal("license"):
        PublishDataSettings.build(dataset="mine", repo_id="org/mine")


# Own data


def test_an_image_folder_keeps_its_imbalance_and_gives_a_fifth_to_the_test_set(tmp_path, caplog):
    write_images(tmp_path / "birds", {"finch": 20, "owl": 5, "rare": 1})
    data = load_long_tailed(str(tmp_path / "birds"))
    assert class_counts(data["train"]).tolist() == [16, 4, 1] and class_counts(data["test"]).tolist() == [4, 1, 0]
    assert data["train"].features["label"].names == ["finch", "owl", "rare"]
    assert "classes that are too small to give a test image: rare" in caplog.text
    write_images(tmp_path / "birds", {f"rare{number:02d}": 1 for number in range(13)})
    load_long_tailed(str(tmp_path / "birds"))
    assert "rare08 and 4 more" in caplog.text  # ten are named


def test_an_image_beside_the_classes_of_a_split_does_not_make_the_splits_classes(tmp_path, caplog):
    for split in ("train", "test"):
        write_images(tmp_path / "own" / split, {"a": 4, "b": 2})
        (tmp_path / "own" / split / "montage.png").write_bytes(png())
    data = load_long_tailed(str(tmp_path / "own"))
    assert data["train"].features["label"].names == ["a", "b"] and not is_made_split(data, "test")
    assert [class_counts(data[split]).tolist() for split in ("train", "test")] == [[4, 2], [4, 2]]
    assert "left out 2 images that lie in no class folder" in caplog.text


def test_images_that_are_stored_with_a_split_column_are_divided_by_it(tmp_path, request):
    stored = rows(["cat", "dog"] * 6) | {"Split": ["train"] * 8 + ["test"] * 4}
    features = Features({"image": Image(), "label": Value("string"), "Split": Value("string")})
    dataset = Dataset.from_dict(stored, features=features)
    dataset.to_parquet(tmp_path / "own.parquet")
    place = str(tmp_path / "own.parquet")
    request.addfinalizer(lambda: BENCHMARKS.pop("shuffled"))
    register_dataset("shuffled")(lambda settings: DatasetDict(train=dataset.shuffle(seed=1)))
    shuffled = load_long_tailed("shuffled")
    for split, numbers in {"train": range(8), "test": range(8, 12)}.items():
        colours = [np.asarray(image)[0, 0, 0] for image in shuffled[split]["image"]]
        assert sorted(colours) == list(numbers) and shuffled[split]["label"][:] == [colour % 2 for colour in colours]
    divided = load_long_tailed(place)
    assert {split: len(divided[split]) for split in divided} == {"train": 8, "test": 4} and not is_made_split(
        divided, "test"
    )
    assert is_made_split(load_long_tailed(place, split_column="none"), "test")


def test_a_list_may_begin_with_a_mark_and_tells_of_files_that_are_missing(tmp_path, caplog):
    write_images(tmp_path, {"cat": 5, "dog": 5})
    lines = [f"{name}/{i:03d}.png {label}" for label, name in enumerate(("cat", "dog")) for i in range(5)]
    (tmp_path / "list.txt").write_text("\n".join(lines), encoding="utf-8-sig")
    assert load_long_tailed(str(tmp_path / "list.txt"))["train"].features["label"].names == ["cat", "dog"]
    (tmp_path / "cat/000.png").unlink()
    data = load_long_tailed(str(tmp_path / "list.txt"), on_broken="skip", test_fraction=None)
    assert class_counts(data["train"]).tolist() == [4, 5]
    assert "left out 1 missing files of" in caplog.text and "such as cat/000.png" in caplog.text


def test_the_top_folder_is_the_class_however_deep_its_images_lie(tmp_path):
    write_images(tmp_path / "birds", {"finch": 2, "owl/field trip 2019": 1, "owl/field trip 2019/day 2": 2})
    data = load_long_tailed(str(tmp_path / "birds"), test_fraction=0.4)
    assert data["train"].features["label"].names == ["finch", "owl"]
    assert class_counts(data["train"]).tolist() == [1, 2] and class_counts(data["test"]).tolist() == [1, 1]
    write_images(tmp_path / "split/train", {"finch": 2, "owl/field trip 2019": 3})
    write_images(tmp_path / "split/Test2", {"owl/more": 1})
    data = load_long_tailed(str(tmp_path / "split"))
    assert class_counts(data["train"]).tolist() == [2, 3] and class_counts(data["test"]).tolist() == [0, 1]


def test_classes_may_be_called_like_splits_and_archives_may_nest_their_folder(tmp_path):
    write_images(tmp_path / "archive/vehicles", {"bullet train": 5, "train": 5, "test tube": 5})
    data = load_long_tailed(str(tmp_path / "archive"))
    assert data["train"].features["label"].names == ["bullet train", "test tube", "train"]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("seg_train/seg_train", "seg_test/seg_test"),  # Intel Image Classification
        ("training_set/training_set", "test_set/test_set"),  # cats and dogs
        ("train/images", "test/images"),
        ("archive/Birds Train", "archive/Birds Test"),
    ],
)
def test_a_lone_folder_around_the_classes_of_a_split_is_no_class(tmp_path, caplog, train, test):
    write_images(tmp_path / "own" / train, {"sea": 3, "street": 2})
    write_images(tmp_path / "own" / test, {"sea": 1, "street": 1})
    if "seg_" in train:
        write_images(tmp_path / "own/seg_pred", {"seg_pred": 4})  # without labels
    data = load_long_tailed(str(tmp_path / "own"))
    assert data["train"].features["label"].names == ["sea", "street"] and not is_made_split(data, "test")
    assert [class_counts(data[split]).tolist() for split in ("train", "test")] == [[3, 2], [1, 1]]
    assert ("left out 4 images that lie in no class folder" in caplog.text) == ("seg_" in train)


def test_an_empty_class_folder_can_be_dropped(tmp_path, caplog):
    write_images(tmp_path / "birds", {"finch": 5, "ghost": 0, "owl": 5})
    data = load_long_tailed(str(tmp_path / "birds"), drop_empty=True)
    assert data["train"].features["label"].names == ["finch", "owl"] and "ghost" in caplog.text
    assert class_counts(data["train"]).tolist() == [4, 4] and class_counts(data["test"]).tolist() == [1, 1]


def test_hidden_files_are_left_out_and_files_that_are_no_images_are_counted(tmp_path, caplog):
    write_images(tmp_path / "birds", {"__background__": 5, "owl": 5, "__MACOSX": 5, ".thumbnails": 5})
    for name in ("owl/.DS_Store", "owl/._000.png", "owl/notes.txt", "owl/one.heic", "owl/two.HEIC", "cover.png"):
        (tmp_path / "birds" / name).write_bytes(b"")
    data = load_long_tailed(str(tmp_path / "birds"))
    assert class_counts(data["train"]).tolist() == [4, 4] and class_counts(data["test"]).tolist() == [1, 1]
    assert "2 .heic, 1 .txt" in caplog.text and "left out 1 images that lie in no class folder" in caplog.text


@needs_linux  # elsewhere every name is Unicode
@pytest.mark.parametrize("name", ["caf\udce9/0.png", "owl/caf\udce9.png"])
def test_a_name_in_another_encoding_is_refused(tmp_path, name):
    write_images(tmp_path / "birds", {"finch": 5, "owl": 4})
    (tmp_path / "birds" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "birds" / name).write_bytes(png())
    with pytest.raises(LiVTError, match=r"caf\\udce9(.png)?' is not named in UTF-8: rename it"):
        load_long_tailed(str(tmp_path / "birds"))


def test_links_that_leave_the_image_folder_are_refused(tmp_path):
    write_images(tmp_path / "birds", {"finch": 5, "owl": 4})
    write_images(tmp_path, {"elsewhere": 1})
    link = tmp_path / "birds/owl/004.png"
    link.symlink_to("../finch/000.png")
    assert len(load_long_tailed(str(tmp_path / "birds"))["train"]) == 8
    for target in (tmp_path / "elsewhere/000.png", tmp_path / "elsewhere", tmp_path / "birds"):
        link.unlink()
        link.symlink_to(target, target_is_directory=target.is_dir())
        with pytest.raises(LiVTError, match="004.png is a link to"):
            load_long_tailed(str(tmp_path / "birds"))


def test_an_image_folder_has_the_order_and_the_classes_that_datasets_gives_it(tmp_path):
    write_images(tmp_path / "birds/train", {"b": 12, "a b": 3, "a": 3, "Z": 3, "é": 3, "a-b": 2})
    write_images(tmp_path / "birds/validation", {"b": 2, "a": 3})
    write_images(tmp_path / "birds/test", {"b": 1, "Z": 2})
    for i in range(12):
        (tmp_path / f"birds/train/b/{i}.PNG").write_bytes(png(i))
    ours = load_long_tailed(str(tmp_path / "birds"))
    theirs = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "birds"))
    assert list(ours) == list(theirs)
    for split in theirs:
        assert ours[split].features == theirs[split].features
        ours_rows, their_rows = (d[split].cast_column("image", Image(decode=False))[:] for d in (ours, theirs))
        assert ours_rows == their_rows


def test_a_test_set_cut_from_the_training_images_is_warned_of_and_remembered(tmp_path, caplog):
    write_images(tmp_path / "birds/train", {"finch": 10, "owl": 10})
    write_images(tmp_path / "birds/val", {"finch": 2, "owl": 2})
    data = load_long_tailed(str(tmp_path / "birds"))
    assert {split: len(part) for split, part in data.items()} == {"train": 16, "validation": 4, "test": 4}
    assert "4 of 20 training images are held out" in caplog.text and "rename the validation split" in caplog.text
    assert is_made_split(data, "test") and not is_made_split(data, "train")
    marked = data["test"].select([0])  # as version 0.2 marked a split
    marked.info.description = "set aside from the training data"
    assert is_made_split({"test": marked}, "test") and not is_made_split({"test": data["train"]}, "test")
    (tmp_path / "birds/val").rename(tmp_path / "birds/test")
    assert not is_made_split(load_long_tailed(str(tmp_path / "birds")), "test")


def test_a_fold_and_held_out_images_are_no_splits_of_the_dataset_itself(tmp_path):
    write_images(tmp_path / "birds/train", {"finch": 10, "owl": 10})
    write_images(tmp_path / "birds/test", {"finch": 2, "owl": 2})
    own = load_long_tailed(str(tmp_path / "birds"), validation_fraction=0.2)
    assert is_made_split(own, "validation") and not is_made_split(own, "test") and not is_made_split(own, "train")
    assert is_made_split(load_long_tailed(str(tmp_path / "birds"), fold="1/2"), "test")
    write_images(tmp_path / "birds/val", {"finch": 2, "owl": 2})
    assert not is_made_split(load_long_tailed(str(tmp_path / "birds"), validation_fraction=0.2), "validation")


def test_a_rule_thins_own_data_with_the_largest_class_first(tmp_path):
    write_images(tmp_path / "birds/train", {"finch": 10, "owl": 40, "wren": 20})
    write_images(tmp_path / "birds/test", {"finch": 1, "owl": 1, "wren": 1})
    folder = str(tmp_path / "birds")
    counts = class_counts(load_long_tailed(folder, imbalance_factor=16)["train"])
    assert counts.tolist() == [2, 40, 10]  # 40, 40 / 4, 40 / 16
    assert class_counts(load_long_tailed(folder, rule="balanced")["train"]).tolist() == [10, 10, 10]
    for counts in ([3, 2, 1], np.array([3, 2, 1])):
        assert class_counts(load_long_tailed(folder, rule=counts)["train"]).tolist() == [3, 2, 1]
    pareto = class_counts(load_long_tailed(folder, rule="pareto", imbalance_factor=20)["train"])
    assert pareto[[1, 0]].tolist() == [40, 2]
    assert class_counts(load_long_tailed(folder, 2.0, cap=True)["train"]).tolist() == [10, 40, 20]
    for options, most in ({"imbalance_factor": 2}, 21), ({"rule": "balanced", "images_per_class": 160}, 10):
        with pytest.raises(LiVTError) as error:
            load_long_tailed(folder, **options)
        assert f"images_per_class {most} or less" in str(error.value)
    counts = class_counts(load_long_tailed(folder, imbalance_factor=2, images_per_class=21)["train"])
    assert counts.tolist() == [10, 21, 14]  # 21, 21 / sqrt(2), 21 / 2; 22 would ask for 11 finches


def test_broken_images_that_are_left_out_count_for_no_class(tmp_path, caplog):
    write_images(tmp_path / "birds", {"finch": 6, "owl": 6, "wren": 2})
    for name in ("owl/002.png", "wren/000.png", "wren/001.png"):
        (tmp_path / "birds" / name).write_bytes(png()[:40])
    for options, names in ({"min_images": 6}, ["finch"]), ({"drop_empty": True}, ["finch", "owl"]):
        data = load_long_tailed(str(tmp_path / "birds"), on_broken="skip", **options)
        assert data["train"].features["label"].names == names
    assert "left out 3 broken of 14 images" in caplog.text and "002.png" in caplog.text and "skip" not in caplog.text
    with refusal("drop_empty", "wren"):
        load_long_tailed(str(tmp_path / "birds"), on_broken="skip")


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.xz"])
def test_an_image_list_is_read_plain_or_compressed(tmp_path, suffix):
    names = ["red fox", "Mo\u0308we"]  # as macOS writes it
    write_images(tmp_path / "pictures", dict.fromkeys(names, 5))
    text = "".join(f"{name}/{i:03d}.png {c}\n" for c, name in enumerate(names) for i in range(5))
    with {".txt": open, ".txt.gz": gzip.open, ".txt.xz": lzma.open}[suffix](
        tmp_path / f"mine{suffix}", "wt", encoding="utf-8"
    ) as file:
        file.write(text)
    data = load_long_tailed(str(tmp_path / f"mine{suffix}"), source=tmp_path / "pictures")
    assert class_counts(data["train"]).tolist() == [4, 4] and class_counts(data["test"]).tolist() == [1, 1]
    assert data["train"].features["label"].names == ["red fox", "M\u00f6we"]


def test_where_nothing_is_trained_a_class_may_have_no_image(tmp_path):
    write_images(tmp_path / "birds", {"finch": 3, "ghost": 0, "owl": 2})
    data = load_evaluation_data(DataSpec(dataset=str(tmp_path / "birds")), "all")
    assert class_counts(data["all"]).tolist() == [3, 0, 2]


@pytest.mark.parametrize("form", ["parquet", "arrow", "disk", "file"])
def test_tables_on_disk_are_opened_whatever_their_form(tmp_path, form):
    features = Features(image=Image(), label=ClassLabel(names=["a", "b"]))
    dataset = Dataset.from_dict(rows([0, 1] * 5), features=features)
    place = tmp_path / "table"
    if form == "disk":
        DatasetDict(train=dataset.select([0, 1, 2]), test=dataset.select([3])).save_to_disk(place)
    else:
        place.mkdir()
        file = place / f"train.{'arrow' if form == 'arrow' else 'parquet'}"
        if form == "arrow":
            with pa.ipc.new_stream(str(file), dataset.data.table.schema) as writer:
                writer.write_table(dataset.data.table)
        else:
            dataset.to_parquet(file)
        place = file if form == "file" else place
    data = load_long_tailed(str(place))
    assert len(data["train"]) == (3 if form == "disk" else 8)
    assert data["test"].features["label"].names == ["a", "b"]


def test_splits_go_by_any_of_their_names_and_others_are_told(tmp_path, caplog):
    part = named_rows([0, 1], ["a", "b"])
    DatasetDict(Training=part, eval=part, spare=part).save_to_disk(tmp_path / "own")
    data = load_long_tailed(tmp_path / "own")
    assert list(data) == ["train", "test"] and not is_made_split(data, "test")
    assert "neither train, validation nor test: spare" in caplog.text
    DatasetDict(train=part, val=part, dev=part).save_to_disk(tmp_path / "two")
    with pytest.raises(LiVTError) as error:
        load_long_tailed(tmp_path / "two")
    assert "val and dev" in str(error.value)


def named_rows(labels: list, names: list[str], several: bool = False) -> Dataset:
    label = ClassLabel(names=names)
    labels = [[one] for one in labels] if several else labels
    return Dataset.from_dict(rows(labels), features=Features(image=Image(), label=List(label) if several else label))


@pytest.mark.parametrize("several", [False, True])
def test_labels_of_other_splits_follow_their_names(tmp_path, several):
    train, test = named_rows([0, 1, 2], ["a", "b", "c"], several), named_rows([0, 1, 1], ["a", "c"], several)
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "own")
    data = load_long_tailed(str(tmp_path / "own"))
    assert data["test"].features == data["train"].features
    assert class_counts(data["test"]).tolist() == [1, 0, 2]
    for split, part in {"train": train, "test": test}.items():  # parquet files have the names of their own split
        part.to_parquet(tmp_path / f"files/{split}.parquet")
    data = load_long_tailed(tmp_path / "files")
    assert data["test"].features == data["train"].features
    assert class_counts(data["test"]).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("medieval/train-0.parquet", "medieval/test-0.parquet"),
        ("latest/train.parquet", "latest/val/train_test.parquet"),
        ("contest.parquet", "contest-test2017.parquet"),
        ("test/train.parquet", "test/eval.parquet"),
    ],
)
def test_the_last_whole_word_of_a_path_names_the_split_of_a_file(tmp_path, train, test):
    write_parquet(tmp_path / "own" / train, [0, 1, 1], ["a", "b"])
    write_parquet(tmp_path / "own" / test, [0, 1], ["a", "b"])
    data = load_long_tailed(str(tmp_path / "own"))
    assert {split: len(part) for split, part in data.items()} == {"train": 3, "test": 2}


def parquet_of(tmp_path: Path, columns: dict, features: dict) -> str:
    file = tmp_path / "own.parquet"
    Dataset.from_dict(columns, features=Features(features)).to_parquet(file)
    return str(file)


@pytest.mark.parametrize("kind", ["int32", "uint8", "uint64"])
def test_text_and_number_labels_get_class_names(tmp_path, kind):
    text = parquet_of(tmp_path, rows(["owl", "finch"] * 5), {"image": Image(), "label": Value("string")})
    data = load_long_tailed(text)
    assert data["train"].features["label"].names == ["finch", "owl"]
    assert class_counts(data["train"]).tolist() == [4, 4]
    texts = parquet_of(tmp_path, rows(["10", "9 ", "9"] * 4), {"image": Image(), "label": Value("string")})
    assert load_long_tailed(texts)["train"].features["label"].names == ["9", "10"]  # as of a table
    number = parquet_of(tmp_path, rows([1, 0] * 5, "picture", "kind"), {"picture": Image(), "kind": Value(kind)})
    data = load_long_tailed(number, image_column="picture", label_column="kind")
    assert data["train"].features["label"].names == ["0", "1"] and data["train"][0]["image"].size == (4, 4)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])  # polars writes the latter
def test_a_parquet_file_may_hold_images_as_plain_bytes(tmp_path, kind):
    table = pa.table({"image": pa.array([png(i) for i in range(10)], kind), "label": ["owl", "finch"] * 5})
    pa.parquet.write_table(table, tmp_path / "own.parquet")
    data = load_long_tailed(str(tmp_path / "own.parquet"))
    assert class_counts(data["train"]).tolist() == [4, 4] and data["train"][0]["image"].size == (4, 4)


@pytest.mark.parametrize("kind", [ClassLabel(names=["a", "b", "c"]), Value("string")])
def test_several_labels_per_image_are_kept_as_lists(tmp_path, kind):
    names = ["a", "b", "c"]
    lists = [[0, 2], [1], [2], [], [0, 1]] * 4
    lists = lists if isinstance(kind, ClassLabel) else [[names[i] for i in row] for row in lists]
    data = load_long_tailed(parquet_of(tmp_path, rows(lists), {"image": Image(), "label": List(kind)}))
    assert data["train"].features["label"] == List(ClassLabel(names=names))
    counts = sum(class_counts(part) for part in data.values())
    assert counts.tolist() == [8, 8, 8] and len(data["train"]) == 15


def test_only_what_cannot_be_an_id_of_the_hub_is_a_place():
    assert all(
        map(is_path_not_hub_id, ("runs/finetune-birds/1", "./birds", "~/birds", "/birds", "my birds/x", r"a\b"))
    )
    assert not any(map(is_path_not_hub_id, ("timm/resnet50.a1_in1k", "gpt2", "uoft-cs/cifar100:fine")))


def test_a_hub_dataset_that_cannot_be_reached_asks_for_a_local_copy(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(LiVTError, match="uoft-cs/cifar10 could not be loaded from the Hub "):
        load_long_tailed("cifar10-lt")
    for near, name in {"cifar100": "cifar100-lt", "Glyphs": "glyphs"}.items():
        with pytest.raises(LiVTError, match=f"Did you mean {name}"):
            load_long_tailed(near)
    with pytest.raises(LiVTError, match="no folder own/birds, and own/birds could not be loaded .*local copy"):
        load_long_tailed("own/birds")


@pytest.mark.parametrize("config", ["", ":third"])
def test_a_hub_dataset_of_several_configs_asks_for_one_of_them(tmp_path, monkeypatch, config):
    configs = [f"- config_name: {name}\n  data_files: {name}.csv\n" for name in ("first", "second")]
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    for name in ("first", "second"):
        (tmp_path / f"{name}.csv").write_text("a\n1\n")
    load = datasets.load_dataset
    monkeypatch.setattr("livt_hf.data.readers.stored.load_dataset", lambda _, config: load(str(tmp_path), config))
    with pytest.raises(LiVTError, match="own/birds could not be loaded .*'second'.*owner/name:config"):
        load_long_tailed(f"own/birds{config}")


def test_a_misspelt_folder_is_answered_after_one_question_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves").mkdir()
    asked = []

    def unreachable(_api, name, timeout):
        asked.append((name, timeout))
        raise HTTPError("no way there")

    monkeypatch.setattr("livt_hf.data.readers.stored.HfApi.dataset_info", unreachable)
    with pytest.raises(LiVTError, match="there is no folder leavs, .*no way there.* Did you mean leaves"):
        load_long_tailed("leavs")
    assert asked == [("leavs", 10)]


def test_a_stream_has_the_same_columns_and_leaves_its_images_encoded_until_they_are_asked_for(tmp_path):
    features = Features({"img": Image(), "kind": ClassLabel(names=["a"])})
    images = [{"bytes": b"broken", "path": None}, {"bytes": png(), "path": None}]
    (tmp_path / "own").mkdir()
    Dataset.from_dict({"img": images, "kind": [0, 0]}, features=features).to_parquet(tmp_path / "own/train.parquet")
    stream = load_long_tailed(str(tmp_path / "own"), streaming=True)["train"]
    assert stream.features["image"] == Image()
    assert [row["image"] for row in stream.cast_column("image", Image(decode=False))] == images
    write_images(tmp_path / "birds", {"finch": 2, "owl": 3})
    stream = load_long_tailed(str(tmp_path / "birds"), streaming=True)["train"]
    assert stream.num_shards == 5 and [row["label"] for row in stream] == [0, 0, 1, 1, 1]
    for number, labels in enumerate(([0, 1], [1, 1])):
        file = tmp_path / f"several/train-{number}.parquet"
        write_parquet(file, labels, ["a", "b"], image="img", label="kind")
    stream = load_long_tailed(str(tmp_path / "several"), streaming=True)["train"]
    assert stream.num_shards == 2 and [row["label"] for row in stream] == [0, 1, 1, 1]
    assert stream.features["label"].names == ["a", "b"]
    write_split(tmp_path / "split/data.parquet", [0, 1], AB, split=["train", "test"])
    assert len(list(load_long_tailed(tmp_path / "split", streaming=True, split_column="none")["train"])) == 2


def labelled(counts: list[int]) -> Dataset:
    features = Features(image=Image(), label=ClassLabel(names=[f"class{c}" for c in range(len(counts))]))
    labels = np.repeat(np.arange(len(counts)), counts)
    images = [{"bytes": None, "path": f"{i}.png"} for i in range(len(labels))]
    return Dataset.from_dict({"image": images, "label": labels}, features=features)


@pytest.mark.parametrize(
    ("counts", "dataset", "fraction", "held"),
    [
        ([2] * 300, "own", None, None),  # no class can spare one, and nobody asked
        ([400, 100, 6, 3], "own", None, [40, 10, 1, 0]),  # a class of three can spare none
        ([399, 100], "own", None, None),  # too few to divide without being asked
        ([300, 100], "own", 0.2, [60, 20]),
        ([400, 100], "cifar10-lt", None, None),  # the images of a benchmark are fixed
        ([400, 100], "cifar10-lt", 0.1, [40, 10]),
        ([400, 100], "own", 0.0, None),
    ],
)
def test_a_part_of_each_class_is_held_out_where_that_is_asked_for_or_sensible(counts, dataset, fraction, held):
    settings = DataSpec(dataset=dataset, validation_fraction=fraction)
    parts = ImagePool({"train": labelled(counts)}).split(settings)
    assert (class_counts(parts["validation"]).tolist() if "validation" in parts else None) == held
    if held:
        assert (class_counts(parts["train"]) + held).tolist() == counts


def test_a_cache_without_room_is_not_called_damaged_files(tmp_path, monkeypatch):
    def full(*_, **__):
        raise DatasetGenerationError("An error occurred") from OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "train.parquet").touch()
    monkeypatch.setattr("livt_hf.data.readers.stored.load_dataset", full)
    with pytest.raises(OSError, match="No space left on device"):
        load_long_tailed(str(tmp_path))


def test_runs_in_the_folder_of_the_images_are_no_class_and_are_told_by_what_they_hold(tmp_path, monkeypatch):
    write_images(tmp_path / "birds", {"finch": 5, "owl": 5, "runs/data-birds": 2})
    (tmp_path / "birds/runs/predictions.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "birds")
    settings = DataSpec(dataset=".")
    assert Path(settings.dataset).name == "birds"
    assert load_dataset(settings)["train"].features["label"].names == ["finch", "owl"]
    monkeypatch.chdir(tmp_path)  # so of an earlier session
    for folder, classes in (("data-birds", ["finch", "owl"]), ("salmon", ["finch", "owl", "runs"])):
        write_images(tmp_path / folder, {"finch": 5, "owl": 5, f"runs/{folder}": 5})
        assert load_long_tailed(tmp_path / folder)["train"].features["label"].names == classes


# Splits that differ


def write_split(file: Path, labels: list | None, kind=None, **others: list) -> None:
    """A parquet file of as many images; `others` are columns of text."""
    columns, kinds = ({}, {}) if labels is None else ({"label": labels}, {"label": kind})
    columns["image"] = [{"bytes": png(i), "path": None} for i in range(len(labels or "ab"))]
    features = Features(image=Image(), **kinds, **dict.fromkeys(others, Value("string")))
    Dataset.from_dict(columns | others, features=features).to_parquet(file)


AB = ClassLabel(names=["a", "b"])


@pytest.mark.parametrize("on_broken", ["error", "skip"])
def test_a_split_without_the_label_column_is_left_out(tmp_path, caplog, on_broken):
    write_split(tmp_path / "train.parquet", [0, 1] * 5, AB)
    write_split(tmp_path / "test.parquet", None)
    data = load_long_tailed(tmp_path, on_broken=on_broken)
    assert is_made_split(data, "test") and len(data["train"]) == 8
    assert caplog.text.count('the split "test" has no labels and is left out') == 1


def test_large_lists_of_labels_keep_their_class_names_and_a_wrong_label_is_named_by_its_row(tmp_path):
    write_split(tmp_path / "train.parquet", [[0, 1], [1]] * 5, LargeList(AB))
    assert load_long_tailed(tmp_path)["train"].features["label"] == List(AB)
    write_split(tmp_path / "train.parquet", [[0, 1], [0, 1], [1], [-1, 0, -1]], List(Value("int64")))
    with pytest.raises(LiVTError, match="row 3 has label -1, but there are 2 classes .*: drop the 1 rows"):
        load_long_tailed(tmp_path)


def test_a_class_is_one_however_the_letters_of_its_name_are_written_and_excluded_so(tmp_path):
    """macOS writes the ö of a file name as o and two points, and archives keep it so."""
    write_images(tmp_path / "own", {"train/M\u00f6we": 4, "test/Mo\u0308we": 2, "train/Rabe": 4, "test/Rabe": 2})
    data = load_long_tailed(str(tmp_path / "own"))
    assert data["train"].features["label"].names == ["M\u00f6we", "Rabe"]
    assert class_counts(data["test"]).tolist() == [2, 2]
    tmp_path = tmp_path / "excluded"
    write_images(tmp_path, {unicodedata.normalize("NFD", "café"): 6, "tea": 6})
    for form in ("NFC", "NFD"):
        excluded = unicodedata.normalize(form, "café")
        assert load_long_tailed(tmp_path, exclude_labels=excluded)["train"].features["label"].names == ["tea"]


def test_an_image_of_two_lists_is_refused_and_a_repeated_line_left_out(tmp_path, caplog):
    write_images(tmp_path, {"a": 6, "b": 6})
    lines = [f"{name}/{i:03d}.png {label}\n" for label, name in enumerate("ab") for i in range(6)]
    (tmp_path / "train.txt").write_text("".join([*lines, "b//005.png 1\n"]))
    assert load_long_tailed(tmp_path / "train.txt", test_fraction=None)["train"].num_rows == 12
    assert "left out 1 lines that name an image once more, such as" in caplog.text
    (tmp_path / "val.txt").write_text(lines[0])
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / "val.txt").write_text("a/000.png 1\n")


def test_of_several_labels_the_rarest_one_of_each_image_is_divided_in_proportion():
    labels = [[0], [0, 1]] * 20 + [[0, 2]] * 10 + [[]] * 10
    train = Dataset.from_dict({"label": labels}, features=Features(label=List(ClassLabel(num_classes=3))))
    for seed in range(5):
        parts = split_test({"train": train}, DataSpec(split_seed=seed))
        assert class_counts(parts["test"]).tolist() == [10, 4, 2] and len(parts["test"]) == 12


def test_one_label_an_image_is_divided_class_by_class():
    labels = np.random.RandomState(0).choice(4, size=200, p=[0.6, 0.3, 0.09, 0.01])
    train = Dataset.from_dict({"label": labels.tolist()}, features=Features(label=ClassLabel(num_classes=4)))
    for seed in range(3):
        parts = split_test({"train": train.add_column("row", list(range(200)))}, DataSpec(split_seed=seed))
        expected = stratified_split(labels, 0.2, seed)
        assert [parts[split]["row"][:] for split in ("train", "test")] == [rows.tolist() for rows in expected]
