"""Measure how many near copies are found and how many are false alarms, without a model and with features of one.

    LIVT_DATA=FOLDER python recipes/benchmarks/near_copies.py [--pretrained FOLDER]

Bursts: of PlantDoc's training images (one of each group of near copies), every fifth is photographed three times more:
moved, turned, cropped, exposed and compressed anew, at three strengths. All are split at random; an image of a burst
with another one on the other side should be found, an image without one should not. CIFAR-100-LT and PlantDoc are
taken with their own splits. Scaling: vectors of noise, a tenth with a copy at cosine .9, processor seconds of one
core. Parts: 45 made-up parts of a
factory with six exposures each, which look much alike, also by a perceptual hash of 64 bits at a fixed distance: of 0
bits, as cleanvision finds near duplicates, and of up to 10, the default of imagededup; with `--pretrained` also the
mean class accuracy of a cross-validated head, by what is kept together in a fold. Writes
recipes/results/near_copies.json.

    python recipes/benchmarks/near_copies.py --only parts scaling    # these alone
"""

import argparse
import io
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, concatenate_datasets
from PIL import Image, ImageEnhance
from scipy.fft import dctn
from threadpoolctl import threadpool_limits

from livt_hf.classifiers import load_classifier, load_processor
from livt_hf.data import load_long_tailed
from livt_hf.data.labels import class_feature, image_paths, labels_of
from livt_hf.data.near_copies import (
    compare,
    connected_copies,
    feature_vectors,
    find_leaks,
    nearest_other,
    pixel_vectors,
    scale_by_chance,
    standardize,
)
from livt_hf.files import read_values, write_values
from livt_hf.recipes.benchmarks.framing import SHAPES, draw_part
from livt_hf.training.exact_head import fit_exact_head
from livt_hf.training.frozen import FrozenBackbone

OUTPUT = Path(__file__).parents[1] / "results" / "near_copies.json"
STRENGTHS = (0.3, 0.6, 1.0)
EXPOSURES, EVERY = 3, 5
QUESTIONS = ("scaling", "parts", "bursts", "splits")


def photograph_again(image: Image.Image, strength: float, generator: np.random.RandomState) -> bytes:
    """Return a JPEG of an image that is turned by up to 3 degrees, moved by 3 %, cropped, exposed and noisy anew."""
    width, height = image.size
    turned = image.rotate(generator.uniform(-3, 3) * strength, Image.Resampling.BILINEAR)
    scale = 1 - strength * generator.uniform(0.05, 0.11)
    left, top = (0.5 - scale / 2 + generator.uniform(-0.03, 0.03, 2) * strength) * image.size
    box = (int(left), int(top), int(left + scale * width), int(top + scale * height))
    shot = turned.crop(box).resize(image.size)
    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast):
        shot = kind(shot).enhance(1 + generator.uniform(-0.25, 0.25) * strength)
    noisy = np.asarray(shot) + generator.randn(height, width, 3) * 8 * strength
    buffer = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def single_images() -> Dataset:
    """Return PlantDoc's training images, one of each group of near copies."""
    train = load_long_tailed(str(Path(os.environ["LIVT_DATA"]) / "plantdoc"))["train"]
    groups = connected_copies(standardize(pixel_vectors(train)), 5.0)  # lower than any threshold
    return train.select(np.unique(groups, return_index=True)[1])


def make_bursts(images: Dataset, folder: Path, strength: float) -> tuple[Dataset, Dataset]:
    """Return two random halves of images and bursts, with the number of its source in each file name."""
    generator, names = np.random.RandomState(0), class_feature(images).names
    labels = labels_of(images).values
    for row, (path, label) in enumerate(zip(image_paths(images).to_pylist(), labels, strict=True)):
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        for shot in range(1 + EXPOSURES * (row % EVERY == 0)):
            target = folder / names[label] / f"{row}_{shot}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(photograph_again(image, strength if shot else 0.0, generator))
    everything = load_long_tailed(str(folder), test_fraction=None)["train"]
    order = generator.permutation(len(everything))
    return everything.select(order[::2]), everything.select(order[1::2])


def describe(dataset: Dataset, backbone: FrozenBackbone | None) -> np.ndarray:
    """Return standardized vectors of the pixels or of features."""
    if backbone is None:
        return standardize(pixel_vectors(dataset))
    return standardize(feature_vectors(backbone.features(dataset)[0], labels_of(dataset).values))


