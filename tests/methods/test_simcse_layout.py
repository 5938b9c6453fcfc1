"""SimCSE's two layouts of a batch: first views against second ones, and every view against all others."""

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
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from embedlab.pooling import build_pooling
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
