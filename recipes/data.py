"""Look at a data set: `python -m livt_hf.data NAME` prints its table and writes two pictures."""

import argparse
from pathlib import Path

import numpy as np
from datasets import DatasetDict
from PIL import Image
from transformers.hf_argparser import string_to_bool

from livt_hf.data.labels import class_counts, class_feature, is_multi_label, labels_of
from livt_hf.data.loading import StoredImages
from livt_hf.data.sources import load_long_tailed
from livt_hf.metrics import group_sizes
from livt_hf.runs import runs_folder

SAMPLE_ROWS, SAMPLE_COLUMNS = 5, 8


def main(arguments: list[str] | None = None) -> None:
    """Load, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m livt_hf.data", description=__doc__)
    parser.add_argument(
        "name", help="a benchmark, an image folder, parquet or arrow, an image list, or a Hub data set"
    )
    parser.add_argument("--imbalance_factor", type=float)
    parser.add_argument("--source", help="local copy of a benchmark, or the images' folder of a list")
    parser.add_argument("--lists", help="folder of a benchmark's lists, when not in source")
    parser.add_argument("--rule", choices=["exponential", "pareto", "balanced"])
    parser.add_argument("--images_per_class", type=int)
    parser.add_argument("--image_column")
    parser.add_argument("--label_column")
    parser.add_argument("--drop_empty", type=string_to_bool, nargs="?", const=True, default=False)
    parser.add_argument("--test_fraction", type=float, default=0.2)
    parser.add_argument("--on_broken", choices=["error", "skip"], default="error")
    parser.add_argument("--split_seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, help="folder of the pictures (default: data-NAME in runs, or in $LIVT_RUNS)"
    )
    options = vars(parser.parse_args(arguments))
    output = options.pop("output") or runs_folder() / f"data-{Path(options['name']).name}"
    seed = options.pop("split_seed")
    try:
        data = load_long_tailed(**options, seed=seed)
    except ValueError as error:
        parser.error(str(error))
    print(table(data))
    for path in draw(data, output, seed):
        print(f"wrote {path}")


def table(data: DatasetDict) -> str:
    """What users ask of a long-tailed data set, a column a split."""
    lines = [["", *data]]
    counts = {split: class_counts(part) for split, part in data.items()}
    facts = {
        "images": lambda split: len(data[split]),
        "classes": lambda split: len(counts[split]),
        "max": lambda split: counts[split].max(),
        "min": lambda split: counts[split].min(),
        "gamma": lambda split: f"{counts[split].max() / counts[split].min():.4g}" if counts[split].min() else "-",
    }
    lines += [[name, *(str(fact(split)) for split in data)] for name, fact in facts.items()]
    groups = group_sizes(counts["train"])
    lines.append(["/".join(groups), "/".join(map(str, groups.values())), *[""] * (len(data) - 1)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )


def draw(data: DatasetDict, folder: Path, seed: int = 0) -> list[Path]:
    """The class distribution with the biases it leads to, and samples from head to tail."""
    from livt_hf.reports import class_distribution, contact_sheet

    folder.mkdir(parents=True, exist_ok=True)
    train = data["train"]
    counts, names = class_counts(train), class_feature(train).names
    rows, captions = sample(train, counts, names, seed)
    stored = StoredImages(train.select(rows))
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in stored.images(range(len(rows)))]
    return [
        class_distribution(counts, folder / "classes.png", names=names),
        contact_sheet(images, captions, folder / "samples.png", columns=SAMPLE_COLUMNS),
    ]


def sample(train, counts: np.ndarray, names: list[str], seed: int) -> tuple[list[int], list[str]]:
    """Rows of one training image of classes spread evenly from the most to the least frequent, with captions."""
    ranked = np.argsort(-counts, kind="stable")
    ranked = ranked[counts[ranked] > 0]
    chosen = ranked[np.unique(np.linspace(0, len(ranked) - 1, SAMPLE_ROWS * SAMPLE_COLUMNS).round().astype(int))]
    labels = labels_of(train)
    if is_multi_label(train):
        owner, labels = labels.images, labels.values
    else:
        owner = np.arange(len(labels))
    generator = np.random.RandomState(seed)
    rows = [int(owner[generator.choice(np.flatnonzero(labels == c))]) for c in chosen]
    return rows, [f"{names[c]}\n{counts[c]}" for c in chosen]


if __name__ == "__main__":
    main()
