"""A file is a record or one line that says what is wrong with it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from embedlab.config import read
from embedlab.config.read import read_record, read_values
from embedlab.errors import UserError


@dataclass(frozen=True)
class Inner:
    name: str
    size: int = 1


@dataclass(frozen=True)
class Outer:
    number: float
    inner: Inner
    scores: dict[str, float | None] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)
    kind: Literal["a", "b"] | None = None


BOMB = "\n".join(
    ["a0: &0 [1]", *(f"a{i}: &{i} [{','.join([f'*{i - 1}'] * 9)}]" for i in range(1, 12))]
).encode()
"""31 billion values in 400 bytes."""
GOOD: dict[str, Any] = {"number": 1, "inner": {"name": "x"}, "scores": {"a": 1.5, "b": None}, "more": [1]}


def write(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["x.json", "x.yaml"])
def test_what_fits_is_a_record(name: str, tmp_path: Path) -> None:
    found = read_record(write(tmp_path / name, GOOD), Outer)
    assert found == Outer(1, Inner("x"), {"a": 1.5, "b": None})


@pytest.mark.parametrize("name", ["x.json", "x.yaml"])
@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"number": "1"}, "number"),
        ({"number": True}, "number"),
        ({"number": None}, "number=null"),
        ({"number": float("nan")}, "number=nan"),
        ({"inner": 3}, "inner"),
        ({"inner": None}, "inner=null"),
        ({"inner": {}}, "inner.name"),
        ({"inner": {"name": "x", "size": 1.5}}, "inner.size"),
        ({"scores": []}, "scores"),
        ({"scores": {"a": 1, "b": True}}, "scores.b"),
        ({"kind": "c"}, "kind"),
        ({"tables": {}}, "tables"),
        ({"tables": [1]}, "tables"),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: dict[str, Any], key: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, GOOD | change)
    with pytest.raises(UserError) as error:
        read_record(path, Outer, fix="mend it")
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert f"({key}" in text
    assert text.endswith("Fix: mend it")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.json", b""),
        ("x.json", b"{"),
        ("x.json", b"[" * 100_000),
        ("x.json", b"[" * 100 + b"]" * 100),
        ("x.json", b"\xff\xfe"),
        ("x.json", b'"\\ud800"'),
        ("x.json", b"1" * 10_000),
        ("x.json", b"%d" % 2**70),
        ("x.yaml", b"a: [1"),
        ("x.yaml", b"[" * 5_000),
        ("x.yaml", b"!!python/object/apply:os.getcwd []"),
        ("x.yaml", b"1: 2"),
        ("x.yaml", b"a: 2020-01-01"),
        ("x.yaml", b"a: !!binary aGk="),
        ("x.yaml", b'a: !!int ""'),
        ("x.yaml", b"a: !!bool x"),
        ("x.yaml", b"a: !!timestamp x"),
        ("x.yaml", b"a: &a [*a]"),
        ("x.yaml", BOMB),
    ],
)
def test_what_no_parser_should_meet(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_values(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_sizes_are_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(1 << 34)  # a file of no blocks
    with pytest.raises(UserError, match="larger than 64 MiB"):
        read_values(path)
    monkeypatch.setattr(read, "MOST_VALUES", 10)
    with pytest.raises(UserError, match="too deeply"):
        read_values(write(path, list(range(20))))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    for path in (tmp_path / "x.json", tmp_path, Path("/dev/zero"), tmp_path / "none", Path("a\0b")):
        with pytest.raises(UserError):
            read_values(path)
