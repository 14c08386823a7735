"""What Linux, macOS and Windows do differently, by taking away here what is missing there."""

import ast
import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from test_loading import make, same
from torch.utils._pytree import tree_leaves

import livt_hf.system
from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.commands import run_command
from livt_hf.data.batches import Batches
from livt_hf.data.loading import augmented_in_order, eval_loader, train_loader
from livt_hf.data.sources import load_long_tailed
from livt_hf.data.transforms import DeviceTransform, FinetuneAugmentation, eval_processor
from livt_hf.errors import LiVTError
from livt_hf.hub.scrubbing import Scrubber, named_places, refuse_secrets
from livt_hf.long_tail.calibration import Calibration, fit_calibration
from livt_hf.long_tail.losses import LOSSES
from livt_hf.metrics import LongTailMetrics
from livt_hf.recipes import cli, sweep, train
from livt_hf.recipes.ablations import SWEEPS
from livt_hf.settings import DataSettings
from livt_hf.system import flush, outlive_ctrl_c, rename, shell_line, shell_words

ROOT = Path(__file__).parents[1]


# Files


def test_files_are_flushed_where_folders_cannot_be_opened_and_reading_is_not_enough(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"1")
    opened, flushed = {}, []
    real_open, real_fsync = os.open, os.fsync

    def windows_open(path, flags):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        descriptor = real_open(path, flags)
        opened[descriptor] = (Path(path), flags)
        return descriptor

    def windows_fsync(descriptor):
        path, flags = opened[descriptor]
        if not flags & os.O_RDWR:
            raise OSError(9, "Bad file descriptor")
        flushed.append(path)
        real_fsync(descriptor)

    monkeypatch.delattr(os, "O_DIRECTORY", raising=False)
    monkeypatch.setattr(os, "open", windows_open)
    monkeypatch.setattr(os, "fsync", windows_fsync)
    flush(file, tmp_path)
    assert flushed == [file]


def test_renaming_waits_for_a_scanner_where_an_open_file_stands_in_the_way(tmp_path, monkeypatch):
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    refusals, waited, replace = [1, 2], [], os.replace

    def held_open(path, target):
        if refusals:
            refusals.pop()
            raise PermissionError(13, "Access is denied")
        replace(path, target)

    monkeypatch.setattr(os, "replace", held_open)
    monkeypatch.setattr(livt_hf.system.time, "sleep", waited.append)
    monkeypatch.setattr(os, "O_DIRECTORY", 0, raising=False)
    with pytest.raises(PermissionError):  # elsewhere a refusal is meant
        rename(tmp_path / "new", tmp_path / "old")
    assert not waited
    monkeypatch.delattr(os, "O_DIRECTORY")
    refusals.append(1)
    assert rename(tmp_path / "new", tmp_path / "old") == tmp_path / "old"
    assert (tmp_path / "old").read_text() == "new" and len(waited) == 2


def text_calls(path: Path) -> list[ast.Call]:
    """Calls that read or write a text file."""
    found = []
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
            modes = [word.value for word in call.args if isinstance(word, ast.Constant)]
            as_file = name == "open" and modes[-1:] and modes[-1] in ("r", "w", "a", "x", "rt", "wt")
            if name in ("read_text", "write_text") or as_file:
                found.append(call)
    return found


def test_every_text_file_is_said_to_be_utf_8():
    """Windows would read and write its own encoding, which has no letters for most names of classes."""
    files = [path for folder in ("livt_hf", "recipes") for path in sorted((ROOT / folder).rglob("*.py"))]
    calls = [(path, call) for path in files for call in text_calls(path)]
    assert calls
    silent = [
        f"{path}:{call.lineno}" for path, call in calls if "encoding" not in [word.arg for word in call.keywords]
    ]
    assert silent == []


def test_runs_of_sweeps_have_names_that_every_file_system_takes():
    for name in SWEEPS:
        plan = sweep.Plan(sweep.SweepSettings(sweep=name), list(SWEEPS[name].variants))
        for folder in plan.runs:
            assert not set(folder.name) & set('<>:"/\\|?*') and folder.name[-1] not in ". ", folder
        lower = [str(folder).lower() for folder in plan.runs]
        assert len(set(lower)) == len(lower)


