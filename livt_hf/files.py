"""Files of this package: JSON and YAML that are checked when read, and files that are replaced as a whole."""

import contextlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from livt_hf.errors import LiVTError, did_you_mean
from livt_hf.specs import matches_type
from livt_hf.text import format_error, shorten

# Characters: PyYAML reads about 200,000 a second. Aliases make a few lines stand for any number of values.
MAX_JSON, MAX_YAML, MAX_EXPANDED = 2**27, 2**22, 2**24

Hints = Mapping[str, Any]  # types of values, by name


def is_hidden(name: str) -> bool:
    """Return True for files and folders that are not meant to be seen: .DS_Store, ._bird.jpg, __MACOSX."""
    return name.startswith(".") or name == "__MACOSX"


def read_values(path: Path, loader: type = yaml.SafeLoader) -> Any:
    """Read a JSON file (.json) or a YAML file (any other)."""
    kind = "JSON" if path.suffix == ".json" else "YAML"
    if not path.exists():
        raise LiVTError(f"the file {path} does not exist; correct its name.{did_you_mean(path)}")
    if not path.is_file():  # a pipe or device would be read for ever
        raise LiVTError(f"{path} is not readable {kind}: it is not a regular file; pass another one.")
    try:
        limit = MAX_JSON if kind == "JSON" else MAX_YAML
        with path.open(encoding="utf-8") as file:
            text = file.read(limit + 1)
        if len(text) > limit:
            raise ValueError(f"it has more than {limit:,} characters")
        return json.loads(text, object_pairs_hook=_without_repeats) if kind == "JSON" else _load_yaml(loader(text))
    # A ValueError is also text in another encoding, a date that does not exist and a number of 5,000 digits.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise LiVTError(
            f"{path} is not readable {kind}: {format_error(error)}; correct it or put back a copy."
        ) from error


def _without_repeats(pairs: Iterable[tuple[Any, Any]]) -> dict:
    """Return a dictionary, or raise an error where a name stands twice: the last one would win, silently."""
    values: dict = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shorten(name)} stands there twice")
        values[name] = value
    return values


def _load_yaml(loader: Any) -> Any:
    node = loader.get_single_node()
    if node is None:
        return None
    if _expanded_size(node, {}) > MAX_EXPANDED:
        raise ValueError("its aliases stand for too much, or for themselves, or a number is too long")
    return loader.construct_document(node)


def _expanded_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Return the number of characters of a YAML node with its aliases written out; infinite for what holds itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # until it is known
        if isinstance(node, yaml.ScalarNode):
            is_long = node.tag.endswith(":int") and len(node.value) > 1000  # 1:1:1:... takes the square of its length
            sizes[id(node)] = math.inf if is_long else 1.0 + len(node.value)
        else:
            if isinstance(node, yaml.MappingNode):
                _without_repeats((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = 1.0 + sum(_expanded_size(part, sizes) for part in parts)
    return sizes[id(node)]


def read_record(path: Path, hints: Hints | None = None, required: Iterable[str] = ()) -> dict[str, Any]:
    """Read a file of names and values; a name that is in `hints` must have a value of that type."""
    record = read_values(path)
    _check_record(record, hints or {}, required, str(path))
    return record


def read_records(path: Path, hints: Hints | None = None, required: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Read the lines of a .jsonl file, without a last line that a killed process left unfinished."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise LiVTError(f"{path} cannot be read: {format_error(error)}; repair or remove it.") from error
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


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Read the lines of a training log (log.jsonl)."""
    number = float | None
    hints = {"update": int, "epoch": float, "loss": number, "lr": number, "eval": dict[str, number]}
    return read_records(Path(path), hints, required=["update"])


def _check_record(record: Any, hints: Hints, required: Iterable[str], origin: str) -> None:
    """Raise an error for what is no dictionary, lacks a required name, or has a value of another type."""
    if not isinstance(record, dict):
        raise LiVTError(f"{origin} must hold names and their values, not a {type(record).__name__}.")
    for name in required:
        if name not in record:
            raise LiVTError(f"{origin} is damaged: it has no {name}; correct it or put back a copy.")
    for name, value in record.items():
        if name in hints and not matches_type(value, hints[name]):
            raise LiVTError(f"{origin} is damaged: {name} cannot be {shorten(value)}; correct it or put back a copy.")


def write_values(path: Path, values: Any) -> None:
    """Write a JSON file."""
    replace_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is either the old or the new one, whatever happens meanwhile."""
    with replacing(path) as writing:
        writing.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to and rename it afterwards, so that a file or folder is whole or absent."""
    writing = path.with_name(f".writing-{path.name}")
    shutil.rmtree(writing, ignore_errors=True)  # a folder that a killed process left
    try:
        yield writing
        os.replace(writing, path)
    except Exception:  # a full disk, for which every library has its own exception
        if writing.is_dir():
            shutil.rmtree(writing, ignore_errors=True)
        else:
            writing.unlink(missing_ok=True)
        raise


def check_writable(path: str | Path, argument: str) -> None:
    """Raise an error for a file or folder that could not be made, as in a read-only file system or in /proc."""
    parent = next(folder for folder in Path(path).absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        message = f"nothing can be written to {parent}: {error.strerror}; choose another folder."
        raise LiVTError(message, argument) from error


def flush(*paths: Path) -> None:
    """Write files and folders through to the disk before anything relies on them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
