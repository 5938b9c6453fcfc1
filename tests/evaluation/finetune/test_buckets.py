"""Every row once an epoch, few shapes, and targets that stay with their rows."""

from __future__ import annotations

import torch

from embedlab.evaluation.finetune.buckets import Buckets, Epochs, padded_length


def buckets() -> tuple[list[list[int]], Buckets]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 100, (57,), generator=generator).tolist()
    rows = [[i + 1] * n for i, n in enumerate(sizes)]
    return rows, Buckets(rows, {"label": torch.arange(57) * 10}, 0, "cpu")


def test_lengths_are_few() -> None:
    assert [padded_length(n, 400) for n in (1, 32, 33, 128, 129, 320, 390)] == [
        32,
        32,
        64,
        128,
        192,
        320,
        400,
    ]


def test_batches_hold_whole_rows_with_their_targets() -> None:
    rows, data = buckets()
    assert data.lengths == [32, 64, 96, 99] or data.lengths == [32, 64, 96]
    for given in (list(data.epoch(8, torch.Generator().manual_seed(1))), list(data.in_order())):
        assert sorted(i for batch in given for i in batch["rows"].tolist()) == list(range(57))
        for batch in given:
            assert batch["input_ids"].shape[1] in data.lengths
            for ids, mask, row, label in zip(
                *(batch[k] for k in ("input_ids", "attention_mask", "rows", "label")), strict=True
            ):
                assert ids[mask.bool()].tolist() == rows[int(row)]
                assert ids[~mask.bool()].eq(0).all()
                assert int(label) == 10 * int(row)


def test_epochs_stop_at_the_step_and_repeat_by_seed() -> None:
    _, data = buckets()
    per_epoch = data.steps(8)
    seen = [batch["rows"].tolist() for batch in Epochs(data, 8, per_epoch + 3, seed=4)]
    assert len(seen) == per_epoch + 3
    assert sorted(i for rows in seen[:per_epoch] for i in rows) == list(range(57))
    assert seen == [batch["rows"].tolist() for batch in Epochs(data, 8, per_epoch + 3, seed=4)]
    assert seen != [batch["rows"].tolist() for batch in Epochs(data, 8, per_epoch + 3, seed=5)]
