"""PromptBERT: templates, exact positions, and what is subtracted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.text_normalization import add_period
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.dev_encoder import DevEncoder
from embedlab.errors import UserError
from embedlab.methods import method_class, method_config
from embedlab.methods.promptbert import PromptBERT, PromptBERTConfig
from embedlab.pooling import build_pooling
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import SENTENCES

Tiny = Callable[..., Path]
BERT = ('This sentence of "{sentence}" means {mask}.', 'This sentence : "{sentence}" means {mask}.')
ROBERTA = ("This sentence : ' {sentence} ' means{mask}.", "The sentence : ' {sentence} ' means{mask}.")
TEMPLATES = {"bert": BERT, "distilbert": BERT, "roberta": ROBERTA, "modernbert": BERT}
TEXTS = [SENTENCES[0], SENTENCES[5], "", "a cat", SENTENCES[10], "[MASK] means nothing. <mask>"]
LIMIT = 12


def method(tiny: Tiny, model_type: str = "bert", pooling: Any = "mask", **settings: Any) -> PromptBERT:
    first, second = TEMPLATES[model_type]
    backbone, tokenizer = load_backbone(
        BackboneConfig(source="local", path=str(tiny(model_type, max_positions=64)), dropout=0.0)
    )
    torch.manual_seed(1)
    encoder = SentenceEncoder(
        backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer, Template(first))
    )
    config = PromptBERTConfig(**{"second_template": Template(second), **settings})
    return PromptBERT(encoder, config, OptimizerConfig())


def batch(
    method: PromptBERT, texts: list[str], views: tuple[str, ...] = ("first", "second")
) -> dict[str, Any]:
    """Tokens as the data module gives them: the sentence cut at LIMIT, padded to a multiple of 8."""
    made: dict[str, Any] = {"rows": torch.arange(len(texts))}
    for view in views:
        template = method.templates[-1 if view == "second" else 0].template
        tokenization = Tokenization(method.encoder.tokenizer, template, LIMIT)
        made[view] = tokenization.pad(tokenization.ids(texts), multiple=8)
        made[view]["hash"] = torch.tensor([hash(t) for t in texts])
    return made


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# Rows


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_every_row_has_one_marked_mask_however_long_the_sentence(tiny: Tiny, model_type: str) -> None:
    m = method(tiny, model_type)
    plain = [t for t in TEXTS if "mask" not in t.lower()] + ["word " * 200]
    mask_id = m.encoder.tokenizer.mask_token_id
    for tokenization in m.templates:
        for limit in (LIMIT, None):
            cut = Tokenization(m.encoder.tokenizer, tokenization.template, limit)
            rows = cut.ids(plain)
            assert [row.count(mask_id) for row in rows] == [1] * len(rows)
            assert [row[-1 - cut.marks["mask"]] for row in rows] == [mask_id] * len(rows)
            assert all(row[-len(cut.suffix_ids) :] == cut.suffix_ids for row in rows)


def test_a_mask_in_the_text_moves_nothing(tiny: Tiny) -> None:
    """The read-out finds its mask from the row's end."""
    m = method(tiny)
    alone = m.encoder.encode(TEXTS[-1:], output="tensor")
    close(m.encoder.encode(TEXTS, output="tensor")[-1:], alone)
    rows = m.encoder.tokenization.ids(TEXTS[-1:])
    tokens = m.encoder.tokenization.pad(rows)
    hidden = m.encoder.backbone(**tokens)[-1]
    close(alone[0], hidden[0, len(rows[0]) - 1 - m.encoder.tokenization.marks["mask"]])


def test_roberta_has_the_leading_space_form_in_training_and_scoring(tiny: Tiny) -> None:
    m = method(tiny, "roberta")
    first = m.encoder.tokenizer.convert_ids_to_tokens(
        m.encoder.tokenization.ids(["girl"])[0][len(m.encoder.tokenization.prefix_ids)]
    )
    assert first.startswith("Ġ")


