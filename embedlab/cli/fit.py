"""`embedlab fit|validate|test|predict --config FILE`: a file is refused in a second, before Lightning is loaded."""

from __future__ import annotations

import argparse
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedlab.cli.config_errors import unknown_key
from embedlab.cli.imports import first_import
from embedlab.cli.permission import check_permission
from embedlab.cli.run_file import add_sections, folder_of, from_file, hint_of, trainer_defaults
from embedlab.config.build import refused
from embedlab.config.read import decoded, read_values
from embedlab.console import show_log, spelling
from embedlab.errors import UserError
from embedlab.files import check_writable, like
from embedlab.run.parse import parse_shared
from embedlab.run.places import check_places
from embedlab.run.processes import end_with_starter
from embedlab.run.run_folder import check_free, check_own


def main(subcommand: str, argv: Sequence[str]) -> int:
    """Run one of Lightning's subcommands; returns the exit status.

    Raises:
        UserError: a file or an argument that cannot be read, in one line.
    """
    end_with_starter()
    show_log()
    if not argv:
        fix = f"embedlab {subcommand} --config FILE, which embedlab train … --cli-config prints"
        raise UserError(f"{subcommand} reads a run from a file", key="config", fix=fix)
    with _as_written(subcommand):
        argv = _named(argv)
        if not any(map(_NOT_LOOKED_AT.match, argv)):
            _check(subcommand, argv)
        with first_import("embedlab.cli.lightning_cli"):
            from embedlab.cli.lightning_cli import EmbedlabCLI

        return EmbedlabCLI(subcommand, argv).status


_NOT_LOOKED_AT = re.compile(r"-h$|--help\b|--print_|--[\w.]+\.help(=|$)")
"""Arguments that print something: Lightning reads these."""
_MAY_BE_FILES = re.compile(
    r"(-c|--config|--trainer|--data|--logger|--callbacks(?:\.\w+)?|--evaluation|--model(?:\.\w+)?)(?:=(.*)|$)",
    re.S,
)
_WRITTEN = "a file that embedlab train … --cli-config printed"


def _check(subcommand: str, argv: Sequence[str]) -> None:
    """Refuse what can be refused without torch, which takes seconds to load."""
    parser = _parser(subcommand)
    try:
        parsed = parser.parse_args(argv).as_dict()
    except argparse.ArgumentError as error:
        raise _not_parsed(error, list(parser.get_defaults().keys()), subcommand) from None
    values, _ = from_file(parsed)
    check_permission(values, argv)
    folder = folder_of(parsed["trainer"] or {}, values)
    if subcommand == "fit":
        check_own(folder, "trainer.default_root_dir")
        check_free(folder, values["ckpt_path"], "trainer.default_root_dir")
        check_writable(folder, "trainer.default_root_dir")
    if not values["stages"]:  # whose results may be values that are not there yet
        check_places(parse_shared(values), subcommand)


