"""Device, precision, threads and signals of a training process."""

import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list, parse_flag_from_env

from livt_hf.errors import LiVTError
from livt_hf.precision import has_fast_cpu_bf16

logger = logging.getLogger(__name__)
T = TypeVar("T")

# For Accelerate: the others wait while the first process looks at every image, not torch's 10 or 30 minutes.
LONG_TIMEOUT = [InitProcessGroupKwargs(timeout=timedelta(days=1))]


def check_distribution(kind: DistributedType) -> None:
    """Raise an error for launchers that split the model: the loop, its checkpoints and evaluations take whole ones.

    On a CPU, Accelerate makes DDP of what was asked for; its environment variables still name it.
    """
    for splitting in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        if kind == splitting or parse_flag_from_env(f"ACCELERATE_USE_{splitting.value}"):
            raise LiVTError(
                f"{splitting.value} is not supported: every model of the paper fits one GPU, so use DDP, that is "
                "plain `accelerate launch --num_processes N`, with no such plugin in Accelerate's own config."
            )


def check_processes(num_processes: int) -> None:
    """Raise an error if processes were launched together and do not see each other."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != num_processes:
        raise LiVTError(
            f"{launched} processes were launched and none sees the others: Accelerate wants ACCELERATE_USE_CPU=1 in "
            "the environment for several processes without a GPU."
        )


def choose_precision(requested: str) -> str:
    """Return Accelerate's `mixed_precision`; "auto" is the launcher's choice, else half precision on a CUDA GPU.

    On a CPU "auto" is "no" until `autotune.resolve_auto_options` has tried both.
    """
    cuda = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    cpu = not cuda and not torch.backends.mps.is_available()
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if requested == "auto" and launched in ("bf16", "fp16"):
        requested = launched
    if requested == "auto":
        if not cuda:
            return "no"
        # Not where it is emulated, as on a T4 or V100.
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if cpu and requested == "fp16":
        raise LiVTError("mixed_precision fp16 needs a GPU; use no.")
    if cpu and requested == "bf16" and not has_fast_cpu_bf16():
        raise LiVTError("this CPU has no bf16 or only emulates it, far slower than float32; use mixed_precision no.")
    return requested


def set_precision(accelerator: Accelerator, precision: str) -> None:
    """Set the precision, "no" or "bf16", of what an accelerator on a CPU prepares from now on.

    Accelerate itself wants it when it is made; on a CPU nothing but these two values depends on it.
    """
    accelerator.state._mixed_precision = precision
    accelerator.native_amp = precision != "no"


def compute_on_main_process(accelerator: Accelerator, compute: Callable[[], T]) -> T:
    """Call a function on the main process alone, and return its result on every process."""
    result: list = [compute() if accelerator.is_main_process else None]
    broadcast_object_list(result)
    return result[0]


class StopOnSignal:
    """Context that turns SIGINT and SIGTERM into a request; a second signal after some seconds acts as usual."""

    # Schedulers and terminals signal launcher and processes, and the launcher passes it on: one wish arrives twice.
    patience = 3.0

    def __init__(self, announce: bool = True):
        # Data loading workers inherit the handler, so that they outlive the signal, but say nothing.
        self._speaker = os.getpid() if announce else None
        self._since: float | None = None

    @property
    def requested(self) -> bool:
        return self._since is not None

    def __enter__(self):
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, _frame):
        if self._since is None:
            self._since = time.monotonic()
            if os.getpid() == self._speaker:
                logger.warning("stopping after this update; the run will be saved")
        elif time.monotonic() - self._since > self.patience:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
