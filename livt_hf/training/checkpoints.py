"""Checkpoints that are either whole or absent: written aside, flushed, then renamed."""

import json
import pickle
import shutil
from pathlib import Path

from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from livt_hf.errors import LiVTError
from livt_hf.runs import Run
from livt_hf.system import flush, rename

STATE = "state.json"


class CheckpointError(LiVTError):
    """A checkpoint could not be written or read; the message says what is still there."""


def independent_of_processes(accelerator: Accelerator) -> None:
    """Have Accelerate save the bare model, so that a run may go on with another number of processes.

    Left to itself it saves the DDP wrapper's key names.
    """

    def save(models, weights, folder):
        weights.clear()
        if accelerator.is_main_process:
            save_model(accelerator.unwrap_model(models[0]), str(Path(folder, "model.safetensors")))

    def load(models, folder):
        load_model(accelerator.unwrap_model(models.pop()), str(Path(folder, "model.safetensors")))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def keep_in_checkpoints(accelerator: Accelerator, module: nn.Module, name: str) -> None:
    """Have checkpoints hold another module, which no optimizer trains, as `name`.safetensors.

    What goes through Accelerate's `register_for_checkpointing` is unpickled freely on resuming: a run folder from
    elsewhere could run any code.
    """

    def save(_models, _weights, folder):
        if accelerator.is_main_process:
            save_model(module, str(Path(folder, f"{name}.safetensors")))

    def load(_models, folder):
        load_model(module, str(Path(folder, f"{name}.safetensors")))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def checkpoints(run: Run) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = run.checkpoints.glob("step-*") if run.checkpoints.is_dir() else []
    return sorted(found, key=lambda folder: int(folder.name.removeprefix("step-")))


def save_checkpoint(accelerator: Accelerator, run: Run, state: dict, keep: int) -> None:
    """Save model, optimizer, kept modules and random states with `state`, which names the update."""
    folder = run.checkpoints / f"step-{state['update']}"
    if folder.exists():  # the same update of the same run is the same state
        return
    writing = run.checkpoints / f".writing-{folder.name}"
    try:
        if accelerator.is_main_process:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(writing))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            written = sorted(path for path in writing.rglob("*") if path.is_file())
            files = {path.relative_to(writing).as_posix(): path.stat().st_size for path in written}
            (writing / STATE).write_text(json.dumps(state | {"files": files}), encoding="utf-8")
            flush(*writing.rglob("*"), writing)
            rename(writing, folder)
            flush(run.checkpoints)
    # torch.save and safetensors report a full disk in their own ways.
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        left = checkpoints(run)
        kept = f"the previous one, {left[-1]}, is intact" if left else "there is no earlier one"
        raise CheckpointError(
            f"could not save the checkpoint of update {state['update']}: {error}; {kept}."
        ) from error
    if accelerator.is_main_process:
        for old in checkpoints(run)[:-keep]:
            # Renamed first: a kill while deleting must not leave half a checkpoint under the name of a whole one.
            shutil.rmtree(rename(old, old.with_name(f".removing-{old.name}")))
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, run: Run) -> dict | None:
    """Put everything back as it was at the newest checkpoint; None where there is none."""
    if accelerator.is_main_process and run.checkpoints.is_dir():
        for leftover in [*run.checkpoints.glob(".writing-*"), *run.checkpoints.glob(".removing-*")]:
            shutil.rmtree(leftover)
    found = checkpoints(run)
    if not found:
        return None
    folder = found[-1]
    state = _read_state(folder)
    for name, size in state.pop("files").items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else 0
        if actual != size:
            raise CheckpointError(
                f"{path} has {actual} bytes instead of {size}: the checkpoint was damaged after it was written; "
                f"delete {folder} to go on from the one before."
            )
    try:
        accelerator.load_state(str(folder))
    except (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"could not read {folder}: {error}; if it is damaged, delete it to go on from the one before."
        ) from error
    return state


def _read_state(folder: Path) -> dict:
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no readable {STATE}; delete it to go on from the one before.") from error
