"""Folders of the package, and how it writes: whole or not at all, full disks, places that refuse, damaged files."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import embedlab
from embedlab import files as _paths
from embedlab.backbones.weight_files import corruption
from embedlab.cli import main as command
from embedlab.cli.exits import as_user_error
from embedlab.errors import UserError
from embedlab.files import check_writable, writing
from embedlab.run.callbacks.checkpoints import find_checkpoint
from tests.encoders.test_encoder import build

Tiny = Callable[..., Path]


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


KILLED = """
import json, os, signal, sys
from contextlib import suppress
from pathlib import Path
from embedlab import files

home, kind, there = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "there"
target = home / "a.b"
if kind == "renamed folder":
    files.exchange = lambda one, other: False

def put(text):
    if kind == "file":
        return files.write_whole(target, text)
    with files.whole_folder(target) as new:
        (new / "1").write_text(text)
        (new / "inner").mkdir()
        (new / "inner" / "2").write_text(text)

def content():
    if kind == "file":
        return target.read_text() if target.exists() else None
    return "/".join(p.read_text() for p in sorted(target.rglob("*")) if p.is_file()) if target.exists() else None

def killed_at(step):
    left = step
    def trace(frame, event, argument):
        nonlocal left
        left -= event == "line" and Path(frame.f_code.co_filename).name in ("files.py", "shutil.py")
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    child = os.fork()
    if child == 0:
        sys.settrace(trace)
        put("new")
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0

found, step = [], 0
while True:
    if there:
        put("old")
    elif target.exists():
        files.remove(target)
    if not killed_at(step):
        break
    at_once = content()
    with suppress(ZeroDivisionError), files.whole_file(home / "next"):
        1 / 0
    found.append([at_once, content(), [p.name for p in home.iterdir() if p != target]])
    step += 1
