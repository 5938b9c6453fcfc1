from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedlab.errors import UserError
from embedlab.run import stages
from embedlab.run.stages import Stage, merge, run_stages

MAIN: dict[str, Any] = {
    "method": {"name": "twin", "tower1": None, "tower2": None, "tau": 0.05},
    "backbone": {"source": "local", "name": "x", "path": "/somewhere"},
    "optimizer": {"lr": 1e-6, "clip": None},
    "trainer": {"max_steps": 7},
    "seed": 3,
    "ckpt_path": None,
    "stages": {
        "a": {"result": "method.tower1", "seed_offset": 100, "method": {"name": "single", "head": 1}},
        "b": {"result": "method.tower2", "seed_offset": 200, "optimizer": {"lr": 2e-5}},
    },
    "stages_dir": None,
}


class Recorder:
    """Stands for a training run: leaves what one leaves, or fails with a status."""

    def __init__(self, fail: str | None = None) -> None:
        self.ran: list[tuple[str, dict[str, Any]]] = []
        self.fail = fail

    def __call__(self, values: dict[str, Any], folder: Path) -> int:
        self.ran.append((folder.name, values))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(values), "utf-8")
        (folder / "last.ckpt").touch()
        if folder.name == self.fail:
            return 143
        (folder / "export").mkdir(exist_ok=True)
        (folder / "scores.json").write_text(json.dumps({"scores": {"lee/spearman": 50.0}}))
        return 0


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """These configurations are no whole runs; tests/methods/test_jtcse_run.py has the check."""
    monkeypatch.setattr(stages, "_check", lambda *args: None)
    monkeypatch.setattr(stages, "_release", lambda: None)  # a garbage collection costs a second


def test_each_stage_is_the_main_run_with_its_changes(tmp_path: Path) -> None:
    train = Recorder()
    status, main = run_stages(MAIN, tmp_path, train)
    assert status == 0
    (_, a), (_, b) = train.ran
    assert a["method"] == {"name": "single", "head": 1}, "another method replaces the section"
    assert a["optimizer"] == {"lr": 1e-6, "clip": None}
    assert b["optimizer"] == {"lr": 2e-5, "clip": None}, "the same section is merged"
    assert b["method"]["name"] == "twin"
    assert (a["seed"], b["seed"]) == (103, 203)
    assert a["trainer"] == {"max_steps": 7}
    assert "stages" not in a
    assert "stages" not in main
    assert main["method"]["tower1"] == str(tmp_path / "a" / "export")
    assert main["method"]["tower2"] == str(tmp_path / "b" / "export")
    assert main["seed"] == 3
    assert MAIN["method"]["tower1"] is None, "the given configuration is left as it is"


@pytest.mark.parametrize("value", ["abc", None, True, 1.5, [1], -1, 2**32])
@pytest.mark.parametrize("key", ["seed", "stages_dir"])
def test_what_the_stages_are_made_with_is_looked_at_first(key: str, value: Any, tmp_path: Path) -> None:
    """Stages are made before the main run's sections are read."""
    if key == "stages_dir" and (value is None or isinstance(value, str)):
        assert run_stages({**MAIN, key: value}, tmp_path, Recorder())[0] == 0
        return
    with pytest.raises(UserError, match=rf"\({key}=") as caught:
        run_stages({**MAIN, key: value}, tmp_path, Recorder())
    assert caught.value.fix
    assert not list(tmp_path.iterdir())


def test_a_stage_whose_result_is_given_is_left_out(tmp_path: Path) -> None:
    train = Recorder()
    values = MAIN | {"method": MAIN["method"] | {"tower1": "/my/tower"}}
    _, main = run_stages(values, tmp_path, train)
    assert [name for name, _ in train.ran] == ["b"]
    assert main["method"]["tower1"] == "/my/tower"


