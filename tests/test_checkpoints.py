"""Checkpoints are whole or absent, and say what is wrong with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from livt_hf.runs import Run
from livt_hf.training.checkpoints import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    save_final,
)


class Trained:
    """A model and its optimizer under Accelerate, with nothing of ours but the checkpoints."""

    def __init__(self, folder: Path):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        model = nn.Linear(300, 300)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.parts = {"model.safetensors": model, "optimizer.bin": self.optimizer}
        self.run = Run(folder)

    def step(self) -> None:
        self.model(torch.ones(4, 300)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, update: int, keep: int = 2, **state) -> None:
        save_checkpoint(self.accelerator, self.run, self.parts, {"update": update, **state}, keep)

    def load(self) -> dict | None:
        return load_checkpoint(self.accelerator, self.run, self.parts)

    def names(self) -> list[str]:
        return [path.name for path in list_checkpoints(self.run)]


@pytest.fixture
def trained(tmp_path) -> Trained:
    return Trained(tmp_path)


def test_a_run_that_goes_from_bf16_to_fp16_begins_with_a_fresh_scale_of_its_loss(trained, tmp_path):
    trained.save(1)
    other = Trained(tmp_path)
    other.parts["scaler.pt"] = scaler = torch.amp.GradScaler("cpu")
    assert other.load() == {"update": 1}
    scaler.scale(torch.ones(1))
    scaler.update(512.0)
    other.save(2)
    scaler.update(1.0)
    other.load()
    assert scaler.get_scale() == 512  # from now on it is kept


def test_a_checkpoint_brings_back_model_optimizer_and_state(trained, tmp_path):
    trained.step()
    trained.save(1, pending=[0.1, 2.5], best_epoch=None)
    trained.step()
    expected = trained.model.weight.clone()

    other = Trained(tmp_path)
    assert other.load() == {"update": 1, "pending": [0.1, 2.5], "best_epoch": None}
    other.step()
    assert torch.equal(other.model.weight, expected)


def test_only_the_newest_checkpoints_are_kept_and_a_copy_beside_them_is_none(trained):
    assert trained.load() is None
    for update in (2, 9, 10, 11):  # by number: as text, 9 would come after 11
        trained.save(update, keep=2)
    assert sorted(path.name for path in trained.run.checkpoints.iterdir()) == ["step-10", "step-11"]
    shutil.copytree(trained.run.checkpoints / "step-10", trained.run.checkpoints / "step-10 (copy)")
    assert trained.names() == ["step-10", "step-11"]


def test_leftovers_of_a_kill_are_cleared_away_and_never_loaded(trained):
    trained.save(1)
    whole = trained.run.checkpoints / "step-1"
    for leftover in (".writing-step-2", ".removing-step-0"):
        shutil.copytree(whole, whole.with_name(leftover))
    whole.with_name(".writing-best-3.safetensors").touch()  # of --select best
    assert trained.load()["update"] == 1
    assert [path.name for path in trained.run.checkpoints.iterdir()] == ["step-1"]


def flip_bit(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def noise(data: bytes) -> bytes:
    return b"\xff" * len(data)


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("model.safetensors", half, "bytes instead of"),
        ("optimizer.bin", half, "bytes instead of"),
        ("optimizer.bin", lambda data: None, "has 0 bytes instead of"),
        ("model.safetensors", noise, "has other bytes"),
        ("optimizer.bin", noise, "has other bytes"),
        ("model.safetensors", flip_bit(-1000), "has other bytes"),
        ("large.safetensors", flip_bit(5000), "has other bytes"),  # in the first of two blocks
        ("state.json", half, "state.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_its_file(trained, name, damage, named):
    if name == "large.safetensors":
        trained.parts[name] = nn.Linear(1100, 1100)  # 4.8 MB
    trained.save(1)
    path = trained.run.checkpoints / "step-1" / name
    whole = path.read_bytes()
    data = damage(whole)
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(CheckpointError, match=named) as raised:
        trained.load()
    text = str(raised.value)
    assert str(path if name != "state.json" else path.parent) in text and "delete" in text
    if damage is half and name != "state.json":
        assert f"{len(data)} bytes instead of {len(whole)}" in text


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_noise_in_a_checkpoint_from_before_there_were_checksums_is_named(trained, name):
    trained.save(1)
    folder = trained.run.checkpoints / "step-1"
    (folder / name).write_bytes(noise((folder / name).read_bytes()))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({k: v for k, v in state.items() if k != "checksums"}))
    with pytest.raises(CheckpointError, match="step-1"):
        trained.load()


@pytest.mark.parametrize("room", [20_000, 500_000])
def test_the_previous_checkpoint_survives_a_disk_that_fills_up(trained, tmp_path, room):
    """A limit on the size of a file stands for the disk: the weights have 360 kB, the moments twice that."""
    trained.step()
    trained.save(1)
    before = trained.model.weight.clone()
    trained.step()
    resource = pytest.importorskip("resource")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
    try:
        with pytest.raises(CheckpointError) as raised:
            trained.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "could not save the checkpoint of update 2" in str(raised.value)
    assert f"the last checkpoint, {trained.run.checkpoints / 'step-1'}, is intact" in str(raised.value)
    assert [path.name for path in trained.run.checkpoints.iterdir()] == ["step-1"]

    other = Trained(tmp_path)
    assert other.load()["update"] == 1
    assert torch.equal(other.model.weight, before)


def test_a_disk_that_is_full_from_the_start_is_said_to_hold_no_checkpoint(trained, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device; there is no checkpoint yet"):
        trained.save(1)
    assert trained.names() == []


def test_every_file_of_a_checkpoint_is_accounted_for(trained):
    trained.save(3)
    folder = trained.run.checkpoints / "step-3"
    listed = json.loads((folder / "state.json").read_text())["files"]
    assert listed.keys() == {path.name for path in folder.iterdir()} - {"state.json"}
    assert {"model.safetensors", "optimizer.bin"} <= listed.keys()


def test_a_final_model_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    """`livt train` may keep the model that it is to write again."""

    class Part:
        def __init__(self, text, fails=False):
            self.text, self.fails = text, fails

        def save_pretrained(self, folder):
            folder.mkdir(exist_ok=True)
            (folder / "model.safetensors").write_text(self.text)
            if self.fails:
                raise OSError("disk full")

    save_final(tmp_path, Part("first"))
    (tmp_path / ".writing-model").mkdir()  # of a kill
    (tmp_path / ".writing-model" / "model.safetensors").write_text("sec")
    with pytest.raises(OSError, match="full"):
        save_final(tmp_path, Part("second", fails=True))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.safetensors", "first")]
    save_final(tmp_path, Part("second"))
    assert (tmp_path / "model.safetensors").read_text() == "second"
