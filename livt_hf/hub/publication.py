"""The repository of a publication: its name, licence and visibility, and what can go wrong on the Hub."""

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from huggingface_hub import HfApi, get_session

# HTTPError is the base class of the client's network errors, from whichever of httpx's generations it is built on.
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from livt_hf.errors import LiVTError
from livt_hf.hub.names import DATASET_TITLES, find_hub_ids
from livt_hf.results import Results

BENCHMARK_LICENSE = "apache-2.0"
# Errors of the Hub and of the network; the client raises ValueError for metadata that the Hub rejects.
HUB_ERRORS = (HTTPError, OSError, RuntimeError, ValueError)
HUB_TIMEOUT = 300.0  # seconds; a large commit takes a while


class PublishError(LiVTError):
    """The Hub could not be reached or rejected a request; nothing on this machine has changed."""


@dataclass(frozen=True)
class Publication:
    """Where and how a run or a dataset is published.

    Args:
        repo_id: `organisation/name` on the Hub.
        license: as the Hub spells it; None is allowed where `licensed` finds one.
        form: library that loads the weights of a classifier.
        public: make the repository public; it is private otherwise.
        with_pictures: also publish pictures that show images of the dataset.
        tag: git tag of this version.
    """

    repo_id: str
    license: str | None = None
    form: Literal["transformers", "timm"] = "transformers"
    public: bool = False
    with_pictures: bool = False
    tag: str | None = None

    def __post_init__(self):
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id, re.ASCII):
            raise LiVTError(
                f"{self.repo_id!r} is no repository on the Hub; name it organisation/name, or with your user name "
                "before the slash, in letters, digits, hyphens, points and underscores.",
                argument="repo_id",
            )

    @property
    def name(self) -> str:
        return self.repo_id.split("/")[-1]

    @property
    def visibility(self) -> str:
        return "public" if self.public else "private"

    def licensed(self, results: Results) -> Self:
        """Return the publication with a licence, which must be named for data or weights of others."""
        if self.license is not None:
            return self
        foreign = None if results.dataset in DATASET_TITLES else f"on {results.dataset}"
        if not results.pretrained_own or results.pretrained in find_hub_ids(results):
            foreign = f"from the weights of {results.pretrained}"
        if foreign:
            raise LiVTError(
                f"the run was trained {foreign}, so livt_hf cannot choose the licence of its weights; name one as the "
                "Hub spells it, for instance --license cc-by-nc-4.0 (in training --hub_license).",
                argument="license",
            )
        return replace(self, license=BENCHMARK_LICENSE)

    def command(self, run: str | Path) -> str:
        """Return the command that makes this publication."""
        words = ["livt", "publish", str(run), self.repo_id]
        words += ["--license", self.license] if self.license else []
        words += ["--form", self.form] if self.form != "transformers" else []
        words += ["--public"] * self.public + ["--with_pictures"] * self.with_pictures
        return shlex.join(words + (["--tag", self.tag] if self.tag else []))

    def open(self, api: HfApi, repo_type: str = "model") -> str:
        """Create the repository, or check the visibility of an existing one, and return its last commit."""
        sdk = "gradio" if repo_type == "space" else None
        get_session().timeout = HUB_TIMEOUT  # the client's own default is no timeout
        api.create_repo(self.repo_id, repo_type=repo_type, private=not self.public, exist_ok=True, space_sdk=sdk)
        found = api.repo_info(self.repo_id, repo_type=repo_type, timeout=HUB_TIMEOUT)
        if bool(found.private) == self.public:
            now, way, other = ("private", "leave out", "public") if self.public else ("public", "pass", "private")
            raise LiVTError(
                f"{self.repo_id} exists and is {now}; {way} --public (in training --hub_public), make it {other} on "
                "the Hub first, or choose another name.",
                argument="public",
            )
        return found.sha

    def describe_state(self, api: HfApi, before: str | None) -> str:
        """Return what a failed upload left in a repository whose last commit was `before`, None where not opened.

        If a connection breaks after the last byte was sent, the Hub may or may not have made the commit.
        """
        nothing = "nothing of the run is visible there"
        if before is None:
            return nothing
        try:
            now = api.repo_info(self.repo_id, timeout=HUB_TIMEOUT).sha
        except HUB_ERRORS:
            return "whether the run is visible there is unknown"
        return nothing if now == before else "the Hub's response was lost, but the run is visible there"


@contextlib.contextmanager
def asking_the_hub(message: Callable[[str], str]) -> Iterator[None]:
    """Turn errors of the Hub into a `PublishError`, whose message is built from the reason in one line."""
    try:
        yield
    except LiVTError:
        raise
    except HUB_ERRORS as error:
        raise PublishError(message(_reason(error))) from error


def _reason(error: BaseException) -> str:
    """Return the message of the Hub, or of the innermost cause that the client's errors wrap."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError | ValueError):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
        return "you are not logged in, or with a token that the Hub does not know; log in with `hf auth login`"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