print(json.dumps(found))
"""


@pytest.mark.parametrize("there", ["there", "absent"])
@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [("file", "old", "new"), ("folder", "old/old", "new/new"), ("renamed folder", "old/old", "new/new")],
)
def test_whatever_kills_a_writer_leaves_the_old_or_the_new(
    tmp_path: Path, kind: str, old: str | None, new: str, there: str
) -> None:
    """A writer is killed at each of its lines: what a reader sees is whole, at once where the system can let two
    folders change places, and after the next write beside it where it cannot."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), kind, there]
    environment = {**os.environ, "PYTHONPATH": str(Path(embedlab.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    expected = {old if there == "there" else None, new}
    at_once = {content for content, _, _ in found}
    assert at_once == expected | ({None} if kind == "renamed folder" else set())
    assert {content for _, content, _ in found} == expected
    assert [left for _, _, left in found if left] == []


def test_a_folder_that_cannot_take_its_place_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "e", Path.rename
    target.mkdir()
    (target / "1").write_text("old")

    def broken(path: Path, to: Path) -> Path:
        if path.suffix == ".new":
            raise PermissionError(13, "no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", broken)
    monkeypatch.setattr(_paths, "exchange", lambda *_: False)
    with pytest.raises(PermissionError), _paths.whole_folder(target) as new:
        (new / "1").write_text("new")
    assert (target / "1").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_living_process_or_another_machine_writes_is_left_alone(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = _paths._HOST
    names = [f".e.{host}.{dead.pid}.00000000.new", f".e.{host}.{os.getpid()}.00000000.old",  # of an earlier process
             f".e.{host}.{os.getppid()}.00000000.new", f".e.elsewhere.{dead.pid}.00000000.new", ".e.new"]  # fmt: skip
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / f".e.{host}.{dead.pid}.00000001.new").symlink_to(tmp_path)
    with _paths.whole_folder(tmp_path / "other"):
        pass
    assert {p.name for p in tmp_path.iterdir()} == {"other", "e", *names[2:]}


CONTAINER = """
import pathlib, sys
from embedlab import files
kind, target = sys.argv[1], pathlib.Path(sys.argv[2])
files._HOST = "shared"
if len(sys.argv) > 3:  # another container of this machine: the same number, or one that is dead there
    files.lives = lambda process: False
    files.write_whole(target.with_name("beside"), "")
elif kind == "file":
    with files.whole_file(target) as new:
        new.write_text("whole")
        print(flush=True)
        input()
else:
    with files.whole_folder(target) as new:
        (new / "1").write_text("whole")
        print(flush=True)
        input()
"""


@pytest.mark.parametrize("there", ["there", "absent"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_another_container_writes_is_left_alone(tmp_path: Path, kind: str, there: str) -> None:
    """Containers that share a host name have numbers of processes of their own, often the same ones."""
    target = tmp_path / "a"
    inner = target if kind == "file" else target / "1"
    if there == "there":
        inner.parent.mkdir(exist_ok=True)
        inner.write_text("old")
    command = [sys.executable, "-c", CONTAINER, kind, str(target)]
    environment = {**os.environ, "PYTHONPATH": str(Path(embedlab.__file__).parents[1])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for dies in (False, True):
        writer = subprocess.Popen(command, env=environment, **pipes)
        writer.stdout.readline()
        subprocess.run([*command, "other"], env=environment, check=True)
        assert [p.name for p in tmp_path.glob(".a.*")], "it is still being written"
        if dies:
            writer.kill()
        writer.communicate("\n")
        assert (writer.returncode == 0) is not dies
        assert inner.read_text() == "whole"
    subprocess.run([*command, "other"], env=environment, check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "beside"], "what a dead one left is removed"


def test_folders_above_need_not_exist_and_are_not_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "scores.json")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(
        UserError, match=r"scores\.json: cannot be written \(.*file: Not a directory\) \(out\)"
    ):
        check_writable(tmp_path / "file" / "scores.json")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "ckpt=mini", "suite=lee", "out={file}/scores.json"],
        ["evaluate", "ckpt=mini", "suite=lee", "out={file}"],
        ["evaluate", "ckpt=mini", "suite=lee", "out=/proc/no/scores.json"],
        ["evaluate", "ckpt=mini", "suite=lee", "out={folder}.json"],
        ["export", "ckpt=mini", "to=hf", "out={file}/export"],
        ["export", "ckpt=mini", "to=hf", "out=/proc/export"],
        ["search", "index", "{file}", "{file}/index", "ckpt=mini"],
        ["search", "index", "{file}", "/proc/index", "ckpt=mini"],
    ],
    ids=" ".join,
)
def test_commands_look_at_their_output_first(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("embedlab.encoders.loading.read", lambda *_: pytest.fail("weights were loaded first"))
    (tmp_path / "file.txt").write_text("a cat\n")
    (tmp_path / "scores.json").mkdir()
    names = {"file": tmp_path / "file.txt", "folder": tmp_path / "scores"}
    assert command.main([argument.format(**names) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert any(told in line for told in ("cannot be written", "is a folder", "is a file"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.txt", "scores.json"]
    assert (tmp_path / "file.txt").read_text() == "a cat\n"


def torch_meets_it() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        # What torch 2.13 raises of a file object that takes no more.
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 768 vs 662")  # noqa: B904


def safetensors_meets_it() -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def the_system_meets_it() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")  # as `write` does, of no name


def numpy_meets_it() -> None:
    raise OSError("1000 requested and 3 written")


@pytest.mark.parametrize("meet", [torch_meets_it, safetensors_meets_it, numpy_meets_it, the_system_meets_it])
def test_a_full_disk_is_one_line_with_the_path_and_the_fix(meet: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "export").write_text("abc")
    with pytest.raises(OSError) as caught, writing(tmp_path / "export"):
        meet()
    line = (
        f"{tmp_path / 'export'}: no space left on device after 3 bytes. "
        "Fix: free space on this disk, or a path on another"
    )
    assert str(as_user_error(caught.value)) == line


@pytest.mark.parametrize(
    "error", [SafetensorError("a header too large"), RuntimeError("of a shape"), OSError(errno.EIO, "broken")]
)
def test_an_error_of_another_kind_stays_what_it_is(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, writing(tmp_path):
        raise error
    assert caught.value is error


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


FILES = {
    "x": b"x",
    "empty": b"",
    "text": b"no checkpoint at all",
    "cut": saved({"state_dict": {"w": torch.zeros(1000)}})[:1500],
    "objects": saved({"state_dict": Path}),
    "list": saved([1]),
    "foreign": saved({"state_dict": {}}),
}


def says_what_to_do(error: UserError) -> None:
    text = str(error)
    assert error.fix
    assert "\n" not in text
    assert not any(word in text for word in ("weights_only", "trust", "PyTorch 2.6", "miniz", "KeyError"))
    assert any(word in text for word in ("damaged", "never loaded", "no checkpoint", "weights alone"))


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    file.write_bytes(FILES[name])
    with pytest.raises(UserError, match=r"a\.ckpt") as loading:
        embedlab.load(file)
    says_what_to_do(loading.value)
    with pytest.raises(UserError, match=r"a\.ckpt") as resuming:
        find_checkpoint(str(file), tmp_path)
    says_what_to_do(resuming.value)


def test_the_command_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"x")
    assert command.main(["evaluate", f"ckpt={tmp_path / 'a.ckpt'}", "suite=sts"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "damaged" in error
    assert "weights_only" not in error


def test_no_checkpoint_of_a_folder_is_whole(tmp_path: Path) -> None:
    for name in ("last.ckpt", "previous.ckpt"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"none of last\.ckpt, previous\.ckpt can be read") as error:
        find_checkpoint("auto", tmp_path)
    assert error.value.fix


@pytest.mark.parametrize("name", ["model.safetensors", "pooling.safetensors"])
@pytest.mark.parametrize("left", [0, 4, 0.5, 0.999])
def test_weights_that_are_cut_short(name: str, left: float, tiny: Tiny, tmp_path: Path) -> None:
    build(tiny("bert"), "cls_mlp").save(tmp_path / "e")
    file = tmp_path / "e" / name
    content = file.read_bytes()
    file.write_bytes(content[: int(left if left >= 1 else left * len(content))])
    with pytest.raises(UserError) as error:
        embedlab.load(tmp_path / "e")
    says_what_to_do(error.value)


@pytest.mark.parametrize("name", ["x", "cut", "objects"])
def test_a_damaged_pickle_of_hugging_face(name: str, tiny: Tiny, tmp_path: Path) -> None:
    build(tiny("bert"), "mean").save(tmp_path / "e")
    (tmp_path / "e" / "model.safetensors").unlink()
    (tmp_path / "e" / "pytorch_model.bin").write_bytes(FILES[name])
    with pytest.raises(UserError) as error:
        embedlab.load(tmp_path / "e")
    says_what_to_do(error.value)


def test_other_errors_speak_for_themselves() -> None:
    assert corruption(RuntimeError("size mismatch for weight")) is None
    assert corruption(FileNotFoundError(2, "No such file")) is None


def test_of_several_writers_of_a_new_file_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: _paths.write_new(path, f"{i}" * 1000), range(8)))
    assert sum(made) == 1
    assert path.read_text() == f"{made.index(True)}" * 1000
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_new_file_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refused)
    assert _paths.write_new(tmp_path / "a", "first")
    assert not _paths.write_new(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        _paths.write_new(tmp_path / "b", "")
