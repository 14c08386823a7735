"""How options are declared, parsed and merged: a declaration holds all facts of an option, and everything asks it.

A value comes from the command line, else from `--config`, else from an earlier run that is gone on with or built on,
else from the dataset's own config, else from the defaults. All of them are merged once, as values.
"""

import argparse
import dataclasses
import difflib
import functools
import itertools
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml

from livt_hf.errors import LiVTError
from livt_hf.plugins import load_plugin
from livt_hf.records import read_values, replace_text

REQUIRED = dataclasses.MISSING
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}


def option(default: Any, help: str, **facts) -> Any:
    """Declare an option with everything that is known about it.

    `at_least`, `above`, `at_most`, `below`: bounds of its value. `choices`: the values it can have, or a
    function that lists them; that may import torch, so `--help` does not ask it. `selects`: whether an option of the
    data decides which images are trained and tested on, as all do that are not free. `place`: it may name a place on
    this machine. `free`: it may change when a run is resumed, because it touches neither the data nor the mathematics.
    `before`: its value in runs from before there was such an option, where that is not its default. `trained`: it
    names a trained model. `alone`: its value when it is named without one. `pattern`: what the value of such an option
    looks like; another word after it stands for itself. `positional`: its value stands without `--name`; it may then
    be `REQUIRED`.
    """
    return field(default=default, metadata={"help": help} | facts)


@dataclass
class CommandSettings:
    """What every command can be told."""

    stage: ClassVar[str] = ""

    plugin: str | None = option(
        None, "Python file or module to import first, with losses and datasets of your own", place=True, free=True
    )

    def __post_init__(self):
        for declared in dataclasses.fields(self):
            if declared.metadata.get("place"):
                setattr(self, declared.name, _expanded(getattr(self, declared.name)))
            self._check(declared)

    def _check(self, declared: dataclasses.Field) -> None:
        """Refuse a value that the option's declaration does not allow."""
        name, value = declared.name, getattr(self, declared.name)
        for fact, (holds, words) in _BOUNDS.items():
            bound = declared.metadata.get(fact)
            if bound is not None and value is not None and not holds(value, bound):  # so written, NaN is refused too
                raise LiVTError(f"{name} is {value}; it must be {words} {bound}.")
        choices = _choices(type(self), declared)
        for one in value if isinstance(value, list) else [value]:
            if choices and isinstance(one, str) and one not in choices:
                raise LiVTError(f"{name} is {one!r}; choose one of {', '.join(choices)}.")

    @classmethod
    def names(cls, fact: str | None = None) -> list[str]:
        """The options of which a fact is true, or all of them."""
        return [f.name for f in dataclasses.fields(cls) if fact is None or f.metadata.get(fact)]

    @classmethod
    def parse(
        cls,
        argv: Sequence[str] | None = None,
        configs: Path | None = None,
        inherit: Callable[[dict], dict] = lambda _: {},
    ) -> Self:
        """The settings of a command. `inherit` gets what was asked for and returns what an earlier run lends."""
        asked = cls.asked(argv)
        return cls.merged(asked, configs, inherit(asked))

    @classmethod
    def asked(cls, argv: Sequence[str] | None = None) -> dict[str, Any]:
        """What the command line asks for and, below it, the file it names as `--config`."""
        asked = command_line(cls, sys.argv[1:] if argv is None else argv)
        if "config" in asked:
            asked = read_settings(cls, Path(asked["config"]).expanduser()) | asked
        asked |= {name: _expanded(asked[name]) for name in cls.names("place") if name in asked}
        load_plugin(asked.get("plugin"))
        return asked | {name: _trained(asked[name]) for name in cls.names("trained") if name in asked}

    @classmethod
    def merged(cls, asked: dict, configs: Path | None = None, inherited: dict | None = None) -> Self:
        """What was asked for over what an earlier run lends over the dataset's own config over the defaults.

        The dataset's own config is `<stage>-<dataset>.yaml` in the folder `configs`. A config that was asked for takes
        its place, so a config file is complete over the defaults.
        """
        values = (inherited or {}) | asked
        load_plugin(values.get("plugin"))
        if values.pop("config", None) is None and configs is not None:
            own = configs / cls._own_config(values)
            values = (read_settings(cls, own) if own.exists() else {}) | values
        return cls(**values)

    @classmethod
    def _own_config(cls, values: dict) -> str:
        """The file that goes with the dataset."""
        dataset = str(values.get("dataset", cls.__dataclass_fields__["dataset"].default))
        return f"{cls.stage}-{dataset.replace('/', '-')}.yaml"


def command_line(cls: type[CommandSettings], argv: Sequence[str]) -> dict[str, Any]:
    """The options that were named, with their values."""
    parser = make_parser(cls)
    parsed, unknown = parser.parse_known_intermixed_args(_with_flags_said(cls, argv))
    if unknown:
        word = unknown[0].split("=")[0]
        names = [*cls.names(), "config"]
        raise LiVTError(f"there is no option {word!r}{nearest(word.lstrip('-'), names, '--')}")
    kinds, named = {f.name: _kind(cls, f) for f in dataclasses.fields(cls)}, vars(parsed)
    for name in cls.names("positional"):
        if name in named and _AS_OPTION + name in named:
            raise LiVTError(f"{name} is both {named[name]} and {named[_AS_OPTION + name]}; say it once.")
    named = {name.removeprefix(_AS_OPTION): text for name, text in named.items()}
    return {name: _typed(name, kinds.get(name, str), text) for name, text in named.items()}


