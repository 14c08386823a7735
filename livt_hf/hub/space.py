"""A Gradio Space that serves a published model: the demo of `livt demo`, for those who have only a browser."""

import logging
import tempfile
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, SpaceCard, SpaceCardData

from livt_hf.errors import LiVTError
from livt_hf.hub.cards import TAGS, render
from livt_hf.hub.facts import needs_plugin
from livt_hf.hub.publication import Publication, asking_the_hub
from livt_hf.hub.publishing import finished_results, listing, make_empty, upload
from livt_hf.results import Results
from livt_hf.version import __version__

SDK_VERSION = "6.31.0"  # of Gradio: the newest in which the demo was tried
APP = '''"""The demo of {model}. On your own machine: pip install -r requirements.txt, then python app.py."""

from livt_hf.demo.app import serve, show, start

serve(start([show("{model}")]))
'''


def check_space(run: str | Path, publication: Publication) -> Results:
    """Refuse what no Space can serve, before anything is uploaded. Returns the results of the run."""
    results = finished_results(Path(run))
    if publication.form != "transformers":
        raise LiVTError(f"a Space serves the transformers form of a model, not {publication.form}; leave --form out.")
    if needs_plugin(results):
        raise LiVTError(f"a Space does not have the plugin that registers the loss {results.loss}; leave --space out.")
    return results


def prepare_space(run: str | Path, folder: str | Path, publication: Publication) -> Path:
    """Write to `folder` exactly what `publish_space` would upload: an app, what it needs, a card. It runs as it is."""
    folder, results = Path(folder), check_space(run, publication)
    make_empty(folder)
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
    render("space", data, SpaceCard, **words).save(folder / "README.md")
    return folder


def publish_space(run: str | Path, publication: Publication, api: HfApi | None = None) -> CommitInfo:
    """Upload the Space of a model that is published under the same name, as one commit."""
    api, repo_id = api or HfApi(library_name="livt_hf"), publication.repo_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_space(run, Path(temporary) / "space", publication)
        logging.getLogger(__name__).info("to the %s Space %s:\n%s", publication.visibility, repo_id, listing(folder))
        with asking_the_hub(
            lambda why: (
                f"the Space {repo_id} was not published ({why}), the model is; publish the Space later with: "
                f"{publication.command(run)} --space"
            )
        ):
            publication.open(api, "space")
            return upload(api, folder, publication, "space")
