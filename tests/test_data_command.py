import re
import shlex
from pathlib import Path

import pytest
from PIL import Image
from refusals import refusal

from livt_hf.data.glyphs import glyphs
from livt_hf.data.labels import class_counts
from livt_hf.data.spec import DataSpec
from livt_hf.recipes.data import main, sample, table
from livt_hf.recipes.train import TrainSettings


def test_the_command_prints_the_table_and_writes_two_pictures(tmp_path, capsys):
    options = ["--imbalance_factor", "50", "--images_per_class", "150", "--output", str(tmp_path / "look")]
    main(["glyphs", *options])
    printed = capsys.readouterr().out
    rows = (re.split(r" {2,}", line) for line in printed.splitlines())
    lines = {name: values for name, *values in rows}
    assert lines["classes"] == ["40", "40"] and lines["largest / smallest"] == ["50", "1"]
    assert lines["images of the largest class"] == ["150", "50"]
    assert lines["images of the smallest class"] == ["3", "50"]
    assert sum(int(n) for n in lines["many/medium/few-shot classes"][0].split("/")) == 40
    assert "All images can be read." in printed
    for name in ("classes.png", "samples.png"):
        assert f"wrote {tmp_path / 'look' / name}" in printed
        assert min(Image.open(tmp_path / "look" / name).size) > 100


def test_the_table_has_the_groups_of_the_training_counts():
    data = glyphs(100, max_count=200, test_per_class=1)
    counts = class_counts(data["train"])
    groups = f"{(counts > 100).sum()}/{((counts >= 20) & (counts <= 100)).sum()}/{(counts < 20).sum()}"
    assert table(data).splitlines()[-1].split() == ["many/medium/few-shot", "classes", groups]


def test_samples_show_six_images_of_classes_from_head_to_tail():
    train = glyphs(100, max_count=100, test_per_class=1)["train"]
    counts = class_counts(train)
    rows = sample(train, counts, seed=0)
    assert len(rows) == 12 and list(rows)[0] == counts.argmax() and list(rows)[-1] == 39
    for label, chosen in rows.items():
        assert len(set(chosen)) == min(6, counts[label]) and {train["label"][row] for row in chosen} == {label}


def test_the_command_takes_the_data_options_of_the_stages(capsys):
    with pytest.raises(SystemExit):
        main(["--help_all"])
    options = {word.strip("[],").partition("/")[0] for word in capsys.readouterr().out.split()}
    assert {f"--{name}" for name in DataSpec.names() if name != "dataset"} <= options


def birds(folder: Path, size: tuple[int, int] = (12, 10), **counts: int) -> Path:
    """Make an image folder with so many images of each split and class; `train_a` is class a of train."""
    for place, count in counts.items():
        (folder / place.replace("_", "/")).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", size).save(folder / place.replace("_", "/") / f"{i:02d}.png")
    return folder


def test_broken_images_are_named_up_to_ten_and_counted(tmp_path, capsys):
    folder = birds(tmp_path / "birds", (120, 100), train_a=16, train_b=16, test_a=16, test_b=16)
    for i in range(12):
        (folder / f"train/a/{i:02d}.png").write_bytes(b"broken")
    main([str(folder), "--output", str(tmp_path / "look")])
    printed = capsys.readouterr().out
    assert "Broken images in train, 12 of 32:" in printed and printed.count("cannot be read") == 10
    assert "All images can be read" not in printed
    assert "and 2 more" in printed and " --on_broken skip" in printed.splitlines()[-1]
    assert (tmp_path / "look/samples.png").exists()


def test_where_skipping_broken_images_leaves_a_class_or_a_split_empty_that_is_said(tmp_path, capsys):
    folder = birds(tmp_path / "birds", train_a=1, train_b=1, test_a=1)
    (folder / "train/b/00.png").write_bytes(b"broken")
    main([str(folder), "--output", str(tmp_path / "look")])
    assert " --on_broken skip --drop_empty True" in capsys.readouterr().out.splitlines()[-1]
    (folder / "train/a/00.png").write_bytes(b"broken")
    with refusal(None, '"train"'):
        main([str(folder), "--output", str(tmp_path / "look")])
    assert "Broken images in train, 2 of 2:" in capsys.readouterr().out


def test_pictures_go_to_the_folder_of_runs_in_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "elsewhere"))
    main(["glyphs", "--images_per_class", "100", "--split_seed", "1"])
    assert (tmp_path / "elsewhere/data-glyphs/samples.png").exists()


def test_the_command_ends_with_the_training_of_the_same_images(tmp_path, capsys):
    said = ["--images_per_class", "60", "--imbalance_factor", "3", "--cap", "--test_fraction", "0.3"]
    main(["glyphs", *said, "--output", str(tmp_path / "my look")])
    livt, train, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    told = TrainSettings.parse(words)
    assert (livt, train, told.data.dataset, told.hours) == ("livt", "train", "glyphs", 0.5)
    data = told.data
    assert (data.images_per_class, data.imbalance_factor, data.cap, data.test_fraction) == (60, 3.0, True, 0.3)
