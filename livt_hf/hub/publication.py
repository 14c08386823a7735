"""A publication: where it goes, under which licence, how much of it is shown; and its repository on the Hub."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from huggingface_hub import HfApi, get_session

# HTTPError is the base class of the client's network errors, from whichever of httpx's generations it is built on.
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from livt_hf.errors import LiVTError
from livt_hf.hub.facts import TITLES, hub_ids
from livt_hf.results import Results
from livt_hf.text import shell_line

BENCHMARK_LICENSE = "apache-2.0"
# What the Hub and the way to it can fail with; ValueError is the client's word for metadata that the Hub refuses.
HUB_ERRORS = (HTTPError, OSError, RuntimeError, ValueError)
SECONDS_OF_SILENCE = 300.0  # from the Hub, after which a publication is given up; a large commit takes a while


class PublishError(LiVTError):
    """The Hub could not be reached or refused; nothing on this machine has changed."""


@dataclass(frozen=True)
class Publication:
    """A repository on the Hub, private unless `public`.

    `form` is the library that can load the weights of a classifier. `with_pictures` also shows the pictures that are
    made of images of the dataset. `license` is as the Hub spells it; None is allowed where `licensed` finds one.
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
                "before the slash, in letters, digits, hyphens, points and underscores."
            )

    @property
    def name(self) -> str:
        return self.repo_id.split("/")[-1]

    @property
    def visibility(self) -> str:
        return "public" if self.public else "private"

    def licensed(self, results: Results) -> Self:
        """The publication with its licence, which the user has to name for data or weights that are not ours."""
        if self.license is not None:
            return self
        foreign = None if results.dataset in TITLES else f"on {results.dataset}"
        if not results.pretrained_own or results.pretrained in hub_ids(results):
            foreign = f"from the weights of {results.pretrained}"
        if foreign:
            raise LiVTError(
                f"the run was trained {foreign}, so livt_hf cannot choose the licence of its weights; name one as the "
                "Hub spells it, for instance --license cc-by-nc-4.0 (in training --hub_license)."
            )
        return replace(self, license=BENCHMARK_LICENSE)

    def command(self, run: str | Path) -> str:
        """The command that makes this publication."""
        words = ["livt", "publish", str(run), self.repo_id]
        words += ["--license", self.license] if self.license else []
        words += ["--form", self.form] if self.form != "transformers" else []
        words += ["--public"] * self.public + ["--with_pictures"] * self.with_pictures
        return shell_line(words + (["--tag", self.tag] if self.tag else []))

    def open(self, api: HfApi, repo_type: str = "model") -> str:
        """Make the repository, or find it there and be sure that it is as private or public as was asked for.

        Returns its newest commit.
        """
        sdk = "gradio" if repo_type == "space" else None
        get_session().timeout = SECONDS_OF_SILENCE  # the client's own patience has no end
        api.create_repo(self.repo_id, repo_type=repo_type, private=not self.public, exist_ok=True, space_sdk=sdk)
        found = api.repo_info(self.repo_id, repo_type=repo_type, timeout=SECONDS_OF_SILENCE)
        if bool(found.private) == self.public:
            now, way, other = ("private", "leave out", "public") if self.public else ("public", "pass", "private")
            raise LiVTError(
                f"{self.repo_id} exists and is {now}; {way} --public (in training --hub_public), make it {other} on "
                "the Hub first, or choose another name."
            )
        return found.sha

    def visible(self, api: HfApi, before: str | None) -> str:
        """What of a run a failed upload left where the newest commit was `before`; None: it was not opened.

        A connection that breaks after the last byte was sent leaves it open whether the Hub has made the commit.
        """
        nothing = "nothing of the run is visible there"
        if before is None:
            return nothing
        try:
            now = api.repo_info(self.repo_id, timeout=SECONDS_OF_SILENCE).sha
        except HUB_ERRORS:
            return "whether the run is visible there could not be asked"
        return nothing if now == before else "the Hub's answer was lost, but the run is visible there"


@contextlib.contextmanager
def asking_the_hub(failed: Callable[[str], str]) -> Iterator[None]:
    """Around what the Hub is asked: `failed` says what it means that this went wrong, for a reason in one line."""
    try:
        yield
    except LiVTError:
        raise
    except HUB_ERRORS as error:
        raise PublishError(failed(_reason(error))) from error


def _reason(error: BaseException) -> str:
    """The Hub's own words, or the innermost cause, which a client's errors wrap."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError | ValueError):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
        return "you are not logged in, or with a token that the Hub does not know; log in with `hf auth login`"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