# Words and paths


def test_what_a_command_says_is_utf_8_also_where_a_pipe_is_not(monkeypatch):
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="cp1252"))
    run_command(lambda: print("白头鹰"))
    sys.stdout.flush()
    assert pipe.getvalue().decode("utf-8").strip() == "白头鹰"


@pytest.mark.parametrize("separator", ["/", "\\"])
def test_a_command_to_copy_is_quoted_as_the_shell_of_the_system_wants_it(monkeypatch, separator):
    monkeypatch.setattr(os, "sep", separator)
    words = ["livt", "finetune", "--resume", f"C:{separator}my birds{separator}1"]
    line = shell_line(words)
    quote = "'" if separator == "/" else '"'
    assert line == f"livt finetune --resume {quote}{words[-1]}{quote}"
    assert shell_words(line) == words
    assert shell_words('--name "a b" --tag #1') == ["--name", "a b", "--tag", "#1"]
    for word in ("|", f"R&D{separator}x", "don't", ""):
        assert shell_line([word]) != word and shell_words(shell_line([word, "x"])) == [word, "x"]


def test_a_quote_that_is_not_closed_is_one_sentence():
    with pytest.raises(LiVTError, match='"--loss \'ce" cannot be read as options: No closing quotation; close'):
        shell_words("--loss 'ce")


def test_a_folder_of_windows_is_no_hub_id_and_loses_the_separator_that_a_shell_appends(monkeypatch):
    with pytest.raises(LiVTError, match="does not exist: pass an image folder"):
        load_long_tailed("C:\\nowhere")
    monkeypatch.setattr(os, "sep", "\\")
    assert DataSettings(dataset="C:\\birds\\").dataset == DataSettings(dataset="C:\\birds").dataset == "C:\\birds"


def test_the_whole_disk_is_no_place_that_must_be_hidden():
    assert Scrubber().value({"source": "/"}) == {"source": "/"} and named_places({"source": "/"}) == set()


def test_places_of_windows_are_not_published(tmp_path):
    said = {"output_dir": "runs\\finetune-birds\\1", "dataset": "my birds\\2026", "note": "see C:\\data\\x\\y"}
    scrubbed = {"output_dir": "(local)/finetune-birds/1", "dataset": "(local)/2026", "note": "see (local)/y"}
    assert Scrubber().value(said) == scrubbed
    (tmp_path / "log.jsonl").write_text(json.dumps({"place": "D:\\work\\birds"}))
    with pytest.raises(LiVTError, match="names a private place"):
        refuse_secrets(tmp_path, ["D:\\work\\birds"])
    refuse_secrets(tmp_path, ["D:\\work\\bird"])


# Processes and signals


def test_a_signal_is_passed_on_only_where_the_system_sends_signals(monkeypatch):
    class Command:
        def __init__(self, _words, env):
            self.got = []

        def send_signal(self, number):
            if not sends:
                raise ValueError(f"Unsupported signal: {number}")
            self.got.append(number)

        def wait(self):
            signal.raise_signal(signal.SIGINT)
            commands.append(self)
            return 0

    for sends in (True, False):
        commands = []
        monkeypatch.setattr(subprocess, "Popen", Command)
        monkeypatch.setattr(train, "SENDS_SIGNALS", sends)
        assert train.run_livt([]) is False
        assert commands[0].got == [signal.SIGINT] * sends


def test_one_process_is_launched_where_torch_cannot_join_several(monkeypatch):
    monkeypatch.setattr("livt_hf.training.machine.available_cores", lambda: 4)
    words = ["--dataset", "glyphs"]
    assert cli.fitting_processes("pretrain", words) == 4
    monkeypatch.setattr(livt_hf.system, "LAUNCHES_SEVERAL", False)
    assert cli.fitting_processes("pretrain", words) == 1


def test_a_worker_that_is_started_afresh_outlives_ctrl_c_and_a_forked_one_keeps_its_handler():
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        outlive_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        mine = lambda *_: None  # noqa: E731
        signal.signal(signal.SIGINT, mine)
        outlive_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


