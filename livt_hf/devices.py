"""Devices, precision and threads: everything the machine has and nothing it only pretends to have."""

import os
import subprocess
import sys

import torch
from accelerate.utils import DistributedType, parse_flag_from_env

# Each gives a process a part of the model; the loop, its checkpoints and its evaluations take whole ones.
_SPLITTING = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
}


def available_cores() -> int:
    """The cores this process may use; only Linux tells them from those of the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def use_all_cores(device: torch.device, threads: int | None = None) -> None:
    """Give a CPU process its share of the cores: `accelerate launch` pins it to one, whatever the machine has."""
    if device.type == "cpu":
        share = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(threads or max(1, share))
    else:
        torch.set_float32_matmul_precision("high")


def check_processes(num_processes: int) -> None:
    """Refuse processes that were launched together and do not see each other."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != num_processes:
        raise ValueError(
            f"{launched} processes were launched and none sees the others: Accelerate wants ACCELERATE_USE_CPU=1 in "
            "the environment for several processes without a GPU."
        )


def check_distribution(distributed_type: DistributedType) -> None:
    """Refuse launchers that split the model over processes."""
    if distributed_type in _SPLITTING:
        raise ValueError(
            f"{_SPLITTING[distributed_type]} is not supported: every model of the paper fits one GPU, so use DDP, "
            "that is plain `accelerate launch --num_processes N`, with no such plugin in Accelerate's own config."
        )


def choose_precision(asked: str) -> str:
    """Accelerate's `mixed_precision`; "auto" is half precision on a CUDA GPU and none elsewhere."""
    cuda = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    cpu = not cuda and not torch.backends.mps.is_available()
    if asked == "auto":
        if not cuda:
            return "no"
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    if cpu and asked == "fp16":
        raise ValueError("mixed_precision fp16 needs a GPU; use no.")
    if cpu and asked == "bf16" and not cpu_computes_bf16():
        raise ValueError("this CPU has no bf16 or only emulates it, far slower than float32; use mixed_precision no.")
    return asked


def cpu_computes_bf16() -> bool:
    """Whether bf16 matrices multiply faster than float32 ones; in a process of its own, for some CPUs die trying."""
    code = (
        "import torch, time\n"
        "def seconds(t):\n"
        "    a = torch.ones(512, 512, dtype=t); a @ a\n"
        "    start = time.perf_counter(); a @ a; return time.perf_counter() - start\n"
        "raise SystemExit(seconds(torch.bfloat16) > seconds(torch.float32))"
    )
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0
