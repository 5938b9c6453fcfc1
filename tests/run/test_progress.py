"""What a progress bar counts to."""

from __future__ import annotations

import pytest

from embedlab.run.callbacks.progress import PlainProgress
from embedlab.run.run import train


@pytest.mark.parametrize(
    ("overrides", "totals"),
    [
        (("trainer.max_steps=4",), {4}),  # of 7 batches
        (("trainer.max_steps=9", "trainer.max_epochs=9"), {7, 2}),
        (("trainer.max_steps=2", "optimizer.accumulate=2"), {4}),
        (("trainer.max_steps=-1",), {7}),
    ],
)
def test_it_counts_to_the_last_step(compose_run, tmp_path, monkeypatch, overrides, totals):  # type: ignore[no-untyped-def]
    seen = set()
    original = PlainProgress.on_train_batch_end

    def look(bar, *args):  # type: ignore[no-untyped-def]
        seen.add(bar.total_train_batches)
        original(bar, *args)

    monkeypatch.setattr(PlainProgress, "on_train_batch_end", look)
    train(compose_run(*overrides, "callbacks.progress=plain"), tmp_path)
    assert seen == totals
