"""What a frozen backbone sees of images that are not square: framings on two made-up sets and on a real one.

    python recipes/benchmarks/framing.py --pretrained BACKBONE --plantdoc FOLDER [--sets parts wide plantdoc]

Writes recipes/results/framing.json: for each set and framing the numbers on its test images of an exact head, mean
and standard deviation over three seeds, and what `--framing auto` chose on the training images alone. Seeds draw the
folds that the strength of the head is chosen by, and the images of the trial. `parts` are made-up parts of a factory,
of all proportions, whose class is a small mark near an end; `wide` are wide pictures whose class is the object in
their centre.

With `--several_crops`, elongated images are covered by two or three squares, side by side along the longer side, and
the mean of their logits is taken: of a linear head the logits of the mean of their features. What that gains over each
framing is measured on training images that are held out in turn: mean over the seeds of the difference and of its
standard error.
"""

import argparse
import csv
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.classifiers import load_model, load_processor
from livt_hf.data import load_long_tailed
from livt_hf.data.first_look import read_image_sizes
from livt_hf.data.labels import BOX, BOX_MARGIN, class_counts, group_codes, labels_of
from livt_hf.files import read_values, write_values
from livt_hf.long_tail.objectives import compare_predictions, decide, score_predictions
from livt_hf.processors import FRAMINGS, frame_processor, read_framing
from livt_hf.training.exact_head import ExactHead, fit_exact_head
from livt_hf.training.framing import describe_trial, try_framings
from livt_hf.training.frozen import FrozenBackbone

RESULTS = Path(__file__).parents[1] / "results" / "framing.json"
SHAPES = ("none", "disc", "ring", "cross", "bar", "square")
COLOURS = ("white", "red", "lime", "blue", "yellow", "magenta")
TRAIN = (120, 64, 40, 24, 16, 10)
SEEDS = (0, 1, 2)
# Numbers, and the exponent t of the deployment prior pi^t that suits each.
EXPONENTS = {"accuracy": 1.0, "mean_class_accuracy": 0.0, "macro_f1": 0.5}
ELONGATED = 1.5  # proportions from which on several crops are tried


def draw_shape(image: Image.Image, shape: str, centre: tuple[float, float], radius: float, colour) -> None:
    """Draw a shape; "none" draws nothing."""
    (x, y), draw, thick = centre, ImageDraw.Draw(image), max(1, round(radius / 3))
    box = (x - radius, y - radius, x + radius, y + radius)
    match shape:
        case "disc":
            draw.ellipse(box, fill=colour)
        case "ring":
            draw.ellipse(box, outline=colour, width=thick)
        case "square":
            draw.rectangle(box, outline=colour, width=thick)
        case "bar":
            draw.line((x - radius, y + radius, x + radius, y - radius), fill=colour, width=thick)
        case "cross":
            draw.line((x - radius, y, x + radius, y), fill=colour, width=thick)
            draw.line((x, y - radius, x, y + radius), fill=colour, width=thick)


