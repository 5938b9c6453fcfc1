"""Places that cannot be written, and disks that fill at any moment: one line, status 2, and nothing half done is left.

Every command meets every kind of error where it writes (`tests.refusing`), from the beginning and from each of its
changes on; places that it only reads may refuse all they like.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from embedlab.cli.main import main
from embedlab.corpus.vector_files import vector_file
from tests.encoders.test_encoder import build
from tests.refusing import refusing
from tests.report.test_report import write_run
from tests.support import SENTENCES

pytest.importorskip("faiss", reason="faiss (extra faiss) is not installed")

ERRORS = {name: getattr(errno, name) for name in ("EROFS", "EACCES", "EPERM", "ENOSPC", "EDQUOT")}
RANGES = r"ranges\.npy"


class Case(NamedTuple):
    """A command, and a pattern of what it may leave where it could not end: what the same command goes on with."""

    command: str
    left: str = ""


CASES = {
    "encode npy": Case("encode {in}.txt {out}.npy ckpt={encoder}", r"\.a\.npy\.parts(/.*)?"),
    "encode int8": Case(
        "encode {in}.txt {out}.parquet ckpt={encoder} store=int8 calibration={in}.npy",
        rf"\.a\.parquet\.parts(/.*)?|{RANGES}",
    ),
    "encode parts": Case("encode {in}.txt {out}/ ckpt={encoder} part_rows=6", r"a(/.*)?"),
    "index texts": Case("search index {in}.txt {out} ckpt={encoder}"),
    "index vectors": Case("search index {in}.npy {out}"),
    "index parquet": Case("search index {parquet} {out} kind=ivf_flat"),
    "index work": Case("search index {in}.npy {out} kind=ivf_flat work={out}.work", r"a\.work(/.*)?"),
    "search query": Case("search query {index} queries={in}.txt out={out}.json"),
    "search export": Case("search export {index} {out}.parquet"),
    "mine": Case("mine {pairs} {out}.jsonl ckpt={encoder} device=cpu", r"a\.jsonl(\.json|\.work(/.*)?)"),
    "mine work": Case(
        "mine {pairs} {out}.parquet ckpt={encoder} device=cpu work={out}.work",
        r"a\.parquet\.json|a\.work(/.*)?",
    ),
    "mine index": Case(
        "mine {pairs} {out}.jsonl ckpt={encoder} device=cpu search={index}", r"a\.jsonl(\.json|\.work(/.*)?)"
    ),
    "export hf": Case("export to=hf out={out} ckpt={encoder}"),
    "export deep": Case("export to=hf out={out}/new/deep ckpt={encoder}"),
    "export sentence-transformers": Case("export to=sentence-transformers out={out} ckpt={encoder}"),
    "report": Case("report {runs} out={out}", r"a(/report\.(csv|html|tex))?"),
    "report mteb": Case("report --mteb {mteb} {mteb2} out={out}", r"a(/mteb\.json)?"),
    "quantize": Case("quantize {in}.npy {out}.npy store=int8", RANGES),
    "quantize parts": Case("quantize {parts} {out} store=int8", r"a(/.*)?"),
    "evaluate": Case("evaluate ckpt={encoder} suite=sts tasks=stsb data_dir={sts} out={out}.json"),
    "contamination": Case("contamination {in}.txt against=retrieval data_dir={beir} out={out}.json"),
    "benchmark": Case("benchmark ckpt={encoder} batch_size=1 length=8 format=torch calls=1 out={out}.json"),
    "distil": Case(
        "train method=distil method.teacher={encoder} pooling=cls backbone=local backbone.path={encoder}"
        " data.files={in}.txt trainer=cpu data.batch_size=4 trainer.max_steps=2 data.report=false"
        " evaluation.dev=null evaluation.final=[] evaluation.before=false hydra.run.dir={out} ckpt_path=auto",
        r"a(/.*)?",
    ),
}


@pytest.fixture(scope="module")
def home(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    home = tmp_path_factory.mktemp("home")
    build(tiny("bert")).save(home / "encoder")
    (home / "in.txt").write_text("\n".join(SENTENCES) + "\n")
    rows = [json.dumps({"query": a, "pos": b}) for a, b in zip(SENTENCES[:8], SENTENCES[8:], strict=True)]
    (home / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    np.save(home / "in.npy", np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32))
    for seed in (0, 1):
        write_run(home / "runs" / f"{seed}", seed, 70.0 + seed, ["pooling=mean"])
    for name in ("mteb", "mteb2", "beir", "beir/qrels"):
        (home / name).mkdir()
    for name in ("corpus", "queries"):
        (home / "beir" / f"{name}.jsonl").write_text(json.dumps({"_id": "1", "text": SENTENCES[0]}) + "\n")
    (home / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\t1\t1\n")
    scores = {"dataset_revision": "a", "task_name": "T", "mteb_version": "2", "evaluation_time": 1.0,
              "scores": {"test": [{"hf_subset": "default", "languages": ["eng-Latn"], "main_score": 0.5}]}}  # fmt: skip
    for name in ("mteb", "mteb2"):
        (home / name / "T.json").write_text(json.dumps(scores))
    texts, encoder = str(home / "in.txt"), f"ckpt={home / 'encoder'}"
    assert main(["search", "index", texts, str(home / "index"), encoder]) == 0
    assert main(["encode", texts, f"{home / 'parts'}/", encoder, "part_rows=6"]) == 0
    with vector_file(home / "vectors.parquet") as target:
        target.add(range(1, 201), np.load(home / "in.npy"))
    return home


@pytest.fixture
def run(home: Path, sts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """run("encode npy", folder): the status of a command that writes in a folder, with further arguments."""
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    names = {
        name: home / name for name in ("in", "encoder", "index", "parts", "runs", "mteb", "mteb2", "beir")
    }
    names |= {"pairs": home / "pairs.jsonl", "parquet": home / "vectors.parquet", "sts": sts_dir}
    return lambda name, folder, *more: main(
        [*(part.format(**names, out=folder / "a") for part in CASES[name].command.split()), *more]
    )


def seen(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))
    }


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that was refused."""
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: ")]
    assert ". Fix: " in line
    return line


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", CASES)
def test_a_place_that_refuses_is_one_line(
    name: str, error: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    with refusing(tmp_path / "there", error=ERRORS[error]):
        assert run(name, tmp_path / "there") == 2
    line = said(capsys)
    assert str(tmp_path / "there") in line
    assert os.strerror(ERRORS[error]).lower() in line.lower()
    assert seen(tmp_path / "there") == {}


@pytest.mark.parametrize("name", CASES)
def test_what_is_only_read_may_refuse(name: str, home: Path, run: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with refusing(home, error=errno.EROFS) as refused:
        assert run(name, tmp_path / "there") == 0
    assert refused.seen == [], "it was tried"


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS"])
@pytest.mark.parametrize("name", CASES)
def test_whenever_it_begins_nothing_half_done_is_left(
    name: str, error: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From each change on that takes space no other goes well, but for removing; then the same command once more."""
    (tmp_path / "whole").mkdir()
    with refusing(tmp_path / "whole", error=0, after=10**9, full=True) as counted:
        assert run(name, tmp_path / "whole") == 0
    step = 1 if error == "ENOSPC" and name not in ("distil", "benchmark") else 4  # these take a second each
    for after in range(0, len(counted.seen), step):
        place = tmp_path / f"{after}"
        place.mkdir()
        capsys.readouterr()
        with refusing(place, error=ERRORS[error], after=after, full=True) as refused:
            assert run(name, place) == 2, refused.seen
        assert str(place) in said(capsys)
        left = seen(place)
        assert all(re.fullmatch(CASES[name].left, each) for each in left), (refused.seen[after], left.keys())
        if left and after % 4 == 0:
            assert run(name, place) == 0, (refused.seen[after], left.keys())
            assert seen(place).keys() >= seen(tmp_path / "whole").keys()


def test_an_index_that_cannot_be_written_answers(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("http.server.HTTPServer.serve_forever", lambda self: None)
    for error in ERRORS.values():
        with refusing(home, error=error) as refused:
            assert main(["search", "query", str(home / "index"), SENTENCES[3], "k=1"]) == 0
            assert capsys.readouterr().out.rstrip().endswith(SENTENCES[3])
            assert main(["search", "serve", str(home / "index"), "port=0"]) == 0
        assert refused.seen == []


# other places


@pytest.mark.parametrize("error", ERRORS)
def test_a_cache_that_refuses_is_one_line(
    error: str, run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The user's own one takes its place, unless the disk is full."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    (tmp_path / "there").mkdir()
    with refusing(tmp_path / "cache", tmp_path / "own", error=ERRORS[error]):
        assert run("distil", tmp_path / "there") == 2
    line = said(capsys)
    assert "the token cache cannot be written" in line
    assert "(data.cache_dir)" in line
    assert not (tmp_path / "cache").exists()
    assert {Path(name).parts[0] for name in seen(tmp_path / "there")} <= {"a"}
    with refusing(tmp_path / "cache", error=ERRORS[error]):
        assert run("distil", tmp_path / "there") == (2 if error in ("ENOSPC", "EDQUOT") else 0)


@pytest.mark.parametrize("error", ERRORS)
def test_the_folder_of_a_run_that_refuses_is_one_line(
    error: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores, reports, exports and further steps go into the folder of a run, unless they are sent elsewhere."""
    (tmp_path / "there").mkdir()
    assert run("distil", tmp_path / "there") == 0
    folder = tmp_path / "there" / "a"
    before = seen(folder)
    commands: dict[str, list[str]] = {
        "report": ["report", str(folder)],
        "evaluate": ["evaluate", f"ckpt={folder}", "suite=stories"],
        "export": ["export", f"ckpt={folder}", "to=hf", f"out={folder / 'hf'}"],
    }
    for name, command in commands.items():
        capsys.readouterr()
        with refusing(folder, error=ERRORS[error]):
            assert main(command) == 2, name
        assert str(folder) in said(capsys)
        assert seen(folder) == before
    with refusing(folder, error=ERRORS[error]) as refused:
        assert main([*commands["evaluate"], f"out={tmp_path / 'scores.json'}"]) == 0
        assert main(["export", f"ckpt={folder}", "to=hf", f"out={tmp_path / 'hf'}"]) == 0
    assert refused.seen == []
