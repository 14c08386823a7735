"""The errors of the package, and suggestions for names that do not exist."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

_HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*(:[^\\]+)?", re.ASCII)  # a dataset's config stands after a colon


class LiVTError(ValueError):
    """Bad input or circumstances, in one sentence with the value and the way out.

    Commands print the sentence alone. Every other exception is a bug and keeps its traceback. `argument` is the name
    of the argument or option that is wrong, where there is one.
    """

    def __init__(self, message: str = "", argument: str | None = None):
        super().__init__(message)
        self.argument = argument


class Interrupted(Exception):
    """The run was stopped and has saved itself; the arguments are those of the `livt` command that resumes it."""


def is_path_not_hub_id(name: str) -> bool:
    """Return True if a name can only be a path on this machine and no id on the Hub."""
    return _HUB_ID.fullmatch(name) is None


def did_you_mean(path: str | Path, names: Iterable[str] = ()) -> str:
    """Return a sentence with the existing name nearest to a path, of its neighbours or of `names`; empty if none."""
    path = Path(path).expanduser()
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*names, *beside], n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def suggest_name(name: str, names: Iterable[str], prefix: str = "", otherwise: str = "--help lists them.") -> str:
    """Return the end of a sentence about a name that does not exist: the nearest of `names`, or `otherwise`."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; {otherwise}"