@pytest.mark.parametrize("given", [(), ("a",), ("b",), ("a", "b")])
def test_every_stage_that_is_left_out_is_told_with_the_value_in_its_place(
    given: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {name: MAIN["stages"][name]["result"] for name in MAIN["stages"]}
    method = MAIN["method"] | {keys[name].split(".")[1]: f"/my/{name}" for name in given}
    with caplog.at_level("INFO"):
        run_stages(MAIN | {"method": method}, tmp_path, Recorder())
    told = [line for line in caplog.messages if "left out" in line]
    assert told == [f"Stage {name} is left out: {keys[name]}=/my/{name} is given." for name in given]


def test_finished_stages_are_skipped_and_the_interrupted_one_is_resumed(tmp_path: Path) -> None:
    train = Recorder(fail="b")
    status, _ = run_stages(MAIN, tmp_path, train)
    assert status == 143
    again = Recorder()
    status, main = run_stages(MAIN | {"ckpt_path": "last"}, tmp_path, again)
    assert status == 0
    assert [(name, v["ckpt_path"]) for name, v in again.ran] == [("b", "last")]
    assert main["ckpt_path"] is None, "the main run had not begun"
    (tmp_path / "last.ckpt").touch()
    _, main = run_stages(MAIN | {"ckpt_path": "last"}, tmp_path, third := Recorder())
    assert third.ran == []
    assert main["ckpt_path"] == "last"


def test_an_interrupted_stage_goes_on_by_itself_unless_it_was_another(tmp_path: Path) -> None:
    run_stages(MAIN, tmp_path, Recorder(fail="a"))
    run_stages(MAIN, tmp_path, again := Recorder(fail="a"))
    assert again.ran[0][1]["ckpt_path"] == "last"
    run_stages(MAIN | {"trainer": {"max_steps": 8}}, tmp_path, changed := Recorder())
    assert changed.ran[0][1]["ckpt_path"] is None


def test_resume_without_anything_to_resume_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        run_stages(MAIN | {"ckpt_path": "last"}, tmp_path, Recorder())


def test_a_stage_finished_with_another_configuration_is_not_taken(tmp_path: Path) -> None:
    run_stages(MAIN, tmp_path, Recorder())
    changed = MAIN | {"trainer": {"max_steps": 8}}
    with pytest.raises(UserError, match=r"trainer\.max_steps was 7") as caught:
        run_stages(changed, tmp_path, Recorder())
    assert str(tmp_path / "a") in str(caught.value)
    # Other keys, such as the arm of a sweep, are no business of a stage.
    run_stages(MAIN | {"logger": {"csv": True}, "arm": "h"}, tmp_path, train := Recorder())
    assert train.ran == []


def test_a_stage_of_before_a_key_existed_is_taken(tmp_path: Path) -> None:
    run_stages(MAIN, tmp_path, Recorder(fail="b"))
    run_stages(MAIN | {"unpad": "auto"}, tmp_path, train := Recorder())
    assert [(name, v["ckpt_path"]) for name, v in train.ran] == [("b", "last")]
    with pytest.raises(UserError, match="unpad was"):
        run_stages(MAIN | {"unpad": False}, tmp_path, Recorder())
    within = {"trainer": {**MAIN["trainer"], "later": False}}
    run_stages(MAIN | within, tmp_path, train := Recorder())
    assert train.ran == []
    with pytest.raises(UserError, match=r"trainer\.later was"):
        run_stages(MAIN | {"trainer": {**MAIN["trainer"], "later": True}}, tmp_path, Recorder())


def test_a_result_may_go_to_a_later_stage(tmp_path: Path) -> None:
    chain = {
        "first": {"result": "stages.second.backbone.path", "backbone": {"source": "fresh", "path": None}},
        "second": {"result": "method.tower1", "backbone": {"path": None}},
    }
    train = Recorder()
    run_stages(MAIN | {"stages": chain}, tmp_path, train)
    (_, first), (_, second) = train.ran
    assert first["backbone"] == {"source": "fresh", "path": None}
    assert second["backbone"] == {"source": "local", "name": "x", "path": str(tmp_path / "first" / "export")}


def test_what_only_a_left_out_stage_needs_is_left_out(tmp_path: Path) -> None:
    chain = {
        "first": {"result": "stages.second.backbone.path", "backbone": {"source": "fresh", "path": None}},
        "second": {"result": "method.tower1", "backbone": {"path": None}},
        "third": {"result": "method.tower2"},
    }
    given = {"stages": chain, "method": MAIN["method"] | {"tower1": "/mine"}}
    train = Recorder()
    run_stages(MAIN | given, tmp_path, train)
    assert [name for name, _ in train.ran] == ["third"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"result": "method.tower3"}, r"stages\.a\.result=method\.tower3"),
        ({"result": None}, r"stages\.a\.result"),
        ({"seed_offset": -1}, r"stages\.a\.seed_offset=-1"),
        ({"seed_offset": True}, r"stages\.a\.seed_offset=True"),
        ({"optimiser": {}}, r"stages\.a\.optimiser"),
    ],
)
def test_a_stage_that_makes_no_sense_is_named(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    stage = MAIN["stages"]["a"] | change
    with pytest.raises(UserError, match=key):
        run_stages(MAIN | {"stages": {"a": stage}}, tmp_path, Recorder())


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\0", 5])
def test_the_name_of_a_stage_stays_in_the_run(tmp_path: Path, name: Any) -> None:
    if name != 5:
        with pytest.raises(UserError, match=r"name of letters"):
            run_stages(MAIN | {"stages": {name: MAIN["stages"]["a"]}}, tmp_path, Recorder())
    else:
        assert Stage.read(name, MAIN["stages"]["a"]).result


def test_stages_refuse_to_run_in_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match="without torchrun"):
        run_stages(MAIN, tmp_path, Recorder())


