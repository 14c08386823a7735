"""The training loop of both stages, under Accelerate. It resumes bit for bit, on any number of processes."""

import contextlib
import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm.auto import tqdm
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.errors import Interrupted, LiVTError
from livt_hf.randomness import keyed_seed
from livt_hf.results import Results
from livt_hf.runs import Run, check_same_images
from livt_hf.text import format_duration
from livt_hf.threads import configure_threads
from livt_hf.training.batch_statistics import batch_norms, estimate_statistics
from livt_hf.training.checkpoints import (
    SCALER,
    Progress,
    explain_save_errors,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    save_final,
)
from livt_hf.training.device import (
    LONG_TIMEOUT,
    StopOnSignal,
    check_distribution,
    check_processes,
    choose_precision,
    compute_on_main_process,
)
from livt_hf.training.optim import make_optimizer, scale_lr, set_lr, warmup_cosine
from livt_hf.training.spec import CheckpointSpec, OptimizationSpec

logger = logging.getLogger(__name__)

VISIBILITY_TIMEOUT = 90  # seconds; a network drive may remember for a minute that there was no such folder
LOG_INTERVAL = 10  # seconds between lines where there is no progress bar; log.jsonl has every line
SMOOTHING = 0.3  # weight of the newest images per second in the time left, as in tqdm
STATISTICS_IMAGES = 4096  # training images that the batch statistics of a moving average are estimated from
EMA_REMAINDER = 0.1  # share of the first weights in a moving average that is worth a warning


def make_accelerator(spec: OptimizationSpec, trackers: str | None = None) -> Accelerator:
    """Set up processes, precision and threads."""
    names = [name.strip() for name in trackers.split(",")] if trackers else []
    available = [str(tracker) for tracker in get_available_trackers()]
    if missing := set(names).difference(available):  # Accelerate silently leaves them out
        message = f"the tracker {min(missing)!r} is not installed; install it or leave it out"
        raise LiVTError(f"{message} (log.jsonl is always written).", argument="trackers")
    precision = choose_precision(spec.mixed_precision)
    accelerator = Accelerator(
        mixed_precision=precision, log_with=names or None, project_dir=".", kwargs_handlers=LONG_TIMEOUT
    )
    check_distribution(accelerator.distributed_type)
    check_processes(accelerator.num_processes)
    configure_threads(accelerator.device, spec.threads)
    return accelerator


def open_run(accelerator: Accelerator, create: Callable[[], Run], hyperparameters: Mapping[str, Any]) -> Run:
    """Create the folder of a training, lock it, and let the trackers write there.

    Args:
        accelerator: processes and trackers.
        create: creates the folder, or returns the one to resume; called on the main process only.
        hyperparameters: what the trackers record of the run.

    Returns:
        The run, the same on every process.
    """
    run = compute_on_main_process(accelerator, create)
    _check_visible(accelerator, run)
    if accelerator.is_main_process:
        run.lock()
    accelerator.project_configuration.logging_dir = str(run.folder)
    folder = run.folder.resolve()
    # trackio makes folders of the name, so it must not be a path.
    names = {"wandb": {"name": str(run.folder)}, "trackio": {"name": f"{folder.parent.name}-{folder.name}"}}
    # TensorBoard takes neither None nor lists.
    known = {name: value for name, value in hyperparameters.items() if value is not None}
    known |= {name: ", ".join(value) for name, value in known.items() if isinstance(value, list)}
    accelerator.init_trackers("livt_hf", known, names)
    return run


def _check_visible(accelerator: Accelerator, run: Run) -> None:
    """Raise an error if some machine does not see the folder: it would start anew where the others resume."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT
    while not (seen := run.started) and time.monotonic() < deadline:
        time.sleep(1)
    without = [number for number, sees in enumerate(gather_object([seen])) if not sees]
    if without:
        raise LiVTError(
            f"process {without[0]} of {accelerator.num_processes} does not see {run.folder.absolute()}, the folder of "
            "the run: start all machines in a folder that they share, or name a shared output_dir.",
            argument="output_dir",
        )


def track_picture(accelerator: Accelerator, name: str, path: Path, update: int) -> None:
    """Show a picture in trackio's dashboard, if trackio is among the trackers."""
    for tracker in accelerator.trackers:
        if tracker.name == "trackio":
            import trackio

            tracker.log({name: trackio.Image(str(path))}, step=update)


@dataclass(frozen=True)
class StepKey:
    """Key of a micro-batch within a run, from which all randomness beyond a single image is derived."""

    epoch: int
    update: int
    micro: int = 0
    rank: int = 0