def measure_bursts(images: Dataset, backbone: FrozenBackbone | None, strengths: tuple[float, ...]) -> list[dict]:
    """Return detection and false alarms at each strength."""
    rows = []
    for strength in strengths:
        with tempfile.TemporaryDirectory() as folder:
            halves = make_bursts(images, Path(folder), strength)
            both = concatenate_datasets(halves)
            began = time.perf_counter()
            vectors, threshold = scale_by_chance(describe(both, backbone), labels_of(both).values)
            source = np.array([int(Path(path).name.split("_")[0]) for path in image_paths(both).to_pylist()])
            side = np.repeat([0, 1], [len(half) for half in halves])
            similarity = nearest_other(compare(vectors), side)[0]
            has_mate = np.array(
                [(source[side != own] == number).any() for number, own in zip(source, side, strict=True)]
            )
            found = similarity >= threshold
            groups = connected_copies(vectors, threshold)
            in_burst = source % EVERY == 0
            whole = [len(set(groups[source == number])) == 1 for number in np.unique(source[in_burst])]
            rows.append(
                {
                    "strength": strength,
                    "images": len(both),
                    "with_a_copy_on_the_other_side": int(has_mate.sum()),
                    "threshold": round(threshold, 3),
                    "found": round(float(found[has_mate].mean()), 4),
                    "false_alarms": round(float(found[~has_mate].mean()), 4),
                    "bursts_in_one_group": round(float(np.mean(whole)), 4),
                    "seconds": round(time.perf_counter() - began, 1),
                }
            )
            print(rows[-1], flush=True)
    return rows


def measure_splits(name: str, backbone: FrozenBackbone | None, **options) -> dict:
    """Return the images of each split of a dataset that have near copies in another one."""
    data = load_long_tailed(name, **options)
    began = time.perf_counter()
    leaks = find_leaks(data, describe(concatenate_datasets(list(data.values())), backbone))
    row = {"images": {split: len(part) for split, part in data.items()}}
    if leaks is not None:
        row |= {"found": leaks.counts, "threshold": round(leaks.threshold, 3)}
        different = [
            labels_of(data[one[0]]).values[one[1]] != labels_of(data[other[0]]).values[other[1]]
            for one, other, _ in leaks.pairs
        ]
        row["pairs_of_different_classes"] = round(float(np.mean(different)), 4)
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def make_parts(folder: Path) -> Path:
    """Draw parts of six classes; the number of the part is in each file name."""
    generator = np.random.default_rng(1)
    for label, parts in enumerate((20, 10, 6, 4, 3, 2)):
        (folder / SHAPES[label]).mkdir()
        for part in range(parts):
            image = draw_part(generator, label, 140, coloured=False)
            for exposure in range(6):
                shot = ImageEnhance.Brightness(image).enhance(generator.uniform(0.6, 1.5))
                shot = ImageEnhance.Contrast(shot).enhance(generator.uniform(0.8, 1.2))
                shot.save(folder / SHAPES[label] / f"{label}{part:02d}_{exposure}.jpg", quality=90)
    return folder


