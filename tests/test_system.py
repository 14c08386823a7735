"""What Linux and macOS do differently, by taking away here what is missing there."""

import pickle
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from refusals import refusal
from test_loading import make, same
from torch.utils._pytree import tree_leaves

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.data.batches import Batches, outlive_ctrl_c
from livt_hf.data.loading import eval_loader, ordered_loader, train_loader
from livt_hf.data.transforms import DeviceTransform, FinetuneAugmentation, eval_processor
from livt_hf.long_tail.calibration import Calibration, fit_calibration
from livt_hf.long_tail.losses import LOSSES
from livt_hf.metrics import LongTailMetrics
from livt_hf.recipes import sweep
from livt_hf.recipes.ablations import SWEEPS
from livt_hf.text import shell_line, shell_words

ROOT = Path(__file__).parents[1]


# Files


def test_runs_of_sweeps_have_names_that_every_file_system_takes():
    for name in SWEEPS:
        plan = sweep.Plan(sweep.SweepSettings.build(sweep=name), list(SWEEPS[name].variants))
        for folder in plan.runs:
            assert not set(folder.name) & set('<>:"/\\|?*') and folder.name[-1] not in ". ", folder
        lower = [str(folder).lower() for folder in plan.runs]
        assert len(set(lower)) == len(lower)


# Words and paths


def test_a_command_to_copy_is_quoted_for_the_shell():
    words = ["livt", "finetune", "--resume", "/data/my birds/1"]
    line = shell_line(words)
    assert line == "livt finetune --resume '/data/my birds/1'"
    assert shell_words(line) == words
    assert shell_words('--name "a b" --tag #1') == ["--name", "a b", "--tag", "#1"]
    for word in ("|", "R&D/x", "don't", ""):
        assert shell_line([word]) != word and shell_words(shell_line([word, "x"])) == [word, "x"]
    with refusal(None, '"--loss \'ce"'):
        shell_words("--loss 'ce")


# Processes and signals


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
    "features": lambda data, batches: ordered_loader(data, FinetuneAugmentation(16), batches, 1),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_give_the_same_in_workers_that_are_started_afresh(kind):
    """macOS sends the dataset to its workers instead of forking them with it."""
    loader = LOADERS[kind](make(12), Batches(4))
    sent = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn, loader.worker_init_fn)))
    keys = list(loader.batch_sampler)
    assert same([sent[0].__getitems__(part) for part in keys], list(loader))


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
    with pytest.raises(TypeError, match="float64"):  # the stand-in refuses it
        on_mps(torch.ones(3)).double()
    assert on_mps(torch.ones(3)).cpu().double().dtype == torch.float64
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
    logits, labels = torch.cat([logits] * 5), torch.cat([labels] * 5)
    fit_calibration(head.fitted_posterior(on_mps(logits)), labels, head.prior)


def test_neither_metrics_nor_batches_want_float64_of_the_device():
    metrics = LongTailMetrics([50, 9, 3, 3, 3, 3])
    metrics.update(on_mps(torch.eye(6)), on_mps(torch.arange(6)))
    assert metrics.compute()["accuracy"] == 1
    transform = DeviceTransform([0.5] * 3, [0.5] * 3, erase=0.5, mixup=0.8, cutmix=1.0, num_classes=3)
    batch = {"pixel_values": torch.zeros(4, 3, 16, 16, dtype=torch.uint8), "labels": torch.tensor([0, 1, 2, 0])}
    batch = {name: on_mps(value) for name, value in batch.items()} | {"index": torch.arange(4)}
    assert transform(batch, epoch=0, update=0)["labels"].shape == (4, 3)