def draw_background(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Return a grey surface with a smooth gradient and some noise."""
    ramp = np.linspace(-1, 1, width)[None] * rng.normal() + np.linspace(-1, 1, height)[:, None] * rng.normal()
    grey = rng.uniform(90, 160) + 15 * ramp + 6 * rng.normal(size=(height, width))
    return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB").filter(ImageFilter.GaussianBlur(1))


def draw_part(rng: np.random.Generator, label: int, side: int, coloured: bool) -> Image.Image:
    """Draw a part of any proportions, with holes in its middle and a small mark near one of its ends."""
    length = int(side * np.exp(rng.uniform(0, np.log(3))))
    image, reach = draw_background(rng, length, side), (0.15 if coloured else 0.09) * side
    for x in np.linspace(0.35, 0.65, 3):
        draw_shape(image, "disc", (x * length, side / 2), side / 12, (60, 60, 60))
    centre = (reach * 1.3 if rng.random() < 0.5 else length - reach * 1.3, rng.uniform(0.2, 0.8) * side)
    if coloured:
        draw_shape(image, "disc", centre, reach, COLOURS[label])
    else:
        draw_shape(image, SHAPES[label], centre, reach, (25, 25, 25))
    return image.transpose(Image.Transpose.ROTATE_90) if rng.random() < 0.5 else image


def draw_wide(rng: np.random.Generator, label: int, side: int, coloured: bool) -> Image.Image:
    """Draw a wide picture with the object of its class in the centre and others at the sides."""
    length = int(side * rng.uniform(2.2, 3))
    image = draw_background(rng, length, side)
    objects = {0.5: label, 0.12: rng.integers(len(SHAPES)), 0.88: rng.integers(len(SHAPES))}
    for x, kind in objects.items():
        centre = x * length, side * rng.uniform(0.4, 0.6)
        colour = COLOURS[kind] if coloured else tuple(rng.integers(0, 256, 3).tolist())
        draw_shape(image, "disc" if coloured else SHAPES[kind], centre, side * rng.uniform(0.2, 0.3), colour)
    return image


DRAWERS = {"parts": draw_part, "wide": draw_wide}


def make_pictures(
    folder: Path, name: str, train: tuple[int, ...] = TRAIN, test: int = 30, side: int = 180, coloured: bool = False
) -> Path:
    """Draw a made-up set and return its table of images, labels, splits and groups.

    A part has two exposures, which are one group. With `coloured` the colour tells the class, else the shape.
    """
    rng, exposures = np.random.default_rng(0), 2 if name == "parts" else 1
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "images.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "label", "split", "part"])
        for split, counts in {"train": train, "test": [test] * len(train)}.items():
            for label, count in enumerate(counts):
                for number in range(count):
                    image = DRAWERS[name](rng, label, side, coloured)
                    for exposure in range(exposures if split == "train" else 1):
                        path = f"{split}-{SHAPES[label]}-{number}-{exposure}.png"
                        ImageEnhance.Brightness(image).enhance(rng.uniform(0.85, 1.15)).save(folder / path)
                        table.writerow([path, SHAPES[label], split, f"{split}-{label}-{number}"])
    return folder / "images.csv"


def compute_features(backbone: FrozenBackbone, data: DatasetDict) -> dict[str, np.ndarray]:
    return {split: backbone.features(data[split])[0] for split in ("train", "test")}


def fit_head(features: np.ndarray, train: Dataset, seed: int) -> ExactHead:
    groups = group_codes(train) if "group" in train.column_names else None
    labels = np.unique(labels_of(train).values, return_inverse=True)[1]  # of the elongated, some classes have none
    return fit_exact_head(features, labels, loss="ce", groups=groups, seed=seed)


def decide_for(logits: torch.Tensor, train: Dataset) -> dict[str, np.ndarray]:
    """Return predicted classes under the prior that suits each number: uniform, and that of training for accuracy."""
    counts = class_counts(train)
    prior = torch.from_numpy(counts[counts > 0] / counts.sum())
    return {name: decide(logits.log_softmax(-1), prior, exponent).numpy() for name, exponent in EXPONENTS.items()}


def score_head(features: dict[str, np.ndarray], data: DatasetDict, seed: int) -> dict[str, float]:
    """Return test numbers of an exact head."""
    head, test = fit_head(features["train"], data["train"], seed), labels_of(data["test"]).values
    predicted = decide_for(torch.from_numpy(features["test"]) @ head.weight.T + head.bias, data["train"])
    return {name: 100 * score_predictions(one, test, len(head.bias))[name] for name, one in predicted.items()}


def summarize(scores: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return mean and standard deviation of each number."""
    columns = {name: [one[name] for one in scores] for name in EXPONENTS}
    return {name: [statistics.mean(column), statistics.stdev(column)] for name, column in columns.items()}


def cover_with_squares(images: Dataset, sizes: np.ndarray) -> tuple[Dataset, np.ndarray]:
    """Return the squares that cover images as boxes, and the number of squares of each image: two or three."""
    short = sizes.min(1)
    counts = np.clip(np.ceil(sizes.max(1) / short), 2, 3).astype(int)
    boxes = []
    for (width, height), side, count in zip(sizes.tolist(), short.tolist(), counts.tolist(), strict=True):
        for share in np.linspace(0, 1, count):
            left, top = round(share * (width - side)), round(share * (height - side))
            boxes.append([left, top, left + side, top + side])
    squares = images.select(np.repeat(np.arange(len(images)), counts)).flatten_indices()
    return squares.add_column(BOX, boxes).add_column(BOX_MARGIN, [0.0] * len(boxes)), counts


def measure_several_crops(train: Dataset, model: PreTrainedModel, processor: BaseImageProcessor) -> dict:
    """Return what several crops gain over each framing on held-out images, in points, for elongated images."""
    sizes = read_image_sizes(train, range(len(train)))
    rows = np.flatnonzero(sizes.max(1) >= ELONGATED * sizes.min(1))
    images, accelerator, features = train.select(rows), Accelerator(cpu=True), {}
    for name in FRAMINGS:
        features[name] = FrozenBackbone(model, frame_processor(processor, name), accelerator).features(images)[0]
    squares, counts = cover_with_squares(images, sizes[rows])
    backbone = FrozenBackbone(model, frame_processor(processor, "squash"), accelerator)  # of a square: all of it
    sums = np.add.reduceat(backbone.features(squares)[0], np.cumsum(counts) - counts)
    features["several crops"] = sums / counts[:, None].astype(np.float32)
    predicted = {
        name: [decide_for(fit_head(own, images, seed).out_of_fold, images) for seed in SEEDS]
        for name, own in features.items()
    }
    labels = np.unique(labels_of(images).values, return_inverse=True)[1]
    groups = group_codes(images) if "group" in images.column_names else None
    several, gains = predicted.pop("several crops"), {}
    for name, own in predicted.items():
        pairs = list(zip(own, several, strict=True))
        gains[name] = {
            number: (
                100
                * np.mean(
                    [
                        compare_predictions(one[number], other[number], labels, number, groups=groups)
                        for one, other in pairs
                    ],
                    0,
                )
            ).tolist()
            for number in EXPONENTS
        }
    return {"images": len(images), "crops": int(counts.sum()), "gain_over": gains}


def measure_framings(data: DatasetDict, model: PreTrainedModel, processor: BaseImageProcessor) -> dict:
    """Return the numbers of all framings on one set, and what `--framing auto` takes."""
    accelerator, own, result = Accelerator(cpu=True), read_framing(processor).name, {}
    for name in FRAMINGS:
        features = compute_features(FrozenBackbone(model, frame_processor(processor, name), accelerator), data)
        result[name + " (own)" * (name == own)] = summarize([score_head(features, data, seed) for seed in SEEDS])
    trials = [try_framings(model, processor, data["train"], accelerator, seed=seed) for seed in SEEDS]
    chosen = [own if trial is None else trial.chosen for trial in trials]
    said = ["the images are nearly square" if trial is None else describe_trial(trial) for trial in trials]
    return {"framings": result, "auto": chosen, "trials": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", required=True)
    parser.add_argument("--plantdoc")
    parser.add_argument("--sets", nargs="+", default=["parts", "wide", "plantdoc"])
    parser.add_argument("--several_crops", action="store_true", help="measure these alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = read_values(RESULTS) if RESULTS.exists() else {}
    model, processor = load_model(arguments.pretrained), load_processor(arguments.pretrained)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sets:
            made = name in DRAWERS
            path = make_pictures(Path(folder) / name, name) if made else Path(arguments.plantdoc)
            data = load_long_tailed(str(path), **({"group_column": "part"} if made else {}))
            if arguments.several_crops:
                results[name]["several_crops"] = measure_several_crops(data["train"], model, processor)
            else:
                results[name] = results.get(name, {}) | measure_framings(data, model, processor)
            write_values(RESULTS, results)
            print(name, results[name], flush=True)


if __name__ == "__main__":
    main()
