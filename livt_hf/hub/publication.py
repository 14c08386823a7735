"""What a publication is: where it goes, under which licence, and how much of it is shown."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from livt_hf.errors import LiVTError
from livt_hf.hub.facts import TITLES, hub_ids
from livt_hf.results import Results
from livt_hf.system import shell_line

BENCHMARK_LICENSE = "apache-2.0"


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