def _parser(subcommand: str) -> Any:
    """jsonargparse's, which reads arguments as Lightning's does, but of the trainer any: they may name classes."""
    from jsonargparse import ActionParser, ArgumentParser

    # Of a part of a key Lightning's makes the whole one, with a warning; here it is a slip of the pen.
    parser, trainer = (ArgumentParser(exit_on_error=False, allow_abbrev=False) for _ in range(2))
    # Key by key: in the place of one dictionary a second file's would come.
    for key, default in {**trainer_defaults(), "max_epochs": 1}.items():
        hint = str | None if key == "default_root_dir" else dict[str, Any] | list[Any] | Any
        trainer.add_argument(f"--{key}", type=hint, default=default)
    parser.add_argument("-c", "--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=42)
    parser.add_argument("--ckpt_path", type=str | None, default=None)
    parser.add_argument("--trainer", action=ActionParser(parser=trainer))
    if subcommand in ("validate", "test"):
        parser.add_argument("--verbose", type=bool, default=True)
    if subcommand == "predict":
        parser.add_argument("--return_predictions", type=bool | None, default=None)
    add_sections(parser)
    return parser


def _named(argv: Sequence[str]) -> list[str]:
    """The arguments, with its text in the place of a file that can be read once only (a pipe, or ``-``): this look, the
    run and each of its ranks read it.

    Raises:
        UserError: ``--config`` names no file, or one that cannot be read.
    """
    named = list(argv)
    for place, argument in enumerate(argv):
        if (found := _MAY_BE_FILES.match(argument)) is None or (found[2] is None and place + 1 == len(argv)):
            continue
        given = argv[place + 1] if found[2] is None else found[2]
        is_config, path = found[1] in ("-c", "--config"), Path(given).expanduser()
        if (given == "-" and is_config) or stat.S_ISFIFO(_mode(path)):
            text = decoded(sys.stdin.buffer.read() if given == "-" else path.read_bytes(), given, _WRITTEN)
            if not text.strip():
                raise UserError(
                    "holds no keys with values", file=given, key=found[1].lstrip("-"), fix=_WRITTEN
                )
            if found[2] is None:
                named[place + 1] = text
            else:
                named[place] = f"{found[1]}={text}"
        elif is_config:
            _check_file(path)
    return named


def _mode(path: Path) -> int:
    """What lies at a path; 0: nothing, as where it is no path but the values themselves."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def _check_file(path: Path) -> None:
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        raise UserError("this is a folder", key="config", value=str(path), fix=_WRITTEN)
    if not mode:
        # The values themselves may stand there.
        if ":" not in str(path) or re.fullmatch(r"\S+\.ya?ml", str(path)):
            raise UserError("no such file", key="config", value=str(path), fix=like(path) or _WRITTEN)
        return
    is_yaml = path.suffix in (".yaml", ".yml")
    if not is_yaml and stat.S_ISREG(mode):
        decoded(path.read_bytes(), path, _WRITTEN)
    if is_yaml and not isinstance(read_values(path, _WRITTEN, any_value=True), dict):
        raise UserError("holds no keys with values", file=path, key="config", fix=_WRITTEN)


@contextmanager
def _as_written(subcommand: str) -> Iterator[None]:
    """Refusals in one line, and what is said of a run that ended, with keys as this command spells them."""
    try:
        with spelling(_in_flags):
            yield
    except UserError as error:
        error.key, error.fix = _as_flag(error.key), _in_flags(error.fix)
        raise
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"not UTF-8 (byte 0x{byte:02x} at place {error.start + 1} of the file)",
            key="config",
            fix="a YAML file",
        ) from None
    except argparse.ArgumentError as error:
        raise _not_parsed(error, (), subcommand) from None


_MISFIT = re.compile(r'Parser key "([\w.]+)":.* (?:Got|Given) value: (.*)')
_NESTED = re.compile(r"NestedArg\(key='(.+?)', val='?(.*?)'?\)$")
_PLACE = re.compile(r"unrecognized arguments: (?!-)(\S+)")
_UNKNOWN = re.compile(
    r"unrecognized arguments: --(?P<key>[\w.]+\+?)"
    r"|Group '(?P<group>.+)' does not accept option '(?P<inner>.+)'|Option '(?P<whole>.+)' is not accepted"
)


def _not_parsed(error: argparse.ArgumentError, keys: Iterable[str], subcommand: str) -> UserError:
    """What jsonargparse says, in the words of the other commands; ``keys`` are what there is."""
    text = " ".join(str(error).split())
    misfit, unknown = _MISFIT.match(text), _UNKNOWN.match(text)
    if misfit and (nested := _NESTED.match(misfit[2])):
        group = f"{misfit[1]}.{nested[1]}".rpartition(".")
        fix = f'--{group[0]}="{{{group[2]}: {nested[2]}, …}}"'
        return UserError("this group is given as a whole", key="".join(group), value=nested[2], fix=fix)
    if place := _PLACE.match(text):
        what = place[1]
        fix = f"--config {what}" if Path(what).exists() else f"--{what}" if "=" in what else "--KEY=VALUE"
        return UserError(f"{what} is an argument without a flag", fix=fix)
    if text.startswith(("Problems parsing config", "Unexpected config")):
        return UserError("what it names has no keys with values", key="config", fix=_WRITTEN)
    if misfit and (hint := hint_of(misfit[1])) is not None:
        return refused(misfit[1], misfit[2], hint)
    if unknown and keys:
        key = unknown["key"] or unknown["whole"] or f"{unknown['group']}.{unknown['inner']}"
        if key.removesuffix("+") in keys:
            fix = f"--{key.removesuffix('+')}=VALUE, the whole of it"
            return UserError("nothing can be added to this key", key=f"--{key}", fix=fix)
        problem = unknown_key(key, keys)
        if key.partition(".")[0] in _OF_MODEL:  # one of `embedlab train`, which `_as_flag` would mend
            problem.key = f"--{key}"
        return problem
    return UserError(text[:400], fix=f"embedlab {subcommand} --help")


_OF_MODEL = ("backbone", "adapter", "method", "pooling", "template", "optimizer", "step", "unpad")
_OTHERS = {"seed": "seed_everything", "hydra.run.dir": "trainer.default_root_dir", "ckpt_path": "ckpt_path"}
_CHOICES = {"trainer": "accelerator", "backbone": "source", **dict.fromkeys(("step", "unpad"), "")}
"""The key that a group's choice mostly stands for, where it is not its name."""
_KEY = re.compile(
    rf"(?<![\w.-])((?:{'|'.join((*_OF_MODEL, *_OTHERS, 'trainer', 'data', 'logger', 'callbacks', 'evaluation'))})"
    r"(?:\.\w+)*)=(?=[\w\[/.~])"
)
_BARE = re.compile(rf"(?<![\w.-])(?=(?:{'|'.join(_OF_MODEL)})\.\w)")
"""Before a key of the model that has no value."""


def _flag(found: re.Match[str]) -> str:
    """A key of `embedlab train` in a message, such as ``trainer.devices`` or ``trainer``, by this command's name."""
    key = found[1]
    if key in ("trainer", "data", *_OF_MODEL):
        key = f"{key}.{_CHOICES.get(key, 'name')}".rstrip(".")
    return f"--{_as_flag(key)}="


def _in_flags(text: str) -> str:
    return _BARE.sub("model.", _KEY.sub(_flag, text))


def _as_flag(key: str | None) -> str | None:
    if key is None or key in _OTHERS:
        return key and _OTHERS[key]
    return f"model.{key}" if key.partition(".")[0] in _OF_MODEL else key
