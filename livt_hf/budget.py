"""How much training fits into a given time: plain arithmetic, without torch."""

import time
from collections.abc import Callable

# The clock that budgets are counted by. recipes/benchmarks/race.py takes the processor's time instead.
clock: Callable[[], float] = time.perf_counter


def epochs_within(seconds: float, seconds_per_epoch: float) -> int:
    """Whole epochs that fit; at least one, for less is no training."""
    return max(1, int(seconds / seconds_per_epoch))
