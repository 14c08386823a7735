"""Variants of the recipe of `livt train`, compared on held-out training images.

    python recipes/benchmarks/recipe.py --model FOLDER --dataset plantdoc --updates 250
    python recipes/benchmarks/recipe.py --model FOLDER --dataset cifar100-lt --updates 500 --variants fresh head

The data are below LIVT_DATA. Test images are never looked at. A fifth of the training images is held out, in two ways:
`random` images, and `clusters`: of each class a whole cluster of frozen features, which stands for photographs of
other sources than those trained on. Each variant is trained by the code of `livt train`, with its updates fixed, on
one thread. Rows are added to recipes/results/recipe.json as they are done, and are not done again: NLL after
calibration, accuracy under the training prior and mean class accuracy under the uniform one, in percent.

recipe                      the recipe as it is, from a shrunk head; with the loss bal_ce
fresh                       from a fresh classifier
tenth_of_head, part_of_head, head   from a classifier that is moved 10 %, 30 % or all of the way to the exact head
head_frozen_bn              from the exact head, with the batch statistics of the backbone kept, at a rate of 3e-4
frozen_bn                   the recipe with the batch statistics of the backbone kept
low_rate, high_rate         a third and three times the learning rate
full_crops                  crops of the size that images are served in, in as many updates
sigmoid, fresh_sigmoid      the loss bal_bce, the default of `livt train`; from a fresh classifier
plain                       the loss ce
label_smoothing, mixup      of 0.1; of 0.2
"""

import argparse
import functools
import json
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.cluster import KMeans
from transformers import PreTrainedModel

from livt_hf.cli.training_settings import TrainSettings
from livt_hf.data.labels import class_counts, labels_of
from livt_hf.data.splitting import SplitDatasetDict, split_off
from livt_hf.files import read_values, write_values
from livt_hf.long_tail.structure import get_classifier
from livt_hf.predictions.calibrate import collect_logits
from livt_hf.processors import read_input_spec
from livt_hf.recipes import train_backbone
from livt_hf.recipes.benchmarks.peers import DATASETS, find_data, resize_model
from livt_hf.recipes.train_backbone import Session
from livt_hf.runs import Run
from livt_hf.training import anytime, recipe
from livt_hf.training.anytime import TuningPlan, score_held_out, start_from_head
from livt_hf.training.frozen import FrozenBackbone
from livt_hf.training.recipe import BATCH_SIZE, LEARNING_RATE

RESULTS = Path(__file__).parents[1] / "results" / "recipe.json"
SHRINKAGE = recipe.START_SHRINKAGE
HELD_OUT = 0.1  # share of the training images that each of the two ways holds out
CLUSTERS, MIN_CLUSTERED = 6, 10  # of a class, and images of a class that is clustered
# Options of `livt finetune` that differ from the recipe, and what training starts from.
VARIANTS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "fresh": {"start": 0.0},
    "part_of_head": {"start": 0.3},
    "tenth_of_head": {"start": 0.1},
    "head": {"start": 1.0},
    "head_frozen_bn": {"start": 1.0, "freeze_batch_norm": True, "base_lr": 3e-4 * 256 / BATCH_SIZE},
    "frozen_bn": {"freeze_batch_norm": True},
    "low_rate": {"base_lr": LEARNING_RATE / 3 * 256 / BATCH_SIZE},
    "high_rate": {"base_lr": 3 * LEARNING_RATE * 256 / BATCH_SIZE},
    "full_crops": {"crop_size": None},
    "sigmoid": {"loss": "bal_bce"},
    "fresh_sigmoid": {"start": 0.0, "loss": "bal_bce"},
    "plain": {"loss": "ce"},
    "label_smoothing": {"label_smoothing": 0.1},
    "mixup": {"mixup": 0.2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=DATASETS, default="plantdoc")
    parser.add_argument("--model", type=Path, required=True, help="folder of a timm model with its processor")
    parser.add_argument("--updates", type=int, nargs="+", default=[250])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--share", type=float, default=1.0, help="share of the training images to take")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["recipe"])
    settings = parser.parse_args()
    os.environ["ACCELERATE_USE_CPU"] = "1"
    anytime.REFIT_TOLERANCE = math.inf  # the updates are fixed
    with tempfile.TemporaryDirectory() as folder:
        model = resize_model(settings.model, Path(folder, settings.model.name), DATASETS[settings.dataset]["size"])
        for seed in settings.seeds:
            for updates in settings.updates:
                for variant in settings.variants:
                    key = {"dataset": settings.dataset, "share": settings.share, "updates": updates}
                    key |= {"variant": variant, "seed": seed}
                    rows = read_values(RESULTS)["rows"] if RESULTS.exists() else []
                    if not any(key.items() <= row.items() for row in rows):
                        row = key | measure(settings.dataset, model, settings.share, updates, seed, variant)
                        rows = read_values(RESULTS)["rows"] if RESULTS.exists() else []
                        write_values(RESULTS, {"rows": [*rows, row]})
                        print(json.dumps(row), flush=True)


