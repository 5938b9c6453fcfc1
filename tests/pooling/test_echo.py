"""Echo: a sentence twice, with the same tokens, and a mean over the second time that has seen every word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.pooling import build_pooling, pooling_config
from embedlab.pooling.echo import second_copy
from tests.support import SENTENCES

Tiny = Callable[..., Path]
ECHO = Template("Rewrite the following paragraph: {sentence}. The rewritten paragraph: {again}")


def encoder(tiny: Tiny, model_type: str, pooling: str = "echo", template: Template = ECHO) -> SentenceEncoder:
    backbone, tokenizer = load_backbone(
        BackboneConfig(source="local", path=str(tiny(model_type, max_positions=256)))
    )
    tokenizer.model_max_length = 256
    return SentenceEncoder(
        backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer, template)
    ).eval()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "bert"])
@pytest.mark.parametrize(
    "template", [ECHO, Template('Twice "{sentence}" is "{again}" .'), Template("{sentence}{again}")]
)
def test_both_copies_have_the_same_tokens(tiny: Tiny, model_type: str, template: Template) -> None:
    tokenization = encoder(tiny, model_type, template=template).tokenization
    frame = tokenization.marks.frame
    assert frame.between is not None
    rows = tokenization.pad(tokenization.ids(SENTENCES))
    second = second_copy(rows["attention_mask"], tokenization.marks).bool()
    for ids, mask, inside in zip(rows["input_ids"], rows["attention_mask"], second, strict=True):
        n = int(inside.sum())
        row = ids[mask.bool()].tolist()
        assert len(row) == tokenization.overhead + 2 * n
        assert ids[inside].tolist() == row[frame.before : frame.before + n]
        assert n > 1
    assert max(1, tokenization.overhead) == len(tokenization.ids([""])[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_both_are_cut_alike(tiny: Tiny, side: str) -> None:
    tokenizer = encoder(tiny, "llama").tokenizer
    tokenizer.truncation_side = side
    short = Tokenization(tokenizer, ECHO, 5)
    rows, cut = short.ids_and_cut([SENTENCES[0], "a"])
    assert cut == [True, False]
    assert len(rows[0]) == short.overhead + 10 == short.row_limit
    whole = Tokenization(tokenizer, ECHO)
    plain = whole.ids([SENTENCES[0]])[0]
    n = (len(plain) - whole.overhead) // 2
    start = whole.marks.frame.before
    sentence = plain[start : start + n]
    kept = sentence[-5:] if side == "left" else sentence[:5]
    assert rows[0][start : start + 5] == kept
    assert short.tokens_before(SENTENCES[0]) == start + 5
    long = Tokenization(tokenizer, ECHO).ids(["word " * 500])[0]
    assert tokenizer.model_max_length - 1 <= len(long) <= tokenizer.model_max_length


def test_the_last_word_is_seen_by_the_first_that_counts(tiny: Tiny) -> None:
    """In a decoder's plain mean it is not."""
    texts = ["the dogs run across the green field", "the dogs run across the green lake"]
    for pooling, template, seen in (("echo", ECHO, True), ("mean", Template("{sentence}"), False)):
        found = encoder(tiny, "llama", pooling, template)
        tokens = found.tokenization.pad(found.tokenization.ids(texts))
        states = found.backbone(**tokens)[-1]
        inside = second_copy(tokens["attention_mask"], found.tokenization.marks) if seen else None
        first = int(inside[0].argmax()) if inside is not None else found.tokenization.marks.frame.before
        assert torch.equal(tokens["input_ids"][0, first], tokens["input_ids"][1, first])
        moved = (states[0, first] - states[1, first]).abs().max()
        assert (moved > 1e-4) == seen


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_nothing_and_the_mean_is_over_the_copy_alone(tiny: Tiny, side: str) -> None:
    found = encoder(tiny, "llama")
    found.tokenizer.padding_side = side
    together = found.encode_texts(SENTENCES[:6])
    alone = torch.cat([found.encode_texts([text]) for text in SENTENCES[:6]])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    row = torch.tensor(found.tokenization.ids(SENTENCES[:1]))
    states = found.backbone(row, torch.ones_like(row))[-1][0]
    n = (row.shape[1] - found.tokenization.overhead) // 2
    end = row.shape[1] - found.tokenization.marks.frame.after
    torch.testing.assert_close(alone[0], states[end - n : end].mean(0), rtol=1e-4, atol=1e-5)


def test_what_has_no_meaning_is_named(tiny: Tiny) -> None:
    info = encoder(tiny, "llama").backbone.info
    assert pooling_config("echo").check(info, ECHO, "simcse") == []
    for template in (None, Template("{sentence} .")):
        with pytest.raises(UserError, match="template=echo"):
            pooling_config("echo").check(info, template, "simcse")
    for text, join, words in (
        ("{again} {sentence}", "ids", "before"), ("{sentence} {mask} {again}", "ids", "before"),
        ("{sentence} {again} {again}", "ids", "more than once"), ("{sentence} {again}", "text", "join=ids"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            Template(text, join)  # type: ignore[arg-type]


def test_it_is_saved_with_its_template(tiny: Tiny, tmp_path: Path) -> None:
    import embedlab

    found = encoder(tiny, "llama")
    found.save(tmp_path / "echo")
    again = embedlab.load(tmp_path / "echo")
    torch.testing.assert_close(
        torch.as_tensor(again.encode(SENTENCES[:3])), torch.as_tensor(found.encode(SENTENCES[:3]))
    )
