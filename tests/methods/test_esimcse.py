"""ESimCSE: SimCSE without its two parts, the queue's order and what it survives, and rows that fit the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.errors import UserError
from embedlab.methods import method_config
from embedlab.methods.contrast import Matryoshka
from embedlab.methods.esimcse import ESimCSE, ESimCSEConfig
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from embedlab.objectives.more_negatives import queue_nce
from tests.methods.baselines import Tiny, batch, encoder
from tests.methods.golden import Inputs, check_golden, train
from tests.methods.runs import run_of
from tests.support import SENTENCES


def make(tiny: Tiny, rows: int = 0, **config: Any) -> ESimCSE:
    torch.manual_seed(0)
    return ESimCSE(encoder(tiny), ESimCSEConfig(**config), OptimizerConfig(), rows).eval()


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("esimcse", tmp_path, monkeypatch)


def test_without_repetition_and_queue_it_is_simcse(tiny: Tiny) -> None:
    method = make(tiny, rate=0.0)
    simcse = SimCSE(encoder(tiny), SimCSEConfig(), OptimizerConfig()).eval()
    simcse.head.load_state_dict(method.head.state_dict())
    data = batch(method)
    torch.testing.assert_close(
        method.losses(data).losses["queue_nce"], simcse.losses(data).losses["info_nce"]
    )
    torch.manual_seed(1)
    assert make(tiny, rate=0.9).losses(data).losses["queue_nce"] != method.losses(data).losses["queue_nce"]


def test_the_queue_has_the_newest_first_by_the_average_and_the_present_head(tiny: Tiny) -> None:
    method = make(tiny, rows=10, rate=0.0)
    data = [batch(method, SENTENCES[:4]), batch(method, SENTENCES[4:8]), batch(method, SENTENCES[8:12])]
    with torch.no_grad():
        for p in method.encoder.parameters():
            p.add_(0.01)  # the average is behind
    method.train()
    assert method.target is not None
    for module in (method.encoder, *method.frozen()):
        module.eval()
    vectors = [
        method.head(method.target(d["sentence"]["input_ids"], d["sentence"]["attention_mask"])) for d in data
    ]
    for i, filled in enumerate((4, 8, 10)):
        before, texts, count = method.queue.clone(), method.queue_hashes.clone(), method.filled.clone()
        found = method.losses(data[i]).losses["queue_nce"]
        z = method.head(
            method.encoder(data[i]["sentence"]["input_ids"], data[i]["sentence"]["attention_mask"])
        )
        hashes = data[i]["sentence"]["hash"]
        expected = queue_nce(
            z, z, before, count, 0.05, anchor_hashes=hashes, candidate_hashes=hashes,
            queue_hashes=texts,
        ).loss  # fmt: skip
        torch.testing.assert_close(found, expected)
        assert method.filled == filled
    torch.testing.assert_close(method.queue, torch.cat(vectors[::-1])[:10])
    assert (
        method.queue_hashes.tolist() == torch.cat([d["sentence"]["hash"] for d in data[::-1]])[:10].tolist()
    )
    method.on_train_epoch_start()
    assert method.filled == 0
    assert {"queue", "queue_hashes", "filled"} <= set(method.state_dict())
    scored = method.eval().losses(data[0])
    assert method.filled == 0
    scored.losses["queue_nce"].backward()
    assert all(p.grad is None for p in method.target.parameters())


def test_nested_widths_are_added_up_in_the_queue_too(tiny: Tiny) -> None:
    method = make(tiny, rows=4, rate=0.0, matryoshka=Matryoshka((32, 8)))
    draw = torch.Generator().manual_seed(0)
    method.queue.copy_(torch.randn(4, 32, generator=draw))
    method.filled.fill_(3)
    data = batch(method)
    view, hashes = data["sentence"], data["sentence"]["hash"]
    z = method.head(method.encoder(view["input_ids"], view["attention_mask"]))
    texts = {"anchor_hashes": hashes, "candidate_hashes": hashes, "queue_hashes": method.queue_hashes}
    parts: list[Any] = [
        queue_nce(z[:, :d], z[:, :d], method.queue[:, :d], method.filled, 0.05, **texts)  # type: ignore[arg-type]
        for d in (32, 8)
    ]
    torch.testing.assert_close(method.losses(data).losses["queue_nce"], parts[0].loss + parts[1].loss)


def test_the_average_moves_before_each_update_but_the_first(tiny: Tiny) -> None:
    method = make(tiny, rows=4, momentum=0.75)
    method.trainer = SimpleNamespace(global_step=0)  # type: ignore[assignment]
    assert method.target is not None
    start = copy.deepcopy(dict(method.target.named_parameters()))
    with torch.no_grad():
        for p in method.encoder.parameters():
            p.add_(1.0)
    for step, moved in ((0, 0.0), (1, 0.25), (1, 0.25)):  # the second batch of an update moves nothing
        method.trainer.global_step = step  # type: ignore[misc]
        method.on_train_batch_start(None, 0)
        for name, p in method.target.named_parameters():
            torch.testing.assert_close(p, start[name] + moved)


@pytest.mark.parametrize("budget", [False, True])
def test_no_more_tokens_than_were_told(tiny: Tiny, budget: bool) -> None:
    method = make(tiny, rate=0.32)
    view = batch(method)["sentence"]
    if budget:
        view["token_budget"] = int(view["attention_mask"].sum())
    for seed in range(30):
        torch.manual_seed(seed)
        new = method.repeated(view, torch.arange(6))
        assert new["input_ids"].shape[1] <= method.longest({"sentence": view["input_ids"].shape[1]})
        if budget:
            assert int(new["attention_mask"].sum()) <= new["token_budget"]


def test_what_is_drawn_once_is_of_the_runs_seed(compose_run: Callable[..., RunConfig]) -> None:
    """Two seeds repeat other words, and one seed the same ones."""
    seen: list[Any] = []

    def repeated(seed: int) -> list[Any]:
        keys = ("method=esimcse", "pooling=cls", "method.redraw=once", "data.max_length=32")
        run = compose_run(*keys, "backbone.dropout=0.1", f"seed={seed}")
        method = ESimCSE.from_run(run)
        view = batch(method)["sentence"]
        torch.manual_seed(len(seen))  # another state of the device
        seen.append(method.repeated(view, torch.arange(6))["input_ids"].tolist())
        return seen[-1]  # type: ignore[no-any-return]

    assert repeated(3) == repeated(3) != repeated(4)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across the end of an epoch, with its queue and average: to the last bit."""
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    inputs = Inputs(tmp_path / "inputs")
    more = ("step=eager", "trainer.max_epochs=9", "backbone.dropout=0.1", "optimizer.schedule=constant")
    whole = train(inputs, tmp_path / "whole", "esimcse", *more, "trainer.max_steps=11")
    train(inputs, tmp_path / "parts", "esimcse", *more, "trainer.max_steps=6")
    assert (
        train(inputs, tmp_path / "parts", "esimcse", *more, "trainer.max_steps=11", "ckpt_path=last") == whole
    )
    assert len(whole) == 11


