"""Masked language modelling: what is predicted, what the loss is, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.methods.masked_lm import MaskedLM, MaskedLMConfig, MaskedPrediction
from embedlab.pooling import build_pooling
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import SENTENCES, tiny_tokenizer

INFO = BackboneInfo("encoder", 2, 32, 64, True, 0.1, "bert", True)
TOKENIZER = tiny_tokenizer("bert")
PREDICTION = MaskedPrediction(TOKENIZER, 0.5, "bernoulli")


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("masked_lm", tmp_path, monkeypatch)


@given(st.integers(0, 2**31), st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=4))
def test_special_tokens_are_never_predicted_and_unknown_words_are(seed: int, texts: list[str]) -> None:
    tokens = TOKENIZER([*texts, "\N{SNOWMAN} " * 8], padding=True, return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    torch.manual_seed(seed)
    masked = PREDICTION.mask(ids, mask)
    predicted = masked.labels[masked.labels != -100]
    special = set(TOKENIZER.all_special_ids) - {TOKENIZER.unk_token_id}
    assert not special & set(predicted.tolist())
    changed = (masked.input_ids != ids).flatten().nonzero().flatten()
    assert set(changed.tolist()) <= set(masked.positions[masked.labels != -100].tolist())
    torch.manual_seed(0)
    assert TOKENIZER.unk_token_id in PREDICTION.mask(ids, mask).labels


def test_the_loss_is_that_of_all_logits_at_the_selected_positions(tiny: Callable[..., Path]) -> None:
    source = BackboneConfig(source="local", path=str(tiny("bert")), dropout=0.0)
    backbone, tokenizer = load_backbone(source, head="masked_lm")
    encoder = SentenceEncoder(backbone, build_pooling("mean", backbone.info), Tokenization(tokenizer))
    method = MaskedLM(encoder, MaskedLMConfig(probability=0.4), OptimizerConfig()).eval()
    tokens = encoder.tokenization.pad(encoder.tokenization.ids(SENTENCES[:5]))
    torch.manual_seed(3)
    loss = method.losses({"sentence": tokens}).losses["masked_lm"]
    torch.manual_seed(3)
    masked = method.prediction.mask(tokens["input_ids"], tokens["attention_mask"])
    labels = torch.full_like(tokens["input_ids"], -100).flatten()
    labels[masked.positions] = masked.labels
    logits = backbone.head(backbone(masked.input_ids, tokens["attention_mask"])[-1])
    torch.testing.assert_close(loss, cross_entropy(logits.flatten(0, 1), labels))


@pytest.mark.parametrize(
    ("config", "info", "run", "words"),
    [
        (MaskedLMConfig(probability=0.0), INFO, {}, r"method\.probability=0\.0"),
        (MaskedLMConfig(probability=1.0), INFO, {}, r"method\.probability=1\.0"),
        (MaskedLMConfig(), replace(INFO, kind="decoder"), {}, "method=masked_lm trains encoders"),
        (MaskedLMConfig(), replace(INFO, has_mask_token=False), {}, "no mask token"),
        (MaskedLMConfig(), INFO, {"template": Template("{sentence} means {mask}.")}, "template=none"),
    ],
)
def test_what_cannot_be_masked_is_refused(
    config: MaskedLMConfig, info: BackboneInfo, run: dict[str, Template], words: str
) -> None:
    assert MaskedLMConfig().check(INFO, run_of()) == []
    with pytest.raises(UserError, match=words):
        config.check(info, run_of(**run))
