"""Specs: small dataclasses of checked options. Library functions take them, commands are put together from them.

A spec may have other specs as parts; their options are named directly. Nothing here imports torch.
"""

import dataclasses
import functools
import operator
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from livt_hf.errors import LiVTError
from livt_hf.text import shorten

REQUIRED = dataclasses.MISSING  # the default of an option that must be given
Positive = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegative = Annotated[float, Ge(0)]
AboveZero = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
FractionAboveZero = Annotated[float, Gt(0), Le(1)]
FractionBelowOne = Annotated[float, Ge(0), Lt(1)]

_BOUNDS: dict[type, tuple[Callable[[Any, Any], bool], str]] = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "less than"),
}


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | Callable[[], Sequence[str]] = (),
    common: bool = False,
    is_path: bool = False,
    is_model: bool = False,
    affects_split: bool | None = None,
    may_change_on_resume: bool = False,
    legacy_default: Any = REQUIRED,
    const: str | None = None,
    pattern: str | None = None,
    group: str | None = None,
) -> Any:
    """Declare an option of a spec.

    Args:
        default: value where none is given, or `REQUIRED`.
        help: what the option means, in a few words.
        choices: allowed values, or a function that lists them.
        common: show the option in `--help`; `--help_all` shows all.
        is_path: the value may be a path; `~` is expanded.
        is_model: the value names a trained model, perhaps by its path; the folder of `livt train` stands for its
            fine-tuning.
        affects_split: an option of the data decides which images are trained and tested on; default: all that may
            not change on resume.
        may_change_on_resume: the option changes neither the data nor the mathematics of a run.
        legacy_default: value in runs from before the option existed, where that is not its default.
        const: value of the option when it is named without one.
        pattern: regular expression of the values of such an option; another word after it is not its value.
        group: title of the group in `--help`; default: that of the spec.
    """
    facts = dict(locals()) | {"is_path": is_path or is_model}
    del facts["default"]
    return dataclasses.field(default=default, metadata=facts)


def part(spec: type["Spec"], help: Mapping[str, str] | None = None, **defaults: Any) -> Any:
    """Declare a spec as a part of another one, with defaults and help texts that differ from its own."""
    return dataclasses.field(
        default_factory=functools.partial(spec, **defaults),
        metadata={"spec": spec, "defaults": defaults, "part_help": help or {}},
    )


class Option(NamedTuple):
    """A declared option: its type, bounds and default, the part it belongs to, and the facts of its declaration."""

    name: str
    kind: Any  # int, float, bool, str, Literal or list; None aside
    bounds: list[tuple[Callable[[Any, Any], bool], str, Any]]
    default: Any
    part: str | None
    spec: type["Spec"]
    facts: Mapping[str, Any]

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values the option can have; empty if there is no such list."""
        kind = get_args(self.kind)[0] if get_origin(self.kind) is list else self.kind
        if get_origin(kind) is Literal:
            return tuple(str(one).lower() if isinstance(one, bool) else one for one in get_args(kind))
        choices = self.facts["choices"]
        return tuple(choices() if callable(choices) else choices)

    @property
    def is_flag(self) -> bool:
        """Return True if the option can be given without a value, as a flag."""
        return self.kind is bool or True in get_args(self.kind)

    def check(self, value: Any) -> None:
        """Raise a `LiVTError` if a value is not what the declaration allows."""
        if value is None:
            return
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(self.kind)
        if wanted and not matches_type(value, self.kind):
            raise LiVTError(f"{self.name} is {shorten(value)}; it must be {wanted}.", argument=self.name)
        for holds, text, bound in self.bounds:
            if not holds(value, bound):  # written this way so that NaN fails the check
                raise LiVTError(f"{self.name} is {value}; it must be {text} {bound}.", argument=self.name)
        if self.kind in (int, float) and not abs(value) < 2**63:  # infinity and NaN too
            raise LiVTError(f"{self.name} is {value}; it must be less than 2^63.", argument=self.name)
        choices = self.choices
        for one in value if isinstance(value, list) else [value]:
            if choices and isinstance(one, str) and one not in choices:
                raise LiVTError(f"{self.name} is {one!r}; choose one of {', '.join(choices)}.", argument=self.name)


@dataclass(frozen=True)
class Spec:
    """Base of all specs: expands paths and checks bounds and choices when it is built."""

    def __post_init__(self):
        for declared in self.options().values():
            if declared.part is None:
                value = getattr(self, declared.name)
                if declared.facts["is_path"]:
                    value = expand_user(value)
                    object.__setattr__(self, declared.name, value)
                declared.check(value)

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return all options by name, those of parts included."""
        return _declared_options(cls)  # type: ignore[arg-type]

    @classmethod
    def names(cls, fact: str | None = None) -> list[str]:
        """Return the names of the options for which a fact of their declaration is true, or of all."""
        return [name for name, one in cls.options().items() if fact is None or one.facts[fact]]

    @classmethod
    def build(cls, **values: Any) -> Self:
        """Build a spec from options, those of its parts named directly."""
        for declared in filter(is_part, dataclasses.fields(cls)):
            if not isinstance(values.get(declared.name), Spec):
                spec, defaults = declared.metadata["spec"], declared.metadata["defaults"]
                inner = {name: values.pop(name) for name in spec.names() if name in values}
                values[declared.name] = spec.build(**defaults | inner)
        return cls(**values)  # an unknown one is an error of Python

    def replace(self, **values: Any) -> Self:
        """Return a copy with other values; options of parts are named directly."""
        replaced = {name for value in values.values() if isinstance(value, Spec) for name in value.names()}
        kept = {name: value for name, value in self.to_dict().items() if name not in replaced}
        return self.build(**kept | values)

    def non_defaults(self, part: str | None = None) -> dict[str, Any]:
        """Return the options, or those of a part, that are not at their defaults."""
        values = (self if part is None else getattr(self, part)).to_dict()
        return {name: value for name, value in values.items() if value != self.options()[name].default}

    def to_dict(self) -> dict[str, Any]:
        """Return all options with their values, those of parts included."""
        values: dict[str, Any] = {}
        for declared in dataclasses.fields(self):
            value = getattr(self, declared.name)
            values |= value.to_dict() if is_part(declared) else {declared.name: value}
        return values


