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


@given(
    rows=st.integers(1, 120), roles=st.integers(1, 3), distinct=st.integers(1, 60), size=st.integers(1, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_no_text_is_in_two_rows_of_a_batch_and_no_row_comes_twice(
    rows: int, roles: int, distinct: int, size: int, seed: int
) -> None:
    keys = texts(rows, roles, distinct, seed)
    batches = first_fit(range(rows), keys, size)
    seen = [row for batch in batches for row in batch.tolist()]
    assert len(set(seen)) == len(seen)
    for batch in batches:
        assert len(batch) == size
        met = Counter(text for row in batch for text in set(keys[row].tolist()))
        assert max(met.values()) == 1


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
    per=st.integers(1, 4), wanted=st.integers(1, 4), world=st.integers(1, 2), epoch=st.integers(0, 4),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_batch_has_so_many_rows_of_each_of_its_labels(
    per: int, wanted: int, world: int, epoch: int, seed: int
) -> None:
    labels = np.random.RandomState(seed).randint(8, size=200)
    ranks = [
        PerLabelPlan(200, per * wanted, seed, world, rank, per_label=per * world, labels=labels)
        for rank in range(world)
    ]
    batches = ranks[0].whole_epoch(epoch)
    assert len(batches) == len(ranks[0]) > 0
    for batch in batches:
        assert set(Counter(labels[batch].tolist()).values()) == {per * world}
    rows = np.concatenate(batches)
    assert len(set(rows.tolist())) == len(rows)


@pytest.mark.parametrize(
    ("batch", "per", "says"),
    [(6, 4, "no multiple"), (12, 2, "needs 6 labels of so many rows, and there are 3")],
)
def test_labels_that_make_no_batch_are_refused(batch: int, per: int, says: str) -> None:
    with pytest.raises(UserError, match=rf"{says}.*data\.per_label"):
        PerLabelPlan(60, batch, per_label=per, labels=np.arange(60) % 3)
