"""Configuration records from plain values: what a field's annotation rules out is the user's to mend, by key."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from embedlab.errors import UserError, one_of

C = TypeVar("C")

_SCALARS: dict[Any, tuple[str, str]] = {
    bool: ("not true or false", "true or false"),
    int: ("not a whole number", "a whole number"),
    float: ("not a finite number", "a number"),
    str: ("not text", "quoted, digits are text: \"{key}='{value}'\""),
}


@dataclass(frozen=True)
class Record:
    """A frozen dataclass of the configuration: its values are checked, by type and range, wherever it is made."""

    section: ClassVar[str]
    """Of the configuration, the first part of a key at fault."""

    def __post_init__(self) -> None:
        check_values(type(self), vars(self), self.section)


def within(
    default: Any, *, least: float | None = None, above: float | None = None, below: float | None = None,
    most: float | None = None,
) -> Any:  # fmt: skip
    """A field whose numbers are at least ``least``, or above ``above``, and below ``below``, or at most ``most``."""
    return field(default=default, metadata={"least": least, "above": above, "below": below, "most": most})


def build(cls: type[C], values: Mapping[str, Any], group: str) -> C:
    """``cls(**values)``, in which every value is of its field's type.

    What the record itself says of a value goes first, since it knows the range and the fix.

    Args:
        cls: a dataclass whose fields are scalars, literals, lists, tuples, dictionaries or records.
        values: plain ones, by field.
        group: of the configuration, the first part of the key at fault.

    Raises:
        UserError: a value of another type, or a number that is not finite.
    """
    try:
        made = cls(**values)
    except UserError:
        raise
    except Exception:
        check_values(cls, values, group)
        raise
    check_values(cls, {f.name: getattr(made, f.name) for f in fields(cls)}, group)  # type: ignore[arg-type]
    return made


def section(values: Any, group: str) -> Mapping[str, Any]:
    """``values``, if it is what a group of the configuration is: keys with values.

    Raises:
        UserError: it is not.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            "a group of keys is meant here, not a value",
            key=group,
            value="null" if values is None else values,
            fix=f"leave it out, or name a choice: {group}=NAME",
        )
    return values


_hints = cache(get_type_hints)


def check_values(cls: Any, values: Mapping[str, Any], group: str) -> None:
    """Whether the values, by field, are of their fields' types and ranges.

    Raises:
        UserError: one that is not, by its key in the group of the configuration ("": beside the groups).
    """
    for one in fields(cls):
        if one.name in values:
            value, hint, key = values[one.name], _hints(cls)[one.name], f"{group}.{one.name}".lstrip(".")
            if not fits(value, hint):
                raise refused(key, value, hint)
            if one.metadata and isinstance(value, int | float):
                _check_range(one, value, key)


def _check_range(one: Field[Any], value: float, key: str) -> None:
    least, above, below, most = (one.metadata[name] for name in ("least", "above", "below", "most"))
    inside = (least is None or value >= least) and (above is None or value > above)
    if inside and (below is None or value < below) and (most is None or value <= most):
        return
    words = f"at least {least}" if above is None else f"above {above}"
    words += "" if below is None else f" and below {below}"
    words += "" if most is None else f" and at most {most}"
    null = one.default is None
    raise UserError(
        f"must be {words}" + (", or null" if null else ""),
        key=key,
        value=value,
        fix=f"{key}={'null' if null else one.default}",
    )


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of the type that an annotation says; a number of floating point is finite."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin in (tuple, list):
        if not isinstance(value, tuple | list):
            return False
        if origin is tuple and arguments[1:] != (...,):
            return len(value) == len(arguments) and all(map(fits, value, arguments))
        return all(fits(v, arguments[0]) for v in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(v, arguments[1]) for v in value.values())
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return isinstance(value, hint | Mapping)  # LightningCLI makes its own records of plain values first
    return True


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False


def refused(key: str, value: Any, hint: Any) -> UserError:
    """The line for a value that does not fit its annotation, with the fix as a command would spell it."""
    union = get_origin(hint) in (Union, types.UnionType)
    choices = [h for h in (get_args(hint) if union else (hint,)) if h is not type(None)]
    nullable = union and len(choices) < len(get_args(hint))
    if get_origin(choices[0]) is dict and isinstance(value, Mapping):
        inner = get_args(choices[0])[1]
        name = next(name for name, one in value.items() if not fits(one, inner))
        return refused(f"{key}.{name}", value[name], inner)
    literals = [c for h in choices if get_origin(h) is Literal for c in get_args(h)]
    if literals:
        message = "unknown value"
        fix = one_of(value, [*literals, *(("true", "false") if bool in choices else ())])
    elif choices[0] in _SCALARS:
        message, fix = _SCALARS[choices[0]]
        fix = fix.format(key=key, value=value)
        if choices[0] is float and not isinstance(value, float):
            message = "not a number"
        if choices[0] is str and not isinstance(value, int | float):
            fix = "a text"
    elif get_origin(choices[0]) in (tuple, list):
        arguments = get_args(choices[0])
        known = get_args(arguments[0]) if get_origin(arguments[0]) is Literal else ()
        for one in value if known and isinstance(value, list | tuple) else ():
            if not fits(one, arguments[0]):
                return refused(key, one, arguments[0])
        fixed = get_origin(choices[0]) is tuple and arguments[1:] != (...,)
        letters = (known or "abcdefgh")[: len(arguments) if fixed else 2]
        message, fix = "not a list of what this key takes", f"{key}=[{','.join(map(str, letters))}]"
        if arguments[0] in _SCALARS:
            some = {int: "whole numbers", float: "numbers", str: "texts", bool: "true or false"}[arguments[0]]
            count = f"{len(arguments)} " if fixed else ""
            message = f"not a list of {count}{some}"
    else:
        message, fix = "a group of keys is meant here, not a value", f"{key}.KEY=VALUE"
    return UserError(
        message,
        key=key,
        value="null" if value is None else value,
        fix=f"{fix}, or null" if nullable and value is not None else fix,
    )


def from_dict(cls: type[C], values: Mapping[str, Any], group: str) -> C:
    """Build a configuration dataclass from plain values.

    Raises:
        UserError: an unknown key, or a value of another type than its field's, by key.
    """
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key, value in section(values, group).items():
        if key not in known:
            fix = one_of(key, known, f"{group}.")
            raise UserError("unknown key", key=f"{group}.{key}", value=value, fix=fix)
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    return build(cls, {k: _as_declared(v, hints[k], f"{group}.{k}") for k, v in values.items()}, group)


def _as_declared(value: Any, hint: Any, key: str) -> Any:
    """YAML's list as a tuple, where the field is one, and a group of keys as the record that the field is."""
    if is_dataclass(hint) and isinstance(value, Mapping):
        return from_dict(hint, value, key)  # type: ignore[arg-type]
    lists = any(get_origin(h) is list for h in (hint, *get_args(hint)))
    return tuple(value) if isinstance(value, list) and not lists else value
