"""A Gradio Space that serves a published model: the demo of `livt demo`, for those who have only a browser."""

import logging
import tempfile
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, SpaceCard, SpaceCardData

from livt_hf.errors import LiVTError
from livt_hf.hub.cards import TAGS, template
from livt_hf.hub.facts import needs_plugin
from livt_hf.hub.publication import Publication
from livt_hf.hub.publishing import check_finished, listing, published_files
from livt_hf.hub.repository import HUB_ERRORS, PublishError, open_repository, reason
from livt_hf.runs import Run
from livt_hf.version import __version__

SDK_VERSION = "6.31.0"  # of Gradio: the newest in which the demo was tried
APP = '''"""The demo of {model}. On your own machine: pip install -r requirements.txt, then python app.py."""

from livt_hf.demo.app import serve, show, start

serve(start([show("{model}")]))
'''


def prepare_space(run: str | Path, folder: str | Path, publication: Publication) -> Path:
    """Write to `folder` exactly what `publish_space` would upload: an app, what it needs, a card. It runs as it is."""
    run, folder = Path(run), Path(folder)
    check_finished(run)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise LiVTError(f"{folder} is not empty; give an empty or a new folder for the Space.")
    if publication.form != "transformers":
        raise LiVTError(f"a Space serves the transformers form of a model, not {publication.form}; leave --form out.")
    results = Run(run).results
    if needs_plugin(results):
        raise LiVTError(f"a Space does not have the plugin that registers the loss {results.loss}; leave --space out.")
    (folder / "app.py").write_text(APP.format(model=publication.repo_id), encoding="utf-8")
    (folder / "requirements.txt").write_text(f"livt-hf[demo]>={__version__}\n", encoding="utf-8")
    data = SpaceCardData(
        title=publication.name,
        sdk="gradio",
        sdk_version=SDK_VERSION,
        python_version="3.11",
        app_file="app.py",
        license=publication.licensed(results).license,
        models=[publication.repo_id],
        tags=["image-classification"] * (results.stage == "finetune") + TAGS,
    )
    words = {"repo_id": publication.repo_id, "private": not publication.public}
    card = SpaceCard.from_template(data, template_str=template("space"), **words)
    (folder / "README.md").write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return folder


def publish_space(run: str | Path, publication: Publication, api: HfApi | None = None) -> CommitInfo:
    """Upload the Space of a model that is published under the same name, as one commit."""
    api, repo_id = api or HfApi(library_name="livt_hf"), publication.repo_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_space(run, Path(temporary) / "space", publication)
        logging.getLogger(__name__).info("to the %s Space %s:\n%s", publication.visibility, repo_id, listing(folder))
        try:
            open_repository(api, publication, "space")
            files = [CommitOperationAdd(name, path) for name, path in published_files(folder).items()]
            message = f"Publish with livt_hf {__version__}"
            return api.create_commit(repo_id, files, repo_type="space", commit_message=message)
        except LiVTError:
            raise
        except HUB_ERRORS as error:
            raise PublishError(
                f"the Space {repo_id} was not published ({reason(error)}), the model is; publish the Space later "
                f"with: {publication.command(run)} --space"
            ) from error
