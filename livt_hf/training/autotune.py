"""Choose model, batch, epochs and compilation for a given time: stated rules, and a trial of a few updates."""

import copy
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from livt_hf.configuration_livit import PRESETS
from livt_hf.precision import GAIN, has_cpu_bf16, is_large_enough
from livt_hf.randomness import preserve_rng_state
from livt_hf.text import format_duration
from livt_hf.training.device import set_precision
from livt_hf.training.loop import TrainingLoop, TrainingTask
from livt_hf.training.spec import CheckpointSpec, OptimizationSpec

# The clock that budgets are counted by. recipes/benchmarks/race.py takes the processor's time instead.
clock: Callable[[], float] = time.perf_counter

# Operations per second in training. A core: 5e10 were measured on one with AVX2 at the micro ViT, and some are for
# decoding. A GPU: a guess, which only chooses the size of the model; the epochs are fitted to the time that passes.
CORE_FLOPS, GPU_FLOPS = 4e10, 2e13
# From scratch: model, pixels and patch, the largest first. One is taken if every image can be seen so often.
# Patches of 4 are worth their price from half a core-hour on, if Muon fine-tunes them: on CIFAR-100-LT 26
# core-minutes, 23 passes, led to 34.9 %, 45 to 37.8 % and 121 to 43.0 %, where patches of 8 led to 31.3 % in 58
# minutes and AdamW to 39.5 % in 122.
SMALL_PATCHES, SMALLEST = ("micro", 32, 4), ("micro", 32, 8)
FROM_SCRATCH = {
    ("base", 224, 16): 100,
    ("small", 224, 16): 100,
    ("tiny", 224, 16): 100,
    ("micro", 64, 8): 100,
    SMALL_PATCHES: 22,
    SMALLEST: 100,
}
# The share of the patches that a micro ViT is fine-tuned on. On CIFAR-100-LT, with five core-minutes for both stages,
# half of them led to 16.1 % and all to 14.6 %.
KEEP_RATIO = 0.5
# The share of the time that masked pretraining gets. On CIFAR-100-LT, 41 % of 22 minutes led to 27.4 % accuracy, 78 %
# of 58 minutes to 31.3 %.
# With patches of 4, 42 % of 26 minutes led to 34.9 %, 65 % of 121 minutes to 43.0 %.
PRETRAINING_SHARE, SHORT_SHARE = 0.6, 0.4
# Epochs below which a training is warned of.
FEW_EPOCHS = 1.5
# Updates per epoch that the batch is chosen for: a short training wants many small updates.
UPDATES_PER_EPOCH = 80
# Epochs from which on mixing images pays (on CIFAR-100-LT: not with 12, but with 30).
MIXUP_EPOCHS = 30
# Compiling takes 30 to 60 seconds and makes a step of the micro ViT 1.04 to 1.23 times as fast on a CPU: at 1.04, 60
# seconds are earned back after 26 minutes.
COMPILING_PAYS_AFTER = 30 * 60


def fit_epochs(seconds: float, per_epoch: float, last: int = 0, per_last: float = 0.0) -> int:
    """Return how many whole epochs fit, of which the `last` ones take longer; at least one."""
    rest = seconds - last * per_last
    return max(1, int(seconds / per_last) if last and rest < 0 else last + int(rest / per_epoch))


def describe_few_epochs(epochs: float | None, hours: float | None) -> str:
    """Return a warning about hours that hold about one epoch; empty for more, or for none."""
    if not epochs or hours is None or epochs >= FEW_EPOCHS:
        return ""
    time = format_duration(3600 * hours)
    return f"Warning: {time} hold about one epoch of the network ({epochs:.1f}), which is short; allow more."


def compile_pays(seconds: float, device: str) -> bool:
    """Return whether compiling pays for a training of this length: always on a GPU, on a CPU if it is long."""
    return device not in ("cpu", "mps") or (device == "cpu" and seconds >= COMPILING_PAYS_AFTER)


def count_layer_flops(width: int, tokens: int) -> float:
    """Count operations of the matrix products of one image in one layer of a ViT, forward."""
    return 24 * width**2 * tokens + 4 * width * tokens**2


