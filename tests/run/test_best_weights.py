"""The best weights: which score replaces which."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedlab
from embedlab.engine.meter import Meter
from embedlab.errors import UserError
from embedlab.evaluation.sts.dev import DevSet
from embedlab.run.callbacks.scoring import BestEncoder, hash_of
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


def ranked_by(monkeypatch: pytest.MonkeyPatch, order: Callable[[int], float]) -> None:
    """Every look at the dev set has the score that `order` says of its number."""
    plain, looks = DevSet.score, itertools.count()
    monkeypatch.setattr(
        DevSet, "score", lambda self, *a, **k: plain(self, *a, **k) | {"spearman": order(next(looks))}
    )


def selected(folder: Path) -> tuple[int, Any]:
    """Step, and vectors of the export."""
    step = json.loads((folder / "scores.json").read_text())["training"]["selected_step"]
    return step, embedlab.load(folder / "export").encode(["a cat sees the dog"])


@pytest.mark.parametrize("select", ["dev", "loss"])
@pytest.mark.parametrize("where", ["here", "elsewhere", "copied alone"])
def test_the_best_of_before_a_resume_is_that_of_the_checkpoint(  # type: ignore[no-untyped-def]
    where, select, compose_run, sts_dir, tmp_path, monkeypatch, caplog
) -> None:
    """A checkpoint may be gone on from in any folder; the best weights so far lie beside it, or nowhere."""
    more = f"evaluation.sts_dir={sts_dir}" if select == "dev" else "evaluation.select=loss"
    settings = ("evaluation.every=2", "optimizer.lr=3e-2", more)
    ranked_by(monkeypatch, lambda look: -look)
    monkeypatch.setattr(Meter, "arrived", _worse_and_worse(Meter.arrived))
    train(compose_run(*settings, "trainer.max_steps=4"), tmp_path / "run")
    checkpoint, before = tmp_path / "run" / "last.ckpt", selected(tmp_path / "run")
    assert before[0] == (0 if select == "dev" else 2)
    if where == "copied alone":
        checkpoint = Path(shutil.copy(checkpoint, tmp_path / "alone.ckpt"))
    goes_on = tmp_path / ("run" if where == "here" else "other")
    train(compose_run(*settings, "trainer.max_steps=8", f"ckpt_path={checkpoint}"), goes_on)
    step, vectors = selected(goes_on)
    assert ("does not hold the best weights" in caplog.text) == (where == "copied alone")
    if where == "copied alone":
        assert step == 6, "the best of what was scored since"
    else:
        assert step == before[0]
        np.testing.assert_array_equal(vectors, before[1])
        assert hash_of(goes_on / "best") == hash_of(tmp_path / "run" / "best")


def test_weights_of_after_the_checkpoint_are_not_taken_for_the_best_of_before(  # type: ignore[no-untyped-def]
    compose_run, sts_dir, tmp_path, monkeypatch, caplog
) -> None:
    """`best/` goes on when the run does, and a run may go back to an earlier checkpoint."""
    settings = (f"evaluation.sts_dir={sts_dir}", "evaluation.every=2", "optimizer.lr=3e-2")
    run, last = tmp_path / "run", tmp_path / "run" / "last.ckpt"
    ranked_by(monkeypatch, lambda look: look)
    train(compose_run(*settings, "trainer.max_steps=4"), run)
    earlier = last.read_bytes()
    train(compose_run(*settings, "trainer.max_steps=7", "ckpt_path=last"), run)
    (run / "best" / "scores").mkdir()  # of `embedlab evaluate ckpt=run/best`
    later = selected(run)
    last.write_bytes(earlier)
    ranked_by(monkeypatch, lambda look: -100 - look)
    train(compose_run(*settings, "trainer.max_steps=6", "ckpt_path=last"), run)
    assert "does not hold the best weights so far, of step 4" in caplog.text
    step, vectors = selected(run)
    assert (later[0], step) == (7, 6)
    assert not np.array_equal(vectors, later[1])


@pytest.mark.parametrize("select", ["dev", "last"])
def test_a_best_score_is_of_one_dev_set(select, compose_run, sts_dir, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Other pairs have other scores; the same ones may lie elsewhere, and what only watches may change."""
    head, *rows = (sts_dir / "stsb_dev.tsv").read_text().splitlines()
    files = {}
    for name, kept in (("one", rows), ("same", rows), ("other", rows[:-1]), ("turned", rows[::-1])):
        files[name] = tmp_path / f"{name}.tsv"
        files[name].write_text("\n".join([head, *kept]) + "\n")
    settings = (f"evaluation.select={select}", "evaluation.every=2", "ckpt_path=auto")
    for steps, name in enumerate(("one", "same", "other", "turned"), start=3):
        config = compose_run(*settings, f"trainer.max_steps={steps}", f"evaluation.dev={files[name]}")
        if select == "dev" and name in ("other", "turned"):
            with pytest.raises(UserError, match=r"of another development set.*\(evaluation\.dev\)"):
                train(config, tmp_path / "run")
        else:
            train(config, tmp_path / "run")


def _worse_and_worse(plain: Any) -> Any:
    """Losses that rise from step to step, so that the first look at them is the best."""

    def arrived(self: Any, wait: bool = False) -> Any:
        return [(step, means | {"loss": float(step)}) for step, means in plain(self, wait)]

    return arrived
