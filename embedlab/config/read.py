"""Small files into typed records: what a file holds is a record, or one line that says what is wrong with it."""

from __future__ import annotations

import json
import os
import stat
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from embedlab.config.build import fits, refused
from embedlab.errors import UserError

R = TypeVar("R")

MOST_BYTES = 64 << 20
MOST_BYTES_OF_YAML = 1 << 20
"""PyYAML reads some 100 kB a second."""
MOST_VALUES = 1 << 22
"""A few aliases of YAML stand for any number of values."""
MOST_DEPTH = 64
_FIX = "another copy of the file"


def read_record(path: Path, cls: type[R], fix: str = _FIX) -> R:
    """The record that a JSON or YAML file holds; keys that the record has no field for are left alone.

    Args:
        path: of the file.
        cls: a dataclass whose fields are scalars, literals, lists, dictionaries or records.
        fix: what to do about a file that is damaged.

    Raises:
        UserError: a file that cannot be read (`read_values`), a key that is missing, a value of another type.
    """
    return record(cls, read_values(path, fix), path, fix=fix)


def record(cls: type[R], values: Any, file: Path, key: str = "", fix: str = _FIX) -> R:
    """A record from plain values that were read from ``file``, where they stand at ``key``."""
    if not isinstance(values, Mapping):
        raise UserError("holds no keys with values", file=file, key=key or None, value=_said(values), fix=fix)
    hints = get_type_hints(cls)
    given = {}
    for field in fields(cls):  # type: ignore[arg-type]
        name = f"{key}.{field.name}" if key else field.name
        if field.name not in values:
            if field.default is MISSING and field.default_factory is MISSING:
                raise UserError("a key is missing", file=file, key=name, fix=fix)
            continue
        value, hint = values[field.name], hints[field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            value = record(hint, value, file, name, fix)
        elif not fits(value, hint):
            raise _misfit(name, value, hint, file, fix)
        given[field.name] = value
    try:
        return cls(**given)
    except UserError as error:
        error.file = error.file or str(file)
        raise


def read_values(path: Path, fix: str = _FIX, any_value: bool = False) -> Any:
    """What a JSON or YAML file (by its suffix) says: dictionaries with text keys, lists and scalars.

    Args:
        path: of the file.
        fix: what the user can do about a bad one.
        any_value: also what JSON could not say (dates, keys that are no text), and numbers of more than 64 bits, as
            transformers' ``model_max_length`` for no limit is.

    Raises:
        UserError: no such file, or one that is no regular file, too large, not UTF-8, not JSON or YAML, nested too
            deeply, or with half a surrogate pair in a text.
    """
    is_yaml = path.suffix in (".yaml", ".yml")
    text = _text(path, MOST_BYTES_OF_YAML if is_yaml else MOST_BYTES, fix)
    try:
        values = _parse_yaml(text) if is_yaml else json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"is not JSON ({error.msg})", file=path, row=error.lineno, fix=fix) from None
    except RecursionError:
        raise UserError("is nested too deeply", file=path, fix=fix) from None
    except Exception as error:  # PyYAML meets an odd scalar with IndexError, KeyError or AttributeError
        mark = getattr(error, "problem_mark", None)
        row = mark.line + 1 if mark is not None else None
        problem = getattr(error, "problem", None) or error
        raise UserError(
            f"is not {'YAML' if is_yaml else 'JSON'} ({problem})", file=path, row=row, fix=fix
        ) from None
    _check_plain(values, path, fix, any_value)
    return values


def _parse_yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _text(path: Path, most: int, fix: str) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, a device has no end
            raise UserError("is no file", file=path, fix=fix)
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot be read ({reason})", file=path, fix=fix) from error
    if len(content) > most:
        raise UserError(f"is larger than {most >> 20} MiB", file=path, fix=fix)
    return decoded(content, path, fix)


def decoded(content: bytes, file: str | os.PathLike[str], fix: str) -> str:
    """The text of a file's bytes, or a UserError that names its first line that is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        row = content.count(b"\n", 0, error.start) + 1
        raise UserError("is not UTF-8", file=file, row=row, fix=fix) from None


def _check_plain(values: Any, path: Path, fix: str, any_value: bool) -> None:
    """Refuse what JSON could not say, and more than anything could be done with."""
    left, seen = [(values, 0)], 0
    while left:
        value, depth = left.pop()
        seen += 1
        if depth > MOST_DEPTH or seen > MOST_VALUES:
            raise UserError("is nested too deeply", file=path, fix=fix)
        if isinstance(value, dict):
            left += [(key, depth + 1) for key in value]
            left += [(inner, depth + 1) for inner in value.values()]
            if not (any_value or all(isinstance(key, str) for key in value)):
                raise UserError("has a key that is no text", file=path, fix=fix)
        elif isinstance(value, list):
            left += [(inner, depth + 1) for inner in value]
        elif isinstance(value, str):
            if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
                raise UserError("has half a surrogate pair in a text", file=path, value=value, fix=fix)
        elif isinstance(value, int) and not (any_value or -(1 << 63) <= value < 1 << 64):
            raise UserError("has a number of more than 64 bits", file=path, fix=fix)
        elif not (any_value or isinstance(value, bool | int | float | None)):
            raise UserError("has a value that is neither text nor number", file=path, value=value, fix=fix)


def _misfit(key: str, value: Any, hint: Any, file: Path, fix: str) -> UserError:
    """Names the innermost key at fault."""
    union = get_origin(hint) in (Union, types.UnionType)
    choices = [c for c in (get_args(hint) if union else (hint,)) if get_origin(c) is dict]
    if choices and isinstance(value, Mapping):
        of_values = get_args(choices[0])[1]
        name, inner = next((k, v) for k, v in value.items() if not fits(v, of_values))
        return _misfit(f"{key}.{name}", inner, of_values, file, fix)
    error = refused(key, value, hint)
    error.file, error.fix = str(file), fix
    return error


def _said(value: Any) -> Any:
    return "null" if value is None else value
