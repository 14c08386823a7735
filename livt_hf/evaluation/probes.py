"""What a pretrained encoder knows about classes it was never told: kNN and a linear probe on frozen features."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from livt_hf.evaluation.running import progress


@dataclass
class Features:
    features: Tensor  # (N, D)
    labels: Tensor  # (N,)


@torch.no_grad()
def encoder_features(model: nn.Module, loader: Iterable[dict], accelerator: Accelerator) -> Features:
    """The mean patch token of a ViTMAE encoder that sees the whole image, for every image of the loader."""
    vit = model.vit.eval()
    features, labels = [], []
    for batch in progress(loader, "encoding", accelerator):
        pixels = batch["pixel_values"].to(accelerator.device)
        embeddings = vit.embeddings
        x = embeddings.patch_embeddings(pixels) + embeddings.position_embeddings[:, 1:]
        cls_token = (embeddings.cls_token + embeddings.position_embeddings[:, :1]).expand(len(x), -1, -1)
        x = torch.cat([cls_token, x], dim=1)  # (B, 1 + patches, D): nothing is masked
        for layer in vit.layers:
            x = layer(x, None)
        features.append(vit.layernorm(x)[:, 1:].mean(dim=1).float())
        labels.append(batch["labels"].to(accelerator.device))
    return Features(torch.cat(features), torch.cat(labels))


def knn_scores(train: Features, test: Features, num_classes: int, k: int = 20, temperature: float = 0.07) -> Tensor:
    """Class logits by the vote of the k most similar training images: log shares of the similarities. (N, C)"""
    bank = nn.functional.normalize(train.features, dim=-1)
    scores = torch.zeros(len(test.features), num_classes, device=bank.device)
    for rows in torch.arange(len(test.features)).split(1024):
        similarity, index = (nn.functional.normalize(test.features[rows], dim=-1) @ bank.T).topk(min(k, len(bank)))
        scores[rows] = scores[rows].scatter_add(1, train.labels[index], (similarity / temperature).exp())
    return (scores / scores.sum(-1, keepdim=True)).log()


def linear_probe_scores(
    train: Features, test: Features, num_classes: int, *, steps: int = 500, weight_decay: float = 1e-4, seed: int = 0
) -> Tensor:
    """Class scores of a linear classifier (balanced softmax) on standardised, frozen features. (N, C)"""
    mean, std = train.features.mean(0), train.features.std(0).clamp_min(1e-6)
    prior = torch.bincount(train.labels, minlength=num_classes).clamp_min(1).float()
    log_prior = (prior / prior.sum()).log()
    generator = torch.Generator().manual_seed(seed)
    probe = nn.Linear(train.features.shape[1], num_classes).to(train.features.device)
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-2, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(train.labels), (1024,), generator=generator).to(train.labels.device)
        logits = probe((train.features[rows] - mean) / std)
        nn.functional.cross_entropy(logits + log_prior, train.labels[rows]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return probe((test.features - mean) / std)