class TrainingTask:
    """Module to train, loader of its training batches, and loss of a batch.

    The loader has `updates_per_epoch` and `epoch(number, start_update=0)`, which yields micro-batches.
    """

    slow_final_epochs = 0  # number of last epochs whose updates take longer

    def __init__(self, module: nn.Module, loader: Any):
        self.module, self.loader = module, loader

    def compute_loss(self, module: nn.Module, batch: dict, step: StepKey) -> Tensor:
        """Return the loss of a micro-batch on the device; `module` may be wrapped for several processes."""
        raise NotImplementedError

    def begin_epoch(self, module: nn.Module, epoch: int, epochs: int) -> None:
        """Prepare for an epoch of `epochs`; `module` is not wrapped."""

    def make_optimizer(self, spec: OptimizationSpec) -> torch.optim.Optimizer:
        return make_optimizer(self.module, spec)


class TrainingLoop:
    """Trains the module of a task.

    All randomness is keyed (see randomness.py): data by (seed, epoch, image), the rest by (seed, update, process). So
    the state of a run is its weights, its optimizer and the number of the update.

    Args:
        task: the module, its batches and its loss.
        optimization: schedule, optimizer and precision.
        checkpointing: when to save, to log and to stop.
        accelerator: processes and devices.
        run: folder of log and checkpoints; None only where nothing is saved.
    """

    def __init__(
        self,
        task: TrainingTask,
        optimization: OptimizationSpec,
        checkpointing: CheckpointSpec,
        accelerator: Accelerator,
        run: Run | None,
    ):
        self.task, self.accelerator, self.run = task, accelerator, run
        self.optimization, self.checkpointing = optimization, checkpointing
        self.per_epoch, model = task.loader.updates_per_epoch, task.module
        self.total = optimization.epochs * self.per_epoch
        if optimization.max_steps is not None:
            self.total = min(self.total, optimization.max_steps)
        if optimization.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if optimization.compile is True:
            model.compile()  # in place: no wrapper, so checkpoints keep their names
        self.model, self.optimizer = accelerator.prepare(model, task.make_optimizer(optimization))
        self.warmup = min(round(optimization.warmup_epochs * self.per_epoch), self.total // 2)
        self.ema = None
        if optimization.ema_decay is not None:
            self.ema = AveragedModel(self.bare_model, multi_avg_fn=get_ema_multi_avg_fn(optimization.ema_decay))
            if accelerator.is_main_process:
                self._warn_about_short_average(optimization.ema_decay)
        self.progress = Progress()

    @property
    def bare_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    @property
    def final_model(self) -> nn.Module:
        """Return the module to evaluate: the moving average where there is one, else the trained module."""
        return self.bare_model if self.ema is None else self.ema.module

    @property
    def _parts(self) -> dict:
        """Return the parts of a checkpoint beside the progress, by file name."""
        parts = {"model.safetensors": self.bare_model, "ema.safetensors": self.ema, "optimizer.bin": self.optimizer}
        parts[SCALER] = self.accelerator.scaler
        return {name: part for name, part in parts.items() if part is not None}

    def resume(self, trained_on: str | None = None) -> None:
        """Load the newest checkpoint, if there is one. `trained_on` is the digest of the training images."""
        state = load_checkpoint(self.accelerator, self.run, self._parts)
        self.progress = Progress(**(state or {}))
        self.total = self.progress.total or self.total
        check_same_images(self.run, self.progress.trained_on, trained_on)
        self.progress.trained_on = trained_on
        if self.accelerator.is_main_process:
            self.run.rewind_log(self.progress.update)
            if state is not None:
                logger.info("resuming %s at update %d of %d", self.run.folder, self.progress.update, self.total)

    def fit(
        self,
        evaluate: Callable[["TrainingLoop", int], dict | None] = lambda _loop, _epoch: None,
        refit: Callable[["TrainingLoop"], int | None] = lambda _loop: None,
    ) -> None:
        """Train to the end, or save and raise `Interrupted`.

        Args:
            evaluate: called with the loop and the epoch after each epoch; returns metrics to log, or None.
            refit: called after each update, to fit the schedule to the time; returns another total number of updates,
                or None to keep it. A new total is saved at once, so that a resumed run has the same schedule.
        """
        started = self._saved = time.monotonic()
        seconds_before = self.progress.seconds
        self._begin_window()
        self._printed, self._pace = -math.inf, None
        done, hidden = self.progress.update, not self._interactive
        bar = tqdm(total=self.total, initial=done, unit="update", disable=hidden, dynamic_ncols=True)
        with bar, StopOnSignal(announce=self.accelerator.is_main_process) as stopping:
            while self.progress.update < self.total:
                epoch = self.progress.update // self.per_epoch
                self.model.train()
                epochs = math.ceil(self.total / self.per_epoch)
                self.task.begin_epoch(self.bare_model, epoch, epochs)  # may freeze some layers again
                batches = iter(self.task.loader.epoch(epoch, start_update=self.progress.update % self.per_epoch))
                while self.progress.update < (end := min((epoch + 1) * self.per_epoch, self.total)):
                    self.update(batches, epoch)
                    bar.update()
                    refitted = refit(self)
                    if refitted is not None:
                        self.total = self.progress.total = bar.total = refitted
                        end = min((epoch + 1) * self.per_epoch, self.total)
                    self.progress.seconds = seconds_before + time.monotonic() - started
                    if self.progress.update % self.checkpointing.log_steps == 0 or self.progress.update == self.total:
                        bar.set_postfix(self._log())
                    if self.progress.update == end:
                        self._estimate_statistics(epoch)
                        self._share_statistics()
                        self._log_evaluation(evaluate(self, epoch), epoch)
                    self._save_if_due(stopping.requested or self._out_of_time(started), refitted is not None)

    def _save_if_due(self, stop_requested: bool, must_save: bool) -> None:
        """Save at the end, when it is time, and when any process wants to stop; then stop."""
        due = must_save or time.monotonic() - self._saved > 60 * self.checkpointing.save_minutes
        stop, save = self._any_process(stop_requested, due)
        finished = self.progress.update == self.total
        every = self.checkpointing.save_steps
        if stop or save or finished or (every is not None and self.progress.update % every == 0):
            self._finite_losses()
            self._check_weights()
            keep = self.checkpointing.save_total_limit
            save_checkpoint(self.accelerator, self.run, self._parts, vars(self.progress), keep)
            self._saved = time.monotonic()
        if stop and not finished:
            raise Interrupted(self.run.stage, "--resume", self.run.cross_validation.folder)

    def update(self, batches: Iterator[dict], epoch: int) -> None:
        """Run all micro-batches of an update, each weighted alike, then one optimizer step."""
        accelerator, spec, update = self.accelerator, self.optimization, self.progress.update
        peak = scale_lr(spec.base_lr, spec.batch_size)
        # A function of the update alone, so resuming needs no state.
        self._lr = warmup_cosine(update, self.warmup, self.total, peak, spec.min_lr)
        set_lr(self.optimizer, self._lr)
        total = 0.0
        for micro in range(spec.accumulation):
            # Drop path draws from the global generator; keyed like this it needs no state to resume.
            torch.manual_seed(keyed_seed(spec.seed, update, micro, accelerator.process_index))
            last = micro == spec.accumulation - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                loss = self._compute_loss(self.model, batches, epoch, update, micro) / spec.accumulation
                accelerator.backward(loss)
            total = total + loss.detach()
        if spec.clip_grad is not None:
            accelerator.clip_grad_norm_(self.model.parameters(), spec.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update_parameters(self.bare_model)
        self.progress.pending.append(total)
        self.progress.update += 1

    def _compute_loss(self, module: nn.Module, batches: Iterator[dict], epoch: int, update: int, micro: int) -> Tensor:
        """Return the loss of the next micro-batch."""
        batch = {name: value.to(self.accelerator.device) for name, value in next(batches).items()}
        step = StepKey(epoch, update, micro, self.accelerator.process_index)
        with self.accelerator.autocast():
            return self.task.compute_loss(module, batch, step)

    @torch.no_grad()
    def _estimate_statistics(self, epoch: int) -> None:
        """Estimate the batch statistics of the moving average: those of the trained weights do not fit its weights.

        From the first training batches of the epoch, so that a resumed run gets the same ones. Every update replaces
        them by those of the trained weights.
        """
        if self.ema is None:
            return
        trained, average = dict(self.bare_model.named_modules()), self.ema.module
        layers = {name: layer for name, layer in batch_norms(average).items() if trained[name].training}
        if not layers:
            return
        average.eval()
        updates = min(self.per_epoch, math.ceil(STATISTICS_IMAGES / self.optimization.batch_size))
        batches = iter(self.task.loader.epoch(epoch))
        with estimate_statistics(layers.values()):
            for update, micro in itertools.product(range(updates), range(self.optimization.accumulation)):
                self._compute_loss(average, batches, epoch, epoch * self.per_epoch + update, micro)

    def _warn_about_short_average(self, decay: float) -> None:
        """Warn where the moving average still consists of the first weights when training ends."""
        left, most = decay**self.total, EMA_REMAINDER ** (1 / self.total)
        if left > EMA_REMAINDER:
            logger.warning(
                "ema_decay %g: after %d updates %.0f %% of the moving average are still the weights of the first one; "
                "use at most %.4g, or train longer.",
                *(decay, self.total, 100 * left, most),
                extra={"arguments": ("ema_decay",)},
            )

    def _share_statistics(self) -> None:
        """Take the buffers of the main process everywhere: batch statistics differ between processes."""
        if self.accelerator.num_processes > 1:
            for buffer in self.final_model.buffers():
                broadcast(buffer)

    def _finite_losses(self) -> list[float]:
        """Return the pending losses as numbers averaged over processes; this waits for the device."""
        pending = self.progress.pending
        fresh = [loss for loss in pending if isinstance(loss, Tensor)]
        if fresh:
            mean = self.accelerator.reduce(torch.stack(fresh).float(), "mean").tolist()
            pending[-len(fresh) :] = mean
        for offset, loss in enumerate(pending):
            if not math.isfinite(loss):
                self._diverged(f"the loss became {loss}", self.progress.update - len(pending) + offset + 1)
        return pending

    def _check_weights(self) -> None:
        """Raise an error if weights are not finite, which a step from a finite loss may leave."""
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            self._diverged("the weights became infinite or NaN", self.progress.update)

    def _diverged(self, what: str, update: int) -> NoReturn:
        kept = list_checkpoints(self.run)
        rest = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise LiVTError(
            f"{what} at update {update}; {rest}. Lower base_lr or clip gradients (clip_grad 1).", argument="base_lr"
        )

    def _log(self) -> dict:
        losses, progress, batch = self._finite_losses(), self.progress, self.optimization.batch_size
        then, since = self._window
        speed, last = (progress.update - since) * batch / (time.perf_counter() - then), progress.update == self.total
        self._begin_window()
        self._pace = speed if self._pace is None else (1 - SMOOTHING) * self._pace + SMOOTHING * speed
        line = {
            "update": progress.update,
            "epoch": round(progress.update / self.per_epoch, 4),
            "loss": sum(losses) / len(losses),
            "lr": self._lr,
            "images_per_second": round(speed, 1),
        }
        progress.pending = []
        if self.accelerator.is_main_process:
            self.run.log(line)
            if not self._interactive and (last or time.monotonic() - self._printed >= LOG_INTERVAL):
                self._printed = time.monotonic()
                left = "" if last else f"  {format_duration((self.total - progress.update) * batch / self._pace)} left"
                logger.info(f"update %(update)d  epoch %(epoch).2f  loss %(loss).4f  lr %(lr).2e{left}", line)
        self.accelerator.log({name: line[name] for name in ("loss", "lr", "images_per_second")}, step=progress.update)
        return {"loss": f"{line['loss']:.4f}", "lr": f"{self._lr:.1e}", "images/s": f"{speed:.0f}"}

    def _begin_window(self) -> None:
        """Start a new window over which the speed is measured."""
        self._window = time.perf_counter(), self.progress.update

    def _log_evaluation(self, metrics: dict | None, epoch: int) -> None:
        self.model.train()
        self._begin_window()
        if metrics is None:
            return
        if self.accelerator.is_main_process:
            self.run.log({"update": self.progress.update, "epoch": epoch + 1, "eval": metrics})
        self.accelerator.log({f"eval/{k}": v for k, v in metrics.items() if v is not None}, step=self.progress.update)

    def _any_process(self, *flags_here: bool) -> list[bool]:
        """Return for each flag whether any process has set it: signals and clocks differ between processes."""
        if self.accelerator.num_processes == 1:
            return list(flags_here)
        flags = torch.tensor(flags_here, dtype=torch.int64, device=self.accelerator.device)
        return (self.accelerator.reduce(flags, "sum") > 0).tolist()

    def _out_of_time(self, started: float) -> bool:
        limit = self.checkpointing.max_hours
        return limit is not None and time.monotonic() - started > 3600 * limit

    @property
    def _interactive(self) -> bool:
        return self.accelerator.is_main_process and sys.stderr.isatty()


def finish_run(loop: TrainingLoop, model: PreTrainedModel, processor: BaseImageProcessor, results: Results) -> None:
    """Write the final model and its processor, then the results that mark the run as finished.

    The process group stays: the next fold needs it.
    """
    accelerator = loop.accelerator
    if accelerator.is_main_process:
        with explain_save_errors("the final model", loop.run):
            save_final(loop.run.folder, model, processor)
            loop.run.write_results(results)
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []
