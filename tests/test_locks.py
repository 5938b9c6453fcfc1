"""One process at a time, and folders in which nothing but a command's own work is ever touched."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from embedlab.errors import UserError
from embedlab.locks import WorkFolder, locked, sole_writer


def test_a_second_holder_of_a_lock_is_told_or_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, order = tmp_path / "new" / ".lock", []

    def second() -> None:
        with locked(path, doing="trains here") as held:
            order.append(("second", held))

    with caplog.at_level("INFO"), locked(path) as held:
        thread = threading.Thread(target=second)
        thread.start()
        while "another process trains here; waiting for it" not in caplog.text:
            time.sleep(0.01)
        with locked(path, wait=False) as other:
            order.append(("first", held and not other))
    thread.join()
    assert order == [("first", True), ("second", True)]


def test_a_second_writer_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with sole_writer(out, "out"):
        with (
            pytest.raises(UserError, match=r"out: another process writes it \(out\)"),
            sole_writer(out, "out"),
        ):
            pytest.fail("two at once")
        with sole_writer(out.with_name("other"), "out"):
            pass
    with sole_writer(out, "out"):
        pass
    assert list(out.parent.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), sole_writer(tmp_path / "a" / "b" / "c", "out"):
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_another_programs_lock_stays(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").write_text("1234")
    with sole_writer(tmp_path / "out", "out"):
        pass
    assert (tmp_path / ".out.lock").read_text() == "1234"


# the folder of a command's work


def work(folder: Path) -> WorkFolder:
    return WorkFolder(folder, "mark.json", r"part-\d", kept="part-*")


def begun(folder: Path) -> None:
    folder.mkdir()
    (folder / "lock").touch()
    for name in ("mark.json", "part-1"):
        (folder / name).write_text(name)
    (folder / "part-2").mkdir()
    (folder / ".part-3.elsewhere.7.00000000.new").write_text("half")


def seen(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("there", ["absent", "empty", "begun"])
@pytest.mark.parametrize("stays", [False, True])
def test_work_is_gone_at_the_end_or_stays(there: str, stays: bool, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    if there == "begun":
        begun(folder)
        (folder / "lock").unlink()
    elif there == "empty":
        folder.mkdir()
    with work(folder).held(tmp_path / "out", "output", stays):
        before = [name for name in seen(folder) if name != "lock"]
        with pytest.raises(UserError, match="another process writes it"), work(folder).held(folder, "work"):
            pytest.fail("two at once")
    assert seen(tmp_path) == (["work", *(f"work/{name}" for name in before)] if stays else [])


@pytest.mark.parametrize("there", ["absent", "empty", "marked", "begun"])
def test_work_that_fails_leaves_what_is_worth_going_on_with(there: str, tmp_path: Path) -> None:
    if there == "begun":
        begun(tmp_path / "work")
        (tmp_path / "work" / "lock").unlink()
    elif there != "absent":
        (tmp_path / "work").mkdir()
    if there == "marked":
        (tmp_path / "work" / "mark.json").write_text("{}")
    before = [] if there == "empty" else seen(tmp_path)
    with pytest.raises(KeyboardInterrupt), work(tmp_path / "work").held(tmp_path / "out", "output"):
        raise KeyboardInterrupt
    assert seen(tmp_path) == before


FOREIGN = {
    "thesis.txt": ["thesis.txt"],
    "a folder": ["notes/today.txt"],
    "beside the work": ["mark.json", "part-1", "part-1.bak"],
    "by names alone": ["part-1"],
    "hidden": ["mark.json", ".git"],
    "of the lock's name too": ["lock", "thesis.txt"],
    "another lock": ["lock"],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_a_command_did_not_make_is_refused_and_kept(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    for each in FOREIGN[name]:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).write_text("years of work")
    before = seen(tmp_path)
    with (
        pytest.raises(
            UserError, match=r"work: holds other things than the work of this command, such as .*\(k\)"
        ),
        work(folder).held(tmp_path / "out", "k"),
    ):
        pytest.fail("it was taken")
    assert seen(tmp_path) == before


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_meanwhile_is_kept(fails: bool, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    try:
        with work(folder).held(tmp_path / "out", "output"):
            (folder / "mark.json").write_text("{}")
            (folder / "thesis.txt").write_text("years of work")
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert seen(folder) == ["thesis.txt"]


def test_the_mark_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kills the removal leaves a folder that is known again."""
    begun(tmp_path / "work")
    order: list[str] = []
    monkeypatch.setattr("embedlab.locks.remove", lambda path: order.append(path.name))
    work(tmp_path / "work").clear()
    assert order[-1] == "mark.json"
    assert set(order) == set(os.listdir(tmp_path / "work"))
