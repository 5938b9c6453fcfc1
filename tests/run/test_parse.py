"""A shared section is typed, ranged and refused by key before torch is loaded, whichever field is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from embedlab.cli.compose import compose
from embedlab.errors import UserError
from embedlab.parts import part_names
from embedlab.run.parse import _SHARED, parse_run, parse_shared

CODE = """
import copy, json, sys, typing
from dataclasses import fields, is_dataclass
from embedlab.cli.compose import compose
from embedlab.config.data import DataConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.run.parse import _SHARED, parse_shared

def wrong(record, path):
    hints = typing.get_type_hints(record)
    for field in fields(record):
        key, hint = (*path, field.name), hints[field.name]
        yield key, [["of no type"]]
        if "Literal" in str(hint):
            yield key, "nonsense"
        if field.metadata:
            yield key, -1
        if is_dataclass(hint):
            yield from wrong(hint, key)

name = sys.argv[1]
record = {"data": DataConfig, "template": Template, **_SHARED}[name]
found, composed = [], compose("train", ["data.files=x.txt", "template=eol"])
parse_shared(composed)
for key, value in wrong(record, (name,)):
    values = copy.deepcopy(composed)
    *path, last = key
    group = values
    for part in path:
        group = group[part]
    group[last] = value
    try:
        parse_shared(values)
        found.append([".".join(key), value, None, "taken"])
    except UserError as error:
        found.append([".".join(key), value, error.key, str(error)])
print(json.dumps([found, sorted({"torch", "lightning", "transformers"} & set(sys.modules))]))
"""


@pytest.mark.parametrize("section", ["data", "template", *_SHARED])
def test_a_wrong_value_is_refused_by_its_key_without_torch(section: str) -> None:
    command = [sys.executable, "-c", CODE, section]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    assert len(found) >= 2
    assert [line for key, _, named, line in found if named != key] == []
    assert [line for *_, line in found if "\n" in line or "Fix: " not in line] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", -1), ("seed", True), ("seed", 2**32), ("step", "run"), ("unpad", 1), ("ckpt_path", 3)],
)
def test_so_are_the_values_beside_the_sections(key: str, value: object) -> None:
    with pytest.raises(UserError) as refused:
        parse_shared({**compose("train", ["data.files=x.txt"]), key: value})
    assert refused.value.key == key
    assert refused.value.fix


@pytest.mark.parametrize("method", sorted(part_names("methods")))
def test_what_trains_is_known_before_its_method_is_imported(method: str) -> None:
    values = compose("train", [f"method={method}", "data.files=x.txt"])
    assert parse_shared(values)["method"].idle == parse_run(values).method.idle
