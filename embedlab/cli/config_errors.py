"""Hydra's and OmegaConf's errors in one line each, naming the key, the value and the fix."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from embedlab.errors import UserError, nearest, one_of
from embedlab.files import shipped_encoders

_NO_CHOICE = "Config group override must be a string or a list"  # Hydra's words for `method=null`
HELP = "--help after the command lists the keys and what they take"
_NO_DELETION = "Config group override deletion value must be a string"  # and for `~data=nan`


def explain(
    error: BaseException, keys: Iterable[str] = (), overrides: Sequence[str] = ()
) -> UserError | None:
    """The line for an error of Hydra, OmegaConf or YAML; None for any other.

    Args:
        keys: the configuration's keys (``method.tau``), to suggest from.
        overrides: the ``key=value`` arguments, to name the value at fault.
    """
    if isinstance(error, UserError):
        return error
    # A library that was not imported raised nothing, and importing it here would slow `embedlab --help`.
    if (yaml := sys.modules.get("yaml")) and isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        fix = "mend that line; a text with a colon or a bracket stands in quotes"
        return UserError(f"this is not YAML: {error.problem}", file=mark.name, row=mark.line + 1, fix=fix)
    if str(error).startswith(_NO_CHOICE) and isinstance(error, ValueError):
        odd = [o for o in overrides if re.fullmatch(r"\+{0,2}[\w/@]+=(null|true|false|[-+.\w]*\d)", o, re.I)]
        key, _, value = (odd[0] if odd else "").partition("=")
        key = key.lstrip("+")
        fix = f"{key or 'GROUP'}=NAME, one of those that --help lists"
        return UserError("a group is chosen by a name", key=key or None, value=value or None, fix=fix)
    if str(error).startswith(_NO_DELETION) and isinstance(error, ValueError):
        odd = [o for o in overrides if o.startswith("~") and "=" in o]
        key, _, value = (odd[0] if odd else "~GROUP=").partition("=")
        what = "what is taken out is named, with its choice or without"
        return UserError(what, key=key, value=value or None, fix=f"'{key}'")
    if errors := sys.modules.get("hydra.errors"):
        if isinstance(error, errors.InstantiationException):
            return None  # raised by the code that was called, not by the configuration
        if isinstance(error, errors.OverrideParseException):
            return unreadable(error.override)
        if isinstance(error, errors.MissingConfigException):
            return _no_such_choice(error.missing_cfg_file or "", error.options or (), str(error))
        if isinstance(error, errors.HydraException):
            return _not_composed(error, keys, overrides)
    omegaconf = sys.modules.get("omegaconf.errors")
    if omegaconf and isinstance(error, omegaconf.OmegaConfBaseException):
        return _invalid_value(error, overrides)
    return None


def unknown_key(key: str, keys: Iterable[str], overrides: Sequence[str] = ()) -> UserError:
    """``key`` is not part of the configuration; suggests the keys that resemble it."""
    known = sorted(set(keys))
    close = nearest(key, known, n=3)
    if not close:  # the right name in another group: `tau` for `method.tau`
        last = key.rpartition(".")[2]
        close = [name for name in known if name.rpartition(".")[2] == last][:3]
    beside = [name for name in known if _parent(name) == _parent(key)]
    if close:
        fix = f"did you mean {' or '.join(close)}?"
    else:
        fix = f"one of {', '.join(beside)}" if beside else "--help lists the keys"
    return UserError("there is no such key", key=key, value=_value_of(key, overrides), fix=fix)


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _value_of(key: str, overrides: Sequence[str]) -> str | None:
    for override in overrides:
        name, _, value = override.partition("=")
        if name.lstrip("+~").partition("@")[0] == key and value:
            return value
    return None


def no_flag(arguments: Sequence[str], keys: Iterable[str], command: str) -> UserError:
    """What is no flag here, such as ``--ckpt=mini`` or ``--max_steps 3``, is written ``key=value``.

    Args:
        arguments: that start with a dash, and what follows the first.
        keys: the configuration's.
        command: as it is called.
    """
    flag, *rest = arguments
    name, equals, value = flag.lstrip("-").partition("=")
    if not equals:
        value = rest[0] if rest and not rest[0].startswith("-") else "…"
    name = name.replace("-", "_")
    known = list(keys)
    own = [key for key in known if key.rpartition(".")[2] == name]
    near = min(own, key=lambda key: key.count("."), default=None)
    if near is None:
        near = next(iter(nearest(name, known)), None)
    fix = f"{near}={value}" if near else f"{command} --help"
    return UserError(f"there is no flag {flag.partition('=')[0]}: keys are written key=value", fix=fix)


def unreadable(override: str) -> UserError:
    """``override`` is no ``key=value`` that Hydra's grammar can read."""
    if "=" not in override:
        return UserError(f"cannot read the argument {override!r}", fix="arguments are written key=value")
    key, _, value = override.partition("=")
    return UserError(
        "cannot read this value",
        key=key,
        value=value,
        fix=f"quote it for Hydra and for the shell: \"{key}='…'\"; lists are [a,b]",
    )


def _no_such_choice(missing: str, options: Sequence[str], text: str) -> UserError:
    group, _, choice = missing.rpartition("/")
    if choice.startswith("submitit_"):
        fix = "pip install 'embedlab[cluster]'"
        return UserError("submitit is not installed", key=group, value=choice, fix=fix)
    if not options:
        return UserError(text.splitlines()[0], fix=HELP)
    fix = one_of(choice, options)
    if group == "backbone" and choice in shipped_encoders():
        fix = f"backbone=mini backbone.name={choice}"
    return UserError("there is no such choice", key=group, value=choice, fix=fix)


def _not_composed(error: Exception, keys: Iterable[str], overrides: Sequence[str]) -> UserError:
    text = str(error)
    if ambiguous := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = ambiguous.groups()
        return UserError(
            "several values where one is expected",
            key=key,
            value=value,
            fix=f"a list is {key}=[{value}], a text {key}='\"{value}\"'; of train a sweep needs -m",
        )
    if group := re.match(r"Could not override '([^']+)'\. No match in the defaults list", text):
        key = group.group(1)
        return UserError(
            "nothing to override in this configuration",
            key=key,
            value=_value_of(key, overrides),
            fix=f"add it with +{key}=…",
        )
    if missing := re.match(r"Could not override '([^']+)'\.", text):
        return unknown_key(missing.group(1), keys, overrides)
    if isinstance(error.__cause__, Exception) and (inner := explain(error.__cause__, keys, overrides)):
        return inner
    return UserError(text.splitlines()[0] if text else type(error).__name__, fix=HELP)


def _invalid_value(error: Any, overrides: Sequence[str]) -> UserError:
    from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

    key = error.full_key or None
    if isinstance(
        error, InterpolationToMissingValueError
    ):  # `${sick}`, which an experiment's file leaves open
        key = str(error).splitlines()[0].rpartition(" ")[2]
    if isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        return UserError("this key needs a value", key=key, fix=f"add {key or 'key'}=…")
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(message, key=key, value=_value_of(key or "", overrides), fix=HELP)
