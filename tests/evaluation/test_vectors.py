from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import embedlab
from embedlab.evaluation.core.vectors import SharedVectors, Vectors, embed, encode, unique
from tests.evaluation.helpers import HashedWords


def test_distinct_texts_keep_their_order() -> None:
    texts, position = unique(["b", "a", "b", "c", "a"])
    assert texts == ["b", "a", "c"]
    assert [position[t] for t in ("a", "b", "c")] == [1, 0, 2]


def test_vectors_are_looked_up_by_text() -> None:
    encoder = HashedWords()
    vectors = Vectors(encoder, ["red cat", "blue dog", "red cat"])
    assert encoder.calls == [["red cat", "blue dog"]]
    expected = encoder.encode(["blue dog", "red cat", "blue dog"])
    assert np.array_equal(vectors.take(["blue dog", "red cat", "blue dog"]).numpy(), expected)


@pytest.mark.parametrize("kind", [np.float64, np.float16, torch.float64, torch.bfloat16])
def test_any_float_type_becomes_float32(kind: object) -> None:
    class Typed:
        def encode(self, sentences: list[str]) -> object:
            x = torch.arange(6.0).reshape(2, 3)
            return x.to(kind) if isinstance(kind, torch.dtype) else x.numpy().astype(kind)

    vectors = encode(Typed(), ["a", "b"])
    assert vectors.dtype == torch.float32
    assert vectors.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_texts_of_the_same_tokens_are_encoded_once(tiny: Callable[..., Path]) -> None:
    """An uncased tokenizer makes SentEval's lower-cased tokens and the raw text one row: STS costs half."""
    encoder = embedlab.load(tiny("bert"))
    texts = ["A man is playing.", "a man is playing .", "Dogs run.", "A man  is playing.", "dogs run ."]
    seen: list[int] = []
    encoder.backbone.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    together = encoder.encode(texts)
    assert seen == [2]
    one_by_one = np.stack([encoder.encode(text) for text in texts])
    np.testing.assert_allclose(together, one_by_one, atol=1e-6)
    assert np.array_equal(together[0], together[3])
    assert encoder.encode([]).shape == (0, encoder.dim)


class WithBar(HashedWords):
    bars = 0

    def encode(self, sentences: Sequence[str], show_progress_bar: bool = False) -> np.ndarray:
        self.bars += show_progress_bar
        return super().encode(sentences)


@pytest.mark.parametrize("terminal", [True, False])
def test_many_sentences_have_a_progress_bar_on_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr("embedlab.evaluation.core.vectors.LONG", 3)
    encoder = WithBar()
    for n, bars in ((2, 0), (3, int(terminal))):
        encode(encoder, ["a cat"] * n)
        assert encoder.bars == bars
    assert encode(HashedWords(), ["a cat"] * 3).shape[0] == 3, "an encoder without one"


def test_shared_vectors_encode_a_text_once_over_tasks() -> None:
    encoder = HashedWords(8)
    texts = {"one": ["a", "b", "a"], "two": ["c", "b"], "three": ["b", "a", "c"]}
    shared = SharedVectors(encoder, texts)
    for task in texts:
        assert torch.equal(shared.take(task), embed(HashedWords(8), texts[task]))
    assert encoder.calls == [["a", "b"], ["c"]]


def test_shared_vectors_keep_only_what_is_still_needed() -> None:
    shared = SharedVectors(HashedWords(8), {"one": ["a", "b"], "two": ["b"], "three": ["c"]})
    shared.take("one")
    assert set(shared._kept) == {"b"}
    shared.take("two")
    assert not shared._kept


def test_cosines_of_many_pairs_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {i}" for i in range(50)]
    rows = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))

    class Known:
        def encode(self, sentences: list[str]) -> torch.Tensor:
            return rows[[texts.index(text) for text in sentences]]

    vectors = Vectors(Known(), texts)
    whole = vectors.cosine(texts[:49], texts[1:])
    monkeypatch.setattr("embedlab.evaluation.core.vectors._AT_ONCE", 8)
    assert torch.equal(vectors.cosine(texts[:49], texts[1:]), whole)
    assert vectors.cosine([], []).shape == (0,)


def test_no_sentences_have_no_vectors_of_the_encoders_width() -> None:
    class Wide:
        def encode(self, sentences: Sequence[str]) -> np.ndarray:
            return np.zeros((len(sentences), 5))

    assert encode(Wide(), []).shape == (0, 5)
