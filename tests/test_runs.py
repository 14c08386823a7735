"""Run folders: who gets which, what may change between two starts, which code they say they come from."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from refusals import refusal

import livt_hf.results
from livt_hf.cli.console import run_command
from livt_hf.cli.resume import check_same_settings
from livt_hf.cli.training_settings import PretrainSettings
from livt_hf.results import Results, provenance
from livt_hf.runs import ARGUMENTS, Run, finished_runs, new_run
from livt_hf.text import format_duration
from livt_hf.threads import available_cores


@pytest.fixture
def started(tmp_path) -> Run:
    """A run that has been started and not finished."""
    arguments = PretrainSettings.build(output_dir=str(tmp_path / "run"), source="here", lists="there")
    run = new_run(arguments.run_name, arguments.output_dir)
    run.begin(arguments.to_dict())
    return run


def forget(run: Run, option: str) -> None:
    """As if the run had been started before there was such an option."""
    saved = run.arguments
    del saved[option]
    (run.folder / ARGUMENTS).write_text(yaml.safe_dump(saved))


def test_two_jobs_that_count_the_runs_at_the_same_moment_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(()))  # neither sees the other's
    assert [new_run("pretrain-glyphs-base").folder.name for _ in range(3)] == ["1", "2", "3"]


def test_of_two_jobs_given_the_same_folder_only_one_begins(tmp_path):
    (tmp_path / "run").mkdir()  # it may be there and empty
    runs = new_run("", tmp_path / "run"), new_run("", tmp_path / "run")
    runs[0].begin({"seed": 1})
    with refusal("output_dir", tmp_path / "run"):
        runs[1].begin({"seed": 2})
    assert yaml.safe_load((tmp_path / "run" / ARGUMENTS).read_text())["seed"] == runs[0].arguments["seed"] == 1


def test_a_run_that_finds_no_room_to_begin_leaves_its_folder_as_it_was(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)
        with pytest.raises(OSError, match="No space left"):
            Run(tmp_path).begin(PretrainSettings().to_dict())
    assert list(tmp_path.iterdir()) == []
    Run(tmp_path).begin(PretrainSettings().to_dict())
    assert Run(tmp_path).arguments["dataset"] == "glyphs"


def test_finished_runs_are_those_of_a_stage_and_of_whole_trainings_the_newest_first(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))
    names = "finetune-birds-base/1", "train-birds/1/finetune", "pretrain-birds-base/1", "finetune-fish-base/2"
    for age, name in enumerate(names):
        (tmp_path / name).mkdir(parents=True)
        Run(tmp_path / name).write_results(Results(stage="finetune", dataset="birds"))
        os.utime(tmp_path / name / "results.json", (100 - age, 100 - age))
    found = [run.folder.relative_to(tmp_path).as_posix() for run in finished_runs("finetune")]
    assert found == [names[0], names[1], names[3]]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "could not write runs/1/log.jsonl: .*; make room"),
        (errno.EROFS, "could not write runs/1/log.jsonl: .*; make room"),
        (errno.ENOTDIR, "there can be no file or folder runs/1/log.jsonl: .*; choose another path"),
        (errno.EACCES, "may not read or write runs/1/log.jsonl: .*; change its permissions"),
    ],
)
def test_what_the_machine_refuses_is_one_sentence_and_a_bug_keeps_its_traceback(number, said):
    def refused(number):
        raise OSError(number, os.strerror(number), "runs/1/log.jsonl")

    with pytest.raises(SystemExit, match=f"^error: {said}"):
        run_command(lambda: refused(number))
    with pytest.raises(FileNotFoundError):
        run_command(lambda: refused(errno.ENOENT))


def test_an_option_that_came_after_the_run_had_its_default_there(started):
    forget(started, "flip")
    check_same_settings(started, PretrainSettings())
    check_same_settings(started, PretrainSettings.build(source="elsewhere", lists=None))  # the data has moved
    with refusal("output_dir", "flip was True and is now False"):
        check_same_settings(started, PretrainSettings.build(flip=False))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_revision_is_that_of_the_repository_the_package_is_the_root_of(monkeypatch, tmp_path):
    def git(*words: str) -> str:
        identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    places = {"checkout": tmp_path / "livt_hf", "installed": tmp_path / "venv" / "site-packages" / "livt_hf"}
    for place in places.values():
        place.mkdir(parents=True)
    monkeypatch.setattr(livt_hf.results, "__file__", str(places["checkout"] / "results.py"))
    assert provenance()["git_revision"] is None  # nothing committed yet
    git("commit", "--allow-empty", "--message", "first")
    assert provenance()["git_revision"] == git("rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without git
    assert provenance()["git_revision"] is None
    monkeypatch.undo()
    monkeypatch.setattr(livt_hf.results, "__file__", str(places["installed"] / "results.py"))
    assert provenance()["git_revision"] is None


def test_cores_are_those_of_the_process_where_the_system_tells_and_of_the_machine_elsewhere(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3}, raising=False)
    assert available_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert available_cores() == 6


def test_a_short_time_is_told_in_seconds():
    assert format_duration(0.3) == format_duration(1.4) == "1 second"
    assert format_duration(7.4) == "7 seconds"
    assert format_duration(200) == "3.3 minutes" and format_duration(9000) == "2.5 hours"
