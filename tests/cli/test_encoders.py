"""Without ckpt the commands take the encoder in the box, and say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

import embedlab
from embedlab.cli.main import main
from embedlab.files import conf_dir
from tests.support import SENTENCES


@pytest.fixture
def box(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A box with tiny random encoders in the place of the shipped ones."""
    for seed, name in enumerate(("mini", "mini-sentence")):
        embedlab.load(tiny("bert", seed=seed)).save(tmp_path / "box" / name)
    for module in ("embedlab.files", "embedlab.encoders.place"):
        monkeypatch.setattr(f"{module}.assets_dir", lambda: tmp_path / "box")
    return tmp_path / "box"


def test_the_sentence_encoder_is_taken_and_not_the_body(
    box: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("\n".join(SENTENCES[:3]) + "\n")
    assert main(["encode", "in.txt", "out.npy"]) == 0
    assert "embedlab: ckpt=mini-sentence, the encoder in the box" in capsys.readouterr().err
    expected = embedlab.load(box / "mini-sentence").encode(SENTENCES[:3])
    np.testing.assert_allclose(np.load("out.npy"), expected, atol=1e-6)
    np.testing.assert_array_equal(embedlab.load().encode(SENTENCES[:3]), expected)
    assert main(["encode", "in.txt", "named.npy", "ckpt=mini"]) == 0
    assert "in the box" not in capsys.readouterr().err
    assert not np.allclose(np.load("named.npy"), expected, atol=1e-6)
    (box / "mini-sentence").rename(tmp_path / "gone")
    assert main(["encode", "in.txt", "none.npy"]) == 2
    assert "ships no encoder mini-sentence, but mini" in capsys.readouterr().err


@pytest.mark.parametrize("there", ["another encoder", "a file", "an empty folder", "a broken link"])
def test_what_is_called_like_the_encoder_in_the_box_is_not_taken_for_it(
    there: str, box: Path, tmp_path: Path, sts_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none is named; a folder that is named goes before what is shipped."""
    expected = embedlab.load(box / "mini-sentence").encode(SENTENCES[:3])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("in.txt").write_text("\n".join(SENTENCES[:3]) + "\n")
    assert main(["search", "index", "in.txt", "before"]) == 0
    place = Path("mini-sentence")
    if there == "another encoder":
        embedlab.load(box / "mini").save(place)
    elif there == "a file":
        place.write_text("notes\n")
    elif there == "an empty folder":
        place.mkdir()
    else:
        place.symlink_to("nowhere")
    np.testing.assert_array_equal(embedlab.load().encode(SENTENCES[:3]), expected)
    assert main(["encode", "in.txt", "out.npy"]) == 0
    np.testing.assert_allclose(np.load("out.npy"), expected, atol=1e-6)
    assert main(["search", "index", "in.txt", "after"]) == 0
    for index in ("before", "after"):
        assert json.loads(Path(index, "index.json").read_text())["encoder"] == "mini-sentence"
        assert main(["search", "query", index, SENTENCES[0]]) == 0
    assert main(["evaluate", "suite=sts", f"data_dir={sts_dir}", "tasks=[stsb]"]) == 0
    assert Path("scores-mini-sentence-sts.json").is_file(), "not beside what is shipped"


WRITES = {
    "encode in.txt out.npy": "out.npy",
    "export to=hf out=out": "out/embedlab.json",
    "mine pairs.csv out.jsonl device=cpu": "out.jsonl",
    "benchmark batch_size=1 length=8 calls=1 device=cpu out=out.json": "out.json",
    "evaluate suite=lee out=lee.json": "lee.json",
    "search index in.txt index": "index/index.json",
}


@pytest.mark.parametrize("command", WRITES)
def test_every_command_that_takes_an_encoder_takes_the_one_in_the_box(
    command: str,
    box: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gensim", reason="the Lee documents come with gensim (extra quickstart)")
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("\n".join(SENTENCES) + "\n")
    pairs = [f"{a},{b}\n" for a, b in zip(SENTENCES[:4], SENTENCES[4:8], strict=True)]
    Path("pairs.csv").write_text("anchor,positive\n" + "".join(pairs).replace(", ", " "))
    assert main(command.split()) == 0
    assert capsys.readouterr().err.count("embedlab: ckpt=mini-sentence, the encoder in the box") == 1
    assert Path(WRITES[command]).is_file()


@pytest.mark.parametrize(
    "command",
    [
        "encode in.txt out.npy dim=9999",
        "encode bad.txt out.npy",
        "search index bad.txt index",
        "export to=hf dim=0",
    ],
)
def test_a_refusal_without_ckpt_is_one_line(
    command: str,
    box: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("a cat\n")
    Path("bad.txt").write_text("a cat\n\na dog\n")
    assert main([*command.split(), *(["out=out"] if "export" in command else ["device=cpu"])]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("embedlab:")]
    assert len(lines) == 1


def test_none_of_them_is_left_out() -> None:
    taking = set()
    for file in conf_dir().glob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        keys = yaml.safe_load(text)
        if "ckpt" in keys:
            assert keys["ckpt"] is None, file
            if "null: mini-sentence, the encoder in the box" in text:
                taking.add(file.stem.replace("_", " "))
    assert taking == {name for name in (" ".join(c.split()[:2]) for c in WRITES) if name in taking} | {
        c.split()[0] for c in WRITES if not c.startswith("search")
    }


def test_evaluate_names_its_scores_by_the_encoder_that_it_took(
    box: Path, tmp_path: Path, sts_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "suite=sts", f"data_dir={sts_dir}", "tasks=[stsb]"]) == 0
    assert Path("scores-mini-sentence-sts.json").is_file()


def test_an_index_names_the_encoder_that_it_took(
    box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("\n".join(SENTENCES) + "\n")
    assert main(["search", "index", "in.txt", "index"]) == 0
    assert "ckpt=mini-sentence" in capsys.readouterr().err
    assert main(["search", "query", "index", SENTENCES[4], "k=1"]) == 0
    assert SENTENCES[4] in capsys.readouterr().out


def test_an_encoder_in_the_box_that_is_asked_for_as_a_backbone_is_said_how(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "backbone=mini-sentence"]) == 2
    assert "Fix: backbone=mini backbone.name=mini-sentence" in capsys.readouterr().err
