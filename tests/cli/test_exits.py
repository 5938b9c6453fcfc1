from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from embedlab.cli.config_errors import HELP
from embedlab.cli.exits import as_user_error, guarded
from embedlab.errors import UserError


def raising(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_a_wrapped_user_error_is_found() -> None:
    inner = UserError("no rows", file="a.csv", fix="f")
    assert as_user_error(raising(RuntimeError("worker died"), raising(ValueError("x"), inner))) is inner


def test_an_exception_while_handling_a_user_error_is_not_hidden() -> None:
    error = RuntimeError("clean-up failed")
    error.__context__ = UserError(
        "no rows", fix="f"
    )  # as `raise` in an `except` block sets it, without `from`
    assert as_user_error(raising(error)) is None


def test_a_constructor_that_hydra_calls_fails_as_itself() -> None:
    assert as_user_error(raising(InstantiationException("Error in call to target"), TypeError("x"))) is None
    inner = UserError("bad", key="k", fix="f")
    assert as_user_error(raising(InstantiationException("Error in call to target"), inner)) is inner


def test_omegaconf_errors_are_one_line() -> None:
    with pytest.raises(Exception) as caught:
        OmegaConf.create({"a": {"b": "${nowhere}"}}).a.b  # noqa: B018
    assert str(as_user_error(caught.value)) == f"Interpolation key 'nowhere' not found (a.b). Fix: {HELP}"


def test_broken_yaml_names_file_and_line(tmp_path: object) -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load("a: 1\nb: [1,\nc: }")
    line = str(as_user_error(caught.value))
    assert "\n" not in line
    assert ":3: this is not YAML" in line


@pytest.mark.parametrize("error", [ValueError("x"), OSError("disk"), AssertionError(), MemoryError()])
def test_failures_are_not_the_users(error: Exception) -> None:
    def command() -> int:
        raise error

    with pytest.raises(type(error)):
        guarded(command)


def test_status() -> None:
    assert guarded(lambda: None) == 0
    assert guarded(lambda: 3) == 3
    with pytest.raises(SystemExit) as stop:
        guarded(lambda: exec("raise SystemExit(5)"))
    assert stop.value.code == 5


def test_what_the_file_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    for refused, words in (
        (lambda: (tmp_path / "a" / "b").mkdir(), "not a directory. Fix: a path that"),
        (lambda: (tmp_path / "a").mkdir(), "file exists. Fix: another path"),
        (lambda: tmp_path.write_text("x"), "is a directory. Fix: the path of a file"),
        (lambda: (tmp_path / ("x" * 300)).write_text("x"), "file name too long. Fix: a shorter path"),
    ):
        with pytest.raises(OSError) as caught:
            refused()
        line = str(as_user_error(caught.value))
        assert str(tmp_path) in line
        assert words in line


def test_a_file_that_went_missing_stays_a_failure(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        (tmp_path / "none").read_text()
    assert as_user_error(caught.value) is None
