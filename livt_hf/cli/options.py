"""Options of a command: parsed once by argparse, over a settings class made of specs.

A value comes from the command line, else from `--config`, else from an earlier run that is resumed or built on, else
from the dataset's own config, else from the defaults. All of them are merged as one dictionary; the settings are then
built and checked once.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, get_args, get_origin

import yaml

from livt_hf.errors import LiVTError, suggest_name
from livt_hf.files import read_values, replace_text
from livt_hf.plugins import load_plugin
from livt_hf.specs import REQUIRED, Option, Spec, expand_user, option

# Words of a command line, or what they were parsed to, or None for those of this process.
Argv = Sequence[str] | Mapping[str, Any] | None
CONFIGS = Path(str(find_spec("livt_hf.recipes").origin)).parent / "configs"  # type: ignore[union-attr]
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
GROUPS = (
    "Model trained elsewhere", "Data", "Boxes", "Model", "Optimisation", "Loss", "Augmentation", "Checkpoints", "Hub",
    "Benchmarks",
)  # fmt: skip
_AS_OPTION = "--"  # before the name of a positional argument that was given as an option


@dataclass(frozen=True)
class CommandSettings(Spec):
    """Base of the settings of a command: its own options and, as parts, the specs that the library takes.

    Its name, positional and required options are named with the class: `class X(CommandSettings, stage="x")`.
    """

    stage: ClassVar[str] = ""
    positionals: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **facts: Any):
        super().__init_subclass__()
        for name, value in facts.items():
            setattr(cls, name, value)

    plugin: str | None = option(
        None,
        "Python file or module to import first, with losses and datasets of your own",
        is_path=True,
        may_change_on_resume=True,
    )

    @classmethod
    def parse(
        cls, argv: Argv = None, configs: Path | None = None, inherit: Callable[[dict], dict] | None = None
    ) -> Self:
        """Build the settings of a command line. `inherit` maps the options named to those that an earlier run adds."""
        explicit = cls.explicit_options(argv)
        return cls.resolve(explicit, configs, inherit(explicit) if inherit else {})

    @classmethod
    def explicit_options(cls, argv: Argv = None) -> dict[str, Any]:
        """Return the options that a command line names and, below them, those of the file it names as `--config`."""
        if not isinstance(argv, Mapping):
            argv = parse_words(cls, argv)
        named = dict(argv)
        if "config" in named:
            named = read_config(cls, Path(named["config"]).expanduser()) | named
        named |= {name: expand_user(named[name]) for name in cls.names("is_path") if name in named}
        load_plugin(named.get("plugin"))
        for name in named.keys() - {"config"}:
            cls.options()[name].check(named[name])  # before what is wrong with a run that is inherited from
        return named | {name: _resolve_train_folder(named[name]) for name in cls.names("is_model") if name in named}

    @classmethod
    def resolve(cls, explicit: dict, configs: Path | None = None, inherited: dict | None = None) -> Self:
        """Build the settings from explicit over inherited options over the dataset's own config over the defaults.

        The dataset's own config is `<stage>-<dataset>.yaml` in the folder `configs`. A config that is named replaces
        it, so a config file is complete over the defaults.
        """
        values = (inherited or {}) | explicit
        load_plugin(values.get("plugin"))
        if values.pop("config", None) is None and configs is not None and "dataset" in cls.options():
            config = configs / cls.default_config(values)
            values = (read_config(cls, config) if config.exists() else {}) | values
        return cls.build(**values)

    @classmethod
    def default_config(cls, values: dict) -> str:
        """Return the name of the config file of the dataset."""
        dataset = str(values.get("dataset", cls.options()["dataset"].default))
        return f"{cls.stage}-{dataset.replace('/', '-')}.yaml"


def parse_words(cls: type[CommandSettings], words: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the options that are named on a command line, by default that of this process, with typed values."""
    options = cls.options()
    words = list(_spell_flags(cls, map(_normalise_name, sys.argv[1:] if words is None else words)))
    if {"-h", "--help", "--help_all"} & set(words):
        _make_parser(cls, show_all="--help_all" in words).print_help()
        sys.exit(0)
    parsed, unknown = _make_parser(cls).parse_known_intermixed_args(words)
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise LiVTError(f"unexpected argument {unknown[0]!r}; --help shows the usage.")
        raise LiVTError(f"there is no option {word!r}{suggest_name(word.lstrip('-'), [*options, 'config'], '--')}")
    texts = {name: text for name, text in vars(parsed).items() if text != []}  # a list of positionals without any
    named: dict[str, Any] = {}
    for key, text in texts.items():
        name = key.removeprefix(_AS_OPTION)
        value = _convert(options[name], text) if name in options else text
        if name in named and named[name] != value:
            raise LiVTError(f"{name} is both {named[name]} and {value}; name it once.", argument=name)
        named[name] = value
    missing = [name for name in _required(cls) if name not in named]
    if missing and "config" not in named:
        raise LiVTError(f"{cls.stage} needs {' and '.join(missing)}; --help lists the options.", argument=missing[0])
    return named


