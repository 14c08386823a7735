"""Publish a long-tailed dataset to the Hugging Face Hub, as parquet with a card of its counts, rule and seed.

    livt publish-data cifar100-lt org/name --imbalance_factor 50 --dry_run    # say what would be uploaded
    livt publish-data FOLDER org/name --license cc-by-4.0                     # a private repository, or --public
    livt publish-data labels.csv org/name --license mit

`datasets.load_dataset("org/name")` and `--dataset org/name` read it back.
"""

from collections.abc import Sequence

from livt_hf.cli.console import run_command
from livt_hf.cli.settings import PublishDataSettings
from livt_hf.data import class_counts, load_dataset
from livt_hf.data.decoding import check_readable
from livt_hf.hub import Publication, origin_of, publish_dataset
from livt_hf.text import format_count


def main(argv: Sequence[str] | None = None) -> None:
    settings = PublishDataSettings.parse(argv)
    publication = Publication(settings.repo_id, license=settings.license, public=settings.public)
    data = load_dataset(settings.data)
    if settings.data.on_broken == "error":
        for split in data.values():
            check_readable(split)
    origin = origin_of(data, settings.data)
    print(f"To the {publication.visibility} repository {settings.repo_id}, with the images' file names and metadata:")
    for name, split in data.items():
        counts = class_counts(split)
        print(f"  {name}: {format_count(len(split))} images of {format_count(int((counts > 0).sum()))} classes")
    if settings.dry_run:
        print("Nothing was uploaded.")
        return
    print(f"Published: {publish_dataset(data, publication, origin)}")


if __name__ == "__main__":
    run_command(main)