def test_merge() -> None:
    base = {"name": "a", "x": {"y": 1, "z": 2}}
    assert merge(base, {"x": {"y": 3}}, ("name",)) == {"name": "a", "x": {"y": 3, "z": 2}}
    assert merge(base, {"name": "a", "x": 1}, ("name",)) == {"name": "a", "x": 1}
    assert merge(base, {"name": "b"}, ("name",)) == {"name": "b"}
    assert merge(None, {"x": 1}) == {"x": 1}


def _train_slowly(values: dict[str, Any], folder: Path) -> int:
    import time

    with (folder.parent / "log").open("a") as log:
        log.write("begin\n")
        log.flush()
        time.sleep(0.3)
        log.write("end\n")
    return Recorder()(values, folder)


def _trial(home: str, number: int) -> None:
    stages._check = lambda *args: None  # type: ignore[assignment]
    run_stages(MAIN | {"stages_dir": "../shared"}, Path(home) / str(number), _train_slowly)


def test_trials_that_share_stages_train_them_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    trials = [fork.Process(target=_trial, args=(str(tmp_path), i)) for i in range(2)]
    for trial in trials:
        trial.start()
    for trial in trials:
        trial.join()
        assert trial.exitcode == 0
    # One at a time, stages a and b once each.
    assert (tmp_path / "shared" / "log").read_text() == "begin\nend\n" * 2


def test_summary_has_a_row_for_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_stages(MAIN, tmp_path, Recorder())
    stages.summary(tmp_path, MAIN)
    assert capsys.readouterr().out == "", "nothing before the main run is done"
    (tmp_path / "a" / "scores_before.json").write_text(json.dumps({"scores": {"lee/spearman": 41.0}}))
    (tmp_path / "scores.json").write_text(json.dumps({"scores": {"lee/spearman": 59.0}}))
    stages.summary(tmp_path, MAIN)
    out = capsys.readouterr().out
    for row in ("before", "a", "b", "result"):
        assert f"\n{row} " in out
    for value in ("41.00", "50.00", "59.00"):
        assert value in out


def test_stage_reads_its_own_keys_only() -> None:
    stage = Stage.read("a", {"result": "x.y", "data": {"limit": 5}})
    assert stage == Stage("a", "x.y", 0, {"data": {"limit": 5}})
