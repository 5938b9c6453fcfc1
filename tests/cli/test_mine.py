"""`embedlab mine`: from a table to a table, by a teacher or not; what cannot be is one line and status 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from embedlab.cli.main import main

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
    assert mine("work=w", "block=1") == 0
    assert (folder / "out.jsonl").read_bytes() == first
    assert mine("work=w", "negatives=1") == 0
    assert (folder / "out.jsonl").read_bytes() != first
    capsys.readouterr()
    for change in ("dim=8", "corpus=null", "max_length=5", "dtype=bfloat16"):
        assert mine("work=w", change) == 2
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
    assert mine("scores=true", f"teacher={tiny('roberta')}") == 0
    assert scores() == own
    assert [r["score_1"] for r in rows(folder / "out.jsonl")] != own_scores


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["negatives=9", "range_min=5", "range_max=10"], "ranks 5 to 10 hold 5 (negatives=9)"),
        (["relative_margin=1.5"], "0 to 1"),
        (["teacher=mini"], "(teacher)"),
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