def test_settings_without_meaning_are_named(tiny: Tiny) -> None:
    info = encoder(tiny).backbone.info
    assert ESimCSEConfig().check(info, run_of(max_length=32)) == []
    for change, words in (
        ({"rate": 1.5}, "rate"),
        ({"queue": -1.0}, "queue"),
        ({"queue": 1e300}, "queue"),
        ({"momentum": 1.0}, "momentum"),
    ):
        with pytest.raises(UserError, match=f"method.{words}"):
            method_config({"name": "esimcse", **change})
    for queue, rows in ((0.5, 32), (2.5, 160), (0.0, 0)):
        assert ESimCSEConfig(queue=queue).check(info, run_of(max_length=32)) == []
        assert ESimCSEConfig(queue=queue).rows(run_of()) == rows
    with pytest.raises(UserError, match=r"no sentence .method\.queue=0\.005"):  # it would have none, unsaid
        ESimCSEConfig(queue=0.005).check(info, run_of(max_length=32))
    with pytest.raises(UserError, match=r"64 positions .data\.max_length=64"):
        ESimCSEConfig().check(info, run_of(max_length=64))
    with pytest.raises(UserError, match=r"data\.max_length"):
        ESimCSEConfig().check(info, run_of(max_length=None))
    assert ESimCSEConfig(rate=0.0).check(info, run_of(max_length=64)) == []
    alone: tuple[dict[str, Any], ...] = (
        {"batch_size": 1},
        {"drop_last": False},
    )  # rows that bn2 cannot normalise
    for each in alone:
        assert ESimCSEConfig(mlp="bn2", queue=0.0).check(info, run_of(max_length=32, **each)) == []
        with pytest.raises(UserError, match=r"method\.mlp=bn2"):
            ESimCSEConfig(mlp="bn2").check(info, run_of(max_length=32, **each))
