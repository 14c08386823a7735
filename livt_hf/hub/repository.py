"""A repository on the Hub: opening it as private or public as was asked for, and what can go wrong on the way."""

from huggingface_hub import HfApi, get_session

# HTTPError is the base class of the client's network errors, from whichever of httpx's generations it is built on.
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from livt_hf.errors import LiVTError
from livt_hf.hub.publication import Publication

# What the Hub and the way to it can fail with; ValueError is the client's word for metadata that the Hub refuses.
HUB_ERRORS = (HTTPError, OSError, RuntimeError, ValueError)


SECONDS_OF_SILENCE = 300.0  # from the Hub, after which a publication is given up; a large commit takes a while


class PublishError(LiVTError):
    """The Hub could not be reached or refused; nothing on this machine has changed."""


def open_repository(api: HfApi, publication: Publication, repo_type: str = "model") -> str:
    """Make the repository, or find it there and be sure that it is as private or public as was asked for.

    Returns its newest commit.
    """
    repo_id = publication.repo_id
    sdk = "gradio" if repo_type == "space" else None
    get_session().timeout = SECONDS_OF_SILENCE  # the client's own patience has no end
    api.create_repo(repo_id, repo_type=repo_type, private=not publication.public, exist_ok=True, space_sdk=sdk)
    found = api.repo_info(repo_id, repo_type=repo_type, timeout=SECONDS_OF_SILENCE)
    public = not found.private
    if public != publication.public:
        now, other = ("public", "private") if public else ("private", "public")
        raise LiVTError(
            f"{repo_id} exists and is {now}; {'pass' if public else 'leave out'} --public (in training "
            f"--hub_public), make it {other} on the Hub first, or choose another name."
        )
    return found.sha


def visible(api: HfApi, publication: Publication, before: str | None) -> str:
    """What of a run a failed upload left in a repository whose newest commit was `before`; None: it was not opened.

    A connection that breaks after the last byte was sent leaves it open whether the Hub has made the commit.
    """
    nothing = "nothing of the run is visible there"
    if before is None:
        return nothing
    try:
        now = api.repo_info(publication.repo_id, timeout=SECONDS_OF_SILENCE).sha
    except HUB_ERRORS:
        return "whether the run is visible there could not be asked"
    return nothing if now == before else "the Hub's answer was lost, but the run is visible there"


def reason(error: BaseException) -> str:
    """What went wrong in one line: the Hub's own words, or the innermost cause, which a client's errors wrap."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError | ValueError):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
        return "you are not logged in, or with a token that the Hub does not know; log in with `hf auth login`"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
