"""Losses of a batch whose views tell their capacity: those of the padded batch, and so are the gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.module import Method
from embedlab.methods.promptbert import PromptBERT, PromptBERTConfig
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from embedlab.pooling import build_pooling, pooling_config
from tests.support import SENTENCES

Tiny = Callable[..., Path]


def view(tokenization: Tokenization, texts: tuple[str, ...]) -> dict[str, Any]:
    rows = tokenization.pad(tokenization.ids(texts), 8)
    return {**rows, "hash": torch.arange(len(texts))}


def both(method: Method, batch: dict[str, Any]) -> None:
    method.eval()
    found = []
    for capacity in (False, True):
        views = {
            name: {**v, "token_budget": int(v["attention_mask"].sum()) + 20} if capacity else v
            for name, v in batch.items()
        }
        loss = method.losses(views).losses["info_nce"]
        grads = torch.autograd.grad(loss, method.trained(), allow_unused=True)
        found.append((loss, [g for g in grads if g is not None]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    for got, want in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pooling", ["cls", "mean", "s2sent"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_simcse(tiny: Tiny, model_type: str, pooling: str) -> None:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny(model_type))))
    settings = pooling_config({"name": pooling})
    encoder = SentenceEncoder(backbone, build_pooling(settings, backbone.info), Tokenization(tokenizer))
    method = SimCSE(encoder, SimCSEConfig(), OptimizerConfig())
    both(method, {"sentence": view(encoder.tokenization, SENTENCES[:6])})
    pairs = {
        "anchor": view(encoder.tokenization, SENTENCES[:5]),
        "positive": view(encoder.tokenization, SENTENCES[5:10]),
    }
    both(method, pairs)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_promptbert(tiny: Tiny, model_type: str) -> None:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny(model_type))))
    tokenization = Tokenization(tokenizer, Template('This sentence : "{sentence}" means {mask}.'))
    pooling = build_pooling(pooling_config({"name": "mask"}), backbone.info)
    method = PromptBERT(
        SentenceEncoder(backbone, pooling, tokenization), PromptBERTConfig(), OptimizerConfig()
    )
    both(method, {name: view(tokenization, SENTENCES[:6]) for name in ("first", "second")})


def test_an_eager_step_on_the_cpu_computes_true_tokens_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny("bert"))))
    pooling = build_pooling(pooling_config({"name": "cls"}), backbone.info)
    method = SimCSE(
        SentenceEncoder(backbone, pooling, Tokenization(tokenizer)), SimCSEConfig(), OptimizerConfig()
    )
    method.eval()
    sizes: list[int] = []
    first: Any = backbone.blocks[0]
    monkeypatch.setattr(first, "forward", _noting(sizes, first.forward))
    rows = torch.arange(6)
    batch: dict[str, Any] = {"rows": rows, "sentence": view(method.encoder.tokenization, SENTENCES[:6])}
    mask = batch["sentence"]["attention_mask"]
    batch |= {"tokens": int(mask.sum()), "padded_tokens": mask.numel()}
    losses = [method.training_step(batch, 0)]
    assert method.runner.padded_tokens(batch) == mask.numel()
    method.runner.packing = True
    losses.append(method.training_step(batch, 0))
    assert method.runner.padded_tokens(batch) == int(mask.sum())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    assert sizes == [2 * mask.numel(), 2 * int(mask.sum())]

    full = {"rows": rows, "sentence": {**batch["sentence"], "attention_mask": torch.ones_like(mask)}}
    assert method.runner.without_padding(method, full) is full
    monkeypatch.setattr(method, "optimizer_config", OptimizerConfig(chunk=2))
    assert method.runner.without_padding(method, batch) is batch


def _noting(sizes: list[int], forward: Callable[..., Any]) -> Callable[..., Any]:
    def noting(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(hidden.shape[0] * hidden.shape[1])
        return forward(hidden, *args, **kwargs)

    return noting