# Templates without a sentence


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_positions_are_those_of_a_real_row_at_the_templates_tokens(tiny: Tiny, model_type: str) -> None:
    m = method(tiny, model_type)
    seen: list[Tensor] = []
    embeddings = m.encoder.backbone.model.embeddings.position_embeddings
    handle = embeddings.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    lengths = 7
    with torch.no_grad():
        m.template_vectors(2, lengths)
        bare = seen.pop()
        for i, tokenization in enumerate(m.templates):
            before, overhead = len(tokenization.prefix_ids), tokenization.overhead
            for t in range(lengths):
                row = tokenization.prefix_ids + [7] * t + tokenization.suffix_ids
                m.encoder.backbone(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long))
                real = seen.pop()[0]
                expected = torch.cat([real[:before], real[before + t :]])
                assert torch.equal(bare[i * lengths + t, :overhead], expected)
    handle.remove()
    first = {"bert": 0, "roberta": 2}[model_type]
    assert bare[0, 0] == first


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "roberta", "modernbert"])
def test_without_a_sentence_nothing_is_left(tiny: Tiny, model_type: str) -> None:
    """delta_0 is the plain encoding of the empty template, so that h - delta is 0 for an empty sentence."""
    m = method(tiny, model_type)
    with torch.no_grad():
        noise = m.template_vectors(2, 3)
        close(noise[0][:1], m.encoder.encode([""], output="tensor"))
        tokens = Tokenization(m.encoder.tokenizer, m.templates[1].template)
        second = tokens.pad(tokens.ids([""]))
        found = m.pooled([1], [second["input_ids"], second["attention_mask"]])
        close(noise[1][:1], found[0])


def captured_vectors(m: PromptBERT, b: dict[str, Any]) -> list[Tensor]:
    """What meets the loss, in the order of the views."""
    seen: list[Tensor] = []
    handle = m.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    m.losses(b)
    handle.remove()
    return seen


@pytest.mark.parametrize("pooling", ["mask", {"name": "s2sent", "n": 2, "r": 4, "pool": "mask"}])
def test_each_row_loses_the_vector_of_its_own_length(tiny: Tiny, pooling: Any) -> None:
    m = method(tiny, pooling=pooling)
    b = batch(m, TEXTS)
    first, second = captured_vectors(m, b)
    with torch.no_grad():
        noise = m.template_vectors(2, LIMIT + 1)
    for i, view, found in ((0, "first", first), (1, "second", second)):
        tokenization = m.templates[i]
        ids, mask = b[view]["input_ids"], b[view]["attention_mask"]
        hidden = m.encoder.backbone(ids, mask, all_layers=True)
        h = m.encoder.pooling(hidden, mask, tokenization.marks)
        lengths = [len(r) for r in Tokenization(m.encoder.tokenizer, None, None).plain_ids(TEXTS)]
        sentence = [min(n, LIMIT) for n in lengths]
        assert (mask.sum(1) - tokenization.overhead).tolist() == sentence
        close(found, h - noise[i][torch.tensor(sentence)])
        close(found[2], torch.zeros_like(found[2]))


def test_lengths_beyond_those_expected_are_computed_too(tiny: Tiny) -> None:
    few = method(tiny, denoise_lengths=2)
    many = method(tiny, denoise_lengths=33)
    for a, b in zip(
        captured_vectors(few, batch(few, TEXTS)), captured_vectors(many, batch(many, TEXTS)), strict=True
    ):
        close(a, b)


def test_rows_padded_beyond_the_models_positions(tiny: Tiny) -> None:
    """A captured step without padding has rows of a power of two."""
    m = method(tiny)
    texts = [t for t in TEXTS if t]  # without a sentence nothing is left but rounding
    wanted = m.losses(batch(m, texts)).losses["info_nce"]
    wide = batch(m, texts)
    for view in ("first", "second"):
        for name, value in (("input_ids", m.templates[0].pad_id), ("attention_mask", 0)):
            wide[view][name] = torch.nn.functional.pad(
                wide[view][name], (0, 128 - wide[view][name].shape[1]), value=value
            )
        wide[view]["token_budget"] = 192
    close(m.losses(wide).losses["info_nce"], wanted)


def test_positions_stay_within_the_models(tiny: Tiny) -> None:
    m = method(tiny, denoise_lengths=500)
    assert m.lengths == 64 - m.encoder.tokenization.overhead + 1
    m.losses(batch(m, TEXTS))


def test_a_sentence_that_only_the_shorter_template_has_room_for(tiny: Tiny) -> None:
    m = method(tiny, second_template=Template("{sentence} {mask}"))
    data = batch(m, TEXTS)
    for view, tokenization in zip(("first", "second"), m.templates, strict=True):
        words = Tokenization(tokenization.tokenizer, tokenization.template)
        data[view] |= words.pad(words.ids(["word " * 200, *TEXTS[1:]]))
        assert data[view]["input_ids"].shape[1] == 64, "the model's positions"
    assert torch.isfinite(m.losses(data).losses["info_nce"])


