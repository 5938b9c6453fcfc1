"""Two ranks give the adapters' gradients of one big batch, also with 4 bits, chunks and checkpointed blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.backbones import load_backbone
from embedlab.backbones.adapters import adapt
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.methods.csesfp import CSESFP, CSESFPConfig
from embedlab.methods.prompteol import PromptEOL, PromptEOLConfig
from embedlab.pooling import build_pooling
from tests.ranks import gradients, two_ranks

TWO_STAGES = Template('It : "{sentence}" means a word{rep1}, so it is{rep2}', "text")
TEXTS = ["The girl reads.", "Two dogs run", "Rain.", "He said yes", "The girl reads.", "A plane"]
PLAIN = AdapterConfig("lora", r=2, dropout=0.0)
SMALL = AdapterConfig("qlora", r=2, dropout=0.0, quantization="nf4", gradient_checkpointing=True)
CASES: list[tuple[Any, Any, AdapterConfig, int | None]] = [
    (CSESFP, CSESFPConfig(), PLAIN, None),
    (PromptEOL, PromptEOLConfig(), SMALL, 2),
]


def _method(folder: str, case: int) -> Any:
    cls, config, adapter, chunk = CASES[case]
    base = BackboneConfig(source="local", path=folder)
    backbone, tokenizer = load_backbone(base)
    torch.manual_seed(0)
    adapt(backbone, adapter, base, torch.device("cpu"))
    with torch.no_grad():
        for name, p in backbone.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.2)
    pooling = build_pooling("rep2", backbone.info)
    encoder = SentenceEncoder(backbone, pooling, Tokenization(tokenizer, TWO_STAGES))
    return cls(encoder, config, OptimizerConfig(chunk=chunk)).train()


def _batch(method: Any, rows: slice) -> dict[str, Any]:
    tokenization = method.encoder.tokenization
    view = tokenization.pad(tokenization.ids(TEXTS), 8)
    hashes = torch.tensor([sorted(set(TEXTS)).index(t) for t in TEXTS])
    return {"sentence": {k: v[rows] for k, v in (view | {"hash": hashes}).items()}}


def _half(folder: str, case: int, rows: slice) -> tuple[Any, dict[str, Any]]:
    method = _method(folder, case)
    return method, _batch(method, rows)


@pytest.mark.timeout(240)
def test_two_ranks_give_the_gradient_of_one_big_batch(tiny: Callable[..., Path]) -> None:
    folder = str(tiny("llama", width=64))
    found = two_ranks(_half, folder, len(CASES), 3)
    for case, halves in enumerate(found):
        method, batch = _half(folder, case, slice(None))
        method.total(batch)[0].backward()
        expected = gradients(method)
        assert halves.keys() == expected.keys()
        assert len(expected) == 28
        for name, value in expected.items():
            torch.testing.assert_close(halves[name], value, atol=1e-5, rtol=1e-3)
