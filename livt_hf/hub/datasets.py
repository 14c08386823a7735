"""Publish a long-tailed dataset as parquet, with a card of its counts, rule and seed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import DatasetDict
from huggingface_hub import DatasetCard, DatasetCardData, HfApi

from livt_hf.data import class_counts, is_made_split
from livt_hf.data.benchmarks import BENCHMARKS, Benchmark
from livt_hf.data.decoding import stored_paths
from livt_hf.data.labels import BOX, class_feature
from livt_hf.data.load import resolve_benchmark_defaults
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError
from livt_hf.hub.card import TAGS, render
from livt_hf.hub.names import SELECTION_OPTIONS, format_options
from livt_hf.hub.publication import Publication, asking_the_hub
from livt_hf.metrics import group_sizes
from livt_hf.reports.page import markdown_table
from livt_hf.text import format_count

LISTED_CLASSES = 1000  # with more classes than this, the card lists the largest and the smallest only
RULES = {
    "exponential": "The i-th largest of C classes keeps int(n_max * {gamma:g}^(-i / (C - 1))) training images, where "
    "i counts from 0 and n_max is the number of images of the largest class.",
    "pareto": "The numbers of training images are quantiles of a Pareto distribution with power 6, stretched to an "
    "imbalance of {gamma:g}.",
    "balanced": "Every class keeps {count} training images.",
}


@dataclass(frozen=True)
class Origin:
    """How the images were picked, as a sentence, and from which dataset of the Hub."""

    rule: str
    seed: int
    source: str | None = None


def origin_of(splits: DatasetDict, settings: DataSpec) -> Origin:
    """Describe how a dataset was made that was loaded with these settings."""
    if any(BOX in split.column_names for split in splits.values()):
        raise LiVTError(
            f"{settings.dataset} has boxes in pictures, which are not published: publish whole images.", "dataset"
        )
    benchmark, local = BENCHMARKS.get(settings.dataset, Benchmark()), Path(settings.dataset).exists()
    made, chosen = resolve_benchmark_defaults(settings), format_options(settings.to_dict(), tuple(SELECTION_OPTIONS))
    rule = [f"The images were selected by `{chosen}`."] if chosen else []
    if not chosen and made.rule is None:
        rule.append("The training images are those of the dataset.")
    if is_made_split(splits, "test"):
        rule.append("The test split is not the dataset's own: it was held out of the training images.")
    held_out = is_made_split(splits, "validation")
    if made.rule is not None:
        counts = class_counts(splits["train"]) + (class_counts(splits["validation"]) if held_out else 0)
        largest = made.images_per_class or counts.max()
        rule.append(RULES[made.rule].format(gamma=made.imbalance_factor, count=largest))
        rule += ["A class that has fewer images keeps all of them."] * made.cap
    if held_out:
        rule.append("The validation split is not the dataset's own: it was held out of these training images.")
    hub_id = settings.dataset.partition(":")[0] if settings.dataset not in BENCHMARKS and not local else benchmark.hub
    path = Path(settings.source or settings.dataset)
    if settings.source or (local and settings.dataset not in BENCHMARKS):
        _check_inside(splits, path if path.is_dir() else path.parent)
    return Origin(" ".join(rule), settings.split_seed, hub_id)


def _check_inside(splits: DatasetDict, folder: Path) -> None:
    """Raise an error if an image is a link to a file outside of the folder, which was not meant to be published."""
    root = folder.resolve()
    stray = [
        path
        for split in splits.values()
        for path in stored_paths(split)
        if not Path(path).resolve().is_relative_to(root)
    ]
    if stray:
        raise LiVTError(
            f"{len(stray)} images are links to files outside of {folder}, the first is {stray[0]}: copy what is to be "
            "published into the folder.",
            argument="dataset",
        )


def dataset_card(splits: DatasetDict, publication: Publication, origin: Origin) -> DatasetCard:
    """Render the card of a dataset with the columns `image` and `label`."""
    counts = {name: np.asarray(class_counts(split)) for name, split in splits.items()}
    names, source = class_feature(next(iter(splits.values()))).names, origin.source
    data = DatasetCardData(
        license=publication.license,
        task_categories=["image-classification"],
        tags=TAGS,
        source_datasets=[f"extended|{source}"] if source else None,
        pretty_name=publication.name,
    )
    return render(
        "dataset",
        data,
        DatasetCard,
        title=publication.name,
        repo_id=publication.repo_id,
        license=publication.license,
        num_classes=len(names),
        source=source,
        rule=origin.rule,
        seed=origin.seed,
        split_table=markdown_table([{"split": name} | _sizes(counts[name], len(splits[name])) for name in counts]),
        class_table=markdown_table(_class_rows(names, counts)),
    )


def publish_dataset(splits: DatasetDict, publication: Publication, origin: Origin) -> str:
    """Push a dataset as parquet with its card, and return its URL; `datasets.load_dataset(repo_id)` reads it.

    Only images and labels are published: a column of groups may name patients.
    """
    splits = DatasetDict({name: split.select_columns(["image", "label"]) for name, split in splits.items()})
    card = dataset_card(splits, publication, origin)
    api, repo_id = HfApi(library_name="livt_hf"), publication.repo_id
    visible = f"nothing of the dataset is visible in {repo_id}"
    with asking_the_hub(lambda reason: f"{visible} ({reason}); run the same command again to complete it."):
        publication.open(api, "dataset")
        # The card goes first: push_to_hub adds the features and files to its metadata, in the same commit as the data.
        api.upload_file(
            path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id=repo_id, repo_type="dataset",
            commit_message="Card",
        )  # fmt: skip
        visible = f"in {repo_id}, which is {publication.visibility}, the card is complete and the data may be in part"
        splits.push_to_hub(repo_id, private=not publication.public, commit_message="Data")
    return f"{api.endpoint}/datasets/{repo_id}"


def _sizes(counts: np.ndarray, num_images: int) -> dict[str, str]:
    present = counts[counts > 0]
    sizes = {"images": num_images, "classes with images": len(present)}
    sizes |= {"largest class": present.max(), "smallest class": present.min()}
    row = {name: format_count(int(size)) for name, size in sizes.items()}
    row["imbalance"] = f"{present.max() / present.min():g}"
    return row | {group: format_count(size) for group, size in group_sizes(present).items()}


def _class_rows(names: list[str], counts: dict[str, np.ndarray]) -> list[dict[str, str]]:
    """Return a row per class from head to tail of the first split, or the two ends of a long list."""
    order = np.argsort(-next(iter(counts.values())), kind="stable")
    rows = [
        {"class": names[i]} | {split: format_count(int(count[i])) for split, count in counts.items()} for i in order
    ]
    if len(rows) <= LISTED_CLASSES:
        return rows
    return [*rows[:50], dict.fromkeys(rows[0], "…"), *rows[-50:]]
