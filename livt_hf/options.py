"""How options are declared, parsed and merged: a declaration holds all facts of an option, and everything asks it.

A value comes from the command line, else from `--config`, else from an earlier run that is gone on with or built on,
else from the dataset's own config, else from the defaults. All of them are merged once, as values.
"""

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin

import yaml

from livt_hf.errors import LiVTError, suggest_name
from livt_hf.files import read_values, replace_text
from livt_hf.plugins import load_plugin
from livt_hf.specs import REQUIRED, Spec, expand_user, option, option_choices, option_type


@dataclass
class CommandSettings(Spec):
    """What every command can be told."""

    stage: ClassVar[str] = ""

    plugin: str | None = option(
        None,
        "Python file or module to import first, with losses and datasets of your own",
        is_path=True,
        may_change_on_resume=True,
    )

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
        asked |= {name: expand_user(asked[name]) for name in cls.names("is_path") if name in asked}
        load_plugin(asked.get("plugin"))
        return asked | {name: _trained(asked[name]) for name in cls.names("is_model") if name in asked}

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
        raise LiVTError(f"there is no option {word!r}{suggest_name(word.lstrip('-'), names, '--')}")
    kinds, named = {f.name: option_type(cls, f)[0] for f in dataclasses.fields(cls)}, vars(parsed)
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
        if facts["pattern"] or _is_flag(cls, declared):
            values[word] = facts["pattern"] or "|".join((*_TRUTHS, *option_choices(cls, declared)))
            alone[word] = facts["const"] or "true"
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        by_itself = word in values and not re.fullmatch(values[word], after, re.IGNORECASE)
        said.append(f"{word}={alone[word]}" if by_itself else word)
    return said


def _is_flag(cls: type[CommandSettings], declared: dataclasses.Field) -> bool:
    """Whether the option is a truth, or a truth or a word."""
    kind = option_type(cls, declared)[0]
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
        facts, kind, shape = declared.metadata, option_type(cls, declared)[0], {}
        if facts["const"] or _is_flag(cls, declared):
            shape = {"nargs": "?", "const": facts["const"] or "true"}
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
    choices = () if callable(declared.metadata.get("choices")) else option_choices(cls, declared)
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
    kinds = {f.name: option_type(cls, f)[0] for f in dataclasses.fields(cls)}
    values = {}
    for name, text in texts.items():
        if name not in kinds:
            raise LiVTError(f"{path}: there is no option {name!r}{suggest_name(name, list(kinds))}")
        if not isinstance(text, str) and get_origin(kinds[name]) is not list:
            raise LiVTError(f"{path}: {name} must be a single value, not a {type(text).__name__}.")
        if text not in ("", "~", "null"):
            values[name] = _typed(name, kinds[name], text)
    return values


def save_settings(settings: CommandSettings, path: Path) -> None:
    replace_text(path, yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False))


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


def _trained(place: Any) -> Any:
    """The folder of `livt train` stands for the fine-tuning that it ends with."""
    if isinstance(place, list):
        return [_trained(one) for one in place]
    own, last = Path(place), Path(place, "finetune")
    return str(last) if (last / "config.json").exists() and not (own / "config.json").exists() else place
