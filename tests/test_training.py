"""The loop: rates, averages, what it writes, when it stops."""

import contextlib
import datetime
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import accelerate.tracking
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType, LoggerType
from recipe_runs import Trap
from refusals import refusal
from safetensors.torch import load_file
from torch import nn

from livt_hf.cli.resume import check_resumable, start_run
from livt_hf.cli.training_settings import PretrainSettings
from livt_hf.errors import Interrupted
from livt_hf.precision import has_fast_cpu_bf16
from livt_hf.runs import Run
from livt_hf.threads import available_cores
from livt_hf.training.checkpoints import CheckpointError, list_checkpoints
from livt_hf.training.device import StopOnSignal, check_distribution, choose_precision
from livt_hf.training.loop import TrainingLoop, TrainingTask, make_accelerator, open_run
from livt_hf.training.optim import warmup_cosine

PER_EPOCH = 4


class Line(nn.Module):
    """A linear model that knows what the optimizer asks of a model."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        nn.init.ones_(self.linear.weight)

    def forward(self, x):
        return self.linear(x)

    def no_weight_decay(self):
        return {"linear.bias"}


class NormalisedLine(Line):
    """The same after a BatchNorm, whose statistics are those of the inputs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.linear(self.norm(x))

    def no_weight_decay(self):
        return {"linear.bias", "norm.weight", "norm.bias"}


