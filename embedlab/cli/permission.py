"""Code that comes with a checkpoint runs only where the command itself says so, whatever its files say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedlab.errors import UserError

KEY = "trust_remote_code"


def check_permission(values: Any, arguments: Sequence[str]) -> None:
    """Refuse a configuration that allows foreign code where no argument of the command does.

    Args:
        values: the composed configuration.
        arguments: of the command: ``backbone.trust_remote_code=true``.

    Raises:
        UserError: a configuration file, an experiment or a run file grants it.
    """
    if any(argument.partition("=")[0].endswith(f".{KEY}") for argument in arguments):
        return
    for key in _granted(values):
        raise UserError(
            "a configuration file may not allow foreign code, only the command that is typed",
            key=key,
            value="true",
            fix=f"backbone.{KEY}=true among the arguments, if you trust it",
        )


def _granted(values: Any, key: str = "") -> Iterator[str]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            place = f"{key}.{name}" if key else str(name)
            if name == KEY and value:
                yield place
            yield from _granted(value, place)
