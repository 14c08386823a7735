"""What data intake does not accept: each case names the argument at fault, where there is one, and the value."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from refusals import refusal

from livt_hf.data import load_long_tailed

AB = ClassLabel(names=["a", "b"])
TEN = {"img": 10}
LIST = "".join(f"{name}/{i:03d}.png {label}\n" for label, name in enumerate("ab") for i in range(6))


def write(folder: Path, files: dict) -> None:
    """Write a tree: a number is a folder of as many images, text a file, a table or dataset a parquet file."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            path.mkdir(exist_ok=True)
            for i in range(content):
                PILImage.new("RGB", (4, 4), (i, 0, 0)).save(path / f"{i:03d}.png")
        elif isinstance(content, str):
            path.write_text(content)
        elif isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            content.to_parquet(path)


def table(**columns) -> str:
    """Return a CSV of ten images, with the columns given."""
    columns = {"path": [f"img/{i:03d}.png" for i in range(10)], "label": ["a", "b"] * 5} | columns
    rows = zip(*columns.values(), strict=True)
    return "\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n"


def stored(labels: list, kind=AB, **texts: list) -> Dataset:
    """Return as many embedded images with labels, and columns of text."""
    features = Features(image=Image(), label=kind, **dict.fromkeys(texts, Value("string")))
    images = [PILImage.new("RGB", (4, 4), (i, 0, 0)) for i in range(len(labels))]
    return Dataset.from_dict({"image": images, "label": labels, **texts}, features=features)


