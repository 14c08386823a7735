"""Publish a finished run to the Hugging Face Hub.

    livt publish RUN org/name --dry_run              # list the files and upload nothing
    livt publish RUN org/name --license cc-by-4.0    # a private repository; --public makes it a public one
    livt publish RUN org/name-timm --form timm       # weights for timm, in a repository of their own
    livt publish RUN org/name --space                # also a Gradio Space that serves the model with a prior slider

A classifier becomes a repository that plain transformers serves and `LiViTForImageClassification.from_pretrained`
reads back, a pretraining run becomes a stock ViTMAE.
"""

import tempfile
from pathlib import Path

from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import resolve_settings
from livt_hf.cli.settings import PublishSettings
from livt_hf.hub import (
    Publication,
    check_space,
    list_files,
    prepare_publication,
    prepare_space,
    publish,
    publish_space,
)


def main(argv=None):
    settings = resolve_settings(PublishSettings, argv)
    names = ("repo_id", "license", "form", "public", "with_pictures", "tag")
    publication = Publication(**{name: getattr(settings, name) for name in names})
    if settings.space:
        check_space(settings.run, publication)
    if settings.folder or settings.dry_run:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(settings.folder or f"{temporary}/publication")
            print(list_files(prepare_publication(settings.run, folder, publication)))
            if settings.space:
                print(f"The Space:\n{list_files(prepare_space(settings.run, f'{folder}-space', publication))}")
        print(f"Nothing was uploaded{f'; look at {folder}' if settings.folder else ''}.")
        return
    print(f"Published: {publish(settings.run, publication).commit_url}")
    if settings.space:
        print(f"The Space: {publish_space(settings.run, publication).commit_url}")


if __name__ == "__main__":
    run_command(main)
