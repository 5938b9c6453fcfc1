"""Distillation: k1 times a contrast over teacher and student, the rest their distance; the teacher stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.methods.distil import Distil, DistilConfig
from embedlab.objectives.pair_nce import interleave, pair_nce
from embedlab.pooling import build_pooling
from tests.methods.baselines import encoder as wide_encoder
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import SENTENCES

Tiny = Callable[..., Path]


def encoder(tiny: Tiny, seed: int) -> SentenceEncoder:
    source = BackboneConfig(source="local", path=str(tiny("bert", seed=seed)))
    backbone, tokenizer = load_backbone(source)
    return SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))


def make(tiny: Tiny, teacher: int = 1, **config: Any) -> Distil:
    return Distil(encoder(tiny, 0), DistilConfig(**config), OptimizerConfig(), encoder(tiny, teacher)).eval()


def batch(method: Distil, texts: tuple[str, ...] = SENTENCES[:6]) -> dict[str, Any]:
    view = method.encoder.tokenization.pad(method.encoder.tokenization.ids(texts))
    return {"sentence": {**view, "hash": torch.tensor([sorted(set(texts)).index(t) for t in texts])}}


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("distil", tmp_path, monkeypatch)


@pytest.mark.parametrize("k1", [0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("mask_duplicates", [True, False])
def test_two_weighted_terms(tiny: Tiny, k1: float, mask_duplicates: bool) -> None:
    """With a sentence that comes again, which is no negative unless as released."""
    method = make(tiny, k1=k1, mask_duplicates=mask_duplicates)
    data = batch(method, (*SENTENCES[:5], SENTENCES[0]))
    view = data["sentence"]
    student, teacher = (
        e(view["input_ids"], view["attention_mask"]) for e in (method.encoder, method.teachers[0].encoder)
    )
    rows, hashes = interleave(teacher, student), interleave(view["hash"], view["hash"])
    masked = {"anchor_hashes": hashes, "candidate_hashes": hashes} if mask_duplicates else {}
    losses = method.losses(data).losses
    torch.testing.assert_close(losses["contrast"], k1 * pair_nce(rows, rows, 0.05, **masked).loss)
    torch.testing.assert_close(losses["l1"], (1 - k1) * (student - teacher).abs().mean())


def test_a_perfect_student_has_no_distance_left(tiny: Tiny) -> None:
    method = make(tiny, teacher=0)
    output = method.losses(batch(method))
    assert output.losses["l1"] == 0
    torch.testing.assert_close(output.stats["positive_cosine"], torch.ones(()))


def test_the_teacher_is_no_part_of_the_model(tiny: Tiny) -> None:
    method = make(tiny).train()
    assert not method.teachers[0].encoder.training
    trained = {id(p) for p in method.trained()}
    assert trained
    assert not trained & {id(p) for p in method.teachers[0].encoder.parameters()}
    assert set(method.state_dict()) == {f"encoder.{k}" for k in method.encoder.state_dict()}
    sum(method.losses(batch(method)).losses.values()).backward()
    assert all(p.grad is None for p in method.teachers[0].encoder.parameters())
    assert any(p.grad is not None for p in method.encoder.parameters())


def test_a_teacher_of_another_width_is_told_of_the_form_that_takes_it(tiny: Tiny) -> None:
    student, teacher = encoder(tiny, 0), wide_encoder(tiny, width=16)
    config = DistilConfig(teacher="runs/twin")
    with pytest.raises(UserError, match=r"32 and 16 .*method\.teacher=runs/twin.*Fix: method\.k1=null"):
        Distil(student, config, OptimizerConfig(), teacher)
    Distil(student, replace(config, k1=None, kl=1.0), OptimizerConfig(), teacher)


def test_settings_without_meaning_are_named(tiny: Tiny) -> None:
    info, config = make(tiny).encoder.backbone.info, DistilConfig(teacher="runs/twin")
    assert config.check(info, run_of()) == []
    assert replace(config, k1=None, kl=1.0, teacher=["a", "b"]).check(info, run_of()) == []  # type: ignore[arg-type]
    for change, words in (
        ({"teacher": None}, "method.teacher"),
        ({"teacher": []}, "there is no teacher"),
        ({"teacher": ["a", ""]}, "an empty name"),
        ({"teacher": ["a", "b"]}, r"one teacher.*method\.k1=null"),
        ({"k1": 1.5}, "method.k1=1.5"),
        ({"k1": None}, r"no loss.*method\.cosine=1"),
        *(({key: -0.1}, f"method.{key}=-0.1") for key in ("cosine", "similarity", "kl")),
        *(({key: float("nan")}, f"method.{key}=nan") for key in ("k1", "cosine", "similarity", "kl")),
    ):
        with pytest.raises(UserError, match=words):
            replace(config, **change).check(info, run_of())  # type: ignore[arg-type]
