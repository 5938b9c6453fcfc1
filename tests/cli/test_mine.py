"""`embedlab mine`: from a table to a table, by a teacher or not; what cannot be is one line and status 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embedlab.cli.main import main
from embedlab.data.readers import open_reader
from embedlab.encoders.codes import STORES

PAIRS = [("how do birds fly?", "They flap their wings."), ("what do cats eat?", "Cats eat fish."),
         ("a dog?", "It barks."), ("what do cats eat?", "Cats eat meat."), ("", "No question."),
         ("no answer", "")]  # fmt: skip
MORE = ["Wings give lift.", "cats  eat FISH.", "Rome is old.", "", "Fish swim.", "How do birds fly?"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [json.dumps({"id": i, "query": q, "pos": [p] if i % 2 else p}) for i, (q, p) in enumerate(PAIRS)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "more.txt").write_text("\n".join(MORE) + "\n")
    return tmp_path


@pytest.fixture
def mine(folder: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(folder)
    start = [f"ckpt={tiny('bert')}", "device=cpu", "corpus=more.txt"]
    return lambda *more: main(["mine", "pairs.jsonl", "out.jsonl", *start, *more])


def rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_table_becomes_a_table(
    mine: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mine("format=lists", "scores=true") == 0
    printed = capsys.readouterr().out
    found = rows(folder / "out.jsonl")
    assert [(r["anchor"], r["positive"]) for r in found] == [PAIRS[i] for i in (0, 1, 3, 2)]  # query by query
    texts = {t for t in (*MORE, *(p for q, p in PAIRS if q)) if t}
    for row in found:
        negatives = row["negatives"]
        assert isinstance(negatives, list)
        assert set(negatives) <= texts - {row["anchor"], row["positive"]}
        assert len(negatives) == len(set(negatives)) == 3
    assert "How do birds fly?" not in found[0]["negatives"]  # type: ignore[operator]
    assert all("cats  eat FISH." not in row["negatives"] for row in found[1:3])  # type: ignore[operator]
    told = json.loads((folder / "out.jsonl.json").read_text())
    assert (told["queries"], told["rows"], told["corpus"]) == (3, 4, len(texts))
    assert f"4 rows of 3 queries from {len(texts)} texts: out.jsonl" in printed
    assert not (folder / "out.jsonl.work").exists()


def test_other_settings_go_on_with_the_vectors_that_are_there(
    mine: Callable[..., int],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert mine("work=w") == 0
    first = (folder / "out.jsonl").read_bytes()
    monkeypatch.setattr("embedlab.corpus.texts.embed", lambda *_: pytest.fail("encoded again"))
    assert mine("work=w", "block=1", "overwrite=true") == 0
    assert (folder / "out.jsonl").read_bytes() == first
    assert mine("work=w", "negatives=1", "overwrite=true") == 0
    assert (folder / "out.jsonl").read_bytes() != first
    capsys.readouterr()
    for change in ("dim=8", "corpus=null", "max_length=5", "dtype=bfloat16"):
        assert mine("work=w", change, "overwrite=true") == 2
        line = capsys.readouterr().err
        assert "w: was begun with" in line
        assert line.count("\n") == 1


def test_a_teacher_scores_and_the_ranks_stay(
    mine: Callable[..., int], folder: Path, tiny: Callable[..., Path]
) -> None:
    def scores() -> list[list[object]]:
        return [[r[key] for key in ("anchor", "positive", "negative")] for r in rows(folder / "out.jsonl")]

    assert mine("scores=true") == 0
    own, own_scores = scores(), [r["score_1"] for r in rows(folder / "out.jsonl")]
    assert mine("scores=true", f"teacher={tiny('roberta')}", "overwrite=true") == 0
    assert scores() == own
    assert [r["score_1"] for r in rows(folder / "out.jsonl")] != own_scores


@pytest.fixture(scope="module")
def cross(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sentence_transformers", reason="extra st")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cross") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(tiny("bert"), num_labels=1)
    model.classifier.weight.data.normal_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny("bert")).save_pretrained(folder)
    return folder


def test_a_cross_encoder_judges_pairs_of_texts(mine: Callable[..., int], folder: Path, cross: Path) -> None:
    from sentence_transformers import CrossEncoder

    assert mine("scores=true", "format=lists", f"teacher={cross}") == 0
    model, first = CrossEncoder(str(cross), device="cpu"), (folder / "out.jsonl").read_bytes()
    found = rows(folder / "out.jsonl")
    for row in found:
        texts = [row["positive"], *row["negatives"]]  # type: ignore[misc]
        assert row["scores"] == pytest.approx(
            model.predict([(row["anchor"], t) for t in texts]).tolist(), abs=1e-5
        )
    assert mine("scores=true", "format=lists", f"teacher={cross}", "block=1", "overwrite=true") == 0
    assert (folder / "out.jsonl").read_bytes() == first
    limit = sorted(s for row in found for s in row["scores"][1:])[4]  # type: ignore[index]
    more = (f"teacher={cross}", f"max_score={limit:.5f}", "overwrite=true")
    assert mine("scores=true", "format=lists", *more) == 0
    assert all(s <= limit + 1e-5 for row in rows(folder / "out.jsonl") for s in row["scores"][1:])  # type: ignore[index]


def test_a_folder_that_is_not_of_mine_is_left_alone(
    mine: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out.jsonl.work").mkdir()
    (folder / "out.jsonl.work" / "thesis.txt").write_text("years of work")
    assert mine() == 2
    assert "holds other things" in capsys.readouterr().err
    assert (folder / "out.jsonl.work" / "thesis.txt").read_text() == "years of work"


def test_an_index_is_searched_in_place_of_a_corpus(
    mine: Callable[..., int], folder: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt, texts = f"ckpt={tiny('bert')}", [p for q, p in PAIRS if q and p] + [t for t in MORE if t]
    (folder / "all.txt").write_text("\n".join(texts) + "\n")
    assert main(["search", "index", "all.txt", "index", ckpt, "device=cpu"]) == 0
    assert mine("scores=true") == 0
    exact = rows(folder / "out.jsonl")
    command = ["mine", "pairs.jsonl", "indexed.jsonl", "device=cpu", "scores=true", "search=index"]
    assert main([*command, ckpt]) == 0
    for one, other in zip(rows(folder / "indexed.jsonl"), exact, strict=True):
        assert {k: v for k, v in one.items() if k[0] != "s"} == {
            k: v for k, v in other.items() if k[0] != "s"
        }
        assert one["score_1"] == pytest.approx(other["score_1"], abs=1e-5)
    capsys.readouterr()
    for more, told in (
        ([f"ckpt={tiny('roberta')}"], "index: was made by another encoder"),
        ([ckpt, "corpus=more.txt"], "corpus=more.txt"),
        ([ckpt, "teacher=mini", "max_score=0.9"], "teacher=mini"),
        ([ckpt, "search=nowhere"], "nowhere: is no search index"),
        ([ckpt, "dim=8"], "another encoder"),
    ):
        assert main([*command, *more, "overwrite=true"]) == 2
        line = capsys.readouterr().err
        assert told in line
        assert line.count("\n") == 1


@pytest.mark.parametrize("store", STORES)
def test_scores_of_an_index_are_those_of_texts_or_refused(
    store: str,
    folder: Path,
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A candidate's score is held against a positive's; with a bit a feature it is of another size."""
    monkeypatch.chdir(folder)
    ckpt, texts = f"ckpt={tiny('bert')}", [p for q, p in PAIRS if q and p] + [t for t in MORE if t]
    (folder / "all.txt").write_text("\n".join(texts) + "\n")
    assert main(["encode", "all.txt", "floats.npy", ckpt, "device=cpu"]) == 0
    coded = [f"store={store}", "calibration=floats.npy"]
    assert main(["encode", "all.txt", "codes/", ckpt, "device=cpu", *coded]) == 0
    assert main(["search", "index", "codes", "index", "texts=all.txt"]) == 0
    command = ["mine", "pairs.jsonl", "out.jsonl", ckpt, "device=cpu", "overwrite=true"]
    assert main([*command, "search=index"]) == 0
    capsys.readouterr()
    for more in (
        "scores=true",
        "relative_margin=0.05",
        "absolute_margin=0.1",
        "max_score=0.9",
        "min_score=0",
    ):
        status = main([*command, more, "search=index"])
        line = capsys.readouterr().err
        if store in ("binary", "ubinary"):
            assert status == 2
            assert "holds a bit a feature" in line
            assert line.count("\n") == 1
        else:
            assert "holds a bit a feature" not in line
    if store not in ("binary", "ubinary"):
        assert main([*command, "scores=true", "search=index"]) == 0
        coded_rows = rows(folder / "out.jsonl")
        assert main([*command, "scores=true", "corpus=all.txt"]) == 0
        scores = [{one["negative"]: one["score_1"] for one in some if one["anchor"] == coded_rows[0]["anchor"]}
                  for some in (coded_rows, rows(folder / "out.jsonl"))]  # fmt: skip
        common = scores[0].keys() & scores[1].keys()
        assert common
        for text in common:
            assert scores[0][text] == pytest.approx(scores[1][text], abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["negatives=9", "range_min=5", "range_max=10"], "ranks 5 to 10 hold 5 (negatives=9)"),
        (["relative_margin=1.5"], "0 to 1"),
        (["teacher=mini"], "(teacher)"),
        (["teacher=none", "scores=true"], "(teacher=none)"),
        (["output=out.txt"], "unknown kind of output"),
        (["output=out.csv", "format=lists"], "a .csv file has no lists"),
        (["format=pairs"], "format=pairs"),
        (
            ["columns.anchor=question"],
            "there are: id, query, pos (columns.anchor=question)",
        ),
        (["input=none.csv"], "no such file (input=none.csv)"),
        (["corpus=none.txt"], "none.txt: no such file"),
        (["block=0"], "block=0"),
        (["max_score=-1"], "no row is left of 3 queries"),
        (["negativs=3"], "negatives"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    mine: Callable[..., int],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    start = [a for a in arguments if a.startswith(("input=", "output="))]
    rest = [a for a in arguments if a not in start]
    if start:
        given = {a.split("=")[0]: a.split("=")[1] for a in start}
        places = [given.get("input", "pairs.jsonl"), given.get("output", "out.jsonl")]
        assert main(["mine", *places, "ckpt=mini", *rest]) == 2
    else:
        assert mine(*rest) == 2
    lines = capsys.readouterr().err.splitlines()
    assert told in lines[-1]
    assert not (folder / "out.jsonl").exists()


@pytest.mark.parametrize("out", ["pairs.jsonl", "./pairs.jsonl", "link.jsonl", "corpus.csv"])
def test_the_input_is_not_written_over(
    out: str, folder: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    Path("link.jsonl").symlink_to("pairs.jsonl")
    Path("corpus.csv").write_text("text\nRome\n")
    before = Path(out).read_bytes()
    assert main(["mine", "pairs.jsonl", out, f"ckpt={tiny('bert')}", "corpus=corpus.csv"]) == 2
    assert "is read, and would be replaced" in capsys.readouterr().err
    assert Path(out).read_bytes() == before


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_what_is_written_is_read_back(suffix: str, folder: Path, tiny: Callable[..., Path]) -> None:
    odd = ["a\rb", "a\nb\n", 'c "d", e', "f\tg", "h\u2028i", "語", "\x0bj;k", "'l'", "1.5", "null"]
    lines = [json.dumps({"anchor": f"{text} q", "positive": f"x {text}"}) for text in odd]
    (folder / "odd.jsonl").write_text("\n".join(lines))
    out = folder / f"out{suffix}"
    assert main(["mine", str(folder / "odd.jsonl"), str(out), f"ckpt={tiny('bert')}", "negatives=1"]) == 0
    found = [values for _, values in open_reader(out).rows(["anchor", "positive", "negative"])]
    assert [values[:2] for values in found] == [(f"{text} q", f"x {text}") for text in odd]
    assert {values[2] for values in found} <= {f"x {text}" for text in odd}


@pytest.mark.parametrize("name", [
    "texts/rows.npy", "texts/bounds.npy", "texts/queries/offsets.npy", "texts/queries/texts.bin",
    "texts/corpus/offsets.npy", "texts/corpus/texts.bin", "model/queries/000000.npy", "model/corpus/000000.npy",
    "settings.json",
])  # fmt: skip
def test_damage_in_the_work_is_one_line(
    name: str, mine: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mine("work=w") == 0
    file = folder / "w" / name
    content = file.read_bytes()
    for damage in (b"", content[: len(content) // 2], content[:-2]):
        file.write_bytes(damage)
        for left in (folder / "w").glob("mined-*"):
            shutil.rmtree(left)
        capsys.readouterr()
        assert mine("work=w", "overwrite=true") == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert Path(name).parts[0] in line
        assert "Fix: " in line


def test_a_killed_command_goes_on_to_the_same_bytes(folder: Path, tiny: Callable[..., Path]) -> None:
    pairs = [f'{{"query": "question {i} of many", "positive": "answer {i} of many"}}\n' for i in range(1200)]
    (folder / "many.jsonl").write_text("".join(pairs))
    start = [sys.executable, "-m", "embedlab", "mine", "many.jsonl"]
    rest = [f"ckpt={tiny('bert')}", "device=cpu", "scores=true", "sampling=random", "range_max=9", "block=20"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.Popen([*start, "out.jsonl", *rest, "work=w"], cwd=folder, env=env)
    try:
        wait_for(lambda: len(list(folder.glob("w/mined-*/*.npz"))) > 3, killed)
    finally:
        killed.kill()
        killed.wait()
    assert not (folder / "out.jsonl").exists()
    done = {file: file.stat().st_mtime_ns for file in (folder / "w").rglob("0*.np?")}
    for name, more in (("out.jsonl", ["work=w"]), ("whole.jsonl", [])):
        subprocess.run([*start, name, *rest, *more], cwd=folder, env=env, check=True, capture_output=True)
    assert (folder / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert all(file.stat().st_mtime_ns == when for file, when in done.items())  # none was made again
    assert not list(folder.rglob("*.new"))


def test_what_was_begun_with_overwrite_goes_on_with_it_and_not_without(
    mine: Callable[..., int],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    (folder / "out.jsonl").write_text("old\n")
    with monkeypatch.context() as patch:
        patch.setattr("embedlab.corpus.mined.write_mined", stop)
        assert mine("overwrite=true") == 130
    done = {file: file.stat().st_mtime_ns for file in (folder / "out.jsonl.work" / "model").rglob("*.npy")}
    assert done
    assert mine() == 2
    assert "out.jsonl: is there already (overwrite=false)" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == "old\n"
    assert {file: file.stat().st_mtime_ns for file in done} == done
    monkeypatch.setattr(
        "embedlab.encoders.base.Encoder.encode", lambda *_, **__: pytest.fail("encoded again")
    )
    assert mine("overwrite=true") == 0
    assert len(rows(folder / "out.jsonl")) > 1


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 200
    while not ready():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < end
        time.sleep(0.02)
