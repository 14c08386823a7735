"""Look at a dataset before training on it: counts, doubtful labels, broken images, copies, and two pictures.

livt data                                     # the embedded glyphs
livt data FOLDER --imbalance_factor 100
livt data labels.csv --source IMAGES --group_column patient
livt data FOLDER --group_from parent
livt data FOLDER --pretrained timm/tf_efficientnet_lite0.in1k      # near copies by features
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets
from PIL import Image

from livt_hf.classifiers import load_classifier, load_processor
from livt_hf.cli.console import run_command, spell_flags
from livt_hf.cli.copies import describe_near_copies
from livt_hf.cli.options import format_words
from livt_hf.cli.settings import InspectDataSettings
from livt_hf.constants import FEW_IMAGES, SMALL_BACKBONE
from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.decoding import describe_copies, find_broken, format_findings, read_images
from livt_hf.data.first_look import count_two_valued, describe_cut, describe_labels, dim_outside, suggest_groups
from livt_hf.data.groups import NEAR_COPIES, relative_image_paths, write_groups
from livt_hf.data.labels import class_counts, class_feature, labels_of, number_of_classes
from livt_hf.data.load import load_dataset
from livt_hf.data.near_copies import feature_vectors, standardize
from livt_hf.data.spec import DataSpec
from livt_hf.data.splitting import is_made_split, shot_counts
from livt_hf.errors import LiVTError
from livt_hf.metrics import group_sizes
from livt_hf.processors import Framing, read_framing
from livt_hf.reports import class_counts_chart
from livt_hf.reports.sheets import labelled_rows
from livt_hf.reports.style import BLACK, shorten
from livt_hf.runs import data_folder
from livt_hf.text import shell_line

USUAL_FRAMING = Framing("crop", 0.875)  # of most backbones: the shorter side to 256 pixels, of which 224 are cropped
LISTED = 40  # classes that are all listed; of more, the largest and the smallest
SHEET_CLASSES, SAMPLES = 12, 6  # classes on the sheet, and images of each


def main(argv: list[str] | None = None) -> None:
    settings = InspectDataSettings.parse(argv)
    data = load_dataset(settings.data)
    # With on_broken skip, loading has found and dropped broken images already.
    checked = settings.check_images and settings.data.on_broken == "error"
    broken = {split: find_broken(part) if checked else {} for split, part in data.items()}
    print(f"{table(data)}\n\n{list_counts(data)}\n")
    for line in describe_labels(data):
        print(line)
    if settings.check_images:
        print_broken(data, broken)
    readable = {}
    for split, part in data.items():
        readable[split] = part.select(np.setdiff1d(np.arange(len(part)), list(broken[split])))
        if not len(readable[split]):
            raise LiVTError(f'no image of the split "{split}" can be read: repair or replace them.')
    output = Path(settings.output) if settings.output else data_folder(settings.data.dataset)
    likely_groups = print_likely_groups(settings.data, readable)
    leaks = settings.check_images and report_copies(settings, readable, is_made_split(data, "test"), output)
    framing = print_cut(settings, readable["train"])
    for path in draw(readable, output, settings.data.split_seed, framing):
        print(f"wrote {path}")
    if settings.data.group_from is not None:
        path = write_groups(data.values(), settings.data, output / "groups.csv")
        print(f"wrote {path}; --group_from {path} takes it, as it is or corrected")
    options = {"on_broken": "skip"} if any(broken.values()) else {}
    if not class_counts(readable["train"]).all():
        options["drop_empty"] = True
    if leaks or likely_groups is not None:
        options["group_from"] = NEAR_COPIES if leaks else likely_groups
    print(format_next_training(settings, options, len(readable["train"])))


def print_cut(settings: InspectDataSettings, train: Dataset) -> Framing:
    """Print how much of the images a backbone does not see, and return its framing."""
    framing, whose = USUAL_FRAMING, "The centre crop of most backbones"
    if settings.pretrained is not None:
        framing = read_framing(load_processor(settings.pretrained))
        whose = f"The {framing.name} of {settings.pretrained}"
    if settings.data.dataset not in PUBLIC and (cut := describe_cut(train, framing, whose)):
        print(cut, "It is pale in samples.png.")
    return framing


def print_broken(data: Mapping[str, Dataset], broken: Mapping[str, Mapping[int, str]]) -> None:
    """Print which images cannot be read."""
    for split, findings in broken.items():
        if findings:
            share = f"{len(findings)} of {len(data[split]):,}"
            print(f"Broken images in {split}, {share}:{format_findings(findings.values())}")
    advice = "Repair or remove them, or leave them out with --on_broken skip."
    print(advice if any(broken.values()) else "All images can be read.")


def format_next_training(settings: InspectDataSettings, options: Mapping[str, Any], num_images: int) -> str:
    """Return the command to train on these images, from a small pretrained backbone where they are few."""
    words = settings.non_defaults("data") | {"plugin": settings.plugin, "dataset": None} | options | {"hours": 0.5}
    if num_images < FEW_IMAGES and settings.data.dataset not in PUBLIC:
        words["pretrained"] = settings.pretrained or SMALL_BACKBONE
    line = shell_line(["livt", "train", settings.data.dataset, *format_words(words)])
    return f"Next, train for half an hour:\n  {line}"


def print_likely_groups(spec: DataSpec, data: Mapping[str, Dataset]) -> str | None:
    """Print what looks like sites or bursts, and return the `group_from` that would keep them together."""
    if spec.group_from is not None or "group" in data["train"].column_names or spec.dataset in PUBLIC:
        return None
    images = concatenate_datasets(list(data.values()))
    labels = labels_of(images).rarest(number_of_classes(images)).tolist()
    suggestion = suggest_groups(relative_image_paths(images, spec), labels, images)
    if suggestion is None:
        return None
    option, reason = suggestion
    words = shell_line(["--group_from", option])
    print(f"There may be sites or bursts: {reason}. Keep each on one side of a split with {words}")
    return option


def report_copies(settings: InspectDataSettings, data: Mapping[str, Dataset], made: bool, output: Path) -> bool:
    """Print copies in two splits and black and white images; return True if groups of near copies would help."""
    if (two_valued := sum(map(count_two_valued, data.values()))) and settings.data.dataset not in PUBLIC:
        print(
            f"{two_valued:,} images have at most two grey values: masks and blank images are left out with --exclude."
        )
    copies, near, vectors = describe_copies(data), None, None
    if settings.data.dataset not in PUBLIC:
        if settings.pretrained is not None:
            images = concatenate_datasets(list(data.values()))
            labels = labels_of(images).rarest(number_of_classes(images))
            vectors = standardize(feature_vectors(compute_features(images, settings.pretrained), labels))
        near = describe_near_copies(data, made, output, vectors)
    findings = "\n".join(filter(None, (copies, near))) or "No copies found in two splits."
    print(spell_flags(findings, "group_from", "group_column", "exclude"))
    return bool(near) and made and settings.data.group_from is None and settings.data.group_column is None


def compute_features(images: Dataset, pretrained: str) -> np.ndarray:
    """Return the features of images by a frozen classifier, which are cached as those of a training are."""
    from accelerate import Accelerator

    from livt_hf.training.frozen import FrozenBackbone

    return FrozenBackbone(load_classifier(pretrained), load_processor(pretrained), Accelerator()).features(images)[0]


def list_counts(data: Mapping[str, Dataset]) -> str:
    """Return the number of images of each class in each split, the largest class first, with bars."""
    names, counts = class_feature(data["train"]).names, {split: class_counts(part) for split, part in data.items()}
    ranked = np.argsort(-counts["train"], kind="stable")
    shown = ranked if len(ranked) <= LISTED else np.r_[ranked[: LISTED // 2], ranked[-LISTED // 2 :]]
    width = max(5, *(len(names[c]) for c in shown))
    lines = [f"{'class':{width}}" + "".join(f"{split:>11}" for split in counts)]
    for position, c in enumerate(shown):
        if len(ranked) > LISTED and position == LISTED // 2:
            lines.append(f"... {len(ranked) - LISTED:,} more")
        bar = "█" * max(1, round(24 * counts["train"][c] / counts["train"].max())) if counts["train"][c] else ""
        lines.append(f"{names[c]:{width}}" + "".join(f"{own[c]:11,}" for own in counts.values()) + f"  {bar}")
    return "\n".join(lines)


def table(data: DatasetDict) -> str:
    """Return a table of sizes and imbalance, one column per split."""
    counts = [class_counts(part) for part in data.values()]
    facts = {
        "": list(data),
        "images": [len(part) for part in data.values()],
        "classes": [len(own) for own in counts],
        "images of the largest class": [own.max() for own in counts],
        "images of the smallest class": [own.min() for own in counts],
        "largest / smallest": [f"{own.max() / own.min():.4g}" if own.min() else "-" for own in counts],
    }
    if "group" in data["train"].features:
        facts["groups"] = [len(set(labels_of(part, "group").values)) for part in data.values()]
    groups = group_sizes(shot_counts(data))
    facts[f"{'/'.join(groups)}-shot classes"] = ["/".join(map(str, groups.values()))]
    width, names = max(len(str(value)) for values in facts.values() for value in values), max(map(len, facts))
    lines = [f"{name:{names}}" + "".join(f"  {value!s:>{width}}" for value in facts[name]) for name in facts]
    return "\n".join(lines)


def draw(data: Mapping[str, Dataset], folder: Path, seed: int = 0, framing: Framing = USUAL_FRAMING) -> list[Path]:
    """Draw the number of images of each class, and samples of classes from head to tail, pale where not seen."""
    train, counts = data["train"], {split: class_counts(part) for split, part in data.items()}
    names = class_feature(train).names
    rows = []
    for c, chosen in sample(train, counts["train"], seed).items():
        pictures = (Image.fromarray(image.permute(1, 2, 0).numpy()) for image in read_images(train, chosen))
        images = [dim_outside(picture, framing) for picture in pictures]
        rows.append((f"{shorten(names[c], 26)}\n{counts['train'][c]:,} images", BLACK, images))
    return [class_counts_chart(counts, folder / "classes.png", names), labelled_rows(rows, folder / "samples.png")]


def sample(train: Dataset, counts: np.ndarray, seed: int) -> dict[int, list[int]]:
    """Return rows of some training images each of classes spread from the most to the least frequent."""
    ranked = np.argsort(-counts, kind="stable")
    ranked = ranked[counts[ranked] > 0]
    chosen = ranked[np.unique(np.linspace(0, len(ranked) - 1, SHEET_CLASSES).round().astype(int))]
    labels, generator = labels_of(train), np.random.RandomState(seed)
    return {int(c): generator.permutation(labels.images[labels.values == c])[:SAMPLES].tolist() for c in chosen}


if __name__ == "__main__":
    run_command(main)
