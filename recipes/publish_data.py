"""Publish a long-tailed dataset to the Hugging Face Hub, as parquet with a card of its counts, rule and seed.

    livt publish-data cifar100-lt org/name --imbalance_factor 50 --dry_run    # say what would be uploaded
    livt publish-data FOLDER org/name --license cc-by-4.0                     # a private repository, or --public

`datasets.load_dataset("org/name")` and `--dataset org/name` read it back.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from livt_hf.commands import run_command
from livt_hf.data import class_counts, load_data
from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.errors import LiVTError
from livt_hf.hub import Publication, origin_of, publish_dataset
from livt_hf.results import number
from livt_hf.settings import DataSettings, option

_DATASET = DataSettings.__dataclass_fields__["dataset"]


@dataclass
class PublishDataSettings(DataSettings):
    """Publish a long-tailed dataset to the Hugging Face Hub."""

    stage: ClassVar[str] = "publish-data"

    dataset: str | None = dataclasses.field(default=None, metadata=_DATASET.metadata | {"positional": "?"})
    repo_id: str | None = option(None, "organisation/name on the Hub", positional="?")
    license: str | None = option(
        None, "licence of the images, as the Hub spells it; must be named for images of your own"
    )
    public: bool = option(False, "make the repository public; without it the repository is private")
    dry_run: bool = option(False, "say what would be uploaded and upload nothing")

    def __post_init__(self):
        super().__post_init__()
        if self.dataset is None or self.repo_id is None:
            raise LiVTError(
                "publish-data needs a dataset and a repository: livt publish-data DATASET organisation/name."
            )
        if self.license is None and self.dataset not in BENCHMARKS and Path(self.dataset).expanduser().exists():
            raise LiVTError(
                f"{self.dataset} holds images of your own; name their licence as the Hub spells it, for instance "
                "--license cc-by-nc-4.0."
            )


def main(argv: Sequence[str] | None = None) -> None:
    settings = PublishDataSettings.parse(argv)
    data = load_data(settings)
    publication = Publication(settings.repo_id, license=settings.license, public=settings.public)
    origin = origin_of(data, settings)
    print(f"To the {publication.visibility} repository {settings.repo_id}, with the images' file names and metadata:")
    for name, split in data.items():
        counts = class_counts(split)
        print(f"  {name}: {number(len(split))} images of {number(int((counts > 0).sum()))} classes")
    if settings.dry_run:
        print("Nothing was uploaded.")
        return
    print(f"Published: {publish_dataset(data, publication, origin)}")


if __name__ == "__main__":
    run_command(main)
