"""The published lists of frequency pairs, and what takes the place of those that do not exist."""

from __future__ import annotations

import pytest

from embedlab.pooling.frequencies import FCANET_LOW, pairs, select

LOW_16 = (
    *((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (2, 1), (1, 2)),
    *((2, 2), (0, 3), (3, 0), (4, 0), (0, 4), (1, 3), (3, 1), (0, 5)),
)
TWO_BLOCKS = (
    *((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (0, 3), (0, 4)),
    *((1, 3), (0, 5), (1, 4), (0, 6), (1, 5), (1, 6), (0, 7), (0, 8)),
)
THREE_BLOCKS = (
    *((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (2, 1), (1, 2)),
    *((2, 2), (0, 3), (0, 4), (1, 3), (0, 5), (1, 4), (2, 3), (0, 6)),
)


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (1, tuple((0, b) for b in range(16))),
        (2, TWO_BLOCKS),
        (3, THREE_BLOCKS),
        (6, LOW_16),
        (12, LOW_16),
    ],
)
def test_t14_frequency_lists(blocks: int, m: int, expected: tuple) -> None:
    assert select(blocks, m) == expected[:m]


def test_t14_up_to_eight_groups_three_blocks_take_the_list_as_it_is() -> None:
    assert select(3, 8) == FCANET_LOW[:8] == LOW_16[:8]


def test_the_list_is_the_releases() -> None:
    """`get_freq_indices` of FcaNet's code, whose axes stand in two rows; S2Sent's code has the same."""
    first = (0, 0, 1, 1, 0, 2, 2, 1, 2, 0, 3, 4, 0, 1, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4)
    second = (0, 1, 0, 1, 2, 0, 1, 2, 2, 3, 0, 0, 4, 3, 1, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3)
    assert tuple(zip(first, second, strict=True)) == FCANET_LOW


def test_the_list_has_every_pair_once() -> None:
    assert len(set(FCANET_LOW)) == len(FCANET_LOW) == 32


def test_zigzag_is_jpegs_and_differs_from_four_groups_on() -> None:
    expected = ((0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (0, 2), (0, 3), (1, 2), (2, 1), (3, 0), (4, 0))
    assert pairs("zigzag")[:11] == expected
    assert len(set(pairs("zigzag"))) == 32
    assert set(select(6, 2, "zigzag")) == set(select(6, 2))
    assert set(select(6, 4, "zigzag")) ^ set(select(6, 4)) == {(1, 1), (2, 0)}


@pytest.mark.parametrize("order", ["fcanet", "zigzag"])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 9])
def test_skipping_gives_m_different_pairs_that_exist(blocks: int, order: str) -> None:
    for m in (1, 4, 16, 64):
        chosen = select(blocks, m, order)
        assert len(set(chosen)) == m
        assert max(a for a, _ in chosen) < blocks


@pytest.mark.parametrize("rule", ["zero", "grid6"])
def test_the_other_rules_keep_the_list(rule: str) -> None:
    assert select(1, 8, invalid=rule) == FCANET_LOW[:8]
