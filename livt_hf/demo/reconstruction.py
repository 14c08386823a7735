"""A pretrained encoder and decoder behind the demo: hide patches of an image and see what the model makes of them."""

import threading
from pathlib import Path

import numpy as np
import torch

from livt_hf.data import read_rgb
from livt_hf.errors import LiVTError
from livt_hf.evaluation.models import choose_device, load_checkpoint, load_processor

SIDE = 256


class ServedPretraining:
    """A ViTMAE checkpoint with its image processor."""

    caveat = None

    def __init__(self, path: str, device: str | None = None):
        self.path, self.device = path, choose_device(device)
        self.model, self.processor = load_checkpoint(path).to(self.device), load_processor(path)
        self._one_ratio = threading.Lock()  # the share of hidden patches is a setting of the model

    def reconstruct(self, path: str | Path, ratio: float, seed: int | None) -> list[np.ndarray]:
        """The image as the model sees it, with hidden patches, and reconstructed; height x width x 3 in 0..1."""
        if seed is None or not 0 <= seed < 2**63:
            raise LiVTError("the seed must be a whole number from 0 to 2^63 - 1; type one into its box.")
        visible = int(self.model.num_patches * (1 - ratio))
        if not 0 < visible < self.model.num_patches:
            raise LiVTError(f"a mask ratio of {ratio:g} leaves {visible} of {self.model.num_patches} patches visible.")
        pixels = self.processor(read_rgb(path), return_tensors="pt")["pixel_values"].to(self.device)
        noise = torch.rand(1, self.model.num_patches, generator=torch.Generator().manual_seed(seed))
        with self._one_ratio:
            self.model.config.mask_ratio = ratio
            masked, reconstruction = self.model.reconstruct(pixels, noise.to(self.device))
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.processor.image_mean, self.processor.image_std))
        pictures = [(tensor[0].cpu() * std + mean).clamp(0, 1) for tensor in (pixels, masked, reconstruction)]
        times = max(1, SIDE // pixels.shape[-1])  # small images are enlarged with their pixels left visible
        return [picture.permute(1, 2, 0).numpy().repeat(times, 0).repeat(times, 1) for picture in pictures]
