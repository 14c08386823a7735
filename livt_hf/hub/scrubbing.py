"""What must not leave the machine: absolute paths are shortened to their last part, a token stops the publication."""

import html
import json
import mmap
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import yaml

from livt_hf.errors import LiVTError
from livt_hf.records import read_records, read_values
from livt_hf.settings import EvalSettings, FinetuneSettings, PretrainSettings

TEXTS = (".md", ".html", ".json", ".jsonl", ".yaml")
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{20,}")
# A path inside a sentence. Its first slash stands after a space, quote, bracket, `=` or at the start, which leaves
# alone URLs, "many/medium/few", closing HTML tags and base64. At least one folder, so that a lone "/" is no path.
_POSIX = re.compile(r"(?<![\w.:/<>+\\-])(?:file://)?~?/(?:[^\s/\"'<>|:;,()\\]+/)+[^\s/\"'<>|:;,()\\]*")
_WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:(?:\\{1,2}[^\s\"'<>|:;,()\\]+)+")
_WHOLE = re.compile(r"(?:file://|~|/|[A-Za-z]:[\\/])[^\n]*")
# The options that may name a place on this machine, of the commands whose records are published.
PLACES = {name for settings in (PretrainSettings, FinetuneSettings, EvalSettings) for name in settings.names("place")}
# A home directory by its usual name, of any user.
_HOME = re.compile(rb"(?<![\w+/.])(?:/home/|/Users/)\w|[A-Za-z]:\\{1,2}Users\\")


def scrub_text(text: str, places: Collection[str] = ()) -> str:
    """The text with each absolute path in it, and each of the given places, cut to `<local>/name`."""
    for place in sorted(places, key=len, reverse=True):
        for written in (str, html.escape):  # as a page has it
            text = text.replace(written(place), written(_shortened(place)))
    return _WINDOWS.sub(lambda match: _shortened(match[0]), _POSIX.sub(lambda match: _shortened(match[0]), text))


def _shortened(place: str) -> str:
    """The last part, or what follows `runs/`: a run's own name is no secret and "1" alone says nothing."""
    parts = [part for part in re.split(r"[/\\]+", place) if part]
    kept = parts[parts.index("runs") + 1 :] if "runs" in parts[:-1] else parts[-1:]
    if kept[0].startswith("~") or parts[-2:-1] in (["home"], ["Users"]):  # the folder is called like its owner
        kept = []
    return "/".join(["<local>", *kept])


def scrub_value(value, hub_ids: Collection[str] = ()):
    """`scrub_text` through dictionaries and lists; a string that is a path from end to end may contain spaces."""
    if isinstance(value, dict):
        return {
            name: _shortened(item) if _is_place(name, item, hub_ids) else scrub_value(item, hub_ids)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [scrub_value(item, hub_ids) for item in value]
    if isinstance(value, str):
        return _shortened(value) if _WHOLE.fullmatch(value) and len(value) > 1 else scrub_text(value)
    return value


def _is_place(name: str, value, hub_ids: Collection[str]) -> bool:
    """Fields that name places are shortened also when they are relative, unless the place is on the Hub."""
    a_path = isinstance(value, str) and value != "/" and re.search(r"[/\\]", value)
    return name in PLACES and a_path and value not in hub_ids


def named_places(record: Mapping, hub_ids: Collection[str] = ()) -> set[str]:
    """The places on this machine that the options in a record name."""
    return {value for name, value in record.items() if _is_place(name, value, hub_ids)}


def scrub_file(source: Path, target: Path, hub_ids: Collection[str] = (), places: Collection[str] = ()) -> None:
    """Copy a text file, JSON, JSON lines or YAML without its paths.

    `hub_ids` only look like paths; `places` are paths also where they stand in a sentence and look like words.
    """
    if source.suffix == ".json":
        text = json.dumps(scrub_value(read_values(source), hub_ids), indent=2, ensure_ascii=False) + "\n"
    elif source.suffix == ".jsonl":
        lines = [scrub_value(line, hub_ids) for line in read_records(source)]
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    elif source.suffix in (".yaml", ".yml"):
        text = yaml.safe_dump(scrub_value(read_values(source), hub_ids), sort_keys=False, allow_unicode=True)
    else:
        text = scrub_text(source.read_text(encoding="utf-8"), places)
    target.write_text(text, encoding="utf-8")


def refuse_secrets(folder: Path, forbidden: Iterable[str] = ()) -> None:
    """Raise if a file below `folder` holds a Hub token or a home directory, or a text one of the `forbidden` strings.

    Weights are not searched for those: a short one is bound to be somewhere in millions of numbers.
    """
    # JSON writes each backslash of a Windows path twice.
    literal = [re.escape(text.encode()).replace(rb"\\", rb"\\{1,2}") for text in forbidden if text]
    in_texts = [_HOME, *(re.compile(rb"(?<![\w+/.])" + text + rb"(?![\w-])") for text in literal)]
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
        name = path.relative_to(folder)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if TOKEN.search(content):
                raise LiVTError(
                    f"{name} seems to hold a Hub token (hf_...); remove the token from the run and revoke it."
                )
            for pattern in in_texts if path.suffix in TEXTS else [_HOME]:
                if found := pattern.search(content):
                    near = content[max(0, found.start() - 20) : found.end() + 20].decode(errors="replace")
                    raise LiVTError(f"{name} names a private place or a secret (…{near!r}…); remove it from the run.")
