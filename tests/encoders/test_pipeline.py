"""One pipeline from texts to vectors: what it gives without padding is what padded rows give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embedlab
from embedlab.config.template import Template
from embedlab.encoders import pipeline
from embedlab.encoders.base import Encoder
from embedlab.encoders.pipeline import ahead, packed_batches
from embedlab.encoders.token_rows import TokenRows
from embedlab.encoders.twin import TwinEncoder
from embedlab.errors import UserError
from embedlab.kernels import inference
from embedlab.kernels.available import SHORT_LONGEST
from tests.encoders.test_encoder import MASKED, TEXTS, build

Tiny = Callable[..., Path]
PACKED = ("bert", "roberta", "xlm-roberta", "distilbert")
POOLINGS: list[tuple[str, Template | None]] = [
    ("cls", None), ("mean", None), ("last", None), ("first_last", None), ("cls_mlp", None), ("mask", MASKED),
]  # fmt: skip
WORDS = ("a", "cat", "sat", "on", "the", "mat", "and", "saw", "a", "dog", "run", "over")


def lines(n: int) -> list[str]:
    """Texts of different lengths, some of them alike."""
    return [
        " ".join(WORDS[i % 5 : i % 5 + 1 + i % 9] * (1 + i % 3)) + f" {i % (n - n // 4)}" for i in range(n)
    ]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows are packed off a card too; the number of rows of each forward pass."""
    seen: list[int] = []
    states = inference.Weights.states

    def counted(self: Any, rows: Any, **options: Any) -> Any:
        seen.append(rows.rows)
        return states(self, rows, **options)

    monkeypatch.setattr(inference, "applies", lambda backbone, device: inference.readable(backbone))
    monkeypatch.setattr(inference.Weights, "states", counted)
    return seen


def padded(encoder: Encoder, texts: list[str], **options: Any) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(encoder), "reader", lambda self, skip: None)
        found: np.ndarray = encoder.encode(texts, **options)
    return found


@pytest.mark.parametrize("model_type", PACKED)
def test_packed_vectors_are_the_padded_ones(tiny: Tiny, model_type: str, packed: list[int]) -> None:
    for pooling, template in POOLINGS:
        encoder = build(tiny(model_type), pooling, template)
        want = padded(encoder, TEXTS)
        assert packed == []
        for options in ({}, {"batch_size": 3}, {"batch_size": 1}, {"normalize": True}):
            scale = np.linalg.norm(want, axis=1, keepdims=True) if "normalize" in options else 1.0
            np.testing.assert_allclose(encoder.encode(TEXTS, **options), want / scale, rtol=0, atol=2e-5)
        assert packed[:2] == [len(TEXTS), 3]
        packed.clear()


