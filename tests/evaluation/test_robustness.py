"""Noise is what it says, the same every time; scores under noise and by length against their definitions."""

from __future__ import annotations

import json
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from embedlab.errors import UserError
from embedlab.evaluation.core.protocol import check
from embedlab.evaluation.core.suite import suite
from embedlab.evaluation.core.vectors import Vectors
from embedlab.evaluation.probes import robustness
from embedlab.evaluation.probes.noise import NOISES, perturb
from embedlab.evaluation.probes.robustness import Robustness, noisy_pairs, score_lengths
from embedlab.evaluation.sts.sts import STSPairs, evaluate_sts, load_sts
from tests.evaluation.helpers import HashedWords, Lookup, write_sts_folder
from tests.evaluation.real import needs_data

run = Robustness().run
SENTENCE = "The quick brown fox, said Anna, jumps over 13 lazy dogs; it's late."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sts_folder(tmp_path_factory.mktemp("sts"))


@pytest.mark.parametrize("noise", NOISES)
@given(st.text(max_size=60), st.integers(0, 3))
def test_rate_zero_changes_nothing_and_any_text_is_accepted(noise: str, sentence: str, seed: int) -> None:
    assert perturb(sentence, noise, 0.0, seed) == sentence
    assert perturb(sentence, noise, 1.0, seed) == perturb(sentence, noise, 1.0, seed)


@pytest.mark.parametrize("noise", ["typos", "case", "punctuation"])
def test_seed_and_sentence_decide(noise: str) -> None:
    assert perturb(SENTENCE, noise, 0.5, 0) == perturb(SENTENCE, noise, 0.5, 0)
    assert len({perturb(SENTENCE, noise, 0.5, seed) for seed in range(8)}) > 1


def test_noise_is_the_same_in_another_process() -> None:
    code = (
        f"from embedlab.evaluation.probes.noise import perturb; print(perturb({SENTENCE!r}, 'typos', 0.5, 0))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.rstrip("\n") == perturb(SENTENCE, "typos", 0.5, 0)


def distance(a: str, b: str) -> int:
    """Edits (insert, delete, replace, swap of neighbours) from a to b."""
    table = np.zeros((len(a) + 1, len(b) + 1), dtype=int)
    table[:, 0], table[0, :] = range(len(a) + 1), range(len(b) + 1)
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            table[i, j] = min(
                table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a[i - 1] != b[j - 1])
            )
            if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
                table[i, j] = min(table[i, j], table[i - 2, j - 2] + 1)
    return int(table[-1, -1])


def test_each_word_gets_one_slip() -> None:
    for seed in range(50):
        for before, after in zip(
            SENTENCE.split(), perturb(SENTENCE, "typos", 1.0, seed).split(), strict=True
        ):
            letters = max(len(part) for part in before.replace("'", " ").strip(string.punctuation).split())
            expected = 0 if letters < 2 or before.isdigit() else 1
            assert distance(before, after) == expected, (before, after)


def test_the_rate_is_the_share_of_words() -> None:
    words = ["word"] * 4000
    changed = NOISES["typos"](" ".join(words), 0.2, random.Random(0)).split()
    assert np.mean([w != "word" for w in changed]) == pytest.approx(0.2, abs=0.03)


def test_case() -> None:
    assert perturb("Red cats USA a1", "case", 1.0, 0) == "RED CATS usa a1"
    assert perturb(SENTENCE, "case", 0.5, 0).lower() == SENTENCE.lower()


def test_punctuation() -> None:
    for seed in range(20):
        noisy = perturb(SENTENCE, "punctuation", 1.0, seed)
        assert noisy.replace(",", "") == "The quick brown fox said Anna jumps over 13 lazy dogs its late"


@pytest.mark.parametrize(("rate", "left"), [(0.2, 8), (0.25, 7), (0.95, 1), (1.0, 1)])
def test_truncation(rate: float, left: int) -> None:
    sentence = " ".join("abcdefghij")
    assert perturb(sentence, "truncation", rate, 0) == sentence[: 2 * left - 1]
    assert perturb("one", "truncation", 1.0, 0) == "one"
    assert perturb("", "truncation", 1.0, 0) == ""


def test_suite(folder: Path) -> None:
    encoder = HashedWords()
    scores, block = run(encoder, {"data_dir": folder})
    clean = evaluate_sts(HashedWords(), folder)
    assert scores["sts7/spearman"] == pytest.approx(clean["sts7/spearman"])
    for noise in NOISES:
        change = scores[f"sts7_{noise}/spearman"] - scores["sts7/spearman"]
        assert scores[f"sts7_{noise}/change"] == pytest.approx(change)
    # Hashed words know neither case nor punctuation; a typing error or a lost ending costs them words.
    assert scores["sts7_case/change"] == scores["sts7_punctuation/change"] == 0
    assert scores["sts7_typos/change"] < -3
    assert scores["sts7_truncation/change"] < -3
    check(block)
    json.dumps(block)
    assert block["noise_rates"] == dict.fromkeys(NOISES, 0.2)
    assert block["sentences_changed"]["truncation"] == 1
    assert isinstance(suite("robustness"), Robustness)


