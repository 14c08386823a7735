"""transformers' Trainer and a plain loop do the same, in one batch or accumulated, with hard or soft labels."""

import copy

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, balance, pretraining_config
from livt_hf.data.sampling import seen_counts
from livt_hf.optim import layer_decay_groups
from livt_hf.trainer import ClassBalancedSampler, compute_long_tail_metrics

IMAGES, CLASSES = 16, 3
PIXELS = torch.randn(IMAGES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
HARD = torch.arange(IMAGES) % CLASSES
LABELS = {
    "hard": HARD,
    "soft": 0.8 * torch.nn.functional.one_hot(HARD, CLASSES)
    + 0.2 * torch.nn.functional.one_hot(HARD.flip(0), CLASSES),
}


@pytest.fixture
def build(tiny):
    config = LiViTConfig(**tiny, class_counts=[60, 30, 10])
    start = LiViTForImageClassification(config).state_dict()

    def build() -> LiViTForImageClassification:
        model = LiViTForImageClassification(config)
        model.load_state_dict(start)
        return model.train()

    return build


def train(model, labels, folder, batch_size: int, accumulation: int, **columns) -> tuple[list[dict], list[float]]:
    """Two updates of SGD by Trainer: the gradients before each update, and the logged losses."""
    gradients = []

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return None

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    columns |= {"pixel_values": PIXELS} | ({} if labels is None else {"labels": labels})
    data = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    trainer = InOrder(model, arguments, train_dataset=data)
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
    )
    trainer.train()
    return gradients, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain_loop(model, labels) -> tuple[list[dict], list[float]]:
    gradients, losses = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 8):
        loss = model(PIXELS[start : start + 8], labels=labels[start : start + 8]).loss
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return gradients, losses


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2), (2, 4)])
def test_trainer_has_the_losses_gradients_and_weights_of_a_plain_loop(build, tmp_path, kind, batch_size, accumulation):
    trained, looped = build(), build()
    gradients, losses = train(trained, LABELS[kind], tmp_path, batch_size, accumulation)
    expected_gradients, expected_losses = plain_loop(looped, LABELS[kind])
    assert len(gradients) == len(losses) == 2
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(trained.state_dict(), looped.state_dict(), rtol=1e-4, atol=1e-6)
    assert not torch.equal(trained.classifier.weight, build().classifier.weight)


@pytest.mark.parametrize("labels", [HARD, None])
def test_trainer_accumulates_the_gradients_of_a_pretraining_on_images_with_labels_or_without(tiny, tmp_path, labels):
    sizes = dict(decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_intermediate_size=64)
    model, found = LiViTForPreTraining(pretraining_config("micro", **tiny, **sizes)), []
    start, noise = copy.deepcopy(model.state_dict()), torch.rand(IMAGES, model.num_patches)
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model.load_state_dict(start)
        found.append(train(model, labels, tmp_path, batch_size, accumulation, noise=noise)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_trainer_evaluates_and_predicts_logits(build, tmp_path):
    data = [dict(pixel_values=x, labels=y) for x, y in zip(PIXELS, HARD, strict=True)]
    arguments = TrainingArguments(tmp_path, report_to="none", use_cpu=True, disable_tqdm=True)
    model = build()
    predicted = Trainer(model, arguments).predict(data)
    assert predicted.predictions.shape == (IMAGES, CLASSES) and (predicted.label_ids == HARD.numpy()).all()
    expected = model.eval()(PIXELS, labels=HARD).loss.item()
    assert predicted.metrics["test_loss"] == pytest.approx(expected, rel=1e-4)


class BalancedTrainer(Trainer):
    def _get_train_sampler(self, *_):
        return ClassBalancedSampler(self.train_dataset["labels"])


def random_start(kind: str, tiny) -> PreTrainedModel:
    if kind == "vit":
        return ViTForImageClassification(ViTConfig(**tiny, num_labels=2))
    stages = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return ResNetForImageClassification(ResNetConfig(**stages, num_labels=2))


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_trainer_learns_a_rare_class_with_our_loss_sampler_rates_and_metrics(tmp_path, tiny, kind):
    """Dark pictures are frequent and bright ones rare: a few updates with accumulation tell them apart."""
    torch.manual_seed(0)
    labels, counts = torch.tensor([0] * 56 + [1] * 8), [56, 8]
    pixels = torch.randn(64, 3, 16, 16) + 2.0 * labels[:, None, None, None]
    data = Dataset.from_dict({"pixel_values": pixels.numpy(), "labels": labels.numpy()}).with_format("torch")
    model = balance(random_start(kind, tiny), counts, seen_counts=seen_counts(np.array(counts), "balanced", 4))
    groups = layer_decay_groups(model, weight_decay=0.05, layer_decay=0.75, lr=1e-2)
    assert {group["lr"] for group in groups} == {1e-2 * group["lr_scale"] for group in groups}
    arguments = TrainingArguments(
        tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=4,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = BalancedTrainer(
        model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=compute_long_tail_metrics(counts),
        optimizers=(torch.optim.AdamW(groups), None),
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_mean_class_accuracy"] == metrics["eval_accuracy"] == 1
    assert (metrics["eval_medium"], metrics["eval_few"]) == (1, 1) and "eval_many" not in metrics


def test_the_sampler_shows_classes_equally_often_and_other_images_in_another_epoch():
    labels = [0] * 30 + [1] * 10
    sampler = ClassBalancedSampler(labels)
    first = list(sampler)
    assert len(first) == len(sampler) == 40 and sum(labels[i] for i in first) == 20
    sampler.set_epoch(1)
    assert list(sampler) != first
