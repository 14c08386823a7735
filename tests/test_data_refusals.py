"""What data intake does not accept: each case names the argument at fault, where there is one, and the value."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as PILImage

from livt_hf.data import load_long_tailed
from livt_hf.errors import LiVTError

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
    ("a folder that does not exist", {}, "nowhere/at/all", {}, "dataset", "nowhere/at/all"),
    ("a table that does not exist", {}, "labels.csv", {}, "dataset", "labels.csv"),
    ("such a table with a source", {}, "labels.csv", {"source": "."}, "dataset", "labels.csv"),
    ("an empty folder", {"own": 0}, "own", {}, "dataset", "own"),
    ("a folder of empty folders", {"own/a": 0}, "own", {"drop_empty": True}, "dataset", "own"),
    ("images without class folders", {"flat": 3}, "flat", {}, "dataset", "flat"),
    ("a file of another kind", {"x.zip": "a"}, "x.zip", {}, "dataset", "x.zip"),
    ("a folder that is no split", {"own/train/a": 3, "own/more/a": 2}, "own", {}, "dataset", "more"),
    ("splits below classes", {"a/train": 2, "a/test": 2, "b/train": 2, "b/test": 2}, ".", {}, "dataset", "a/test"),
    ("so in upper case", {"a/Train": 2, "a/Test": 2, "b/Train": 2, "b/Test": 2}, ".", {}, "dataset", "a/Test"),
    ("splits without classes", {"own/train": 3, "own/test": 3}, "own", {}, "dataset", "own/train"),
    ("a table among images", TWO_CLASSES | {"f.parquet": pa.table({"x": [1.0]})}, ".", {}, "dataset", "f.parquet"),
    ("a model", TWO_CLASSES | {"config.json": "{}"}, ".", {}, "dataset", "name the folder of its images"),
    ("a run of livt train", TWO_CLASSES | {"plan.json": "{}"}, ".", {}, "dataset", "name the folder of its images"),
    ("an empty split", {"train/a": 5, "train/b": 5, "test/a": 0}, ".", {}, "dataset", '"test"'),
    ("so of a stream", {"train/a": 5, "test/a": 0}, ".", {"streaming": True}, "dataset", '"test"'),
    ("all classes excluded", TWO_CLASSES, ".", {"exclude_labels": "a,b"}, "dataset", '"train"'),
    ("an empty class", TWO_CLASSES | {"ghost": 0}, ".", {}, "drop_empty", "ghost"),
    ("an empty class and a rule", TWO_CLASSES | {"ghost": 0}, ".", {"rule": "balanced"}, "drop_empty", "ghost"),
    ("columns of a folder", TWO_CLASSES, ".", {"group_column": "site"}, "group_column", "site"),
    ("a separator for a folder", TWO_CLASSES, ".", {"label_separator": "|"}, "label_separator", ""),
    ("a source for a folder", TWO_CLASSES, ".", {"source": "elsewhere"}, "source", ""),
    ("merging without a number", TWO_CLASSES, ".", {"rare_classes": "merge"}, "min_images", "merge"),
    (
        "a class with the name of the merged one",
        {"a": 6, "rare classes": 6, "d": 2},
        ".",
        {"rare_classes": "merge", "min_images": 3},
        "rare_classes",
        "rare classes",
    ),
    ("a fraction above 1", TWO_CLASSES, ".", {"test_fraction": 1.5}, "test_fraction", "1.5"),
    ("a validation fraction above 1", TWO_CLASSES, ".", {"validation_fraction": 1.5}, "validation_fraction", "1.5"),
    ("nothing to spare", {"a": 2, "b": 1}, ".", {}, "test_fraction", "0.2"),
    (
        "nothing to spare for validation",
        {"a": 2, "b": 1},
        ".",
        {"validation_fraction": 0.2, "test_fraction": None},
        "validation_fraction",
        "0.2",
    ),
    ("an unknown rule", TWO_CLASSES, ".", {"rule": "zipf"}, "rule", "zipf"),
    ("counts of fewer classes", TWO_CLASSES, ".", {"rule": [1]}, "rule", "1 counts for 2 classes"),
    ("a rule without a factor", TWO_CLASSES, ".", {"rule": "pareto"}, "imbalance_factor", "pareto"),
    ("a balanced tail", TWO_CLASSES, ".", {"rule": "balanced", "imbalance_factor": 3}, "imbalance_factor", "3"),
    ("a misspelt option", TWO_CLASSES, ".", {"imbalance_facto": 2}, "imbalance_facto", "imbalance_factor"),
    ("an option called otherwise", TWO_CLASSES, ".", {"split_seed": 2}, "split_seed", "seed"),
    ("a large seed", TWO_CLASSES, ".", {"seed": 2**32}, "split_seed", "4294967296"),
    ("no name", {}, "", {}, "dataset", "empty"),
]
LISTS = [
    *(
        (f"a list with the line {line!r}", {"mine.txt": f"ok.png 0\n{line}\n"}, "mine.txt", {}, "dataset", "line 2")
        for line in ("a.png", "a.png one", "a.png -1", "a.png 99999999")
    ),
    *(
        (f"a list with {path}", {"mine.txt": f"ok.png 0\n{path} 0\n"}, "mine.txt", {}, "source", "secret.png")
        for path in ("../secret.png", "x/../../secret.png", "/etc/secret.png", "C:\\secret.png")
    ),
    (
        "a missing file of a list",
        TWO_CLASSES | {"mine.txt": LIST + "b/9.png 1\n"},
        "mine.txt",
        {},
        "source",
        "b/9.png",
    ),
    (
        "a list without a file",
        TWO_CLASSES | {"mine.txt": LIST},
        "mine.txt",
        {"source": "a", "on_broken": "skip"},
        "source",
        "a/000.png",
    ),
    (
        "an image of two lists",
        TWO_CLASSES | {"train.txt": LIST, "val.txt": "a/000.png 0\n"},
        ".",
        {},
        "dataset",
        '"train" and with "validation"',
    ),
    (
        "a class of its own in each list",
        TWO_CLASSES | {"train.txt": LIST, "val.txt": "a/000.png 1\n"},
        ".",
        {},
        "dataset",
        '"a" and with "b"',
    ),
]
TABLES = [
    *(
        (f"a table without the {name}", TEN | {"own.csv": table()}, "own.csv", {name: "site"}, name, "path, label")
        for name in ("image_column", "label_column", "split_column", "group_column")
    ),
    ("a table without paths", TEN | {"own.csv": "where,label\na,b\n"}, "own.csv", {}, "image_column", "where, label"),
    ("a table without labels", TEN | {"own.csv": "path,age\na,7\n"}, "own.csv", {}, "label_column", "path, age"),
    ("images elsewhere", {"own.csv": table()}, "own.csv", {}, "source", "img/000.png"),
    ("a source that does not exist", {"own.csv": table()}, "own.csv", {"source": "gone"}, "source", "gone"),
    ("a table as a stream", TEN | {"own.csv": table()}, "own.csv", {"streaming": True}, "dataset", "own.csv"),
    ("a ragged table", {"own.csv": "path,label\nx.png,a,b\n"}, "own.csv", {}, "dataset", "own.csv"),
    ("two columns of one name", {"own.csv": "path,label,label \nx,a,b\n"}, "own.csv", {}, "dataset", '"label"'),
    ("empty labels", TEN | {"own.csv": table(label=[""] * 10)}, "own.csv", {}, "label_column", '"label"'),
    ("an empty separator", TEN | {"own.csv": table()}, "own.csv", {"label_separator": ""}, "label_separator", '""'),
    (
        "a flag that is none",
        TEN | {"own.csv": table(age=range(10), x=[1] * 10)},
        "own.csv",
        {"label_column": "x,age"},
        "label_column",
        '"age"',
    ),
    (
        "labels in the split column",
        TEN | {"own.csv": table()},
        "own.csv",
        {"split_column": "label", "label_column": "path"},
        "split_column",
        '"a"',
    ),
    (
        "one group",
        TEN | {"own.csv": table(site=[1] * 10)},
        "own.csv",
        {"group_column": "site"},
        "test_fraction",
        "0.2",
    ),
    (
        "an empty group",
        TEN | {"own.csv": table(site=[*range(9), ""])},
        "own.csv",
        {"group_column": "site"},
        "group_column",
        "009.png",
    ),
    *(
        (f"the path {path}", TEN | {"own.csv": table(path=[path] * 10)}, "own.csv", {}, "source", "secret.png")
        for path in ("../secret.png", "img/../../secret.png", "/etc/secret.png", "C:\\secret.png")
    ),
]
PARQUET = [
    ("no labels", {"own.parquet": stored([0, 1]).remove_columns("label")}, {}, "label_column", "image (Image)"),
    ("another label column", {"own.parquet": stored([0, 1])}, {"label_column": "kind"}, "label_column", '"kind"'),
    ("another split column", {"own.parquet": stored([0, 1])}, {"split_column": "part"}, "split_column", '"part"'),
    ("a separator", {"own.parquet": stored([0, 1])}, {"label_separator": "|"}, "label_separator", ""),
    ("large numbers", {"own.parquet": stored([5_000_000_000, 7], Value("int64"))}, {}, "label_column", "5000000000"),
    ("fractions", {"own.parquet": stored([0.5, 7.0], Value("float32"))}, {}, "label_column", "float"),
    ("no name of a class", {"own.parquet": stored([[0, 1], [-1]], List(Value("int64")))}, {}, None, "row 1"),
    *(
        (f"an empty cell of {kind}", {"own.parquet": stored(labels, kind)}, {}, "dataset", "row 1")
        for labels, kind in (
            ([0, None, 1], Value("int64")),
            (["a", " ", "b"], Value("string")),
            (["a", None, "b"], Value("string")),
            ([[0], None, [1]], List(AB)),
            ([[0], None], List(Value("int8"))),
        )
    ),
    *(
        (f"flags as {kind}", {"own.parquet": stored([[0, 1, 0, 0], [1, 0, 0, 1]] * 5, kind)}, {}, "label_column", "0")
        for kind in (List(Value("int64")), List(Value("bool")), List(Value("int64"), length=4))
    ),
    (
        "text in one split and numbers in another",
        {"train.parquet": stored([0, 1] * 5), "test.parquet": stored(["a", "b"], Value("string"))},
        {},
        "label_column",
        '"test" are text',
    ),
    (
        "numbers in one split and text in another",
        {"train.parquet": stored(["a", "b"], Value("string")), "test.parquet": stored([0, 1] * 5)},
        {},
        "label_column",
        '"train" are text',
    ),
    (
        "a class that training does not name",
        {"train.parquet": stored([0, 1]), "test.parquet": stored([0, 1], ClassLabel(names=["b", "owl"]))},
        {},
        "dataset",
        "owl",
    ),
    (
        "a group in one split alone",
        {"train.parquet": stored([0, 1], site=["x", "y"]), "test.parquet": stored([0, 1])},
        {"group_column": "site"},
        "group_column",
        '"site"',
    ),
    (
        "a file that names no split",
        {"train.parquet": stored([0, 1]), "testset.parquet": stored([0, 1])},
        {},
        "dataset",
        "testset.parquet",
    ),
    (
        "a split column beside splits",
        {"train.parquet": stored([0, 1]), "test.parquet": stored([0, 1])},
        {"split_column": "label"},
        "split_column",
        "test, train",
    ),
    ("several labels and a rule", {"own.parquet": stored([[0], [1]] * 5, List(AB))}, {"rule": "balanced"}, "rule", ""),
    *(
        (
            f"a stream with {name}",
            {"train.parquet": stored([0, 1])},
            {"streaming": True, name: value},
            name,
            repr(value),
        )
        for name, value in {
            **{"imbalance_factor": 10, "fold": "1/5", "exclude_labels": "a", "min_images": 5, "split_column": "fold"},
            **{"group_column": "label", "drop_empty": True, "test_fraction": 0.5, "cap": True},
        }.items()
    ),
    (
        "a stream with a split column",
        {"train.parquet": stored([0, 1], split=["train", "test"])},
        {"streaming": True},
        "split_column",
        '"split"',
    ),
]
CASES = [*FOLDERS, *LISTS, *TABLES, *((name, files, ".", *rest) for name, files, *rest in PARQUET)]


@pytest.mark.parametrize(
    ("files", "dataset", "options", "argument", "value"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_data_that_cannot_be_meant_is_refused(tmp_path, monkeypatch, files, dataset, options, argument, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path, files)
    with pytest.raises(LiVTError) as error:
        load_long_tailed(dataset, **options)
    assert error.value.argument == argument and value in str(error.value)
