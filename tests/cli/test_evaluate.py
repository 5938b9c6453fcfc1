"""`embedlab evaluate`: table, JSON, where it goes, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import embedlab
from embedlab.cli import encoders, evaluate
from embedlab.cli.main import main
from embedlab.encoders.twin import TwinEncoder
from embedlab.evaluation.core import protocol
from embedlab.evaluation.sts.sts import SEVEN
from embedlab.files import assets_dir
from embedlab.pooling import build_pooling, pooling_config
from tests.evaluation.everything import every_kind
from tests.evaluation.helpers import write_sts_folder


@pytest.fixture(scope="module")
def sts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sts_folder(tmp_path_factory.mktemp("data") / "sts", pairs=20)


def test_sts_prints_a_table_and_writes_scores_beside_the_checkpoint(
    ckpt: Path, sts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", f"ckpt={ckpt}", "suite=sts", f"data_dir={sts}", "batch_size=16"]) == 0
    out, err = capsys.readouterr()
    scores, block = protocol.read_scores(ckpt / "scores" / "sts.json")
    for task in (*SEVEN, "sts7"):
        for metric in ("spearman", "spearman_mean", "spearman_wmean"):
            assert -100 <= scores[f"{task}/{metric}"] <= 100
    assert "sts7_tok/spearman" in scores
    assert (block["text"], block["aggregation"], block["pooling"]["name"]) == ("raw", "all", "mean")
    assert (block["dtype"], block["attention"], block["device"]) == ("float32", "sdpa", "cpu")
    assert block["truncated"] == 0
    assert block["checkpoint"] not in ("", protocol.UNKNOWN)
    assert f"Scores: {ckpt / 'scores' / 'sts.json'}" in out
    row = next(line for line in out.splitlines() if "(raw)" in line)
    assert f"{scores['sts7/spearman']:.2f}" in row, "the whole row on one line, also in a pipe"
    assert "STS-B" in out
    assert "\x1b" not in out
    assert "1186" in err, "a warning for each task of another size"


def test_another_reading_of_the_checkpoint_has_a_file_of_its_own(ckpt: Path, sts: Path) -> None:
    arguments = ["evaluate", f"ckpt={ckpt}", "suite=sts", "tasks=stsb", f"data_dir={sts}"]
    assert main(arguments) == 0
    before = (ckpt / "scores" / "sts.json").read_bytes()
    assert main([*arguments, "pooling=cls"]) == 0
    assert main([*arguments, "pooling=cls", "max_length=7"]) == 0
    assert (ckpt / "scores" / "sts.json").read_bytes() == before
    for n in (1, 2):
        assert main([*arguments, "pooling=last_n", f"pooling.n={n}"]) == 0
    assert len(list((ckpt / "scores").glob("sts-last_n*n1*.json"))) == 1
    assert len(list((ckpt / "scores").glob("sts-last_n*n2*.json"))) == 1
    for name, length in (("sts-cls", None), ("sts-cls-7", 7)):
        _, block = protocol.read_scores(ckpt / "scores" / f"{name}.json")
        assert (block["pooling"]["name"], block["max_length"]) == ("cls", length)


def test_several_suites_from_the_parent_folder(ckpt: Path, sts: Path, tmp_path: Path) -> None:
    pytest.importorskip("gensim", reason="gensim (extra quickstart) is not installed")
    out = tmp_path / "results"
    arguments = [
        f"ckpt={ckpt}",
        "suite=geometry,lee",
        f"data_dir={sts.parent}",
        f"out={out}",
        "+resamples=10",
    ]
    assert main(["evaluate", *arguments]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["geometry.json", "lee.json"]
    _, block = protocol.read_scores(out / "lee.json")
    assert block["truncated"] > 40, "the documents are longer than the tiny model's 64 tokens"
    assert "10 bootstrap" in block["aggregation"]


def test_several_suites_say_which_one_is_being_scored(
    ckpt: Path, sts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", f"ckpt={ckpt}", f"data_dir={sts.parent}", f"out={tmp_path / 'results'}"]
    assert main([*arguments, "suite=sts,geometry"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("embedlab: suite ")]
    assert said == ["embedlab: suite sts (1 of 2)", "embedlab: suite geometry (2 of 2)"]
    assert main([*arguments, "suite=sts", "overwrite=true"]) == 0
    assert "embedlab: suite" not in capsys.readouterr().err


def test_tasks_text_and_length_can_be_chosen(ckpt: Path, sts: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    arguments = [
        "suite=sts",
        "tasks=stsb,sickr",
        "sts_text=tok",
        "max_length=6",
        "dtype=bfloat16",
        f"out={out}",
    ]
    assert main(["evaluate", f"ckpt={ckpt}", f"data_dir={sts}", *arguments]) == 0
    scores, block = protocol.read_scores(out)
    assert {key.split("/")[0] for key in scores} == {"stsb", "sickr", "stsb_raw", "sickr_raw"}
    assert (block["text"], block["max_length"], block["dtype"]) == ("tok", 6, "bfloat16")
    assert block["truncated"] > 0


def test_scores_go_to_the_working_folder_when_the_checkpoint_is_read_only(
    ckpt: Path, sts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and writable(path, mode))
    assert main(["evaluate", f"ckpt={ckpt}", "suite=sts", "tasks=stsb", f"data_dir={sts}"]) == 0
    assert [p.name for p in (tmp_path / "work").iterdir()] == ["scores-my_encoder-sts.json"]
    assert not (ckpt / "scores").exists()


def test_a_second_run_gives_the_same_scores(ckpt: Path, sts: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, batch in zip(files, (4, 64), strict=True):
        assert (
            main(["evaluate", f"ckpt={ckpt}", f"data_dir={sts}", f"batch_size={batch}", f"out={file}"]) == 0
        )
    first, second = (json.loads(file.read_text())["scores"] for file in files)
    assert first == pytest.approx(second, abs=0.5), "batch mates do not matter beyond a tie"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["suite=stss"], "no such suite (suite=stss)"),
        (["suite=sts", "tasks=stsbench"], "no such STS task"),
        (["suite=sts", "sts_text=both"], "sts_text=both"),
        (["suite=sts", "data_dir=/nowhere"], "no such folder"),
        (["suite=sts,lee", "out=x.json"], "one file for 2 suites"),
        (["suite=sts", "dtype=int8"], "dtype=int8"),
        (["suite=sts", "device=cuda:9"], "device=cuda:9"),
        (["suite=sts", "max_length=0"], "max_length"),
        (["suite=sts", "ckpt=/nowhere"], "/nowhere"),
        (["suite=sts", "limit=3"], "limit=3"),
        (["suite=lee", "tasks=[foo]"], "has no tasks"),
        (["suite=emoji,lee", "languages=de"], "has no languages"),
        (["resampels=3"], "resampels"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    ckpt: Path,
    sts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    given = {a.split("=")[0] for a in arguments}
    rest = [a for a in (f"ckpt={ckpt}", f"data_dir={sts}") if a.split("=")[0] not in given]
    assert main(["evaluate", *rest, *arguments]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert message in err[-1]
    assert err[-1].startswith("embedlab: ")
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_a_twin_is_scored_with_its_cross_attention(
    tiny: Callable[..., Path], ckpt: Path, sts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    towers = [embedlab.load(tiny("bert", seed=seed)) for seed in (0, 1)]
    TwinEncoder(towers, card={"seed": 0}).save(tmp_path / "twin")
    run = ["evaluate", f"ckpt={tmp_path / 'twin'}", "suite=sts", "tasks=stsb", f"data_dir={sts}"]
    out = f"out={tmp_path / 'crossed.json'}"
    assert main([*run, "cross_attention=1", out]) == 0
    run += ["overwrite=true"]
    assert main(run) == 0
    crossed, block = protocol.read_scores(tmp_path / "crossed.json")
    plain, own = protocol.read_scores(tmp_path / "twin" / "scores" / "sts.json")
    assert crossed["stsb/spearman"] != plain["stsb/spearman"]
    assert block["checkpoint"] != own["checkpoint"]
    for wrong, line in (
        ([*run, "cross_attention=1"], "would replace those of the twin"),
        ([*run, "cross_attention=0", out], "not a number of layers"),
        ([*run[:1], f"ckpt={ckpt}", *run[2:], "cross_attention=1", out], "has one tower"),
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        assert line in capsys.readouterr().err


def test_another_pooling_reads_the_same_weights(
    ckpt: Path, sts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", f"ckpt={ckpt}", "suite=sts", f"data_dir={sts}"]
    for pooling, keys in (("cls", []), ("last_n", ["pooling.n=2"])):
        out = tmp_path / f"{pooling}.json"
        assert main([*command, f"pooling={pooling}", *keys, f"out={out}"]) == 0
        assert protocol.read_scores(out)[1]["pooling"]["name"] == pooling
    capsys.readouterr()
    for pooling, complaint in (
        ("cls_mlp", "weights"),
        ("rep1", "rep1"),
        ("meen", "mean"),
    ):
        assert main([*command, f"pooling={pooling}"]) == 2
        assert complaint in capsys.readouterr().err


def test_both_sides_of_a_comparison_are_read_alike(
    tiny: Callable[..., Path], ckpt: Path, sts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = embedlab.load(tiny("bert", seed=1))
    other.pooling = build_pooling(pooling_config({"name": "cls"}), other.backbone.info)
    other.save(tmp_path / "other")
    command = ["evaluate", "suite=sts", "tasks=stsb", f"data_dir={sts}", "+resamples=20"]
    sides = [f"ckpt={ckpt}", f"compare={tmp_path / 'other'}"]

    def poolings(*more: str) -> tuple[list[str], list[int | None]]:
        assert main([*command, *sides, f"out={tmp_path / 'out'}", "overwrite=true", *more]) == 0
        (path,) = (tmp_path / "out").glob("compare-*.json")
        block = protocol.read_scores(path)[1]
        return tuple([side[key] for side in (block, block["against"])] for key in ("pooling", "max_length"))  # type: ignore[return-value]

    own, _ = poolings()
    assert [p["name"] for p in own] == ["mean", "cls"], "each by its own, where nothing is asked for"
    asked, lengths = poolings("pooling=last_n", "pooling.n=2", "max_length=7")
    assert asked[0] == asked[1]
    assert asked[0]["name"] == "last_n"
    assert lengths == [7, 7]

    TwinEncoder([other, embedlab.load(ckpt)]).save(tmp_path / "twin")
    for more, complaint in (
        (["pooling=cls", f"compare={tmp_path / 'twin'}"], f"{tmp_path / 'twin'}: an encoder of two towers"),
        (["compare=/nowhere"], "/nowhere"),
    ):
        capsys.readouterr()
        assert main([*command, sides[0], *more]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("out", ["compare.json", "sts.json", "folder", None])
def test_a_comparison_replaces_no_scores_and_no_other_comparison(
    out: str | None, tiny: Callable[..., Path], ckpt: Path, sts: Path, tmp_path: Path
) -> None:
    others = [
        Path(shutil.copytree(tiny("bert", seed=seed), tmp_path / f"other{seed}/export")) for seed in (1, 2)
    ]
    command = ["evaluate", f"ckpt={ckpt}", "suite=sts", "tasks=stsb", f"data_dir={sts}"]
    command += [] if out is None else [f"out={tmp_path / 'out' / out}"]
    assert main(command) == 0
    places = (ckpt / "scores", tmp_path / "out", tmp_path / "out" / "folder")
    (scores,) = (path for place in places for path in place.glob("*.json"))
    before = protocol.read_scores(scores)[0]
    for i, other in enumerate(others, start=1):
        assert main([*command, f"compare={other}", "+resamples=20", "overwrite=true"]) == 0
        assert len([*scores.parent.glob("*.json")]) == 1 + i
    assert protocol.read_scores(scores)[0] == before


@pytest.mark.parametrize("suites", ["lee,glue", "glue,lee", "sts,xnli,lee", "sts,qa"])
def test_a_suite_that_cannot_score_an_encoder_is_refused_before_any_is_scored(
    suites: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    towers = [embedlab.load(tiny("bert", seed=seed)) for seed in (0, 1)]
    TwinEncoder(towers).save(tmp_path / "twin")
    monkeypatch.setattr(evaluate, "_score", lambda *_: pytest.fail("a suite was scored"))
    data = every_kind(tmp_path / "data")
    assert main(["evaluate", f"ckpt={tmp_path / 'twin'}", f"suite={suites}", f"data_dir={data}"]) == 2
    assert "needs an encoder with one backbone" in capsys.readouterr().err


def test_what_a_comparison_needs_is_looked_for_before_the_suites(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(encoders, "load_encoder", lambda *_: pytest.fail("an encoder was loaded"))
    command = ["evaluate", f"ckpt={ckpt}", "suite=lee", "compare=mini", f"data_dir={tmp_path / 'none'}"]
    assert main(command) == 2
    assert "has no sts12_test" in capsys.readouterr().err


@pytest.mark.parametrize("same", ["as it is", "another spelling", "a link", "mini", "a hub's"])
def test_an_encoder_is_not_compared_with_itself(
    same: str, ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(ckpt)
    one, other = {
        "as it is": (ckpt, ckpt),
        "another spelling": (ckpt, ckpt / ".." / ckpt.name),
        "a link": (tmp_path / "link", ckpt),
        "mini": ("mini", assets_dir() / "mini"),
        "a hub's": ("no/such", "no/such"),
    }[same]
    monkeypatch.setattr(encoders, "load_encoder", lambda *_: pytest.fail("an encoder was loaded"))
    command = ["evaluate", f"ckpt={one}", f"compare={other}", "suite=lee", f"out={tmp_path / 'out.json'}"]
    assert main(command) == 2
    assert f"this is the encoder that ckpt names (compare={other}). Fix: another" in capsys.readouterr().err
    monkeypatch.setattr(evaluate, "_check_keys", lambda *_: pytest.fail("got past"))
    with pytest.raises(pytest.fail.Exception):  # a twin beside itself with cross-attention
        evaluate.main([*command[1:], "cross_attention=1"])
