"""PCL: what its six losses are of, its released form, the encoder that is kept, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.methods.pcl import PCL, PCLConfig
from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.peer_contrast import list_divergence, peer_logits, positives_bce
from tests.methods.baselines import Tiny, batch, encoder
from tests.methods.golden import Inputs, check_golden, train
from tests.methods.runs import run_of
from tests.support import SENTENCES


def make(tiny: Tiny, pooler: nn.Module | None = None, **config: Any) -> PCL:
    torch.manual_seed(0)
    method = PCL(encoder(tiny), PCLConfig(**config), OptimizerConfig(), pooler).eval()
    with torch.no_grad():  # apart from the first one, as after some steps
        for p in method.peer.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return method


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("pcl", tmp_path, monkeypatch)


def test_its_six_losses(tiny: Tiny) -> None:
    method = make(tiny, augmentations=("reverse",))
    data = batch(method, (*SENTENCES[:5], SENTENCES[0]))
    view, hashes = data["sentence"], data["sentence"]["hash"]
    turned = method.augmented(view, "reverse")
    assert not torch.equal(turned["input_ids"], view["input_ids"])

    def vectors(by: nn.Module) -> tuple[Tensor, Tensor]:
        return tuple(method.head(by(v["input_ids"], v["attention_mask"])) for v in (view, turned))  # type: ignore[return-value]

    def logits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        return peer_logits(a[0], torch.stack(b), b[0], 0.05, anchor_hashes=hashes, other_hashes=hashes)

    f, g = vectors(method.encoder), vectors(method.peer)
    plain = [info_nce(z[0], z[0], 0.05, anchor_hashes=hashes, candidate_hashes=hashes).loss for z in (f, g)]
    torch.testing.assert_close(
        method.losses(data).losses,
        {
            "info_nce": plain[0],
            "info_nce_peer": plain[1],
            "positives": positives_bce(logits(f, f), 2),
            "positives_peer": positives_bce(logits(g, g), 2),
            "cross": list_divergence(logits(g, f), logits(f, g)),
            "symmetric": list_divergence(logits(g, g), logits(f, f)),
        },
    )


def test_every_weight_has_a_gradient_and_the_first_encoder_is_kept(tiny: Tiny) -> None:
    method = make(tiny)
    method.train().total(batch(method))[0].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in method.head.parameters())
    for part in (method.encoder, method.peer):
        assert all(p.grad is not None for p in part.parameters())
    assert {name.partition(".")[0] for name in method.state_dict()} == {"encoder", "head", "peer"}
    fresh = PCL(encoder(tiny), PCLConfig(), OptimizerConfig())
    first, second = (dict(part.named_parameters()) for part in (fresh.encoder, fresh.peer))
    assert first.keys() == second.keys()
    assert all(torch.equal(p, second[name]) for name, p in first.items())
    assert not {id(p) for p in first.values()} & {id(p) for p in second.values()}


def test_the_released_peer_reads_padding_and_has_a_pooler(tiny: Tiny) -> None:
    pooler = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    method = make(tiny, pooler, form="released", augmentations=("none",))
    data = batch(method)
    view = data["sentence"]
    assert (view["attention_mask"] == 0).any()
    ones = torch.ones_like(view["attention_mask"])
    z = method.head(pooler(method.peer(view["input_ids"], ones)))
    expected = info_nce(z, z, 0.05, anchor_hashes=view["hash"], candidate_hashes=view["hash"]).loss
    found = method.losses(data).losses
    torch.testing.assert_close(found["info_nce_peer"], expected)
    plain = make(tiny, augmentations=("none",)).losses(data).losses
    assert (found["info_nce_peer"] - plain["info_nce_peer"]).abs() > 1e-6
    torch.testing.assert_close(found["info_nce"], plain["info_nce"])


@pytest.mark.parametrize("budget", [False, True])
def test_no_more_tokens_than_were_told(tiny: Tiny, budget: bool) -> None:
    method = make(tiny, share=0.3)
    view = batch(method)["sentence"]
    if budget:
        view["token_budget"] = int(view["attention_mask"].sum())
    for seed in range(30):
        torch.manual_seed(seed)
        new = method.augmented(view, "repeat")
        assert new["input_ids"].shape[1] <= method.longest({"sentence": view["input_ids"].shape[1]})
        if budget:
            assert int(new["attention_mask"].sum()) <= new["token_budget"]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    inputs = Inputs(tmp_path / "inputs")
    more = ("step=eager", "backbone.dropout=0.1", "optimizer.schedule=constant", "method.form=released")
    whole = train(inputs, tmp_path / "whole", "pcl", *more, "trainer.max_steps=4")
    train(inputs, tmp_path / "parts", "pcl", *more, "trainer.max_steps=2")
    assert train(inputs, tmp_path / "parts", "pcl", *more, "trainer.max_steps=4", "ckpt_path=last") == whole


def test_settings_without_meaning_are_named(tiny: Tiny) -> None:
    info = encoder(tiny, max_positions=64).backbone.info
    assert PCLConfig().check(info, run_of(max_length=32)) == []
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match=r"method\.share"):
            PCLConfig(share=share).check(info, run_of(max_length=32))
    with pytest.raises(UserError, match=r"data\.max_length=51"):
        PCLConfig().check(info, run_of(max_length=64))
    PCLConfig(augmentations=("delete",)).check(info, run_of(max_length=64))
    twice = run_of(template=Template("{sentence} again {again}"), max_length=32)
    with pytest.raises(UserError, match="stands in it twice"):
        PCLConfig().check(info, twice)
