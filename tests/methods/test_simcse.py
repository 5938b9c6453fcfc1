"""SimCSE: its golden losses, its heads, and two layouts of a batch (first views against second ones, and all)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.methods import method_config
from embedlab.methods.simcse import SimCSE, SimCSEConfig, stacked
from embedlab.pooling import build_pooling
from tests.methods.golden import check_golden
from tests.methods.runs import run_of

CONFIG = SimCSEConfig(mlp="none", layout="pairs")
FIRST = ("The cat runs.", "Two dogs", "a lake", "rain")
SECOND = ("A cat runs.", "dogs, two", "The lake", "It rains.")


def make(tiny: Callable[..., Path], config: SimCSEConfig) -> SimCSE:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny("bert"))))
    encoder = SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))
    return SimCSE(encoder, config, OptimizerConfig()).eval()


def batch(method: SimCSE, second: tuple[str, ...] = SECOND) -> dict[str, Any]:
    known = sorted({*FIRST, *second})
    made = {}
    for view, texts in (("source", FIRST), ("target", second)):
        rows = method.encoder.tokenization.pad(method.encoder.tokenization.ids(texts))
        made[view] = rows | {"hash": torch.tensor([known.index(text) for text in texts])}
    return made


def test_stacked_views_are_padded_each_with_its_own() -> None:
    views = [
        {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 1]])},
        {"input_ids": torch.tensor([[7, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1]])},
    ]
    ids, mask = stacked(views, pad_id=3)
    assert ids.tolist() == [[5, 6, 3], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 0], [0, 1, 1]]


def test_pairs_hold_every_view_against_all_others(tiny: Callable[..., Path]) -> None:
    method = make(tiny, CONFIG)
    data = batch(method)
    loss = method.losses(data).losses["info_nce"]
    encoder = method.encoder
    views = [normalize(encoder(v["input_ids"], v["attention_mask"]), dim=-1) for v in data.values()]
    z = torch.cat(views)
    cosines = (z @ z.T / 0.05).fill_diagonal_(float("-inf"))
    torch.testing.assert_close(loss, cross_entropy(cosines, torch.arange(8).roll(4)))
    rows = make(tiny, replace(CONFIG, layout="rows")).losses(data).losses["info_nce"]
    torch.testing.assert_close(rows, cross_entropy(views[0] @ views[1].T / 0.05, torch.arange(4)))


def test_a_text_of_either_view_that_comes_again_is_no_negative(tiny: Callable[..., Path]) -> None:
    method = make(tiny, CONFIG)
    data = batch(method, (*SECOND[:3], SECOND[0]))
    loss = method.losses(data).losses["info_nce"]
    encoder = method.encoder
    z = normalize(torch.cat([encoder(v["input_ids"], v["attention_mask"]) for v in data.values()]), dim=-1)
    cosines = (z @ z.T / 0.05).fill_diagonal_(float("-inf"))
    for anchor, candidate in ((4, 7), (7, 4), (0, 7), (3, 4)):
        cosines[anchor, candidate] = float("-inf")
    torch.testing.assert_close(loss, cross_entropy(cosines, torch.arange(8).roll(4)))


def test_layouts_without_meaning_are_named(tiny: Callable[..., Path]) -> None:
    info = make(tiny, CONFIG).encoder.backbone.info
    assert CONFIG.check(info, run_of()) == []
    with pytest.raises(UserError, match=r"method\.layout=columns"):
        method_config({"name": "simcse", "layout": "columns"})
    with pytest.raises(UserError, match=r"hard negatives.*data=parallel"):
        CONFIG.check(info, run_of("nli"))


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("simcse", tmp_path, monkeypatch)


def test_golden_losses_of_supervised_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("simcse_supervised", tmp_path, monkeypatch)


def test_two_passes_differ_by_dropout_alone(tiny: Callable[..., Path]) -> None:
    method = make(tiny, SimCSEConfig())
    data = {"sentence": batch(method)["source"]}
    cosine = method.losses(data).stats["positive_cosine"]
    torch.testing.assert_close(cosine, torch.ones(()))
    assert method.forward_passes == 2.0
    method.train()
    assert method.losses(data).stats["positive_cosine"] < 0.999


def test_the_head_is_of_training_alone(tiny: Callable[..., Path]) -> None:
    method = make(tiny, SimCSEConfig())
    view = batch(method)["source"]
    before = method.encoder(view["input_ids"], view["attention_mask"])
    with torch.no_grad():
        method.head[0].weight.zero_()
    assert torch.equal(method.encoder(view["input_ids"], view["attention_mask"]), before)
    still = replace(method.encoder.backbone.info, dropout=0.0)
    with pytest.raises(UserError, match=r"backbone\.dropout"):
        SimCSEConfig().check(still, run_of())
    (warning,) = SimCSEConfig().check(method.encoder.backbone.info, run_of(pooling="cls_mlp"))
    assert "second head on pooling=cls_mlp" in warning
    assert SimCSEConfig(mlp="none").check(method.encoder.backbone.info, run_of(pooling="cls_mlp")) == []


def test_a_hard_negatives_weight_is_added_to_its_own_logit(tiny: Callable[..., Path]) -> None:
    method = make(tiny, SimCSEConfig(mlp="none", hard_negative_weight=0.5))
    data = batch(method)
    views = {"anchor": data["source"], "positive": data["target"], "negative": data["source"]}
    views["negative"] = {**data["source"], "hash": torch.arange(90, 94)}
    a, p, n = (normalize(method.encoder(v["input_ids"], v["attention_mask"]), dim=-1) for v in views.values())
    logits = a @ torch.cat([p, n]).T / 0.05 + 0.5 * torch.cat([torch.zeros(4, 4), torch.eye(4)], 1)
    loss = method.losses(views).losses["info_nce"]
    torch.testing.assert_close(loss, cross_entropy(logits, torch.arange(4)))
