from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from embedlab.cli.compose import compose, known_keys, readable
from embedlab.errors import UserError
from embedlab.files import conf_dir

GIVEN = ["ckpt=mini", "input=in.txt", "output=out.npy"]


def refused(argv: list[str], **kwargs: object) -> str:
    with pytest.raises(UserError) as caught:
        compose("demo", argv, **kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def test_the_result_is_plain_and_resolved(conf: Path) -> None:
    config = compose("demo", [*GIVEN, "method=beta", "method.tau=0.1", "limit=3"])
    assert config["method"] == {"name": "beta", "tau": 0.1}
    assert config["label"] == "sts-3"
    assert config["folder"] == "here"
    assert "hydra" not in config
    assert json.loads(json.dumps(config)) == config
    assert type(config["method"]) is dict
    assert type(config["tags"]) is list


def test_values_have_their_types(conf: Path) -> None:
    config = compose("demo", [*GIVEN, "tags=[x,1,null,true]", "+new.key=1e-4", "suite='a b, c'"])
    assert config["tags"] == ["x", 1, None, True]
    assert config["new"] == {"key": 1e-4}
    assert config["suite"] == "a b, c"


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("limt=5", ["limt=5", "did you mean limit?"]),
        ("method.tua=1", ["method.tua=1", "method.tau"]),
        ("tau=1", ["tau=1", "method.tau"]),
        ("methud=beta", ["methud=beta", "did you mean method"]),
        ("zzz=5", ["zzz=5", "ckpt"]),
        ("method=gamma", ["method=gamma", "no such choice", "alpha, beta"]),
        ("method=alpa", ["method=alpa", "did you mean alpha"]),
        ("suite=sts,transfer", ["suite=sts,transfer", "suite=[sts,transfer]"]),
        ("suite=[a", ["suite=[a", "quote"]),
        ("limit", ["'limit'", "key=value"]),
        ("label=${nowhere}", ["nowhere"]),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it_and_the_fix(
    conf: Path, argument: str, parts: list[str]
) -> None:
    line = refused([*GIVEN, argument])
    assert "\n" not in line
    assert [part for part in parts if part not in line] == [], line


def test_suggestions_come_from_the_configuration_as_chosen(conf: Path) -> None:
    assert "method.lambda_c" in refused([*GIVEN, "method.lambda_d=2"])
    assert "method.lambda_c" not in refused([*GIVEN, "method=beta", "method.lambda_d=2"])


def test_a_key_left_without_its_value(conf: Path) -> None:
    assert refused(["input=a", "output=b"]) == "this key needs a value (ckpt). Fix: add ckpt=…"


def test_a_flag_that_does_not_exist(conf: Path) -> None:
    line = refused([*GIVEN, "--frobnicate"])
    assert "--frobnicate" in line
    assert "embedlab demo --help" in line


@pytest.mark.parametrize("value", ["a,b", "my file,2.txt", "a,b,c d", "1,2"])
def test_a_text_with_a_comma_is_given_as_the_line_says(conf: Path, value: str) -> None:
    line = refused(["input=a", "output=b", f"ckpt={value}"])
    given = shlex.split(line.partition("a text ")[2].partition(";")[0])
    assert compose("demo", ["input=a", "output=b", *given])["ckpt"] == value


def test_positional_arguments_fill_their_keys(conf: Path) -> None:
    both = ("input", "output")
    for argv in (
        ["in.txt", "out.npy", "ckpt=mini"],
        ["ckpt=mini", "in.txt", "out.npy"],
        ["in.txt", "ckpt=mini", "out.npy"],
    ):
        config = compose("demo", argv, both)
        assert (config["input"], config["output"], config["ckpt"]) == ("in.txt", "out.npy", "mini")


def test_positional_arguments_are_taken_as_they_are(conf: Path) -> None:
    odd = "./a=b, [c] ${d} \\${e} 'f'.txt"
    config = compose("demo", [odd, "-", "ckpt=mini"], ("input", "output"))
    assert (config["input"], config["output"]) == (odd, "-")


def test_positional_arguments_too_few_and_too_many(conf: Path) -> None:
    assert "INPUT OUTPUT" in refused(["in.txt", "ckpt=mini"], positional=("input", "output"))
    for given in (["a", "b", "c"], ["input=a", "b", "c"], ["input=a", "output=b", "c"]):
        line = refused([*given, "ckpt=mini"], positional=("input", "output"))
        assert "an argument too many: 'c'" in line
        assert "demo INPUT OUTPUT key=value …; a text of several" in line


@pytest.mark.parametrize(
    ("arguments", "several", "last"),
    [
        (["a", "b"], "a", "b"),
        (["a", "./b=c", "${d}", "e"], ["a", "./b=c", "${d}"], "e"),
        (["input=[a,b]", "c"], ["a", "b"], "c"),
    ],
)
def test_one_position_may_take_several(conf: Path, arguments: list[str], several: Any, last: str) -> None:
    places = ("input", "output")
    config = compose("demo", ["ckpt=mini", *arguments], positional=places, several="input")
    assert (config["input"], config["output"]) == (several, last)


def test_help_shows_comment_usage_and_keys(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compose("demo", ["--help", "method=beta"], ("input",))
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "usage: embedlab demo INPUT key=value …\n\nScores a demonstration.\nckpt: what to score\n"
    )
    assert "  tau: 0.07" in out.replace("    ", "  ")
    assert "hydra:" not in out


def test_cfg_prints_what_composes_back(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    with pytest.raises(SystemExit) as stop:
        compose("demo", [*GIVEN, "limit=4", "--cfg", "job"])
    assert stop.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["limit"] == 4
    assert shown["label"] == "${suite}-${limit}"


def test_composing_leaves_no_global_state(conf: Path) -> None:
    from hydra.core.global_hydra import GlobalHydra

    refused(["limt=5"])
    compose("demo", GIVEN)
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    "text",
    ["runs/epoch=3-step=100.ckpt", "a=b's file.ckpt", "C:=\\x", "x=1,y=2"],
)
def test_a_value_with_an_equals_sign_needs_no_quoting(conf: Path, text: str) -> None:
    assert compose("demo", [*GIVEN[1:], f"ckpt={text}"])["ckpt"] == text


def test_a_path_that_exists_needs_no_quoting(conf: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd (name), [v1]#.txt"
    path.touch()
    assert compose("demo", [*GIVEN[1:], f"ckpt={path}"])["ckpt"] == str(path)


@pytest.mark.parametrize(
    "override",
    [
        "seed=0,1,2",
        "a=[x=1]",
        "a={b: c=d}",
        "a='x=y'",
        'a="x=y"',
        "a=${b:c=d}",
        "a=",
        "~a",
        "+a=1",
        "a=data/*.csv",
    ],
)
def test_what_hydra_reads_is_left_to_hydra(override: str) -> None:
    assert readable(override) == override


def test_known_keys_include_inner_ones(conf: Path) -> None:
    keys = known_keys("demo", ["method=beta"])
    assert {"limit", "method", "method.tau"} <= set(keys)
    assert "method.lambda_c" not in keys
    assert {"method.lambda_c"} <= set(known_keys("demo", ["nonsense=1"]))


@pytest.mark.parametrize("value", ["no", "off", "'false'", "0", "[]"])
@pytest.mark.parametrize(
    "name", [p.stem for p in sorted(conf_dir().glob("*.yaml")) if "\nheader: null\n" in p.read_text()]
)
def test_a_switch_that_is_null_by_default_is_a_switch(name: str, value: str) -> None:
    """``header=no`` was taken for true, and the first text for a name."""
    text = (conf_dir() / f"{name}.yaml").read_text()
    needed = [f"{key}=x" for key in re.findall(r"^(\w+): \?\?\?$", text, re.MULTILINE)]
    with pytest.raises(UserError, match=r"not true or false \(header="):
        compose(name, [*needed, f"header={value}"])
    for good, found in (("true", True), ("false", False), ("null", None)):
        assert compose(name, [*needed, f"header={good}"])["header"] is found