def perceptual_hash(path: str) -> np.ndarray:
    """Return 64 bits: which of the low frequencies of a grey thumbnail are above their median."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.LANCZOS), dtype=float)
    low = dctn(pixels)[:8, :8]
    return (low > np.median(low)).ravel()


def measure_parts() -> dict:
    """Return the share of exposures of which another one is found, and of those that are taken for another part."""
    with tempfile.TemporaryDirectory() as folder:
        images = load_long_tailed(str(make_parts(Path(folder))), test_fraction=None)["train"]
        paths, vectors = image_paths(images).to_pylist(), standardize(pixel_vectors(images))
        bits = np.array([perceptual_hash(path) for path in paths])
    vectors, threshold = scale_by_chance(vectors, labels_of(images).values)
    ((_, _, similarities),) = compare(vectors)
    distances = (bits[:, None] != bits).sum(2)
    is_near = {"ours": similarities >= threshold} | {f"hash_{most}": distances <= most for most in (0, 10)}
    part = np.array([Path(path).name.split("_")[0] for path in paths])
    is_other, is_self = part[:, None] != part, np.eye(len(part), dtype=bool)
    shares = {
        name: {"found": (near & ~is_other & ~is_self).any(1).mean(), "false_alarms": (near & is_other).any(1).mean()}
        for name, near in is_near.items()
    }
    result = {name: {key: round(float(value), 4) for key, value in row.items()} for name, row in shares.items()}
    groups = len(set(connected_copies(vectors, threshold).tolist()))
    return {"images": len(images), "parts": len(set(part)), "groups": groups} | result


def measure_leak(backbone: FrozenBackbone) -> dict:
    """Return how well an exact head seems to know the parts, by which exposures of a part are in one fold."""
    with tempfile.TemporaryDirectory() as folder:
        images = load_long_tailed(str(make_parts(Path(folder))), test_fraction=None)["train"]
        labels, parts = (
            labels_of(images).values,
            [Path(path).name.split("_")[0] for path in image_paths(images).to_pylist()],
        )
        copies = connected_copies(*scale_by_chance(standardize(pixel_vectors(images)), labels))
        features = backbone.features(images)[0]
    scores = {}
    for name, groups in (
        ("by_image", None),
        ("by_near_copies", copies),
        ("by_part", np.unique(parts, return_inverse=True)[1]),
    ):
        head = fit_exact_head(features, labels, loss="bal_ce", groups=groups)
        right = head.out_of_fold.argmax(1).numpy() == labels
        accuracies = [right[labels == label].mean() for label in np.unique(labels)]
        scores[name] = round(100 * float(np.mean(accuracies)), 1)
    return {"mean_class_accuracy_of_folds": scores}


def measure_scaling(sizes: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000, 1_000_000)) -> list[dict]:
    """Return the processor time to compare vectors of noise, and the share of planted copies that are found."""
    rows = []
    for size in sizes:
        generator, copies = np.random.default_rng(0), size // 10
        vectors = standardize(generator.standard_normal((size, 143), dtype=np.float32))
        vectors[-copies:] = 0.9 * vectors[:copies] + np.float32(np.sqrt(1 - 0.81)) * vectors[-copies:]
        vectors = standardize(vectors)
        labels = generator.integers(0, 10, size)
        labels[-copies:] = labels[:copies]
        images = Dataset.from_dict({"label": labels}, features=Features(label=ClassLabel(num_classes=10)))
        splits = {"train": images.take(size - copies), "test": images.skip(size - copies)}
        began = time.process_time()
        with threadpool_limits(1, "blas"):
            groups = connected_copies(vectors, 8.3)  # a cosine of .6
            grouped = time.process_time()
            leaks = find_leaks(splits, vectors)
        row = {"images": size, "seconds": round(grouped - began, 1)}
        row["found"] = round(float((groups[:copies] == groups[-copies:]).mean()), 4)
        row["seconds_of_leaks"] = round(time.process_time() - grouped, 1)
        row["leaks_found"] = round(leaks.counts["test"] / copies if leaks else 0.0, 4)
        row["megabytes"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="folder of a backbone; without one the pixels alone are measured")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="what is measured")
    arguments = parser.parse_args()

    def write(question: str, result: list | dict) -> None:
        results: dict = read_values(OUTPUT) if OUTPUT.exists() else {}
        results.setdefault(question, {} if isinstance(result, dict) else [])
        results[question] = results[question] | result if isinstance(result, dict) else result
        write_values(OUTPUT, results)
        print(question, result, flush=True)

    if "scaling" in arguments.only:  # first, for the peak of memory
        write("scaling", measure_scaling())
    if "parts" in arguments.only:
        write("parts", measure_parts())
    methods: dict[str, FrozenBackbone | None] = {"pixels": None}
    if arguments.pretrained:
        model = load_classifier(arguments.pretrained)
        methods["features"] = FrozenBackbone(model, load_processor(arguments.pretrained), Accelerator(cpu=True))
    if "parts" in arguments.only and arguments.pretrained:
        write("parts", measure_leak(methods["features"]))
    for method, backbone in methods.items():
        if "bursts" in arguments.only:
            strengths = STRENGTHS if backbone is None else STRENGTHS[1:2]  # features of 3,606 images take minutes
            write(method, {"bursts": measure_bursts(single_images(), backbone, strengths)})
        if "splits" in arguments.only:
            data = Path(os.environ["LIVT_DATA"])
            write(method, {"plantdoc": measure_splits(str(data / "plantdoc"), backbone)})
            if backbone is None:  # features of 20,847 small images take half an hour
                source = {"source": str(data / "cifar100"), "imbalance_factor": 100}
                write(method, {"cifar100-lt": measure_splits("cifar100-lt", backbone, **source)})


if __name__ == "__main__":
    main()
