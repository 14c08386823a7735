"""Hostile input: files without an end, YAML that grows, names that steer a terminal, folders nobody writes to."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from needs import needs_linux
from PIL import Image
from refusals import refusal
from test_transforms import MEAN, STD

from livt_hf.classifiers import load_model, load_processor
from livt_hf.cli import console
from livt_hf.cli.console import EscapingStream, run_command
from livt_hf.data import load_long_tailed
from livt_hf.data.decoding import BrokenImageError, read_rgb
from livt_hf.data.transforms import eval_processor
from livt_hf.errors import LiVTError
from livt_hf.files import read_values
from livt_hf.predictions import predict
from livt_hf.predictions.predict import find_images
from livt_hf.reports.classes import class_distribution
from livt_hf.reports.style import shorten
from livt_hf.text import escape_controls, path_to_text, text_to_path

BOMBS = {
    "lists of lists": "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(60)),
    "merged": "a0: &a0 {x: 1}\n" + "".join(f"a{i + 1}: &a{i + 1}\n  <<: [{f'*a{i}, ' * 10}]\n" for i in range(9)),
    "long texts": f"a: &a {'x' * 100_000}\nb: [{'*a, ' * 1000}]\n",
    "itself": "a: &a [1, *a]\n",
    "deep": "[" * 100_000,
    "number of base 60": "a: 1" + ":1" * 10_000,
    "long": "#" * 5_000_000,
}


@pytest.mark.parametrize(
    ("load", "name", "kind", "auto_class"),
    [
        (load_model, "config.json", "model_type", "AutoConfig"),
        (load_processor, "preprocessor_config.json", "image_processor_type", "AutoImageProcessor"),
    ],
)
def test_code_of_a_checkpoint_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch, load, name, kind, auto_class):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "inside.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    values = {"config.json": {kind: "unheard_of"}, name: {kind: "unheard_of", "auto_map": {auto_class: "inside.Kind"}}}
    for file, content in values.items():
        (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(LiVTError):
        load(str(tmp_path))
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("loader", [yaml.SafeLoader, yaml.BaseLoader])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_yaml_file_that_would_grow_without_end_is_refused_at_once(tmp_path, bomb, loader):
    path = tmp_path / "prior.yaml"
    path.write_text(BOMBS[bomb])
    if bomb == "number of base 60" and loader is yaml.BaseLoader:  # a text
        assert len(read_values(path, loader)["a"]) == 20_001
        return
    with refusal(None, path, "YAML"):
        read_values(path, loader)


def test_aliases_within_reason_are_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: &a [1, 2]\nb: *a\nc: {<<: {d: 1}, e: *a}\n")
    assert read_values(tmp_path / "config.yaml") == {"a": [1, 2], "b": [1, 2], "c": {"d": 1, "e": [1, 2]}}
    (tmp_path / "empty.yaml").write_text("")
    assert read_values(tmp_path / "empty.yaml") is None


@pytest.mark.parametrize("name", ["pipe.json", "zero.yaml", "folder.yaml"])
def test_only_regular_files_are_read_as_values(tmp_path, name):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "folder.yaml").mkdir()
    with refusal(None, name, "not a regular file"):
        read_values(tmp_path / name)


def test_a_file_that_claims_more_bytes_than_any_image_is_not_read(tmp_path):
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(BrokenImageError, match="1,099,511,627,776 bytes"):
        read_rgb(path)


@pytest.mark.parametrize("name", ["pipe.csv", "pipe.parquet", "pipe.json", "pipe"])
def test_a_pipe_is_not_read_as_a_dataset(tmp_path, name):
    os.mkfifo(tmp_path / name)
    for options in ({}, {"seed": 0, "streaming": True}):
        with refusal("dataset", name):
            load_long_tailed(str(tmp_path / name), **options)


@pytest.mark.parametrize(("suffix", "size"), [("png", (1, 30_000)), ("jpg", (30_000, 1)), ("gif", (501, 1))])
def test_an_image_that_is_too_narrow_to_be_resized_is_broken(tmp_path, suffix, size):
    Image.new("RGB", size).save(tmp_path / f"line.{suffix}")
    with refusal("on_broken", f"line.{suffix}", f"{size[0]} x {size[1]}"):
        read_rgb(tmp_path / f"line.{suffix}")
    assert read_rgb(Image.new("RGB", (500, 1))).shape == (3, 1, 500)  # of any usual proportions


# Patterns


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    for name in ("a.png", "cats/b.png", "cats/old/c.png", "dogs/d.jpg", "dogs/notes.txt", ".hidden/e.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "cats" / "loop").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**", "a.png cats/b.png cats/old/c.png dogs/d.jpg"),
        ("**/**", "a.png cats/b.png cats/old/c.png dogs/d.jpg"),
        ("**/*.png", "a.png cats/b.png cats/old/c.png"),
        ("*/**/*.png", "cats/b.png cats/old/c.png"),
        ("**/old", "cats/old/c.png"),
        ("**/cats/**/*.png", "cats/b.png cats/old/c.png"),
        ("*/*.png", "cats/b.png"),
        ("**/*.txt", "dogs/notes.txt"),
        ("**/*.gif", ""),
    ],
)
def test_a_pattern_with_any_folders_finds_each_image_once_and_follows_no_link(tree, pattern, found):
    assert sorted(map(str, find_images([pattern]))) == found.split()
    assert sorted(map(str, find_images([f"{tree}/{pattern}"]))) == [f"{tree}/{name}" for name in found.split()]


def test_patterns_are_bounded(tree, monkeypatch):
    with refusal("images", "2"):
        find_images(["**/a*/**/b*/**"])
    monkeypatch.setattr(predict, "MAX_LOOKED_AT", 5)
    with refusal("images", "5 files"):
        find_images(["**/*.png"])


# Names


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("owl\x1b[31m", r"owl\u001b[31m"),
        ("a\rb\x07\x7f\x9b2J", r"a\u000db\u0007\u007f\u009b2J"),
        ("\u202egnp.owl", r"\u202egnp.owl"),
        ("\udcff.png", r"\udcff.png"),
        ("Eule, 梟, 🦉\n\tan owl", "Eule, 梟, 🦉\n\tan owl"),
    ],
)
def test_controls_are_escaped_and_letters_are_not(text, escaped):
    assert escape_controls(text) == escaped


def test_a_path_that_is_not_utf8_is_written_as_text_and_read_back():
    path = Path(os.fsdecode(b"b\xe4r/\xff.png"))
    text = path_to_text(path)
    assert text == r"b\udce4r/\udcff.png" and text_to_path(text) == path
    assert path_to_text("bär.png") == "bär.png" and text_to_path("bär.png") == Path("bär.png")


def test_whatever_a_command_prints_cannot_steer_the_terminal_but_progress_bars_can(monkeypatch):
    streams = {name: io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        stream.reconfigure = lambda **_: None
        monkeypatch.setattr(sys, name, EscapingStream(stream))

    def command():
        print("class \x1b[2Jowl \udcff")
        sys.stderr.write("\r 50%|#####")
        sys.stderr.write("\n\x1b[A")
        print("file \x1b]0;title\x07", file=sys.stderr)

    command()
    assert streams["stdout"].getvalue() == "class \\u001b[2Jowl \\udcff\n"
    assert streams["stderr"].getvalue() == "\r 50%|#####\n\x1b[Afile \\u001b]0;title\\u0007\n"


def test_errors_and_prints_of_a_command_are_escaped(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    monkeypatch.setattr(sys, "stderr", sys.stderr)

    def command():
        print("\x1b[1mowl")
        raise LiVTError("the class \x1b[1mowl is unknown.")

    with pytest.raises(SystemExit) as ended:
        run_command(command)
    print(ended.value.code, file=sys.stderr)
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err and r"error: the class \u001b[1mowl" in printed.err


# Processors


@pytest.mark.parametrize("name", ["size", "crop_size"])
def test_a_processor_that_asks_for_a_million_pixels_a_side_is_refused(tmp_path, name):
    processor = eval_processor(16, MEAN, STD)
    setattr(processor, name, {"height": 10**6, "width": 10**6})
    processor.save_pretrained(tmp_path)
    with refusal(None, "1,000,000", "8,192"):
        load_processor(str(tmp_path))


# Folders


@needs_linux
@pytest.mark.parametrize("folder", ["/proc/runs/1", "/sys/runs/1"])
def test_a_folder_that_the_system_does_not_make_is_one_sentence(folder, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: Path(folder).mkdir(parents=True))
    assert ended.value.code.startswith("error: ") and str(Path(folder).parent) in ended.value.code
    with pytest.raises(FileNotFoundError):  # a bug keeps its traceback
        run_command(lambda: Path("/nowhere/file").read_text())


@pytest.mark.parametrize(
    ("text", "known"), [("[pair.cc:537] Connection closed by peer [::1]:4000", True), ("x", False)]
)
def test_a_process_whose_peer_is_gone_waits_for_its_end_and_gives_no_traceback(monkeypatch, text, known):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(console, "FIRST_PROCESS_TIMEOUT", 0)

    def command():
        raise RuntimeError(text)

    with pytest.raises(SystemExit if known else RuntimeError) as ended:
        run_command(command)
    assert not known or "another process" in str(ended.value.code)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError):
        run_command(command)


def test_figures_show_control_characters_of_class_names_escaped(tmp_path, recwarn):
    names = ["cat\x1b[31m", "dog\x07", "owl\x00"]
    picture = class_distribution([30, 20, 10], tmp_path / "classes.png", names)
    assert picture.stat().st_size > 1000
    assert [str(warning.message) for warning in recwarn if "missing from" in str(warning.message)] == []
    assert "\x1b" not in shorten(names[0], 40) and "cat" in shorten(names[0], 40)
