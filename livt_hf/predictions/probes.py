"""Probe frozen features: kNN and a linear classifier, for classes that a model was never trained on."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from livt_hf.long_tail.structure import extract_features
from livt_hf.modeling_livit_mae import LiViTForPreTraining
from livt_hf.precision import FLOAT32, autocast
from livt_hf.predictions.predict import show_progress

PROBE_STEPS = 500


@dataclass
class Features:
    """Frozen features of images, with their labels."""

    features: Tensor  # (N, D)
    labels: Tensor  # (N,)


def extract(model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
    """Compute what the classifier of a model sees of images; of a pretraining, the mean patch token."""
    is_pretraining = isinstance(model, LiViTForPreTraining)
    return model.features(pixel_values) if is_pretraining else extract_features(model, pixel_values)


@torch.no_grad()
def extract_frozen_features(
    model: PreTrainedModel, loader: Iterable[dict], accelerator: Accelerator, precision: str = FLOAT32
) -> Features:
    """Compute the features of all images of a loader, in float32 or bfloat16."""
    model.eval()
    features, labels = [], []
    for batch in show_progress(loader, "encoding", accelerator):
        with autocast(accelerator.device, precision):
            features.append(extract(model, batch["pixel_values"].to(accelerator.device)).float())
        labels.append(batch["labels"].to(accelerator.device))
    return Features(torch.cat(features), torch.cat(labels))


def knn_scores(train: Features, test: Features, num_classes: int, k: int = 20, temperature: float = 0.07) -> Tensor:
    """Score classes by the k most similar training images: log shares of the similarities. (N, C)"""
    bank = nn.functional.normalize(train.features, dim=-1)
    scores = torch.zeros(len(test.features), num_classes, device=bank.device)
    for rows in torch.arange(len(test.features)).split(1024):
        similarity, index = (nn.functional.normalize(test.features[rows], dim=-1) @ bank.T).topk(min(k, len(bank)))
        scores[rows] = scores[rows].scatter_add(1, train.labels[index], (similarity / temperature).exp())
    return (scores / scores.sum(-1, keepdim=True)).log()


def linear_probe_scores(train: Features, test: Features, num_classes: int, *, seed: int = 0) -> Tensor:
    """Score classes by a linear classifier (balanced softmax) on standardised, frozen features. (N, C)"""
    mean, std = train.features.mean(0), train.features.std(0).clamp_min(1e-6)
    prior = torch.bincount(train.labels, minlength=num_classes).clamp_min(1).float()
    log_prior = (prior / prior.sum()).log()
    generator = torch.Generator().manual_seed(seed)
    probe = nn.Linear(train.features.shape[1], num_classes).to(train.features.device)
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PROBE_STEPS)
    for _ in range(PROBE_STEPS):
        rows = torch.randint(len(train.labels), (1024,), generator=generator).to(train.labels.device)
        logits = probe((train.features[rows] - mean) / std)
        nn.functional.cross_entropy(logits + log_prior, train.labels[rows]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return probe((test.features - mean) / std)
