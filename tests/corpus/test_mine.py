"""Mined negatives are those of a plain loop over all texts, whatever the blocks, and a stopped run goes on to them."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedlab.config.mine import FILTERS, FORMATS, MineSettings, check_output
from embedlab.corpus import mine, mined, texts
from embedlab.corpus.mine import Corpus, Judge, Miner, folded, write_pairs
from embedlab.corpus.mined import write_mined
from embedlab.corpus.texts import StoredTexts, UnitVectors, write_texts
from embedlab.errors import UserError
from tests.evaluation.helpers import HashedWords

WORDS = ["red", "blue", "old", "new", "cat", "dog", "bird", "ran", "sat", "flew", "Cat", "", "①", "1"]


@cache
def words(sentence: str) -> np.ndarray:
    vector: np.ndarray = HashedWords(16).encode([sentence])[0]
    return vector


class Moved:
    """`HashedWords`; with a large `shift` texts are alike and queries opposed to them."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = np.float32(shift)

    def encode(self, sentences: list[str]) -> np.ndarray:
        return np.stack([words(s) + (-self.shift if s.endswith("?") else self.shift) for s in sentences])

    def cosine(self, a: str, b: str) -> float:
        u, v = self.encode([a, b]).astype(np.float64)
        scale = np.linalg.norm(u) * np.linalg.norm(v)
        return float(u @ v / scale) if scale else 0.0


