"""The suite of emoji names: an encoder that knows the translations, and one that knows nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("emoji")
from embedlab.data.packages import EMOJI_LANGUAGES
from embedlab.evaluation import suite
from embedlab.evaluation.bitext.emoji import held_out_names


class Dictionary:
    """Every name to the one-hot vector of its emoji; of two emoji of one name to the first."""

    def __init__(self, known: Sequence[str]) -> None:
        self.rows: dict[str, int] = {}
        for language, names in held_out_names().items():
            for i, name in enumerate(names):
                if language in known:
                    self.rows.setdefault(name, i)
        self.width = 1 + len(held_out_names()["en"])

    def encode(self, sentences: Sequence[str], **options: object) -> NDArray[np.float32]:
        return np.eye(self.width, dtype=np.float32)[[self.rows.get(s, self.width - 1) for s in sentences]]


def test_an_encoder_that_knows_translations() -> None:
    scores, protocol = suite("emoji").run(Dictionary(EMOJI_LANGUAGES), {})
    assert scores["emoji/mean"] > 95  # some names stand for two emoji in a language
    assert scores["emoji/related"] > 0.95
    assert scores["emoji/unrelated"] < 0.02
    assert scores["emoji/rankme"] > 190
    assert {key.split("/")[0] for key in scores} == {
        "emoji",
        *(f"emoji-{x}" for x in EMOJI_LANGUAGES if x != "en"),
    }
    assert protocol["data"]["emoji"]["names"] == len(held_out_names()["en"])


def test_each_language_is_scored_by_itself() -> None:
    scores, _ = suite("emoji").run(Dictionary(("en", "de")), {})
    assert scores["emoji-de/mean"] > 95
    assert scores["emoji-zh/mean"] < 2
    languages = [x for x in EMOJI_LANGUAGES if x != "en"]
    assert scores["emoji/mean"] == pytest.approx(np.mean([scores[f"emoji-{x}/mean"] for x in languages]))
    assert scores["emoji/mean"] == pytest.approx((scores["emoji/forward"] + scores["emoji/backward"]) / 2)


def test_an_encoder_that_says_the_same_of_everything() -> None:
    scores, _ = suite("emoji").run(Dictionary(()), {})
    assert scores["emoji/mean"] == pytest.approx(100 / len(held_out_names()["en"]))
    assert scores["emoji/unrelated"] == pytest.approx(1)
    assert scores["emoji/rankme"] == pytest.approx(1, abs=1e-3)
