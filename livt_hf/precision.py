"""Precision of models: what a CPU computes in, and the choice of bfloat16 where it is faster and says the same."""

import contextlib
import functools
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from livt_hf.errors import LiVTError

logger = logging.getLogger(__name__)

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"
PRECISION_NAMES = {"no": FLOAT32, "bf16": BFLOAT16, "fp16": "float16"}  # by Accelerate's `mixed_precision`
GAIN, TOLERANCE = 1.05, 0.02  # least speed-up, and largest difference of a posterior
MIN_PARAMETERS = 1_000_000  # below that, what is spent on conversions is not gained
MIN_IMAGES, TRIAL_IMAGES = 256, 16  # images that make a trial worth its time, and those it looks at
_TIMED = 2
clock: Callable[[], float] = time.perf_counter


@functools.cache
def has_fast_cpu_bf16() -> bool:
    """Return True if the CPU multiplies bf16 matrices itself, or emulates it well enough to be of use.

    It is tried once, in a process of its own, as some CPUs crash. With AVX-512 the emulation takes 1.3 times as long
    as float32, without it 100 to 500 times. The limit lies between, so that a busy machine does not change the answer.
    """
    code = (
        "import torch, timeit\n"
        "def seconds(t):\n"
        "    a = torch.ones(512, 512, dtype=t); a @ a\n"
        "    return min(timeit.repeat(lambda: a @ a, repeat=3, number=1))\n"
        "raise SystemExit(seconds(torch.bfloat16) > 20 * seconds(torch.float32))"
    )
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


@functools.cache
def has_cpu_bf16() -> bool:
    """Return True if the CPU has instructions for bf16 (AVX512-BF16 or AMX), as only Linux says, and runs them."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return ("avx512_bf16" in words or "amx_bf16" in words) and has_fast_cpu_bf16()


def is_large_enough(model: nn.Module) -> bool:
    """Return True if a model has enough parameters to gain by bfloat16."""
    return sum(parameter.numel() for parameter in model.parameters()) >= MIN_PARAMETERS


def autocast(device: torch.device, precision: str | None) -> contextlib.AbstractContextManager:
    """Return the context in which a model computes in a precision; float32 changes nothing."""
    return torch.autocast(device.type, torch.bfloat16) if precision == BFLOAT16 else contextlib.nullcontext()


def resolve_precision(
    requested: str,
    model: nn.Module,
    num_images: int,
    read_batch: Callable[[], Tensor | None],
    forward: Callable[[Tensor], Tensor],
    posterior: Callable[[Tensor], Tensor],
) -> str:
    """Return the precision in which a model is run without training.

    "auto" is float32, except on a CPU with bf16 where the model and the number of images are large enough for a trial,
    and the trial says that bfloat16 pays. On a GPU it is float32.

    Args:
        requested: "auto", "float32" or "bfloat16".
        model: the model, on its device.
        num_images: so many images are to be run.
        read_batch: returns the pixels of a first batch; None where there are none.
        forward: what is computed of pixels.
        posterior: class probabilities of that, by which the precisions are compared.

    Returns:
        "float32" or "bfloat16".
    """
    device = next(model.parameters()).device
    if requested == BFLOAT16 and device.type == "cpu" and not has_fast_cpu_bf16():
        message = "this CPU has no bf16 or only emulates it, far slower than float32; use precision float32."
        raise LiVTError(message, argument="precision")
    if requested != AUTO:
        return requested
    if device.type != "cpu" or num_images < MIN_IMAGES or not is_large_enough(model) or not has_cpu_bf16():
        return FLOAT32
    pixels = read_batch()
    return BFLOAT16 if pixels is not None and bfloat16_pays(forward, pixels, posterior) else FLOAT32


def agree_on_precision(precision: str) -> str:
    """Return the precision that all processes have chosen, or float32 where they differ."""
    return precision if set(gather_object([precision])) == {precision} else FLOAT32


@torch.inference_mode()
def bfloat16_pays(forward: Callable[[Tensor], Tensor], pixels: Tensor, posterior: Callable[[Tensor], Tensor]) -> bool:
    """Return True if bfloat16 is faster by 5 % and changes no posterior of a batch by more than 0.02."""
    outputs, seconds = {}, {}
    for precision in (FLOAT32, BFLOAT16):
        with autocast(pixels.device, precision):
            outputs[precision] = forward(pixels).float()  # warms up, too
            times = []
            for _ in range(_TIMED):
                began = clock()
                forward(pixels)
                times.append(clock() - began)
        seconds[precision] = min(times)
    change = (posterior(outputs[BFLOAT16]) - posterior(outputs[FLOAT32])).abs().max().item()
    gain = seconds[FLOAT32] / seconds[BFLOAT16]
    pays = gain > GAIN and change <= TOLERANCE  # NaN fails the check
    chosen = BFLOAT16 if pays else FLOAT32
    logger.info("precision %s: bfloat16 is %.2f times as fast and changes posteriors by %.3f", chosen, gain, change)
    return pays


def similarity_posterior(features: Tensor, temperature: float = 0.07) -> Tensor:
    """Return how much each image is like each one of the batch, as kNN would say: probabilities (B, B) of features."""
    unit = nn.functional.normalize(features.flatten(1), dim=-1)
    return (unit @ unit.T / temperature).softmax(-1)
