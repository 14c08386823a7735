"""Publish a finished run to the Hugging Face Hub.

    livt publish RUN org/name --dry_run              # list the files and upload nothing
    livt publish RUN org/name --license cc-by-4.0    # a private repository; --public makes it a public one
    livt publish RUN org/name-timm --form timm       # weights for timm, in a repository of their own
    livt publish RUN org/name --space                # also a Gradio Space that serves the model with a prior slider

A classifier becomes a repository that plain transformers serves and `LiViTForImageClassification.from_pretrained`
reads back, a pretraining run becomes a stock ViTMAE.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from livt_hf.commands import run_command
from livt_hf.errors import LiVTError
from livt_hf.evaluation.models import lent_plugin
from livt_hf.hub import Publication, listing, prepare_publication, prepare_space, publish, publish_space
from livt_hf.settings import CommandSettings, option


@dataclass
class PublishSettings(CommandSettings):
    """Publish a finished run to the Hugging Face Hub."""

    stage: ClassVar[str] = "publish"

    run: str | None = option(None, "folder of a finished run", positional="?", place=True)
    repo_id: str | None = option(None, "organisation/name on the Hub", positional="?")
    license: str | None = option(
        None,
        "licence of the weights, as the Hub spells it; must be named for weights trained on own data or started from "
        "a checkpoint on the Hub; default for this package's benchmarks: apache-2.0",
    )
    public: bool = option(False, "make the repository public; without it the repository is private")
    with_pictures: bool = option(
        False,
        "also upload the pictures that show images of the dataset (report page, best and worst classes, "
        "reconstructions); without it only plots of numbers are uploaded",
    )
    form: Literal["transformers", "timm"] = option("transformers", "library that is to load the classifier")
    tag: str | None = option(None, "git tag of this version, for instance v1.0")
    folder: str | None = option(None, "write what would be uploaded to this folder and upload nothing", place=True)
    space: bool = option(False, "also publish a Gradio Space of the same name that serves the model under any prior")
    dry_run: bool = option(False, "list the files that would be uploaded and upload nothing")

    def __post_init__(self):
        super().__post_init__()
        if self.run is None or self.repo_id is None:
            raise LiVTError("publish needs the folder of a run and a repository: livt publish RUN organisation/name.")


def recorded_plugin(asked: dict) -> dict:
    """The plugin that the run was trained with, unless another one is asked for."""
    return {} if "plugin" in asked else {"plugin": lent_plugin(Path(asked.get("run", "")))}


def main(argv=None):
    settings = PublishSettings.parse(argv, inherit=recorded_plugin)
    names = ("repo_id", "license", "form", "public", "with_pictures", "tag")
    publication = Publication(**{name: getattr(settings, name) for name in names})
    if settings.folder or settings.dry_run:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(settings.folder or f"{temporary}/publication")
            print(listing(prepare_publication(settings.run, folder, publication)))
            if settings.space:
                print(f"The Space:\n{listing(prepare_space(settings.run, f'{folder}-space', publication))}")
        print(f"Nothing was uploaded{f'; look at {folder}' if settings.folder else ''}.")
        return
    print(f"Published: {publish(settings.run, publication).commit_url}")
    if settings.space:
        print(f"The Space: {publish_space(settings.run, publication).commit_url}")


if __name__ == "__main__":
    run_command(main)
