"""The house's rules that no linter knows."""

from __future__ import annotations

import ast
from pathlib import Path

import embedlab

PACKAGE = Path(embedlab.__file__).parent
BY_STRING = ("import_module", "__import__")
MAY_IMPORT_BY_STRING = {
    "__init__.py": "the two public names, so that `import embedlab` does not wait for torch",
    "backbones/__init__.py": "the same for the names of its room",
    "parts.py": "parts are found by name",
}


def test_modules_are_imported_by_string_in_known_places_only() -> None:
    """Imports by string escape the linter that holds the floors."""
    places = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.func if isinstance(node, ast.Call) else None
            if getattr(name, "attr", getattr(name, "id", None)) in BY_STRING:
                places.add(file.relative_to(PACKAGE).as_posix())
    assert places == set(MAY_IMPORT_BY_STRING)


def test_files_and_functions_stay_readable() -> None:
    long_files, long_functions = [], []
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        name = file.relative_to(PACKAGE).as_posix()
        if len(text.splitlines()) > 450:
            long_files.append(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > 60:
                    long_functions.append(f"{name}:{node.name}")
    assert not long_files
    assert not long_functions


def test_a_folder_can_be_overlooked() -> None:
    """At most 20 files in a room; 32 where each is a part found by its name, 26 commands and their helpers."""
    for folder in (PACKAGE, *(p for p in PACKAGE.rglob("*") if p.is_dir())):
        files = [p for p in folder.glob("*.py") if p.name != "__init__.py"]
        most = {"methods": 32, "pooling": 32, "objectives": 32, "cli": 26}.get(folder.name, 20)
        assert len(files) <= most, folder.name
