"""Accuracy against processor time on CIFAR-100-LT: we and what a user would pick instead, each from scratch.

    python recipes/benchmarks/run.py race --source FOLDER                   # everything: 25 hours of one core
    python recipes/benchmarks/run.py race --source FOLDER --only ours resnet32 --budgets 5 15 --seeds 0

Every entry gets the same core-minutes: the processor time of its own process, with start-up, decoding and all stages,
without evaluation. Its schedule ends with its budget. One process trains one row on one thread; a row is stored when
it ends, and a row that is stored is not run again. The peers are plain torch loops. Our loader feeds them (images in
memory, which is faster than what they would come with); timm's augmentation is timm's own. All peers learn with the
balanced cross-entropy, so that the race is about training and not about knowing the prior.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification, ViTMAEConfig, ViTMAEForPreTraining

import livt_hf.training.finetune
from livt_hf.cli.console import run_command
from livt_hf.cli.options import format_words
from livt_hf.cli.training_settings import STAGES
from livt_hf.configuration_livit import LiViTConfig, encoder_preset
from livt_hf.data import Batches, FinetuneAugmentation, PretrainAugmentation, class_counts, load_long_tailed
from livt_hf.data.benchmarks import normalization
from livt_hf.data.labels import labels_of
from livt_hf.data.loading import StoredImages, train_loader
from livt_hf.files import read_values, write_values
from livt_hf.metrics import long_tail_metrics
from livt_hf.modeling_livit_mae import pretraining_config
from livt_hf.recipes.benchmarks.steps import create_timm_vit
from livt_hf.reports import markdown_table
from livt_hf.reports.style import PALETTE, new_figure, plain, save
from livt_hf.runs import Run
from livt_hf.threads import configure_threads
from livt_hf.training import autotune
from livt_hf.training.optim import warmup_cosine

BUDGETS = (5, 15, 45, 120)  # core-minutes
PATCH = 8
WARM_UP = 0.05  # share of every schedule


def core_seconds() -> float:
    """Processor time of this process since it began, and of the children it has waited for."""
    return sum(os.times()[:4])


@dataclass
class Row:
    """What one entry of the race is given."""

    minutes: float
    seed: int
    source: str

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    @cached_property
    def data(self):
        return load_long_tailed("cifar100-lt", imbalance_factor=100, source=self.source)

    @cached_property
    def counts(self) -> np.ndarray:
        return class_counts(self.data["train"])

    def batches(self, augmentation, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised images and labels without end, in an order and with crops that depend on the seed alone."""
        loader = train_loader(self.data["train"], augmentation, Batches(batch_size, seed=self.seed))
        for epoch in itertools.count():
            for batch in loader.epoch(epoch):
                yield normalised(batch["pixel_values"]), batch["labels"]


@dataclass(frozen=True)
class TimmAugmentation:
    """What timm's training script does by default: random resized crops, flips and colour jitter, on Pillow images."""

    def batch(self, images: Tensor, *_key) -> Tensor:
        transform = create_transform(32, is_training=True, use_prefetcher=True)  # without normalisation, as uint8
        pictures = (Image.fromarray(image) for image in images.permute(0, 2, 3, 1).numpy())
        return torch.from_numpy(np.stack([transform(picture) for picture in pictures]))


def normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalization("cifar100-lt"))
    return (images / 255 - mean) / std


