"""SNCSE: its three views in their templates, what it is without its margin, and negations."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.methods.promptbert import PromptBERT, PromptBERTConfig
from embedlab.methods.sncse import SNCSE, SNCSEConfig
from embedlab.objectives.soft_negative import bidirectional_margin, cosine_difference
from tests.methods.baselines import Tiny, encoder
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import SENTENCES

A, B = (
    Template('This sentence : "{sentence}" means {mask}.'),
    Template('This sentence of "{sentence}" means {mask}.'),
)


def make(tiny: Tiny, **config: Any) -> SNCSE:
    torch.manual_seed(0)
    found = encoder(tiny, pooling="mask")
    found.tokenization = Tokenization(found.tokenizer, A)
    return SNCSE(found, SNCSEConfig(second_template=B, **config), OptimizerConfig()).eval()


def batch(method: SNCSE) -> dict[str, Any]:
    texts = SENTENCES[:5]
    views = method.views(method.fields(method.config, ("source", "target"), A), None)
    columns = {"source": texts, "target": tuple(f"Not {t}" for t in texts)}
    return {
        view: {**tokenization.pad(tokenization.ids(columns[column])), "hash": torch.arange(5)}
        for view, (column, tokenization) in views.items()
    }


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("sncse", tmp_path, monkeypatch)


def test_without_the_margin_it_is_promptbert_in_two_templates(tiny: Tiny) -> None:
    method = make(tiny, lam=0.0)
    plain = PromptBERTConfig(second_template=B, denoise=False)
    other = PromptBERT(method.encoder, plain, OptimizerConfig()).eval()
    other.head.load_state_dict(method.head.state_dict())
    data = batch(method)
    expected = other.losses({name: data[name] for name in ("first", "second")}).losses["info_nce"]
    torch.testing.assert_close(method.total(data)[0], expected)


def test_the_margin_is_of_the_mask_vectors_behind_the_head(tiny: Tiny) -> None:
    method = make(tiny, lam=0.5, alpha=0.2, beta=0.25)
    data = batch(method)
    z = {}
    for view, template in (("first", A), ("second", B), ("negation", B)):
        tokenization = Tokenization(method.encoder.tokenizer, template)
        (states,) = method.encoder.backbone(data[view]["input_ids"], data[view]["attention_mask"])
        pooled = method.encoder.pooling((states,), data[view]["attention_mask"], tokenization.marks)
        z[view] = method.head(pooled)
    margin = bidirectional_margin(cosine_difference(z["first"], z["second"], z["negation"]), 0.2, 0.25)
    torch.testing.assert_close(method.losses(data).losses["margin"], 0.5 * margin)
    assert margin > 0


def test_settings_without_meaning_are_named(tiny: Tiny) -> None:
    info = encoder(tiny).backbone.info
    run = run_of("parallel", pooling="mask", template=A)
    assert SNCSEConfig(second_template=B).check(info, run) == []
    for change, words in (
        ({"lam": -1.0}, "lam"), ({"alpha": 0.4}, "alpha"), ({"denoise": True}, "denoise"),
        ({"denoise_dev": True}, "denoise_dev"), ({"hard_negative_weight": 1.0}, "hard_negative_weight"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"method.{words}"):
            SNCSEConfig(**change).check(info, run)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^SNCSE needs .*template=promptbert_bert_2"):
        SNCSEConfig().check(info, run_of("parallel", pooling="mask"))


def test_negations_are_written_beside_their_sentences(tmp_path: Path) -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "negations.py"))
    text = tmp_path / "text.txt"
    text.write_text("The cat  sleeps.\n\nI see it.\nNASA flies.\nI'm here.\n")
    assert tool["main"]([str(text), str(tmp_path / "out.tsv")]) == 0
    assert (tmp_path / "out.tsv").read_text().splitlines() == [
        "sentence\tnegation",
        "The cat sleeps.\tIt is not true that the cat sleeps.",
        "I see it.\tIt is not true that I see it.",
        "NASA flies.\tIt is not true that NASA flies.",
        "I'm here.\tIt is not true that I'm here.",
    ]
    assert tool["main"](["--released", str(text), str(tmp_path / "out.tsv")]) == 0
    assert (tmp_path / "out.tsv").read_text().splitlines()[1:3] == [
        "The cat sleeps.\tNot The cat sleeps.",
        "I see it.\tNot I see it.",
    ]
    assert tool["released"]("so it is") == ("so it is .", "Not so it is .")
    assert tool["main"]([]) == tool["main"](["--released", str(text)]) == 2
