"""Recipes in processes of their own, forked from a server that has everything imported, so that one costs a second."""

import errno
import importlib
import io
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from livt_hf.cli import console
from livt_hf.runs import Run

RECIPES = Path(__file__).parents[1] / "recipes"
# A model of four patches on pictures of 8 x 8 pixels: an update takes some 20 ms.
TINY = "--model_size micro --image_size 8 --batch_size 16 --epochs 3 --warmup_epochs 1 --threads 1".split()
DEADLINE = 120

METHODS = multiprocessing.get_all_start_methods()  # the first is that of data loading workers
_context = multiprocessing.get_context("forkserver" if "forkserver" in METHODS else None)
if "forkserver" in METHODS:
    _context.set_forkserver_preload(
        ["livt_hf.training.loop", "livt_hf.training.finetune", "livt_hf.training.pretrain", "livt_hf.reports"]
    )


def make_pictures(folder: Path, train: tuple[int, ...] = (30, 18, 10, 6), test: int = 11, size=(8, 8)) -> Path:
    """An image folder of a few long-tailed classes that differ in colour: 64 and 44 pictures unless told otherwise."""
    rng = np.random.RandomState(0)
    for split, counts in {"train": train, "test": [test] * len(train)}.items():
        for label, count in enumerate(counts):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = rng.randint(0, 160, (size[1], size[0], 3)) + np.eye(4, 3, dtype=int)[label] * 90
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return folder


def flat(settings) -> SimpleNamespace:
    """Return the options of settings by name, as arguments.yaml has them."""
    return SimpleNamespace(stage=settings.stage, **settings.to_dict())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _recipe(name: str, argv: list[str], output: str, environment: dict, sabotage: Callable | None, arguments: tuple):
    os.setpgrp()
    multiprocessing.set_start_method(METHODS[0], force=True)  # as in a process that no server forked
    os.environ.update(environment)
    datasets.config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])
    torch.set_num_threads(1)  # as under `accelerate launch`
    console.FIRST_PROCESS_TIMEOUT = 1  # there is no launcher that would end the others
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    if sabotage is not None:
        sabotage(*arguments)
    recipe = importlib.import_module(f"livt_hf.recipes.{name}")
    console.run_command(lambda: recipe.main(argv))


class RecipeRun:
    """A recipe under way on one or several processes, its run folder and what it printed."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *options,
        processes: int = 1,
        sabotage: tuple = (None,),
        output: Path | None = None,
    ):
        self.folder, self.output = folder, output or folder.with_suffix(".txt")
        place = "--resume" if "--resume" in options else "--report" if name == "eval" else "--output_dir"
        argv = [str(option) for option in options if option != "--resume"] + [place, str(folder)]
        common = {"ACCELERATE_USE_CPU": "1", "HF_DATASETS_CACHE": str(folder.parent / "cache")}
        port = free_port()
        self.processes = []
        for rank in range(processes):
            environment = common
            if processes > 1:
                environment = common | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            arguments = name, argv, str(self.output), environment, sabotage[0], sabotage[1:]
            self.processes.append(_context.Process(target=_recipe, args=arguments))
            self.processes[-1].start()

    def wait(self) -> int:
        """The exit code of the first process."""
        for process in self.processes:
            process.join(DEADLINE)
            assert process.exitcode is not None, self.printed
        return self.processes[0].exitcode

    def finish(self) -> Run:
        assert self.wait() == 0, self.printed
        return Run(self.folder)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something is so, while the run is going on."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert self.processes[0].exitcode is None and time.monotonic() < end, self.printed
            time.sleep(0.005)

    def signal(self, number: signal.Signals) -> None:
        """To every process and its data loading workers, as a terminal would."""
        for process in self.processes:
            os.killpg(process.pid, number)

    @property
    def printed(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def logged(self) -> int:
        """Lines in log.jsonl."""
        path = self.folder / "log.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    """Bit for bit."""
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


class Trap:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


# Ways for a process to go wrong, applied before a recipe starts.


def kill_at(function: str, place: str, call: int) -> None:
    """SIGKILL itself instead of calling `os.<function>` for the `call`-th time on a path that contains `place`."""
    original, calls = getattr(os, function), []

    def killing(path, *rest, **options):
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        if place in name:
            calls.append(name)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(path, *rest, **options)

    setattr(os, function, killing)


def impatient() -> None:
    """Do not wait for a run that another process is at work in."""
    import livt_hf.runs

    livt_hf.runs.LOCK_TIMEOUT = 0


def no_room(place: str) -> None:
    """Refuse to open files for writing whose path contains `place`, as a full disk does."""
    original = io.open

    def refusing(file, mode="r", *rest, **options):
        if place in str(file) and set(mode) & set("wax"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return original(file, mode, *rest, **options)

    io.open = refusing  # which is what pathlib calls


def slow_saving(seconds: float) -> None:
    """Spend time in the middle of every save, with some files written and others not."""
    import livt_hf.training.checkpoints as checkpoints

    original = checkpoints.save_model

    def slowly(*arguments):
        original(*arguments)
        time.sleep(seconds)

    checkpoints.save_model = slowly
