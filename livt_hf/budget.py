"""How much training fits into a given time: plain arithmetic, without torch."""

import time
from collections.abc import Callable

# The clock that budgets are counted by. recipes/benchmarks/race.py takes the processor's time instead.
clock: Callable[[], float] = time.perf_counter


def epochs_within(seconds: float, seconds_per_epoch: float) -> int:
    """Whole epochs that fit; at least one, for less is no training."""
    return max(1, int(seconds / seconds_per_epoch))


# Compiling takes 30 to 60 seconds and makes a step of the micro ViT 1.04 to 1.23 times as fast on a CPU: at 1.04, 60
# seconds are earned back after 26 minutes.
COMPILING_PAYS_AFTER = 30 * 60


def compiling_pays(seconds: float, device: str) -> bool:
    """Of a training that takes so long without: always on a GPU, and on a CPU where it is long enough."""
    return device not in ("cpu", "mps") or (device == "cpu" and seconds >= COMPILING_PAYS_AFTER)
