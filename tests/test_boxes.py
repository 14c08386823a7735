"""Boxes in pictures: one example each, the same from a file of COCO, of MegaDetector and from a table."""

import importlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_tuning import trained, wrapped_timm

from livt_hf.data import load_long_tailed, read_rgb
from livt_hf.data.decoding import crop_box, find_broken, image_digests, read_images
from livt_hf.data.labels import digest_of
from livt_hf.errors import LiVTError
from livt_hf.predictions import Predictions
from livt_hf.runs import Run

CLASSES = {1: "fox", 2: "deer"}
SIZES = [(90, 60), (120, 70), (64, 128), (200, 40)]  # width and height of p0.png, p1.png, ...
# picture, class, left, top, width, height
BOXES = [(i % 4, 1 + (i % 3 > 0), 3 * i, 2 * i, 7 + i, 5 + 2 * i) for i in range(12)]
IMAGES = [{"id": 10 + i, "file_name": f"p{i}.png"} for i in range(4)]
CATEGORIES = [{"id": number, "name": name} for number, name in CLASSES.items()]


def annotation(picture=0, label=1, *box, **other) -> dict:
    return {"image_id": 10 + picture, "category_id": label, "bbox": list(box or (1, 2, 30, 20))} | other


def coco(annotations=None, images=IMAGES, categories=CATEGORIES) -> dict:
    annotations = [annotation(*box) for box in BOXES] if annotations is None else annotations
    return {"annotations": annotations, "images": images, "categories": categories}


def detection(picture=0, label=1, left=1, top=2, width=30, height=20, **other) -> dict:
    w, h = SIZES[picture]
    box = [left / w, top / h, width / w, height / h]
    return {"category": "1", "conf": 0.9, "bbox": box, "classifications": [[str(label), 0.7]]} | other


def megadetector(detections: dict | None = None, **other) -> dict:
    if detections is None:
        detections = {i: [detection(*box) for box in BOXES if box[0] == i] for i in range(4)}
    images = [{"file": f"p{i}.png", "detections": own} for i, own in detections.items()]
    names = {str(number): name for number, name in CLASSES.items()}
    kinds = {"1": "animal", "2": "person"}
    return {"images": images, "detection_categories": kinds, "classification_categories": names} | other


def table(columns="left,top,width,height", boxes=BOXES) -> str:
    rows = [f"p{i}.png,{CLASSES[label]},{','.join(map(str, box))}" for i, label, *box in boxes]
    return "\n".join([f"path,label,{columns}", *rows]) + "\n"


def write(folder: Path, name: str, content: dict | str) -> str:
    """Write a file of boxes beside the pictures."""
    for i, (width, height) in enumerate(SIZES):
        pixels = np.random.RandomState(i).randint(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"p{i}.png")
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / name)


def load(file: str, **options):
    return load_long_tailed(file, test_fraction=None, **options)["train"]


def as_corners(boxes) -> list[tuple]:
    return [(i, label, x, y, x + w, y + h) for i, label, x, y, w, h in boxes]


def as_relative(boxes) -> list[tuple]:
    sizes = [SIZES[box[0]] * 2 for box in boxes]
    return [(*box[:2], *np.divide(box[2:], size).tolist()) for box, size in zip(boxes, sizes, strict=True)]


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("boxes.json", megadetector(), {}),
        ("boxes.csv", table(), {}),
        ("boxes.csv", table("xmin,ymin,xmax,ymax", as_corners(BOXES)), {}),
        ("boxes.csv", table("x,y,w,h", as_relative(BOXES)), {}),
        ("boxes.csv", table("a,b,bw,bh"), {"box_columns": "a,b,bw,bh"}),
    ],
)
def test_boxes_of_any_file_give_the_crops_classes_and_groups_of_the_coco_file(tmp_path, name, content, options):
    expected = load(write(tmp_path, "coco.json", coco()))
    data = load(write(tmp_path, name, content), **options)
    assert len(data) == 12 and data["label"] == expected["label"] and data["group"] == expected["group"]
    assert data.features["label"].names == ["deer", "fox"] and set(data["group"]) == {f"p{i}.png" for i in range(4)}
    for crop, other in zip(read_images(data, range(12)), read_images(expected, range(12)), strict=True):
        assert torch.equal(crop, other)


