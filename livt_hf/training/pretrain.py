"""Masked pretraining: the task of the loop, the loss on held-out images, and reconstructions to look at."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict
from torch import Tensor, nn
from transformers import BaseImageProcessor

from livt_hf.configuration_livit import encoder_preset
from livt_hf.data.batches import Batches, build_train_batches
from livt_hf.data.decoding import check_readable, drop_broken, spread_rows
from livt_hf.data.loading import eval_loader, train_loader
from livt_hf.data.spec import AugmentationSpec
from livt_hf.data.transforms import DeviceTransform, PretrainAugmentation
from livt_hf.modeling_livit_mae import LiViTForPreTraining, pretraining_config
from livt_hf.randomness import keyed_uniform, purpose_seed
from livt_hf.training.loop import StepKey, TrainingTask
from livt_hf.training.spec import ModelSpec, OptimizationSpec, PretrainModelSpec


class PretrainTask(TrainingTask):
    """Masked generative pretraining of a ViT on images."""

    def __init__(self, model: LiViTForPreTraining, loader: Any, transform: DeviceTransform, seed: int):
        super().__init__(model, loader)
        self.transform, self.seed, self.num_patches = transform, seed, model.num_patches

    def compute_loss(self, module: nn.Module, batch: dict, step: StepKey) -> Tensor:
        batch = self.transform(batch, **asdict(step))
        noise = draw_mask_noise(self.seed, step.epoch, batch["index"], self.num_patches)
        return module(batch["pixel_values"], noise=noise).loss


def build_pretrain_task(
    train: Dataset | IterableDataset,
    spec: PretrainModelSpec,
    optimization: OptimizationSpec,
    augmentation: AugmentationSpec,
    processor: BaseImageProcessor,
    accelerator: Accelerator,
    num_workers: int = 0,
    on_broken: str = "error",
) -> PretrainTask:
    """Build the task of a pretraining: a fresh model, the loader of its images, and the loss."""
    size, seed = choose_image_size(spec), optimization.seed
    crops = PretrainAugmentation(size, scale=(augmentation.crop_scale, 1.0), flip=augmentation.flip)
    batches = build_train_batches(optimization.batch_size, optimization.accumulation, seed, accelerator, num_workers)
    loader = train_loader(train, crops, batches, on_broken=on_broken)
    config = pretraining_config(spec.model_size, mask_ratio=spec.mask_ratio, **spec.sizes)
    model = LiViTForPreTraining(config, spec.decode_ratio)
    transform = DeviceTransform(processor.image_mean, processor.image_std, seed=seed)
    return PretrainTask(model, loader, transform, seed)


def choose_image_size(spec: ModelSpec) -> int:
    """Return the image size of a new model: the one given, or that of the preset."""
    return spec.image_size or encoder_preset(spec.model_size)["image_size"]


def draw_mask_noise(seed: int, epoch: int, indices: Tensor, num_patches: int) -> Tensor:
    """Draw numbers that decide the mask of each image: the patches with the smallest stay visible. (B, patches)"""
    noise = keyed_uniform(purpose_seed(seed, "mask"), epoch, indices.cpu().numpy(), num_patches)
    return torch.from_numpy(noise.astype(np.float32)).to(indices.device)


def select_eval_images(data: DatasetDict | IterableDatasetDict, count: int, on_broken: str = "error") -> Dataset:
    """Select images for evaluation: spread over the test split, or the first of a stream.

    Without a test split they are training images. They stay encoded; all are decoded once, so that a broken one raises
    an error now and not after training, or is left out with `on_broken="skip"`.
    """
    split = data["test"] if "test" in data else data["train"]
    if isinstance(split, IterableDataset):
        encoded = split.cast_column("image", Image(decode=False))
        chosen = Dataset.from_list(list(encoded.take(count)), features=encoded.features).cast_column("image", Image())
    else:
        chosen = split.select(spread_rows(split, count))
    if on_broken == "skip":
        return drop_broken(chosen)
    check_readable(chosen, "of the held-out images, ")
    return chosen


@torch.no_grad()
def compute_reconstruction_loss(
    model: LiViTForPreTraining, loader: Iterable[dict], accelerator: Accelerator, seed: int
) -> tuple[float, float]:
    """Compute the reconstruction loss on held-out images, and that of predicting zero on the same masks."""
    model.eval()
    sums = np.zeros(3)  # in double precision, which not every device has
    for batch in loader:
        pixels, index = batch["pixel_values"].to(accelerator.device), batch["index"].to(accelerator.device)
        outputs = model(pixels, noise=draw_mask_noise(seed, 0, index, model.num_patches))
        zero = model.zero_prediction_loss(pixels, outputs.mask)
        sums += len(pixels) * np.array([outputs.loss.item(), zero.item(), 1])
    loss, zero, images = np.sum(gather_object([sums.tolist()]), axis=0).tolist()
    return loss / images, zero / images


def reconstruct_examples(
    model: LiViTForPreTraining, dataset: Dataset, processor: BaseImageProcessor, seed: int, count: int = 8
) -> list[tuple[np.ndarray, ...]]:
    """Return (image, masked, reconstruction), each height x width x 3 in 0..1, of images spread over a dataset."""
    chosen = dataset.select(spread_rows(dataset, count))
    device = next(model.parameters()).device
    batch = next(iter(eval_loader(chosen, processor, Batches(count))))
    pixels, index = batch["pixel_values"].to(device), batch["index"].to(device)
    masked, reconstruction = model.reconstruct(pixels, noise=draw_mask_noise(seed, 0, index, model.num_patches))
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    pictures = [(tensor * std + mean).clamp(0, 1) for tensor in (pixels, masked, reconstruction)]
    return list(zip(*(p.permute(0, 2, 3, 1).cpu().numpy() for p in pictures), strict=True))


def format_update_advice(loss: float, zero_loss: float, updates: int) -> str | None:
    """Return advice for a pretraining that ended no better than predicting zero, or None."""
    if loss < zero_loss:
        return None
    return (
        f"This is no better than predicting zero: {updates:,} updates were too few to learn anything. Train for about "
        f"{max(10 * updates, 1000):,} updates, with more epochs or a smaller batch_size."
    )
