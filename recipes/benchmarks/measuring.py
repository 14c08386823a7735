"""How the benchmarks measure: ways take turns in one run, medians are kept, ratios above 1 are in our favour."""

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable

import psutil

# Rounds of a comparison after which it ends, however many were planned, once it has lasted so many seconds.
FEWEST, PATIENCE = 3, 25.0


def say(what: str) -> None:
    """What is measured now, for whoever waits."""
    print(f"  {what}", file=sys.stderr, flush=True)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def processor_seconds(work: Callable[[], object]) -> float:
    """The same of the processor's time, which a busy machine disturbs less."""
    started = time.process_time()
    work()
    return time.process_time() - started


def median_seconds(
    ways: dict[str, Callable[[], object]], repeats: int, clock: Callable[[Callable], float] = seconds
) -> dict[str, float]:
    """Every way takes its turn in every round, so that a busy moment of the machine meets all; round one warms up."""
    for work in ways.values():
        work()
    times = {name: [] for name in ways}
    started = time.perf_counter()
    for done in range(repeats):
        if done >= FEWEST and time.perf_counter() - started > PATIENCE:
            break
        for name, work in ways.items():
            times[name].append(clock(work))
    return {name: statistics.median(values) for name, values in times.items()}


def compared(question: str, values: dict[str, float], unit: str, smaller_is_better: bool = False) -> list[dict]:
    """Return a row for each peer of `values["ours"]`."""
    ours = values["ours"]
    return [
        {
            "question": question,
            "ours": ours,
            "peer": theirs,
            "peer_name": name,
            "ratio": theirs / ours if smaller_is_better else ours / theirs,
            "unit": unit,
        }
        for name, theirs in values.items()
        if name != "ours"
    ]


def ratio_words(row: dict) -> str:
    """Format the ratio with its range over runs, and whether that leaves open who is faster."""
    low, high = row.get("ratio_range", (row["ratio"],) * 2)
    if low == high:
        return f"{row['ratio']:.2f}"
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f}{', no difference' if low <= 1 <= high else ''})"


def peak_megabytes(work: Callable[[], object], children: bool = False) -> float:
    """Growth of the process's resident memory while `work` runs, looked at every half millisecond.

    With `children`, of the processes it starts, which are too many to look at so often.
    """
    process = psutil.Process()
    done = threading.Event()

    def resident() -> int:
        total = 0
        for one in process.children(recursive=True) if children else [process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
        return total

    before = peak = resident()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.2 if children else 0.0005):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(0, peak - before) / 2**20
