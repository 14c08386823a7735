"""Cores and threads of a process."""

import ctypes
import os
import platform

import torch


def available_cores() -> int:
    """Return the number of cores this process may use; only Linux tells them from those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def configure_threads(device: torch.device, threads: int | None = None) -> None:
    """Give a CPU process its share of the cores; `accelerate launch` pins it to one."""
    if device.type == "cpu":
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(threads or max(1, available_cores() // processes))
        _keep_freed_memory()
    else:
        torch.set_float32_matmul_precision("high")


def _keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed tensors.

    By default it returns every large one to the system: half of the time that a convolutional network takes.
    """
    if platform.libc_ver()[0] == "glibc":
        m_mmap_threshold, m_trim_threshold = -3, -1  # malloc.h
        for parameter in (m_mmap_threshold, m_trim_threshold):
            ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)
