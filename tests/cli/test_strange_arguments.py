"""What a command line may hold that is no key of the command: texts with "=", flags of other tools, additions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlab.cli import compose as composing
from embedlab.cli import fit as fit_command
from embedlab.cli.compose import compose
from embedlab.cli.main import COMMANDS, main
from embedlab.errors import UserError
from embedlab.run.stages import has_stages

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
    lambda t: t[0] != "-"
)


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a refused command prints."""
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@settings(max_examples=25, deadline=None)
@given(start=st.sampled_from(["e=", "+x=", "~w=", "++zz.y=", "q@r="]), rest=TEXTS)
def test_a_text_that_looks_like_an_override_is_the_text(start: str, rest: str) -> None:
    found = compose("search_query", ["index", start + rest, "k=3"], positional=("index", "text"))
    assert (found["index"], found["text"], found["k"]) == ("index", start + rest, 3)


@pytest.mark.parametrize("place", [0, 1])
def test_a_file_that_looks_like_an_override_is_the_file(place: int) -> None:
    names = ["in.txt", "out.npy"]
    names[place] = f"zz={names[place]}"
    found = compose("encode", [*names, "ckpt=mini"], positional=("input", "output"))
    assert [found["input"], found["output"]] == names


@pytest.mark.parametrize("argument", ["devcie=cpu", "+devcie=cpu", "batchsize=3", "zz=1"])
def test_a_mistyped_key_stays_a_key(argument: str) -> None:
    texts = ["index", "words"] if argument == "zz=1" else ["index"]
    with pytest.raises(UserError, match=r"no such key|text is missing"):
        compose("search_query", [*texts, argument], positional=("index", "text"))