def tables(seed: int, queries: int, corpus: int) -> tuple[list[tuple[str, str]], list[str]]:
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 4))) or "x"

    pairs = [(f"{text()}?", text()) for _ in range(queries)]
    pairs += [(draw.choice(pairs)[0], text()) for _ in range(queries // 3)]  # several positives of a query
    return [(q, p) for q, p in pairs if p.strip()], [t for _ in range(corpus) if (t := text()).strip()]


def run(
    folder: Path, pairs: list[tuple[str, str]], corpus: list[str], of: MineSettings, block: int = 1000,
    encoder: Any = None, teacher: Any = None,
) -> Miner:  # fmt: skip
    folder.mkdir(exist_ok=True)
    stored = write_pairs(folder / "texts", lambda: pairs, lambda: corpus)

    def judge(name: str, by: Any) -> Judge:
        (folder / name).mkdir(exist_ok=True)
        queries = UnitVectors(folder / name / "queries", stored.queries)
        rows = UnitVectors(folder / name / "corpus", stored.corpus)
        queries.encode(by)
        rows.encode(by)
        return Judge(queries, rows, rows.take)

    model = judge("model", encoder or Moved())
    other = None if teacher is None else judge("teacher", teacher)
    candidates = Corpus(model.positives, torch.device("cpu"))
    return Miner(folder / f"mined{block}", stored, candidates, model, of, block, other)


def expected(
    pairs: list[tuple[str, str]], corpus: list[str], of: MineSettings, encoder: Moved, judge: Moved
) -> Iterator[tuple[str, list[str], float]]:
    """Query, its negatives and the lowest score of a positive, by the specification's steps in plain loops."""
    every = list(dict.fromkeys([*(p for _, p in pairs), *corpus]))

    for query in dict.fromkeys(q for q, _ in pairs):
        own = [p for q, p in pairs if q == query]
        same = {folded(t) for t in (query, *own)}
        ranked = sorted(every, key=lambda t: (-round(encoder.cosine(query, t), 5), every.index(t)))
        rest = [t for t in ranked if folded(t) not in same][of.range_min : of.last]
        lowest = min(judge.cosine(query, p) for p in own)
        kept = [t for t in rest if passes(judge.cosine(query, t), lowest, of)]
        yield query, kept[: of.negatives] if of.sampling == "top" else kept, lowest


def passes(score: float, lowest: float, of: MineSettings) -> bool:
    limits = [
        math.inf if of.max_score is None else of.max_score,
        math.inf if of.absolute_margin is None else lowest - of.absolute_margin,
        math.inf if of.relative_margin is None else lowest - abs(lowest) * of.relative_margin,
    ]
    return score <= min(limits) + 1e-9 and (of.min_score is None or score >= of.min_score - 1e-9)


def found(miner: Miner) -> dict[str, list[str]]:
    result = {}
    for queries, block in miner.blocks():
        at = np.concatenate([[0], np.cumsum(block.counts)])
        for i, query in enumerate(queries):
            rows = block.rows[at[i] : at[i + 1]]
            result[miner.pairs.queries[query]] = miner.candidates.texts(rows.tolist())
    return result


cases = st.fixed_dictionaries(
    {
        "negatives": st.integers(1, 4),
        "range_min": st.integers(0, 3),
        "range_max": st.sampled_from([None, 9, 30]),
    },
    optional={
        "max_score": st.sampled_from([-0.5, 0.31, 0.77]),
        "min_score": st.sampled_from([-0.61, 0.13]),
        "absolute_margin": st.sampled_from([0.0, 0.0517]),
        "relative_margin": st.sampled_from([0.0, 0.0519, 0.903]),
    },
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=cases, seed=st.integers(0, 999), block=st.integers(1, 9), shift=st.sampled_from([0.0, 0.4, 3.0]),
    taught=st.booleans(), copies=st.sampled_from([0, 40]),
)  # fmt: skip
def test_what_is_mined_is_what_a_plain_loop_finds(
    tmp_path_factory: pytest.TempPathFactory,
    values: dict[str, Any],
    seed: int,
    block: int,
    shift: float,
    taught: bool,
    copies: int,
) -> None:
    of = MineSettings(**values, teacher=taught, scores=True)
    pairs, corpus = tables(seed, 5, 12)
    corpus += [pairs[0][1] + " " * i for i in range(1, copies + 1)]  # no other text than a positive
    encoder, teacher = Moved(shift), Moved(0.2) if taught else None
    miner = run(tmp_path_factory.mktemp("work"), pairs, corpus, of, block, encoder, teacher)
    by = teacher or encoder
    got = found(miner)
    for query, negatives, lowest in expected(pairs, corpus, of, encoder, by):
        # Of texts with the same score a plain loop may take another: what is compared is the score of each place.
        scores = [[encoder.cosine(query, t) for t in some] for some in (got[query], negatives)]
        assert scores[0] == pytest.approx(scores[1], abs=2e-5), (query, lowest)


def test_a_negative_lowest_positive_asks_for_negatives_below_it(tmp_path: Path) -> None:
    # With a negative score, score * (1 - margin) would lie above it (sentence-transformers' issue 3819).
    of = MineSettings(negatives=2, relative_margin=0.2)
    pairs, corpus = tables(3, 4, 20)
    miner = run(tmp_path / "w", pairs, corpus, of, encoder=Moved(2.0))
    ((queries, block),) = miner.blocks()
    assert (block.positives < 0).all()
    at = np.concatenate([[0], np.cumsum(block.counts)])
    assert at[-1] > 0
    for query in queries:
        own = block.positives[miner.pairs.bounds[query] : miner.pairs.bounds[query + 1]]
        assert (block.scores[at[query] : at[query + 1]] <= 1.2 * own.min() + 1e-6).all()


@pytest.mark.parametrize("sampling", ["top", "random"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_blocks_change_nothing(tmp_path: Path, sampling: Any, suffix: str) -> None:
    of = MineSettings(negatives=3, range_max=12, sampling=sampling, seed=5)
    pairs, corpus = tables(1, 30, 60)
    files = []
    for block in (7, 1000):
        files.append(tmp_path / f"{block}{suffix}")
        write_mined(files[-1], run(tmp_path / f"{block}", pairs, corpus, of, block), "triplets", True)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_sample_depends_on_the_seed_and_the_query_alone(tmp_path: Path) -> None:
    pairs, corpus = tables(1, 30, 60)

    def sample(name: str, pairs: list[tuple[str, str]], seed: int) -> dict[str, list[str]]:
        of = MineSettings(negatives=2, range_max=12, sampling="random", seed=seed)
        return found(run(tmp_path / name, pairs, corpus, of))

    first = sample("a", pairs, 1)
    assert first == sample("b", pairs[::-1], 1)
    assert first != sample("c", pairs, 2)
    top = found(run(tmp_path / "d", pairs, corpus, MineSettings(negatives=12)))
    assert all(set(mine) <= set(top[query]) for query, mine in first.items())
    assert any(mine != top[query][:2] for query, mine in first.items())


class Stopped(BaseException):
    """As SIGKILL: nothing after it runs."""


def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "PART", 16)
    of = MineSettings(negatives=2, sampling="random", range_max=8)
    pairs, corpus = tables(4, 20, 40)
    whole = tmp_path / "whole.jsonl"
    write_mined(whole, run(tmp_path / "w", pairs, corpus, of, 8), "triplets", True)
    encoded: list[str] = []

    class Counting(Moved):
        def encode(self, sentences: list[str]) -> np.ndarray:
            encoded.extend(sentences)
            return super().encode(sentences)

    steps = 0
    real = {module: module.whole_file for module in (texts, mine, mined)}
    out = tmp_path / "out.jsonl"
    while not out.exists():
        left = 1  # one more part a run
        steps += 1

        def counted(path: Path, module: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Stopped
            left -= path != out
            return real[module](path)

        for module in real:
            monkeypatch.setattr(module, "whole_file", lambda path, module=module: counted(path, module))
        try:
            write_mined(out, run(tmp_path / "again", pairs, corpus, of, 8, Counting()), "triplets", True)
        except Stopped:
            assert not out.exists()
    assert out.read_bytes() == whole.read_bytes()
    assert steps > 5
    assert sorted(set(encoded)) == sorted({*(q for q, _ in pairs), *(p for _, p in pairs), *corpus})
    assert len(encoded) <= len(set(encoded)) + 16 * steps  # each stop costs a part


def test_each_format(tmp_path: Path) -> None:
    pairs = [("red cat?", "red cat"), ("red cat?", "old red cat"), ("blue dog?", "blue dog ran")]
    corpus = ["red dog", "blue bird", "red  CAT"]
    miner = run(tmp_path / "w", pairs, corpus, MineSettings(negatives=4))
    rows = {}
    for kind in FORMATS:
        for scores in (False, True):
            out = tmp_path / f"{kind}{scores}.jsonl"
            write_mined(out, miner, kind, scores)
            rows[kind, scores] = [json.loads(line) for line in out.read_text().splitlines()]
    few = [r for r in rows["lists", True] if r["anchor"] == "red cat?"]
    assert [r["positive"] for r in few] == ["red cat", "old red cat"]
    assert all("red  CAT" not in r["negatives"] for r in few)  # the positive, but for case and spaces
    assert all(len(r["scores"]) == 1 + len(r["negatives"]) for r in rows["lists", True])
    assert [r["positive"] for r in rows["tuples", False]] == ["blue dog ran"]  # the other has three only
    assert set(rows["tuples", True][0]) == {
        "anchor", "positive", *(f"negative_{i}" for i in range(1, 5)), *(f"score_{i}" for i in range(5)),
    }  # fmt: skip
    assert {r["score"] for r in rows["scored", False]} == {0.0, 1.0}
    assert len(rows["triplets", False]) == sum(len(r["negatives"]) for r in rows["lists", False])
    assert rows["triplets", True][0]["score_0"] == few[0]["scores"][0]


def test_statistics_are_those_of_the_rows(tmp_path: Path) -> None:
    pairs, corpus = tables(2, 20, 30)
    of = MineSettings(negatives=3, relative_margin=0.05)
    out = tmp_path / "out.jsonl"
    statistics = write_mined(out, run(tmp_path / "w", pairs, corpus, of, 7), "lists", True)
    told = statistics.to_dict()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    by_query = {r["anchor"]: r["scores"][1:] for r in rows}
    negatives = [s for scores in by_query.values() for s in scores]
    differences = [r["scores"][0] - s for r in rows for s in r["scores"][1:]]
    for name, values in (("negative", negatives), ("difference", differences)):
        assert told[name]["count"] == len(values)
        assert told[name]["mean"] == pytest.approx(np.mean(values), abs=1e-5)
        assert told[name]["median"] == pytest.approx(np.median(values), abs=1e-5)
        assert told[name]["max"] == pytest.approx(max(values), abs=1e-5)
    assert told["positive"]["count"] == len(set(pairs))
    assert told["rows"] == len(rows)
    queries = {q for q, _ in pairs}
    assert told["short"] == sum(len(by_query.get(q, ())) < 3 for q in queries)
    kept = told["candidates"] - sum(told["removed"][name] for name in FILTERS[1:])
    assert len(negatives) <= kept
    assert bool(statistics.warnings()) == (told["removed"]["relative_margin"] > told["candidates"] / 2)


def test_any_text_is_stored(tmp_path: Path) -> None:
    some = ["", "naïve\ncafé", "x" * 10_000, "\r\n", "한국어"]
    write_texts(tmp_path / "t", some)
    stored = StoredTexts(tmp_path / "t")
    assert list(stored) == some == stored[:]
    assert stored[-1:] == some[-1:]
    write_texts(tmp_path / "none", [])
    assert len(StoredTexts(tmp_path / "none")) == 0


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"negatives": 9, "range_min": 5, "range_max": 10}, "ranks 5 to 10 hold 5 (negatives=9)"),
        ({"relative_margin": 1.5}, "out of range (relative_margin=1.5). Fix: 0 to 1"),
        ({"absolute_margin": -0.1}, "absolute_margin=-0.1"),
        ({"max_score": float("nan")}, "max_score=nan"),
        ({"min_score": "x"}, "min_score=x"),
        ({"max_score": True}, "max_score=True"),
        ({"negatives": 0}, "negatives=0"),
        ({"range_min": -1}, "range_min=-1"),
        ({"range_max": 2.5}, "range_max=2.5"),
        ({"sampling": "best"}, "sampling=best"),
        ({"teacher": True}, "a teacher changes nothing"),
    ],
)
def test_settings_that_make_no_sense(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        MineSettings(**values)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [("x.txt", "triplets", ".jsonl"), ("x.csv", "lists", "tuples"), ("x.csv", "no", "scored")],
)
def test_outputs_that_cannot_be(name: str, kind: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_output(Path(name), kind)


def test_nothing_left_is_one_line_and_no_file(tmp_path: Path) -> None:
    miner = run(tmp_path / "w", [("a?", "b")], ["c"], MineSettings(max_score=-1.0))
    with pytest.raises(UserError, match="no row is left of 1 queries"):
        write_mined(tmp_path / "out.csv", miner, "triplets", False)
    assert not (tmp_path / "out.csv").exists()
    alone = run(tmp_path / "u", [("a?", "b")], [], MineSettings(relative_margin=0.1))  # no other text at all
    with pytest.raises(UserError, match="no row is left of 1 queries"):
        write_mined(tmp_path / "out.csv", alone, "triplets", False)
    with pytest.raises(UserError, match="has no pair"):
        run(tmp_path / "v", [], ["c"], MineSettings())


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    pairs, corpus = tables(2, 5, 9)
    for name in ("model/corpus/000000.npy", "mined1000/000000000.npz"):
        list(run(tmp_path / "w", pairs, corpus, MineSettings()).blocks())
        file = tmp_path / "w" / name
        file.write_bytes(file.read_bytes()[:40])
        if "model" in name:
            (tmp_path / "w/mined1000/000000000.npz").unlink()
        miner = run(tmp_path / "w", pairs, corpus, MineSettings())
        with pytest.raises(UserError, match=f"{file.name}: is damaged"):
            list(miner.blocks())
        file.unlink()


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PART", 256)
    of = MineSettings(negatives=3, relative_margin=0.01)

    def peak(rows: int) -> int:
        """Bytes at most while 64 queries are mined, their texts and vectors being on the disk."""
        draw = np.random.default_rng(0)

        class Drawn:
            def encode(self, sentences: list[str]) -> np.ndarray:
                return draw.normal(size=(len(sentences), 64)).astype(np.float32)

        pairs = [(f"query {i}?", f"text {i}") for i in range(64)]
        miner = run(tmp_path / str(rows), pairs, [f"more {i}" for i in range(rows)], of, 16, Drawn())
        tracemalloc.start()
        for _ in miner.blocks():
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(20_000) - peak(2_000) < 18_000 * 64 * 4 / 10  # of the vectors that there are more