class Batches:
    """Four updates an epoch; batch n of a run is full of n + 1."""

    updates_per_epoch = PER_EPOCH

    def __init__(self, accumulation: int = 1):
        self.accumulation = accumulation

    def epoch(self, epoch: int, start_update: int = 0):
        for update in range(start_update, PER_EPOCH):
            rows = torch.arange(24.0).view(8, 3).sin() * (epoch * PER_EPOCH + update + 1)
            for part in rows.split(8 // self.accumulation):
                yield {"pixel_values": part}


def squared_error(model, batch, step):
    return (model(batch["pixel_values"]) - 1).square().mean()


def settings(folder: Path, **options) -> PretrainSettings:
    """Three epochs with one of warm-up; the rate is base_lr itself."""
    defaults = dict(epochs=3, warmup_epochs=1, batch_size=256, base_lr=0.1, min_lr=0.01, log_steps=1, threads=1)
    return PretrainSettings.build(output_dir=str(folder), **(defaults | options))


def make_loop(
    arguments: PretrainSettings, compute_loss=squared_error, resumed: Run | None = None, module=Line
) -> TrainingLoop:
    accelerator = make_accelerator(arguments.optimization, arguments.checkpoints.trackers)
    torch.manual_seed(0)
    run = open_run(accelerator, lambda: resumed or start_run(arguments), arguments.to_dict())
    task = TrainingTask(module(), Batches(arguments.optimization.accumulation))
    task.compute_loss = compute_loss
    return TrainingLoop(task, arguments.optimization, arguments.checkpoints, accelerator, run)


def resumed(arguments: PretrainSettings, compute_loss=squared_error, module=Line, **options) -> TrainingLoop:
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments, run = PretrainSettings.build(**(arguments.to_dict() | options)), Run(Path(arguments.output_dir))
    check_resumable(run, arguments)
    loop = make_loop(arguments, compute_loss, run, module)
    loop.resume()
    return loop


def test_a_run_does_not_go_on_with_other_images_than_it_began_with(tmp_path):
    loop = make_loop(settings(tmp_path / "run", save_steps=1, max_steps=1))
    loop.resume("these")
    loop.fit()
    with refusal("output_dir", "other images"):
        loop.resume("others")
    loop.resume("these")
    assert loop.progress.update == 1


def log_of(loop: TrainingLoop) -> list[dict]:
    return [json.loads(line) for line in (loop.run.folder / "log.jsonl").read_text().splitlines()]


def test_every_update_has_the_rate_of_the_schedule(tmp_path):
    loop = make_loop(settings(tmp_path / "run"))
    used = []
    loop.optimizer.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    loop.fit()
    warm_up = [0.1 * step / 4 for step in range(4)]
    cosine = [0.01 + 0.09 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert used == pytest.approx(warm_up + cosine)
    assert [line["lr"] for line in log_of(loop)] == pytest.approx(warm_up + cosine)


def test_the_average_follows_every_step_and_is_the_final_model(tmp_path):
    loop = make_loop(settings(tmp_path / "run", ema_decay=0.75))
    weights, weight = [], loop.bare_model.linear.weight
    loop.optimizer.optimizer.register_step_post_hook(lambda *_: weights.append(weight.detach().clone()))
    loop.fit()
    expected = weights[0]
    for weight in weights[1:]:
        expected = 0.75 * expected + 0.25 * weight
    assert len(weights) == 12
    torch.testing.assert_close(loop.final_model.linear.weight, expected)
    assert not torch.equal(loop.final_model.linear.weight, loop.bare_model.linear.weight)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_batch_statistics_of_the_average_are_those_of_the_epoch_s_training_batches(tmp_path, accumulation):
    loop = make_loop(settings(tmp_path / "run", ema_decay=0.5, accumulation=accumulation), module=NormalisedLine)
    seen = []
    loop.fit(lambda loop, epoch: seen.append(loop.final_model.norm.running_mean.clone()))
    rows = torch.arange(24.0).view(8, 3).sin()
    for epoch, found in enumerate(seen):  # batches are multiples of these rows: 1 to 4, 5 to 8, 9 to 12
        torch.testing.assert_close(found, (4 * epoch + 2.5) * rows.mean(0))
    norm = loop.final_model.norm
    parts = torch.stack([n * part for n in range(9, 13) for part in rows.split(8 // accumulation)])
    torch.testing.assert_close(norm.running_var, parts.var(1).mean(0))
    assert norm.momentum == 0.1 and not norm.training and loop.bare_model.norm.running_mean[0] != norm.running_mean[0]
    saved = load_file(loop.run.folder / "checkpoints" / "step-12" / "ema.safetensors")
    assert any(torch.equal(value, norm.running_mean) for value in saved.values())
    loop = make_loop(settings(tmp_path / "kept", ema_decay=0.5), module=NormalisedLine)
    loop.task.begin_epoch = lambda module, *_: module.norm.eval()  # as with LoRA: training leaves them alone
    loop.fit()
    assert not loop.final_model.norm.running_mean.any() and (loop.final_model.norm.running_var == 1).all()


@pytest.mark.parametrize(("decay", "warned"), [(0.9, True), (0.8, False)])
def test_an_average_that_still_consists_of_the_first_weights_is_warned_of(tmp_path, caplog, decay, warned):
    make_loop(settings(tmp_path / "run", ema_decay=decay))  # 12 updates: 0.9^12 is 28 %, 0.8^12 is 7 %
    assert ("28 % of the moving average" in caplog.text) == warned
    assert ("use at most 0.8254" in caplog.text) == warned  # 0.1^(1/12)


def test_two_micro_batches_of_four_make_the_step_of_eight(tmp_path):
    losses = []
    for accumulation in (1, 2, 4):
        drawn = []

        def drawing(model, batch, step, drawn=drawn):
            drawn.append(torch.rand(()).item())  # as drop path does
            return squared_error(model, batch, step)

        loop = make_loop(settings(tmp_path / str(accumulation), accumulation=accumulation, clip_grad=0.1), drawing)
        loop.fit()
        losses.append([line["loss"] for line in log_of(loop)])
        assert len(set(drawn)) == len(drawn) == accumulation * 3 * PER_EPOCH  # each has numbers of its own
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_a_log_line_holds_the_mean_loss_since_the_one_before(tmp_path):
    every = make_loop(settings(tmp_path / "every"))
    every.fit()
    fifth = make_loop(settings(tmp_path / "fifth", log_steps=5))
    fifth.fit()
    losses = [line["loss"] for line in log_of(every)]
    means = [sum(part) / len(part) for part in (losses[:5], losses[5:10], losses[10:])]
    assert [line["update"] for line in log_of(fifth)] == [5, 10, 12]
    assert [line["loss"] for line in log_of(fifth)] == pytest.approx(means)


def test_max_steps_shortens_the_schedule_and_evaluations_follow_whole_epochs_and_the_end(tmp_path):
    loop = make_loop(settings(tmp_path / "run", max_steps=6))
    modes = []
    loop.optimizer.optimizer.register_step_pre_hook(lambda *_: modes.append(loop.model.training))
    loop.fit(lambda _loop, epoch: loop.bare_model.eval() and {"accuracy": epoch / 10})
    measured = [(line["update"], line["epoch"], line["eval"]["accuracy"]) for line in log_of(loop) if "eval" in line]
    assert measured == [(4, 1, 0.0), (6, 2, 0.1)] and modes == [True] * 6  # it trains on after an evaluation
    assert loop.progress.update == 6
    rates = [line["lr"] for line in log_of(loop) if "lr" in line]
    assert rates[:3] == pytest.approx([0, 0.1 / 3, 0.2 / 3])  # half of what is left to warm up
    assert rates[3] == pytest.approx(0.1) and rates[5] < 0.04


@pytest.mark.parametrize("total", [3, 5, 20])  # instead of twelve updates
def test_a_schedule_that_is_fitted_on_the_way_is_saved_at_once_and_resumed(tmp_path, total):
    def after_three(loop):
        return total if loop.progress.update == 3 else None

    whole, evaluated = make_loop(settings(tmp_path / "whole")), []
    whole.fit(lambda loop, _: evaluated.append(loop.progress.update), after_three)
    assert evaluated == [*range(4, total, 4), total]
    rates = [line["lr"] for line in log_of(whole)]
    planned, fitted = ([warmup_cosine(update, 4, end, 0.1, 0.01) for update in range(end)] for end in (12, total))
    assert rates == pytest.approx(planned[:3] + fitted[3:])

    def dying(model, batch, step):
        if step.update == 3:
            raise KeyboardInterrupt
        return squared_error(model, batch, step)

    loop = make_loop(settings(tmp_path / "run"), dying)
    with contextlib.nullcontext() if total == 3 else pytest.raises(KeyboardInterrupt):
        loop.fit(refit=after_three)
    assert [path.name for path in list_checkpoints(loop.run)] == ["step-3"]
    loop = resumed(settings(tmp_path / "run"))
    loop.fit(refit=lambda _: None)
    assert torch.equal(loop.bare_model.linear.weight, whole.bare_model.linear.weight)
    assert [line["lr"] for line in log_of(loop)] == rates


class Failing(Exception):
    """Stands for a kill: nothing is saved, nothing tidied up."""


@pytest.mark.parametrize("module", [Line, NormalisedLine])
@pytest.mark.parametrize("last", range(12))
def test_a_run_that_dies_in_any_update_goes_on_from_the_last_checkpoint(tmp_path, last, module):
    """Weights, their average and its batch statistics end as if nothing had happened."""
    whole = make_loop(settings(tmp_path / "whole", ema_decay=0.5, log_steps=5, save_steps=3), module=module)
    whole.fit()
    arguments, updates = settings(tmp_path / "broken", ema_decay=0.5, log_steps=5, save_steps=3), []

    def dying(model, batch, step):
        updates.extend([step] if torch.is_grad_enabled() else [])
        if len(updates) > last:
            raise Failing
        return squared_error(model, batch, step)

    with pytest.raises(Failing):
        make_loop(arguments, dying, module=module).fit()
    loop = resumed(arguments, module=module)
    assert loop.progress.update == last // 3 * 3
    loop.fit()
    for ended, expected in ((loop.final_model, whole.final_model), (loop.bare_model, whole.bare_model)):
        for name, value in expected.state_dict().items():
            assert torch.equal(ended.state_dict()[name], value), name
    ended, expected = ([(line["update"], line["loss"]) for line in log_of(one)] for one in (loop, whole))
    assert ended == expected


PICKLED = ["optimizer.bin", "scaler.pt"]


@pytest.mark.parametrize("name", PICKLED)
def test_resuming_runs_no_code_from_the_run_folder(tmp_path, name):
    arguments = settings(tmp_path / "run", ema_decay=0.5, max_steps=2)
    make_loop(arguments).fit()
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    others = {"model.safetensors", "ema.safetensors", "state.json"}
    assert others <= {path.name for path in folder.iterdir()} <= others | set(PICKLED)

    torch.save(Trap(tmp_path / "sprung"), folder / name)
    torch.load(folder / name, weights_only=False).close()
    (tmp_path / "sprung").unlink()  # the trap works
    state = json.loads((folder / "state.json").read_text())
    state["files"][name] = (folder / name).stat().st_size
    state["checksums"].pop(name, None)  # as a forger would
    (folder / "state.json").write_text(json.dumps(state))

    loop = make_loop(arguments, resumed=Run(tmp_path / "run"))
    if name == "scaler.pt":
        loop.accelerator.scaler = torch.amp.GradScaler("cpu")  # of mixed precision
    with pytest.raises(CheckpointError, match="could not read .*step-2"):
        loop.resume()
    assert not (tmp_path / "sprung").exists()


def test_a_loss_or_weights_that_become_nan_or_infinite_stop_the_run_and_keep_the_last_good_checkpoint(tmp_path):
    calls = []

    def nan_from_the_eighth(model, batch, step):
        calls.append(step.epoch)
        return squared_error(model, batch, step) * (math.nan if len(calls) >= 8 else 1)

    loop = make_loop(settings(tmp_path / "run", save_steps=3, log_steps=10), nan_from_the_eighth)
    with refusal("base_lr", "nan at update 8", tmp_path / "run" / "checkpoints" / "step-6"):
        loop.fit()
    assert [path.name for path in list_checkpoints(loop.run)] == ["step-3", "step-6"]

    loop = make_loop(settings(tmp_path / "infinite", save_steps=2))

    def overflow(*_):
        if loop.progress.update == 3:  # the fourth update: its loss was still finite
            loop.bare_model.linear.weight.data.fill_(math.inf)

    loop.optimizer.optimizer.register_step_post_hook(overflow)
    with refusal("base_lr", "at update 4", "step-2"):
        loop.fit()
    assert [path.name for path in list_checkpoints(loop.run)] == ["step-2"]


def test_a_limit_of_hours_counts_from_each_start(tmp_path):
    arguments = settings(tmp_path / "run", max_hours=0.0)
    with pytest.raises(Interrupted):
        make_loop(arguments).fit()
    loop = resumed(arguments, max_hours=1.0)
    assert loop.progress.update == 1
    loop.progress.seconds = 7200.0  # what earlier starts took
    loop.fit()
    assert loop.progress.update == 12
    assert loop.progress.seconds > 7200


def test_a_second_signal_acts_at_once_but_a_repeated_one_does_not():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    with pytest.raises(KeyboardInterrupt), StopOnSignal() as stopping:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stopping.requested
        stopping.patience = 0.0
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_launchers_that_split_the_model_are_refused_and_leave_no_folder(tmp_path, monkeypatch, kind):
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "distributed_type", DistributedType[kind])
        with refusal(None, kind):
            make_loop(settings(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with refusal(None, kind):  # of which Accelerate makes DDP
        check_distribution(DistributedType.MULTI_CPU)


class Notebook(GeneralTracker):
    """A tracker that remembers what it is told."""

    name, requires_logging_directory, tracker = "tensorboard", True, None
    opened: list["Notebook"] = []

    def __init__(self, run_name: str, logging_dir: str):
        super().__init__()
        self.folder, self.lines = Path(logging_dir), []
        Notebook.opened.append(self)

    def store_init_configuration(self, values: dict):
        self.configuration = values

    def log(self, values: dict, step: int | None = None):
        self.lines.append((step, values))


def test_trackers_are_told_what_the_log_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Notebook)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.TENSORBOARD])
    loop = make_loop(settings(tmp_path / "run", trackers=" tensorboard", log_steps=6, exclude=["a", "b"]))
    loop.fit(lambda _loop, epoch: {"accuracy": 0.5, "few": None} if epoch == 2 else None)
    notebook = Notebook.opened.pop()
    assert notebook.folder == tmp_path / "run"
    assert notebook.configuration["base_lr"] == 0.1
    assert notebook.configuration["exclude"] == "a, b"  # tensorboard takes no list, and no None
    assert None not in notebook.configuration.values()
    assert [step for step, _ in notebook.lines] == [6, 12, 12]
    assert notebook.lines[1][1]["loss"] == log_of(loop)[1]["loss"]
    assert notebook.lines[2][1] == {"eval/accuracy": 0.5}


def test_tensorboard_writes_into_the_run_folder_and_a_tracker_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("livt_hf.training.loop.get_available_trackers", lambda: [])
        with refusal("trackers", "wandb"):
            make_accelerator(settings(tmp_path / "run").optimization, trackers="wandb")
    pytest.importorskip("tensorboard")
    loop = make_loop(settings(tmp_path / "run", trackers="tensorboard"))
    loop.fit()
    loop.accelerator.end_training()
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_cpu_never_gets_half_precision_by_itself_nor_fp16_at_all(monkeypatch):
    assert choose_precision("auto") == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # what the launcher says where nothing was asked of it
    assert choose_precision("auto") == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    for requested in ("auto", "fp16"):
        with refusal(None, "fp16"):
            choose_precision(requested)


@pytest.mark.parametrize(("major", "precision"), [(7, "fp16"), (8, "bf16")])  # a T4 or V100, and an A100
def test_a_gpu_that_only_emulates_bf16_gets_fp16(monkeypatch, major, precision):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    supported = lambda including_emulation=True: including_emulation or major >= 8  # noqa: E731
    monkeypatch.setattr("torch.cuda.is_bf16_supported", supported)
    assert choose_precision("auto") == precision


def test_processes_wait_a_day_for_the_first_one(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("livt_hf.training.loop.Accelerator", lambda **said: made.append(said) or Accelerator(cpu=True))
    make_accelerator(settings(tmp_path / "run").optimization)
    assert made[0]["kwargs_handlers"][0].timeout == datetime.timedelta(days=1)


@pytest.mark.slow
def test_the_trial_of_bf16_agrees_with_the_cpu():
    code = "import torch; a = torch.ones(512, 512, dtype=torch.bfloat16); a @ a"
    dies = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode != 0
    assert not (dies and has_fast_cpu_bf16())


def test_a_process_pinned_to_one_thread_takes_all_cores(tmp_path):
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    make_accelerator(settings(tmp_path / "run", threads=None).optimization)
    assert torch.get_num_threads() == available_cores()
    make_accelerator(settings(tmp_path / "run", threads=1).optimization)
    assert torch.get_num_threads() == 1