def _required(cls: type[CommandSettings]) -> list[str]:
    return [*cls.required, *(name for name, one in cls.options().items() if one.default is REQUIRED)]


def _normalise_name(word: str) -> str:
    """Return a word with underscores for hyphens in the name of an option."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if re.fullmatch(r"--[\w-]+", name) else word


def _spell_flags(cls: type[CommandSettings], words: Iterable[str]) -> Iterable[str]:
    """Yield words with `--flag=true` for `--flag`, and `--flag=false` for `--no_flag`, where no value follows."""
    patterns: dict[str, str] = {}
    const: dict[str, str] = {}
    for name, declared in cls.options().items():
        if declared.facts["pattern"] or declared.is_flag:
            patterns[f"--{name}"] = declared.facts["pattern"] or "|".join((*_TRUTHS, *declared.choices))
            const[f"--{name}"] = declared.facts["const"] or "true"
    words = list(words)
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word in patterns and not re.fullmatch(patterns[word], following, re.IGNORECASE):
            yield f"{word}={const[word]}"
        elif word.startswith("--no_") and f"--{word[5:]}" in const:
            yield f"--{word[5:]}=false"
        else:
            yield word


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises errors like all others of the package."""

    def error(self, message: str) -> NoReturn:
        raise LiVTError(f"{message}; --help lists the options.")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows `--flag/--no-flag` and one metavar per option."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.option_strings and action.const == "true":
            return f"{action.option_strings[-1]}/--no-{action.option_strings[-1][2:]}"
        return super()._format_action_invocation(action)