def test_gradient_and_dropout_reach_the_template(tiny: Tiny) -> None:
    m = method(tiny)
    noise = m.template_vectors(1, 2)[0]
    noise.square().sum().backward()
    assert m.encoder.backbone.model.embeddings.word_embeddings.weight.grad.any()
    for module in m.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    m.train()
    assert not torch.allclose(m.template_vectors(1, 2)[0], m.template_vectors(1, 2)[0])


@pytest.mark.parametrize(
    ("pooling", "denoises"),
    [
        ("mask", True),
        ("mean", False),
        ({"name": "s2sent", "n": 2, "pool": "mask"}, True),
        ({"name": "s2sent", "n": 2, "pool": "mean"}, False),
    ],
)
def test_a_mean_over_all_tokens_is_not_denoised_unless_asked(
    tiny: Tiny, pooling: Any, denoises: bool
) -> None:
    assert method(tiny, pooling=pooling).denoise == denoises
    assert method(tiny, pooling=pooling, denoise=True).denoise
    m = method(tiny, pooling=pooling, denoise=False)
    first, _ = captured_vectors(m, batch(m, TEXTS))
    close(first, m.encoder(**{k: v for k, v in batch(m, TEXTS)["first"].items() if k != "hash"}))


# The loss


def test_exchanging_the_templates_exchanges_the_views(tiny: Tiny) -> None:
    m = method(tiny)
    other = method(tiny)
    other.encoder.tokenization, other.templates = m.templates[1], m.templates[::-1]
    other.bare.ids, other.bare.length, other.bare.slot = (
        x.flip(0) for x in (m.bare.ids, m.bare.length, m.bare.slot)
    )
    b = batch(m, TEXTS)
    first, second = captured_vectors(m, b)
    swapped = captured_vectors(other, b | {"first": b["second"], "second": b["first"]})
    close(swapped[0], second)
    close(swapped[1], first)


def test_a_repeated_sentence_is_no_negative(tiny: Tiny) -> None:
    m = method(tiny)
    twice = batch(m, [TEXTS[0], TEXTS[0], TEXTS[4]])
    z1, z2 = (torch.nn.functional.normalize(m.head(v), dim=-1) for v in captured_vectors(m, twice))
    logits = z1 @ z2.T / 0.05
    logits[0, 1] = logits[1, 0] = -torch.inf
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(3))
    close(m.losses(twice).losses["info_nce"], expected)
    as_released = method(tiny, mask_duplicates=False)
    assert as_released.losses(twice).losses["info_nce"] > expected + 0.1


def test_views_of_unequal_length_are_one_batch(tiny: Tiny) -> None:
    """The data module pads each view to its own length."""
    m = method(tiny)
    b = batch(m, TEXTS[:2])
    longer = {k: torch.nn.functional.pad(v, (0, 8)) if v.dim() == 2 else v for k, v in b["second"].items()}
    for x, y in zip(captured_vectors(m, b), captured_vectors(m, b | {"second": longer}), strict=True):
        close(x, y)


def test_triples_have_one_template_and_hard_negatives(tiny: Tiny) -> None:
    m = method(tiny)
    views = ("anchor", "positive", "negative")
    b = batch(m, TEXTS[:2], views)
    for i, view in enumerate(views):
        b[view]["hash"] = torch.tensor([i, i + 3])
    vectors = captured_vectors(m, b)
    assert len(vectors) == 3
    z = [torch.nn.functional.normalize(m.head(v), dim=-1) for v in vectors]
    logits = torch.cat([z[0] @ z[1].T, z[0] @ z[2].T], 1) / 0.05
    close(m.losses(b).losses["info_nce"], torch.nn.functional.cross_entropy(logits, torch.arange(2)))


def test_chunks_give_the_same_gradients(tiny: Tiny) -> None:
    grads = []
    for chunk in (None, 2):
        m = method(tiny)
        m.optimizer_config = OptimizerConfig(chunk=chunk)
        m.losses(batch(m, [t for t in TEXTS if t])).losses["info_nce"].backward()
        grads.append([p.grad for p in m.parameters()])
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-4)


def test_the_head_is_not_part_of_the_encoder(tiny: Tiny) -> None:
    m = method(tiny)
    assert [n for n, _ in m.named_parameters() if n.startswith("head.")] == ["head.0.weight", "head.0.bias"]
    assert not [n for n, _ in m.encoder.named_parameters() if "head" in n]
    assert not any(name.startswith("bare.") for name in m.state_dict())


