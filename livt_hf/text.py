"""Text for people: numbers, durations, lists of names, errors, commands to copy."""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from livt_hf.errors import LiVTError


def format_percent(fraction: float | None) -> str:
    """Format a fraction in percent: 0.1234 is "12.3"; None, which was not measured, is a dash."""
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def format_duration(seconds: float) -> str:
    """Format a time: 1.4 is "1 second", 7.4 is "7 seconds", 200 is "3.3 minutes", 9000 is "2.5 hours"."""
    if seconds < 1.5:
        return "1 second"
    if seconds < 7200:
        return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours"


def format_count(count: int | None) -> str:
    """Format a count: 7102 is "7,102"; None is a dash."""
    return "-" if count is None else f"{count:,}"


def shorten(value: Any) -> str:
    """Return the representation of a value, cut where it is too long for a sentence."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def format_error(error: BaseException) -> str:
    """Format an error in one line of reasonable length, with its type where the text alone says little."""
    # The number of an OSError and its path, which the caller has named, add nothing.
    strerror = isinstance(error, OSError) and error.filename is not None and error.strerror
    text = " ".join((strerror or str(error)).split())
    text = text if len(text) <= 400 else f"{text[:400]}..."
    return text if isinstance(error, OSError | LiVTError) and text else f"{type(error).__name__}: {text}"


# C0 and C1 but for line breaks and tabs, halves of surrogate pairs, and what turns the direction of letters around.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Write control characters as JSON does, `\\u001b`: they would steer a terminal. Line breaks and tabs stay."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def path_to_text(path: str | Path) -> str:
    """Return a path as text that every file takes: a byte of its name that is not UTF-8 is written as `\\udcff`."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode()


def text_to_path(text: str) -> Path:
    """Return the path that `path_to_text` has written."""
    return Path(re.sub(r"\\udc([89a-f][0-9a-f])", lambda byte: chr(0xDC00 + int(byte[1], 16)), text))


def shell_line(words: Iterable[str | Path]) -> str:
    """Join words to a line for the shell, quoted where needed."""
    return shlex.join(map(str, words))


def shell_words(line: str) -> list[str]:
    """Split a shell line into its words."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise LiVTError(f"{line!r} cannot be read as options: {error}; close what is quoted.") from error


def format_accuracy(metrics: dict) -> str:
    """Format the overall accuracy, or mAP where images have several labels, and that of each shot group.

    Where the test set is imbalanced, accuracy rewards its frequent classes: the mean class accuracy stands beside it.
    """
    overall = "accuracy" if "accuracy" in metrics else "map"
    labels = {"map": "mean average precision"}
    names = (overall, "many", "medium", "few")
    parts = [f"{labels.get(name, name)} {format_percent(metrics[name])}" for name in names]
    if format_percent(metrics.get("mean_class_accuracy")) not in ("-", format_percent(metrics[overall])):
        parts.insert(1, f"mean class accuracy {format_percent(metrics['mean_class_accuracy'])}")
    calibration = f"; ECE {format_percent(metrics['ece'])}" if "ece" in metrics else ""
    return "  ".join(parts) + f"  (percent{calibration})"
