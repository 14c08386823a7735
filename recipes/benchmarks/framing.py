"""What a frozen backbone sees of images that are not square: framings on two made-up sets and on a real one.

    python recipes/benchmarks/framing.py --pretrained BACKBONE --plantdoc FOLDER [--sets parts wide plantdoc]

Writes recipes/results/framing.json: for each set and framing the numbers on its test images of an exact head, mean
and standard deviation over three seeds, and what `--framing auto` chose on the training images alone. Seeds draw the
folds that the strength of the head is chosen by, and the images of the trial. `parts` are made-up parts of a factory,
of all proportions, whose class is a small mark near an end; `wide` are wide pictures whose class is the object in
their centre.
"""

import argparse
import csv
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import DatasetDict
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

from livt_hf.classifiers import load_model, load_processor
from livt_hf.data import load_long_tailed
from livt_hf.data.labels import group_codes, labels_of
from livt_hf.files import read_values, write_values
from livt_hf.long_tail.objectives import decide, score_predictions
from livt_hf.processors import FRAMINGS, frame_processor, read_framing
from livt_hf.training.exact_head import fit_exact_head
from livt_hf.training.framing import describe_trial, try_framings
from livt_hf.training.frozen import FrozenBackbone

RESULTS = Path(__file__).parents[1] / "results" / "framing.json"
SHAPES = ("none", "disc", "ring", "cross", "bar", "square")
COLOURS = ("white", "red", "lime", "blue", "yellow", "magenta")
TRAIN = (120, 64, 40, 24, 16, 10)
SEEDS = (0, 1, 2)
NUMBERS = ("accuracy", "mean_class_accuracy", "macro_f1")


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


def score_head(features: dict[str, np.ndarray], data: DatasetDict, seed: int) -> dict[str, float]:
    """Return test numbers of an exact head, each under the prior that suits it: uniform, and training for accuracy."""
    train, test = (labels_of(data[split]).values for split in ("train", "test"))
    groups = group_codes(data["train"]) if "group" in data["train"].column_names else None
    head = fit_exact_head(features["train"], train, loss="ce", groups=groups, seed=seed)
    logits = torch.from_numpy(features["test"]) @ head.weight.T + head.bias
    prior = torch.from_numpy(np.bincount(train) / len(train))
    scores = {}
    for name, exponent in {"accuracy": 1.0, "mean_class_accuracy": 0.0, "macro_f1": 0.5}.items():
        predicted = decide(logits.log_softmax(-1), prior, exponent).numpy()
        scores[name] = 100 * score_predictions(predicted, test, len(prior))[name]
    return scores


def summarize(scores: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return mean and standard deviation of each number."""
    columns = {name: [one[name] for one in scores] for name in NUMBERS}
    return {name: [statistics.mean(column), statistics.stdev(column)] for name, column in columns.items()}


def measure_set(data: DatasetDict, pretrained: str) -> dict:
    """Return the numbers of all framings on one set."""
    model, processor, accelerator = load_model(pretrained), load_processor(pretrained), Accelerator(cpu=True)
    own, result = read_framing(processor).name, {}
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = read_values(RESULTS) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sets:
            made = name in DRAWERS
            path = make_pictures(Path(folder) / name, name) if made else Path(arguments.plantdoc)
            data = load_long_tailed(str(path), **({"group_column": "part"} if made else {}))
            results[name] = measure_set(data, arguments.pretrained)
            write_values(RESULTS, results)
            print(name, results[name], flush=True)


if __name__ == "__main__":
    main()
