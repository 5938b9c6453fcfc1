from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlab.data.plan import BatchPlan
from embedlab.errors import UserError


def plans(n_rows: int, world: int, lengths: np.ndarray | None = None, **settings: object) -> list[BatchPlan]:
    return [
        BatchPlan(n_rows=n_rows, world=world, rank=rank, lengths=lengths, **settings)  # type: ignore[arg-type]
        for rank in range(world)
    ]


@settings(max_examples=60, deadline=None)
@given(
    n_rows=st.integers(8, 150),
    batch_size=st.integers(1, 9),
    world=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 50),
    drop_last=st.booleans(),
    mega_batch=st.integers(1, 7),
    shuffle=st.booleans(),
)
def test_ranks_are_disjoint_complete_and_equally_long(
    n_rows: int,
    batch_size: int,
    world: int,
    seed: int,
    epoch: int,
    drop_last: bool,
    mega_batch: int,
    shuffle: bool,
) -> None:
    lengths = (np.arange(n_rows) * 7919 % 31 + 2).astype(np.int32)
    fits = n_rows >= (batch_size * world if drop_last else world)
    choice = {
        "batch_size": batch_size,
        "seed": seed,
        "drop_last": drop_last,
        "mega_batch": mega_batch,
        "shuffle": shuffle,
    }
    if not fits:
        with pytest.raises(UserError, match=r"rows are less than one (batch|a device)"):
            plans(n_rows, world, lengths, **choice)
        return
    ranks = plans(n_rows, world, lengths, **choice)
    epochs = [plan.epoch(epoch) for plan in ranks]
    assert {len(batches) for batches in epochs} == {len(plan) for plan in ranks} == {len(ranks[0])}
    sizes = [[len(rows) for rows in batches] for batches in epochs]
    assert all(1 <= size <= batch_size + 1 for rank in sizes for size in rank)
    assert all(size == batch_size for rank in sizes for size in rank[:-1])
    if drop_last:
        assert all(size == batch_size for rank in sizes for size in rank)
    seen = np.concatenate([rows for batches in epochs for rows in batches])
    assert len(set(seen.tolist())) == len(seen)
    whole = n_rows - n_rows % (batch_size * world) if drop_last else n_rows
    assert len(seen) == whole
    assert set(seen.tolist()) <= set(range(n_rows))


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 1000), world=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_the_order_is_a_function_of_seed_and_epoch(seed: int, epoch: int, world: int) -> None:
    plan = BatchPlan(240, 8, seed=seed, world=world, rank=0)
    again = BatchPlan(240, 8, seed=seed, world=world, rank=0)
    assert all(np.array_equal(a, b) for a, b in zip(plan.epoch(epoch), again.epoch(epoch), strict=True))
    other_epoch = np.concatenate(plan.epoch(epoch + 1))
    other_seed = np.concatenate(BatchPlan(240, 8, seed=seed + 1, world=world, rank=0).epoch(epoch))
    here = np.concatenate(plan.epoch(epoch))
    assert not np.array_equal(here, other_epoch)
    assert not np.array_equal(here, other_seed)


def test_a_seed_of_zero_is_a_seed() -> None:
    assert BatchPlan(100, 10, seed=0).epoch(0)[0].tolist() != list(range(10))


def test_the_order_is_that_of_every_version() -> None:
    # Written down once: a resumed run must find the order that it began with.
    assert BatchPlan(20, 5, seed=42).epoch(3)[0].tolist() == ORDER


ORDER = [1, 5, 7, 0, 13]


def test_the_ranks_of_a_batch_make_the_batch_of_one_device() -> None:
    alone = BatchPlan(96, 16, seed=5).epoch(2)
    shared = [BatchPlan(96, 4, seed=5, world=4, rank=rank).epoch(2) for rank in range(4)]
    for i, rows in enumerate(alone):
        assert sorted(rows.tolist()) == sorted(np.concatenate([rank[i] for rank in shared]).tolist())


def test_orders_are_uniform() -> None:
    # Where row 0 goes, over 1,000 epochs: each of 10 batches has 100 +- 4 x 9.5.
    plan = BatchPlan(40, 4, seed=1)
    counts = np.zeros(10)
    for epoch in range(1000):
        counts[next(i for i, rows in enumerate(plan.epoch(epoch)) if 0 in rows)] += 1
    assert np.all(np.abs(counts - 100) < 38)


def test_without_shuffling_rows_keep_their_order() -> None:
    assert np.concatenate(BatchPlan(12, 4, shuffle=False).epoch(7)).tolist() == list(range(12))


@pytest.mark.parametrize("world", [1, 2])
def test_mega_batches_save_padding_and_stay_random(world: int) -> None:
    lengths = np.random.default_rng(0).integers(4, 33, 6400).astype(np.int32)

    def padding(plan: BatchPlan) -> float:
        batches = plan.epoch(0)
        return 1 - sum(lengths[b].sum() for b in batches) / sum(len(b) * lengths[b].max() for b in batches)

    random = BatchPlan(6400, 32, seed=3, world=world, rank=world - 1)
    bucketed = BatchPlan(6400, 32, seed=3, world=world, rank=world - 1, mega_batch=25, lengths=lengths)
    assert padding(bucketed) < 0.05 < 0.3 < padding(random)
    means = np.array([lengths[b].mean() for b in bucketed.epoch(0)])
    # Long and short batches come in any order: no trend inside a mega-batch.
    assert abs(np.corrcoef(means, np.arange(len(means)) % 25)[0, 1]) < 0.2
    first = {tuple(sorted(b.tolist())) for b in bucketed.epoch(0)}
    second = {tuple(sorted(b.tolist())) for b in bucketed.epoch(1)}
    assert not first & second


def test_mega_batches_need_lengths() -> None:
    with pytest.raises(ValueError, match="lengths"):
        BatchPlan(10, 2, mega_batch=2)


@pytest.mark.parametrize(("n_rows", "world", "says"), [(7, 1, "7 rows"), (15, 2, "15 rows .* on 2 devices")])
def test_fewer_rows_than_a_batch(n_rows: int, world: int, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        BatchPlan(n_rows, 8, world=world)
    assert caught.value.key == "data.batch_size"
    assert len(BatchPlan(8 * world, 8, world=world)) == 1
    assert len(BatchPlan(n_rows, 8, world=world, drop_last=False)) >= 1
