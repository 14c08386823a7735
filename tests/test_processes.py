"""Any number of processes, machines and accumulation steps gives the same run, up to the rounding of float32."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from recipe_runs import RECIPES, TINY, RecipeRun, free_port, make_pictures, slow_saving, weights_of
from safetensors.torch import load_file

from livt_hf.cli import console
from livt_hf.runs import Run
from livt_hf.training import loop

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


def test_a_signal_to_one_process_stops_all(start):
    run = start("finetune", "one-signal", processes=2)
    run.wait_for(lambda: run.logged() >= 1)
    os.kill(run.processes[1].pid, signal.SIGTERM)
    assert run.wait() == 75
    assert run.processes[1].exitcode == 75
    assert run.printed.count("Stopped and saved.\nTo resume:") == 1


def test_what_cannot_be_shared_out_is_refused_and_leaves_no_folder(start):
    run = start("finetune", "odd", "--batch_size", 15, processes=2)
    assert run.wait() == 1 and not run.folder.exists()
    assert "batch_size 15" in run.printed and "14 or 16" in run.printed and "Traceback" not in run.printed


def forget_the_cpu() -> None:
    del os.environ["ACCELERATE_USE_CPU"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Accelerate joins the processes by itself")
def test_processes_that_do_not_see_each_other_are_refused(start):
    # What Accelerate makes of `--multi_gpu` without a GPU: two runs of one process each.
    run = start("finetune", "strangers", processes=2, sabotage=(forget_the_cpu,))
    assert run.wait() == 1
    assert "2 processes were launched and none sees the others" in run.printed
    assert not run.folder.exists()


def lose_sight_of_the_run() -> None:
    loop.VISIBILITY_TIMEOUT = console.FIRST_PROCESS_TIMEOUT = 0
    if os.environ["RANK"] == "1":
        Run.started = property(lambda run: False)


def test_a_folder_that_another_machine_does_not_see_is_refused(start):
    run = start("finetune", "unseen", processes=2, sabotage=(lose_sight_of_the_run,))
    assert run.wait() == 1
    assert f"process 1 of 2 does not see {run.folder}, the folder of the run" in run.printed
    assert not run.logged()


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
    assert f"livt finetune --resume {folder}" in printed
    assert not (folder / "results.json").exists()
    assert_close_runs(start("finetune", folder.name, "--resume").finish().folder, alone)


@pytest.mark.slow
def test_two_processes_killed_while_saving_go_on(start, alone):
    run = start("finetune", "killed-together", "--save_steps", 1, processes=2, sabotage=(slow_saving, 0.2))
    run.wait_for(lambda: run.logged() >= 5)
    run.signal(signal.SIGKILL)
    run.wait()
    folder = start("finetune", "killed-together", "--resume", processes=2).finish().folder
    assert_close_runs(folder, alone)


# Several machines, each of one process, that meet on the loopback interface of this one.


class Cluster:
    """Commands as on other machines: with what they need in the environment, each in a session of its own."""

    def __init__(self, place: Path):
        self.place, self.started = place, []
        self.environment = os.environ | {
            "PATH": os.pathsep.join([str(place / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "ACCELERATE_USE_CPU": "1",
            "HF_DATASETS_CACHE": str(place / "cache"),
            "PORT": str(free_port()),
        }

    def start(self, *words, **environment: str) -> subprocess.Popen:
        self.started.append(
            subprocess.Popen(
                [str(word) for word in words],
                env=self.environment | environment,
                cwd=self.place,
                stdout=(self.place / f"{len(self.started)}.txt").open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        return self.started[-1]

    def printed(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.place.glob("*.txt")))


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    for process in cluster.started:
        process.kill()


def words_of(stage: str, workplace: Path) -> list[str]:
    """A stage with the options that `start` gives it."""
    options = FINETUNE if stage == "finetune" else TINY + PLAIN[:6]
    return [stage, "--dataset", str(workplace / "pictures"), *options]


@pytest.fixture(scope="module")
def on_one_process(start, alone):
    """The run of a stage on one process."""
    pretrained = start("pretrain", "pretrained-on-one").finish().folder
    return {"pretrain": pretrained, "finetune": alone}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
@pytest.mark.parametrize("launcher", ["accelerate.sh", "torchrun.sh"])
def test_two_machines_equal_one_process(workplace, cluster, on_one_process, launcher, stage):
    words = [RECIPES / "launch" / launcher, *words_of(stage, workplace), "--output_dir", "run"]
    machines = [cluster.start(*words, NODES="2", NODE=node, HOST="127.0.0.1", PROCESSES="1") for node in "01"]
    assert [machine.wait(300) for machine in machines] == [0, 0], cluster.printed()
    assert_close_runs(cluster.place / "run", on_one_process[stage])


# What SLURM does with `srun LINE` on two nodes: the line on both, each with its number. The largest exit code counts.
SRUN = """#!/usr/bin/env bash
[[ $1 == --wait=* ]] && shift
for node in 0 1; do
    SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 setsid "$@" &
    echo $! >> srun.pids
done
largest=0
for task in $(jobs -p); do
    wait "$task"
    status=$?
    [ "$status" -gt "$largest" ] && largest=$status
done
exit "$largest"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") echo 127.0.0.1; echo second-node ;;
    *) echo "$@" >> scontrol.calls ;;
esac
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_preempted_slurm_job_is_queued_again_and_ends_like_one_process(workplace, cluster, on_one_process, stage):
    (cluster.place / "bin").mkdir()
    for name, script in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (cluster.place / "bin" / name).write_text(script)
        (cluster.place / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_NTASKS": "2", "LIVT_RUNS": "all runs"}
    words = ["bash", RECIPES / "launch" / "slurm.sbatch", *words_of(stage, workplace)]
    folder = cluster.place / "all runs" / f"slurm-{job['SLURM_JOB_ID']}"

    first = cluster.start(*words, **job)
    while not (folder / "log.jsonl").exists():
        assert first.poll() is None, cluster.printed()
        time.sleep(0.01)
    first.terminate()  # SLURM asks the processes of the step, and at some sites the shell too
    for process in (cluster.place / "srun.pids").read_text().split():
        os.kill(int(process), signal.SIGTERM)
    assert first.wait(300) == 75, cluster.printed()
    assert (cluster.place / "scontrol.calls").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    assert not (folder / "results.json").exists() and list(folder.glob("checkpoints/step-*"))

    assert cluster.start(*words, **job).wait(300) == 0, cluster.printed()
    assert "resuming " in cluster.printed()
    assert_close_runs(folder, on_one_process[stage])
