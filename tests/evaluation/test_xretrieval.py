"""Question-to-passage retrieval across languages."""

from __future__ import annotations

import gzip
from math import ceil
from pathlib import Path

import pytest
import torch

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.bitext.xretrieval import accuracy_and_mrr
from embedlab.evaluation.finetune.qa_data import grid_limit_note, load_grid, load_training
from tests.evaluation.helpers import write_tsv
from tests.evaluation.multilingual import Interlingua, write_xquad
from tests.evaluation.real import needs_data


def test_accuracy_and_reciprocal_rank_by_hand() -> None:
    documents = torch.tensor([[1.0, 0.0], [0.9, 0.5], [0.0, 1.0]])
    queries = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    found = accuracy_and_mrr(queries, documents, torch.tensor([0, 1, 2]))
    assert found["accuracy"] == pytest.approx(100 / 3)
    assert found["mrr@10"] == pytest.approx(100 * (1 + 1 / 2 + 1 / 3) / 3)


def test_an_interlingua_finds_everything_and_clusters_pull_the_pool_apart(tmp_path: Path) -> None:
    write_xquad(tmp_path)
    scores, block = suite("xretrieval").run(Interlingua(), {"data_dir": tmp_path})
    assert set(scores.values()) == {100.0}
    assert block["data"]["xquad"]["questions"] == {"en-en": 12, "de-en": 12, "en-de": 12, "de-de": 12}
    lost, _ = suite("xretrieval").run(Interlingua(clusters=1, meaning=0), {"data_dir": tmp_path})
    assert lost["xquad-same/accuracy"] == pytest.approx(100 / 6)


@pytest.mark.parametrize("limit", [None, 8, 24])
@pytest.mark.parametrize("of", ["passages", "questions"])
def test_rows_in_another_order_give_the_same_scores(of: str, limit: int | None, tmp_path: Path) -> None:
    """Ids tell rows apart, so that a language's file may have an order of its own; only the pool of all languages goes
    by row, and is left out then."""
    plain, _ = suite("xretrieval").run(
        Interlingua(), {"data_dir": write_xquad(tmp_path / "a"), "limit": limit}
    )
    path = write_xquad(tmp_path / "b") / "xquad" / f"xquad_de_{of}.tsv.gz"
    header, *rows = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("\n".join([header, *rows[::-1], ""]).encode()))
    found, _ = suite("xretrieval").run(Interlingua(), {"data_dir": tmp_path / "b", "limit": limit})
    assert set(found.values()) == set(plain.values()) == {100.0}
    assert ("xquad-pooled/accuracy" in found) == (of == "questions" and limit != 8), (
        "8: other passages are kept"
    )
    assert "xquad-pooled/accuracy" in plain


def test_limit_keeps_the_passages_asked_of(tmp_path: Path) -> None:
    grid = load_grid("xquad", write_xquad(tmp_path), limit=12)
    assert all(len(q) == 3 and len(q.passages) == 6 for q in grid.values())
    assert grid["de", "en"].answers[2] == ["place1"]
    assert grid["de", "en"].passages[1].startswith("de ")
    assert grid["de", "en"].questions[0].startswith("en ")


@pytest.mark.parametrize("name", ["xretrieval", "qa"])
@pytest.mark.parametrize("limit", [1, 4, 9, 20])
def test_a_limit_counts_in_all_and_says_what_is_left(name: str, limit: int, tmp_path: Path) -> None:
    """Two languages, so four pairs; 12 questions a pair and 6 passages a language."""
    write_xquad(tmp_path)
    write_tsv(tmp_path / "squad_train.tsv", ["question", "passage", "answer"], [("who", "it is Ann", "Ann")])
    data = suite(name).load({"data_dir": tmp_path, "limit": limit})
    grid = (data if name == "xretrieval" else data.grids)["xquad"]
    each = ceil(limit / 4)
    assert {len(q) for q in grid.values()} == {each}
    (pool,) = {len(q.passages) for q in grid.values()}
    assert pool == max(min(6, ceil(limit / 2)), ceil(each / 2)), "a share, and all that is asked of"
    (note,) = grid_limit_note(limit, {"xquad": grid})
    assert f"xquad {4 * each} questions, {2 * pool} of 12 passages" in note
    if name == "xretrieval":
        _, block = suite(name).run(Interlingua(), {"data_dir": tmp_path, "limit": limit})
        assert block["warnings"] == [note]


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no xquad_\*_passages"):
        suite("xretrieval").run(Interlingua(), {"data_dir": tmp_path, "tasks": "xquad"})
    write_xquad(tmp_path)
    questions = tmp_path / "xquad" / "xquad_de_questions.tsv.gz"
    write_tsv(questions, ["qid", "pid", "question", "answer"], [("q0-0", "x", "de asks 0", "a")])
    with pytest.raises(UserError, match=r"xquad_de_questions.tsv.gz:2: no passage has this pid \(pid=x\)"):
        load_grid("xquad", tmp_path)


def test_training_answers_are_found_in_their_passages(tmp_path: Path) -> None:
    header = ["qid", "question", "passage", "answer"]
    rows = [
        (0, "where?", "in Rome, not Rome NY", "Rome"),
        (1, "who?", "nobody", "Ann"),
        (2, "what?", "x", ""),
    ]
    write_tsv(tmp_path / "en.tsv.gz", header, rows)
    found = load_training(tmp_path)
    assert [(r.start, r.answer) for r in found.rows] == [(3, "Rome")]
    assert found.dropped == 2
    write_tsv(tmp_path / "en.tsv.gz", header, rows[1:])
    with pytest.raises(UserError, match="no answer is found"):
        load_training(tmp_path)


def test_real_files() -> None:
    folder = needs_data("retrieval")
    xquad, mlqa = load_grid("xquad", folder), load_grid("mlqa", folder)
    assert len(xquad) == 81
    assert {len(q) for q in xquad.values()} == {1190}
    assert sum(len(q) for q in mlqa.values()) == 15747
    training = load_training(folder)
    assert (len(training.rows) + training.dropped, training.dropped < 40) == (3696, True)
