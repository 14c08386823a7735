"""What the first stage needs around its model: masks, the loss on held-out images, and pictures to look at."""

from collections.abc import Iterable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict
from torch import Tensor
from transformers import BaseImageProcessor

from livt_hf.data.batches import Batches
from livt_hf.data.decoding import refuse_broken, spread_rows, without_broken
from livt_hf.data.loading import eval_loader
from livt_hf.modeling_livit_mae import LiViTForPreTraining
from livt_hf.randomness import keyed_uniform, purpose_seed


def draw_mask_noise(seed: int, epoch: int, indices: Tensor, num_patches: int) -> Tensor:
    """The numbers that order an image's patches: those with the smallest stay visible. (B, patches)"""
    noise = keyed_uniform(purpose_seed(seed, "mask"), epoch, indices.cpu().numpy(), num_patches)
    return torch.from_numpy(noise.astype(np.float32)).to(indices.device)


def select_eval_images(data: DatasetDict | IterableDatasetDict, count: int, on_broken: str = "error") -> Dataset:
    """Images to judge by: spread over the test split, or the first of a stream; of the training split without a test.

    They stay encoded. All are decoded once, to find broken ones now and not after training: these are refused, or left
    out with `on_broken="skip"`.
    """
    split = data["test"] if "test" in data else data["train"]
    if isinstance(split, IterableDataset):
        encoded = split.cast_column("image", Image(decode=False))
        chosen = Dataset.from_list(list(encoded.take(count)), features=encoded.features).cast_column("image", Image())
    else:
        chosen = split.select(spread_rows(split, count))
    if on_broken == "skip":
        return without_broken(chosen)
    refuse_broken(chosen, "of the held-out images, ")
    return chosen


@torch.no_grad()
def compute_reconstruction_loss(
    model: LiViTForPreTraining, loader: Iterable[dict], accelerator: Accelerator, seed: int
) -> tuple[float, float]:
    """The loss on the loader's images, and that of predicting zero, on the same masks."""
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
    """(image, masked, reconstruction) as height x width x 3 in 0..1, of images spread over a dataset."""
    chosen = dataset.select(spread_rows(dataset, count))
    device = next(model.parameters()).device
    batch = next(iter(eval_loader(chosen, processor, Batches(count))))
    pixels, index = batch["pixel_values"].to(device), batch["index"].to(device)
    masked, reconstruction = model.reconstruct(pixels, noise=draw_mask_noise(seed, 0, index, model.num_patches))
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    pictures = [(tensor * std + mean).clamp(0, 1) for tensor in (pixels, masked, reconstruction)]
    return list(zip(*(p.permute(0, 2, 3, 1).cpu().numpy() for p in pictures), strict=True))


def format_update_advice(loss: float, zero_loss: float, updates: int) -> str | None:
    """What to say of a pretraining that ended no better than predicting zero, or None."""
    if loss < zero_loss:
        return None
    return (
        f"This is no better than predicting zero: {updates:,} updates were too few to learn anything. Train for about "
        f"{max(10 * updates, 1000):,} updates, with more epochs or a smaller batch_size."
    )