def _make_parser(cls: type[CommandSettings], show_all: bool = True) -> argparse.ArgumentParser:
    """Make a parser that leaves values as they are written, and leaves out what is not named."""
    examples = read_examples(cls.stage)[: None if show_all else 3]
    parser = _Parser(
        prog=f"livt {cls.stage}" if cls.stage else None,
        usage=" ".join(["%(prog)s", *(_spell_positional(cls, name) for name in cls.positionals), "[OPTIONS]"]),
        description=cls.__doc__,
        epilog="\n  ".join(["examples:", *examples]) if examples else None,
        formatter_class=_Formatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    own = parser.add_argument_group("Options")
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for name in cls.positionals:  # in their order
        declared = cls.options()[name]
        nargs = "*" if get_origin(declared.kind) is list else "?"
        own.add_argument(name, nargs=nargs, metavar=name.upper(), help=_describe(declared))
        shape: dict[str, Any] = {"nargs": "+", "action": "extend"} if nargs == "*" else {}
        parser.add_argument(f"--{name}", dest=_AS_OPTION + name, help=argparse.SUPPRESS, **shape)
    for name, declared in cls.options().items():
        if name in cls.positionals:
            continue
        title = declared.facts["group"] or (declared.spec.__doc__ or "").partition(":")[0]
        group = own if declared.part is None else groups[title]
        shown = show_all or declared.facts["common"] or declared.part is None and name != "plugin"
        group.add_argument(f"--{name}", help=_describe(declared) if shown else argparse.SUPPRESS, **_shape(declared))
    own.add_argument("--config", metavar="FILE", help="YAML file with any of these options")
    own.add_argument("--help", action="store_true", help="show the common options")
    own.add_argument("--help_all", action="store_true", help="show all options")
    return parser


def read_examples(stage: str) -> list[str]:
    """Return the commands in the docstring of a recipe; to import it would take seconds."""
    recipe = CONFIGS.parent / f"{stage.replace('-', '_')}.py"
    docstring = recipe.read_text(encoding="utf-8").split('"""')[1] if recipe.exists() else ""
    return re.findall(r"^ *(livt .*)$", docstring, re.MULTILINE)


def _spell_positional(cls: type[CommandSettings], name: str) -> str:
    word = name.upper() + ("..." if get_origin(cls.options()[name].kind) is list else "")
    return word if name in _required(cls) else f"[{word}]"


def _shape(declared: Option) -> dict[str, Any]:
    """Return how argparse takes the values of an option, and how help shows them."""
    kind, is_list = declared.kind, get_origin(declared.kind) is list
    if is_list:
        (kind,) = get_args(kind)
    metavar = {int: "N", float: "FLOAT"}.get(kind, "PATH" if declared.facts["is_path"] else "TEXT")
    if callable(declared.facts["choices"]):
        metavar = "NAME"
    elif declared.choices:
        metavar = f"{{{','.join(declared.choices)}}}"
    shape: dict[str, Any] = {"metavar": metavar}
    if declared.is_flag or declared.facts["const"]:
        shape |= {"nargs": "?", "const": "true" if declared.is_flag else declared.facts["const"]}
    elif is_list:
        shape |= {"nargs": "+", "action": "extend"}
    return shape


def _describe(declared: Option) -> str:
    """Return the help of an option with its default."""
    text = declared.facts["help"]
    if declared.default not in (None, REQUIRED, "", False):
        default = str(declared.default).lower() if declared.default is True else declared.default
        text += f" (default: {default})"
    return text.replace("%", "%%")


def read_config(cls: type[CommandSettings], path: Path) -> dict[str, Any]:
    """Read the options of a YAML file; an option without a value keeps its default."""
    # The base loader leaves every value as it is written: `mixed_precision: no` is "no", and 1e-3 needs no point.
    texts = read_values(path, yaml.BaseLoader) or {}
    if not isinstance(texts, dict):
        raise LiVTError(f"{path} must hold 'option: value' lines, not a {type(texts).__name__}.")
    options, values = cls.options(), {}
    for name, text in texts.items():
        if name not in options:
            raise LiVTError(f"{path}: there is no option {name!r}{suggest_name(name, options)}")
        if not isinstance(text, str) and get_origin(options[name].kind) is not list:
            raise LiVTError(f"{path}: {name} must be a single value, not a {type(text).__name__}.")
        if text not in ("", "~", "null"):
            values[name] = _convert(options[name], text)
    return values


def write_config(settings: Spec, path: Path) -> None:
    """Write all options of settings to a YAML file, as one flat list."""
    replace_text(path, yaml.safe_dump(settings.to_dict(), sort_keys=False))


def _convert(declared: Option, text: str | list[str], kind: Any = None) -> Any:
    """Convert a value from its text to the type of its option."""
    kind, name = kind or declared.kind, declared.name
    if get_origin(kind) is list:
        return [_convert(declared, one, get_args(kind)[0]) for one in ([text] if isinstance(text, str) else text)]
    text = str(text)
    if True in get_args(kind):
        return _TRUTHS.get(text.lower(), text)
    if kind is bool:
        if text.lower() not in _TRUTHS:
            raise LiVTError(f"{name} is {text!r}; it must be true or false.", argument=name)
        return _TRUTHS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise LiVTError(f"{name} is {text!r}; it must be {wanted}.", argument=name) from error
    return text


def format_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line; a list is one option with several values."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-"):  # by itself it would be read as an option
            words.append(f"--{name}={value}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def _resolve_train_folder(path: Any) -> Any:
    """Return the fine-tuning that a folder of `livt train` ends with; any other path unchanged."""
    if isinstance(path, list):
        return [_resolve_train_folder(one) for one in path]
    folder, last = Path(path), Path(path, "finetune")
    return str(last) if (last / "config.json").exists() and not (folder / "config.json").exists() else path
