"""Any number of processes and accumulation steps gives the same run, up to the rounding of float32."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from needs import needs_launcher, needs_unix
from recipe_runs import RECIPES, TINY, RecipeRun, make_pictures, slow_saving, weights_of
from safetensors.torch import load_file

# Mixup and drop path, which follow the micro-batch, are off. 45 test images do not divide by 2.
PLAIN = "--base_lr 1e-2 --log_steps 1 --ema_decay 0.5 --eval_epochs 1".split()
FINETUNE = [*TINY, *PLAIN, *"--pretrained none --mixup 0 --cutmix 0 --drop_path 0 --erase 0.5".split()]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += "--num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0".split()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("processes")
    make_pictures(place / "pictures", train=(34, 20, 10), test=15)
    return place


@pytest.fixture(scope="module")
def start(workplace):
    started = []

    def start(stage: str, name: str, *options, **settings) -> RecipeRun:
        options = [
            "--dataset",
            workplace / "pictures",
            *(FINETUNE if stage == "finetune" else TINY + PLAIN[:6]),
            *options,
        ]
        started.append(RecipeRun(stage, workplace / name, *options, **settings))
        return started[-1]

    yield start
    for run in started:
        for process in run.processes:
            process.kill()


@pytest.fixture(scope="module")
def alone(start) -> Path:
    """The run of one process without accumulation."""
    return start("finetune", "alone").finish().folder


def losses_of(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert [line["update"] for line in trained] == list(range(1, 13))
    return {line["update"]: line["loss"] for line in trained}


def assert_close_runs(one: Path, other: Path) -> None:
    assert losses_of(one) == pytest.approx(losses_of(other), rel=1e-4)
    trained, expected = weights_of(one), weights_of(other)
    for name in expected:
        # The bias of the keys cancels in the softmax: its gradient is a rounding error, which Adam makes a step of.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(trained[name], expected[name], rtol=1e-2, atol=1e-4, msg=name)
    metrics = [json.loads((folder / "results.json").read_text())["metrics"] for folder in (one, other)]
    measured, expected = ({name: value for name, value in m.items() if value is not None} for m in metrics)
    assert measured == pytest.approx(expected, rel=1e-3)


def test_accumulating_two_micro_batches_equals_one_batch(start, alone):
    assert_close_runs(start("finetune", "accumulated", "--accumulation", 2).finish().folder, alone)


@needs_launcher
def test_two_launched_processes_equal_one(workplace, alone):
    folder = workplace / "launched"
    options = ["--dataset", str(workplace / "pictures"), *FINETUNE, "--output_dir", str(folder)]
    launched = subprocess.run(
        [*LAUNCH, str(RECIPES / "finetune.py"), *options],
        env=os.environ | {"ACCELERATE_USE_CPU": "1", "HF_DATASETS_CACHE": str(workplace / "cache")},
        capture_output=True,
        text=True,
    )
    assert launched.returncode == 0, launched.stderr
    assert_close_runs(folder, alone)
    results = json.loads((folder / "results.json").read_text())
    assert results["num_images"] == results["metrics"]["num_images"] == 45
    assert launched.stdout.count("Fine-tuned micro") == 1
    assert launched.stderr.count("update 12 ") == 1
    # The weights of a checkpoint carry no trace of the wrapper that spread them over processes.
    saved = load_file(folder / "checkpoints" / "step-12" / "model.safetensors")
    assert not [name for name in saved if name.startswith("module.")]


def test_two_processes_pretrain_like_one(start):
    one = start("pretrain", "pretrained-alone")
    two = start("pretrain", "pretrained-together", "--accumulation", 2, processes=2)
    assert_close_runs(two.finish().folder, one.finish().folder)


@needs_unix
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(start, alone, first, second):
    name = f"from-{first}-to-{second}"
    run = start("finetune", name, processes=first)
    run.wait_for(lambda: run.logged() >= 4)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75
    assert [process.exitcode for process in run.processes] == [75] * first
    folder = start("finetune", name, "--resume", processes=second).finish().folder
    assert_close_runs(folder, alone)


@needs_unix
def test_a_signal_to_one_process_stops_all(start):
    run = start("finetune", "one-signal", processes=2)
    run.wait_for(lambda: run.logged() >= 1)
    os.kill(run.processes[1].pid, signal.SIGTERM)
    assert run.wait() == 75
    assert run.processes[1].exitcode == 75
    assert run.printed.count("Stopped and saved. To go on:") == 1


def test_what_cannot_be_shared_out_is_refused_and_leaves_no_folder(start):
    odd = start("finetune", "odd", "--batch_size", 15, processes=2)
    assert odd.wait() == 1
    assert "batch_size 15 is no multiple of 2 processes x 1 accumulation steps: use 14 or 16." in odd.printed
    large = start("finetune", "large", "--batch_size", 128, processes=2)
    assert large.wait() == 1
    assert "batch_size is 128, but there are only 64 images: use at most 64." in large.printed
    for run in (odd, large):
        assert "Traceback" not in run.printed
        assert not run.folder.exists()


def forget_the_cpu() -> None:
    del os.environ["ACCELERATE_USE_CPU"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Accelerate joins the processes by itself")
def test_processes_that_do_not_see_each_other_are_refused(start):
    # What Accelerate makes of `--multi_gpu` without a GPU: two runs of one process each.
    run = start("finetune", "strangers", processes=2, sabotage=(forget_the_cpu,))
    assert run.wait() == 1
    assert "2 processes were launched and none sees the others" in run.printed
    assert not run.folder.exists()


@needs_unix
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launched_run_saves_itself_when_the_whole_group_is_signalled(start, workplace, alone, number):
    folder = workplace / f"group-{number.name}"
    options = ["--dataset", str(workplace / "pictures"), *FINETUNE, "--output_dir", str(folder)]
    with subprocess.Popen(
        [*LAUNCH, str(RECIPES / "finetune.py"), *options],
        env=os.environ | {"ACCELERATE_USE_CPU": "1", "HF_DATASETS_CACHE": str(workplace / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as launched:
        while not (folder / "log.jsonl").exists():
            assert launched.poll() is None
        os.killpg(launched.pid, number)
        printed, _ = launched.communicate(timeout=120)
    assert f"recipes/finetune.py --resume {folder}" in printed
    assert not (folder / "results.json").exists()
    assert_close_runs(start("finetune", folder.name, "--resume").finish().folder, alone)


@needs_unix
@pytest.mark.slow
def test_two_processes_killed_while_saving_go_on(start, alone):
    run = start("finetune", "killed-together", "--save_steps", 1, processes=2, sabotage=(slow_saving, 0.2))
    run.wait_for(lambda: run.logged() >= 5)
    run.signal(signal.SIGKILL)
    run.wait()
    folder = start("finetune", "killed-together", "--resume", processes=2).finish().folder
    assert_close_runs(folder, alone)