def measure(dataset: str, model: Path, share: float, updates: int, seed: int, variant: str) -> dict:
    """Train a variant without the held-out images, and return its scores on them."""
    name, source, factor = find_data(dataset)
    options = {"dataset": name, "source": source, "imbalance_factor": factor, "pretrained": str(model), "seed": seed}
    session = Session.open(TrainSettings.build(**options, threads=1, hours=0.0, loss="bal_ce"))
    session.framing = "own"
    images = session.whole["train"]
    images = images.select(choose_share(labels_of(images).values, share)) if share < 1 else images
    backbone, processor = session.build(session.head_settings, session.whole)
    features = FrozenBackbone(backbone, processor, session.accelerator).features(images)[0]
    held_out = hold_out(labels_of(images).values, features)
    side, session.changes = read_input_spec(processor).size, dict(VARIANTS[variant])
    session.network = {"crop_size": recipe.choose_crop_size(backbone, side)}
    session.network["learning_rate"] = recipe.choose_learning_rate(backbone)
    start = session.changes.pop("start", None)
    recipe.START_SHRINKAGE = SHRINKAGE if start is None else 1.0
    move = start_from_head if start is None else functools.partial(start_from_part, share=start)
    train_backbone.start_from_head = move
    session = replace_images(session, images, held_out > 0)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder, "finetune"))
        run.begin(session.head_settings.to_dict())
        head = train_backbone.solve_first_head(session, session.head_settings, run)
        began = session.clock()
        _, loop, processor, _ = train_backbone.tune_network(session, run, TuningPlan(updates, 1e9), head)
        seconds = session.clock() - began
        logits, labels = collect_logits(loop.bare_model, session.batches("validation", processor), session.accelerator)
    ways = held_out[held_out > 0]
    found: dict[str, Any] = {"seconds": round(seconds, 1), "images": int((held_out == 0).sum())}
    for number, way in ((1, "random"), (2, "clusters")):
        chosen = torch.from_numpy(ways == number)
        scores = score_held_out(loop.bare_model.head.cpu(), logits[chosen], labels[chosen])
        found[way] = {"nll": round(scores["nll"], 4)} | {
            key: round(100 * scores[key], 2) for key in ("accuracy", "mean_class_accuracy")
        }
    return found


@torch.no_grad()
def start_from_part(model: PreTrainedModel, weight: torch.Tensor, bias: torch.Tensor, share: float) -> None:
    """Move the fresh classifier of a model a share of the way to an exact head."""
    classifier = get_classifier(model)
    fresh = [parameter.clone() for parameter in classifier.parameters()]
    start_from_head(model, weight, bias)
    for parameter, value in zip(classifier.parameters(), fresh, strict=True):
        parameter.lerp_(value, 1 - share)


def choose_share(labels: np.ndarray, share: float) -> np.ndarray:
    """Return the rows of a share of each class, at least two images of it."""
    generator, chosen = np.random.RandomState(0), []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        chosen.append(generator.permutation(rows)[: max(2, round(share * len(rows)))])
    return np.sort(np.concatenate(chosen))


def hold_out(labels: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Return 1 for images that are held out at random, 2 for those of held-out clusters, 0 for the others. (N,)"""
    generator, held_out = np.random.RandomState(0), np.zeros(len(labels), dtype=int)
    centred = features - features.mean(0)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) < MIN_CLUSTERED:
            continue
        cluster = KMeans(CLUSTERS, n_init=3, random_state=0).fit(centred[rows]).labels_
        sizes = np.bincount(cluster, minlength=CLUSTERS)
        small = np.flatnonzero((sizes > 0) & (sizes <= max(2, 2 * HELD_OUT * len(rows))))
        if len(small):
            held_out[rows[cluster == generator.choice(small)]] = 2
        left = rows[held_out[rows] == 0]
        held_out[generator.permutation(left)[: max(1, round(HELD_OUT * len(rows)))]] = 1
    return held_out


def replace_images(session: Session, images: Dataset, is_held_out: np.ndarray) -> Session:
    """Return the session with other training images, of which some are held out."""
    parts = []
    for splits, made in (({"train": images}, ()), (split_off(images, is_held_out, "validation"), ("validation",))):
        data = SplitDatasetDict(splits | {"test": session.whole["test"]})
        data.made_splits, data.shot_counts = frozenset(made), class_counts(images)
        parts.append(data)
    return replace(session, whole=parts[0], split=parts[1], held_out=is_held_out, fraction=2 * HELD_OUT)


if __name__ == "__main__":
    main()