def test_few_pairs_of_a_length_and_the_share_of_changed_sentences_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"data_dir": folder, "noises": "typos", "tasks": ["stsb"], "noise_rate": 0.1}
    counts = run(HashedWords(), settings)[1]["length_pairs"]
    most = max(counts.values())
    for few, said in ((most, False), (most + 1, True)):
        monkeypatch.setattr(robustness, "_FEW", few)
        _, block = run(HashedWords(), settings)
        for bucket, n in counts.items():
            warned = f"length {bucket} has {n} pairs: its score says little" in block["warnings"]
            assert warned == (n < most or said)
    clean = load_sts("stsb", folder)
    noisy = noisy_pairs(clean, "typos", 0.1, 0)
    sides = [(clean.first, noisy.first), (clean.second, noisy.second)]
    share = np.mean([a != b for before, after in sides for a, b in zip(before, after, strict=True)])
    assert block["sentences_changed"]["typos"] == round(share, 4)
    assert 0 < share < 1


def test_without_noise_there_are_the_lengths_alone(folder: Path) -> None:
    scores, block = run(HashedWords(), {"data_dir": folder, "noises": []})
    whole, _ = run(HashedWords(), {"data_dir": folder, "noises": "typos"})
    assert block["noise_rates"] == {}
    assert {k: v for k, v in whole.items() if "typos" not in k} == scores
    assert any(k.startswith("length_") for k in scores)


def test_more_noise_costs_more(folder: Path) -> None:
    settings = {"data_dir": folder, "noises": "typos", "tasks": ["stsb"]}
    values = [
        run(HashedWords(), {**settings, "noise_rate": rate})[0]["stsb_typos/change"] for rate in (0, 0.1, 0.6)
    ]
    assert values[0] == 0
    assert values[0] > values[1] > values[2]


def test_noise_falls_on_both_sides(folder: Path) -> None:
    pairs = load_sts("stsb", folder)
    noisy = noisy_pairs(pairs, "truncation", 0.5, 0)
    for before, after in ((pairs.first, noisy.first), (pairs.second, noisy.second)):
        assert all(a.startswith(b) and a != b for a, b in zip(before, after, strict=True))
    assert noisy.gold is pairs.gold


def test_punctuation_marks_count_as_tokens() -> None:
    pairs = STSPairs("stsb", "test", "raw", ["a b c d e f, g (h)."], ["a"], np.array([1.0]), None, "by hand")
    _, counts = score_lengths(Vectors(HashedWords(), ["a b c d e f, g (h).", "a"]), [pairs])
    assert counts["11-20"] == 1, "8 words and 4 marks"


def test_length_buckets() -> None:
    rng = np.random.default_rng(0)

    def text(words: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, 50, words))

    lengths = [(3, 10), (11, 2), (20, 20), (21, 1), (32, 5), (33, 40), (40, 1), (2, 90)]
    first, second = [text(a) for a, _ in lengths], [text(b) for _, b in lengths]
    gold = rng.uniform(0, 5, len(lengths))
    pairs = STSPairs("stsb", "test", "raw", first, second, gold, None, "by hand")
    again = STSPairs("sts12", "test", "raw", first, second, gold[::-1], None, "the same pairs")
    sick = STSPairs("sickr", "test", "raw", ["a"], ["b"], np.array([1.0]), None, "another scale")
    vectors = Vectors(HashedWords(), [*first, *second, "a", "b"])
    scores, counts = score_lengths(vectors, [pairs, again, sick])
    assert counts == {"1-10": 1, "11-20": 2, "21-32": 2, "33+": 3}
    assert set(scores) == {"length_11-20/spearman", "length_21-32/spearman", "length_33+/spearman"}
    a, b = vectors.take(first[5:]).double(), vectors.take(second[5:]).double()
    cosine = (a * b).sum(1) / a.norm(dim=1) / b.norm(dim=1)
    assert scores["length_33+/spearman"] == pytest.approx(100 * stats.spearmanr(cosine, gold[5:]).statistic)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noises": ["typos", "static"]}, "noises=static"),
        ({"noise_rate": 1.5}, r"noise_rate=1\.5"),
        ({"noise_rate": "much"}, "noise_rate=much"),
        ({"noise_rate": {"statik": 0.1}}, "noises=statik"),
        ({"tasks": ["mr"]}, "tasks=mr"),
    ],
)
def test_bad_settings(folder: Path, settings: dict[str, Any], message: str) -> None:
    encoder = HashedWords()
    with pytest.raises(UserError, match=message):
        run(encoder, {"data_dir": folder, **settings})
    assert encoder.calls == [], "before the first encoding"


def test_rates_by_noise(folder: Path) -> None:
    settings = {"data_dir": folder, "tasks": ["stsb"], "noise_rate": {"typos": 0.0}}
    scores, block = run(HashedWords(), settings)
    assert scores["stsb_typos/change"] == 0
    assert scores["stsb_truncation/change"] != 0
    assert block["noise_rates"] == {"typos": 0.0, "case": 0.2, "punctuation": 0.2, "truncation": 0.2}


def test_real_pairs_fill_every_bucket() -> None:
    folder = needs_data("sts")
    tasks = [load_sts(task, folder) for task in ("sts12", "sts13", "stsb")]
    table = {s: (float(len(s)), 1.0) for p in tasks for side in (p.first, p.second) for s in side}
    scores, counts = score_lengths(Vectors(Lookup(table), table), tasks)
    assert len(scores) == 4
    assert counts["33+"] > 30, "enough that no warning is due"


@given(st.lists(st.text("ab", min_size=1), min_size=1, max_size=5), st.integers(0, 99))
def test_a_comma_stands_between_words_only(words: list[str], seed: int) -> None:
    noisy = NOISES["punctuation"](" ".join(words), 10.0, random.Random(seed))  # every gap gets its comma
    assert noisy.count(",") == len(words) - 1
    assert not noisy.endswith(",")
