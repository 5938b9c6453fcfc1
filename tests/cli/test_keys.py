"""Every key of a run says what it means, in ``--help`` and in the documentation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from embedlab.cli.compose import compose
from embedlab.cli.keys import Meaning, annotated, listed_keys, meanings, sections
from embedlab.cli.main import main
from embedlab.files import conf_dir

CHOICES = [
    f"{group}={file.stem}"
    for group in ("adapter", "backbone", "data", "logger", "method", "pooling", "template", "trainer")
    for file in sorted((conf_dir() / group).glob("*.yaml"))
]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_key_says_what_it_means(choice: str) -> None:
    values = compose("train", [choice])
    for group, keys in sections(values):
        said = meanings(group, str(keys.get("name", "")))
        assert [key for key in keys if not said.get(key, Meaning()).text] == [], group


def test_choices_are_those_of_the_record_also_under_a_name_and_inherited() -> None:
    assert meanings("backbone")["attention"].choices == ("sdpa", "eager", "flash_attention_2")
    assert meanings("pooling", "s2sent")["order"].choices == ("fcanet", "zigzag")
    assert meanings("method", "tncse")["icnce"].choices == ("coin", "symmetric", "fixed")
    assert "temperature" in meanings("method", "tncse")["tau"].text.lower()


def test_choices_that_a_meaning_names_are_not_said_twice() -> None:
    assert str(Meaning("a or b", ("a", "b"))) == "a or b."
    assert str(Meaning("of the gate", ("a", "b"))) == "Of the gate. One of a, b."
    assert str(Meaning("", ("a",))) == "One of a."


def test_help_is_the_same_configuration_with_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help", "method=tncse", "pooling=s2sent"])
    assert end.value.code == 0
    shown = capsys.readouterr().out.partition("keys and their values:\n")[2]
    assert yaml.safe_load(shown)["method"]["name"] == "tncse"
    assert "  # Blocks that are mixed, the last ones.\n    'n': 3" in shown
    assert all(len(line) <= 100 for line in shown.splitlines() if "#" in line)


@pytest.mark.parametrize(
    "text", ["a: 1\n", "b:\n- 1\n- 2\n", "x: 'l\n\n  m'\n", "stages: {}\nc:\n  d:\n    e: null"]
)
def test_annotating_changes_no_value(text: str) -> None:
    assert yaml.safe_load(annotated(text)) == yaml.safe_load(text)


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from embedlab.cli.keys import meanings; meanings('method', 'jtcse'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_list_of_a_command() -> None:
    comment = "About it.\n\n  embedlab x\n\nckpt   mini, or\n       a folder\nlong_key  one\nNo key\n"
    assert listed_keys(comment) == {"ckpt": "mini, or a folder", "long_key": "one"}
