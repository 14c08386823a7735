"""A repository on the Hub: opening it as private or public as was asked for, and what can go wrong on the way."""

from huggingface_hub import HfApi

# HTTPError is the base class of the client's network errors, from whichever of httpx's generations it is built on.
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from livt_hf.errors import LiVTError
from livt_hf.hub.publication import Publication

# What the Hub and the way to it can fail with; ValueError is the client's word for metadata that the Hub refuses.
HUB_ERRORS = (HTTPError, OSError, RuntimeError, ValueError)


class PublishError(LiVTError):
    """The Hub could not be reached or refused; nothing on this machine has changed."""


def open_repository(api: HfApi, publication: Publication, repo_type: str = "model") -> None:
    """Make the repository, or find it there and be sure that it is as private or public as was asked for."""
    repo_id = publication.repo_id
    sdk = "gradio" if repo_type == "space" else None
    api.create_repo(repo_id, repo_type=repo_type, private=not publication.public, exist_ok=True, space_sdk=sdk)
    public = not api.repo_info(repo_id, repo_type=repo_type).private
    if public != publication.public:
        found, other = ("public", "private") if public else ("private", "public")
        raise LiVTError(
            f"{repo_id} exists and is {found}; {'pass' if public else 'leave out'} --public (in training "
            f"--hub_public), make it {other} on the Hub first, or choose another name."
        )


def reason(error: BaseException) -> str:
    """What went wrong in one line: the Hub's own words, or the innermost cause, which a client's errors wrap."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError | ValueError):
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