def test_all_boxes_of_a_picture_are_on_one_side_of_a_split(tmp_path):
    data = load_long_tailed(write(tmp_path, "coco.json", coco()), test_fraction=0.25)
    assert len(data["test"]) and not set(data["test"]["group"]) & set(data["train"]["group"])


@pytest.mark.parametrize(
    ("box", "margin", "left", "top", "width", "height"),
    [
        ((100, 100, 160, 140), 0.0, 100, 90, 60, 60),  # square around the middle
        ((100, 100, 160, 140), 0.5, 85, 75, 90, 90),
        ((100, 100, 104, 104), 0.0, 86, 86, 32, 32),  # at least 32 pixels
        ((0, 0, 60, 40), 0.5, 0, 0, 90, 90),  # moved into the picture
        ((380, 180, 420, 200), 0.0, 368, 168, 32, 32),  # what sticks out is cut off first
        ((0, 80, 400, 120), 0.0, 0, 0, 400, 200),  # no square of that size
        ((0.25, 0.5, 0.5, 1.0), 0.0, 100, 100, 100, 100),  # relative
    ],
)
def test_a_crop_is_a_square_around_its_box_where_the_picture_allows(box, margin, left, top, width, height):
    picture = torch.randint(0, 255, (3, 200, 400), dtype=torch.uint8)
    assert torch.equal(crop_box(picture, box, margin), picture[:, top : top + height, left : left + width])


def test_the_fingerprint_and_the_digests_of_images_include_the_box(tmp_path):
    before = load(write(tmp_path, "coco.json", coco([annotation(0, 1, 1, 2, 30, 20), annotation(1, 2)])))
    after = load(write(tmp_path, "coco.json", coco([annotation(0, 1, 1, 2, 30, 21), annotation(1, 2)])))
    wider = load(str(tmp_path / "coco.json"), box_margin=0.5)
    assert digest_of(before) != digest_of(after) == digest_of(wider)
    digests = [[digest for _, digest in image_digests(data)] for data in (before, after, wider)]
    assert digests[0][0] != digests[1][0] != digests[2][0] and digests[0][1] == digests[1][1]


def test_neighbouring_boxes_of_a_picture_are_cut_out_of_one_decoding(tmp_path, monkeypatch):
    data, opened = load(write(tmp_path, "coco.json", coco())), []
    monkeypatch.setattr("builtins.open", lambda path, *mode, real=open: opened.append(str(path)) or real(path, *mode))
    read_images(data, range(12))
    assert len([path for path in opened if path.endswith(".png")]) == 4


