"""A long-tailed split on the Hub: parquet, and a card with its counts, rule and seed."""

import numpy as np
from datasets import DatasetDict
from huggingface_hub import DatasetCard, DatasetCardData, HfApi

from livt_hf.data import class_counts
from livt_hf.data.labels import class_feature
from livt_hf.hub.cards import number, template
from livt_hf.metrics import group_sizes

LISTED_CLASSES = 1000  # more than this many, and the card lists the largest and smallest only


def dataset_card(
    splits: DatasetDict, repo_id: str, *, rule: str, seed: int, source: str | None = None, license: str | None = None
) -> DatasetCard:
    """The card of a data set with `image` and `label` columns; `rule` is a sentence, `source` an id on the Hub."""
    counts = {name: np.asarray(class_counts(split)) for name, split in splits.items()}
    names = class_feature(next(iter(splits.values()))).names
    data = DatasetCardData(
        license=license,
        task_categories=["image-classification"],
        tags=["long-tailed-recognition", "imbalanced-data", "livt"],
        source_datasets=[f"extended|{source}"] if source else None,
        pretty_name=repo_id.split("/")[-1],
    )
    origin = f"from [{source}](https://huggingface.co/datasets/{source})" if source else "from other images"
    terms = f"The pictures stay under the terms of {source or 'their source'}; this is a selection of them."
    card = DatasetCard.from_template(
        data,
        template_str=template("dataset"),
        title=repo_id.split("/")[-1],
        repo_id=repo_id,
        summary=f"A long-tailed image classification data set of {len(names):,} classes, taken {origin} by livt_hf.",
        rule=rule,
        seed=seed,
        splits=list(splits),
        split_rows=[[name, *_split_row(count)] for name, count in counts.items()],
        class_rows=_class_rows(names, counts),
        terms=terms,
    )
    return DatasetCard(f"{str(card).rstrip()}\n")


def publish_dataset(
    splits: DatasetDict,
    repo_id: str,
    *,
    rule: str,
    seed: int,
    source: str | None = None,
    license: str | None = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Push a data set as parquet with its card and return its address; `datasets.load_dataset(repo_id)` reads it."""
    card = dataset_card(splits, repo_id, rule=rule, seed=seed, source=source, license=license)
    api = HfApi(token=token, library_name="livt_hf")
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
    """Every class from head to tail of the first split, or the ends of a long list."""
    order = np.argsort(-next(iter(counts.values())), kind="stable")
    rows = [[str(names[i]).replace("|", "\\|"), *(number(int(count[i])) for count in counts.values())] for i in order]
    if len(rows) <= LISTED_CLASSES:
        return rows
    return [*rows[:50], ["…", *("…" for _ in counts)], *rows[-50:]]
