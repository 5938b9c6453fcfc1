"""Codes of vectors: what each store keeps, and that a score of codes is the score of what they stand for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from embedlab.encoders.codes import STORES, Codes, Store, calibrate
from embedlab.errors import UserError

EIGHT_BITS: list[Store] = ["int8", "uint8"]
BITS: list[Store] = ["binary", "ubinary"]
shapes = st.tuples(st.integers(1, 12), st.integers(1, 41), st.integers(0, 2**32 - 1))


def some(n: int, dim: int, seed: int, offset: float = 0.0) -> NDArray[np.float32]:
    scale = np.random.default_rng(seed + 1).uniform(1e-3, 10, dim)
    return (np.random.default_rng(seed).normal(offset, 1, (n, dim)) * scale).astype(np.float32)


def of(store: Store, x: NDArray[np.float32]) -> Codes:
    return Codes(store, x.shape[1], calibrate([x]))


@given(shapes, st.sampled_from(EIGHT_BITS), st.floats(-3, 3))
def test_eight_bits_are_within_half_a_step_of_the_calibrated_range(
    shape: tuple[int, int, int], store: Store, offset: float
) -> None:
    x = some(*shape, offset)
    codes = of(store, x)
    decoded, step = codes.decode(codes.encode(x)), codes.scale
    assert (np.abs(decoded - x) <= step / 2 + 4 * np.spacing(np.abs(x).max(0))).all()
    beyond = codes.decode(codes.encode(x * 100))  # clipped
    assert (beyond >= x.min(0) - 1e-3).all()
    assert (beyond <= x.max(0) + step + 1e-3).all()


@given(shapes, st.sampled_from(STORES))
def test_a_code_is_the_code_of_what_it_stands_for(shape: tuple[int, int, int], store: Store) -> None:
    codes = of(store, x := some(*shape))
    once = codes.encode(x)
    assert once.dtype == codes.dtype
    assert once.shape == (len(x), codes.width)
    np.testing.assert_array_equal(codes.encode(codes.decode(once)), once)


@given(shapes, st.sampled_from(STORES))
def test_scores_are_those_of_the_decoded_rows(shape: tuple[int, int, int], store: Store) -> None:
    # sentence-transformers rescored raw int8 codes, whose scores are another quantity (its PR 4058).
    codes = of(store, x := some(*shape))
    queries = some(3, shape[1], shape[2] + 5)
    rows = codes.encode(x)
    expected = queries.astype(np.float64) @ codes.decode(rows).astype(np.float64).T
    scale = np.abs(queries).sum(1, dtype=np.float64)[:, None] * max(np.abs(codes.decode(rows)).max(), 1e-9)
    assert (np.abs(codes.scores(queries, rows) - expected) <= 1e-5 * scale).all()


@given(shapes)
def test_a_bit_says_whether_a_feature_is_positive_and_the_first_is_the_highest(
    shape: tuple[int, int, int],
) -> None:
    # sentence-transformers flipped the top bit of each byte in its rescoring (its issue 3948).
    x = some(*shape)
    x[:, ::3] = 0  # zero is not positive
    for store in BITS:
        codes = Codes(store, x.shape[1])
        np.testing.assert_array_equal(codes.decode(codes.encode(x)), np.where(x > 0, 1, -1))
    unsigned = Codes("ubinary", x.shape[1]).encode(x)
    signed = Codes("binary", x.shape[1]).encode(x)
    np.testing.assert_array_equal(signed.astype(int), unsigned.astype(int) - 128)
    by_hand = np.zeros_like(unsigned)
    for i, j in np.argwhere(x > 0):
        by_hand[i, j // 8] |= 1 << 7 - j % 8
    np.testing.assert_array_equal(unsigned, by_hand)


@pytest.fixture(scope="module")
def quantize() -> Callable[..., NDArray[np.generic]]:
    module = pytest.importorskip("sentence_transformers.util.quantization", reason="extra st")
    return module.quantize_embeddings  # type: ignore[no-any-return]


@given(shape=shapes)
def test_codes_are_those_of_sentence_transformers(
    quantize: Callable[..., NDArray[np.generic]], shape: tuple[int, int, int]
) -> None:
    x = some(shape[0] + 1, *shape[1:])
    for store in BITS:
        np.testing.assert_array_equal(Codes(store, x.shape[1]).encode(x), quantize(x, precision=store))
    varied = x[:, x.min(0) < x.max(0)]
    for store in EIGHT_BITS if varied.shape[1] else []:
        ours = of(store, varied).encode(varied).astype(int)
        theirs = quantize(varied, precision=store, calibration_embeddings=varied).astype(int)
        assert np.abs(ours - theirs).max() <= 1  # theirs divides in another order


def test_a_constant_feature_decodes_to_itself() -> None:
    x = np.array([[0.25, 1.0], [0.25, 2.0]], dtype=np.float32)
    codes = of("int8", x)
    np.testing.assert_array_equal(codes.decode(codes.encode(x))[:, 0], [0.25, 0.25])


@given(shapes, st.integers(1, 5))
def test_the_blocks_of_a_calibration_do_not_matter(shape: tuple[int, int, int], size: int) -> None:
    x = some(*shape)
    blocks = [x[i : i + size] for i in range(0, len(x), size)]
    np.testing.assert_array_equal(calibrate([*blocks, x[:0]]), calibrate([x]))


def test_what_cannot_be_coded_is_one_line() -> None:
    x = some(4, 6, 0)
    with pytest.raises(UserError, match="store=int9"):
        Codes("int9", 6)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"needs the range.*calibration=FILE"):
        Codes("int8", 6)
    with pytest.raises(UserError, match="width 6, the vectors are of width 7"):
        Codes("int8", 7, calibrate([x]))
    with pytest.raises(UserError, match="have not 5 features"):
        Codes("binary", 5).encode(x)
    with pytest.raises(UserError, match="has no rows"):
        calibrate([])
    for value in (np.nan, np.inf):
        x[2, 3] = value
        for act in (lambda: calibrate([x[:1], x[1:]]), lambda: Codes("ubinary", 6).encode(x)):
            with pytest.raises(UserError, match="not finite") as told:
                act()
            assert told.value.index == 2
    with pytest.raises(UserError, match="no uint8 of 6 features"):
        Codes("uint8", 6, calibrate([some(4, 6, 0)])).levels(np.zeros((2, 6), np.int8))


def test_few_rows_are_told(caplog: pytest.LogCaptureFixture) -> None:
    calibrate([some(999, 2, 0)])
    assert "999 rows" in caplog.text
    caplog.clear()
    calibrate([some(1000, 2, 0)])
    assert not caplog.text