def test_a_box_is_cut_out_of_the_upright_picture(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    file = write(tmp_path, "boxes.csv", table(boxes=[(0, 1, 0, 50, 40, 40), (1, 2, 0, 0, 40, 40)]))
    pixels = np.random.RandomState(0).randint(0, 255, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p0.png", exif=exif)
    crop = read_images(load(file, box_margin=0.0), [0])[0]
    assert torch.equal(crop, read_rgb(tmp_path / "p0.png")[:, 50:90, 0:40])


def test_a_folder_as_roboflow_exports_it_is_read_with_its_splits(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / split).mkdir()
        write(tmp_path / split, "_annotations.coco.json", coco())
    data = load_long_tailed(str(tmp_path))
    assert {split: len(part) for split, part in data.items()} == {"train": 12, "test": 12, "validation": 12}
    assert data["train"]["group"][0] == "train/p0.png" and data["train"].features["label"].names == ["deer", "fox"]


@pytest.mark.parametrize(
    ("file", "pictures"),
    [("annotations.json", "."), ("annotations.json", "images"), ("annotations/instances_train2017.json", "train2017")],
)
def test_the_pictures_of_a_coco_file_are_found_where_they_usually_lie(tmp_path, file, pictures):
    (tmp_path / pictures).mkdir(exist_ok=True)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    write(tmp_path / pictures, "unused.txt", "")
    (tmp_path / file).write_text(json.dumps(coco()))
    data = load(str(tmp_path))
    assert len(data) == 12 and len(read_images(data, [0, 11])) == 2


def test_a_field_of_the_pictures_can_be_the_group(tmp_path):
    images = [image | {"site": i % 2} for i, image in enumerate(IMAGES)]
    data = load(write(tmp_path, "coco.json", coco(images=images)), group_column="site")
    assert set(data["group"]) == {"0", "1"}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_from_before_there_were_boxes_finds_its_class_folders_beside_a_coco_file(tmp_path, streaming):
    for name in "ab":
        (tmp_path / name).mkdir()
        write(tmp_path / name, "annotations.json", coco())
    (tmp_path / "annotations.json").write_text(json.dumps(coco()))
    options = {} if streaming else {"test_fraction": None}
    data = load_long_tailed(str(tmp_path), box_columns="none", streaming=streaming, **options)["train"]
    assert data.features["label"].names == ["a", "b"] and "box" not in data.features


def test_boxes_of_a_picture_are_not_taken_for_its_masks(tmp_path, caplog):
    boxes = [annotation(i, 1 + j, 1 + j, 2, 30, 20) for i in range(4) for j in range(2)]
    file = write(tmp_path, "coco.json", coco(boxes))
    for picture in tmp_path.glob("*.png"):
        Image.new("L", (90, 60)).save(picture)  # of one grey value
    assert len(load(file)) == 8 and "masks" not in caplog.text
    assert set(load(file, exclude=["p1.png"])["group"]) == {"p0.png", "p2.png", "p3.png"}


def test_columns_of_boxes_can_be_ignored(tmp_path):
    file = write(tmp_path, "boxes.csv", table(boxes=BOXES[:4]))
    data = load(file, box_columns="none")
    assert "box" not in data.column_names and read_images(data, [0])[0].shape == (3, 60, 90)


def test_unsure_detections_people_and_pictures_that_failed_are_left_out_and_counted(tmp_path, caplog):
    detections = {0: [detection(), detection(0, 2, 5, conf=0.1)], 1: [detection(1, 2), detection(1, category="2")]}
    content = megadetector(detections)
    content["images"].append({"file": "p2.png", "failure": "Failure image access", "detections": None})
    data = load(write(tmp_path, "boxes.json", content))
    assert data["group"] == ["p0.png", "p1.png"] and "left out 3 images" in caplog.text
    assert len(load(str(tmp_path / "boxes.json"), min_confidence=0.05)) == 3


def test_broken_boxes_are_named_and_counted_or_left_out(tmp_path, caplog):
    wrong = [(1, 2, 0, 5), (1, 2, -3, 5), ("1", "2", "3", "4"), (-40, 0, 20, 20), (0, 0, 0.5, 0.5), (1, 2, 3), None]
    boxes = [annotation(0, 1, bbox=box) for box in wrong]
    file = write(tmp_path, "coco.json", coco([*boxes, annotation(), annotation(1, 2)]))
    with pytest.raises(LiVTError, match="7 boxes of .*coco.json") as error:
        load(file)
    assert error.value.argument == "on_broken" and all(f"p0.png, box {i}:" in str(error.value) for i in range(7))
    assert len(load(file, on_broken="skip")) == 2 and "left out 7 images" in caplog.text


def test_pixels_are_pixels_where_most_rows_have_no_box(tmp_path):
    file = write(tmp_path, "boxes.csv", table(boxes=[*BOXES, *[(0, 1, "", "", "", "")] * (len(BOXES) + 1)]))
    assert len(load(file, on_broken="skip")) == len(BOXES)


def test_a_box_that_only_the_pixels_tell_to_be_outside_is_a_broken_image(tmp_path):
    file = write(tmp_path, "coco.json", coco([annotation(0, 1, 500, 2, 9, 9), annotation(1, 2), annotation(2, 1)]))
    assert list(find_broken(load(file))) == [0]
    with pytest.raises(LiVTError, match="90 x 60") as error:
        read_images(load(file), [0])
    assert error.value.argument == "on_broken" and len(load(file, on_broken="skip")) == 2


REFUSED = [
    ("no picture of that id", coco([annotation(5)]), {}, "dataset", "15"),
    ("no category of that id", coco([annotation(0, 3)]), {}, "dataset", "3"),
    ("a category without a name", coco(categories=[{"id": 1}]), {}, "dataset", "{'id': 1}"),
    ("an empty name", coco(categories=[{"id": 1, "name": " "}]), {}, "dataset", "' '"),
    ("a picture without a file", coco(images=[{"id": 10}]), {}, "dataset", "file name"),
    ("an annotation of no picture", coco([{"bbox": [1, 2, 3, 4]}]), {}, "dataset", "image_id"),
    ("a list as an id", coco([annotation(image_id=[1])]), {}, "dataset", "[1]"),
    (
        "missing pictures",
        coco(images=[i | {"file_name": f"gone{i['id']}.png"} for i in IMAGES]),
        {},
        "source",
        "gone1",
    ),
    ("boxes as strings", coco([annotation(bbox=["1", "2", "30", "20"])]), {}, "on_broken", "p0.png, box 0"),
    (
        "all of them, to be skipped",
        coco([annotation(bbox="1 2")]),
        {"on_broken": "skip"},
        "dataset",
        "1: the box is not",
    ),
    ("boxes that are not finite", coco([annotation(bbox=[1, 2, 1e999, 20])]), {}, "on_broken", "p0.png, box 0"),
    ("huge numbers", coco([annotation(bbox=[1, 2, 10**400, 20])]), {}, "on_broken", "p0.png, box 0"),
    ("no annotation", coco([]), {}, "dataset", "there is none"),
    ("crowds only", coco([annotation(iscrowd=1)]), {}, "dataset", "1: the annotation is of a crowd"),
    ("two classes of a box", coco([annotation(), annotation(0, 2)]), {}, "dataset", '"fox" and with "deer"'),
    ("a path that leads out", coco(images=[IMAGES[0] | {"file_name": "../x.png"}, *IMAGES[1:]]), {}, "source", "../x"),
    ("an absolute path", coco(images=[IMAGES[0] | {"file_name": "/etc/x.png"}, *IMAGES[1:]]), {}, "source", "/etc/x"),
    ("a column", coco(), {"label_column": "kind"}, "label_column", "kind"),
    ("a group that no picture has", coco(), {"group_column": "site"}, "group_column", "site"),
    ("a list", "[]", {}, "dataset", "boxes.json"),
    ("another dictionary", "{}", {}, "dataset", "boxes.json"),
    ("no JSON", "{", {}, "dataset", "boxes.json"),
    ("deep JSON", "[" * 100_000, {}, "dataset", "boxes.json"),
    ("a stream", coco(), {"streaming": True}, "dataset", "boxes.json"),
    (
        "failures only",
        megadetector({}, images=[{"file": "p0.png", "failure": "x"}]),
        {},
        "dataset",
        "1: the detector could not read the picture): pass",
    ),
    ("nothing above the confidence", megadetector({0: [detection(conf=0.1)]}), {}, "dataset", "min_confidence"),
    ("people only", megadetector({0: [detection(category="2")]}), {}, "dataset", "no animal"),
    ("a confidence in words", megadetector({0: [detection(conf="high")]}), {}, "dataset", "'high'"),
    ("a detection without a box", megadetector({0: [{"category": "1", "conf": 0.9}]}), {}, "dataset", "p0.png"),
    ("no classes", megadetector({0: [detection(classifications=None)]}), {}, "dataset", "no classes"),
    ("a class as a list", megadetector({0: [detection(classifications=[[["1"], 1]])]}), {}, "dataset", "['1']"),
    ("a class without a name", megadetector({0: [detection(0, 7)]}), {}, "dataset", "'7'"),
]


@pytest.mark.parametrize(("content", "options", "argument", "value"), [case[1:] for case in REFUSED], ids=[
    case[0] for case in REFUSED
])  # fmt: skip
def test_a_file_of_boxes_is_refused_in_one_sentence(tmp_path, content, options, argument, value):
    file = write(tmp_path, "boxes.json", content)
    options = {"seed": 0} | options if "streaming" in options else {"test_fraction": None} | options
    with pytest.raises(LiVTError) as error:
        load_long_tailed(file, **options)
    assert error.value.argument == argument and value in str(error.value)


@pytest.mark.parametrize(
    ("columns", "boxes", "options", "argument", "value"),
    [
        ("left,top,width,height", [(0, 1, 1, 2, "wide", 3)], {}, "on_broken", "p0.png, box 0"),
        ("xmin,ymin,xmax,ymax", [(0, 1, 9, 2, 3, 8)], {}, "on_broken", "reversed"),
        ("x,y,w,h", [(0, 1, 1.5, 2, 0, 3)], {}, "on_broken", "empty"),
        ("a,b,c,d", BOXES, {"box_columns": "a,b,c"}, "box_columns", "'a,b,c'"),
        ("a,b,c,d", BOXES, {"box_columns": "a,b,c,e"}, "box_columns", '"e"'),
    ],
)
def test_a_table_of_boxes_is_refused_in_one_sentence(tmp_path, columns, boxes, options, argument, value):
    with pytest.raises(LiVTError) as error:
        load(write(tmp_path, "boxes.csv", table(columns, boxes)), **options)
    assert error.value.argument == argument and value in str(error.value)


# Prediction and training


COLOURS = {1: (230, 60, 20), 2: (20, 60, 230)}


def draw(folder: Path, number: int = 12, per_picture: int = 4) -> dict:
    """Draw pictures of red foxes and blue deer, and return their COCO file."""
    folder.mkdir(exist_ok=True)
    rng, annotations = np.random.RandomState(0), []
    for i in range(number):
        pixels = rng.randint(90, 160, (120, 160, 3)).astype(np.uint8)
        for j in range(per_picture):
            label, left, top = 1 + (rng.rand() > 0.6), 4 + 38 * j, int(rng.randint(5, 80))
            pixels[top : top + 30, left : left + 30] = COLOURS[label]
            annotations.append(annotation(i, label, left, top, 30, 30))
        Image.fromarray(pixels).save(folder / f"p{i}.png")
    return coco(annotations, [{"id": 10 + i, "file_name": f"p{i}.png"} for i in range(number)])


def as_detections(content: dict) -> dict:
    """Return a COCO file of pictures of 160 x 120 pixels as one of MegaDetector, without classes."""
    boxes: dict = {picture["id"]: [] for picture in content["images"]}
    for one in content["annotations"]:
        box = np.divide(one["bbox"], (160, 120, 160, 120)).tolist()
        boxes[one["image_id"]].append({"category": "1", "conf": 0.9, "bbox": box})
    images = [{"file": one["file_name"], "detections": boxes[one["id"]]} for one in content["images"]]
    return megadetector({}, images=images)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A head trained on the boxes of a COCO file by `livt finetune`, and these files beside it."""
    folder = tmp_path_factory.mktemp("boxes")
    content = draw(folder / "pictures")
    (folder / "pictures" / "coco.json").write_text(json.dumps(content))
    (folder / "pictures" / "detections.json").write_text(json.dumps(as_detections(content)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIVT_RUNS", str(folder / "runs"))
        patch.setenv("ACCELERATE_USE_CPU", "1")
        options = ["--tune", "head", "--test_fraction", "0.25", "--box_margin", "0.1"]
        trained(folder / "pictures" / "coco.json", wrapped_timm(folder / "start"), folder / "run", *options)
    return folder


def predict(*argv) -> None:
    importlib.import_module("livt_hf.recipes.predict").main([*map(str, argv), "--threads", "1"])


def decide(*argv) -> None:
    importlib.import_module("livt_hf.recipes.decide").main([*map(str, argv)])


def test_a_head_is_trained_and_measured_on_boxes(model):
    run = Run(model / "run")
    record = Predictions.load(run.folder / "predictions")
    assert len(record) == 12 and set(record.table.column_names) >= {"path", "box", "box_margin", "box_row", "group"}
    assert run.arguments["box_margin"] == 0.1 and np.allclose(record.column("box_margin"), 0.1)
    assert len(set(record.column("group"))) == 3


def test_train_trains_on_boxes_and_keeps_pictures_whole(model, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    words = [model / "pictures" / "coco.json", "--pretrained", model / "start", "--hours", 0, "--threads", 1]
    words += ["--test_fraction", 0.25, "--output_dir", tmp_path / "run"]
    importlib.import_module("livt_hf.recipes.train").main([str(word) for word in words])
    record = Predictions.load(tmp_path / "run" / "finetune" / "predictions")
    assert len(record) == 12 and len(set(record.column("group"))) == 3
    assert Run(tmp_path / "run" / "finetune").results.num_train_images == 36
    assert (record.column("label") == record.logits.argmax(1)).mean() > 0.5


def test_boxes_are_classified_as_they_were_in_training(model, tmp_path, capsys):
    record = Predictions.load(model / "run" / "predictions")
    predict(
        model / "run", model / "pictures" / "detections.json", "--format", "jsonl", "--output", tmp_path / "record"
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    predicted = Predictions.load(tmp_path / "record")
    assert len(lines) == len(predicted) == 48 and set(lines[0]) == {"file", "box", "predictions"}
    # Detections stand in the order of the annotations.
    own = {number: logits for number, logits in zip(predicted.column("box_row"), predicted.logits, strict=True)}
    for number, logits in zip(record.column("box_row"), record.logits, strict=True):
        np.testing.assert_allclose(own[number], logits, atol=1e-4)


@pytest.mark.parametrize("name", ["coco.json", "detections.json"])
def test_answers_are_written_back_and_read_back(model, tmp_path, name, capsys):
    answers = tmp_path / "answers.json"
    predict(model / "run", model / "pictures" / name, "--output", answers, "--format", "jsonl")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    data = load(str(answers), source=str(model / "pictures"))
    names = data.features["label"].names
    assert [names[label] for label in data["label"]] == [line["predictions"][0]["label"] for line in lines]
    unanswered = load(str(model / "pictures" / "coco.json"))
    assert data["group"] == unanswered["group"]
    for crop, other in zip(read_images(data, range(48)), read_images(unanswered, range(48)), strict=True):
        assert torch.equal(crop, other)


@pytest.mark.parametrize("name", ["coco.json", "detections.json"])
def test_answers_that_are_decided_later_are_those_of_predict(model, tmp_path, name):
    file, record, later, at_once = model / "pictures" / name, *(tmp_path / n for n in ("record", "a.json", "b.json"))
    predict(model / "run", file, "--output", record)
    predict(model / "run", file, "--prior", "training", "--output", at_once)
    decide(record, "--boxes", file, "--prior", "training", "--output", later)
    assert json.loads(later.read_text()) == json.loads(at_once.read_text())


def test_the_test_boxes_of_a_run_are_answered_and_the_others_left(model, tmp_path):
    file, record = model / "pictures" / "coco.json", Predictions.load(model / "run" / "predictions")
    decide(model / "run", "--boxes", file, "--output", tmp_path / "answers.json")
    before, after = (json.loads(path.read_text())["annotations"] for path in (file, tmp_path / "answers.json"))
    assert {number for number, box in enumerate(after) if "score" in box} == set(record.column("box_row").tolist())
    assert [box for box in after if "score" not in box] == [
        box for number, box in enumerate(before) if number not in record.column("box_row")
    ]


@pytest.mark.parametrize(
    ("source", "output", "argument", "value"),
    [
        ("predictions", "answers.json", "boxes", "boxes is None"),
        ("predictions", "answers.csv --boxes coco.json", "boxes", "answers.csv"),
        ("predictions", "answers.json --boxes gone.json", "boxes", "gone.json"),
        ("predictions", "answers.json --boxes pipe.json", "boxes", "pipe.json"),
        ("predictions", "answers.json --boxes words.json", "boxes", "words.json"),
        ("predictions", "answers.json --boxes list.json", "boxes", "list.json"),
        ("predictions", "answers.json --boxes other.json", "boxes", "no box"),
        ("plain", "answers.json --boxes coco.json", "output", ".csv or .parquet"),
    ],
)
def test_answers_of_another_file_are_refused_in_one_sentence(
    model, tmp_path, monkeypatch, source, output, argument, value
):
    record = Predictions.load(model / "run" / "predictions")
    record.save(tmp_path / "predictions")
    Predictions(record.table.drop_columns("box_row"), record.info).save(tmp_path / "plain")
    write(tmp_path, "coco.json", json.loads((model / "pictures" / "coco.json").read_text()))
    for name, content in {"words.json": "{", "list.json": "[1]", "other.json": coco([annotation()])}.items():
        write(tmp_path, name, content)
    os.mkfifo(tmp_path / "pipe.json")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LiVTError) as error:
        decide(source, "--output", *output.split())
    assert error.value.argument == argument and value in str(error.value)
    assert not (tmp_path / "answers.json").exists()


def test_answers_leave_the_rest_of_a_file_as_it_is(model, tmp_path):
    content = json.loads((model / "pictures" / "detections.json").read_text()) | {"info": {"detector": "v5"}}
    content["images"][0]["detections"][1] |= {"conf": 0.1, "classifications": [["1", 0.9]]}
    content["images"].append({"file": "gone.png", "failure": "Failure image access"})
    (tmp_path / "some.json").write_text(json.dumps(content))
    predict(model / "run", tmp_path / "some.json", "--source", model / "pictures", "--output", tmp_path / "out.json")
    answered = json.loads((tmp_path / "out.json").read_text())
    assert answered["info"] == content["info"] and answered["images"][-1] == content["images"][-1]
    assert answered["classification_categories"] == {"0": "deer", "1": "fox"}
    first, second = answered["images"][0]["detections"][:2]
    assert len(first["classifications"]) == 2 and "classifications" not in second


def test_a_table_of_boxes_is_classified_and_its_answers_can_be_trained_on(model, tmp_path):
    boxes = load(str(model / "pictures" / "coco.json"))
    rows = [
        ",".join([path, *(f"{side:g}" for side in box)])
        for path, box in zip(boxes["group"], boxes["box"], strict=True)
    ]
    (tmp_path / "boxes.csv").write_text("\n".join(["path,x1,y1,x2,y2", *rows]))
    answers = tmp_path / "answers.csv"
    predict(model / "run", tmp_path / "boxes.csv", "--source", model / "pictures", "--output", answers)
    data = load(str(answers), source=str(model / "pictures"), image_column="file", label_column="prediction")
    assert data["box"] == boxes["box"]


@pytest.mark.parametrize(
    ("name", "output", "argument", "value"),
    [
        ("labels.csv", None, "box_columns", "labels.csv"),
        ("boxes.csv", "answers.json", "output", "answers.json"),
        ("boxes.json", "answers.json", "dataset", "there is none"),
    ],
)
def test_predicting_boxes_is_refused_in_one_sentence(model, tmp_path, name, output, argument, value):
    (tmp_path / "labels.csv").write_text("path,label\np0.png,fox\n")
    write(tmp_path, "boxes.csv", table())
    write(tmp_path, "boxes.json", coco([]))
    output = [] if output is None else ["--output", tmp_path / output]
    with pytest.raises(LiVTError) as error:
        predict(model / "run", tmp_path / name, *output)
    assert error.value.argument == argument and value in str(error.value)
