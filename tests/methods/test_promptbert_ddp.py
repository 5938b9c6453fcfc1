"""PromptBERT's two passes (sentences, bare templates) under DDP: the gradient of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.methods.promptbert import PromptBERT, PromptBERTConfig
from embedlab.pooling import build_pooling
from tests.ranks import Step, gradients, run_on_two

TEXTS = ["a man is playing", "the old house", "two dogs run in the lake", "it rains"]
TEMPLATES = ('This sentence of "{sentence}" means {mask}.', 'This sentence : "{sentence}" means {mask}.')


def method(folder: str) -> PromptBERT:
    torch.manual_seed(0)
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=folder, dropout=0.0))
    pooling = build_pooling({"name": "s2sent", "n": 2, "r": 4, "pool": "mask"}, backbone.info)
    encoder = SentenceEncoder(backbone, pooling, Tokenization(tokenizer, Template(TEMPLATES[0])))
    made = PromptBERT(encoder, PromptBERTConfig(second_template=Template(TEMPLATES[1])), OptimizerConfig())
    return made.train()


def batch(made: PromptBERT, rows: slice) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": torch.arange(len(TEXTS))[rows]}
    for view, template in zip(("first", "second"), TEMPLATES, strict=True):
        tokenization = Tokenization(made.encoder.tokenizer, Template(template))
        tokens = tokenization.pad(tokenization.ids(TEXTS))
        found[view] = {k: v[rows] for k, v in tokens.items()} | {"hash": torch.arange(len(TEXTS))[rows]}
    return found


def worker(rank: int, folder: str, out: str) -> None:
    made = method(folder)
    step = DistributedDataParallel(Step(made))
    for _ in range(2):  # the second step finds any parameter that the first left without a gradient
        step.zero_grad()
        step(batch(made, slice(2 * rank, 2 * rank + 2))).backward()
    if rank == 0:
        torch.save(gradients(made), out)


@pytest.mark.timeout(600)
def test_two_ranks_have_the_gradient_of_the_whole_batch(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = str(tiny("bert")), str(tmp_path / "gradients")
    run_on_two(worker, folder, out)
    alone = method(folder)
    alone.total(batch(alone, slice(None)))[0].backward()
    expected, found = gradients(alone), torch.load(out, weights_only=True)
    assert found.keys() == expected.keys()
    assert {n for n, _ in alone.named_parameters()} == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
