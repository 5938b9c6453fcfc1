from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embedlab.config.data import DataConfig
from embedlab.data.rows import RowStream, read_rows
from embedlab.errors import UserError

HEADER = "premise\thypothesis\tlabel\n"


def stream_of(
    tmp_path: Path, content: str, roles: tuple[str, ...] | None = None, **settings: Any
) -> RowStream:
    (tmp_path / "a.tsv").write_text(content)
    return read_rows(DataConfig(name="nli", files=str(tmp_path / "a.tsv"), **settings), roles)


def texts_of(stream: RowStream) -> list[tuple[str, ...]]:
    return [row[2] for row in stream]


def test_triples_by_their_usual_or_named_columns(tmp_path: Path) -> None:
    usual = "hard_neg\tsent1\tsent0\nc\tb\ta\n"
    assert texts_of(stream_of(tmp_path, usual)) == [("a", "b", "c")]
    own = "x\ty\tz\nb\tc\ta\n"
    columns = {"anchor": "z", "positive": "x", "negative": "y"}
    assert texts_of(stream_of(tmp_path, own, columns=columns)) == [("a", "b", "c")]


def test_pairs_need_no_negative_column(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, "anchor\tpositive\na\tb\n", ("anchor", "positive"))
    assert texts_of(stream) == [("a", "b")]
    with pytest.raises(UserError, match="neither the columns of triples"):
        texts_of(stream_of(tmp_path, "anchor\tpositive\na\tb\n"))


def test_labelled_pairs_are_gathered_by_premise_and_all_are_used(tmp_path: Path) -> None:
    content = HEADER + (
        "p\te1\tentailment\nq\tn\tneutral\np\tc1\tcontradiction\np\te2\tEntailment\nq\te\tentailment\n"
        "r\tc\tcontradiction\np\te3\tentailment\ns\th\t-\np\tc2\tcontradiction\n"
    )
    stream = stream_of(tmp_path, content)
    rows = list(stream)
    assert [row[2] for row in rows] == [("p", "e1", "c1"), ("p", "e2", "c2"), ("p", "e3", "c1")]
    assert [row[1] for row in rows] == [2, 5, 8]
    assert stream.dropped == {"no gold label": 1, "premise without both labels": 2}


def test_without_negatives_every_entailed_pair_is_a_row(tmp_path: Path) -> None:
    content = HEADER + "p\te1\tentailment\np\te2\tentailment\nq\tc\tcontradiction\n"
    stream = stream_of(tmp_path, content, ("anchor", "positive"))
    assert texts_of(stream) == [("p", "e1"), ("p", "e2")]
    assert stream.dropped == {"premise without both labels": 1}


def test_an_unknown_label_is_named_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.tsv:3: the label 'not_entailment' is not entailment, neutral"):
        texts_of(stream_of(tmp_path, HEADER + "p\th\tentailment\np\tg\tnot_entailment\n"))


def test_neither_triples_nor_labels(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither .* nor .* there are: premise, hypothesis"):
        texts_of(stream_of(tmp_path, "premise\thypothesis\np\th\n"))


def test_labelled_and_triple_files_together(tmp_path: Path) -> None:
    (tmp_path / "1.tsv").write_text(HEADER + "p\te\tentailment\n")
    (tmp_path / "2.csv").write_text("sent0,sent1,hard_neg\na,b,c\n")
    (tmp_path / "3.tsv").write_text(HEADER + "p\tc\tcontradiction\n")
    stream = read_rows(DataConfig(name="nli", files=str(tmp_path / "*")))
    assert [(row[0], row[2]) for row in stream] == [(1, ("a", "b", "c")), (0, ("p", "e", "c"))]
