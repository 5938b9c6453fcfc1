"""Losses of a batch whose views tell their capacity: those of the padded batch, and so are the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d
from transformers import AutoModel

from embedlab.backbones import load_backbone
from embedlab.backbones.adapters import adapt
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.module import Method
from embedlab.methods.csesfp import CSESFP
from embedlab.methods.promptbert import PromptBERT, PromptBERTConfig
from embedlab.methods.prompteol import PromptEOL
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from embedlab.pooling import build_pooling, pooling_config
from embedlab.run.run import build
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


TEMPLATES = {
    "short": 'It : "{sentence}" means a word{rep1}, so it is{rep2}',
    "prefixed": 'After thinking step by step , this sentence : "{sentence}" means{rep1} it can be{rep2}',
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("adapter", [None, 4])
@pytest.mark.parametrize("pooling", ["rep2", "rep_concat", "last", "mean"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("method_class", [CSESFP, PromptEOL])
def test_decoders(
    tiny: Tiny, method_class: Any, template: str, pooling: str, adapter: int | None, side: str
) -> None:
    """Grouped heads, rotary positions from the place within the row, and marks behind a prefix."""
    base = BackboneConfig(source="local", path=str(tiny("llama")))
    backbone, tokenizer = load_backbone(base)
    adapt(backbone, AdapterConfig(name="lora", r=adapter), base)
    tokenizer.padding_side = side
    tokenization = Tokenization(tokenizer, Template(TEMPLATES[template], "text"), 16)
    encoder = SentenceEncoder(
        backbone, build_pooling(pooling_config({"name": pooling}), backbone.info), tokenization
    )
    method = method_class(encoder, method_class.config_class(), OptimizerConfig())
    both(method, {"sentence": view(tokenization, SENTENCES[:6])})


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


@pytest.mark.parametrize(("model_type", "n"), [("bert", 1), ("bert", 3), ("roberta", 3)])
def test_the_released_gate_sees_the_padded_batch(
    model_type: str, n: int, tiny: Tiny, compose_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """S2Sent's released code averages blocks and tokens to 6 x 6, padding included, before its DCT."""
    config = compose_run(
        "pooling=s2_official", "pooling.r=4", f"pooling.n={n}", model_type=model_type, layers=4
    )
    method, _ = build(config, tmp_path)
    method.eval()
    seen: list[torch.Tensor] = []
    method.encoder.pooling.gate.register_forward_pre_hook(lambda gate, inputs: seen.append(inputs[0]))
    rows = view(method.encoder.tokenization, SENTENCES[:6])
    mask = rows["attention_mask"]
    assert int(mask.sum()) < 0.9 * mask.numel()
    batch = {"rows": torch.arange(6), "sentence": rows, "tokens": int(mask.sum()), "cells": mask.numel()}
    method.training_step(batch, 0)

    reference = AutoModel.from_pretrained(tiny(model_type, layers=4)).eval()
    with torch.no_grad():
        states = reference(rows["input_ids"], mask, output_hidden_states=True).hidden_states
    grid = adaptive_avg_pool2d(torch.stack(states[-n - 1 : -1], -1).permute(0, 2, 3, 1), 6)
    place = torch.arange(6) + 0.5
    basis = torch.stack([torch.cos(math.pi * k * place / 6) * math.sqrt((1 + (k > 0)) / 6) for k in range(6)])
    groups = zip(grid.chunk(4, 1), ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True)
    expected = torch.cat([(part * torch.outer(basis[a], basis[b])).sum((2, 3)) for part, (a, b) in groups], 1)
    torch.testing.assert_close(seen[0][:6], expected, rtol=1e-4, atol=1e-5)


def _noting(sizes: list[int], forward: Callable[..., Any]) -> Callable[..., Any]:
    def noting(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(hidden.shape[0] * hidden.shape[1])
        return forward(hidden, *args, **kwargs)

    return noting