TWO_CLASSES = {"a": 6, "b": 6}
FOLDERS = [
    ({}, "nowhere/at/all", {}, "dataset", "nowhere/at/all"),
    ({}, "labels.csv", {}, "dataset", "labels.csv"),
    ({}, "labels.csv", {"source": "."}, "dataset", "labels.csv"),
    ({"own": 0}, "own", {}, "dataset", "own"),
    ({"own/a": 0}, "own", {"drop_empty": True}, "dataset", "own"),
    ({"flat": 3}, "flat", {}, "dataset", "flat"),
    ({"x.zip": "a"}, "x.zip", {}, "dataset", "x.zip"),
    ({"own/train/a": 3, "own/more/a": 2}, "own", {}, "dataset", "more"),
    ({"a/train": 2, "a/test": 2, "b/train": 2, "b/test": 2}, ".", {}, "dataset", "a/test"),
    ({"a/Train": 2, "a/Test": 2, "b/Train": 2, "b/Test": 2}, ".", {}, "dataset", "a/Test"),
    ({"own/train": 3, "own/test": 3}, "own", {}, "dataset", "own/train"),
    (TWO_CLASSES | {"f.parquet": pa.table({"x": [1.0]})}, ".", {}, "dataset", "f.parquet"),
    (TWO_CLASSES | {"config.json": "{}"}, ".", {}, "dataset", "name the folder of its images"),
    (TWO_CLASSES | {"plan.json": "{}"}, ".", {}, "dataset", "name the folder of its images"),
    ({"train/a": 5, "train/b": 5, "test/a": 0}, ".", {}, "dataset", '"test"'),
    ({"train/a": 5, "test/a": 0}, ".", {"streaming": True}, "dataset", '"test"'),
    (TWO_CLASSES, ".", {"exclude_labels": "a,b"}, "dataset", '"train"'),
    (TWO_CLASSES | {"ghost": 0}, ".", {}, "drop_empty", "ghost"),
    (TWO_CLASSES | {"ghost": 0}, ".", {"rule": "balanced"}, "drop_empty", "ghost"),
    (TWO_CLASSES, ".", {"group_column": "site"}, "group_column", "site"),
    (TWO_CLASSES, ".", {"label_separator": "|"}, "label_separator", ""),
    (TWO_CLASSES, ".", {"source": "elsewhere"}, "source", ""),
    (TWO_CLASSES, ".", {"rare_classes": "merge"}, "min_images", "merge"),
    (
        {"a": 6, "rare classes": 6, "d": 2},
        ".",
        {"rare_classes": "merge", "min_images": 3},
        "rare_classes",
        "rare classes",
    ),
    (TWO_CLASSES, ".", {"test_fraction": 1.5}, "test_fraction", "1.5"),
    (TWO_CLASSES, ".", {"validation_fraction": 1.5}, "validation_fraction", "1.5"),
    ({"a": 2, "b": 1}, ".", {}, "test_fraction", "0.2"),
    ({"a": 2, "b": 1}, ".", {"validation_fraction": 0.2, "test_fraction": None}, "validation_fraction", "0.2"),
    (TWO_CLASSES, ".", {"rule": "zipf"}, "rule", "zipf"),
    (TWO_CLASSES, ".", {"rule": [1]}, "rule", "1 counts for 2 classes"),
    (TWO_CLASSES, ".", {"rule": "pareto"}, "imbalance_factor", "pareto"),
    (TWO_CLASSES, ".", {"rule": "balanced", "imbalance_factor": 3}, "imbalance_factor", "3"),
    (TWO_CLASSES, ".", {"imbalance_facto": 2}, "imbalance_facto", "imbalance_factor"),
    (TWO_CLASSES, ".", {"split_seed": 2}, "split_seed", "seed"),
    (TWO_CLASSES, ".", {"seed": 2**32}, "split_seed", "4294967296"),
    ({}, "", {}, "dataset", "empty"),
]
LISTS = [
    *(
        ({"mine.txt": f"ok.png 0\n{line}\n"}, "mine.txt", {}, "dataset", "line 2")
        for line in ("a.png", "a.png one", "a.png -1", "a.png 99999999")
    ),
    *(
        ({"mine.txt": f"ok.png 0\n{path} 0\n"}, "mine.txt", {}, "source", "secret.png")
        for path in ("../secret.png", "x/../../secret.png", "/etc/secret.png", "C:\\secret.png")
    ),
    (TWO_CLASSES | {"mine.txt": LIST + "b/9.png 1\n"}, "mine.txt", {}, "source", "b/9.png"),
    (TWO_CLASSES | {"mine.txt": LIST}, "mine.txt", {"source": "a", "on_broken": "skip"}, "source", "a/000.png"),
    (
        TWO_CLASSES | {"train.txt": LIST, "val.txt": "a/000.png 0\n"},
        ".",
        {},
        "dataset",
        '"train" and with "validation"',
    ),
    (TWO_CLASSES | {"train.txt": LIST, "val.txt": "a/000.png 1\n"}, ".", {}, "dataset", '"a" and with "b"'),
]
FLAGS = "".join(f'{{"path": "img/{i:03d}.png", "label": [0, {i % 2}, 1]}}\n' for i in range(10))
TABLES = [
    *(
        (TEN | {"own.csv": table()}, "own.csv", {name: "site"}, name, "path, label")
        for name in ("image_column", "label_column", "split_column", "group_column")
    ),
    (TEN | {"own.csv": "where,label\na,b\n"}, "own.csv", {}, "image_column", "where, label"),
    (TEN | {"own.csv": "path,age\na,7\n"}, "own.csv", {}, "label_column", "path, age"),
    ({"own.csv": table()}, "own.csv", {}, "source", "img/000.png"),
    ({"own.csv": table()}, "own.csv", {"source": "gone"}, "source", "gone"),
    (TEN | {"own.csv": table()}, "own.csv", {"streaming": True}, "dataset", "own.csv"),
    ({"own.csv": "path,label\nx.png,a,b\n"}, "own.csv", {}, "dataset", "own.csv"),
    (TEN | {"own.jsonl": FLAGS}, "own.jsonl", {}, "label_column", "0"),
    ({"own.csv": "path,label,label \nx,a,b\n"}, "own.csv", {}, "dataset", '"label"'),
    (TEN | {"own.csv": table(label=[""] * 10)}, "own.csv", {}, "label_column", '"label"'),
    (TEN | {"own.csv": table()}, "own.csv", {"label_separator": ""}, "label_separator", '""'),
    (
        TEN | {"own.csv": table(age=range(10), x=[1] * 10)},
        "own.csv",
        {"label_column": "x,age"},
        "label_column",
        '"age"',
    ),
    (TEN | {"own.csv": table()}, "own.csv", {"split_column": "label", "label_column": "path"}, "split_column", '"a"'),
    (TEN | {"own.csv": table(site=[1] * 10)}, "own.csv", {"group_column": "site"}, "test_fraction", "0.2"),
    (TEN | {"own.csv": table(site=[*range(9), ""])}, "own.csv", {"group_column": "site"}, "group_column", "009.png"),
    *(
        (TEN | {"own.csv": table(path=[path] * 10)}, "own.csv", {}, "source", "secret.png")
        for path in ("../secret.png", "img/../../secret.png", "/etc/secret.png", "C:\\secret.png")
    ),
]
PARQUET = [
    ({"own.parquet": stored([0, 1]).remove_columns("label")}, {}, "label_column", "image (Image)"),
    ({"own.parquet": stored([0, 1])}, {"label_column": "kind"}, "label_column", '"kind"'),
    ({"own.parquet": stored([0, 1])}, {"split_column": "part"}, "split_column", '"part"'),
    ({"own.parquet": stored([0, 1])}, {"label_separator": "|"}, "label_separator", ""),
    ({"own.parquet": stored([5_000_000_000, 7], Value("int64"))}, {}, "label_column", "5000000000"),
    ({"own.parquet": stored([0.5, 7.0], Value("float32"))}, {}, "label_column", "float"),
    ({"own.parquet": stored([[0, 1], [-1]], List(Value("int64")))}, {}, None, "row 1"),
    *(
        ({"own.parquet": stored(labels, kind)}, {}, "dataset", "row 1")
        for labels, kind in (
            ([0, None, 1], Value("int64")),
            (["a", " ", "b"], Value("string")),
            (["a", None, "b"], Value("string")),
            ([[0], None, [1]], List(AB)),
            ([[0], None], List(Value("int8"))),
        )
    ),
    *(
        ({"own.parquet": stored([[0, 1, 0, 0], [1, 0, 0, 1]] * 5, kind)}, {}, "label_column", "0")
        for kind in (List(Value("int64")), List(Value("bool")), List(Value("int64"), length=4))
    ),
    (
        {"train.parquet": stored([0, 1] * 5), "test.parquet": stored(["a", "b"], Value("string"))},
        {},
        "label_column",
        '"test" are text',
    ),
    (
        {"train.parquet": stored(["a", "b"], Value("string")), "test.parquet": stored([0, 1] * 5)},
        {},
        "label_column",
        '"train" are text',
    ),
    (
        {"train.parquet": stored([0, 1]), "test.parquet": stored([0, 1], ClassLabel(names=["b", "owl"]))},
        {},
        "dataset",
        "owl",
    ),
    (
        {"train.parquet": stored([0, 1], site=["x", "y"]), "test.parquet": stored([0, 1])},
        {"group_column": "site"},
        "group_column",
        '"site"',
    ),
    ({"train.parquet": stored([0, 1]), "testset.parquet": stored([0, 1])}, {}, "dataset", "testset.parquet"),
    (
        {"train.parquet": stored([0, 1]), "test.parquet": stored([0, 1])},
        {"split_column": "label"},
        "split_column",
        "test, train",
    ),
    ({"own.parquet": stored([[0], [1]] * 5, List(AB))}, {"rule": "balanced"}, "rule", ""),
    *(
        ({"train.parquet": stored([0, 1])}, {"streaming": True, name: value}, name, repr(value))
        for name, value in {
            **{"imbalance_factor": 10, "fold": "1/5", "exclude_labels": "a", "min_images": 5, "split_column": "fold"},
            **{"group_column": "label", "drop_empty": True, "test_fraction": 0.5, "cap": True},
        }.items()
    ),
    ({"train.parquet": stored([0, 1], split=["train", "test"])}, {"streaming": True}, "split_column", '"split"'),
]
CASES = [*FOLDERS, *LISTS, *TABLES, *((files, ".", *rest) for files, *rest in PARQUET)]


@pytest.mark.parametrize(("files", "dataset", "options", "argument", "value"), CASES)
def test_data_that_cannot_be_meant_is_refused(tmp_path, monkeypatch, files, dataset, options, argument, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path, files)
    with refusal(argument, value):
        load_long_tailed(dataset, **options)
