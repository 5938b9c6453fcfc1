from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.data.loader import BatchLoader
from embedlab.data.plan import BatchPlan
from embedlab.data.table import TokenTable
from tests.data.standin import WordTokenization

WORDS: Any = WordTokenization()


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    (tmp_path / "a.txt").write_text("".join(f"row {i} {'word ' * (i % 9)}\n" for i in range(103)))
    return build_token_table(DataConfig(files=str(tmp_path / "a.txt")), {"sentence": ("sentence", WORDS)})


def loader_of(table: TokenTable, **settings: Any) -> BatchLoader:
    return BatchLoader(table, BatchPlan(table.n_rows, 8, seed=3), **settings)


def rows_of(loader: BatchLoader) -> list[list[int]]:
    return [batch["rows"].tolist() for batch in loader]


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("embedlab-batches")]


def test_a_batch_has_rows_tokens_and_counts(table: TokenTable) -> None:
    loader = loader_of(table)
    assert len(loader) == 12
    for batch in loader:
        ids, mask = batch["sentence"]["input_ids"], batch["sentence"]["attention_mask"]
        assert ids.shape == mask.shape
        assert ids.shape[0] == 8
        assert ids.shape[1] % 8 == 0
        assert ids.shape[1] - mask.sum(1).max() < 8
        assert batch["tokens"] == int(mask.sum())
        assert batch["padded_tokens"] == ids.numel()
        for row, tokens in zip(batch["rows"].tolist(), ids, strict=True):
            want = table.fields["sentence"].row(row).tolist()
            assert tokens.tolist() == want + [0] * (len(tokens) - len(want))


def test_every_pass_is_the_next_epoch_until_told_otherwise(table: TokenTable) -> None:
    loader = loader_of(table)
    epochs = [rows_of(loader) for _ in range(3)]
    plan = BatchPlan(table.n_rows, 8, seed=3)
    assert epochs == [[rows.tolist() for rows in plan.epoch(e)] for e in range(3)]
    loader.set_epoch(1)
    assert rows_of(loader) == epochs[1]


def test_iterators_that_nobody_uses_count_for_nothing(table: TokenTable) -> None:
    loader = loader_of(table)
    iter(loader)
    iter(loader)
    assert prefetchers() == []
    assert rows_of(loader) == rows_of(loader_of(table))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 12), epoch=st.integers(0, 4), emit=st.sampled_from(["tokens", "rows"]))
def test_a_start_gives_exactly_the_tail(table: TokenTable, start: int, epoch: int, emit: str) -> None:
    whole = loader_of(table, emit=emit)
    whole.set_epoch(epoch)
    want = rows_of(whole)
    loader = loader_of(table, emit=emit)
    loader.set_epoch(epoch)
    loader.start = start
    assert len(loader) == 12
    assert rows_of(loader) == want[start:]
    assert rows_of(loader) == rows_of(whole)


@pytest.mark.parametrize("taken", [0, 1, 5, 11, 12, 13, 30])
def test_state_goes_on_where_it_was_taken(table: TokenTable, taken: int) -> None:
    straight = loader_of(table)
    order = [rows for _ in range(4) for rows in rows_of(straight)]
    loader, seen = loader_of(table), 0
    while seen < taken:
        for _ in loader:
            seen += 1
            if seen == taken:
                break
    state = loader.state_dict()
    assert state == {"epoch": taken // 12, "batch": taken % 12}
    resumed = loader_of(table)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [rows for _ in range(2) for rows in rows_of(resumed)] == order[taken : taken + 24 - taken % 12]


def test_batches_that_are_not_worked_on_yet_are_given_again(table: TokenTable) -> None:
    loader = loader_of(table)
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader.progress = lambda: (1, False)
    assert loader.state_dict() == {"epoch": 0, "batch": 1}


def test_an_epoch_that_was_ended_early_is_over(table: TokenTable) -> None:
    loader = loader_of(table)
    iterator = iter(loader)
    next(iterator)
    loader.progress = lambda: (0, True)
    assert loader.state_dict() == {"epoch": 1, "batch": 0}


@pytest.mark.parametrize("end", ["used up", "dropped", "closed"])
def test_no_thread_is_left(table: TokenTable, end: str) -> None:
    iterator = iter(loader_of(table))
    next(iterator)
    assert len(prefetchers()) == 1
    if end == "used up":
        list(iterator)
    elif end == "closed":
        iterator.close()  # type: ignore[attr-defined]
    else:
        del iterator
    assert prefetchers() == []


def test_an_error_while_preparing_arrives_at_its_batch(
    table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, prepare, calls = loader_of(table), BatchLoader._batch, []

    def failing(self: BatchLoader, rows: Any) -> Any:
        calls.append(rows)
        if len(calls) == 3:
            raise OSError("the disk is gone")
        return prepare(self, rows)

    monkeypatch.setattr(BatchLoader, "_batch", failing)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert loader.done == 2
    assert prefetchers() == []


def test_one_batch_is_prepared_ahead_and_no_more(table: TokenTable, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, made = BatchLoader._batch, []

    def noted(self: BatchLoader, rows: Any) -> Any:
        made.append(rows.tolist())
        return prepare(self, rows)

    monkeypatch.setattr(BatchLoader, "_batch", noted)
    iterator = iter(loader_of(table))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert len(made) <= 2


def test_the_random_state_of_torch_is_left_alone(table: TokenTable) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rows_of(loader_of(table))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_padding_share_is_that_of_the_batches(table: TokenTable) -> None:
    loader = BatchLoader(table, BatchPlan(table.n_rows, 8, seed=3, drop_last=False))
    batches = list(loader)
    share = 1 - sum(b["tokens"] for b in batches) / sum(b["padded_tokens"] for b in batches)
    assert loader.padding_share(0) == pytest.approx(share, abs=1e-12)
    plan = BatchPlan(table.n_rows, 8, seed=3, mega_batch=6, lengths=table.longest)
    assert BatchLoader(table, plan, pad_to_multiple=1).padding_share(0) < 0.1 < share