def test_long_rows_and_windows(tiny: Tiny, packed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = build(tiny("bert", max_positions=300))
    texts = [*lines(150), "word " * 290, "a cat " * 140, *lines(30)]
    want = padded(encoder, texts)
    np.testing.assert_allclose(encoder.encode(texts), want, rtol=0, atol=2e-5)
    distinct = len({tuple(row) for row in encoder.tokenization.ids(texts)})
    assert packed == [2, distinct - 2]  # rows that another kernel attends to are apart
    monkeypatch.setattr(pipeline, "_WINDOWS", {"cpu": (7, 1 << 20)})
    packed.clear()
    np.testing.assert_allclose(encoder.encode(texts), want, rtol=0, atol=2e-5)
    assert sum(packed) == distinct
    assert max(packed) <= 7


def test_rows_that_cannot_be_packed_are_padded(
    tiny: Tiny, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = build(tiny("bert", max_positions=300))
    texts = ["a cat " * 140, *TEXTS]
    want = padded(encoder, texts)
    monkeypatch.setattr(inference.Weights, "longest", SHORT_LONGEST)
    np.testing.assert_allclose(encoder.encode(texts), want, rtol=0, atol=2e-5)
    assert packed == [len(TEXTS)]


def test_the_pooling_leaves_out_a_prompt(tiny: Tiny, packed: list[int]) -> None:
    for pooling in ("mean", "cls", "first_last"):
        encoder = build(tiny("bert"), pooling)
        ids = encoder.tokenization.ids(TEXTS)
        got = encoder.encode_ids(ids, skip=2).numpy()
        want = []
        for row in ids:
            tokens = encoder.tokenization.pad([row])
            with torch.no_grad():
                want.append(encoder(**tokens, skip=2)[0])
        found = [i for i, row in enumerate(ids) if len(row) > 2]
        np.testing.assert_allclose(got[found], torch.stack(want)[found], rtol=0, atol=2e-5)
    assert packed


def test_towers(tiny: Tiny, packed: list[int]) -> None:
    towers = [build(tiny("bert", seed=seed)) for seed in range(2)]
    twin = TwinEncoder(towers, [0.3, 0.7])
    want = padded(twin, TEXTS)
    assert packed == []
    np.testing.assert_allclose(twin.encode(TEXTS), want, rtol=0, atol=2e-5)
    assert packed == [len(TEXTS)] * 2


def _hook(encoder: Any) -> None:
    encoder.backbone.blocks[0].register_forward_hook(lambda m, args, out: None)


def _watch(encoder: Any) -> None:
    encoder.register_forward_pre_hook(lambda m, args: None)


def _pool(encoder: Any) -> None:
    encoder.pooling.forward = encoder.pooling.forward


def _replace(encoder: Any) -> None:
    attention = encoder.backbone.blocks[0].attention.self
    attention.query = torch.nn.Sequential(attention.query)


@pytest.mark.parametrize("change", [_hook, _watch, _pool, _replace])
def test_what_is_watched_or_built_otherwise_is_padded(
    tiny: Tiny, packed: list[int], change: Callable[[Any], None]
) -> None:
    encoder = build(tiny("bert"))
    want = encoder.encode(TEXTS)
    assert packed
    packed.clear()
    change(encoder)
    np.testing.assert_allclose(encoder.encode(TEXTS), want, rtol=0, atol=2e-5)
    assert packed == []


def test_weights_are_those_of_the_call(tiny: Tiny, packed: list[int]) -> None:
    encoder = build(tiny("distilbert"))
    before = encoder.encode(TEXTS)
    with torch.no_grad():
        for p in encoder.parameters():
            p.mul_(1.5)
    after = encoder.encode(TEXTS)
    assert np.abs(after - before).max() > 1e-2
    np.testing.assert_allclose(after, padded(encoder, TEXTS), rtol=0, atol=2e-5)


def test_half_precision_is_near(tiny: Tiny, packed: list[int]) -> None:
    encoder = build(tiny("bert"))
    exact = encoder.encode(TEXTS, normalize=True)
    for dtype, least in (("bfloat16", 0.999), ("float16", 0.9999), ("float32", 0.999999)):
        vectors = encoder.encode(TEXTS, normalize=True, dtype=dtype)
        assert vectors.dtype == np.float32
        assert (vectors * exact).sum(1).min() > least
    assert np.abs(encoder.encode(TEXTS, dtype="bfloat16") - encoder.encode(TEXTS)).max() > 1e-5


def test_repeats_and_progress(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = build(tiny("bert"))
    monkeypatch.setattr(pipeline, "_WINDOWS", {"cpu": (16, 1 << 20)})
    texts = [*lines(100), *lines(100)]
    want = np.concatenate([encoder.encode(lines(100))] * 2)
    told: list[int] = []
    got = encoder.encode(texts, on_batch=lambda done, of: told.append(done))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    assert told == sorted(told)
    assert told[-1] == len(texts)


def test_an_error_while_tokenising_ends_the_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = build(tiny("bert"))
    monkeypatch.setattr(pipeline, "_WINDOWS", {"cpu": (16, 1 << 20)})
    monkeypatch.setattr("embedlab.encoders.tokenization.LONGEST", 1000)
    texts = lines(100)
    texts[90] = "x" * 1001
    with pytest.raises(UserError, match="could stop reading"):
        encoder.encode(texts)
    assert not [t for t in threading.enumerate() if t.name.startswith("ahead")]
    assert encoder.encode(texts[:90]).shape == (90, 32)


def test_an_error_while_encoding_ends_the_thread(tiny: Tiny) -> None:
    encoder = build(tiny("bert"))

    def fail(done: int, of: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        encoder.encode(lines(100), on_batch=fail)
    assert not [t for t in threading.enumerate() if t.name.startswith("ahead")]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_ahead_is_in_order_bounded_and_passes_errors_on(threads: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            taken.append(i)
            yield i

    def call(i: int) -> int:
        if i == 18:
            raise KeyError
        return -i

    found = ahead(call, items(), threads)
    for i in range(18):
        assert next(found) == -i
        assert taken[-1] <= i + pipeline._AHEAD
    with pytest.raises(KeyError):
        next(found)
    assert list(ahead(call, [], threads)) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_a_tokenizer_that_cuts(
    tiny: Tiny, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = build(tiny("bert"))
    want = encoder.encode(lines(300))
    monkeypatch.setattr(pipeline, "_WINDOWS", {"cpu": (5, 1 << 20)})
    monkeypatch.setattr(pipeline, "_THREADS", {"cpu": threads})
    backend = encoder.tokenizer.backend_tokenizer
    for _ in range(5):
        backend.enable_truncation(3)
        backend.enable_padding(length=9)
        np.testing.assert_allclose(encoder.encode(lines(300)), want, rtol=0, atol=2e-5)


@given(
    lengths=st.lists(st.integers(0, 300), max_size=60),
    size=st.one_of(st.none(), st.integers(1, 20)),
    tokens=st.one_of(st.none(), st.integers(1, 400)),
)
def test_batches_hold_each_row_once(lengths: list[int], size: int | None, tokens: int | None) -> None:
    array = np.array(lengths, dtype=np.int64)
    batches = [b.tolist() for b in packed_batches(array, size, tokens)]
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    most = tokens or pipeline._FEATURES // 768 * (1 + pipeline._OVER)
    for batch in batches:
        own = array[batch]
        assert list(own) == sorted(own, reverse=True)
        assert (own.max() > SHORT_LONGEST) == (own.min() > SHORT_LONGEST)
        if size is not None:
            assert 0 < len(batch) <= size
        else:
            assert own.sum() < most + own.max() + 1


@given(
    rows=st.lists(st.lists(st.integers(5, 99), max_size=9), max_size=12),
    prefix=st.lists(st.integers(1, 3), max_size=2),
    suffix=st.lists(st.integers(1, 3), max_size=2),
    limit=st.one_of(st.none(), st.integers(0, 8)),
    from_left=st.booleans(),
    data=st.data(),
)
def test_framed_rows_are_those_of_lists(
    rows: list[list[int]], prefix: list[int], suffix: list[int], limit: int | None, from_left: bool, data: Any
) -> None:
    plain = TokenRows.of(rows)
    got = TokenRows.framed(plain.ids, plain.lengths, prefix, suffix, limit, from_left, filler=4)
    kept = [
        r if limit is None or len(r) <= limit else r[len(r) - limit :] if from_left else r[:limit]
        for r in rows
    ]
    want = [prefix + r + suffix or [4] for r in kept]
    assert got.rows() == want
    assert got.cut.tolist() == [k != r for k, r in zip(kept, rows, strict=True)]
    assert [np.frombuffer(key, np.int32).tolist() for key in got.as_bytes()] == want
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5)) if rows else []
    assert got.take(np.array(chosen, dtype=np.int64)).rows() == [want[i] for i in chosen]


def test_a_card_is_left_to_the_padded_rows_where_kernels_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = embedlab.load("mini").towers[0]
    card = torch.device("cuda")
    monkeypatch.setattr(inference, "packed_kernel", lambda config, longest: True)
    for capability, applies in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert inference.applies(encoder.backbone, card) is applies
    assert not inference.applies(encoder.backbone, torch.device("cpu"))
    monkeypatch.setattr(encoder.backbone, "attention", "eager")
    assert not inference.applies(encoder.backbone, card)
    monkeypatch.undo()
    monkeypatch.setattr(inference, "packed_kernel", lambda config, longest: True)
    monkeypatch.setenv("EMBEDLAB_KERNELS", "fused_block=0")
    assert not inference.applies(encoder.backbone, card)
