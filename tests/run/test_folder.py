"""A folder that holds a run is not begun anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from embedlab.cli import hydra_main
from embedlab.cli import main as command
from embedlab.cli import train as train_command
from embedlab.cli.run_file import as_file
from embedlab.errors import UserError
from embedlab.run import sweep as launcher
from embedlab.run.run import train
from embedlab.run.run_folder import AFTER, LAST, PREVIOUS, check_free, check_own
from embedlab.run.sweep import Trial, run_trials


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("there", "ckpt_path", "free"),
    [
        ([], None, True),
        (["config.yaml", "metrics.csv"], None, True),  # stopped before its first checkpoint
        ([AFTER], None, False),
        ([LAST], None, False),
        ([PREVIOUS], None, False),
        ([AFTER, LAST], "auto", True),
        ([AFTER], "auto", False),
        ([AFTER, LAST], "last", True),
        ([AFTER], "last", True),  # to find that there is none is another's
        ([AFTER, LAST], "HERE/kept.ckpt", True),
        ([AFTER, LAST], "HERE/../other/last.ckpt", False),
    ],
)
def test_what_may_begin(there: list[str], ckpt_path: str | None, free: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in there:
        (folder / name).touch()
    given = ckpt_path and ckpt_path.replace("HERE", str(folder))
    if given and "/" in given:
        Path(given).parent.resolve().mkdir(exist_ok=True)
        Path(given).resolve().touch()
    if free:
        check_free(folder, given, "hydra.run.dir")
        return
    with pytest.raises(UserError, match="holds a run already") as error:
        check_free(folder, given, "hydra.run.dir")
    assert str(folder) in str(error.value)
    assert "another hydra.run.dir" in str(error.value)
    assert ("ckpt_path=last" in str(error.value)) == any(name != AFTER for name in there)


RUNS = "backbone: {}\nmethod: {}\ndata: {}\n"


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ({"notes.txt": "x", "slurm-7.out": "x"}, None),
        ({"config.yaml": RUNS, "metrics.csv": "x"}, None),  # stopped before its first checkpoint
        ({".hydra/config.yaml": RUNS, "notes.txt": "x"}, None),
        ({LAST: "x", "export/embedlab.json": "x"}, None),
        ({"config.yaml": "name: mine\n"}, "config.yaml, which"),
        ({"config.yaml": "{", "metrics.csv": "x"}, "config.yaml, metrics.csv, which"),
        ({".hydra/config.yaml": "lr: 1\n"}, ".hydra/config.yaml, which"),
        ({"export/embedlab.json": "x", "best/x": ""}, "best, export, which"),
    ],
)
def test_what_is_no_runs_is_not_replaced(there: dict[str, str], named: str | None, tmp_path: Path) -> None:
    for name, content in there.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    if named is None:
        check_own(tmp_path, "hydra.run.dir")
        return
    with pytest.raises(UserError, match=f"holds no run, but {named} one would replace"):
        check_own(tmp_path, "hydra.run.dir")


def test_train_leaves_a_folder_of_something_else_as_it_is(compose_run, text_file, tiny, tmp_path, capsys):  # type: ignore[no-untyped-def]
    folder = tmp_path / "mine"
    (folder / ".hydra").mkdir(parents=True)
    for name in ("config.yaml", ".hydra/config.yaml", "train.log", "notes.txt", ".lock"):
        (folder / name).write_text("mine\n")
    arguments = ["train", "backbone=local", f"backbone.path={tiny('bert')}", f"data.files={text_file}",
                 "trainer=cpu", "trainer.max_steps=1"]  # fmt: skip
    before = contents(folder)
    capsys.readouterr()
    assert command.main([*arguments, f"hydra.run.dir={folder}"]) == 2
    line = capsys.readouterr().err
    assert (
        "mine: holds no run, but config.yaml, .hydra/config.yaml, which one would replace (hydra.run.dir). Fix: "
        in line
    )
    assert line.count("\n") == 1
    assert contents(folder) == before
    with pytest.raises(UserError, match="holds no run"):
        train(compose_run("trainer.max_steps=1"), folder)


@pytest.mark.parametrize(
    ("ckpt_path", "message"), [(3, "not a path"), ("nowhere.ckpt", "no such checkpoint")]
)
def test_what_names_no_checkpoint(ckpt_path: object, message: str, tmp_path: Path) -> None:
    (tmp_path / LAST).touch()
    with pytest.raises(UserError, match=message):
        check_free(tmp_path, ckpt_path, "hydra.run.dir")  # type: ignore[arg-type]


def test_train_is_refused_before_anything_is_written(compose_run, text_file, tiny, tmp_path, capsys):  # type: ignore[no-untyped-def]
    compose_run()  # for its cache
    folder = tmp_path / "run"
    arguments = ["train", "backbone=local", f"backbone.path={tiny('bert')}", f"data.files={text_file}",
                 "trainer=cpu", "data.batch_size=8", "callbacks.progress=none", "data.report=false",
                 "evaluation.final=[]", "evaluation.before=false", f"hydra.run.dir={folder}"]  # fmt: skip
    assert command.main([*arguments, "trainer.max_steps=2"]) == 0
    before = contents(folder)
    shutil.rmtree(tmp_path / "cache")
    capsys.readouterr()
    for overrides in ([], ["trainer.devices=2"], ["data.files=nowhere.txt"]):
        assert command.main([*arguments, "trainer.max_steps=4", *overrides]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "holds a run already (scores.json, last.ckpt)" in error
    assert contents(folder) == before, "Hydra's records too"
    assert not (tmp_path / "cache").exists()
    assert command.main([*arguments, "trainer.max_steps=4", "ckpt_path=auto"]) == 0
    assert contents(folder)[AFTER] != before[AFTER]


@pytest.mark.parametrize(
    ("mode", "key"), [([], "hydra.run.dir"), (["-m", "hydra/launcher=basic", "seed=3"], "hydra.sweep.dir")]
)
def test_train_looks_once_at_its_folder(mode, key, tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    looks, trained = [], []

    def look(folder: Path, ckpt_path: str | None, key: str) -> None:
        looks.append((folder.resolve(), key))
        check_free(folder, ckpt_path, key)

    for module in (hydra_main, train_command):
        monkeypatch.setattr(module, "check_free", look)
    monkeypatch.setattr(train_command, "train_one", lambda values, folder: trained.append(folder) or 0)
    folder = tmp_path / "0" if mode else tmp_path
    arguments = ["train", *mode, f"{key}={tmp_path}"]
    assert command.main(arguments) == 0
    assert looks == [(folder, key)]
    assert len(trained) == 1
    (folder / LAST).touch()
    assert command.main(arguments) == 2
    assert f"({LAST}), which a new one would replace ({key})" in capsys.readouterr().err
    assert len(trained) == 1


def test_fit_and_the_function_are_refused_too(compose_run, tmp_path, capsys):  # type: ignore[no-untyped-def]
    folder = tmp_path / "run"
    config = compose_run("trainer.max_steps=2")
    train(config, folder)
    before = contents(folder)
    with pytest.raises(UserError, match="holds a run already"):
        train(config, folder)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(as_file(config.plain, None)))
    assert command.main(["fit", "--config", str(file), f"--trainer.default_root_dir={folder}"]) == 2
    assert "another trainer.default_root_dir" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_method_that_trains_nothing(compose_run, tiny, tmp_path):  # type: ignore[no-untyped-def]
    both = [f"method.{key}={tiny('bert')}" for key in ("first", "second")]
    config = compose_run("method=ensemble", *both)
    train(config, tmp_path / "run")
    with pytest.raises(UserError, match="holds a run already"):
        train(config, tmp_path / "run")


def test_a_sweep_takes_its_own_trials_and_no_other_run(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(launcher, "RUNNER", ("tests.run.fake_trial",))
    monkeypatch.setattr(launcher, "_devices", list)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / LAST).touch()
    with pytest.raises(UserError, match=r"holds a run already .*hydra.sweep.dir"):
        run_trials([Trial(tmp_path / "0", {"do": "go"}, [])], tmp_path)
    assert [p.name for p in (tmp_path / "0").iterdir()] == [LAST]
    with pytest.raises(UserError, match="holds a run already"):
        run_trials([Trial(tmp_path / name, {"do": "go"}, []) for name in ("1", "0")], tmp_path)
    assert not (tmp_path / "1").exists(), "all are looked at before the first is written"
    (tmp_path / "0" / launcher.CONFIG).write_text("do: go\n")
    (tmp_path / "0" / AFTER).touch()
    assert run_trials([Trial(tmp_path / "0", {"do": "go"}, [])], tmp_path) == ["finished"]
    assert (tmp_path / "0" / "resumed").is_file()
