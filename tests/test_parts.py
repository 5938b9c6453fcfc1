"""Values of methods and poolings are refused as by their modules, before these import torch."""

from __future__ import annotations

import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from embedlab.config.build import from_dict
from embedlab.errors import UserError
from embedlab.methods import method_class
from embedlab.parts import part_names, part_record
from embedlab.pooling import pooling_class

PARTS = [(room, name) for room in ("methods", "pooling") for name in part_names(room)]
CLASS: dict[str, Any] = {"methods": method_class, "pooling": pooling_class}


def wrong(record: type) -> Iterator[dict[str, Any]]:
    """A record's values with one key, or one value, at fault."""
    yield {"no_such_key": 1}
    hints = typing.get_type_hints(record)
    for field in fields(record):
        if field.name != "name":
            for value in ([["of no type"]], -1, "nonsense", float("nan")):
                yield {field.name: value}
        assert hints[field.name] is not None


def refusal(record: type, values: dict[str, Any]) -> str | None:
    try:
        from_dict(record, values, "section")
    except UserError as error:
        return str(error)
    except TypeError as error:
        if "required" in str(error):  # a run that must be named
            return None
        raise
    return None


@pytest.mark.parametrize(("room", "name"), PARTS)
def test_a_record_by_its_text_is_the_record(room: str, name: str) -> None:
    real, made = CLASS[room](name).config_class, part_record(room, name, room)
    assert made is not None
    assert made is not real
    assert [(f.name, str(f.type)) for f in fields(made)] == [(f.name, str(f.type)) for f in fields(real)]
    seen = 0
    for values in ({}, *wrong(real)):
        said = refusal(real, {"name": name, **values})
        assert refusal(made, {"name": name, **values}) == said, values
        seen += said is not None
    assert seen


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.tau=-1"], "must be above 0 (method.tau=-1). Fix: method.tau=0.05"),
        (["method.mlp=both"], "method.mlp=both"),
        (["method=jtcse", "method.tower1=a", "method.tower2=b", "method.lambda_m=x"], "method.lambda_m=x"),
        (["pooling=s2sent", "pooling.n=0"], "pooling.n=0"),
        (["pooling.name=meen"], "did you mean|pooling=mean"),
    ],
)
def test_a_value_is_refused_without_torch(overrides: list[str], message: str) -> None:
    code = (
        "import sys\nfrom embedlab.cli.compose import compose\nfrom embedlab.errors import UserError\n"
        "from embedlab.run.parse import parse_shared\n"
        "try:\n    parse_shared(compose('train', sys.argv[1:]))\n"
        "except UserError as error:\n    print(error)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *overrides], capture_output=True, text=True, check=True
    )
    said, loaded = done.stdout.splitlines()
    assert any(part in said for part in message.split("|")), said
    assert loaded == "False"