def is_part(declared: dataclasses.Field) -> bool:
    """Return True if a field of a spec is a spec itself."""
    return "part_help" in declared.metadata


@functools.cache
def _declared_options(cls: type[Spec]) -> dict[str, Option]:
    hints = get_type_hints(cls, include_extras=True)
    options: dict[str, Option] = {}
    for declared in dataclasses.fields(cls):
        if is_part(declared):
            spec, defaults = declared.metadata["spec"], declared.metadata["defaults"]
            for name, inner in spec.options().items():
                facts = dict(inner.facts) | {"help": declared.metadata["part_help"].get(name, inner.facts["help"])}
                default = defaults.get(name, inner.default)
                options[name] = inner._replace(default=default, part=declared.name, facts=facts)
        else:
            kind, bounds = _read_hint(hints[declared.name])
            options[declared.name] = Option(
                declared.name, kind, bounds, declared.default, None, cls, dict(declared.metadata)
            )
    return options


def _read_hint(hint: Any) -> tuple[Any, list]:
    """Return a type without None, and its bounds."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = get_args(hint)[0]
    if get_origin(hint) is not Annotated:
        return hint, []
    kind, *constraints = get_args(hint)
    bounds = [(*_BOUNDS[type(one)], getattr(one, type(one).__name__.lower())) for one in constraints]
    return kind, bounds


def expand_user(path: Any) -> Any:
    """Return a path, or each of a list, as text with the home folder for a leading `~`."""
    if isinstance(path, list):
        return [expand_user(one) for one in path]
    return os.path.expanduser(os.fspath(path)) if isinstance(path, str | os.PathLike) else path


def matches_type(value: Any, hint: Any) -> bool:
    """Return True if a value is of a type: unions, literals, lists and dictionaries are supported.

    A whole number is a float too; a bool is neither.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return matches_type(value, parts[0])
    if origin in (Union, types.UnionType):
        return any(matches_type(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str | bool) and value in parts
    if origin is list:
        return isinstance(value, list | tuple) and all(matches_type(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            matches_type(key, parts[0]) and matches_type(item, parts[1]) for key, item in value.items()
        )
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise a `LiVTError` if a value of a config is missing or not of its type."""
    for name, hint in hints.items():
        if not matches_type(values.get(name), hint):
            way_out = "correct it in the call or in config.json"
            if get_origin(hint) is Literal:
                way_out = f"choose one of {', '.join(get_args(hint))}"
            raise LiVTError(f"{name} cannot be {shorten(values.get(name))}; {way_out}.", argument=name)
