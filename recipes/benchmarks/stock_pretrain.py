"""The peer of benchmarks/launch.py: MAE pretraining as written with stock parts. Prints the seconds it trained."""

import sys
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision import transforms
from transformers import ViTMAEForPreTraining

from livt_hf import pretraining_config
from livt_hf.data import load_long_tailed, normalization

steps = int(sys.argv[1])
augment = transforms.Compose(
    [
        transforms.RandomResizedCrop(32, scale=(0.6, 1.0), interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.ToTensor(),
        transforms.Normalize(*normalization("glyphs")),
    ]
)
dataset = load_long_tailed("glyphs")["train"].with_transform(
    lambda rows: {"pixel_values": [augment(image.convert("RGB")) for image in rows["image"]]}
)
accelerator = Accelerator()
model = ViTMAEForPreTraining(pretraining_config("micro", patch_size=8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, betas=(0.9, 0.95))
loader = DataLoader(dataset, batch_size=128, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
started, done = time.perf_counter(), 0
while done < steps:
    for batch in loader:
        accelerator.backward(model(batch["pixel_values"]).loss)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == steps:
            break
print(time.perf_counter() - started)