LOADERS = {
    "training": lambda data, batches: train_loader(data, FinetuneAugmentation(16), batches)._loader,
    "evaluation": lambda data, batches: eval_loader(data, eval_processor(16, [0.5] * 3, [0.5] * 3), batches),
    "features": lambda data, batches: augmented_in_order(data, FinetuneAugmentation(16), batches, 1),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_give_the_same_in_workers_that_are_started_afresh(kind):
    """macOS and Windows send the dataset to their workers instead of forking them with it."""
    loader = LOADERS[kind](make(12), Batches(4))
    sent = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn, loader.worker_init_fn)))
    keys = list(loader.batch_sampler)
    assert same([sent[0].__getitems__(part) for part in keys], list(loader))


@pytest.mark.slow
def test_a_loader_gives_the_same_batches_through_spawned_workers():
    alone = list(LOADERS["training"](make(12), Batches(4)))
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        spawned = list(LOADERS["training"](make(12), Batches(4, num_workers=2)))
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert same(alone, spawned)


# Devices


class OnMps(torch.Tensor):
    """A tensor of a device without float64: whatever is computed from it stays there, until it is told otherwise."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        result = super().__torch_function__(func, types, args, kwargs or {})
        if any(isinstance(part, cls) and part.dtype == torch.float64 for part in tree_leaves(result)):
            raise TypeError("the MPS framework doesn't support float64")
        return result


def on_mps(value: torch.Tensor) -> torch.Tensor:
    return value.as_subclass(OnMps)


def test_the_stand_in_for_mps_refuses_float64():
    with pytest.raises(TypeError, match="float64"):
        on_mps(torch.ones(3)).double()
    assert on_mps(torch.ones(3)).cpu().double().dtype == torch.float64


def head_on_mps(tiny: dict, several: bool, **settings):
    kind = "multi_label_classification" if several else "single_label_classification"
    more = {"num_train_images": 60, "test_prior": None} if several else {}
    config = LiViTConfig(**tiny, class_counts=[50, 9, 3], problem_type=kind, **more, **settings)
    head = LiViTForImageClassification(config).head
    for name, value in head.named_buffers():
        setattr(head, name, on_mps(value))
    return head


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_wants_float64_of_the_device(tiny, loss):
    head = head_on_mps(tiny, several=False, loss=loss)
    logits, labels = on_mps(torch.randn(4, 3)), on_mps(torch.tensor([0, 1, 2, 0]))
    assert head(logits, labels, on_mps(torch.randn(4, 32))).isfinite()


@pytest.mark.parametrize("several", [False, True])
def test_no_posterior_wants_float64_of_the_device(tiny, several):
    calibration = Calibration(1.1, 0.0 if several else 0.3, [0.1, 0.0, -0.1], 12)
    head = head_on_mps(tiny, several, calibration=asdict(calibration))
    logits, prior = torch.randn(4, 3), torch.tensor([0.2, 0.5, 0.3])
    plain = head_on_mps(tiny, several, calibration=asdict(calibration)).cpu()
    for given in (None, on_mps(prior), prior.tolist()):
        expected = plain.posterior(logits, prior if given is not None else None)
        torch.testing.assert_close(head.posterior(on_mps(logits), given).cpu(), expected)
    labels = torch.tensor([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1]]) if several else torch.tensor([0, 1, 2, 0])
    fit_calibration(head.fitted_posterior(on_mps(logits)), labels, head.prior)


def test_neither_metrics_nor_batches_want_float64_of_the_device():
    metrics = LongTailMetrics([50, 9, 3, 3, 3, 3])
    metrics.update(on_mps(torch.eye(6)), on_mps(torch.arange(6)))
    assert metrics.compute()["accuracy"] == 1
    transform = DeviceTransform([0.5] * 3, [0.5] * 3, erase=0.5, mixup=0.8, cutmix=1.0, num_classes=3)
    batch = {"pixel_values": torch.zeros(4, 3, 16, 16, dtype=torch.uint8), "labels": torch.tensor([0, 1, 2, 0])}
    batch = {name: on_mps(value) for name, value in batch.items()} | {"index": torch.arange(4)}
    assert transform(batch, epoch=0, update=0)["labels"].shape == (4, 3)
