"""Pairs, triplets, scored pairs and labelled texts: columns by name, numbers, prompts, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.data.kinds import data_config, data_kind
from embedlab.data.rows import RowStream, read_rows
from embedlab.data.sources import check_source
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError


def stream(kind: str, file: Path, **settings: Any) -> RowStream:
    return read_rows(data_config({"name": kind, "files": str(file), **settings}))


def rows(kind: str, file: Path, **settings: Any) -> list[tuple[Any, ...]]:
    return [values for _, _, values, _ in stream(kind, file, **settings)]


def table(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def lines(path: Path, *records: dict[str, Any]) -> Path:
    return table(path, *map(json.dumps, records))


def test_wikipedia_is_another_name_of_sentences(tmp_path: Path) -> None:
    file = table(tmp_path / "a.txt", "a cat", "a dog")
    assert rows("sentences", file) == rows("wikipedia", file) == [("a cat",), ("a dog",)]
    assert type(data_kind("wikipedia")) is type(data_kind("sentences"))


@pytest.mark.parametrize("anchor", ["anchor", "query", "question", "sent0"])
@pytest.mark.parametrize("positive", ["positive", "pos", "answer", "document", "sent1"])
def test_pairs_are_found_by_the_names_of_columns_in_any_order(
    tmp_path: Path, anchor: str, positive: str
) -> None:
    file = table(tmp_path / "a.csv", f"id,{positive},{anchor}", "1,an answer,a question")
    assert rows("pairs", file) == [("a question", "an answer")]


def test_pairs_without_a_column_name_those_there_are(tmp_path: Path) -> None:
    file = table(tmp_path / "a.csv", "left,right", "a,b")
    with pytest.raises(UserError, match=r"a\.csv: no column anchor or query .*; there are: left, right"):
        rows("pairs", file)
    assert rows("pairs", file, columns={"anchor": "right", "positive": "left"}) == [("b", "a")]


def test_n_negatives_in_columns_or_in_a_list(tmp_path: Path) -> None:
    named = table(tmp_path / "a.csv", "negative_2,negative_1,positive,anchor", "d,c,b,a", ",g,f,e")
    listed = lines(
        tmp_path / "a.jsonl",
        {"anchor": "a", "positive": "b", "negatives": ["c", "d", "x"]},
        {"anchor": "e", "positive": "f", "negatives": ["g"]},
    )
    for file in (named, listed):
        found = stream("triplets", file, negatives=2)
        assert [values for _, _, values, _ in found] == [("a", "b", "c", "d")]
        assert found.dropped.total() == 1
        assert rows("triplets", file) == [("a", "b", "c"), ("e", "f", "g")]
    assert stream("triplets", listed, negatives=2).dropped == Counter()
    with pytest.raises(UserError, match=r"a\.csv: the table has 2 \(data\.negatives=5\)"):
        rows("triplets", named, negatives=5)
    short = stream("triplets", listed, negatives=4)
    assert list(short) == []
    assert short.dropped == {"fewer than 4 negatives": 2}


@pytest.mark.parametrize("name", ["negative", "hard_neg", "negative_1"])
def test_one_negative_by_its_usual_names(tmp_path: Path, name: str) -> None:
    assert rows("triplets", table(tmp_path / "a.csv", f"sent0,sent1,{name}", "a,b,c")) == [("a", "b", "c")]


def test_lines_of_flagembedding_are_a_row_for_each_positive(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl",
        {
            "query": "q",
            "pos": ["p", "r"],
            "neg": ["m", "n"],
            "pos_scores": [0.9, 0.7],
            "neg_scores": [0.2, 0.1],
        },
        {"query": "s", "pos": [], "neg": ["m", "n"], "pos_scores": [], "neg_scores": [0.2, 0.1]},
    )
    found = stream("triplets", file, negatives=2, scores=True)
    assert [values for _, _, values, _ in found] == [
        ("q", "p", "m", "n", 0.9, 0.2, 0.1),
        ("q", "r", "m", "n", 0.7, 0.2, 0.1),
    ]
    assert found.dropped == {"no positive": 1}
    assert rows("pairs", file) == [("q", "p"), ("q", "r")]


def test_scores_of_a_teacher_in_a_list_or_in_columns(tmp_path: Path) -> None:
    listed = lines(
        tmp_path / "a.jsonl", {"anchor": "a", "positive": "b", "negative": "c", "scores": [2, 1, 9]}
    )
    named = table(tmp_path / "a.csv", "anchor,positive,negative,score_1,score_0", "a,b,c,1,2")
    assert (
        rows("triplets", listed, scores=True)
        == rows("triplets", named, scores=True)
        == [("a", "b", "c", 2, 1)]
    )
    with pytest.raises(UserError, match=r"a\.jsonl:1: 3 scores of a positive and 3 negatives"):
        rows("triplets", lines(tmp_path / "a.jsonl", {"anchor": "a", "positive": "b", "negatives": ["c", "d", "e"],
                                                      "scores": [2, 1, 9]}), scores=True, negatives=3)  # fmt: skip
    with pytest.raises(UserError, match=r"data\.columns\.scores"):
        rows("triplets", table(tmp_path / "b.csv", "anchor,positive,negative", "a,b,c"), scores=True)


@pytest.mark.parametrize("scores", [
    {"pos_scores": [0.9], "neg_scores": [0.2, 0.1, 0.3]}, {"pos_scores": [0.9, 0.8, 0.7], "neg_scores": [0.2, 0.1]},
    {"pos_scores": [], "neg_scores": [0.2, 0.1, 0.3, 0.4]}, {"pos_scores": [0.9, 0.8], "neg_scores": [0.2]},
    {"scores": [0.9, 0.2, 0.1]}, {"scores": []},
])  # fmt: skip
def test_scores_that_are_not_of_these_texts_are_refused(tmp_path: Path, scores: dict[str, Any]) -> None:
    file = lines(tmp_path / "a.jsonl", {"query": "q", "pos": ["p", "r"], "neg": ["m", "n", "o"], **scores})
    with pytest.raises(UserError, match=r"a\.jsonl:1: \d scores of 2 positives and 2 negatives"):
        rows("triplets", file, negatives=2, scores=True)


def test_a_list_beside_columns_of_their_own_is_no_text(tmp_path: Path) -> None:
    record = {"anchor": "a", "positive": "b", "negative_1": ["c", "d"], "negative_2": "e"}
    with pytest.raises(UserError, match=r"a\.jsonl:1: the negative_1 is \['c', 'd'\], not text"):
        rows("triplets", lines(tmp_path / "a.jsonl", record), negatives=2)


def test_scores_are_mapped_to_their_range(tmp_path: Path) -> None:
    file = table(tmp_path / "a.tsv", "similarity\ttext2\ttext1", "0\tb\ta", "4\td\tc", "5\tf\te")
    assert rows("scored", file) == [("a", "b", 0), ("c", "d", 4), ("e", "f", 5)]
    assert [row[2] for row in rows("scored", file, score_range=[0, 5])] == [0, 0.8, 1]
    with pytest.raises(UserError, match=r"a\.tsv:3: score 4 is outside data\.score_range=\[0,3\]"):
        rows("scored", file, score_range=[0, 3])
    for bad in ("nan", "inf", "1e400", "high", ""):
        table(file, "score\tsentence1\tsentence2", "1\ta\tb", f"{bad}\ta\tb")
        for limits in (None, [0, 5]):
            with pytest.raises(UserError, match=r"a\.tsv:3: the score is"):
                rows("scored", file, score_range=limits)


@pytest.mark.parametrize("limits", [[5, 0], [1], [1, 1], [1, 2, 3]])
def test_a_range_has_two_ends(limits: list[float]) -> None:
    with pytest.raises(UserError, match=r"data\.score_range"):
        data_config({"name": "scored", "files": "x", "score_range": limits})


def test_labels_are_places_among_the_sorted_ones(tmp_path: Path) -> None:
    file = table(tmp_path / "a.csv", "text,label", "a,spam", "b,ham", "c,", "d,spam", "e,10", "f,9")
    found = stream("labelled", file)
    assert [values for _, _, values, _ in found] == [("a", 3), ("b", 2), ("d", 3), ("e", 1), ("f", 0)]
    assert found.dropped == {"no label": 1}
    whole = lines(
        tmp_path / "a.jsonl",
        {"text": "a", "label": 3},
        {"text": "b", "label": -1},
        {"text": "c", "label": 3.0},
    )
    assert [row[1] for row in rows("labelled", whole)] == [1, 0, 1]
    with pytest.raises(UserError, match=r"all rows have one label \(x\)"):
        rows("labelled", table(tmp_path / "b.csv", "text,label", "a,x", "b,x"))
    with pytest.raises(UserError, match=r"a\.jsonl:2: the label \[1\]"):
        rows("labelled", lines(tmp_path / "a.jsonl", {"text": "a", "label": 3}, {"text": "b", "label": [1]}))


@pytest.mark.parametrize(("label", "known"), [
    (1.5, False), (True, False), (float("inf"), False), ({"x": [1]}, False),
    (float("nan"), None), (None, None), (" ", None), (-2.0, True), ("9" * 5000, True),
])  # fmt: skip
def test_a_label_is_text_a_whole_number_or_nothing(tmp_path: Path, label: object, known: bool | None) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "a", "label": 1}, {"text": "b", "label": 2},
                 {"text": "c", "label": label})  # fmt: skip
    if known is False:
        with pytest.raises(UserError, match=r"a\.jsonl:3: "):
            rows("labelled", file)
        return
    found = stream("labelled", file)
    assert len(list(found)) == (3 if known else 2)
    assert found.dropped.total() == (0 if known else 1)


RATED = {
    "pairs": ("anchor,positive", "a,b"),
    "triplets": ("anchor,positive,negative", "a,b,c"),
    "nli": ("sent0,sent1,hard_neg", "a,b,c"),
    "parallel": ("en,de", "a,b"),
}


@pytest.mark.parametrize("name", ["score", "label", "similarity"])
@pytest.mark.parametrize("kind", RATED)
def test_a_rating_that_a_kind_does_not_read_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    head, row = RATED[kind]
    file = table(tmp_path / "a.csv", f"{head},{name}", f"{row},0.5", f"{row},4")
    config = data_config({"name": kind, "files": str(file)})
    for read in (lambda: read_rows(config), lambda: check_source(config)):
        with pytest.raises(
            UserError, match=rf"a\.csv: .*column {name}.*data=scored.*data\.ignore_columns=\[{name}\]"
        ):
            read()
    if kind != "parallel":
        assert len(rows(kind, file, ignore_columns=[name])) == 2
    late = table(tmp_path / "c.csv", f"{head},{name}", *[f"{row},"] * 50, f"{row},0.5")
    with pytest.raises(UserError, match=f"column {name}"):
        rows(kind, late)
    words = table(tmp_path / "b.csv", f"{head},{name}", f"{row},good", f"{row},0.5")
    if kind not in ("nli", "parallel"):
        assert len(rows(kind, words)) == 2


def test_a_row_without_a_rating_that_is_not_read_is_no_error(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl", {"anchor": "a", "positive": "b", "label": "x"}, {"anchor": "c", "positive": "d"}
    )
    assert rows("pairs", file) == [("a", "b"), ("c", "d")]


def test_named_roles_and_one_text_a_row_may_stand_beside_a_rating(tmp_path: Path) -> None:
    file = table(tmp_path / "a.csv", "a,b,score", "x,y,0.5")
    with pytest.raises(UserError, match="column score"):
        rows("parallel", file, columns={"source": "a", "target": "b"})
    assert rows("sentences", file, columns={"sentence": "a"}) == [("x",)]


def fields_of(config: DataConfig, tokenization: Tokenization) -> Any:
    roles = data_kind(config.name).roles_of(config)
    return build_token_table(config, {role: (role, tokenization) for role in roles})


def test_a_prompt_is_in_the_tokens_and_not_in_the_hashes(
    tmp_path: Path, tokenization: Tokenization, cache: Path
) -> None:
    file = table(tmp_path / "a.csv", "anchor,positive,negative_1,negative_2", "cat,dog,cat,lake")
    settings = {"name": "triplets", "files": str(file), "max_length": 24, "negatives": 2}
    plain = fields_of(data_config(settings), tokenization)
    prompts = {"anchor": "the girl: ", "negatives": "a man: "}
    made = fields_of(data_config({**settings, "prompts": prompts}), tokenization)
    assert made.folder != plain.folder
    for role, text in (("anchor", "the girl: cat"), ("positive", "dog"), ("negative_1", "a man: cat"),
                       ("negative_2", "a man: lake")):  # fmt: skip
        assert made.fields[role].row(0).tolist() == tokenization.ids([text])[0]
        assert made.fields[role].hashes[0] == plain.fields[role].hashes[0]
    assert made.fields["anchor"].hashes[0] == made.fields["negative_1"].hashes[0]
    with pytest.raises(UserError, match=r"data\.prompts\.second.*one of anchor, positive, negative_1"):
        data_config({**settings, "negatives": 1, "prompts": {"second": "x"}})


def test_what_decides_the_rows_decides_the_cache(tmp_path: Path, tokenization: Tokenization) -> None:
    file = table(tmp_path / "a.csv", "first,second,score", "cat,dog,1", "lake,tree,3")
    made = [
        fields_of(data_config({"name": "scored", "files": str(file), "score_range": limits}), tokenization)
        for limits in (None, [0, 5], [0, 5], [1, 5])
    ]
    assert len({one.folder for one in made}) == 3
    assert made[1].numbers["score"].tolist() == pytest.approx([0.2, 0.6])


def test_a_batch_has_two_rows_of_a_label_at_least() -> None:
    with pytest.raises(UserError, match=r"at least 2.*data\.per_label"):
        data_config({"name": "labelled", "files": "x", "per_label": 1})
