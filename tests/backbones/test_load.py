"""Weights: in which precision, with which head and dropout, and what happens when they are not all there."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertModel

from embedlab.backbones import load_backbone, load_pooler, train_tokenizer
from embedlab.backbones.load import write_model
from embedlab.config.backbone import BackboneConfig
from embedlab.errors import UserError
from tests.support import DECODERS, ENCODERS, MODEL_TYPES, SENTENCES, tiny_backbone

Tiny = Callable[..., Path]


def local(folder: Path, **more: Any) -> BackboneConfig:
    return BackboneConfig(source="local", path=str(folder), **more)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 200, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return ids, mask


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_and_logits_are_those_of_hugging_face(tiny: Tiny, model_type: str) -> None:
    folder = tiny(model_type)
    head = "masked_lm" if model_type in ENCODERS else "causal_lm"
    theirs = (
        (AutoModelForMaskedLM if head == "masked_lm" else AutoModelForCausalLM).from_pretrained(folder).eval()
    )
    backbone, _ = load_backbone(local(folder), head=head)  # type: ignore[arg-type]
    assert not backbone.training
    ids, mask = batch()
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        hidden = backbone(ids, mask, all_layers=True)
        logits = backbone.head(backbone(ids, mask)[0])
        assert backbone.head(hidden[-1][0, 0]).shape == (theirs.config.vocab_size,)
    assert len(hidden) == 3
    assert len(backbone.blocks) == 2
    real = mask.bool()
    for ours, other in zip(hidden, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], other[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[real], expected.logits[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "gpt2"])
def test_a_tied_head_stays_tied_and_survives_writing(tiny: Tiny, tmp_path: Path, model_type: str) -> None:
    head = "masked_lm" if model_type in ENCODERS else "causal_lm"
    backbone, tokenizer = load_backbone(local(tiny(model_type)), head=head)  # type: ignore[arg-type]
    words = backbone.model.get_input_embeddings().weight
    assert sum(p is words for p in backbone.head.parameters()) == 1
    ids, mask = batch()
    with torch.no_grad():
        words += 0.1
        expected = backbone.head(backbone(ids, mask)[0])
    write_model(backbone, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_backbone(local(tmp_path), head=head)  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(again.head(again(ids, mask)[0]), expected, rtol=0, atol=1e-6)


def test_weights_are_fp32_unless_asked(tiny: Tiny, tmp_path: Path) -> None:
    """transformers 5 takes the checkpoint's own precision."""
    whole, tokenizer = load_backbone(local(tiny("bert")), head="masked_lm")
    write_model(whole, tmp_path, torch.float16)
    tokenizer.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {v.dtype for v in stored.values()} == {torch.float16}
    assert "cls.predictions.decoder.weight" not in stored  # tied, and not stored twice
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert {p.dtype for p in load_backbone(local(tmp_path))[0].parameters()} == {torch.float32}
    assert {p.dtype for p in load_backbone(local(tmp_path, dtype="bfloat16"))[0].parameters()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_dropout_is_set_everywhere(tiny: Tiny, model_type: str) -> None:
    backbone, _ = load_backbone(local(tiny(model_type), dropout=0.5))
    assert backbone.info.dropout == 0.5
    assert all(m.p == 0.5 for m in backbone.modules() if isinstance(m, torch.nn.Dropout))
    ids, mask = batch()
    backbone.train()
    first, second = (backbone(ids, mask)[0] for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    without, _ = load_backbone(local(tiny(model_type), dropout=0.0))
    without.train()
    assert without.info.dropout == 0
    torch.testing.assert_close(without(ids, mask)[0], without(ids, mask)[0], rtol=0, atol=0)


def test_pooler_is_left_out_and_can_be_had(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "m")
    assert not [n for n, _ in load_backbone(local(folder))[0].named_parameters() if "pooler" in n]
    assert load_pooler(local(folder)) is None  # a masked-language model has none
    model = BertModel.from_pretrained(folder)
    model.save_pretrained(folder)
    pooler = load_pooler(local(folder))
    assert pooler is not None
    states = torch.randn(2, 32)
    torch.testing.assert_close(pooler(states), torch.tanh(model.pooler.dense(states)))
    assert load_pooler(local(tiny("distilbert"))) is None


@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_a_missing_head_is_not_started_by_accident(
    tiny: Tiny, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    head: Any = "masked_lm" if model_type in ENCODERS else "causal_lm"
    folder = tiny(model_type, head=False)
    with pytest.raises(UserError, match="no language-modelling head") as caught:
        load_backbone(local(folder), head=head)
    assert "backbone.new_head=true" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        backbone, _ = load_backbone(local(folder, new_head=True), head=head)
    assert "random weights" in caplog.text
    assert backbone.head is not None


def test_a_head_that_does_not_fit_the_architecture(tiny: Tiny) -> None:
    with pytest.raises(UserError, match="no masked_lm head fits"):
        load_backbone(local(tiny("gpt2")), head="masked_lm")
    with pytest.raises(UserError, match="no causal_lm head fits"):
        load_backbone(local(tiny("bert")), head="causal_lm")


def test_missing_and_broken_weights(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "m")
    file = folder / "model.safetensors"
    whole = load_file(file)
    save_file({k: v for k, v in whole.items() if "layer.1." not in k}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 16 of the model's weights, the first .*layer\.1"):
        load_backbone(local(folder))
    odd = {k: v[:, :8].contiguous() if "query.weight" in k else v for k, v in whole.items()}
    save_file(odd, file, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"query\.weight is 32x8 in the checkpoint and 32x32 by its configuration"
    ):
        load_backbone(local(folder))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read") as caught:
        load_backbone(local(folder))
    assert "\n" not in str(caught.value)
    file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_backbone(local(folder))


def test_a_folder_without_tokenizer(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load_backbone(local(folder))


def test_known_names_offline_fail_at_loading() -> None:
    with pytest.raises(UserError, match=r"backbone\.name=FacebookAI/roberta-large"):
        load_backbone(BackboneConfig(source="hub", name="FacebookAI/roberta-large"))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_tokenizer_is_fit_for_batches(tiny: Tiny, model_type: str) -> None:
    _, tokenizer = load_backbone(local(tiny(model_type)))
    assert tokenizer.pad_token is not None
    assert tokenizer.padding_side == "right"
    assert tokenizer.model_max_length == 64


def test_position_limits_count_tokens(tmp_path: Path) -> None:
    """RoBERTa's table of positions has two rows that no token gets."""
    backbone, tokenizer = load_backbone(local(tiny_backbone("roberta", tmp_path, max_positions=16)))
    assert tokenizer.model_max_length == backbone.info.max_positions == 16
    ids = torch.randint(10, 50, (1, 16))
    assert torch.isfinite(backbone(ids, torch.ones_like(ids))[0]).all()


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("bert", "wordpiece"), ("distilbert", "wordpiece"), ("roberta", "bpe"), ("modernbert", "wordpiece"),
     ("gpt2", "bpe"), ("llama", "bpe"), ("opt", "bpe"), ("qwen2", "bpe"), ("gpt_neox", "bpe"), ("mistral", "bpe")],
)  # fmt: skip
def test_fresh(model_type: str, kind: str, tmp_path: Path) -> None:
    shape = {
        "model_type": model_type, "layers": 3, "width": 24, "heads": 2, "ffn": 40, "vocab_size": 512,
        "max_positions": 32, "tokenizer": {"type": kind},
    }  # fmt: skip
    config = BackboneConfig(source="fresh", name="x", fresh=shape, dropout=0.2)
    head: Any = "causal_lm" if model_type in DECODERS else "masked_lm"
    tokenizer = train_tokenizer(shape, SENTENCES)
    torch.manual_seed(0)
    backbone, tokenizer = load_backbone(config, head=head, tokenizer=tokenizer)
    ids = torch.tensor([tokenizer("a cat")["input_ids"]])
    assert backbone.head(backbone(ids, torch.ones_like(ids))[0]).shape == (*ids.shape, 512)
    assert (len(backbone.blocks), backbone.info.width, backbone.info.max_positions) == (3, 24, 32)
    assert any(p.shape in ((40, 24), (24, 40), (80, 24)) for p in backbone.blocks.parameters())
    assert backbone.info.dropout == 0.2
    torch.manual_seed(0)
    again, _ = load_backbone(config, head=head, tokenizer=tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(backbone.parameters(), again.parameters(), strict=True))
    write_model(backbone, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_backbone(local(tmp_path))
    torch.testing.assert_close(loaded(ids)[0], backbone(ids)[0], rtol=0, atol=1e-5)


def test_fresh_needs_its_tokenizer() -> None:
    with pytest.raises(ValueError, match="train_tokenizer"):
        load_backbone(BackboneConfig(source="fresh", name="x", fresh={"layers": 1}))
