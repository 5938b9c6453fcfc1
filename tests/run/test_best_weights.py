"""The best weights: which score replaces which."""

from __future__ import annotations

import math
from typing import Any

import torch

from embedlab.engine.meter import Meter
from embedlab.run.callbacks.scoring import BestEncoder
from embedlab.run.run import build, train


def test_a_score_that_is_no_number_is_beaten_by_any_other(compose_run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    encoder = build(compose_run(), tmp_path)[0].encoder
    best = BestEncoder(tmp_path)
    assert best.offer(math.nan, 0, encoder)
    assert best.offer(3.0, 1, encoder)
    assert not best.offer(math.nan, 2, encoder)
    assert not best.offer(2.0, 3, encoder)
    assert (best.score, best.step) == (3.0, 1)


def test_selection_by_the_loss_waits_for_the_device(compose_run, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """However far the host is ahead, a loss is held against the weights of the same updates."""
    arrived = Meter.arrived
    settings = ("evaluation.select=loss", "evaluation.every=2", "trainer.max_steps=6")
    found = []
    for name in ("at once", "late"):
        train(compose_run(*settings), tmp_path / name)
        state = torch.load(tmp_path / name / "last.ckpt", weights_only=True)["callbacks"]["LossSelection"]
        found.append((state["step"], state["score"]))
        late: Any = lambda self, wait=False: arrived(self, wait) if wait else []  # noqa: E731
        monkeypatch.setattr(Meter, "arrived", late)
    assert found[0][0] is not None
    assert found[0] == found[1]