@pytest.mark.parametrize("argv", [
    ["encode", "in.txt", "out.npy", "ckpt=mini", "+promt=x"],
    ["export", "ckpt=mini", "to=onnx", "out=x", "+fromat=x"],
    ["search", "index", "in.txt", "index", "ckpt=mini", "+chunks=3"],
    ["search", "query", "index", "text", "+kk.a=3"],
    ["train", "+sead=3"],
    ["train", "+evalution.every=3"],
    ["train", "+anything=3"],
])  # fmt: skip
def test_an_addition_that_nothing_reads_is_refused(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert argv[-1].lstrip("+").partition("=")[0] in refusal(argv, capsys)
    assert not [*tmp_path.rglob("config.yaml")]


@pytest.mark.parametrize(("argv", "fix"), [
    (["train", "--max_steps", "3"], "trainer.max_steps=3"),
    (["train", "--max-steps=3"], "trainer.max_steps=3"),
    (["train", "--learning_rate=3"], "--help"),
    (["evaluate", "--ckpt=mini"], "ckpt=mini"),
    (["evaluate", "--suites", "sts"], "suite=sts"),
    (["encode", "a", "b", "--device", "cpu"], "device=cpu"),
])  # fmt: skip
def test_a_flag_of_another_tool_is_one_line_with_the_right_spelling(
    argv: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fix in refusal(argv, capsys).partition("Fix: ")[2]


@pytest.mark.parametrize("key", ["data", "method", "pooling"])
@pytest.mark.parametrize("value", ["nan", "inf", "null", "3", "true"])
def test_a_group_is_taken_out_by_its_name(key: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert key in refusal(["train", f"~{key}={value}"], capsys)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3, True, "text", ["a"]])
def test_stages_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match="stages"):
        has_stages({"stages": value})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_working_folder_that_is_gone_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, gone = os.getcwd(), tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert "no longer there" in refusal([command], capsys)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(("key", "fix", "flag", "spelled"), [
    ("trainer.accelerator", "trainer=cpu", "trainer.accelerator", "--trainer.accelerator=cpu"),
    ("optimizer.lr", "optimizer.lr=1e-5", "model.optimizer.lr", "--model.optimizer.lr=1e-5"),
    ("step", "step=compile, or step=auto", "model.step", "--model.step=compile, or --model.step=auto"),
    ("pooling", "pooling=mean", "model.pooling", "--model.pooling.name=mean"),
    ("evaluation.sts_dir", "evaluation.sts_dir=hub", "evaluation.sts_dir", "--evaluation.sts_dir=hub"),
    ("seed", "seed=3", "seed_everything", "--seed_everything=3"),
    (None, "more rows, or data.drop_last=false", None, "more rows, or --data.drop_last=false"),
    ("method.tauu", "did you mean method.tau?", "model.method.tauu", "did you mean model.method.tau?"),
])  # fmt: skip
def test_fit_names_keys_and_fixes_by_its_own_flags(
    key: str | None, fix: str, flag: str | None, spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("refused", key=key, fix=fix)

    monkeypatch.setattr(fit_command, "_check", refuse)
    with pytest.raises(UserError) as caught:
        fit_command.main("fit", ["--seed_everything=3"])
    assert (caught.value.key, caught.value.fix) == (flag, spelled)


def test_fit_without_a_file_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "embedlab fit --config FILE" in refusal(["fit"], capsys)


def text_keys() -> list[tuple[str, str]]:
    commands = ("encode", "evaluate", "export", "search_index", "search_query")
    return [
        (command, key)
        for command in commands
        for key in composing._defaults(command)
        if key in composing._TEXTS
    ]


@pytest.mark.parametrize("value", ["[a]", "[a,b]", "{a: b}"])
@pytest.mark.parametrize(("command", "key"), text_keys())
def test_a_name_is_one_text(command: str, key: str, value: str) -> None:
    places = {
        "encode": ("input", "output"),
        "search_index": ("input", "index"),
        "search_query": ("index", "text"),
    }
    needed = (*places.get(command, ()), "ckpt", *(("to", "out") if command == "export" else ()))
    given = [f"{name}=x" for name in needed if name != key]
    with pytest.raises(UserError, match=rf"^not text \({key}="):
        compose(command, [*given, f"{key}={value}"], positional=places.get(command, ()))


@pytest.mark.parametrize("arguments", [
    ["encode", "{text}", "{out}.npy", "ckpt=mini", "device=meta"],
    ["encode", "{text}", "{out}.npy", "ckpt=mini", "prompt=5"],
    ["search", "index", "{text}", "/", "ckpt=mini", "overwrite=true"],
    ["export", "ckpt=mini", "to=hf", "out=/", "overwrite=true"],
    ["evaluate", "ckpt=mini", "suite=sts", "tasks=5", "data_dir={folder}"],
    ["evaluate", "ckpt=mini", "suite=bitext", "languages=5", "data_dir={folder}"],
])  # fmt: skip
def test_what_no_command_can_do_is_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("a cat\n")
    names = {"text": tmp_path / "in.txt", "out": tmp_path / "out", "folder": tmp_path}
    refusal([argument.format(**names) for argument in arguments], capsys)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("command", [
    "encode {text} {out}.npy ckpt={ckpt}", "evaluate suite=lee ckpt={ckpt}", "export to=hf out={out} ckpt={ckpt}",
    "mine {pairs} {out}.jsonl ckpt={ckpt}", "mine {pairs} {out}.jsonl ckpt=mini scores=true teacher={ckpt}",
    "benchmark ckpt={ckpt} out={out}.json", "search index {text} {out} ckpt={ckpt}",
    "search index {vectors} {out} ckpt={ckpt}",
    "train method=distil method.teacher={ckpt} data.files={text} data.batch_size=2",
    "train method=ensemble method.first={ckpt} method.second=mini data.files={text} trainer=cpu",
])  # fmt: skip
def test_an_encoder_that_is_not_there_is_one_line_for_every_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a cat\na dog\n")
    (tmp_path / "pairs.csv").write_text("anchor,positive\na,b\nc,d\n")
    np.save(tmp_path / "in.npy", np.eye(3, dtype=np.float32))
    names = {
        "text": "in.txt",
        "pairs": "pairs.csv",
        "vectors": "in.npy",
        "out": "out",
        "ckpt": "mini_sentence",
    }
    assert main(command.format(**names).split()) == 2
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: ")]
    assert "no such file or folder" in line
    assert "=mini_sentence). Fix: did you mean mini-sentence? Or " in line
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("evaluate ckpt=mini suite=stories2", "did you mean stories"),
        ("evaluate ckpt=mini suite=sts tasks=sts1 data_dir=.", "did you mean sts"),
        ("encode in.txt o.npy ckpt=mini store=int9", "did you mean int8"),
        ("encode in.txt o.npy ckpt=mini empty=skp", "did you mean skip"),
        ("encode in.tx o.npy ckpt=mini", "did you mean in.txt"),
        ("quantize in.np o.npy", "did you mean in.npy"),
        ("quantize in.npy o.npy store=unit8", "did you mean uint8"),
        ("export ckpt=mini out=o to=onxx", "did you mean onnx"),
        ("benchmark ckpt=mini format=onnx-int", "did you mean onnx-int8"),
        ("search index in.txt o kind=ivfpq", "did you mean ivf_pq"),
        ("search indx in.txt o", "did you mean embedlab search index"),
        ("contamination in.txt against=st", "did you mean sts"),
        ("mine pairs.csv o.jsonl format=triplet", "did you mean triplets"),
        ("mine pairs.csv o.jsonl sampling=tip", "did you mean top"),
        ("report rns", "did you mean runs"),
        ("train experiment=quickstrat", "did you mean quickstart"),
        ("train template=prompt_bert", "did you mean promptbert_bert"),
        ("train evaluation.final=[storys]", "did you mean stories"),
        ("train method=supervised method.objective=cosnet", "did you mean cosent"),
        ("tune method.tau=1,2 tune.trails=3", "did you mean tune.trials"),
        ("evalaute", "did you mean evaluate"),
    ],
)
def test_a_name_that_is_not_known_is_answered_with_the_one_that_is_meant(
    command: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a cat\na dog\n")
    (tmp_path / "pairs.csv").write_text("anchor,positive\na,b\nc,d\n")
    (tmp_path / "runs").mkdir()
    np.save(tmp_path / "in.npy", np.eye(3, dtype=np.float32))
    assert main(command.split()) == 2
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: ")]
    assert f". Fix: {fix}" in line


def test_a_slip_in_one_trial_of_a_sweep_is_said_before_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "-m", "experiment=quickstart", "seed=0,1,a", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main(command) == 2
    assert "embedlab: not a whole number (seed=a). Fix: a whole number" in capsys.readouterr().err
    assert not [p for p in tmp_path.rglob("*") if p.is_dir() and p.name != "sweep"]
