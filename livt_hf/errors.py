"""What the package refuses, what was perhaps meant, and how a run says that it was stopped."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

_HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*(:[^\\]+)?", re.ASCII)  # a dataset's config stands after a colon


class LiVTError(ValueError):
    """Bad input or circumstances, in one sentence that names the value and the way out.

    Commands print the sentence alone. Every other exception is a bug and keeps its traceback. `argument` is the name
    of the argument or option that is wrong, where there is one.
    """

    def __init__(self, message: str = "", argument: str | None = None):
        super().__init__(message)
        self.argument = argument


class Interrupted(Exception):
    """The run was asked to stop, saved itself and can go on; with the words of the `livt` command that does it."""


def means_a_place(name: str) -> bool:
    """Whether a name can only be that of a place on this machine and no id on the Hub."""
    return _HUB_ID.fullmatch(name) is None


def perhaps_meant(place: str | Path, names: Iterable[str] = ()) -> str:
    """Of a place that is not there: a sentence with what is nearly so called, beside it or of `names`, if any is."""
    path = Path(place).expanduser()
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*names, *beside], n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""
