"""Specs: small dataclasses of checked options. Library functions take them, commands are put together from them.

Nothing here imports torch.
"""

import dataclasses
import functools
import operator
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

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

_BOUNDS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Ge: ("ge", operator.ge, "at least"),
    Gt: ("gt", operator.gt, "above"),
    Le: ("le", operator.le, "at most"),
    Lt: ("lt", operator.lt, "less than"),
}


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | Callable[[], Sequence[str]] = (),
    common: bool = False,
    positional: bool = False,
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
        positional: accept the value without `--name`.
        is_path: the value may be a path; `~` is expanded.
        is_model: the value names a trained model; the folder of `livt train` stands for its fine-tuning.
        affects_split: an option of the data decides which images are trained and tested on; default: all that may
            not change on resume.
        may_change_on_resume: the option changes neither the data nor the mathematics of a run.
        legacy_default: value in runs from before the option existed, where that is not its default.
        const: value of the option when it is named without one.
        pattern: regular expression of the values of such an option; another word after it is not its value.
        group: title of the group in `--help`; default: that of the spec.
    """
    facts = dict(locals())
    del facts["default"]
    return dataclasses.field(default=default, metadata=facts)


@dataclass
class Spec:
    """Base of all specs: expands paths and checks bounds and choices when it is built."""

    def __post_init__(self):
        for declared in dataclasses.fields(self):
            value = getattr(self, declared.name)
            if declared.metadata.get("is_path"):
                value = expand_user(value)
                object.__setattr__(self, declared.name, value)
            check_value(type(self), declared, value)

    def replace(self, **values) -> Self:
        """Return a copy with other values."""
        return dataclasses.replace(self, **values)

    @classmethod
    def names(cls, fact: str | None = None) -> list[str]:
        """Return the names of the options for which a fact of their declaration is true, or of all."""
        return [f.name for f in dataclasses.fields(cls) if fact is None or f.metadata.get(fact)]


def check_value(cls: type, declared: dataclasses.Field, value: Any) -> None:
    """Raise a `LiVTError` if a value is not what the declaration of an option allows."""
    name = declared.name
    kind, bounds = option_type(cls, declared)
    if bounds and value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
        raise LiVTError(f"{name} is {value!r}; it must be a number.", argument=name)
    if kind is int and bounds and value is not None and not isinstance(value, Integral):
        raise LiVTError(f"{name} is {value!r}; it must be a whole number.", argument=name)
    for holds, text, bound in bounds:
        if value is not None and not holds(value, bound):  # written this way so that NaN fails the check
            raise LiVTError(f"{name} is {value}; it must be {text} {bound}.", argument=name)
    choices = option_choices(cls, declared)
    for one in value if isinstance(value, list) else [value]:
        if choices and isinstance(one, str) and one not in choices:
            raise LiVTError(f"{name} is {one!r}; choose one of {', '.join(choices)}.", argument=name)


_type_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


def option_type(cls: type, declared: dataclasses.Field) -> tuple[Any, list]:
    """Return the type of an option without None (int, float, bool, str, Literal or list) and its bounds."""
    hint = _type_hints(cls)[declared.name]  # type: ignore[arg-type]
    if get_origin(hint) in (Union, types.UnionType):
        hint = get_args(hint)[0]
    if get_origin(hint) is not Annotated:
        return hint, []
    kind, *constraints = get_args(hint)
    return kind, list(_read_bounds(constraints))


def _read_bounds(constraints: Sequence) -> Iterator[tuple[Callable, str, Any]]:
    for constraint in constraints:
        attribute, holds, text = _BOUNDS[type(constraint)]
        yield holds, text, getattr(constraint, attribute)


def option_choices(cls: type, declared: dataclasses.Field) -> tuple[str, ...]:
    """Return the values an option can have; empty if there is no such list."""
    choices, (kind, _) = declared.metadata.get("choices", ()), option_type(cls, declared)
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        return tuple(str(part).lower() if isinstance(part, bool) else part for part in get_args(kind))
    return tuple(choices() if callable(choices) else choices)


def expand_user(path: Any) -> Any:
    """Return a path, or each of a list, with the home folder for a leading `~`."""
    if isinstance(path, list):
        return [expand_user(one) for one in path]
    return os.path.expanduser(path) if isinstance(path, str) else path


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
