"""A run can be killed at any step and goes on as if nothing had happened."""

import contextlib
import json
import multiprocessing
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from needs import needs_linux
from recipe_runs import (
    TINY,
    RecipeRun,
    assert_same_weights,
    impatient,
    kill_at,
    make_pictures,
    no_room,
    slow_saving,
)

# Twelve updates; checkpoints and lines of the log fall on different ones. Everything that keeps a state is on.
OPTIONS = {
    "pretrain": "--accumulation 2 --ema_decay 0.5 --base_lr 1e-2 --log_steps 3 --save_steps 2",
    "finetune": "--accumulation 2 --ema_decay 0.5 --base_lr 1e-2 --log_steps 3 --save_steps 2 --pretrained none "
    "--drop_path 0.5 --keep_ratio 0.5 --mixup 0.8 --cutmix 1 --erase 0.5 --clip_grad 1 --eval_epochs 1",
}
STAGES = list(OPTIONS)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("resume")
    make_pictures(place / "pictures")
    return place


@pytest.fixture(scope="module")
def start(workplace):
    """Start a stage in a folder of its own; whatever a failing test leaves running is killed."""
    started = []

    def start(stage: str, name: str, *more, **settings) -> RecipeRun:
        options = ["--dataset", workplace / "pictures", *TINY, *OPTIONS[stage].split(), *more]
        started.append(RecipeRun(stage, workplace / f"{stage}-{name}", *options, **settings))
        return started[-1]

    yield start
    for run in started:
        for process in run.processes:
            process.kill()


@pytest.fixture(scope="module")
def uninterrupted(start) -> dict[str, Path]:
    runs = {stage: start(stage, "uninterrupted") for stage in STAGES}
    return {stage: run.finish().folder for stage, run in runs.items()}


