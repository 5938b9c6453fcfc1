"""The search index: exact results, whole or absent folders, only with the encoder that made it; and its
command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedlab.cli.main import main
from embedlab.corpus import search, stored
from embedlab.corpus.search import Index, build_index
from embedlab.errors import UserError
from tests.evaluation.helpers import HashedWords
from tests.support import SENTENCES

TEXTS = [
    f"{a} {b} {c}" for a in ("red", "blue", "old") for b in ("cat", "dog", "bird") for c in ("ran", "sat")
]


def build(folder: Path, texts: list[str] = TEXTS, overwrite: bool = False, rows: int = 8192) -> Index:
    build_index(
        folder, texts, HashedWords(), reference="words", fingerprint="f1", overwrite=overwrite, rows=rows
    )
    return Index(folder)


def test_results_are_those_of_a_full_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "BLOCK", 4)
    queries = ["red cat sat", "a bird"]
    found = build(tmp_path / "index", rows=5).search(HashedWords(), queries, k=7)
    x, q = HashedWords().encode(TEXTS), HashedWords().encode(queries)
    cosine = (q @ x.T) / np.linalg.norm(q, axis=1)[:, None] / np.linalg.norm(x, axis=1)
    for hits, row in zip(found, cosine, strict=True):
        order = np.argsort(-row, kind="stable")[:7]
        assert [hit.score for hit in hits] == pytest.approx(row[order], abs=1e-6)
        assert [hit.text for hit in hits] == [TEXTS[hit.row] for hit in hits]
    assert found[0][0].text == "red cat sat"
    assert found[0][0].score == pytest.approx(1, abs=1e-6)


def test_any_text_comes_back(tmp_path: Path) -> None:
    texts = ["naïve café", "two\nlines\r\nhere", "한국어 문장", "tab\tin it", "last one"]
    index = build(tmp_path / "index", texts)
    hits = index.search(HashedWords(), ["한국어 문장"], k=99)[0]
    assert {hit.text for hit in hits} == {
        "naïve café",
        "two lines here",
        "한국어 문장",
        "tab\tin it",
        "last one",
    }
    assert hits[0].text == "한국어 문장"


def test_vectors_are_a_plain_npy_file_of_unit_rows(tmp_path: Path) -> None:
    build(tmp_path / "index")
    vectors = np.load(tmp_path / "index" / "vectors.npy")
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS[:9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path / "index", texts(), HashedWords(), reference="w", fingerprint="f", rows=4)
    assert list(tmp_path.iterdir()) == []
    build(tmp_path / "index")
    with pytest.raises(KeyboardInterrupt):
        build_index(
            tmp_path / "index", texts(), HashedWords(), reference="w", fingerprint="f", overwrite=True
        )
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert len(Index(tmp_path / "index")) == len(TEXTS), "the old index is still whole"


def test_overwriting_is_asked_for_and_only_replaces_an_index(tmp_path: Path) -> None:
    build(tmp_path / "index")
    with pytest.raises(UserError, match="overwrite"):
        build(tmp_path / "index", ["one"])
    assert len(build(tmp_path / "index", ["one"], overwrite=True)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="other things than a search index"):
        build(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text to index"):
        build(tmp_path / "index", [])
    assert not (tmp_path / "index").exists()


def test_another_encoder_is_refused(tmp_path: Path) -> None:
    index = build(tmp_path / "index")
    index.check_encoder("f1")
    with pytest.raises(UserError, match="made by another encoder"):
        index.check_encoder("f2")
    with pytest.raises(UserError, match="width 64, the queries' have 32"):
        index.search(HashedWords(32), ["cat"])


@pytest.mark.parametrize("name", ["vectors.npy", "texts.txt", "offsets.npy", "index.json"])
def test_damage_is_noticed(tmp_path: Path, name: str) -> None:
    build(tmp_path / "index")
    path = tmp_path / "index" / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="build the index again"):
        Index(tmp_path / "index")


@pytest.mark.parametrize(
    "offsets",
    [
        lambda x: -x,
        lambda x: x[:, None],
        lambda x: x.astype(np.float64),
        lambda x: np.concatenate([x[:1], x[1:-1][::-1], x[-1:]]),
        lambda x: np.where(np.arange(len(x)) == 1, x[2], x),
        lambda x: x.astype(object),
    ],
)
def test_offsets_that_say_nothing(offsets: Callable[[Any], Any], tmp_path: Path) -> None:
    build(tmp_path / "index")
    path = tmp_path / "index" / "offsets.npy"
    np.save(path, offsets(np.load(path)))
    with pytest.raises(UserError, match="is damaged"):
        Index(tmp_path / "index")


def test_texts_that_are_no_utf8_and_vectors_that_are_no_numbers(tmp_path: Path) -> None:
    index = build(tmp_path / "index", ["cat naïve"] * 3)
    path = tmp_path / "index" / "texts.txt"
    path.write_bytes(path.read_bytes().replace("ï".encode(), b"\xff\xff"))
    with pytest.raises(UserError, match=r"texts\.txt:\d: is not UTF-8"):
        index.search(HashedWords(), ["cat"])
    vectors = np.load(tmp_path / "index" / "vectors.npy")
    vectors[1] = np.nan
    np.save(tmp_path / "index" / "vectors.npy", vectors)
    with pytest.raises(UserError, match="not finite"):
        Index(tmp_path / "index").search(HashedWords(), ["cat"])


@pytest.mark.parametrize("name", search.FILES)
def test_no_file_of_an_index_is_a_link(name: str, tmp_path: Path) -> None:
    build(tmp_path / "index")
    path = tmp_path / "index" / name
    path.rename(tmp_path / "secret")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=f"{name}: is a link"):
        Index(tmp_path / "index")


def test_not_an_index(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no search index"):
        Index(tmp_path)


def test_command(tmp_path: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, index, ckpt = tmp_path / "texts.txt", tmp_path / "index", tiny("bert")
    source.write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    assert main(["search", "index", str(source), str(index), f"ckpt={ckpt}"]) == 0
    assert f"{len(SENTENCES)} texts" in capsys.readouterr().out
    assert main(["search", "query", str(index), SENTENCES[3], "k=2"]) == 0
    first, second = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert first[1:] == ["4", SENTENCES[3]]
    assert float(first[0]) == pytest.approx(1, abs=1e-3)
    assert float(second[0]) <= float(first[0])
    assert json.loads((index / "index.json").read_text())["encoder"] == str(ckpt.resolve())

    odd = "A \x1b]0;owned\x07 title\tand a \u202etab"
    source.write_text(odd + "\n", encoding="utf-8")
    assert main(["search", "index", str(source), str(tmp_path / "odd"), f"ckpt={ckpt}"]) == 0
    capsys.readouterr()
    assert main(["search", "query", str(tmp_path / "odd"), "title"]) == 0
    assert capsys.readouterr().out.split("\t")[2:] == [odd.encode("unicode_escape").decode() + "\n"]

    assert main(["search", "query", str(index), "words", f"ckpt={tiny('bert', layers=3)}"]) == 2
    assert "made by another encoder" in capsys.readouterr().err
    assert main(["search", "query", str(index), "words", "max_length=5"]) == 2, (
        "other settings, other vectors"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "wants index, query, serve or export"),
        (["find"], "not 'find'"),
        (["index", "nowhere.txt", "out", "ckpt=mini"], "nowhere.txt: no such file"),
        (["query", "nowhere", "text"], "nowhere: is no search index"),
        (["query", "nowhere", " "], "the query is empty (text"),
        (["query", "nowhere", " "], ", or queries=FILE"),
        (["query", "nowhere"], "a query is missing (text). Fix: embedlab search query INDEX"),
        (["query", "nowhere"], ", or queries=FILE"),
        (["query"], "index is missing"),
        (["query", "nowhere", "text", "queries=in.txt"], "(text=text). Fix: leave it or queries= out"),
        (["query", "nowhere", "text", "out=."], "is there already (overwrite=false)"),
        (["query", "nowhere", "text", "k=0"], "k=0"),
    ],
)
def test_bad_commands(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_an_empty_row_is_named(
    tmp_path: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "texts.txt"
    source.write_text("one\n\nthree\n")
    assert main(["search", "index", str(source), str(tmp_path / "index"), f"ckpt={tiny('bert')}"]) == 2
    assert "texts.txt:2: an empty row" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]


@pytest.mark.parametrize("asked", ["text", "texts", "vectors"])
@pytest.mark.parametrize("told", [True, False], ids=["with texts", "vectors alone"])
def test_answers_in_a_file_are_those_that_are_printed(
    asked: str, told: bool, tmp_path: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    texts = [*SENTENCES, "odd\u2028“words”\x1b[1m"]
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("ask.txt").write_text(f"{SENTENCES[3]}\n{SENTENCES[7]}\n")
    encode = ["encode", "texts.jsonl", "v.npy", f"ckpt={tiny('bert')}"]
    assert main(encode) == 0
    source = "texts.jsonl" if told else "v.npy"
    assert main(["search", "index", source, "index", f"ckpt={tiny('bert')}"]) == 0
    query = {"text": SENTENCES[3], "texts": "queries=ask.txt", "vectors": "queries=v.npy"}[asked]
    capsys.readouterr()
    assert main(["search", "query", "index", query, "k=4", "out=answers.json"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    found = json.loads(Path("answers.json").read_text(encoding="utf-8"))
    rows = {"text": None, "texts": [1, 2], "vectors": list(range(1, len(texts) + 1))}[asked]
    assert found.get("queries") == rows
    assert [len(hits) for hits in found["hits"]] == [4] * len(rows or [1])
    for line, (place, hit) in zip(
        lines, [(i, hit) for i, hits in enumerate(found["hits"]) for hit in hits], strict=True
    ):
        *row, score, number = line[: len(line) - told]
        assert [int(r) for r in row] == ([] if rows is None else [rows[place]])
        assert (float(score), int(number)) == (pytest.approx(hit["score"], abs=6e-5), hit["row"])
        assert hit["text"] == (" ".join(texts[hit["row"] - 1].splitlines()) if told else "")