def _with_flags_said(cls: type[CommandSettings], argv: Sequence[str]) -> list[str]:
    """The words, with `--flag` as `--flag=true` where what follows is not its value but stands for itself."""
    values: dict[str, str] = {}
    alone: dict[str, str] = {}
    said = []
    for declared in dataclasses.fields(cls):
        facts, word = declared.metadata, f"--{declared.name}"
        if "pattern" in facts or _is_flag(cls, declared):
            values[word] = facts.get("pattern", "|".join((*_TRUTHS, *_choices(cls, declared))))
            alone[word] = facts.get("alone", "true")
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        by_itself = word in values and not re.fullmatch(values[word], after, re.IGNORECASE)
        said.append(f"{word}={alone[word]}" if by_itself else word)
    return said


def _is_flag(cls: type[CommandSettings], declared: dataclasses.Field) -> bool:
    """Whether the option is a truth, or a truth or a word."""
    kind = _kind(cls, declared)
    return kind is bool or True in get_args(kind)


_AS_OPTION = "--"  # before the name of a positional argument that was given as an option


class _Parser(argparse.ArgumentParser):
    """argparse, but what it refuses is refused like everything else."""

    def error(self, message):
        raise LiVTError(f"{message}; --help lists the options.")


def make_parser(cls: type[CommandSettings]) -> argparse.ArgumentParser:
    """An argument parser that leaves values as they are written, and leaves out what was not named."""
    command = f"livt {cls.stage}" if cls.stage else None
    parser = _Parser(prog=command, description=cls.__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options")
    for declared in dataclasses.fields(cls):
        facts, kind, shape = declared.metadata, _kind(cls, declared), {}
        if "alone" in facts or _is_flag(cls, declared):
            shape = {"nargs": "?", "const": facts.get("alone", "true")}
        elif get_origin(kind) is list:
            shape = {"nargs": "+"}
        if facts.get("positional"):
            if declared.default is not REQUIRED:
                shape = {"nargs": "?"}
                dest = _AS_OPTION + declared.name  # as other commands have it
                parser.add_argument(f"--{declared.name}", dest=dest, help=argparse.SUPPRESS)
            parser.add_argument(declared.name, help=_described(cls, declared), **shape)
        else:
            metavar = declared.name.upper()
            parser.add_argument(f"--{declared.name}", metavar=metavar, help=_described(cls, declared), **shape)
    return parser


def _described(cls: type[CommandSettings], declared: dataclasses.Field) -> str:
    """The help of an option with its choices and its default."""
    text = declared.metadata["help"]
    choices = () if callable(declared.metadata.get("choices")) else _choices(cls, declared)
    if choices:
        text += f"; one of {', '.join(choices)}"
    if declared.default not in (None, REQUIRED, ""):
        text += f" (default: {declared.default})"
    return text.replace("%", "%%")


def read_settings(cls: type[CommandSettings], path: Path) -> dict[str, Any]:
    """The values of a YAML file; unknown keys are refused. A null leaves an option as it is."""
    # The base loader leaves every value as it is written: `mixed_precision: no` is "no", and 1e-3 needs no point.
    texts = read_values(path, yaml.BaseLoader) or {}
    if not isinstance(texts, dict):
        raise LiVTError(f"{path} must hold 'option: value' lines, not a {type(texts).__name__}.")
    kinds = {f.name: _kind(cls, f) for f in dataclasses.fields(cls)}
    values = {}
    for name, text in texts.items():
        if name not in kinds:
            raise LiVTError(f"{path}: there is no option {name!r}{nearest(name, list(kinds))}")
        if not isinstance(text, str) and get_origin(kinds[name]) is not list:
            raise LiVTError(f"{path}: {name} must be a single value, not a {type(text).__name__}.")
        if text not in ("", "~", "null"):
            values[name] = _typed(name, kinds[name], text)
    return values


def save_settings(settings: CommandSettings, path: Path) -> None:
    replace_text(path, yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False))


_type_hints = functools.cache(get_type_hints)


def _kind(cls: type[CommandSettings], declared: dataclasses.Field) -> Any:
    """The type of an option, None aside: int, float, bool, str, a Literal of words (and truths), or a list."""
    hint = _type_hints(cls)[declared.name]  # type: ignore[arg-type]
    return get_args(hint)[0] if get_origin(hint) in (Union, types.UnionType) else hint


def _choices(cls: type[CommandSettings], declared: dataclasses.Field) -> tuple[str, ...]:
    choices, kind = declared.metadata.get("choices", ()), _kind(cls, declared)
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        return tuple(str(part).lower() if isinstance(part, bool) else part for part in get_args(kind))
    return tuple(choices() if callable(choices) else choices)


_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _typed(name: str, kind: Any, text: str | list[str]) -> Any:
    """A value as it was written to the type of its option."""
    if get_origin(kind) is list:
        return [_typed(name, get_args(kind)[0], part) for part in ([text] if isinstance(text, str) else text)]
    text = str(text)
    if True in get_args(kind):
        return _TRUTHS.get(text.lower(), text)
    if kind is bool:
        if text.lower() not in _TRUTHS:
            raise LiVTError(f"{name} is {text!r}; it must be true or false.")
        return _TRUTHS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise LiVTError(f"{name} is {text!r}; it must be {wanted}.") from error
    return text


def _expanded(place: Any) -> Any:
    """A place with the home folder for ~, which a shell expands at the beginning of a word only."""
    if isinstance(place, list):
        return [_expanded(one) for one in place]
    return os.path.expanduser(place) if isinstance(place, str) else place


def _trained(place: Any) -> Any:
    """The folder of `livt train` stands for the fine-tuning that it ends with."""
    if isinstance(place, list):
        return [_trained(one) for one in place]
    own, last = Path(place), Path(place, "finetune")
    return str(last) if (last / "config.json").exists() and not (own / "config.json").exists() else place


def nearest(name: str, names: list[str], prefix: str = "", otherwise: str = "--help lists them.") -> str:
    """What to say of an option that does not exist."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; {otherwise}"
