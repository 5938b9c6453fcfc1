"""Batches without a text twice, and batches of so many rows of each label."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlab.data.distinct import DistinctPlan, PerLabelPlan
from embedlab.data.first_fit import first_fit
from embedlab.errors import UserError


def texts(rows: int, roles: int, distinct: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(distinct, size=(rows, roles)).astype(np.uint64)


def is_distinct(rows: np.ndarray, keys: np.ndarray) -> bool:
    met = Counter(text for row in rows for text in set(keys[row].tolist()))
    return max(met.values()) == 1


@given(
    rows=st.integers(1, 120), roles=st.integers(1, 3), distinct=st.integers(1, 60), size=st.integers(1, 9),
    world=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_every_row_that_can_be_placed_is_placed_once_and_no_text_is_in_two_rows_of_a_batch(
    rows: int, roles: int, distinct: int, size: int, world: int, seed: int
) -> None:
    keys, whole = texts(rows, roles, distinct, seed), size * world
    batches = first_fit(range(rows), keys, whole)
    assert all(len(batch) == whole for batch in batches)
    more = first_fit(range(rows), keys, whole, least=world)
    same, rest = more[: len(batches)], more[len(batches) :]
    for batch, other in zip(batches, same, strict=True):
        assert set(batch.tolist()) <= set(other.tolist()), "the same, but for rows that join it"
    assert all(len(batch) < whole for batch in rest)
    for found in (batches, more):
        assert all(is_distinct(batch, keys) for batch in found)
        assert len({row for batch in found for row in batch.tolist()}) == sum(map(len, found))
    assert all(world <= len(batch) < whole + world for batch in more)
    for place, batch in enumerate(rest):
        for row in (row for later in rest[place + 1 :] for row in later):
            assert not is_distinct(np.append(batch, row), keys), "a smaller batch could have had this row"
    left = set(range(rows)) - {row for batch in more for row in batch.tolist()}
    assert not (left and world == 1)
    for row in left:
        for batch in (batch for batch in more if len(batch) < whole + world - 1):
            assert not is_distinct(np.append(batch, row), keys), "a row without a batch could have joined one"


def test_rows_after_a_batch_that_cannot_be_filled_are_not_lost() -> None:
    keys = np.array([[1, 2], [1, 3], [2, 4]], np.uint64)  # the first row has a text of each of the others
    assert [batch.tolist() for batch in first_fit(range(3), keys, 2)] == [[1, 2]]
    assert [sorted(batch.tolist()) for batch in first_fit(range(3), keys, 2, least=1)] == [[1, 2], [0]]


def test_all_different_rows_are_taken_in_their_order() -> None:
    keys = np.arange(20, dtype=np.uint64).reshape(10, 2)
    assert np.concatenate(first_fit(range(10), keys, 3)).tolist() == list(range(9))


def test_one_text_of_very_many_rows_is_no_hindrance() -> None:
    keys = np.arange(40_000, dtype=np.uint64)[:, None].repeat(2, 1)
    keys[::2, 1] = 0
    batches = first_fit(range(40_000), keys, 16)
    assert sum(bool((keys[batch] == 0).any()) for batch in batches) == len(batches)
    assert len(batches) == 20_000 // 15


@given(world=st.integers(1, 3), epoch=st.integers(0, 6), seed=st.integers(0, 2**63))
@settings(max_examples=40, deadline=None)
def test_every_epoch_is_as_long_disjoint_over_ranks_and_a_function_of_seed_and_epoch(
    world: int, epoch: int, seed: int
) -> None:
    keys = texts(120, 2, 150, seed % 50)
    ranks = [DistinctPlan(120, 4, seed, world, rank, hashes=keys) for rank in range(world)]
    epochs = [plan.epoch(epoch) for plan in ranks]
    assert {len(batches) for batches in epochs} == {len(ranks[0])} == {len(ranks[0].epoch(0))}
    again = DistinctPlan(120, 4, seed, world, 0, hashes=keys).epoch(epoch)
    assert all(np.array_equal(a, b) for a, b in zip(again, epochs[0], strict=True))
    for shares in zip(*epochs, strict=True):
        rows = np.concatenate(shares)
        met = Counter(text for row in rows for text in set(keys[row].tolist()))
        assert len(rows) == 4 * world
        assert max(met.values()) == 1


@given(
    rows=st.integers(20, 150), distinct=st.integers(40, 300), world=st.integers(1, 4), epoch=st.integers(0, 4),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_without_drop_last_an_epoch_has_all_rows_in_batches_that_every_device_has_a_part_of(
    rows: int, distinct: int, world: int, epoch: int, seed: int
) -> None:
    keys = texts(rows, 2, distinct, seed)
    ranks = [DistinctPlan(rows, 4, seed, world, rank, drop_last=False, hashes=keys) for rank in range(world)]
    epochs = [plan.epoch(epoch) for plan in ranks]
    assert {len(batches) for batches in epochs} == {len(ranks[0])}
    assert all(len(share) for batches in epochs for share in batches)
    placed = np.concatenate([share for batches in epochs for share in batches])
    assert len(set(placed.tolist())) == len(placed) >= rows - ranks[0].left
    assert world > 1 or len(placed) == rows
    assert all(is_distinct(np.concatenate(shares), keys) for shares in zip(*epochs, strict=True))


def test_too_few_rows_for_every_device_join_a_batch() -> None:
    keys = np.arange(26, dtype=np.uint64)[:, None]
    plan = DistinctPlan(26, 3, world=4, drop_last=False, hashes=keys)
    assert [len(batch) for batch in plan.whole_epoch(2)] == [14, 12]
    assert plan.left == 0


def test_an_epoch_whose_order_allows_fewer_has_the_batches_of_the_first() -> None:
    class Unlucky(DistinctPlan):
        def _planned(self, epoch: int):  # type: ignore[no-untyped-def]
            return super()._planned(epoch) if epoch == 0 else []

    plan = Unlucky(40, 4, 7, hashes=texts(40, 1, 80, 1))
    first, later = plan.whole_epoch(0), plan.whole_epoch(3)
    assert sorted(map(tuple, first)) == sorted(map(tuple, later))
    assert [*map(tuple, first)] != [*map(tuple, later)]


def test_an_anchor_that_is_elsewhere_a_negative_waits() -> None:
    keys = np.array([[1, 2, 3], [4, 5, 1], [6, 7, 8], [9, 10, 11]], np.uint64)
    for epoch in range(6):
        for batch in DistinctPlan(4, 2, 5, hashes=keys).whole_epoch(epoch):
            assert set(batch.tolist()) != {0, 1}


def test_rows_that_are_all_the_same_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"no batch of 4 of the 40 rows has every text once.*data\.no_duplicates"
    ):
        DistinctPlan(40, 2, world=2, hashes=np.ones((40, 2), np.uint64))


@given(
    per=st.integers(1, 4), wanted=st.integers(1, 4), world=st.integers(1, 4), epoch=st.integers(0, 4),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_batch_has_so_many_rows_of_each_of_its_labels(
    per: int, wanted: int, world: int, epoch: int, seed: int
) -> None:
    """And so has each device's share of it, whose rows have their positives there."""
    labels = np.random.RandomState(seed).randint(20, size=400)
    ranks = [
        PerLabelPlan(400, per * wanted, seed, world, rank, per_label=per, labels=labels)
        for rank in range(world)
    ]
    batches, epochs = ranks[0].whole_epoch(epoch), [plan.epoch(epoch) for plan in ranks]
    assert len(batches) == len(ranks[0]) > 0
    for batch, *shares in zip(batches, *epochs, strict=True):
        assert sorted(np.concatenate(shares).tolist()) == sorted(batch.tolist())
        for rows in (batch, *shares):
            assert set(Counter(labels[rows].tolist()).values()) == {per}
        assert {len(share) for share in shares} == {per * wanted}
    rows = np.concatenate(batches)
    assert len(set(rows.tolist())) == len(rows)


@pytest.mark.parametrize(
    ("batch", "per", "says"),
    [(6, 4, "a batch of 6 rows is no multiple"), (12, 2, "needs {} labels of so many rows, and there are 3")],
)
@pytest.mark.parametrize("world", [1, 2])
def test_labels_that_make_no_batch_are_refused(batch: int, per: int, says: str, world: int) -> None:
    with pytest.raises(UserError, match=rf"{says.format(6 * world)}.*data\.per_label"):
        PerLabelPlan(60, batch, world=world, per_label=per, labels=np.arange(60) % 3)