def log_of(folder: Path) -> list[dict]:
    """The log without its speeds."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "images_per_second"} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    assert_same_weights(one, other)
    assert log_of(one) == log_of(other)
    results = [json.loads((folder / "results.json").read_text()) for folder in (one, other)]
    assert results[0]["metrics"] == results[1]["metrics"]


def test_the_log_has_every_line_once(uninterrupted):
    assert [line["update"] for line in log_of(uninterrupted["pretrain"])] == [3, 6, 9, 12]
    finetuned = [(line["update"], "eval" in line) for line in log_of(uninterrupted["finetune"])]
    # Evaluations follow the epochs of four updates each.
    assert finetuned == [(3, False), (4, True), (6, False), (8, True), (9, False), (12, False), (12, True)]


def killed_at_random_moments(start, stage: str, name: str, seed: int, kills: int, **settings) -> Path:
    """The first time while it trains, then at any time since its start."""
    rng = random.Random(seed)
    run = start(stage, name, **settings)
    run.wait_for(lambda: run.logged() >= 1)
    time.sleep(rng.uniform(0, 0.15))
    run.signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    for _ in range(kills - 1):
        run = start(stage, name, "--resume", **settings)
        time.sleep(rng.uniform(0.2, 1.0))
        with contextlib.suppress(ProcessLookupError):  # too late
            run.signal(signal.SIGKILL)
        run.wait()
        if (run.folder / "results.json").exists():
            return run.folder
    return start(stage, name, "--resume").finish().folder


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(start, uninterrupted, stage):
    folder = killed_at_random_moments(start, stage, "killed", seed=0, kills=2)
    assert_same_run(folder, uninterrupted[stage])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_killed_often_ends_like_one_that_was_not(start, uninterrupted, stage, seed):
    # Saving takes most of the time, so most kills fall into it.
    sabotage = (slow_saving, 0.1) if seed % 2 else (None,)
    folder = killed_at_random_moments(start, stage, f"killed-{seed}", seed, kills=5, sabotage=sabotage)
    assert_same_run(folder, uninterrupted[stage])


KILLED_IN_A_SAVE = {
    "before a file is flushed": ("pretrain", ("fsync", ".writing-step-4", 2), ".writing-step-4"),
    "between writing and renaming": ("finetune", ("replace", "/checkpoints", 2), ".writing-step-4"),
    "while an old checkpoint is deleted": ("pretrain", ("rmdir", "/checkpoints", 1), ".removing-step-2"),
    "before the results are written": ("finetune", ("replace", "results.json", 1), "step-12"),
}


@needs_linux
@pytest.mark.parametrize("step", KILLED_IN_A_SAVE)
def test_a_run_killed_while_saving_ends_like_one_that_was_not(start, uninterrupted, step):
    stage, where, left = KILLED_IN_A_SAVE[step]
    name = step.replace(" ", "-")
    killed = start(stage, name, sabotage=(kill_at, *where))
    assert killed.wait() == -signal.SIGKILL
    assert (killed.folder / "checkpoints" / left).exists()
    assert not (killed.folder / "results.json").exists()
    folder = start(stage, name, "--resume").finish().folder
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-10", "step-12"]
    assert_same_run(folder, uninterrupted[stage])


def test_a_run_that_finds_no_room_for_its_log_says_so_and_goes_on_when_there_is(start, uninterrupted):
    stopped = start("pretrain", "no-room", sabotage=(no_room, "log.jsonl"))
    assert stopped.wait() == 1
    assert f"error: could not write {stopped.folder / 'log.jsonl'}: No space left on device" in stopped.printed
    assert "Traceback" not in stopped.printed
    assert_same_run(start("pretrain", "no-room", "--resume").finish().folder, uninterrupted["pretrain"])


def mounted(place: Path, size: str) -> bool:
    """A disk in memory of a size; whether this user may have one."""
    place.mkdir(exist_ok=True)
    return subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [0.004, *range(1, 65, 4)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_on_a_disk_that_fills_up_goes_on_when_there_is_room(workplace, start, uninterrupted, stage, megabytes):
    """Three checkpoints at a time and the final model take some 60 MB, so that every kind of file meets the end."""
    disk = workplace / f"{stage}-{megabytes}-megabytes"
    if shutil.which("mount") is None or not mounted(disk, f"{int(megabytes * 1024)}k"):
        pytest.skip("this user may not mount a disk")
    try:
        output = {"output": disk.with_suffix(".txt")}
        stopped = start(stage, f"{megabytes}-megabytes/run", **output)
        if stopped.wait() != 0:
            assert re.search(r"^error: could not (write|save)", stopped.printed, re.MULTILINE), stopped.printed
            assert "Traceback" not in stopped.printed
            subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
            again = ["--resume"] if (stopped.folder / "arguments.yaml").exists() else []
            start(stage, f"{megabytes}-megabytes/run", *again, **output).finish()
        assert_same_run(stopped.folder, uninterrupted[stage])
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_run_that_is_under_way_is_not_resumed_by_a_second_process(start, uninterrupted):
    """Also not where the first is slow to stop: the second waits for it, and goes on after it was killed."""
    first = start("pretrain", "contended", sabotage=(slow_saving, 0.3))
    first.wait_for(lambda: first.logged() >= 1)
    second = start("pretrain", "contended", "--resume", sabotage=(impatient,), output=first.folder.with_suffix(".2"))
    assert second.wait() == 1
    assert f"error: another process is at work in {first.folder}" in second.printed
    third = start("pretrain", "contended", "--resume", output=first.folder.with_suffix(".3"))
    first.signal(signal.SIGKILL)
    assert_same_run(third.finish().folder, uninterrupted["pretrain"])


@pytest.mark.parametrize(
    ("stage", "number", "more"),
    [
        ("pretrain", signal.SIGTERM, []),
        ("finetune", signal.SIGINT, ["--num_workers", "1"]),
        pytest.param("finetune", signal.SIGINT, ["--num_workers", "1"], id="spawn", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_the_run_and_prints_the_command_that_goes_on(
    start, uninterrupted, stage, number, more, request
):
    sabotage = {}
    if request.node.callspec.id == "spawn":  # of which the workers inherit nothing, as on macOS
        sabotage = {"sabotage": (multiprocessing.set_start_method, "spawn", True)}
    run = start(stage, request.node.callspec.id, *more, "--save_steps", "1000", **sabotage)
    run.wait_for(lambda: run.logged() >= 1)
    run.signal(number)
    run.signal(number)  # launchers pass a signal on to processes that had it already
    assert run.wait() == 75
    assert len(list((run.folder / "checkpoints").glob("step-*"))) == 1
    command = re.search(rf"To resume:\n  livt {stage} (.*)", run.printed)[1]
    assert shlex.split(command) == ["--resume", str(run.folder)]
    # The command alone: all other settings are those of the run.
    RecipeRun(stage, run.folder, "--resume").finish()
    assert_same_run(run.folder, uninterrupted[stage])


def test_a_run_killed_before_its_first_checkpoint_starts_again(start, uninterrupted):
    killed = start("pretrain", "early", sabotage=(kill_at, "replace", "/checkpoints", 1))
    assert killed.wait() == -signal.SIGKILL
    assert_same_run(start("pretrain", "early", "--resume").finish().folder, uninterrupted["pretrain"])
