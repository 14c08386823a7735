"""Randomness as a function of a key, so that a run can be repeated, resumed or spread over processes.

A crop, a flip or a mask belongs to (seed, epoch, image), not to the worker, process or moment that draws it.
"""

import contextlib
import functools
import random
from collections.abc import Iterator

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64, a bijection in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(*key) -> np.ndarray:
    """Hash integers, or arrays of them broadcast against each other, to 64 well-mixed bits."""
    with np.errstate(over="ignore"):  # wrapping around is the point
        state = np.asarray(0, dtype=np.uint64)
        for part in key:
            state = _mix(state + _GOLDEN + np.asarray(part, dtype=np.int64).astype(np.uint64))
        return state


def keyed_uniform(seed: int, epoch: int, indices, n: int) -> np.ndarray:
    """Draw `n` numbers in [0, 1) for each image of `indices`, independent of the rest of the batch."""
    bits = _hash(seed, epoch, np.asarray(indices, dtype=np.int64)[:, None], np.arange(n))
    return (bits >> np.uint64(11)) * 2.0**-53  # (B, n): the 53 bits a double holds


def keyed_seed(*key: int) -> int:
    """Return a 32-bit seed for a key."""
    return int(_hash(*key) >> np.uint64(32))


@functools.cache
def purpose_seed(seed: int, purpose: str) -> int:
    """Return a seed for one purpose, so that draws for different purposes are independent."""
    return keyed_seed(seed, *purpose.encode())


def seed_generators(*key: int) -> None:
    """Seed the global generators of Python, numpy and torch (CPU) by a key; only inside `preserve_rng_state`."""
    seed = keyed_seed(*key)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch (CPU) on leaving.

    For library code (timm's augmentations) that draws from global generators. Keeping numpy's state costs 0.2 ms, so
    keep it once per batch and seed for every image.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@contextlib.contextmanager
def keyed_rng(*key: int) -> Iterator[None]:
    """Seed the global generators by a key and restore them on leaving."""
    with preserve_rng_state():
        seed_generators(*key)
        yield
