"""Parts (methods, poolings, kinds of data, suites) are found by their names in files; no list names them.

A part stands in a file of its room's folder and says its own name in a class: ``name = "mean"``, or
``name: str = "mean"`` in its configuration record. Files are read as text until a part is asked for, so that an
unknown name is refused without importing anything.

Another distribution adds parts through the entry point group ``embedlab.parts``, whose value is a package laid out
like this one::

    [project.entry-points."embedlab.parts"]
    mine = "my_package"  # with my_package/methods/NAME.py and my_package/conf/method/NAME.yaml, for example

What a configuration file or a downloaded folder names is never imported: only what is installed is.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from embedlab.errors import UserError, one_of

GROUP = "embedlab.parts"


@cache
def packages() -> tuple[tuple[str, Path], ...]:
    """Name and folder of this package and of those that other distributions add.

    Raises:
        UserError: an entry point whose package is not installed.
    """
    found = [("embedlab", Path(__file__).resolve().parent)]
    for entry in entry_points(group=GROUP):
        spec = importlib.util.find_spec(entry.value)
        if spec is None or not spec.submodule_search_locations:
            told = f"the entry point {entry.name} of {GROUP} names no package: {entry.value}"
            raise UserError(
                told, fix=f"reinstall or remove {entry.dist.name if entry.dist else 'its distribution'}"
            )
        found.append((entry.value, Path(next(iter(spec.submodule_search_locations)))))
    return tuple(found)


def conf_dirs() -> list[Path]:
    """Folders of configuration files that other distributions bring."""
    return [folder / "conf" for _, folder in packages()[1:] if (folder / "conf").is_dir()]


@cache
def part_names(room: str) -> dict[str, str]:
    """The parts of a room, such as ``methods``: name to module, in the order of their files.

    A name of this package is never taken over by another distribution.
    """
    names: dict[str, str] = {}
    for package, folder in packages():
        for file in sorted((folder / room).rglob("*.py")):
            module = ".".join((package, *file.relative_to(folder).with_suffix("").parts))
            for name in _names_in(file):
                names.setdefault(name, module)
    return names


def find_part(room: str, name: Any, key: str) -> str:
    """The module of a part, by its name; nothing is imported.

    Args:
        room: folder of the parts.
        name: of the part.
        key: the configuration key that names it, for the message.

    Raises:
        UserError: there is no such part; with the nearest name.
    """
    names = part_names(room)
    if not isinstance(name, str) or name not in names:
        kind = key.split(".")[0]
        raise UserError(f"unknown {kind}", key=key, value=name, fix=one_of(name, sorted(names), f"{kind}="))
    return names[name]


def part_module(room: str, name: Any, key: str) -> ModuleType:
    """The module of a part, as in `find_part`."""
    return importlib.import_module(find_part(room, name, key))


def part_record(room: str, name: Any, key: str) -> type | None:
    """The configuration record of a part as its file's text has it, for a look at values before torch is imported.

    Returns: the record, whose methods may miss names; None where its fields need what is not imported.

    Raises:
        UserError: as of `find_part`.
    """
    module = _records(find_part(room, name, key))
    for value in vars(module).values():
        own = isinstance(value, type) and value.__module__ == module.__name__ and is_dataclass(value)
        if own and getattr(value, "name", None) == name:
            return value
    return None


@cache
def _records(module: str) -> ModuleType:
    """What a module defines with the standard library, ``embedlab.config`` and modules made like this one alone."""
    made = ModuleType(f"{module} (records)")
    sys.modules[made.__name__] = made  # where a dataclass looks for what its annotations name
    package, *inner = module.split(".")
    path = dict(packages())[package].joinpath(*inner)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and _is_light(node.module) is None:
            others = vars(_records(node.module))
            vars(made).update({a.asname or a.name: others[a.name] for a in node.names if a.name in others})
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            if all(map(_is_light, modules)):
                _run(node, made, file)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.ClassDef | ast.FunctionDef):
            with suppress(Exception):  # it needs what has been left out
                _run(node, made, file)
    return made


def _run(node: ast.stmt, module: ModuleType, file: Path) -> None:
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([node], []), str(file), "exec", flags, dont_inherit=True), vars(module))


def _is_light(module: str) -> bool | None:
    """Whether a module is imported without torch; None: of one of the packages that have parts."""
    package = module.partition(".")[0]
    if module.startswith(("embedlab.config", "embedlab.errors")):
        return True
    return None if package in dict(packages()) else package in sys.stdlib_module_names


def part_class(room: str, name: Any, base: type, key: str) -> Any:
    """The subclass of ``base`` that is called ``name`` (its attribute of that name), as in `part_module`."""
    module = part_module(room, name, key)
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, base) and getattr(value, "name", None) == name:
            return value
    raise TypeError(f"{module.__name__} says the name {name}, but in no {base.__name__}")


def _names_in(file: Path) -> Iterator[str]:
    """Values of the attribute ``name`` of a file's classes."""
    if file.name.startswith("_"):
        return
    text = file.read_text(encoding="utf-8")
    if "name" not in text:
        return
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for line in node.body:
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            value = getattr(line, "value", None)
            if isinstance(target, ast.Name) and target.id == "name" and isinstance(value, ast.Constant):
                yield str(value.value)