def train(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterator[Tensor], until: float) -> int:
    """Updates until so many core-seconds are used; the rate follows the share of them that is. Returns the updates."""
    model.train()
    peak, start, updates = optimizer.param_groups[0]["lr"], core_seconds(), 0
    while (now := core_seconds()) < until:
        for group in optimizer.param_groups:
            total = until - start
            group["lr"] = warmup_cosine(now - start, WARM_UP * total, total, peak, 0.0)
        next(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
    return updates


def train_classifier(
    row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, augmentation=None, batch_size: int = 64
) -> dict:
    """With Bal-CE, on what is left of the budget; then the test set, which is not counted."""
    augmentation = augmentation or FinetuneAugmentation(32, rand_augment=None, policy="pad-crop")
    bias = torch.from_numpy(np.log(row.counts / row.counts.sum())).float()

    def logits_of(pixels: Tensor) -> Tensor:
        answer = model(pixels.contiguous(memory_format=torch.channels_last))
        return answer if isinstance(answer, Tensor) else answer.logits

    losses = (F.cross_entropy(logits_of(pixels) + bias, y) for pixels, y in row.batches(augmentation, batch_size))
    updates = train(model, optimizer, losses, row.seconds)
    used = core_seconds()
    test = StoredImages(row.data["test"])
    model.eval()
    with torch.inference_mode():
        parts = torch.arange(len(test)).split(500)
        logits = torch.cat([logits_of(normalised(test.images(part))) for part in parts])
    metrics = long_tail_metrics(logits.numpy(), labels_of(row.data["test"]).values, row.counts)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return told(used, updates * batch_size / row.counts.sum(), parameters, metrics)


def told(seconds: float, epochs: float, parameters: int, metrics: dict) -> dict:
    accuracy = {name: 100 * metrics[name] for name in ("accuracy", "many", "medium", "few")}
    return {"core_minutes": seconds / 60, "epochs": epochs, "parameters": parameters} | accuracy


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The rate of our own recipes, 1e-3, and no decay of biases and norms."""
    groups = {0.0: [], 0.05: []}
    for parameter in model.parameters():
        groups[0.05 if parameter.ndim > 1 else 0.0].append(parameter)
    return torch.optim.AdamW([{"params": p, "weight_decay": d} for d, p in groups.items()], lr=1e-3, fused=True)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions; the shortcut of a wider block drops every other pixel and fills channels with zeros."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.stride, self.added = (1 if channels == width else 2), width - channels
        self.first = nn.Conv2d(channels, width, 3, self.stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return F.relu(y + shortcut)


def resnet32(classes: int = 100) -> nn.Module:
    """Train the ResNet of He et al. for CIFAR: three stages of 16, 32 and 64 channels with n = 5 blocks each."""
    widths = [16, *[16] * 5, *[32] * 5, *[64] * 5]
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    blocks = [ResidualBlock(*pair) for pair in itertools.pairwise(widths)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    return model.to(memory_format=torch.channels_last)  # 1.25 times as fast on a CPU


def run_resnet32(row: Row) -> dict:
    model = resnet32()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-4)
    return train_classifier(row, model, optimizer, batch_size=128)


def run_timm(row: Row, augmentation=None) -> dict:
    model = create_timm_vit(LiViTConfig.preset("micro", patch_size=PATCH), drop_path=0.0)
    return train_classifier(row, model, adamw(model), augmentation)


def run_stock(row: Row) -> dict:
    """transformers' ViTMAE as its config makes it, but for the sizes, which are ours; then its ViT."""
    ours = pretraining_config("micro", patch_size=PATCH)
    sizes = {**encoder_preset("micro"), "image_size": 32, "patch_size": PATCH}
    decoder = {name: value for name, value in ours.to_dict().items() if name.startswith("decoder_")}
    mae = ViTMAEForPreTraining(ViTMAEConfig(**sizes, **decoder))
    batches = row.batches(PretrainAugmentation(32), 128)
    train(mae, adamw(mae), (mae(pixels).loss for pixels, _ in batches), autotune.PRETRAINING_SHARE * row.seconds)
    with tempfile.TemporaryDirectory() as folder:
        mae.save_pretrained(folder)
        config = ViTConfig(**sizes, num_labels=100)
        model = ViTForImageClassification.from_pretrained(folder, config=config)
    return train_classifier(row, model, adamw(model))


def run_ours(row: Row, **changed) -> dict:
    """Train as `livt train` does with such a time, with some options changed; its evaluations are taken off."""
    from livt_hf.recipes import finetune, pretrain

    autotune.clock, not_counted = core_seconds, []

    def uncounted(work: Callable) -> Callable:
        def timed(*arguments):
            began = core_seconds()
            answer = work(*arguments)
            not_counted.append(core_seconds() - began)
            return answer

        return timed

    for module, names in (
        (pretrain, ("compute_reconstruction_loss", "reconstruct_examples")),
        (livt_hf.training.finetune, ("compute_metrics",)),
    ):
        for name in names:
            setattr(module, name, uncounted(getattr(module, name)))
    chosen = autotune.ScratchPlan(len(row.data["train"]), 32, row.seconds * autotune.CORE_FLOPS).options(
        row.minutes / 60
    )
    common = {"dataset": "cifar100-lt", "imbalance_factor": 100, "source": row.source}
    common |= {"seed": row.seed, "threads": 1, "save_minutes": 1000}

    def run(recipe: ModuleType, seconds: float, **own) -> None:
        stage = recipe.__name__.rsplit(".", 1)[-1]
        options, known = chosen[stage], STAGES[stage].names()
        own |= {name: value for name, value in changed.items() if name in known}
        recipe.main(format_words(common | options | own | {"hours": seconds / 3600}))

    with tempfile.TemporaryDirectory() as folder:
        first, second = f"{folder}/mgp", f"{folder}/bft"
        run(pretrain, 3600 * chosen["pretrain"]["hours"] - core_seconds(), output_dir=first)
        left = row.seconds - core_seconds() + sum(not_counted)
        run(finetune, left, output_dir=second, pretrained=first, loss="bal_ce", eval_epochs=100_000)
        used, results = core_seconds() - sum(not_counted), Run(Path(second)).results
    return told(used, results.epochs, results.parameters, results.metrics)


PEERS: dict[str, tuple[str, Callable[[Row], dict]]] = {
    "ours": ("the recipe of livt train", run_ours),
    "ours-all": ("the same with all patches in fine-tuning", partial(run_ours, keep_ratio=1.0)),
    "ours-muon": ("the same with Muon in fine-tuning", partial(run_ours, optimizer="muon")),
    "timm": ("timm's ViT, timm's augmentation", partial(run_timm, augmentation=TimmAugmentation())),
    "timm-pad-crop": ("timm's ViT, pad-crop and flip", run_timm),
    "stock": ("stock ViTMAE, then stock ViT", run_stock),
    "resnet32": ("ResNet-32, SGD, pad-crop and flip", run_resnet32),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder of CIFAR-100")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="some of the entries")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="CORE_MINUTES")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--output", type=Path, default=Path("runs/race.json"), help="JSON file of the rows")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args(argv)
    wanted = itertools.product(arguments.budgets, arguments.seeds, arguments.only)
    if arguments.row:
        ((minutes, seed, name),) = wanted
        configure_threads(torch.device("cpu"), threads=1)
        torch.manual_seed(seed)
        print(json.dumps(PEERS[name][1](Row(minutes, seed, arguments.source))))
        return
    for minutes, seed, name in wanted:
        key = {"entry": name, "budget": minutes, "seed": seed}
        if not any(key.items() <= row.items() for row in stored(arguments.output)):
            row = key | in_own_process(name, minutes, seed, arguments.source)
            write_values(arguments.output, [*stored(arguments.output), row])
            print(f"{name}, {minutes:g} core-minutes, seed {seed}: {row['accuracy']:.1f} %", flush=True)
    print(markdown_table(race_table(stored(arguments.output))))
    race_picture(stored(arguments.output), arguments.output.with_suffix(".png"))


def in_own_process(name: str, minutes: float, seed: int, source: str) -> dict:
    """So that its processor time is all that it took, from the start of Python on."""
    words = ["--row", "--only", name, "--budgets", str(minutes), "--seeds", str(seed), "--source", source]
    command = [sys.executable, "-m", "livt_hf.recipes.benchmarks.race", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def stored(path: Path) -> list[dict]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return read_values(path) if path.exists() else []


def race_table(rows: list[dict]) -> list[dict]:
    """Return one line per entry, one column per budget: mean accuracy in percent, with its range over seeds."""
    budgets = sorted({row["budget"] for row in rows})
    table = []
    for name, (words, _) in PEERS.items():
        line = {"core-minutes": words}
        for minutes in budgets:
            values = [row["accuracy"] for row in rows if (row["entry"], row["budget"]) == (name, minutes)]
            line[f"{minutes:g}"] = "-" if not values else f"{np.mean(values):.1f}"
            if len(values) > 1:
                line[f"{minutes:g}"] += f" ({min(values):.1f} to {max(values):.1f})"
        if set(line.values()) - {words, "-"}:
            table.append(line)
    return table


def race_picture(rows: list[dict], path: Path) -> Path:
    """Accuracy over what each row really used; the line goes through the means of its seeds."""
    figure = new_figure(7, 5.2)
    ax = plain(
        figure.add_subplot(), "core-minutes", "accuracy on the balanced test set (%)", "CIFAR-100-LT, gamma 100"
    )
    entries = {name: mine for name in PEERS if (mine := [row for row in rows if row["entry"] == name])}
    for (name, mine), colour in zip(entries.items(), itertools.cycle(PALETTE)):
        budgets = sorted({row["budget"] for row in mine})
        groups = [[row for row in mine if row["budget"] == minutes] for minutes in budgets]
        means = [[np.mean([row[key] for row in g]) for g in groups] for key in ("core_minutes", "accuracy")]
        ax.plot(*means, color=colour, label=PEERS[name][0])
        ax.plot([r["core_minutes"] for r in mine], [r["accuracy"] for r in mine], "o", color=colour, markersize=5)
    ax.set_xscale("log")
    ax.set_xticks(ticks := sorted({row["budget"] for row in rows}), [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    below = {"loc": "upper left", "bbox_to_anchor": (-0.1, -0.13)}  # lines go everywhere
    ax.legend(frameon=False, ncols=2, fontsize="small", **below)
    return save(figure, path)


if __name__ == "__main__":
    run_command(main)
