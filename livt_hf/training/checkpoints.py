"""Checkpoints that are either whole or absent: written aside, flushed, then renamed."""

import contextlib
import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.errors import LiVTError
from livt_hf.files import flush, read_record, replacing
from livt_hf.runs import Run
from livt_hf.text import format_error

STATE, SCALER = "state.json", "scaler.pt"


class CheckpointError(LiVTError):
    """Raised if a checkpoint cannot be written or read; the message says what is still there."""


@dataclass
class Progress:
    """Progress of a run; saved with every checkpoint."""

    update: int = 0
    # Losses since the last line of the log, so that a resumed run writes the same line.
    pending: list[float] = field(default_factory=list)
    # Of `select best`: the best epoch and its metric on the validation split, whichever `select_metric` names.
    best_epoch: int | None = None
    best_accuracy: float | None = None
    seconds: float = 0.0
    # Digest of the training images (`data.labels.digest_of`); None in runs from before there was one.
    trained_on: str | None = None
    total: int | None = None  # updates of the whole training, where that was fitted to the time on the way


def list_checkpoints(run: Run) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    found = run.checkpoints.glob("step-*") if run.checkpoints.is_dir() else []
    numbered = {folder: folder.name.removeprefix("step-") for folder in found}
    return sorted((folder for folder in numbered if numbered[folder].isdecimal()), key=lambda f: int(numbered[f]))


def save_checkpoint(accelerator: Accelerator, run: Run, parts: Mapping, state: dict, keep: int) -> None:
    """Save `state`, which names the update, and the parts of a training (modules, optimizers) by file name.

    No process has a state of its own, so a run may be resumed with another number of processes.
    """
    folder = run.checkpoints / f"step-{state['update']}"
    if accelerator.is_main_process and not folder.exists():  # the same update of the same run is the same state
        with explain_save_errors(f"the checkpoint of update {state['update']}", run), replacing(folder) as writing:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            for name, part in parts.items():
                if isinstance(part, nn.Module):
                    save_model(part, str(writing / name))
                else:
                    torch.save(part.state_dict(), writing / name)
            files = {name: (writing / name).stat().st_size for name in parts}
            sums = {name: _checksum(writing / name) for name in parts}
            (writing / STATE).write_text(json.dumps(state | {"files": files, "checksums": sums}), encoding="utf-8")
            flush(*writing.iterdir(), writing)
        flush(run.checkpoints)
    if accelerator.is_main_process:
        for old in list_checkpoints(run)[:-keep]:
            # Renamed first: a kill while deleting must not leave half a checkpoint under the name of a whole one.
            shutil.rmtree(old.rename(old.with_name(f".removing-{old.name}")))
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, run: Run, parts: Mapping) -> dict | None:
    """Restore the newest checkpoint and return its state; None if there is no checkpoint."""
    if accelerator.is_main_process and run.checkpoints.is_dir():
        for leftover in [*run.checkpoints.glob(".writing-*"), *run.checkpoints.glob(".removing-*")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()  # weights of --select best
    found = list_checkpoints(run)
    if not found:
        return None
    folder = found[-1]
    state = read_state(folder)
    files, sums = state.pop("files"), state.pop("checksums", {})  # what is older than checksums has sizes alone
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else 0
        wrong = f"{actual} bytes instead of {size}" if actual != size else "other bytes than were written"
        if actual != size or (name in sums and _checksum(path) != sums[name]):
            raise CheckpointError(
                f"{path} has {wrong}: the checkpoint was damaged after it was written; delete {folder} to go on from "
                "the one before."
            )
    try:
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                load_model(part, str(folder / name))
            elif name in files or name != SCALER:  # without fp16 there was none: the scale of the loss begins anew
                part.load_state_dict(torch.load(folder / name, map_location="cpu", weights_only=True))
    except Exception as error:  # what torch's unpickler and safetensors make of damage is no short list
        raise CheckpointError(
            f"could not read {folder}: {format_error(error)}; if damaged, delete it to resume from the one before."
        ) from error
    return state


def read_state(folder: Path) -> dict:
    """Read the state of a checkpoint: the progress of its run, and its files."""
    try:
        hints = get_type_hints(Progress) | {"files": dict[str, int], "checksums": dict[str, int]}
        state = read_record(folder / STATE, hints, required=("update", "files"))
        if unknown := sorted(state.keys() - hints):
            raise LiVTError(f"{unknown[0]} is not known")
    except LiVTError as error:
        raise CheckpointError(
            f"{folder} has no readable {STATE} ({error}); delete it to resume from the one before."
        ) from error
    return state


@contextlib.contextmanager
def explain_save_errors(what: str, run: Run) -> Iterator[None]:
    """Turn an error while saving, such as a full disk, into one that says which checkpoint is intact."""
    try:
        yield
    # torch.save and safetensors report a full disk in their own ways.
    except (OSError, RuntimeError, SafetensorError) as error:
        left = list_checkpoints(run)
        kept = f"the last checkpoint, {left[-1]}, is intact" if left else "there is no checkpoint yet"
        raise CheckpointError(f"could not save {what}: {format_error(error)}; {kept}.") from error


def save_final(folder: Path, *parts: PreTrainedModel | BaseImageProcessor) -> None:
    """Save a model and its image processor to a folder; a kill leaves each file as it was before or as it will be."""
    writing = folder / ".writing-model"
    shutil.rmtree(writing, ignore_errors=True)
    try:
        for part in parts:
            part.save_pretrained(writing)
        for file in writing.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def save_best(run: Run, module: nn.Module, epoch: int) -> None:
    """Save the weights of the best epoch so far, and remove those that no checkpoint refers to.

    One file per epoch, so that a checkpoint and the weights it refers to belong together whenever a run is killed.
    """
    path = _best_path(run, epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    with explain_save_errors("the best weights", run), replacing(path) as writing:
        save_model(module, str(writing))
    referenced = [read_state(folder).get("best_epoch") for folder in list_checkpoints(run)]
    for old in set(path.parent.glob("best-*.safetensors")) - {path, *(_best_path(run, one) for one in referenced)}:
        old.unlink()


def load_best(run: Run, module: nn.Module, epoch: int | None) -> None:
    """Load what `save_best` has saved."""
    path = _best_path(run, epoch)
    try:
        load_model(module, str(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"could not read {path}: {format_error(error)}.") from error


def _best_path(run: Run, epoch: int | None) -> Path:
    return run.checkpoints / f"best-{epoch}.safetensors"


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file, to detect damage."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            total = zlib.crc32(block, total)
    return total
