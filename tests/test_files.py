from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from embedlab import files as _paths


def test_conf_is_found_beside_the_package() -> None:
    assert (_paths.conf_dir() / "train.yaml").is_file()


@pytest.mark.parametrize("inside", ["package/conf", "conf"])
def test_conf_is_found_in_either_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    (tmp_path / inside).mkdir(parents=True)
    monkeypatch.setattr(_paths, "_PACKAGE", tmp_path / "package")
    assert _paths.conf_dir() == tmp_path / inside


def test_a_wheel_never_takes_a_neighbours_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """site-packages/conf may belong to any other project."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "embedlab" / "conf").mkdir(parents=True)
    monkeypatch.setattr(_paths, "_PACKAGE", tmp_path / "embedlab")
    assert _paths.conf_dir() == tmp_path / "embedlab" / "conf"


def test_no_conf_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_paths, "_PACKAGE", tmp_path / "package")
    with pytest.raises(FileNotFoundError, match="installation is not complete"):
        _paths.conf_dir()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"EMBEDLAB_CACHE": "/big/disk", "XDG_CACHE_HOME": "/xdg"}, "/big/disk"),
        ({"EMBEDLAB_CACHE": "~/own"}, "/home/me/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/embedlab"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/embedlab"),
        ({}, "/home/me/.cache/embedlab"),
    ],
)
def test_cache_dir(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    monkeypatch.delenv("EMBEDLAB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _paths.cache_dir() == Path(expected)


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o2755), (0o007, 0o660, 0o2770)])
def test_an_ordinary_mode_is_the_umasks(tmp_path: Path, umask: int, file: int, folder: int) -> None:
    (tmp_path / "a").touch(0o600)
    (tmp_path / "b").mkdir()
    (tmp_path / "b").chmod(0o2700)  # the folder of a group
    before = os.umask(umask)
    try:
        for name in "ab":
            _paths.ordinary_mode(tmp_path / name)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [file, folder]
