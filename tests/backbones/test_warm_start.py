"""A fresh backbone that begins with another checkpoint's body."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.backbones import load_backbone, probe, train_tokenizer
from embedlab.backbones.load import write_model
from embedlab.backbones.warm_start import shared_tokens
from embedlab.config.backbone import BackboneConfig
from embedlab.errors import UserError
from tests.support import SENTENCES

TEXTS = [f"{a[: len(a) // 2]} {b[len(b) // 2 :]}" for a in SENTENCES for b in SENTENCES]
DONOR = {"model_type": "bert", "tokenizer": {"type": "wordpiece", "lowercase": True}, "max_positions": 40}
FRESH = {"model_type": "xlm-roberta", "tokenizer": {"type": "bpe", "lowercase": False}, "max_positions": 48}
SHAPE = {"layers": 2, "width": 16, "heads": 2, "ffn": 24, "vocab_size": 420}


def make(fresh: dict[str, Any], head: Any = "masked_lm") -> tuple[Any, Any]:
    config = BackboneConfig(source="fresh", name="x", fresh=SHAPE | fresh)
    return load_backbone(config, head=head, tokenizer=train_tokenizer(SHAPE | fresh, TEXTS))


def save(backbone: Any, tokenizer: Any, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    write_model(backbone, folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def donor(tmp_path: Path) -> tuple[Any, Any, Path]:
    torch.manual_seed(0)
    backbone, tokenizer = make(DONOR)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.normal_()
    return backbone, tokenizer, save(backbone, tokenizer, tmp_path / "donor")


def test_body_head_and_shared_tokens_are_the_donors(donor: tuple[Any, Any, Path]) -> None:
    theirs, their_tokenizer, folder = donor
    ours, tokenizer = make(FRESH | {"init_from": str(folder)})
    mine, his = dict(ours.model.named_parameters()), dict(theirs.model.named_parameters())
    for name in mine:
        if "word_embeddings" not in name and "position_embeddings" not in name:
            assert torch.equal(mine[name], his[name]), name
    positions = "embeddings.position_embeddings.weight"
    assert torch.equal(mine[positions][2:42], his[positions])  # RoBERTa's begin at 2
    assert torch.equal(ours.head.lm_head.dense.weight, theirs.head.cls.predictions.transform.dense.weight)
    here, there = shared_tokens(tokenizer, their_tokenizer)
    words = "embeddings.word_embeddings.weight"
    kept = here != tokenizer.pad_token_id
    assert torch.equal(mine[words][here[kept]], his[words][there[kept]])
    assert torch.equal(ours.head.lm_head.decoder.bias[here], theirs.head.cls.predictions.decoder.bias[there])
    new = torch.ones(len(tokenizer), dtype=torch.bool)
    new[here] = False
    rows, drawn = his[words][there], mine[words][new]
    assert len(drawn) > 0
    assert len(here) > 100
    assert torch.allclose(drawn.std(), rows.std(), rtol=0.2)
    assert ours.head.lm_head.decoder.weight.data_ptr() == mine[words].data_ptr()


def test_tokens_are_matched_by_their_text(donor: tuple[Any, Any, Path]) -> None:
    _, theirs, _ = donor
    for kind in ("bpe", "unigram"):
        tokenizer = train_tokenizer(SHAPE | FRESH | {"tokenizer": {"type": kind, "lowercase": False}}, TEXTS)
        here, there = shared_tokens(tokenizer, theirs)
        names = dict(
            zip(
                tokenizer.convert_ids_to_tokens(here.tolist()),
                theirs.convert_ids_to_tokens(there.tolist()),
                strict=True,
            )
        )
        mark = {"bpe": "Ġ", "unigram": "▁"}[kind]
        assert names["<mask>"] == "[MASK]"
        assert names["<s>"] == "[CLS]"
        assert any(
            token.startswith(mark) and names[token] == token.removeprefix(mark).lower() for token in names
        )
        for token, other in names.items():
            if token not in tokenizer.all_special_tokens:
                assert token.removeprefix(mark).lower() == other.removeprefix("##")


def test_without_a_head_the_body_is_taken(donor: tuple[Any, Any, Path]) -> None:
    theirs, _, folder = donor
    ours, _ = make(FRESH | {"init_from": str(folder)}, head=None)
    name = "encoder.layer.1.output.dense.weight"
    assert torch.equal(dict(ours.model.named_parameters())[name], dict(theirs.model.named_parameters())[name])


def test_the_shipped_encoder_has_no_head_to_take(caplog: pytest.LogCaptureFixture) -> None:
    shape = {"layers": 12, "width": 256, "heads": 4, "ffn": 1024, "init_from": "mini"}
    with caplog.at_level(logging.WARNING):
        make(FRESH | shape)
    assert "token embeddings are its own" in caplog.text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"layers": 3}, "num_hidden_layers is 2, the fresh backbone's 3"),
        ({"ffn": 32}, "intermediate_size is 24, the fresh backbone's 32"),
        ({"model_type": "distilbert"}, "another shape"),
    ],
)
def test_another_shape_is_said(donor: tuple[Any, Any, Path], more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        make(FRESH | {"init_from": str(donor[2])} | more)
    assert "backbone.fresh.init_from" in str(error.value)


def test_a_missing_donor_is_said() -> None:
    with pytest.raises(UserError, match="no such model folder or shipped encoder"):
        make(FRESH | {"init_from": "nowhere"})


@pytest.mark.parametrize(("name", "said"), [("nowhere", "no such model folder"), ("mini", "another shape")])
def test_a_wrong_donor_is_said_without_weights_or_text(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        probe(BackboneConfig(source="fresh", name="x", fresh=SHAPE | FRESH | {"init_from": name}))


@pytest.mark.parametrize("name", ["", 5, ["mini"], True])
def test_a_donor_is_a_name_or_a_path(name: Any) -> None:
    with pytest.raises(UserError, match="neither the name of a shipped encoder nor the path") as error:
        make(FRESH | {"init_from": name})
    assert "backbone.fresh.init_from" in str(error.value)


def test_a_donor_of_the_other_kind_is_said(tmp_path: Path) -> None:
    folder = save(
        *make(DONOR | {"model_type": "gpt2", "tokenizer": FRESH["tokenizer"]}, "causal_lm"), tmp_path
    )
    with pytest.raises(
        UserError, match="gpt2 is a decoder, the fresh xlm-roberta a bidirectional encoder"
    ) as error:
        make(FRESH | {"init_from": str(folder)})
    assert "backbone.fresh.init_from" in str(error.value)


def test_broken_weights_are_the_donors(donor: tuple[Any, Any, Path]) -> None:
    file = donor[2] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read") as error:
        make(FRESH | {"init_from": str(donor[2])})
    assert str(error.value).startswith(f"{donor[2]}: ")


def test_weights_that_are_not_finite_are_said(donor: tuple[Any, Any, Path]) -> None:
    backbone, tokenizer, folder = donor
    dict(backbone.named_parameters())["model.encoder.layer.1.output.dense.weight"].data[0, 0] = float("nan")
    save(backbone, tokenizer, folder)
    with pytest.raises(
        UserError, match=r"not finite, the first of them in roberta\.encoder\.layer\.1\.output\.dense"
    ):
        make(FRESH | {"init_from": str(folder)})


def test_a_tokenizer_of_other_weights_is_said(donor: tuple[Any, Any, Path]) -> None:
    more = train_tokenizer(SHAPE | DONOR | {"vocab_size": 700}, [*TEXTS, *map(chr, range(0x4E00, 0x4F00))])
    more.add_tokens(["quickly", *(chr(c) * 2 for c in range(0x3B1, 0x3C9))])
    more.save_pretrained(donor[2])
    with pytest.raises(UserError, match=r"its tokenizer has a token .*, its embeddings end at"):
        make(FRESH | {"init_from": str(donor[2])})


def test_one_token_in_common_is_too_few(donor: tuple[Any, Any, Path]) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({chr(0x4E00 + i): i for i in range(50)} | {"?": 50}, "?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(donor[2])
    with pytest.raises(UserError, match="no tokens in common"):
        make(FRESH | {"init_from": str(donor[2])})
