"""The one training loop of both stages, under Accelerate: it resumes bit for bit, on any number of processes."""

import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm.auto import tqdm
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.errors import Interrupted, LiVTError
from livt_hf.randomness import keyed_seed
from livt_hf.results import Results
from livt_hf.runs import Run, check_same_images, new_run
from livt_hf.settings import TrainingSettings
from livt_hf.text import format_duration
from livt_hf.training.checkpoints import (
    SCALER,
    Progress,
    explain_save_errors,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from livt_hf.training.device import (
    LONG_TIMEOUT,
    StopOnSignal,
    check_distribution,
    check_processes,
    choose_precision,
    configure_threads,
)
from livt_hf.training.optim import layer_decay_groups, scale_lr, set_lr, split_muon_groups, warmup_cosine

logger = logging.getLogger(__name__)

# A network drive may remember for a minute that there was no such folder.
VISIBILITY_TIMEOUT = 90
# Where there is no bar: log.jsonl has every line.
LOG_INTERVAL = 10


def make_accelerator(settings: TrainingSettings) -> Accelerator:
    trackers = settings.trackers.split(",") if settings.trackers else []
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in trackers:  # Accelerate leaves out in silence what is not installed
        if tracker not in available:
            raise LiVTError(
                f"the tracker {tracker!r} is not installed; install it or leave it out (log.jsonl is always written)."
            )
    precision = choose_precision(settings.mixed_precision)
    chosen = {"mixed_precision": precision, "log_with": trackers or None}
    accelerator = Accelerator(**chosen, project_dir=".", kwargs_handlers=LONG_TIMEOUT)
    check_distribution(accelerator.distributed_type)
    check_processes(accelerator.num_processes)
    configure_threads(accelerator.device, settings.threads)
    return accelerator


def claim_run_folder(accelerator: Accelerator, settings: TrainingSettings, resumed: Run | None) -> Run:
    """The folder this command works in, the same on every process: a new one, or the one to resume."""
    found = [resumed]
    if accelerator.is_main_process and resumed is None:
        found = [new_run(settings)]
        found[0].begin(settings)
    broadcast_object_list(found)
    _check_shared(accelerator, found[0])
    if accelerator.is_main_process:
        found[0].hold()
    return found[0]


def _check_shared(accelerator: Accelerator, run: Run) -> None:
    """Refuse a folder that only some machines see: their processes would begin anew where the others resume."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT
    while not (seen := run.started) and time.monotonic() < deadline:
        time.sleep(1)
    without = [number for number, sees in enumerate(gather_object([seen])) if not sees]
    if without:
        raise LiVTError(
            f"process {without[0]} of {accelerator.num_processes} does not see {run.folder.absolute()}, the folder of "
            "the run: start all machines in a folder that they share, or name one with --output_dir."
        )


def open_run(accelerator: Accelerator, settings: TrainingSettings, resumed: Run | None) -> Run:
    """The folder of a training, with the trackers that write there."""
    run = claim_run_folder(accelerator, settings, resumed)
    accelerator.project_configuration.logging_dir = str(run.folder)
    said = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
    place = run.folder.resolve()
    # trackio makes folders of the name, so it must not be a path.
    named = {"wandb": {"name": str(run.folder)}, "trackio": {"name": f"{place.parent.name}-{place.name}"}}
    accelerator.init_trackers("livt_hf", said, named)
    return run


def track_picture(accelerator: Accelerator, name: str, path: Path, update: int) -> None:
    """Show a picture in trackio's dashboard, where that is among the trackers."""
    for tracker in accelerator.trackers:
        if tracker.name == "trackio":
            import trackio

            tracker.log({name: trackio.Image(str(path))}, step=update)


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    groups = layer_decay_groups(model, settings.weight_decay, getattr(settings, "layer_decay", 1.0))
    lr = scale_lr(settings.base_lr, settings.batch_size)
    betas = 0.9, settings.adam_beta2
    optimizer = getattr(settings, "optimizer", "adamw")
    if optimizer == "lamb":
        from timm.optim import Lamb

        return Lamb(groups, lr=lr, betas=betas)
    if optimizer == "muon":
        from timm.optim import Muon  # scaled so that rates and decay of AdamW fit it too

        return Muon(split_muon_groups(model, groups), lr=lr, betas=betas, nesterov=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


@dataclass(frozen=True)
class StepKey:
    """Where in a run a micro-batch is trained on: all that randomness beyond a single image is keyed by."""

    epoch: int
    update: int
    micro: int = 0
    rank: int = 0


@dataclass(frozen=True)
class TrainingTask:
    """What is trained on what."""

    module: nn.Module
    loader: Any
    compute_loss: Callable[[nn.Module, dict, StepKey], Tensor]


class TrainingLoop:
    """Trains a model: the loss of its task is the stage, everything else is the same for both.

    All randomness is keyed (see randomness.py): data by (seed, epoch, image), the rest by (seed, update, process). So
    the state of a run is its weights, its optimizer and the number of the update.
    """

    def __init__(self, accelerator: Accelerator, settings: TrainingSettings, run: Run, task: TrainingTask):
        self.accelerator, self.settings, self.run, self.task = accelerator, settings, run, task
        self.per_epoch, model = task.loader.updates_per_epoch, task.module
        self.total = settings.epochs * self.per_epoch
        if settings.max_steps is not None:
            self.total = min(self.total, settings.max_steps)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if settings.compile is True:
            model.compile()  # in place: no wrapper, so checkpoints keep their names
        optimizer = make_optimizer(model, settings)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.warmup = min(round(settings.warmup_epochs * self.per_epoch), self.total // 2)
        self.ema = None
        if settings.ema_decay is not None:
            self.ema = AveragedModel(self.bare_model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay))
        self.progress = Progress()

    @property
    def bare_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    @property
    def final_model(self) -> nn.Module:
        """What is measured and published: the moving average where there is one."""
        return self.bare_model if self.ema is None else self.ema.module

    @property
    def _parts(self) -> dict:
        """What checkpoints hold beside the progress, by file name."""
        parts = {"model.safetensors": self.bare_model, "ema.safetensors": self.ema, "optimizer.bin": self.optimizer}
        parts[SCALER] = self.accelerator.scaler
        return {name: part for name, part in parts.items() if part is not None}

    def resume(self, trained_on: str | None = None) -> None:
        """Continue from the newest checkpoint, if there is one. `trained_on` is the digest of the training images."""
        state = load_checkpoint(self.accelerator, self.run, self._parts)
        self.progress = Progress(**(state or {}))
        check_same_images(self.run, self.progress.trained_on, trained_on)
        self.progress.trained_on = trained_on
        if self.accelerator.is_main_process:
            self.run.rewind_log(self.progress.update)
            if state is not None:
                logger.info("resuming %s at update %d of %d", self.run.folder, self.progress.update, self.total)

    def fit(
        self,
        before_epoch: Callable[[int], None] = lambda _: None,
        after_epoch: Callable[[int], dict | None] = lambda _: None,
    ) -> None:
        """Train to the end, or raise `Interrupted` after saving. `after_epoch` may return measurements to log."""
        started = self._saved = time.monotonic()
        seconds_before = self.progress.seconds
        self._begin_window()
        self._said = -math.inf
        done, hidden = self.progress.update, not self._interactive
        bar = tqdm(total=self.total, initial=done, unit="update", disable=hidden, dynamic_ncols=True)
        with bar, StopOnSignal(announce=self.accelerator.is_main_process) as stopping:
            for epoch in range(self.progress.update // self.per_epoch, math.ceil(self.total / self.per_epoch)):
                before_epoch(epoch)
                self.model.train()
                batches = iter(self.task.loader.epoch(epoch, start_update=self.progress.update % self.per_epoch))
                end = min((epoch + 1) * self.per_epoch, self.total)
                while self.progress.update < end:
                    self.update(batches, epoch)
                    bar.update()
                    self.progress.seconds = seconds_before + time.monotonic() - started
                    if self.progress.update % self.settings.log_steps == 0 or self.progress.update == self.total:
                        bar.set_postfix(self._log())
                    if self.progress.update == end:
                        self._share_statistics()
                        self._log_evaluation(after_epoch(epoch), epoch)
                    self._save_if_due(stopping.requested or self._out_of_time(started))

    def _save_if_due(self, wished_to_stop: bool) -> None:
        """Save at the end and when it is time, or when anybody wishes to stop, which then happens."""
        due = time.monotonic() - self._saved > 60 * self.settings.save_minutes
        stop, save = self._agree(wished_to_stop, due)
        finished = self.progress.update == self.total
        every = self.settings.save_steps
        if stop or save or finished or (every is not None and self.progress.update % every == 0):
            self._finite_losses()
            self._check_weights()
            progress, keep = vars(self.progress), self.settings.save_total_limit
            save_checkpoint(self.accelerator, self.run, self._parts, progress, keep)
            self._saved = time.monotonic()
        if stop and not finished:
            raise Interrupted(self.settings.stage, "--resume", self.run.whole.folder)

    def update(self, batches: Iterable[dict], epoch: int) -> None:
        """One update: all micro-batches, each weighted alike, then one optimizer step."""
        accelerator, settings, update = self.accelerator, self.settings, self.progress.update
        peak = scale_lr(settings.base_lr, settings.batch_size)
        # A function of the update alone, so resuming needs no state.
        self._lr = warmup_cosine(update, self.warmup, self.total, peak, settings.min_lr)
        set_lr(self.optimizer, self._lr)
        total = 0.0
        for micro in range(settings.accumulation):
            # Drop path draws from the global generator; keyed like this it needs no state to resume.
            torch.manual_seed(keyed_seed(settings.seed, update, micro, accelerator.process_index))
            batch = {name: value.to(accelerator.device) for name, value in next(batches).items()}
            step = StepKey(epoch, update, micro, accelerator.process_index)
            last = micro == settings.accumulation - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    loss = self.task.compute_loss(self.model, batch, step) / settings.accumulation
                accelerator.backward(loss)
            total = total + loss.detach()
        if settings.clip_grad is not None:
            accelerator.clip_grad_norm_(self.model.parameters(), settings.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update_parameters(self.bare_model)
        self.progress.pending.append(total)
        self.progress.update += 1

    def _share_statistics(self) -> None:
        """What is measured is what is saved: each process has normalised by statistics of its own last images."""
        if self.accelerator.num_processes > 1:
            for buffer in self.final_model.buffers():
                broadcast(buffer)

    def _finite_losses(self) -> list[float]:
        """The pending losses as numbers, averaged over processes; reading them waits for the device."""
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
        """A step from a finite loss may still leave the weights infinite: such a checkpoint would be of no use."""
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            self._diverged("the weights became infinite or NaN", self.progress.update)

    def _diverged(self, what: str, update: int) -> NoReturn:
        kept = list_checkpoints(self.run)
        rest = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise LiVTError(f"{what} at update {update}; {rest}. Lower base_lr or clip gradients (--clip_grad 1).")

    def _log(self) -> dict:
        losses, progress, batch = self._finite_losses(), self.progress, self.settings.batch_size
        then, since = self._window
        speed, last = (progress.update - since) * batch / (time.perf_counter() - then), progress.update == self.total
        self._begin_window()
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
            if not self._interactive and (last or time.monotonic() - self._said >= LOG_INTERVAL):
                self._said = time.monotonic()
                left = "" if last else f"  {format_duration((self.total - progress.update) * batch / speed)} left"
                said = "update %(update)d  epoch %(epoch).2f  loss %(loss).4f  lr %(lr).2e"
                logger.info(f"{said}{left}", line)
        self.accelerator.log({name: line[name] for name in ("loss", "lr", "images_per_second")}, step=progress.update)
        return {"loss": f"{line['loss']:.4f}", "lr": f"{self._lr:.1e}", "images/s": f"{speed:.0f}"}

    def _begin_window(self) -> None:
        """Start a new window over which the speed is measured."""
        self._window = time.perf_counter(), self.progress.update

    def _log_evaluation(self, measured: dict | None, epoch: int) -> None:
        self.model.train()
        self._begin_window()
        if measured is None:
            return
        if self.accelerator.is_main_process:
            self.run.log({"update": self.progress.update, "epoch": epoch + 1, "eval": measured})
        self.accelerator.log({f"eval/{k}": v for k, v in measured.items() if v is not None}, step=self.progress.update)

    def _agree(self, *wishes: bool) -> list[bool]:
        """What any process wants, all do: signals and clocks differ between processes."""
        if self.accelerator.num_processes == 1:
            return list(wishes)
        flags = torch.tensor(wishes, dtype=torch.int64, device=self.accelerator.device)
        return (self.accelerator.reduce(flags, "sum") > 0).tolist()

    def _out_of_time(self, started: float) -> bool:
        limit = self.settings.max_hours
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
            model.save_pretrained(loop.run.folder)
            processor.save_pretrained(loop.run.folder)
            loop.run.write_results(results)
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []
