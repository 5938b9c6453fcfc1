"""One's own development set: what it may be, and that it selects and stops early."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from embedlab.config.trainer import ScoringConfig
from embedlab.data.kinds import data_config
from embedlab.errors import UserError
from embedlab.evaluation.retrieval.dev import DevRetrieval
from embedlab.run.dev import load_dev
from embedlab.run.run import train
from tests.tiny_run import compose_run as compose_run
from tests.tiny_run import sentences
from tests.tiny_run import text_file as text_file


@pytest.fixture
def rated(tmp_path: Path) -> Path:
    file, texts = tmp_path / "dev.csv", sentences(24, seed=5)
    pairs = zip(texts[::2], texts[1::2], strict=True)
    file.write_text(
        "text1,text2,similarity\n" + "".join(f"{a},{b},{i / 3}\n" for i, (a, b) in enumerate(pairs))
    )
    return file


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder, texts = tmp_path / "beir", sentences(24, seed=6)
    (folder / "qrels").mkdir(parents=True)
    for name, some in (("corpus", texts[:20]), ("queries", texts[20:])):
        lines = [json.dumps({"_id": f"{name[0]}{i}", "text": text}) for i, text in enumerate(some)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    rows = ["query-id\tcorpus-id\tscore", *(f"q{i}\tc{i}\t1" for i in range(4))]
    (folder / "qrels" / "dev.tsv").write_text("\n".join(rows) + "\n")
    return folder


def test_a_file_is_rated_pairs_and_a_folder_is_retrieval_with_the_prompts_of_training(
    rated: Path, beir: Path
) -> None:
    scored = data_config({"name": "scored", "files": "x", "prompts": {"first": "a: ", "second": "b: "}})
    dev = load_dev(ScoringConfig(dev=str(rated)), scored)
    assert dev is not None
    assert {text[:3] for text in dev.sentences} == {"a: ", "b: "}
    assert dev.metric == "spearman"
    pairs = data_config({"name": "pairs", "files": "x", "prompts": {"anchor": "q: "}})
    found = load_dev(ScoringConfig(dev=str(beir)), pairs)
    assert isinstance(found, DevRetrieval)
    assert sum(text.startswith("q: ") for text in found.sentences) == 4
    assert ScoringConfig(dev=str(rated)).selection == "dev"
    assert load_dev(ScoringConfig()) is None


def test_what_is_no_dev_set_is_refused(rated: Path, beir: Path, tmp_path: Path) -> None:
    (beir / "corpus.jsonl").rename(beir / "other.jsonl")
    same = tmp_path / "same.csv"
    same.write_text("sentence1,sentence2,score\na,b,1\nc,d,1\n")
    for place, says in (
        (beir, "no corpus.jsonl"),
        (tmp_path / "none.csv", "no such file"),
        (same, "are the same"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            load_dev(ScoringConfig(dev=str(place)))
        assert caught.value.key == "evaluation.dev"
    rated.write_text("a,b,c\n1,2,3\n")
    with pytest.raises(UserError, match=r"dev\.csv: no column"):
        load_dev(ScoringConfig(dev=str(rated)))


SOUND = {
    "corpus.jsonl": '{"_id": "c", "text": "a cat"}\n', "queries.jsonl": '{"_id": "q", "text": "a dog"}\n',
    "qrels/dev.tsv": "query-id\tcorpus-id\tscore\nq\tc\t1\n",
}  # fmt: skip
HEAD = "query-id\tcorpus-id\tscore\n"


@pytest.mark.parametrize(("file", "text", "says"), [
    ("corpus.jsonl", "", "corpus.jsonl"), ("corpus.jsonl", '{"_id":', r"jsonl:1: not JSON"),
    ("corpus.jsonl", '{"_id": ["c"], "text": "x"}', "must be strings"), ("queries.jsonl", None, r"queries\.jsonl"),
    ("qrels/dev.tsv", None, r"qrels_dev\.tsv"), ("qrels/dev.tsv", "", "is empty"),
    ("qrels/dev.tsv", HEAD + "q\tc\tnan\n", r"tsv:2: .*score=nan"),
    ("qrels/dev.tsv", HEAD + f"q\tc\t{'9' * 400}\n", r"tsv:2: is no gain"),
    ("qrels/dev.tsv", HEAD + "q\tx\t1\n", "unknown ids"), ("qrels/dev.tsv", HEAD + "q\tc\t0\n", "no document"),
    ("d.csv", "", "is empty"), ("d.csv", "first,second,score\na,b,1\nc,,2\n", "are the same"),
    ("d.csv", "a,b,score\na,b,1\n", "columns called first, second and score"),
    ("d.csv", "first,second,score\na,b,1\nc,d,1e39\n", r"d\.csv:3: the score is"), ("d.xlsx", "x", "unknown kind"),
])  # fmt: skip
def test_a_damaged_dev_set_is_named_in_one_line(
    file: str, text: str | None, says: str, tmp_path: Path
) -> None:
    (tmp_path / "qrels").mkdir()
    for name, sound in {**SOUND, file: text}.items():
        if sound is not None:
            (tmp_path / name).write_text(sound)
    place = tmp_path / file if file.startswith("d.") else tmp_path
    with pytest.raises(UserError, match=says) as caught:
        load_dev(ScoringConfig(dev=str(place)))
    assert "\n" not in str(caught.value)
    assert not (caught.value.key or "").startswith(("data", "split"))  # keys of other texts than these


def test_long_texts_are_scored_and_rows_without_one_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "dev.csv"
    file.write_text(f"first,second,score\n{'a ' * 9000},b,1\nc,d,2\n,e,3\n")
    dev = load_dev(ScoringConfig(dev=str(file)))
    assert dev is not None
    assert len(dev.sentences) == 4
    assert "1 empty" in caplog.text


def test_the_dev_set_of_a_mix_has_the_prompts_of_its_sets(
    beir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sets = {"a": {"name": "pairs", "files": "x", "prompts": {"anchor": "q: ", "positive": "d: "}},
            "b": {"name": "triplets", "files": "y", "prompts": {"anchor": "q: "}},
            "c": {"name": "scored", "files": "z"}}  # fmt: skip
    found = load_dev(ScoringConfig(dev=str(beir)), data_config({"mix": sets}))
    assert found is not None
    assert sum(text.startswith("q: ") for text in found.sentences) == 4
    assert not any(text.startswith("d: ") for text in found.sentences)
    assert "several prompts for the positive" in caplog.text


@pytest.mark.parametrize("kind", ["rated", "beir"])
def test_it_selects_and_stops_early(kind, request, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    place = request.getfixturevalue(kind)
    config = compose_run(
        f"evaluation.dev={place}", "evaluation.every=1", "callbacks.early_stopping=2", "optimizer.lr=1e-9",
        "trainer.max_steps=6", "data.max_length=32",
    )  # fmt: skip
    scores = train(config, tmp_path / "run")
    metric = "dev/spearman" if kind == "rated" else "dev/ndcg@10"
    with (tmp_path / "run" / "metrics.csv").open() as file:
        looks = [float(row[metric]) for row in csv.DictReader(file) if row.get(metric)]
    assert scores[metric] == pytest.approx(max(looks), abs=0.5)
    # At this rate nothing moves: it ends after two looks without a better one.
    assert len(looks) <= 5
    training = json.loads((tmp_path / "run" / "scores.json").read_text())["training"]
    assert training["steps"] < 6
