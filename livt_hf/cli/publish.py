"""`--push_to_hub` of the two stages: checked before training, published after it."""

import logging
from typing import Any

from livt_hf.errors import LiVTError
from livt_hf.results import Results
from livt_hf.runs import Run


def check_publishing(settings: Any) -> None:
    """Raise the errors of publishing before training, not after days of it."""
    if settings.hub.push_to_hub:
        if not settings.hub.hub_model_id:
            raise LiVTError("push_to_hub needs hub_model_id organisation/name.", argument="hub_model_id")
        from livt_hf.hub import Publication
        from livt_hf.training.results import is_local, is_own

        start: Any = getattr(settings.model, "pretrained", None)
        results = Results(stage=settings.stage, dataset=settings.data.dataset, pretrained=start)
        results.pretrained_local = start in (None, "none") or is_local(start)
        results.pretrained_own = is_own(start)
        Publication(settings.hub.hub_model_id, license=settings.hub.hub_license).licensed(results)


def publish_run(settings: Any, run: Run) -> None:
    """Publish a finished run, if `--push_to_hub` says so. Where the Hub cannot be reached, the run stays complete."""
    hub = settings.hub
    if hub.push_to_hub:
        from livt_hf.hub import Publication, publish

        publication = Publication(hub.hub_model_id, license=hub.hub_license, public=hub.hub_public)
        commit = publish(run.folder, publication)
        logging.getLogger(__name__).info("published: %s", commit.repo_url)
