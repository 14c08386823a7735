"""What must not leave the machine: absolute paths are shortened to their last part, a token stops the publication."""

import html
import json
import mmap
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import yaml

from livt_hf.errors import LiVTError
from livt_hf.files import read_records, read_values
from livt_hf.reports.page import plain_markdown
from livt_hf.settings import EvalSettings, FinetuneSettings, PretrainSettings

TEXTS = (".md", ".html", ".json", ".jsonl", ".yaml")
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{20,}")
# A path inside a sentence. Its first slash stands after a space, quote, bracket, `=` or at the start, which leaves
# alone URLs, "many/medium/few", closing HTML tags, base64 and what was cut before. At least one folder, so that a lone
# "/" is no path.
_POSIX = r"(?<![\w.:/<>)+\\-])(?:file://)?~?/(?:[^\s/\"'<>|:;,()\\]+/)+[^\s/\"'<>|:;,()\\]*"
_WINDOWS = r"(?<!\w)[A-Za-z]:(?:\\{1,2}[^\s\"'<>|:;,()\\]+)+"
_WHOLE = re.compile(r"(?:file://|~|/|[A-Za-z]:[\\/])[^\n]*")
# The options that may name a place on this machine, of the commands whose records are published.
PLACES = {
    name for settings in (PretrainSettings, FinetuneSettings, EvalSettings) for name in settings.names("is_path")
}
# A home directory by its usual name, of any user.
_HOME = re.compile(rb"(?<![\w+/.])(?:/home/|/Users/)\w|[A-Za-z]:\\{1,2}Users\\")


class Scrubber:
    """Cuts each absolute path, and each of the given places, to `(local)/name`.

    `places` are paths also where they stand in a sentence and look like words. `kept` only look like paths and stay as
    they are: ids on the Hub, and names of classes such as `/m/01g317`.
    """

    def __init__(self, places: Collection[str] = (), kept: Collection[str] = ()):
        self.kept = kept
        whole = rf"(?<![\w/\\])(?:{_any_of(kept)})(?![\w/\\])"
        self.pattern = re.compile(f"(?P<kept>{whole})|{_any_of(places)}|{_POSIX}|{_WINDOWS}")

    def text(self, text: str) -> str:
        return self.pattern.sub(lambda found: found[0] if found["kept"] else _shortened(found[0]), text)

    def value(self, value):
        """`text` through dictionaries and lists; a string that is a path from end to end may contain spaces."""
        if isinstance(value, dict):
            return {
                name: _shortened(item) if _is_place(name, item, self.kept) else self.value(item)
                for name, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, str) and value not in self.kept:
            return _shortened(value) if _WHOLE.fullmatch(value) and len(value) > 1 else self.text(value)
        return value

    def file(self, source: Path, target: Path) -> None:
        """Copy a text file, JSON, JSON lines or YAML."""
        if source.suffix == ".json":
            text = json.dumps(self.value(read_values(source)), indent=2, ensure_ascii=False) + "\n"
        elif source.suffix == ".jsonl":
            lines = map(self.value, read_records(source))
            text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        elif source.suffix in (".yaml", ".yml"):
            text = yaml.safe_dump(self.value(read_values(source)), sort_keys=False, allow_unicode=True)
        else:
            text = self.text(source.read_text(encoding="utf-8"))
        target.write_text(text, encoding="utf-8")


def _any_of(words: Collection[str]) -> str:
    """A pattern of these words, the longest first, as a record or a page has them; of none it matches nothing."""
    forms = {form for word in words for form in (word, plain_markdown(word), html.escape(word))}
    return "|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or "(?!)"


def _shortened(place: str) -> str:
    """The last part, or what follows `runs/`: a run's own name is no secret and "1" alone says nothing."""
    parts = [part for part in re.split(r"[/\\]+", place) if part]
    kept = parts[parts.index("runs") + 1 :] if "runs" in parts[:-1] else parts[-1:]
    if kept[0].startswith("~") or parts[-2:-1] in (["home"], ["Users"]):  # the folder is called like its owner
        kept = []
    return "/".join(["(local)", *kept])  # no <local>: a browser takes that for a tag


def _is_place(name: str, value, kept: Collection[str]) -> bool:
    """Fields that name places are shortened also when they are relative, unless the place is on the Hub."""
    a_path = isinstance(value, str) and value != "/" and re.search(r"[/\\]", value)
    return name in PLACES and a_path and value not in kept


def named_places(record: Mapping, hub_ids: Collection[str] = ()) -> set[str]:
    """The places on this machine that the options in a record name."""
    return {value for name, value in record.items() if _is_place(name, value, hub_ids)}


def refuse_secrets(folder: Path, forbidden: Iterable[str] = ()) -> None:
    """Raise if a file below `folder` holds a Hub token or a home directory, or a text one of the `forbidden` strings.

    Weights are not searched for those: a short one is bound to be somewhere in millions of numbers.
    """
    # JSON writes each backslash of a Windows path twice.
    literal = [re.escape(text.encode()).replace(rb"\\", rb"\\{1,2}") for text in forbidden if text]
    in_texts = [_HOME, *(re.compile(rb"(?<![\w+/.)])" + text + rb"(?![\w-])") for text in literal)]
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
