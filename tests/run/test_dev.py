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
