"""Masked next-token prediction: from which state a word is predicted, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import embedlab
from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.methods import mntp
from embedlab.methods.mntp import MNTP, MNTPConfig
from embedlab.objectives.language_model import Masked
from embedlab.pooling import build_pooling
from tests.methods.baselines import Tiny, batch, encoder
from tests.methods.golden import Inputs, check_golden, train
from tests.methods.runs import run_of


def make(tiny: Tiny, **config: Any) -> MNTP:
    source = BackboneConfig(source="local", path=str(tiny("llama")), bidirectional=True)
    backbone, tokenizer = load_backbone(source, head="causal_lm")
    found = SentenceEncoder(backbone, build_pooling("mean", backbone.info), Tokenization(tokenizer))
    return MNTP(found, MNTPConfig(mask_token="▁", **config), OptimizerConfig()).eval()


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("mntp", tmp_path, monkeypatch)


def test_a_word_is_predicted_from_the_state_before_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    method = make(tiny)
    data = batch(method)
    ids, mask = data["sentence"]["input_ids"], data["sentence"]["attention_mask"]
    corrupted = ids.clone()
    corrupted[0, 3], corrupted[2, 1] = method.mask_id, method.mask_id
    width = ids.shape[1]
    places, labels = (
        torch.tensor([3, 2 * width + 1, 0]),
        torch.stack([ids[0, 3], ids[2, 1], torch.tensor(-100)]),
    )
    monkeypatch.setattr(mntp, "mask_tokens", lambda *a: Masked(corrupted, places, labels))
    states = method.encoder.backbone(corrupted, mask)[-1]
    logits = method.encoder.backbone.head(torch.stack([states[0, 2], states[2, 0]]))
    torch.testing.assert_close(method.losses(data).losses["mntp"], cross_entropy(logits.float(), labels[:2]))


def test_neither_special_tokens_nor_the_first_are_masked(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    real = mntp.mask_tokens
    monkeypatch.setattr(
        mntp, "mask_tokens", lambda ids, maskable, *a: [seen.append(maskable), real(ids, maskable, *a)][1]
    )
    method = make(tiny)
    data = batch(method)
    method.losses(data)
    special = torch.isin(data["sentence"]["input_ids"], method.special_ids)
    assert not (seen[0] & special).any()
    assert not seen[0][:, 0].any()
    assert seen[0].sum() > 20


def test_its_run_is_an_encoder_for_simcse_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    inputs = Inputs(tmp_path / "inputs")
    train(inputs, tmp_path / "mntp", "mntp", "trainer.max_steps=2")
    export = tmp_path / "mntp" / "export"
    assert embedlab.load(export).towers[0].backbone.info.kind == "encoder"
    more = (f"backbone.path={export}", "pooling=mean", "trainer.max_steps=2", "backbone.dropout=0.1")
    found = train(inputs, tmp_path / "simcse", "simcse", *more)
    assert len(found) == 2


def test_what_cannot_be_is_named(tiny: Tiny) -> None:
    info, run = make(tiny).encoder.backbone.info, run_of()
    run.backbone.bidirectional = False
    assert MNTPConfig().check(info, run) == []
    with pytest.raises(UserError, match=r"method\.probability"):
        MNTPConfig(probability=1.0).check(info, run)
    for other in (encoder(tiny, "llama").backbone.info, encoder(tiny).backbone.info):
        with pytest.raises(UserError, match="bidirectional=true"):
            MNTPConfig().check(other, run)
    with pytest.raises(UserError, match=r"method\.mask_token"):
        MNTP(make(tiny).encoder, MNTPConfig(mask_token="no such token"), OptimizerConfig())
