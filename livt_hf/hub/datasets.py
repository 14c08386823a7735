"""A long-tailed split on the Hub: parquet, and a card with its counts, rule and seed."""

from dataclasses import dataclass

import numpy as np
from datasets import DatasetDict
from huggingface_hub import DatasetCard, DatasetCardData, HfApi

from livt_hf.data import class_counts
from livt_hf.data.labels import class_feature
from livt_hf.hub.cards import template
from livt_hf.hub.publication import Publication
from livt_hf.metrics import group_sizes
from livt_hf.results import number

LISTED_CLASSES = 1000  # with more classes than this, the card lists the largest and the smallest only


@dataclass(frozen=True)
class Origin:
    """How the images were picked (`rule` is a sentence), and of which dataset on the Hub."""

    rule: str
    seed: int
    source: str | None = None


def dataset_card(splits: DatasetDict, publication: Publication, origin: Origin) -> DatasetCard:
    """The card of a dataset with the columns `image` and `label`."""
    counts = {name: np.asarray(class_counts(split)) for name, split in splits.items()}
    names, source = class_feature(next(iter(splits.values()))).names, origin.source
    data = DatasetCardData(
        license=publication.license,
        task_categories=["image-classification"],
        tags=["long-tailed-recognition", "imbalanced-data", "livt"],
        source_datasets=[f"extended|{source}"] if source else None,
        pretty_name=publication.name,
    )
    taken = f"from [{source}](https://huggingface.co/datasets/{source})" if source else "from other images"
    card = DatasetCard.from_template(
        data,
        template_str=template("dataset"),
        title=publication.name,
        repo_id=publication.repo_id,
        summary=f"A long-tailed image classification dataset of {len(names):,} classes, taken {taken} by livt_hf.",
        rule=origin.rule,
        seed=origin.seed,
        splits=list(splits),
        split_rows=[[name, *_split_row(count)] for name, count in counts.items()],
        class_rows=_class_rows(names, counts),
        terms=f"The images stay under the terms of {source or 'their source'}; this is a selection of them.",
    )
    return DatasetCard(f"{str(card).rstrip()}\n")


def publish_dataset(splits: DatasetDict, publication: Publication, origin: Origin, token: str | None = None) -> str:
    """Push a dataset as parquet with its card and return its address; `datasets.load_dataset(repo_id)` reads it."""
    card = dataset_card(splits, publication, origin)
    api, repo_id, private = HfApi(token=token, library_name="livt_hf"), publication.repo_id, not publication.public
    address = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
    # The card goes first: push_to_hub adds the features and files to its metadata, in the same commit as the data.
    api.upload_file(
        path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id=repo_id, repo_type="dataset",
        commit_message="Card",
    )  # fmt: skip
    splits.push_to_hub(repo_id, private=private, token=token, commit_message="Data")
    return str(address)


def _split_row(counts: np.ndarray) -> list[str]:
    present = counts[counts > 0]
    sizes = [present.sum(), len(present), present.max(), present.min()]
    groups = group_sizes(present).values()
    return [*map(number, map(int, sizes)), f"{present.max() / present.min():g}", *map(number, groups)]


def _class_rows(names: list[str], counts: dict[str, np.ndarray]) -> list[list[str]]:
    """Every class from head to tail of the first split, or the two ends of a long list."""
    order = np.argsort(-next(iter(counts.values())), kind="stable")
    rows = [[str(names[i]).replace("|", "\\|"), *(number(int(count[i])) for count in counts.values())] for i in order]
    if len(rows) <= LISTED_CLASSES:
        return rows
    return [*rows[:50], ["…", *("…" for _ in counts)], *rows[-50:]]
