"""Next-token prediction: the loss of transformers' own models, over the real tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.methods.causal_lm import CausalLM, CausalLMConfig
from embedlab.pooling import build_pooling
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import DECODERS, SENTENCES


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("causal_lm", tmp_path, monkeypatch)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_the_loss_is_that_of_transformers(tiny: Callable[..., Path], model_type: str, side: str) -> None:
    folder = tiny(model_type)
    backbone, tokenizer = load_backbone(
        BackboneConfig(source="local", path=str(folder), dropout=0.0), head="causal_lm"
    )
    tokenizer.padding_side = side
    encoder = SentenceEncoder(backbone, build_pooling("mean", backbone.info), Tokenization(tokenizer))
    method = CausalLM(encoder, CausalLMConfig(), OptimizerConfig()).eval()
    view = encoder.tokenization.pad(encoder.tokenization.ids(SENTENCES[:5]))
    output = method.losses({"sentence": view})
    ids, mask = view["input_ids"], view["attention_mask"]
    assert mask.min() == 0
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    total, hits, count = 0.0, 0, 0
    for row, real in zip(ids, mask.bool(), strict=True):
        alone, n = row[real][None], int(real.sum()) - 1
        result = model(alone, labels=alone)
        total += n * float(result.loss.detach())
        hits += int((result.logits[0, :-1].argmax(-1) == alone[0, 1:]).sum())
        count += n
    assert float(output.losses["causal_lm"]) == pytest.approx(total / count, rel=1e-4)
    assert float(output.stats["accuracy"]) == pytest.approx(hits / count)


def test_an_encoder_or_a_template_is_refused() -> None:
    decoder, encoder = (SimpleNamespace(kind=kind, model_type="any") for kind in ("decoder", "encoder"))
    assert CausalLMConfig().check(decoder, run_of()) == []  # type: ignore[arg-type]
    with pytest.raises(UserError, match="method=causal_lm trains decoders"):
        CausalLMConfig().check(encoder, run_of())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="template=none"):
        CausalLMConfig().check(decoder, run_of(template=Template("{sentence}!")))  # type: ignore[arg-type]
