"""The tools behind the encoder in the box: what is left out of its text, and the folder that is shipped."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import embedlab
from embedlab.config.run import RunConfig
from embedlab.run.run import train
from tests.support import SENTENCES
from tools import questions, technical

ROOT = Path(__file__).parents[1]
LONG = "The committee that met on Monday in the old town hall will vote on the new law tomorrow at noon."


def run(tool: str, *arguments: object) -> dict[str, Any]:
    line = [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def pack(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = lzma.open if path.suffix == ".xz" else gzip.open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def test_what_stands_in_an_evaluation_set_is_no_training_text(tmp_path: Path) -> None:
    data, a, b, c = tmp_path / "data", *SENTENCES[:3]
    pack(data / "sts" / "sts12_test.tsv.gz", "score\tsentence1\tsentence2", f"1\t{a}\t{LONG}")
    pack(data / "transfer" / "trec_test.tsv.gz", "coarse\tquestion", "x\tWho are you then, my friend?")
    for name in ("scifact", "cranfield"):
        for kind in ("corpus", "queries"):
            pack(
                data / "retrieval" / name / f"{kind}.jsonl.gz",
                json.dumps({"title": "", "text": f"{name} {kind}"}),
            )
    pack(data / "sentences" / "wiki_en_0.txt.gz", b, a.upper(), b, f"In short: {LONG}")
    pack(
        data / "nli" / "snli_dev.tsv.gz",
        "label\tpremise\thypothesis",
        f"x\t{c}\twho are you, then? my friend",
    )
    pack(data / "parallel" / "multi30k_train.tsv.gz", "en\tde", "A dog.\tEin Hund.")
    pack(data / "glue" / "qnli_dev.tsv.gz", "label\tpremise\thypothesis", "x\tWhere is Rome ?\tb")
    pack(data / "retrieval" / "tydiqa_goldp_train" / "en.tsv.gz", "qid\tquestion", "1\twhere is rome")
    pack(data / "pretrain" / "wiki_paragraphs_00.txt.xz", f"{SENTENCES[4]} " * 40, "")
    counts = run("distil_text.py", data, tmp_path / "out")["training"]
    with lzma.open(tmp_path / "out" / "sentences.txt.xz", "rt") as file:
        assert file.read().splitlines() == [b, c, "A dog.", "Where is Rome ?"]
    with lzma.open(tmp_path / "out" / "paragraphs.txt.xz", "rt") as file:
        (paragraph,) = file.read().splitlines()
    assert 1300 < len(paragraph) <= 1400
    assert counts["wikipedia"] == {
        "read": 4, "kept": 1, "equal of sts": 1, "a window of sts": 1, "left out: in an evaluation set": 2,
        "left out: empty or a repeat": 1,
    }  # fmt: skip
    assert counts["nli"]["equal of transfer"] == 1
    assert list(counts) == ["wikipedia", "nli", "captions", "questions", "wikipedia paragraphs"]

    gas = "The pressure of a gas was its force on the area of the piston that moved in the cylinder of the engine."
    pack(data / "pretrain" / "wiki_paragraphs_01.txt.xz", gas, f"{gas} {LONG}", "", "The town is old.")
    told = run("distil_text.py", data, tmp_path / "more", "--technical", 9, "--technical-questions", 9)
    more = told["training"]
    assert more["wikipedia paragraphs"] == {"read": 2, "kept": 2}
    assert more["technical"]["kept"] == 1
    assert more["technical"]["left out: in an evaluation set"] == 1
    assert more["technical questions"]["kept"] > 0
    with lzma.open(tmp_path / "more" / "sentences.txt.xz", "rt") as file:
        assert "its force on the area" in file.read().splitlines()[4]
    with lzma.open(tmp_path / "more" / "paragraphs.txt.xz", "rt") as file:
        assert file.read().splitlines()[-1] == gas


def made_of(sentence: str) -> set[str]:
    """All questions that may be made of a sentence, without the question mark."""
    return {
        text.rstrip(" ?") for seed in range(60) for text in questions.questions([sentence], seed=seed) if text
    }


def test_questions_ask_in_the_forms_that_their_statement_allows() -> None:
    told = made_of(
        "In 1885, Ada Lovelace joined Princeton in May 1843 (AL), where she wrote three long letters home."
    )
    starts = {" ".join(text.split()[:2]) for text in told}
    assert {"Who joined", "How did", "Why did", "What did", "When did", "Where did"} <= starts
    assert {"When did Ada Lovelace join Princeton", "What does AL stand for"} <= told
    assert made_of("Tirana is the capital of Albania.") >= {"What is Tirana", "Name the capital of Albania"}
    assert not made_of("There is no news.")


@given(st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc"))))
def test_questions_are_short_and_end_as_questions(sentence: str) -> None:
    for text in questions.questions([sentence, f"The old {sentence} was {sentence} in May 1990 ."]):
        assert text.endswith("?")
        assert 2 < len(text.split()) <= questions.LONGEST + 8


def test_a_longer_question_is_cut_later() -> None:
    statement = (
        "The river was crossed by an army of men and horses with all that they had taken from the old towns"
    )
    short, long = (list(questions.questions([statement], longest=n)) for n in (6, 20))
    assert [len(text.rstrip(" ?").split()) for text in (*short, *long)] == [4, 20]


def test_articles_with_many_terms_are_technical() -> None:
    first, second = technical.articles(
        ["The pressure of a gas.\n", "Its molecules move.\n", "\n", "\n", "A town.\n"]
    )
    assert first == ["The pressure of a gas.", "Its molecules move."]
    assert technical.share(first) == 3 / 8
    assert (technical.share(second), technical.share([])) == (0, 0)


def test_pieces_are_of_whole_sentences_and_cut_elsewhere_each_time() -> None:
    told = [f"Sentence {i} says that {'so ' * (i % 17)}much." for i in range(400)]
    article = [" ".join(told[at : at + 7]) for at in range(0, 400, 7)]
    assert technical.sentences(article) == told
    drawn = random.Random(0)
    first, second = (list(technical.pieces(article, drawn)) for _ in range(2))
    for piece in first + second:
        assert set(technical.sentences([piece])) <= set(told)
        assert technical.WORDS[0] <= len(piece.split()) <= technical.WORDS[1] + 22
    assert not set(first) & set(second)
    assert not list(technical.pieces(["Short."], drawn))


def test_technical_texts_are_as_many_as_asked_and_no_two_are_alike() -> None:
    long = [f"Sentence {i} says that {'so ' * (i % 17)}much." for i in range(80)]
    article = [" ".join(long[at : at + 10]) for at in range(0, 80, 10)]
    texts = technical.prose([["A gas is hot."], article], 30)
    assert len(set(texts)) == len(texts) == 30
    assert texts[: 1 + len(article)] == ["A gas is hot.", *article]
    assert technical.prose([["A gas is hot."]], 30) == ["A gas is hot."], "no more can be cut"
    assert technical.prose([["A gas is hot."], article], 3) == ["A gas is hot.", *article[:2]]


def test_a_run_becomes_the_folder_that_is_shipped(
    compose_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    train(compose_run("trainer.max_steps=1"), tmp_path / "run")
    texts, folder = tmp_path / "texts.txt", tmp_path / "box" / "tiny"
    texts.write_text("\n".join(SENTENCES) + "\n")
    (tmp_path / "overlap.json").write_text(json.dumps({"training": {"wikipedia": {"kept": 5}}}))
    told = run("ship_encoder.py", tmp_path / "run", folder, "--texts", texts, "--max-length", 20,
               "--overlap", tmp_path / "overlap.json", "--teacher", "a teacher")  # fmt: skip
    shipped, trained = embedlab.load(folder), embedlab.load(tmp_path / "run")
    assert shipped.tokenization.row_limit == 20
    a, b = (encoder.encode(SENTENCES[:3], normalize=True) for encoder in (shipped, trained))
    assert (a * b).sum(1).min() > 0.999
    assert told["weights"] == "int8 rows"
    assert told["bytes of weights"] < (tmp_path / "run" / "export" / "model.safetensors").stat().st_size
    assert shipped.card["training"]["teacher"] == "a teacher"
    card = (folder / "README.md").read_text()
    assert "- kept: 5" in card
    assert str(tmp_path) not in card + (folder / "embedlab.json").read_text(), "no path of this machine"
    np.testing.assert_array_equal(embedlab.load(folder).encode("x"), shipped.encode("x"))
    stored = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    block = {
        "suite": "sts",
        "name": "sts7_raw",
        "data": {"stsb": {"source": f"{tmp_path}/a.gz, {tmp_path}/b.gz"}},
    }
    (tmp_path / "sts.json").write_text(json.dumps({"scores": {"sts7/spearman": 61.5}, "protocol": block}))
    assert run("ship_encoder.py", folder, folder, "--scores", tmp_path / "sts.json") == told
    scored = embedlab.load(folder).card
    assert (shipped.card["scores"], scored["scores"]) == ({}, {"sts7/spearman": 61.5})
    assert scored["protocol"]["sts"]["data"]["stsb"]["source"] == "a.gz, b.gz"
    assert scored["training"] == shipped.card["training"]
    assert {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} == stored
    card = (folder / "README.md").read_text()
    assert "| sts7/spearman | 61.50 |" in card
    assert "- kept: 5" in card
    assert str(tmp_path) not in card + (folder / "embedlab.json").read_text()
