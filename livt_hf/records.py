"""Records on disk, JSON and YAML: what is damaged is refused in one sentence, and a file is replaced as a whole."""

import json
import types
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from livt_hf.errors import LiVTError, perhaps_meant
from livt_hf.system import replacing

Hints = Mapping[str, Any]  # the types of values, by their names


def read_values(path: Path, loader: type = yaml.SafeLoader) -> Any:
    """What a JSON file (.json) or a YAML file (any other) holds."""
    kind = "JSON" if path.suffix == ".json" else "YAML"
    if not path.exists():
        raise LiVTError(f"the file {path} does not exist; correct its name.{perhaps_meant(path)}")
    try:
        text = path.read_text(encoding="utf-8")
        if kind == "JSON":
            return json.loads(text)
        values = yaml.load(text, Loader=loader)
        json.dumps(values, default=str, skipkeys=True)  # a ValueError where a list or a dictionary contains itself
        return values
    # A ValueError is also text in another encoding, a date that does not exist and a number of 5,000 digits.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise LiVTError(f"{path} is not readable {kind}: {in_words(error)}; correct it or put back a copy.") from error


def read_record(path: Path, hints: Hints | None = None, required: Iterable[str] = ()) -> dict[str, Any]:
    """A file of names and values. `hints` are the types of some of them: a name that is there must fit its own."""
    record = read_values(path)
    _check_record(record, hints or {}, required, str(path))
    return record


def read_records(path: Path, hints: Hints | None = None, required: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The lines of a .jsonl file, without a last line that a killed process left unfinished."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise LiVTError(f"{path} cannot be read: {in_words(error)}; repair or remove it.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise LiVTError(f"line {number} of {path} is not JSON; repair or remove it.") from error
            continue
        if record is not None:
            _check_record(record, hints or {}, required, f"line {number} of {path}")
            records.append(record)
    return records


def _check_record(record: Any, hints: Hints, required: Iterable[str], place: str) -> None:
    """Refuse what is no record, lacks what is required, or has a value that its hint does not allow."""
    if not isinstance(record, dict):
        raise LiVTError(f"{place} must hold names and their values, not a {type(record).__name__}.")
    for name in required:
        if name not in record:
            raise LiVTError(f"{place} is damaged: it has no {name}; correct it or put back a copy.")
    for name, value in record.items():
        if name in hints and not fits(value, hints[name]):
            raise LiVTError(f"{place} is damaged: {name} cannot be {shown(value)}; correct it or put back a copy.")


def check_settings(values: Mapping[str, Any], hints: Hints) -> None:
    """Refuse settings of a model that are missing or that their hints do not allow."""
    for name, hint in hints.items():
        if not fits(values.get(name), hint):
            way_out = "correct it in the call or in config.json"
            if get_origin(hint) is Literal:
                way_out = f"choose one of {', '.join(get_args(hint))}"
            raise LiVTError(f"{name} cannot be {shown(values.get(name))}; {way_out}.")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as types are written in this package: unions, literals, lists, dictionaries.

    A whole number is a float too, and a truth is neither.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str | bool) and value in parts
    if origin is list:
        return isinstance(value, list | tuple) and all(fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


def shown(value: Any) -> str:
    """A value as a sentence can hold it."""
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:80]}..."


def in_words(error: BaseException) -> str:
    """An error in one line of reasonable length, with its kind where the words alone say little."""
    # Of a file: the number of the error and its path, which the caller has named, say nothing more.
    known = isinstance(error, OSError) and error.filename is not None and error.strerror
    words = " ".join((known or str(error)).split())
    words = words if len(words) <= 400 else f"{words[:400]}..."
    return words if isinstance(error, OSError | LiVTError) and words else f"{type(error).__name__}: {words}"


def write_values(path: Path, values: Any) -> None:
    """What `read_values` reads from a JSON file."""
    replace_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is either the old or the new one, whatever happens meanwhile."""
    with replacing(path) as writing:
        writing.write_text(text, encoding="utf-8")
