"""The second stage around its model: normalisation, the weights that are kept, the rules it is measured by."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List
from PIL import Image as Pictures
from recipe_runs import TINY, assert_same_weights, make_pictures
from refusals import refusal

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.data import Batches, eval_loader, eval_processor, normalization
from livt_hf.errors import Interrupted
from livt_hf.long_tail.head import LongTailHead
from livt_hf.predictions.rules import UNIFORM
from livt_hf.recipes import finetune
from livt_hf.runs import Run
from livt_hf.training.checkpoints import Progress, load_best, read_state
from livt_hf.training.finetune import (
    FinetuneTask,
    build_finetune_task,
    check_finetune_options,
    choose_selection_metric,
    compute_metrics,
    draw_kept_patches,
    keep_if_best,
)
from livt_hf.training.loop import StepKey
from livt_hf.training.spec import FinetuneModelSpec
from livt_hf.training.start import build_classifier, build_processor


@pytest.fixture
def train() -> Dataset:
    pictures = [Pictures.new("RGB", (32, 32), colour) for colour in ("red", "green", "green", "blue")]
    features = Features(image=Image(), label=ClassLabel(names=["cat", "dog"]))
    return Dataset.from_dict({"image": pictures, "label": [0, 1, 1, 1]}, features=features)


def micro() -> LiViTForImageClassification:
    return LiViTForImageClassification(LiViTConfig.preset("micro"))


def options(*words) -> FinetuneSettings:
    return FinetuneSettings.parse(["--model_size", "micro", *map(str, words)])


def test_pictures_are_normalised_as_in_the_pretraining(train, tmp_path):
    eval_processor(32, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]).save_pretrained(tmp_path)
    processor = build_processor(micro(), train, FinetuneModelSpec(pretrained=str(tmp_path)), "glyphs")
    assert (list(processor.image_mean), list(processor.image_std)) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])


def test_a_checkpoint_without_statistics_is_normalised_as_the_data_and_it_is_said(train, tmp_path, caplog):
    processor = build_processor(micro(), train, FinetuneModelSpec(pretrained=str(tmp_path)), "cifar100-lt")
    assert tuple(processor.image_mean) == normalization("cifar100-lt")[0]
    assert "does not say how its images were normalised; taking the statistics of cifar100-lt" in caplog.text


def test_small_pictures_stay_as_they_are_and_others_come_to_their_size(train):
    processor = build_processor(micro(), train, FinetuneModelSpec(pretrained="none"), "glyphs")
    small = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (processor.image_mean, processor.image_std))
    pixels = processor(images=small, return_tensors="pt").pixel_values
    torch.testing.assert_close(pixels, (small / 255 - mean) / std)
    for shape in ((640, 480), (20, 30)):
        photo = Pictures.new("RGB", shape)
        assert processor(photo, return_tensors="pt").pixel_values.shape == (1, 3, 32, 32)


def test_a_single_label_data_set_can_start_from_a_multi_label_model(train, tiny, tmp_path):
    several = dict(problem_type="multi_label_classification", test_prior=None, num_train_images=9)
    names = dict(id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    config = LiViTConfig(**tiny, **several, **names, class_counts=[5, 7])
    LiViTForImageClassification(config).save_pretrained(tmp_path)
    for labels in (["cat", "dog"], ["oak", "elm"]):
        renamed = train.cast_column("label", ClassLabel(names=labels))
        with pytest.raises(ValueError, match="is of size"):  # past every check of the head
            start(renamed, options("--pretrained", tmp_path))


def start(train: Dataset, settings: FinetuneSettings):
    return build_classifier(train, settings.model, settings.loss, settings.optimization, settings.augmentation)


def finetune_task(settings: FinetuneSettings, data: DatasetDict, model, processor, accelerator) -> FinetuneTask:
    return build_finetune_task(
        model, processor, data, settings.model, settings.optimization, settings.augmentation, accelerator
    )


class Weights(torch.nn.Linear):
    def __init__(self, value: float):
        super().__init__(1, 1)
        torch.nn.init.constant_(self.weight, value)


def loop_with(weight: float, run: Run, progress: Progress) -> SimpleNamespace:
    accelerator = SimpleNamespace(is_main_process=True)
    return SimpleNamespace(run=run, final_model=Weights(weight), progress=progress, accelerator=accelerator)


def test_the_best_weights_are_those_the_checkpoint_speaks_of_also_after_a_kill(tmp_path):
    run, progress = Run(tmp_path), Progress()
    keep_if_best(loop_with(1.0, run, progress), 5, 0.5)
    saved = run.checkpoints / "step-50"
    saved.mkdir()
    (saved / "state.json").write_text(json.dumps(vars(progress) | {"files": {}}))
    keep_if_best(loop_with(2.0, run, progress), 10, 0.4)  # worse
    assert progress.best_epoch == 5
    keep_if_best(loop_with(3.0, run, progress), 15, 0.6)  # better, and the run is killed before its next checkpoint
    load_best(run, weights := Weights(0.0), read_state(saved)["best_epoch"])
    assert weights.weight.item() == 1
    (saved / "state.json").write_text(json.dumps(vars(progress) | {"files": {}}))
    keep_if_best(loop_with(4.0, run, progress), 20, 0.7)
    assert {path.name for path in run.checkpoints.glob("best*")} == {"best-15.safetensors", "best-20.safetensors"}


def test_the_posterior_in_the_results_is_under_the_uniform_prior_whatever_the_head_trained_for(train, tiny):
    sizes = tiny | {"image_size": 32}
    model = LiViTForImageClassification(LiViTConfig(**sizes, class_counts=[1, 3], test_prior=[0.999, 0.001]))
    torch.nn.init.zeros_(model.classifier.weight)
    torch.nn.init.zeros_(model.classifier.bias)
    processor = eval_processor(32, [0.5] * 3, [0.5] * 3, native=True)
    loader = eval_loader(train, processor, Batches(4))
    measured = compute_metrics(model, loader, Accelerator(cpu=True), [1, 3])
    uniform = model.head.posterior(torch.zeros(1, 2), "uniform").argmax().item()
    assert uniform != model.head.posterior(torch.zeros(1, 2)).argmax().item()
    assert measured[UNIFORM]["accuracy"] == (0.25 if uniform == 0 else 0.75)


def test_mixup_ends_before_training_does_where_it_is_told_to(train, tmp_path):
    settings = options("--pretrained", "none", "--batch_size", "4", "--epochs", "3", "--mixup_off_epochs", "1")
    settings = settings.replace(mixed_precision="no", augmentation="pad_crop")
    model = micro()
    seen = []
    model.forward = lambda pixels, labels: seen.append(labels.is_floating_point()) or SimpleNamespace(loss=None)
    data = DatasetDict(train=train, test=train)
    accelerator = SimpleNamespace(process_index=0, num_processes=1)
    task = finetune_task(settings, data, model, eval_processor(32, [0.5] * 3, [0.5] * 3), accelerator)
    for epoch in range(3):
        (batch,) = task.loader.epoch(epoch)
        task.compute_loss(model, batch, StepKey(epoch, update=epoch))
    assert seen == [True, True, False]  # mixed labels are soft


def split_of(counts: list[int], several: bool = False) -> Dataset:
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    kind = ClassLabel(names=["a", "b", "c"])
    column = [[label] for label in labels] if several else labels
    return Dataset.from_dict({"label": column}, features=Features(label=List(kind) if several else kind))


def test_the_best_epoch_is_chosen_by_the_mean_over_classes_unless_another_number_is_asked_for():
    assert choose_selection_metric(options().checkpoints, multi_label=False) == "mean_class_accuracy"
    assert choose_selection_metric(options().checkpoints, multi_label=True) == "map"
    assert choose_selection_metric(options("--select_metric", "few").checkpoints, multi_label=False) == "few"
    with refusal("select_metric", "'f1'", "mean_class_accuracy, accuracy, macro_f1"):
        options("--select_metric", "f1")


def check(settings: FinetuneSettings, **data: Dataset) -> None:
    parts = (settings.model, settings.optimization, settings.loss, settings.augmentation, settings.checkpoints)
    check_finetune_options(DatasetDict(data), *parts)


@pytest.mark.parametrize(
    ("metric", "several", "values"),
    [
        ("map", False, ["map", "accuracy, few"]),
        ("accuracy", True, ["accuracy", "several labels"]),
        ("many", False, ["validation", "many-shot"]),
        ("few", False, None),
        ("macro_f1", True, None),
    ],
)
def test_a_number_that_cannot_select_is_refused(metric, several, values):
    parts = {"train": split_of([50, 30, 5], several), "validation": split_of([5, 3, 1], several)}
    settings = options("--select", "best", "--select_metric", metric, "--batch_size", "8")
    with contextlib.nullcontext() if values is None else refusal("select_metric", *values):
        check(settings, **parts)


@pytest.mark.parametrize(
    ("words", "several", "argument", "values"),
    [
        (["--objective", "macro_f1"], False, "objective", ["macro_f1", "validation_fraction"]),
        (["--objective", "macro_f1"], True, "objective", ["macro_f1", "several labels"]),
        (["--select_metric", "few"], False, "select_metric", ["select best"]),
    ],
)
def test_an_objective_needs_one_label_and_held_out_images_and_a_metric_a_selection(words, several, argument, values):
    with refusal(argument, *values):
        check(options(*words, "--batch_size", "8"), train=split_of([50, 30, 5], several))


def test_a_run_with_muon_goes_on_to_the_weights_of_one_that_was_not_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    words = ["--dataset", make_pictures(tmp_path / "pictures"), "--pretrained", "none", "--optimizer", "muon", *TINY]
    words = [str(word) for word in words]
    finetune.main([*words, "--output_dir", str(tmp_path / "whole")])
    with pytest.raises(Interrupted):
        finetune.main([*words, "--output_dir", str(tmp_path / "cut"), "--max_hours", "0"])
    finetune.main(["--resume", str(tmp_path / "cut"), "--max_hours", "1"])
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")


def test_what_goes_by_the_epochs_goes_by_those_that_max_steps_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    told = []
    monkeypatch.setattr(LongTailHead, "set_epoch", lambda _head, *epochs: told.append(epochs))
    words = ["--dataset", make_pictures(tmp_path / "pictures"), "--pretrained", "none", *TINY, "--epochs", 9]
    words = [str(word) for word in [*words, "--batch_size", 8, "--max_steps", 12, "--output_dir", tmp_path / "run"]]
    with pytest.raises(Interrupted):
        finetune.main([*words, "--max_hours", "0"])
    finetune.main([*words, "--max_hours", "1", "--resume", "auto"])
    assert told == [(0, 2), (0, 2), (1, 2)]
    assert Run(tmp_path / "run").results.epochs == 2


def test_the_patches_that_are_kept_belong_to_the_image_and_the_epoch():
    kept = draw_kept_patches(0.25, 0, 3, torch.arange(40), 64)
    assert kept.shape == (40, 16) and (kept.diff(dim=1) > 0).all() and kept.min() >= 0 and kept.max() < 64
    assert torch.equal(draw_kept_patches(0.25, 0, 3, torch.tensor([7]), 64)[0], kept[7])
    assert not torch.equal(draw_kept_patches(0.25, 0, 4, torch.arange(40), 64), kept)
    assert draw_kept_patches(0.01, 0, 3, torch.arange(2), 4).shape == (2, 1)


def test_patches_are_left_out_until_the_last_epochs(train):
    words = "--keep_ratio 0.5 --keep_all_epochs 2 --epochs 5 --batch_size 4 --mixup 0 --cutmix 0 --pretrained none"
    settings, seen = options(*words.split()), []
    model = start(train, settings)
    model.vit.layers[0].register_forward_hook(lambda _layer, inputs, _output: seen.append(inputs[0].shape[1]))
    processor = build_processor(model, train, settings.model, settings.data.dataset)
    task = finetune_task(settings, DatasetDict(train=train), model, processor, Accelerator(cpu=True))
    for epoch in range(5):
        task.compute_loss(model, next(task.loader.epoch(epoch)), StepKey(epoch, epoch))
    assert seen == [33, 33, 33, 65, 65]  # of 64 patches, and the class token