def count_training_flops(model_size: str, image_size: int, patch_size: int) -> float:
    """Count operations of one image in fine-tuning, forward and backward."""
    preset, tokens = PRESETS[model_size], (image_size // patch_size) ** 2 + 1
    return 3 * preset["num_hidden_layers"] * count_layer_flops(preset["hidden_size"], tokens)


def limit_batch_size(num_images: int) -> int:
    """Return a batch size: the largest power of two from 16 to 256 that leaves an epoch its updates, or fewer."""
    fitting = next((size for size in (256, 128, 64, 32) if num_images >= UPDATES_PER_EPOCH * size), 16)
    return min(fitting, 2 ** (max(num_images, 1).bit_length() - 1))


@dataclass(frozen=True)
class ScratchPlan:
    """Choice of model and schedule for training from scratch in a given time.

    Args:
        num_images: number of training images.
        side: their shorter side in pixels.
        flops: operations that the time allows.
        alike: all images are squares of that side.
        soft_labels: the loss accepts the labels of mixed images.
    """

    num_images: int
    side: int
    flops: float
    alike: bool = True
    soft_labels: bool = True

    @property
    def model(self) -> tuple[str, int, int]:
        """Return preset, pixels and patch of the largest model that sees each image often enough, not enlarged."""
        side = max(self.side, SMALLEST[1])  # to which smaller images are enlarged in any case
        fitting = (
            model for model, passes in FROM_SCRATCH.items() if model[1] <= side and self.passes(model) >= passes
        )
        return next(fitting, SMALLEST)

    def passes(self, model: tuple[str, int, int]) -> float:
        """Return how often the time would show every image to the model in fine-tuning."""
        kept = KEEP_RATIO if model[0] == "micro" else 1.0
        return self.flops / (kept * count_training_flops(*model)) / self.num_images

    @property
    def batch_size(self) -> int:
        """Return the images per update in pretraining."""
        return limit_batch_size(self.num_images)

    @property
    def second_batch_size(self) -> int:
        """Return the images per update in fine-tuning: half, because its loss is less noisy."""
        return max(min(16, self.batch_size), self.batch_size // 2)

    @property
    def base_lrs(self) -> tuple[float, float]:
        """Return the learning rates of both stages for 256 images: by CIFAR-100-LT for micro, else the paper's."""
        return (2e-3, 4e-3) if self.model[0] == "micro" else (1.5e-4, 1e-3)

    @property
    def mixes(self) -> bool:
        """Return True if images are mixed: fine-tuning has enough epochs for that to pay."""
        return self._long_enough and self.soft_labels

    @property
    def share(self) -> float:
        """Return the share of the time for masked pretraining."""
        return PRETRAINING_SHARE if self._long_enough or self.model != SMALL_PATCHES else SHORT_SHARE

    @property
    def _long_enough(self) -> bool:
        return (1 - PRETRAINING_SHARE) * self.passes(self.model) >= MIXUP_EPOCHS

    def options(self, hours: float) -> dict[str, dict]:
        """Return the options of both stages."""
        (size, pixels, patch), rates = self.model, self.base_lrs
        model = {"model_size": size, "image_size": pixels, "patch_size": patch}
        first = {"batch_size": self.batch_size, "base_lr": rates[0], "warmup_epochs": 2, "decode_ratio": 0.5}
        second = {"batch_size": self.second_batch_size, "base_lr": rates[1], "warmup_epochs": 1, "layer_decay": 1.0}
        second |= {"drop_path": 0.0, "erase": 0.0, "cutmix": 0.0, "crop_scale": 0.3}
        second["mixup"] = 0.2 if self.mixes else 0.0
        second["augmentation"] = "pad_crop" if self.alike and pixels == self.side else "crop"
        if size == "micro":
            second["keep_ratio"] = KEEP_RATIO
        if self.model == SMALL_PATCHES:
            first["decode_ratio"], second["optimizer"] = 0.25, "muon"
            if self.mixes:  # recipes/configs/*-cifar100-lt-long.yaml
                second |= {"keep_all_epochs": 3, "cutmix": 1.0, "mixup_off_epochs": 8}
        shares = {"pretrain": self.share, "finetune": 1 - self.share}
        stages = {"pretrain": first, "finetune": second}
        return {stage: model | stages[stage] | {"hours": round(hours * shares[stage], 4)} for stage in stages}

    def explain(self, hours: float) -> str:
        """Return what was chosen and why, for people."""
        size, pixels, patch = self.model
        small, passes = self.model == SMALL_PATCHES, f"{self.passes(self.model):,.0f}"
        unmixed = f"which wants {MIXUP_EPOCHS} epochs" if self.soft_labels else "for the loss wants hard labels"
        return (
            f"From scratch: {size} at {pixels} pixels with patches of {patch}. {format_duration(3600 * hours)} "
            f"would show it each of the {self.num_images:,} images about {passes} times; "
            f"{FROM_SCRATCH[self.model]} are wanted.\n"
            f"  {self.share:.0%} of the time goes to masked pretraining, {self.batch_size} images per update; the "
            f"rest to balanced fine-tuning, {self.second_batch_size} images per update, "
            + ("by half of their patches, " if size == "micro" else "")
            + ("by Muon, " if small else "")
            + ("with cutmix and " if small and self.mixes else "")
            + ("with mixup." if self.mixes else f"without mixup, {unmixed}.")
            + (f"\n  {few}" if (few := describe_few_epochs((1 - self.share) * self.passes(self.model), hours)) else "")
        )


# Updates of a trial: the first warm up caches and allocators.
WARM_UP, TIMED = 2, 10
# Updates of a training from which on a trial of bf16 is worth its time.
MIN_UPDATES = 200


def resolve_auto_options(
    spec: OptimizationSpec, task: TrainingTask, accelerator: Accelerator, began: float
) -> OptimizationSpec:
    """Replace options that are left to the machine by values, and print them.

    `hours`, counted from `began`, becomes the number of epochs that fit; `compile="auto"` becomes True or False; on a
    CPU with bf16 `mixed_precision="auto"` becomes "no" or "bf16". A few updates of a copy of the model are timed. The
    run is then, bit for bit, the one with these values.
    """
    tries_bf16 = can_try_bf16(spec, task, accelerator)
    if spec.hours is None and spec.compile != "auto" and not tries_bf16:
        return spec
    updates = task.loader.updates_per_epoch

    def epoch_seconds(epoch: int) -> float:
        return measure_update_seconds(spec, task, accelerator, epoch) * updates

    per_epoch = epoch_seconds(0)
    if tries_bf16 and planned_updates(spec, updates, per_epoch) >= MIN_UPDATES:
        set_precision(accelerator, "bf16")
        in_bf16 = epoch_seconds(0)
        spec = spec.replace(mixed_precision="bf16" if per_epoch > GAIN * in_bf16 else "no")
        set_precision(accelerator, spec.mixed_precision)
        gain = f"updates in bf16 are {per_epoch / in_bf16:.2f} times as fast"
        accelerator.print(f"mixed_precision {spec.mixed_precision}: {gain}", file=sys.stderr)
        per_epoch = in_bf16 if spec.mixed_precision == "bf16" else per_epoch
    if spec.hours is not None:
        last = task.slow_final_epochs
        per_last = epoch_seconds(spec.epochs - 1) if last else 0.0
        left = 3600 * spec.hours - (clock() - began)
        epochs = fit_epochs(left, per_epoch, last, per_last)
        if spec.max_steps is not None:
            epochs = min(epochs, math.ceil(spec.max_steps / updates))
        epochs = int(_gather(accelerator, epochs).min())  # the clocks of processes differ, their epochs must not
        spec = spec.replace(epochs=epochs)
        message = f"epochs that fit into {max(0, left) / 60:.1f} minutes, at {per_epoch:.1f} seconds each"
        if last:
            message += f" and {per_last:.1f} with all patches (the last {last})"
        late = "; one epoch takes longer than that" if left < (per_last if last else per_epoch) else ""
        accelerator.print(f"{message}: {epochs}{late}", file=sys.stderr)
        if warning := describe_few_epochs(epochs, spec.hours):
            accelerator.print(warning, file=sys.stderr)
    if spec.compile == "auto":
        seconds, device = spec.epochs * per_epoch, accelerator.device.type
        # On a CPU torch.compile needs a C++ compiler.
        able = device != "cpu" or shutil.which(os.environ.get("CXX", "g++")) is not None
        spec = spec.replace(compile=compile_pays(seconds, device) and able)
        message = f"{'' if spec.compile else 'not '}compiling the model: {seconds / 60:.0f} minutes on {device}"
        accelerator.print(message, file=sys.stderr)
    return spec


def can_try_bf16(spec: OptimizationSpec, task: TrainingTask, accelerator: Accelerator) -> bool:
    """Return whether a trial may choose bf16: for a model large enough, on CPUs all of which have it."""
    if spec.mixed_precision != "auto" or accelerator.device.type != "cpu" or accelerator.mixed_precision != "no":
        return False
    long_enough = planned_updates(spec, task.loader.updates_per_epoch) >= MIN_UPDATES
    able = long_enough and has_cpu_bf16() and is_large_enough(task.module)
    return bool(_gather(accelerator, able).min())


def planned_updates(spec: OptimizationSpec, per_epoch: int, seconds: float = 0.0) -> float:
    """Return how many updates a training takes; with `hours`, of whole epochs that take so many seconds."""
    updates = spec.epochs * per_epoch if spec.hours is None else 3600 * spec.hours / max(seconds, 1e-9) * per_epoch
    return updates if spec.max_steps is None else min(updates, spec.max_steps)


def measure_update_seconds(spec: OptimizationSpec, task: TrainingTask, accelerator: Accelerator, epoch: int) -> float:
    """Return the mean time of a few updates of an epoch by a copy of the model, on the slowest process."""
    trial = copy.copy(task)
    trial.module = copy.deepcopy(task.module)
    with preserve_rng_state():
        loop = TrainingLoop(trial, spec.replace(ema_decay=None), CheckpointSpec(), accelerator, run=None)
        loop.model.train()
        trial.begin_epoch(loop.bare_model, epoch, spec.epochs)
        updates = min(WARM_UP + TIMED, loop.per_epoch)
        batches = iter(trial.loader.epoch(epoch))
        for update in range(updates):
            if update == min(WARM_UP, updates - 1):
                began = clock()
            loop.update(batches, epoch)
        seconds = (clock() - began) / max(1, updates - WARM_UP)
    accelerator.free_memory()
    return _gather(accelerator, seconds).max().item()


def _gather(accelerator: Accelerator, value: float) -> torch.Tensor:
    return accelerator.gather(torch.tensor([value], device=accelerator.device, dtype=torch.float32))


def limit_epochs(spec: OptimizationSpec, updates_per_epoch: int) -> OptimizationSpec:
    """Return the spec with the epochs that `max_steps` reaches: schedules within a training go by epochs."""
    if spec.max_steps is None:
        return spec
    return spec.replace(epochs=min(spec.epochs, math.ceil(spec.max_steps / updates_per_epoch)))
