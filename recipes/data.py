"""Look at a dataset before training on it: its table, its broken images, and two pictures.

livt data                                     # the embedded glyphs
livt data FOLDER --imbalance_factor 100
"""

from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict
from PIL import Image

from livt_hf.cli.console import run_command
from livt_hf.cli.options import format_words
from livt_hf.cli.settings import InspectDataSettings
from livt_hf.data.decoding import describe_copies, find_broken, format_findings, read_images
from livt_hf.data.labels import class_counts, class_feature, is_multi_label, labels_of
from livt_hf.data.load import load_dataset
from livt_hf.errors import LiVTError
from livt_hf.metrics import group_sizes
from livt_hf.reports import class_distribution, contact_sheet
from livt_hf.runs import runs_folder
from livt_hf.text import shell_line

SAMPLE_ROWS, SAMPLE_COLUMNS = 5, 8


def main(argv: list[str] | None = None) -> None:
    settings = InspectDataSettings.parse(argv)
    data = load_dataset(settings.data)
    # With on_broken skip, loading has found and dropped broken images already.
    checked = settings.check_images and settings.data.on_broken == "error"
    broken = {split: find_broken(part) if checked else {} for split, part in data.items()}
    print(table(data))
    for split, findings in broken.items():
        if findings:
            share = f"{len(findings)} of {len(data[split]):,}"
            print(f"Broken images in {split}, {share}:{format_findings(findings.values())}")
    if any(broken.values()):
        print("Repair or remove them, or leave them out with --on_broken skip.")
    elif settings.check_images:
        print("All images can be read.")
    readable = {
        split: part.select(np.setdiff1d(np.arange(len(part)), list(broken[split]))) for split, part in data.items()
    }
    for split, part in readable.items():
        if not len(part):
            raise LiVTError(f'no image of the split "{split}" can be read: repair or replace them.')
    copies = describe_copies(readable) if settings.check_images else None
    if copies is not None:
        print(copies)
    output = Path(settings.output) if settings.output else runs_folder() / f"data-{Path(settings.data.dataset).name}"
    for path in draw(readable["train"], output, settings.data.split_seed):
        print(f"wrote {path}")
    options = settings.non_defaults("data") | {"plugin": settings.plugin, "dataset": None, "hours": 0.5}
    if any(broken.values()):
        options["on_broken"] = "skip"
        if not class_counts(readable["train"]).all():
            options["drop_empty"] = True
    print(
        "Next, train for half an hour; with few images add --pretrained and a classifier, a folder or a Hub id:\n  "
        + shell_line(["livt", "train", settings.data.dataset, *format_words(options)])
    )


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
    groups = group_sizes(class_counts(data["train"]))
    facts[f"{'/'.join(groups)}-shot classes"] = ["/".join(map(str, groups.values()))]
    width, names = max(len(str(value)) for values in facts.values() for value in values), max(map(len, facts))
    lines = [f"{name:{names}}" + "".join(f"  {value!s:>{width}}" for value in facts[name]) for name in facts]
    return "\n".join(lines)


def draw(train: Dataset, folder: Path, seed: int = 0) -> list[Path]:
    """Draw the class distribution with the biases it leads to, and samples from head to tail."""
    folder.mkdir(parents=True, exist_ok=True)
    counts, names = class_counts(train), class_feature(train).names
    rows, captions = sample(train, counts, names, seed)
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in read_images(train, rows)]
    return [
        class_distribution(counts, folder / "classes.png", names, biases=not is_multi_label(train)),
        contact_sheet(images, captions, folder / "samples.png", columns=SAMPLE_COLUMNS),
    ]


def sample(train: Dataset, counts: np.ndarray, names: list[str], seed: int) -> tuple[list[int], list[str]]:
    """Return one training image each of classes spread from the most to the least frequent, as rows with captions."""
    ranked = np.argsort(-counts, kind="stable")
    ranked = ranked[counts[ranked] > 0]
    chosen = ranked[np.unique(np.linspace(0, len(ranked) - 1, SAMPLE_ROWS * SAMPLE_COLUMNS).round().astype(int))]
    labels, generator = labels_of(train), np.random.RandomState(seed)
    rows = [int(labels.images[generator.choice(np.flatnonzero(labels.values == c))]) for c in chosen]
    return rows, [f"{names[c]}\n{counts[c]}" for c in chosen]


if __name__ == "__main__":
    run_command(main)