# Scoring while training


def dev_vectors(m: PromptBERT, rows: list[list[int]]) -> Tensor:
    return m.dev_vectors(DevEncoder(m, rows, 1000)(), rows)


def test_scoring_subtracts_only_if_asked(tiny: Tiny) -> None:
    rows = method(tiny).encoder.tokenization.ids(TEXTS)
    plain = method(tiny)
    close(dev_vectors(plain, rows), plain.encoder.encode(TEXTS, output="tensor"))
    m = method(tiny, denoise_dev=True).train()
    found = dev_vectors(m, rows)
    assert m.encoder.training
    m.eval()
    with torch.no_grad():
        noise = m.template_vectors(1, 40)[0]
    lengths = torch.tensor([len(r) - m.encoder.tokenization.overhead for r in rows])
    close(found, plain.encoder.encode(TEXTS, output="tensor") - noise[lengths])
    close(found[2], torch.zeros_like(found[2]))
    assert not found.requires_grad


def test_scoring_meanwhile_adds_no_full_stop(tiny: Tiny) -> None:
    text = ["the cat sees a dog"]
    m = method(tiny, eval_text="stopped")
    m.encoder.tokenization.preparation = "stopped"
    (final,) = m.encoder.tokenization.ids(text)
    (meanwhile,) = m.dev_rows(text)
    assert len(meanwhile) == len(final) - 1
    assert method(tiny, dev_text="stopped").dev_rows(text) == [final]
    with pytest.raises(UserError, match="dev_text"):
        check(dev_text="dotted")


# Configuration

INFO = BackboneInfo("encoder", 12, 768, 512, True, 0.1, "bert", True)


def check(
    template: str | None = BERT[0], data: str = "wikipedia", pooling: Any = "mask", **settings: Any
) -> list[str]:
    info = settings.pop("info", INFO)
    packed = settings.pop("packed", False)
    config = method_config({"name": "promptbert", "second_template": {"text": BERT[1]}, **settings})
    around = Template(template) if template else None
    return config.check(info, run_of(data, pooling, around, pack=64 if packed else None))


def test_scored_text_ends_in_a_full_stop() -> None:
    assert method_config({"name": "promptbert"}).eval_text == "stopped"
    ends = [add_period(t) for t in ("a cat", "a cat.", "why?", 'he said "no"', "", "so!")]
    assert ends == ["a cat.", "a cat.", "why?", 'he said "no"', "", "so!."]


def test_settings_from_plain_values() -> None:
    config = method_config({"name": "promptbert", "second_template": {"text": BERT[1], "join": "ids"}})
    assert config == PromptBERTConfig(second_template=Template(BERT[1]))
    for empty in ({}, {"text": None}, {"text": None, "join": "ids"}):
        assert method_config({"name": "promptbert", "second_template": empty}).second_template is None
    views = method_class("promptbert").fields(config, ("sentence",), Template(BERT[0]))
    assert views == {"first": ("sentence", Template(BERT[0])), "second": ("sentence", Template(BERT[1]))}
    roles = ("anchor", "positive", "negative")
    assert set(method_class("promptbert").fields(config, roles, None)) == set(roles)
    assert check() == []


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"template": None}, "template=none"),
        ({"tau": 0}, "method.tau=0"),
        ({"mlp": "keep"}, "method.mlp=keep"),
        ({"eval_text": "odd"}, "method.eval_text=odd"),
        ({"denoise": "maybe"}, "method.denoise=maybe"),
        ({"denoise_lengths": 0}, "method.denoise_lengths=0"),
        ({"packed": True}, "data.pack"),
        ({"second_template": {"text": BERT[1], "join": "text"}}, "method.second_template.join=text"),
        (
            {"second_template": {"text": "no place"}},
            "no place for the sentence (method.second_template.text=no place)",
        ),
        ({"second_template": {"txt": BERT[1]}}, "method.second_template.txt"),
        ({"second_template": {"text": 'It says "{sentence}".'}}, "pooling=mask"),
        ({"second_template": None, "info": replace(INFO, dropout=0.0)}, "method.second_template"),
        ({"odd": 1}, "method.odd"),
    ],
)
def test_what_has_no_meaning_is_refused(settings: dict, key: str) -> None:
    with pytest.raises(UserError) as caught:
        check(**settings)
    assert key in str(caught.value)


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("promptbert", tmp_path, monkeypatch)
