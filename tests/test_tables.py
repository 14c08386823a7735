"""Tables of labels: csv, tsv, jsonl and parquet files that name images, labels, splits and groups."""

import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage
from refusals import refusal

from livt_hf.data import class_counts, decoding, is_made_split, load_long_tailed
from livt_hf.data.classes import MERGED
from livt_hf.data.decoding import find_copies, stored_paths
from livt_hf.data.labels import labels_of
from livt_hf.errors import LiVTError


def write_images(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        PILImage.new("RGB", (4, 4), (number % 256, number // 256, 0)).save(folder / name)


def write_table(file: Path, columns: dict[str, list]) -> str:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        separator = "\t" if file.suffix == ".tsv" else ","
        lines = [list(columns), *(row.values() for row in rows)]
        file.write_text("".join(separator.join("" if v is None else str(v) for v in line) + "\n" for line in lines))
    return str(file)


def paths_of(dataset: Dataset) -> list[str]:
    return [Path(row["path"]).name for row in dataset.cast_column("image", Image(decode=False))["image"]]


def names_of(data) -> list[str]:
    feature = data["train"].features["label"]
    return (feature if isinstance(feature, ClassLabel) else feature.feature).names


@pytest.fixture
def ten(tmp_path) -> list[str]:
    names = [f"img/{i}.png" for i in range(10)]
    write_images(tmp_path, names)
    return names


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_table_names_images_and_labels_in_any_format(tmp_path, ten, suffix):
    file = write_table(tmp_path / f"own{suffix}", {"id": range(10), "File_Name": ten, "Label": ["owl", "finch"] * 5})
    data = load_long_tailed(file)
    assert names_of(data) == ["finch", "owl"] and is_made_split(data, "test")
    assert class_counts(data["train"]).tolist() == [4, 4] and class_counts(data["test"]).tolist() == [1, 1]
    assert data["train"].column_names == ["image", "label"] and data["train"][0]["image"].size == (4, 4)
    for part in data.values():
        assert all(int(name[0]) % 2 == (label == 0) for name, label in zip(paths_of(part), part["label"], strict=True))


def test_columns_can_be_named_and_the_images_lie_below_the_source(tmp_path, ten):
    (tmp_path / "tables").mkdir()
    file = write_table(tmp_path / "tables/own.csv", {"label": [0] * 10, "where": ten, "kind": ["a", "b"] * 5})
    columns = dict(image_column="where", label_column="kind")
    assert names_of(load_long_tailed(file, **columns, source=tmp_path)) == ["a", "b"]
    with refusal("source", "none of the 10 images", '"where"'):
        load_long_tailed(file, **columns, source=tmp_path / "img")
    absolute = {"path": [str(tmp_path / path) for path in ten], "label": ["a", "b"] * 5}
    data = load_long_tailed(write_table(tmp_path / "own.csv", absolute), source="/")  # the whole disk
    assert sorted(paths_of(data["train"]) + paths_of(data["test"])) == [f"{i}.png" for i in range(10)]


def test_columns_without_a_name_are_left_out_and_python_may_pass_lists_of_names(tmp_path, ten):
    rows = "".join(f"{path},{i % 2},{(i + 1) % 2},,\n" for i, path in enumerate(ten))
    (tmp_path / "own.csv").write_text(f"path,owl,finch,,\n{rows}")
    data = load_long_tailed(tmp_path / "own.csv")
    assert names_of(data) == ["owl", "finch"]
    assert names_of(load_long_tailed(tmp_path / "own.csv", label_column=["finch", "owl"])) == ["finch", "owl"]
    file = write_table(tmp_path / "more.csv", {"path": ten, "label": ["a", "b", "c", "d", "d"] * 2})
    assert names_of(load_long_tailed(file, exclude_labels=["a", "b"])) == ["c", "d"]
    file = write_table(tmp_path / "own.tsv", {"path": ten, "label": ["tench, Tinca tinca", "b", "c", "b", "c"] * 2})
    assert names_of(load_long_tailed(file, exclude_labels="tench, Tinca tinca")) == ["b", "c"]


def test_a_parquet_table_of_paths_may_have_columns_of_any_kind(tmp_path, ten):
    columns = {"path": ten, "label": ["owl", "finch"] * 5, "box": [{"x": 1, "y": 2}] * 10}
    assert names_of(load_long_tailed(write_table(tmp_path / "own.parquet", columns))) == ["finch", "owl"]
    with refusal(None, '"box" holds struct<'):
        load_long_tailed(str(tmp_path / "own.parquet"), label_column="box")


def test_spreadsheet_exports_are_read_whatever_their_separators(tmp_path, ten):
    lines = ["file;label;note", *(f'img\\{i}.png;{"ab"[i % 2]};"a; b"' for i in range(10))]
    (tmp_path / "own.csv").write_text("\r\n".join(lines), encoding="utf-8-sig")
    assert names_of(load_long_tailed(str(tmp_path / "own.csv"))) == ["a", "b"]
    (tmp_path / "latin.csv").write_bytes("file,label\nimg/0.png,é\n".encode("latin-1"))
    with pytest.raises(LiVTError, match="latin.csv.*UTF-8"):
        load_long_tailed(str(tmp_path / "latin.csv"))


def test_a_path_may_leave_out_the_suffix_and_begin_with_the_source(tmp_path, ten):
    paths = ["img/0", "./img/1", str(tmp_path / "img/2.png"), *ten[3:]]
    file = write_table(tmp_path / "own.csv", {"image_id": paths, "label": ["a", "b"] * 5})
    (tmp_path / "img/0.xml").write_text("<boxes/>")
    assert sorted(paths_of(load_long_tailed(file, test_fraction=None)["train"])) == [f"{i}.png" for i in range(10)]
    (tmp_path / "img/0.jpg").write_bytes((tmp_path / "img/0.png").read_bytes())
    with pytest.raises(LiVTError, match="img/0 may be 0.jpg or 0.png"):
        load_long_tailed(file)


def test_labels_of_text_files_stay_as_they_are_written(tmp_path, ten):
    dates = write_table(tmp_path / "own.jsonl", {"path": ten, "label": ["2020-01-01", "2021-01-01"] * 5})
    assert names_of(load_long_tailed(dates)) == ["2020-01-01", "2021-01-01"]
    for labels in (["7", "007"], ["007", "7"]):
        same = write_table(tmp_path / "own.csv", {"path": ten, "label": labels * 5})
        assert names_of(load_long_tailed(same)) == ["007", "7"]
    Path(same).write_text("\n" + Path(same).read_text())  # an empty first line
    assert names_of(load_long_tailed(same)) == ["007", "7"]
    broken_header = 'path,"the\nlabel",label\n' + "".join(f"{path},x,00{i % 2}\n" for i, path in enumerate(ten))
    Path(same).write_text(broken_header)
    assert names_of(load_long_tailed(same)) == ["000", "001"]
    apart = write_table(tmp_path / "apart.csv", {"path": ten, "label": ["M\u00f6we", "Mo\u0308we", "b", "b", "b"] * 2})
    assert names_of(load_long_tailed(apart)) == ["M\u00f6we", "b"]


def test_numbers_are_class_names_in_the_order_of_their_values(tmp_path, ten):
    file = write_table(tmp_path / "own.csv", {"path": ten, "label": [10, 9] * 5})
    assert names_of(load_long_tailed(file)) == ["9", "10"]
    file = write_table(tmp_path / "own.csv", {"path": ten, "label": ["007", "1"] * 5})
    assert names_of(load_long_tailed(file)) == ["1", "007"]
    for labels, names in (
        ([1.0, 2.0, None] * 3 + [1.0], ["1", "2"]),
        ([float("inf"), 1e300] * 5, ["1e+300", "inf"]),
    ):
        file = write_table(tmp_path / "own.parquet", {"path": ten, "label": labels})
        assert names_of(load_long_tailed(file)) == names
    for kind in (np.float16, np.float32):
        pq.write_table(pa.table({"path": ten, "label": pa.array(np.array([1.0, 2.5] * 5, kind))}), file)
        assert names_of(load_long_tailed(file)) == ["1", "2.5"]


def test_several_labels_per_image_come_from_a_separator_a_list_or_a_column_per_class(tmp_path, ten):
    sets = [["a"], ["a", "b"], ["c", "a"], ["b"], ["c"]] * 2
    tables = [
        ({"label": ["|".join(row) + "|" for row in sets]}, ".csv", {"label_separator": "|"}),
        ({"label": [" ; ".join(row) for row in sets]}, ".tsv", {"label_separator": ";"}),
        ({"label": sets}, ".jsonl", {}),
        ({name: [int(name in row) for row in sets] for name in "abc"}, ".csv", {}),
        (
            {name: [name in row for row in sets] for name in "abc"} | {"age": range(10)},
            ".parquet",
            {"label_column": "a,b,c"},
        ),
    ]
    for columns, suffix, options in tables:
        data = load_long_tailed(write_table(tmp_path / f"own{suffix}", {"path": ten} | columns), **options)
        assert names_of(data) == ["a", "b", "c"]
        assert sum(class_counts(part) for part in data.values()).tolist() == [6, 4, 4]
        for part in data.values():
            for name, labels in zip(paths_of(part), part["label"], strict=True):
                assert {"abc"[c] for c in labels} == set(sets[int(name[0])])


def test_an_empty_cell_is_left_out_and_a_row_of_zeros_is_an_image_with_none_of_the_labels(tmp_path, ten, caplog):
    sets = ["a", "", "b", "a|b", ""] * 2
    file = write_table(tmp_path / "own.csv", {"path": ten, "label": sets})
    assert sum(load_long_tailed(file, label_separator="|").num_rows.values()) == 6
    assert "4  the label is empty; for images that have none of the labels, have one column of 0 and 1" in caplog.text
    columns = {name: [int(name in cell) for cell in sets] for name in "ab"}
    assert sum(load_long_tailed(write_table(tmp_path / "own.csv", {"path": ten} | columns)).num_rows.values()) == 10


@pytest.mark.parametrize("seed", [0, 1, 5])  # of which 0 and 5 would test the only image of its class
def test_where_images_have_several_labels_every_class_is_trained_on(tmp_path, seed):
    names = [f"{i}.png" for i in range(21)]
    for name in names:
        (tmp_path / name).touch()
    file = write_table(tmp_path / "own.csv", {"path": names, "label": ["a", "b", "a|b", "a"] * 5 + ["a|rare"]})
    data = load_long_tailed(file, seed=seed, label_separator="|", validation_fraction=0.2)
    assert class_counts(data["train"]).all() and sum(map(len, data.values())) == 21
    assert len(data["test"]) in (3, 4) and len(data["validation"]) >= 2


def test_a_column_per_class_with_one_1_in_each_row_is_one_label_per_image(tmp_path, ten):
    columns = {"path": ten, "MEL": [1.0, 0.0] * 5, "BCC": [0.0, 1.0] * 5}
    data = load_long_tailed(write_table(tmp_path / "own.csv", columns))
    assert data["train"].features["label"] == ClassLabel(names=["MEL", "BCC"])
    assert class_counts(data["train"]).tolist() == [4, 4]


def test_a_split_column_divides_the_table(tmp_path, ten):
    splits = ["train", "Training", "val", "TEST", "test"] * 2
    columns = {"path": ten, "label": ["a"] * 5 + ["b"] * 5, "split": splits}
    file = write_table(tmp_path / "own.csv", {name: [*cells, ""] for name, cells in columns.items()})  # ends with ",,"
    data = load_long_tailed(file)
    assert {split: len(part) for split, part in data.items()} == {"train": 4, "validation": 2, "test": 4}
    assert not is_made_split(data, "test") and is_made_split(load_long_tailed(file, split_column="none"), "test")


def test_rows_that_cannot_be_used_are_counted_with_the_reason(tmp_path, ten, caplog):
    labels = ["a", "b", "a", "b", "a", "b", "", "  ", "todo", "Unknown"]
    columns = {"path": [*ten, "img/0", "gone.png", ""], "label": [*labels, *"aba"], "Patient_ID": range(13)}
    file = write_table(tmp_path / "own.csv", columns)
    data = load_long_tailed(file, exclude_labels="todo, Unknown", test_fraction=0.4)
    assert '"Patient_ID": group_column' in caplog.text  # a column that may be a group is pointed out
    assert names_of(data) == ["a", "b"] and len(data["train"]) + len(data["test"]) == 6
    assert "left out 7 images:" in caplog.text
    for line in (
        "2  the label is empty: img/6.png, img/7.png",
        "1  the path is empty: (no path)",
        "1  the image is named twice with the same label: img/0",
        "1  the file is missing: gone.png",
        "2  the label is excluded: Unknown, todo",
    ):
        assert line in caplog.text


def test_labels_that_differ_only_by_case_or_spaces_are_named_and_stay_apart(tmp_path, ten, caplog):
    file = write_table(tmp_path / "own.csv", {"path": ten, "label": ["red fox", "Red  fox"] * 5})
    assert names_of(load_long_tailed(file)) == ["Red  fox", "red fox"]
    assert "['Red  fox', 'red fox'] differ only by case or spaces" in caplog.text


@pytest.mark.parametrize("kind", ["table", "folder"])
def test_rare_classes_are_dropped_or_made_one(tmp_path, kind, caplog):
    counts = {"a": 10, "b": 5, "c": 2, "d": 1}
    names = [f"{label}/{i}.png" for label, count in counts.items() for i in range(count)]
    write_images(tmp_path / "images", names)
    place = str(tmp_path / "images")
    if kind == "table":
        place = write_table(tmp_path / "images/own.csv", {"path": names, "label": [name[0] for name in names]})
    dropped = load_long_tailed(place, min_images=3)
    assert names_of(dropped) == ["a", "b"] and class_counts(dropped["train"]).tolist() == [8, 4]
    assert "3  the class has fewer than 3 training images: c (2), d" in caplog.text
    merged = load_long_tailed(place, min_images=3, rare_classes="merge", exclude_labels="b")
    assert names_of(merged) == ["a", MERGED]
    assert sum(class_counts(part) for part in merged.values()).tolist() == [10, 3]


def test_an_image_keeps_the_labels_that_are_not_excluded(tmp_path, ten):
    labels = ["a|todo", "b", "todo", "a|b", "b|todo", "a", "b", "a", "b", "a|b"]
    file = write_table(tmp_path / "own.csv", {"path": ten, "label": labels})
    data = load_long_tailed(file, label_separator="|", exclude_labels="todo")
    assert names_of(data) == ["a", "b"] and sum(len(part) for part in data.values()) == 9
    assert sum(class_counts(part) for part in data.values()).tolist() == [5, 6]


# Groups


def random_table(tmp_path: Path, seed: int) -> tuple[str, dict[str, str]]:
    """A table of random groups and classes with a long tail, and the group of each image."""
    rng = np.random.RandomState(seed)
    rows, classes, groups = rng.randint(20, 200), rng.randint(1, 8), rng.randint(3, 60)
    names = [f"{i}.png" for i in range(rows)]
    for name in names:
        (tmp_path / name).touch()
    group = [f"patient {g}" for g in (groups * rng.rand(rows) ** 2).astype(int)]
    label = (classes * rng.rand(rows) ** 3).astype(int)
    if seed % 2:  # several labels per image
        texts = ["|".join({str(c), str(rng.randint(classes))}) for c in label]
    else:
        texts = [str(c) for c in label]
    columns = {"path": names, "label": texts, "patient": group}
    return write_table(tmp_path / "own.csv", columns), dict(zip(names, group, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_group_is_on_both_sides_of_a_split_and_every_class_is_trained_on(tmp_path, seed):
    file, group_of = random_table(tmp_path, seed)
    options = {"label_separator": "|"} if seed % 2 else {}
    data = load_long_tailed(file, seed=seed, group_column="patient", **options)
    groups = {split: {group_of[name] for name in paths_of(part)} for split, part in data.items()}
    assert groups["train"] and groups["test"] and not groups["train"] & groups["test"]
    assert groups["train"] | groups["test"] == set(group_of.values())
    assert class_counts(data["train"]).all()
    for part in data.values():
        assert part["group"][:] == [group_of[name] for name in paths_of(part)]


def test_groups_of_equal_size_are_divided_in_the_asked_proportion(tmp_path):
    names = [f"{i}.png" for i in range(600)]
    for name in names:
        (tmp_path / name).touch()
    for groups, fraction, tested in (
        *((100, 0.2, 0.2), (100, 0.3, 0.3), (100, 0.5, 0.5), (100, 0.04, 0.04)),
        *((100, 0.02, 0.02), (100, 0.001, 0.01), (4, 0.3, 0.25), (4, 0.04, 0.25), (4, 0.7, 0.75)),
    ):
        sites = np.arange(600) * groups // 600
        columns = {"path": names, "label": [i % 3 for i in range(600)], "site": sites}
        data = load_long_tailed(
            write_table(tmp_path / "own.csv", columns), group_column="site", test_fraction=fraction
        )
        assert class_counts(data["test"]).tolist() == [round(200 * tested)] * 3
    assert data["train"].column_names == ["image", "label", "group"]
    assert data["train"].features["group"] == Value("string")


def test_a_class_of_one_group_stays_in_training_and_is_said_to_have_no_test_image(tmp_path, ten, caplog):
    columns = {"path": ten, "label": [*"aaaabbbb", "rare", "rare"], "site": [1, 2, 3, 4, 1, 2, 3, 4, 5, 5]}
    data = load_long_tailed(write_table(tmp_path / "own.csv", columns), group_column="site")
    assert class_counts(data["train"]).tolist() == [3, 3, 2] and class_counts(data["test"]).tolist() == [1, 1, 0]
    assert "no test image" in caplog.text and "in training: rare" in caplog.text


def test_groups_that_given_splits_divide_are_warned_of(tmp_path, ten, caplog):
    sites = [0, 1, *["2", "2 "] * 4]  # a space more does not make another site
    columns = {"path": ten, "label": ["a", "b"] * 5, "site": sites, "split": ["train"] * 6 + ["test"] * 4}
    load_long_tailed(write_table(tmp_path / "own.csv", columns), group_column="site")
    assert "1 groups are both in train and in test, such as 2" in caplog.text


def test_datasets_that_are_no_tables_have_groups_too(tmp_path, ten):
    features = Features(image=Image(), label=ClassLabel(names=["a", "b"]), site=Value("int64"))
    images = [str(tmp_path / name) for name in ten]
    Dataset.from_dict(
        {"image": images, "label": [0, 1] * 5, "site": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]}, features=features
    ).to_parquet(tmp_path / "own.parquet")
    data = load_long_tailed(str(tmp_path / "own.parquet"), group_column="site")
    assert len(data["test"]) == 2 and len(set(labels_of(data["test"], "group").values)) == 1


def embedded(row: dict) -> dict:
    path = row["image"].filename
    return {"image": {"bytes": Path(path).read_bytes(), "path": path}}


def test_identical_images_in_two_splits_are_found(tmp_path):
    names = [f"{split}/{label}/{i}.png" for split in ("train", "test") for label in "ab" for i in range(3)]
    write_images(tmp_path, names)
    (tmp_path / "test/b/2.png").write_bytes((tmp_path / "train/a/1.png").read_bytes())
    data = load_long_tailed(str(tmp_path))
    pairs = find_copies(data)
    one, other = (os.path.join(tmp_path, name) for name in ("train/a/1.png", "test/b/2.png"))
    assert pairs == [(f"{one} of train", f"{other} of test")]
    held = {split: part.map(embedded).shuffle(seed=0) for split, part in data.items()}  # of which paths keep the name
    assert find_copies(held) == pairs and stored_paths(held["test"]) == []
    assert sorted(stored_paths(data["test"].shuffle(seed=0))) == stored_paths(data["test"])


def test_only_images_of_equal_length_are_read_to_find_copies(tmp_path, monkeypatch):
    names = [f"{split}/a/{i}.png" for split in ("train", "test") for i in range(3)]
    write_images(tmp_path, names)
    for number, name in enumerate(names):
        with (tmp_path / name).open("ab") as file:
            file.write(b"\0" * number)  # as many bytes more
    (tmp_path / "test/a/2.png").write_bytes((tmp_path / "train/a/0.png").read_bytes())
    data, read = load_long_tailed(str(tmp_path)), []
    reading = decoding.read_file
    monkeypatch.setattr(decoding, "read_file", lambda path: (read.append(path), reading(path))[1])
    assert len(find_copies(data)) == 1 and len(read) < 6


def test_a_class_of_broken_images_only_can_be_dropped(tmp_path, ten):
    (tmp_path / "img/9.png").write_bytes(b"broken")
    file = write_table(tmp_path / "own.csv", {"path": ten, "label": [*"aaabbbbbb", "c"], "site": range(10)})
    with refusal("drop_empty", "such as c"):
        load_long_tailed(file, on_broken="skip")
    data = load_long_tailed(file, on_broken="skip", drop_empty=True, group_column="site")
    assert names_of(data) == ["a", "b"] and is_made_split(data, "test") and "group" in data["test"].features


def test_an_image_of_two_splits_groups_or_labels_is_refused_however_its_path_is_written(tmp_path, ten):
    def load(column: str, values: list[str], **options):
        columns = {"image": [*ten, "img//./9"], "label": ["a", "b"] * 5 + ["b"], column: values}
        return load_long_tailed(write_table(tmp_path / "own.csv", columns), **options)

    for column, values, options, named in (
        ("split", ["train"] * 10 + ["test"], {}, '"train" and with "test"'),
        ("patient", [*map(str, range(11))], {"group_column": "patient"}, '"9" and with "10"'),
        ("label", ["a", "b"] * 5 + ["c"], {}, '"b" and with "c"'),
        ("label", ["a", "b"] * 5 + ["a|b"], {"label_separator": "|"}, '"b" and with "a, b"'),
    ):
        with pytest.raises(LiVTError) as error:
            load(column, values, **options)
        assert "9.png" in str(error.value) and named in str(error.value)
    data = load("patient", [*map(str, range(10)), "9"], group_column="patient")
    assert sorted(paths_of(data["train"]) + paths_of(data["test"])) == [f"{i}.png" for i in range(10)]


def test_a_file_is_found_however_its_letters_and_those_of_its_folders_are_written(tmp_path):
    forms = [("NFC", "NFD"), ("NFD", "NFC")] * 3
    written, named = (
        [unicodedata.normalize(pair[place], f"ö{i}/ü/é{i}.png") for i, pair in enumerate(forms)] for place in (0, 1)
    )
    write_images(tmp_path, written)
    file = write_table(tmp_path / "own.csv", {"image": named, "label": ["a", "b"] * 3})
    data = load_long_tailed(file, test_fraction=None)
    assert stored_paths(data["train"]) == [str(tmp_path / name) for name in written]


def test_rare_classes_are_counted_over_all_images_that_folds_divide(tmp_path):
    labels, splits = ["a"] * 8 + ["b"] * 8, ["train"] * 9 + ["val"] * 7
    names = [f"{i}.png" for i in range(16)]
    write_images(tmp_path, names)
    file = write_table(tmp_path / "own.csv", {"image": names, "label": labels, "split": splits})
    with pytest.raises(LiVTError, match='"validation"'):
        load_long_tailed(file, min_images=5)
    assert names_of(load_long_tailed(file, min_images=5, fold="1/4")) == ["a", "b"]
