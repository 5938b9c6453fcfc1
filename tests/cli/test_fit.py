"""`embedlab fit` from a file is `embedlab train` from a composition: same losses, same weights."""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer

import embedlab
from embedlab.cli import main as command
from embedlab.cli.fit import _as_written, _parser, main
from embedlab.cli.run_file import _RECORDS, as_file, folder_of, from_file, trainer_defaults
from embedlab.console import say_once
from embedlab.errors import UserError
from embedlab.run.run import train
from tests.tiny_run import compose_run, sts_dir, text_file  # noqa: F401

MORE = (
    "trainer.max_steps=5",
    "optimizer.betas=[0.8,0.99]",
    "trainer.max_epochs=2",
    "optimizer.warmup_steps=1",
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]


def losses(folder: Path) -> list[tuple[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [(r["step"], r["train/loss"]) for r in csv.DictReader(file) if r["train/loss"]]


@pytest.fixture
def run_file(compose_run: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:  # noqa: F811
    def make(*overrides: str, **change: Any) -> Path:
        content = as_file(compose_run(*MORE, *overrides).plain, None)
        content["trainer"] |= change
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return make


def fit(*arguments: str, subcommand: str = "fit") -> int:
    return command.main([subcommand, *arguments])


def test_both_commands_give_the_same_run(compose_run, run_file, tmp_path):  # type: ignore[no-untyped-def]  # noqa: F811
    train(compose_run(*MORE), tmp_path / "train")
    assert fit("--config", str(run_file()), f"--trainer.default_root_dir={tmp_path / 'fit'}") == 0
    one, other = weights(tmp_path / "train"), weights(tmp_path / "fit")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert losses(tmp_path / "train") == losses(tmp_path / "fit")
    assert len(losses(tmp_path / "fit")) == 5


def test_the_command_line_has_the_last_word(run_file, tmp_path):  # type: ignore[no-untyped-def]
    folder = tmp_path / "fit"
    extra = ["--model.optimizer.lr=2e-3", "--model.method.tau=0.1", "--trainer.max_steps=1"]
    assert fit("--config", str(run_file()), f"--trainer.default_root_dir={folder}", *extra) == 0
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["optimizer"]["lr"], config["method"]["tau"]) == (2e-3, 0.1)
    assert config["method"]["mlp"] == "train"
    assert len(losses(folder)) == 1


def test_cli_config_prints_the_file(tiny, text_file, tmp_path, capsys, monkeypatch):  # type: ignore[no-untyped-def]  # noqa: F811
    """`--cli-config` is taken off the line before Hydra reads it, and trains nothing."""
    monkeypatch.setattr(sys, "argv", ["embedlab"])
    arguments = ["backbone=local", f"backbone.path={tiny('bert')}", f"data.files={text_file}", "trainer=cpu"]
    assert (
        command.main(["train", *arguments, "--cli-config", "seed=7", f"hydra.run.dir={tmp_path / 'x'}"]) == 0
    )
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["seed_everything"] == 7
    assert content["trainer"]["default_root_dir"] == str(tmp_path / "x")
    assert content["model"]["backbone"]["path"] == str(tiny("bert"))
    assert not (tmp_path / "x").exists()


def test_values_survive_the_file_and_back(compose_run):  # type: ignore[no-untyped-def]  # noqa: F811
    plain = compose_run("trainer.precision=auto", "template=eol", "pooling=last", model_type="llama").plain
    values, extra = from_file(as_file(plain, None))
    assert extra == {}
    assert values == {**plain, "template": plain["template"]}


def test_lightning_callbacks_and_limits_pass_through(run_file, tmp_path):  # type: ignore[no-untyped-def]
    timer = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:01:00:00"}}
    path = run_file(callbacks=[timer], limit_train_batches=2, max_steps=-1, max_epochs=1)
    folder = tmp_path / "fit"
    assert fit("--config", str(path), f"--trainer.default_root_dir={folder}") == 0
    state = torch.load(folder / "last.ckpt", weights_only=True)
    assert state["global_step"] == 2
    assert "Timer" in state["callbacks"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model.optimizer.lrr=3"], "lrr"),
        (["--trainer.accumulate_grad_batches=2"], "set model.optimizer.accumulate"),
        (["--trainer.max_steps=many"], "max_steps"),
        (["--model.optimizer.lr=-1"], "optimizer.lr=-1"),
        (["--model.method.tau=0"], "method.tau=0"),
        (["--trainer.num_nodes=2"], "docs/clusters.md"),
        (["--ckpt_path=last"], "trainer.default_root_dir"),
        (["--data.limit=many"], "not a whole number (data.limit=many). Fix: a whole number, or null"),
        (["--trainer.max_step=3"], "did you mean trainer.max_steps"),
        (["--max_steps=3"], "did you mean trainer.max_steps"),
        (["--data.lim=3"], "did you mean data.limit"),
        (["--optimizer.lr=3"], "no such key (--optimizer.lr). Fix: did you mean model.optimizer.lr"),
        (["--evaluation.final+=sts"], "nothing can be added to this key (--evaluation.final+)"),
        (
            ["--data.mix.a.files=x"],
            'given as a whole (data.mix.a.files=x). Fix: --data.mix.a="{files: x, …}"',
        ),
        (["--config", "trainer: [1]"], "a group of keys is meant here"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, part, run_file, capsys):  # type: ignore[no-untyped-def]
    assert fit("--config", str(run_file()), *arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()
    assert len([x for x in line if x.startswith("embedlab: ")]) == 1
    assert part in line[-1]


def test_help_names_the_command(capsys, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "argv", ["/usr/lib/embedlab/__main__.py", "fit", "--help"])
    with pytest.raises(SystemExit) as left:
        command.main(["fit", "--help"])
    assert not left.value.code
    assert capsys.readouterr().out.startswith("usage: embedlab ")


def test_a_missing_file_is_one_line(capsys, tmp_path):  # type: ignore[no-untyped-def]
    assert fit("--config", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml" in capsys.readouterr().err.strip().splitlines()[-1]


def test_validate_test_and_predict_read_the_checkpoint(compose_run, run_file, sts_dir, tmp_path):  # type: ignore[no-untyped-def]  # noqa: F811
    more = (
        f"evaluation.sts_dir={sts_dir}",
        "evaluation.every=5",
        "evaluation.select=last",
        "data.max_length=64",
    )
    folder = tmp_path / "fit"
    common = ("--config", str(run_file(*more)), f"--trainer.default_root_dir={folder}")
    assert fit(*common) == 0
    trained = json.loads((folder / "scores.json").read_text())["scores"]
    assert fit(*common, "--ckpt_path=last", subcommand="validate") == 0
    scores = json.loads((folder / "validate.json").read_text())["scores"]
    assert scores["dev/spearman"] == pytest.approx(trained["dev/spearman"], abs=1e-3)
    assert fit(*common, subcommand="validate") == 0
    assert json.loads((folder / "validate.json").read_text())["scores"] != scores  # before training
    assert fit(*common, "--ckpt_path=last", subcommand="test") == 0
    tested = json.loads((folder / "test.json").read_text())["scores"]
    assert tested["dev/spearman"] == pytest.approx(trained["dev/spearman"], abs=1e-4)
    assert fit(*common, "--ckpt_path=last", subcommand="predict") == 0
    vectors = np.load(folder / "vectors.npy")
    texts = Path(compose_run().data.files).read_text().splitlines()  # type: ignore[arg-type]
    np.testing.assert_allclose(vectors, embedlab.load(folder / "export").encode(texts), atol=1e-5)


def test_validate_without_a_dev_set_says_what_it_needs(run_file, tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"evaluation\.sts_dir"):
        main("validate", ["--config", str(run_file()), f"--trainer.default_root_dir={tmp_path}"])


def test_tries_of_one_slurm_job_share_a_folder(monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    values = {"method": {"name": "simcse"}, "ckpt_path": "auto"}
    assert folder_of({}, values) == Path("runs/slurm-71-simcse")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert folder_of({}, values) == Path("runs/slurm-70-3-simcse")


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_the_first_look_knows_what_lightning_does(subcommand: str, run_file: Any, monkeypatch: Any) -> None:
    """A key that only one of the two parsers knew would be refused wrongly, or late."""
    from embedlab.cli.lightning_cli import EmbedlabCLI

    monkeypatch.setattr(EmbedlabCLI, "instantiate_classes", lambda self: None)
    of_lightning = EmbedlabCLI(subcommand, ["--config", str(run_file())])._parser(subcommand)
    assert _parser(subcommand).get_defaults() == of_lightning.get_defaults()


def test_the_trainers_defaults_are_lightnings() -> None:
    parameters = inspect.signature(Trainer.__init__).parameters.values()
    assert trainer_defaults() == {p.name: p.default for p in parameters if p.name != "self"}


def test_what_names_a_class_of_lightnings_is_left_to_it(run_file, tmp_path):  # type: ignore[no-untyped-def]
    more = ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:01:00:00", "--trainer.max_steps=1"]
    assert fit("--config", str(run_file()), f"--trainer.default_root_dir={tmp_path / 'fit'}", *more) == 0
    assert "Timer" in torch.load(tmp_path / "fit" / "last.ckpt", weights_only=True)["callbacks"]


def _looks(subcommand: str, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values and the folder that the first look and Lightning read."""
    import embedlab.cli.fit as quick
    from embedlab.cli.lightning_cli import EmbedlabCLI

    parsed = quick._parser(subcommand).parse_args(quick._named(arguments)).as_dict()
    values, _ = from_file(parsed)
    read: list[Any] = []

    def begin(self: Any, values: dict[str, Any], folder: Path, extra: dict[str, Any]) -> int:
        read.append(values | {"folder": folder})
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbedlabCLI, "_begin", begin)
        EmbedlabCLI(subcommand, arguments)
    return values | {"folder": folder_of(parsed["trainer"] or {}, values)}, read[0]


@pytest.mark.parametrize(
    "more",
    [
        ["--config", "trainer: {max_steps: 7}"],
        ["--config", "trainer.max_steps: 7"],
        ["--trainer.log_every_n_steps=3", "--config", "trainer: {max_steps: 7}"],
        ["--config", "trainer: part.yaml"],
        ["--config", "ckpt_path: x.yaml"],
        ["--trainer", "part.yaml"],
        ["--data=data.yaml"],
        ["--model.optimizer", "optimizer.yaml"],
        ["--trainer.default_root_dir=2024"],
        ["--trainer.default_root_dir=1e3"],
        ["--trainer.max_time.minutes=1"],
        ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:01:00:00"],
        ["--config", "trainer: {callbacks+: [Timer]}"],
        ["--config", "dates.yaml"],
        ["--config", "whole numbers.yaml"],
    ],
    ids=" ".join,
)
def test_the_first_look_reads_what_lightning_reads(more, run_file, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    Path("part.yaml").write_text("max_steps: 7\ndefault_root_dir: other\n")
    Path("data.yaml").write_text("limit: 5\n")
    Path("optimizer.yaml").write_text("lr: 3e-4\n")
    Path("dates.yaml").write_text("model:\n  backbone:\n    revision: 2024-05-01\n")
    scheduler = "{class_path: GradientAccumulationScheduler, init_args: {scheduling: {4: 2}}}"
    Path("whole numbers.yaml").write_text(f"trainer:\n  callbacks: [{scheduler}]\n")
    run_file(default_root_dir=str(tmp_path / "fit"), max_steps=3)
    first, whole = _looks("fit", "--config", "run.yaml", *more)
    assert first == whole


@pytest.mark.parametrize("name", ["fifo", "-"])
def test_a_file_that_can_be_read_once_is_read_once(name, run_file, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """As in `embedlab fit --config <(embedlab train … --cli-config)`."""
    text = run_file(max_steps=1).read_text() + "#" * 5000  # longer than a path may be
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    else:
        name = str(tmp_path / name)
        os.mkfifo(name)
        threading.Thread(target=Path(name).write_text, args=[text], daemon=True).start()
    assert fit("--config", name, f"--trainer.default_root_dir={tmp_path / 'fit'}") == 0
    assert len(losses(tmp_path / "fit")) == 1


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.txt", "run.json", "run", "fifo", "-"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_that_is_not_utf_8_is_named(name, encoding, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    content = "seed_everything: 1\nckpt_path: caf\xe9\n".encode(encoding)
    path = tmp_path / name
    if name == "-":
        # As Python has standard input where the locale is C.
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8", "surrogateescape"))
    elif name == "fifo":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=[content], daemon=True).start()
    else:
        path.write_bytes(content)
    given = name if name == "-" else str(path)
    with pytest.raises(UserError) as refused:
        main("fit", ["--config", given])
    row = 2 if encoding == "latin-1" else 1
    assert str(refused.value).startswith(f"{given}:{row}: is not UTF-8. Fix: a file that embedlab train")


def test_text_in_a_pipe_is_refused_by_that_name(run_file, tmp_path, capsys):  # type: ignore[no-untyped-def]
    os.mkfifo(tmp_path / "text.txt")
    assert fit("--config", str(run_file()), f"--data.files={tmp_path / 'text.txt'}") == 2
    assert "this is a pipe (data.files=" in capsys.readouterr().err
    assert fit("--config", str(run_file()), f"--data.files={os.devnull}") == 2
    assert "this is a device (data.files=" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, in which nobody makes a folder")
def test_a_folder_that_cannot_be_made_is_refused(run_file, capsys):  # type: ignore[no-untyped-def]
    assert fit("--config", str(run_file()), "--trainer.default_root_dir=/proc/x/run") == 2
    assert "/proc/x/run: cannot be written (/proc: " in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "says"), [
    (["run.yaml"], "run.yaml is an argument without a flag. Fix: --config run.yaml"),
    (["--config", "run.yaml", "trainer.max_steps=4"], "without a flag. Fix: --trainer.max_steps=4"),
    (["--config", "words.txt"], "has no keys with values (config). Fix: a file that embedlab train"),
    (["--config", "listed.txt"], "has no keys with values (config). Fix: a file that embedlab train"),
    (["--config", "."], "this is a folder (config=.). Fix: a file that embedlab train"),
    (["--config", "run.yaml", "--ckpt_path=last", "--trainer.default_root_dir=here"],
     "Fix: --ckpt_path=auto to begin, or --trainer.default_root_dir=FOLDER of the run (now here)"),
])  # fmt: skip
def test_a_slip_of_the_pen_is_answered(arguments, says, run_file, tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    run_file()
    (tmp_path / "words.txt").write_text("a cat\na dog: two: three\n")
    (tmp_path / "listed.txt").write_text("a cat\na dog\n")
    monkeypatch.chdir(tmp_path)
    assert fit(*arguments) == 2
    assert says in capsys.readouterr().err


def test_what_is_said_of_an_interrupted_run_is_in_its_own_flags(capsys):  # type: ignore[no-untyped-def]
    with _as_written("fit"):
        say_once("embedlab: interrupted; go on with ckpt_path=last hydra.run.dir=/a/run")
    say_once("ckpt_path=last")
    flags = "--ckpt_path=last --trainer.default_root_dir=/a/run"
    assert capsys.readouterr().err == f"embedlab: interrupted; go on with {flags}\nckpt_path=last\n"


RUN_OF_LISTS = """
model: {backbone: {source: shipped, name: mini}, method: {name: simcse}, pooling: {name: cls}}
data: {name: wikipedia, files: in.txt}
"""
LISTS = [
    f"{name}.{field.name}"
    for name, record in _RECORDS.items()
    for field in fields(record)
    if list[str] in get_args(get_type_hints(record)[field.name])
]


@pytest.mark.parametrize("key", LISTS)
def test_many_items_of_a_list_are_read_as_fast_as_few(key: str, tmp_path: Path) -> None:
    """jsonargparse copies a list for each of its items: 100 s for 20,000 files."""
    values = yaml.safe_load(RUN_OF_LISTS)
    section, _, name = key.partition(".")
    values[section][name] = [f"texts/{i}.txt" for i in range(8000)]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    start = time.process_time()
    found = _parser("fit").parse_args(["--config", str(tmp_path / "run.yaml")])
    assert time.process_time() - start < 6
    assert found.as_dict()[section][name] == values[section][name]


@pytest.mark.parametrize("key", LISTS)
@pytest.mark.parametrize(("given", "read"), [
    (["=[a, b]"], ["a", "b"]), (["=[a]", "+=b"], ["a", "b"]), (["=[a]", "+=[b, c]"], ["a", "b", "c"]),
    (["=null"], None), (["+=a"], ["a"]),
])  # fmt: skip
def test_a_list_is_read_as_it_is_spelled(key: str, given: list[str], read: object, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN_OF_LISTS)
    arguments = ["--config", str(tmp_path / "run.yaml"), *(f"--{key}{part}" for part in given)]
    section, _, name = key.partition(".")
    found = _parser("fit").parse_args(arguments).as_dict()[section][name]
    assert found == (["in.txt", "a"] if given == ["+=a"] and name == "files" else read)
