"""CSE-SFP on six tiny random decoders: the invariants of its specification, and its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, normalize
from torch.utils.flop_counter import FlopCounterMode

from embedlab.backbones import load_backbone
from embedlab.backbones.adapters import adapt
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.evaluation.core.vectors import Vectors
from embedlab.evaluation.sts.sts import STSPairs, score_pairs
from embedlab.methods import method_config
from embedlab.methods.causal_lm import CausalLM, CausalLMConfig
from embedlab.methods.contrast import Matryoshka, contrast
from embedlab.methods.csesfp import CSESFP, CSESFPConfig
from embedlab.methods.prompteol import PromptEOL, PromptEOLConfig
from embedlab.methods.simcse import SimCSEConfig
from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.softmax import Contrast
from embedlab.pooling import build_pooling, pooling_config
from tests.evaluation.helpers import Lookup
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import DECODERS, SENTENCES

TWO_STAGES = Template('It : "{sentence}" means a word{rep1}, so it is{rep2}', "text")
TEXTS = ["The girl reads.", "Two dogs run across the green field", "", 'He said "yes"', "Rain."]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def _method(
    folder: Path,
    side: str = "right",
    pooling: str = "rep2",
    cls: Any = CSESFP,
    adapter: AdapterConfig | None = None,
    dropout: float | None = 0.0,
    chunk: int | None = None,
    template: Template = TWO_STAGES,
    **config: Any,
) -> Any:
    """A method on a decoder whose weights are large enough for attention to matter."""
    base = BackboneConfig(source="local", path=str(folder), dropout=dropout)
    backbone, tokenizer = load_backbone(base)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in backbone.parameters():
            if p.dim() >= 2:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    if adapter is not None:
        adapt(backbone, adapter, base)
    tokenizer.padding_side = side
    encoder = SentenceEncoder(
        backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer, template, 16)
    )
    return cls(encoder, cls.config_class(**config), OptimizerConfig(chunk=chunk)).eval()


def _rows(method: Any, texts: list[str] = TEXTS) -> list[list[int]]:
    return method.encoder.tokenization.ids(texts)


def _stages(method: Any, rows: list[list[int]], multiple: int = 8) -> tuple[Tensor, Tensor]:
    """(Rep2, Rep1)."""
    with torch.no_grad():
        return method.stages(**method.encoder.tokenization.pad(rows, multiple))


def _batch(method: Any, texts: list[str] = TEXTS) -> dict[str, Any]:
    view = method.encoder.tokenization.pad(_rows(method, texts), 8)
    return {"sentence": {**view, "hash": torch.tensor([hash(t) for t in texts])}}


def _k(method: Any) -> int:
    return method.encoder.tokenization.marks["rep1"]


# T1 to T7: which token is read


@pytest.mark.parametrize("model_type", DECODERS)
def test_t1_rep1_does_not_see_the_second_stage(tiny: Callable[..., Path], model_type: str) -> None:
    method = _method(tiny(model_type))
    rows, k = _rows(method), _k(method)
    rep2, rep1 = _stages(method, rows)
    other_rep2, other_rep1 = _stages(method, [row[:-k] + row[-2 * k : -k] for row in rows])
    torch.testing.assert_close(other_rep1, rep1, **CLOSE)
    assert (other_rep2 - rep2).abs().max() > 0.1
    first_stage = [row[:-k] for row in rows]
    with torch.no_grad():
        for row, vector in zip(first_stage, rep1, strict=True):
            alone = method.encoder.backbone(torch.tensor([row]))[-1][0, -1]
            torch.testing.assert_close(alone, vector, **CLOSE)


@pytest.mark.parametrize("model_type", DECODERS)
def test_t2_gradients_reach_what_each_stage_sees(tiny: Callable[..., Path], model_type: str) -> None:
    method = _method(tiny(model_type))
    rows, k = _rows(method, ["Two dogs run"]), _k(method)
    embedded: list[Tensor] = []
    embeddings = method.encoder.backbone.model.get_input_embeddings()
    embeddings.weight.requires_grad_(True)
    embeddings.register_forward_hook(lambda module, args, out: embedded.append(out))
    for index, sees_suffix in ((0, True), (1, False)):
        embedded.clear()
        vector = method.stages(**method.encoder.tokenization.pad(rows))[index]
        # Not the square: after the final norm it hardly varies.
        direction = torch.randn(vector.shape, generator=torch.Generator().manual_seed(1))
        (gradient,) = torch.autograd.grad((vector * direction).sum(), embedded[0])
        norms = gradient[0].norm(dim=-1)
        assert (norms[: len(rows[0]) - k] > 1e-6).all()
        assert bool((norms[-k:] > 1e-6).all()) is sees_suffix
        assert sees_suffix or bool((norms[-k:] == 0).all())


@pytest.mark.parametrize("model_type", DECODERS)
def test_t3_either_padding_side(tiny: Callable[..., Path], model_type: str) -> None:
    left, right = (_method(tiny(model_type), side) for side in ("left", "right"))
    rows = _rows(left)
    assert len({len(row) for row in rows}) > 2
    for a, b in zip(_stages(left, rows), _stages(right, rows), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_t4_a_row_alone_is_a_row_among_others(tiny: Callable[..., Path], model_type: str, side: str) -> None:
    method = _method(tiny(model_type), side)
    rows = _rows(method)
    together = _stages(method, rows, 8)
    for i, row in enumerate(rows):
        for vectors, alone in zip(together, _stages(method, [row], 1), strict=True):
            torch.testing.assert_close(vectors[i], alone[0], **CLOSE)


def test_t5_without_position_ids_left_padding_fails_gpt2(tiny: Callable[..., Path]) -> None:
    """What T4 is there to catch: the positions that GPT-2 counts by itself."""
    method = _method(tiny("gpt2"), "left")
    padded = method.encoder.tokenization.pad(_rows(method), 8)
    shortest = int(padded["attention_mask"].sum(1).argmin())
    positions = torch.arange(padded["input_ids"].shape[1]).expand_as(padded["input_ids"])
    with torch.no_grad():
        wrong = method.encoder.backbone(**padded, position_ids=positions)[-1][shortest, -1]
        right = method.encoder.backbone(**padded)[-1][shortest, -1]
    assert (wrong - right).abs().max() > 0.1


@pytest.mark.parametrize("model_type", DECODERS)
def test_t7_text_matters_and_padding_does_not(tiny: Callable[..., Path], model_type: str) -> None:
    method = _method(tiny(model_type), "left")
    one = _stages(method, _rows(method, ["Two dogs run across the field", "Rain."]))
    other = _stages(method, _rows(method, ["Two cats run across the field", "Rain."]))
    for a, b in zip(one, other, strict=True):
        assert (a[0] - b[0]).abs().max() > 1e-2
        torch.testing.assert_close(a[1], b[1], **CLOSE)
    padded = method.encoder.tokenization.pad(_rows(method), 8)
    filled = torch.where(padded["attention_mask"].bool(), padded["input_ids"], 7)
    assert not torch.equal(filled, padded["input_ids"])
    with torch.no_grad():
        for a, b in zip(
            method.stages(**padded), method.stages(filled, padded["attention_mask"]), strict=True
        ):
            torch.testing.assert_close(a, b, **CLOSE)


# T8, T11: the loss


def _vectors(n: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 6, generator=generator)


def test_t8_loss_by_hand() -> None:
    a, p = _vectors()
    scores = normalize(a, dim=1) @ normalize(p, dim=1).T / 0.05
    expected = -sum(log_softmax(scores[i], 0)[i] for i in range(3)) / 3
    torch.testing.assert_close(_contrast(a, p).loss, torch.as_tensor(expected))


def _contrast(anchors: Tensor, positives: Tensor) -> Contrast:
    return contrast([anchors, positives], [None, None], CSESFPConfig())


def test_t8_equal_vectors_cost_log_n() -> None:
    a = torch.ones(5, 4)
    assert _contrast(a, a).loss.item() == pytest.approx(math.log(5), rel=1e-5)


def test_t8_orthogonal_sentences_cost_nothing() -> None:
    a = torch.eye(6)
    assert _contrast(a, 3 * a).loss.item() < 1e-6


def test_t8_invariances() -> None:
    a, p = _vectors()
    loss = _contrast(a, p).loss
    scales = torch.tensor([[0.1], [3.0], [20.0]])
    torch.testing.assert_close(_contrast(scales * a, scales.flip(0) * p).loss, loss)
    order = [2, 0, 1]
    torch.testing.assert_close(_contrast(a[order], p[order]).loss, loss)
    assert abs(_contrast(p, a).loss - loss) > 1e-3


def test_t8_anchor_option(tiny: Callable[..., Path]) -> None:
    losses = {}
    for anchor in ("rep2", "rep1", "symmetric"):
        method = _method(tiny("llama"), anchor=anchor)
        losses[anchor] = method.losses(_batch(method)).losses["info_nce"].item()
    method = _method(tiny("llama"))
    rep2, rep1 = _stages(method, _rows(method))
    assert losses["rep2"] == pytest.approx(_contrast(rep2, rep1).loss.item(), rel=1e-5)
    assert losses["rep1"] == pytest.approx(_contrast(rep1, rep2).loss.item(), rel=1e-5)
    assert losses["rep2"] != pytest.approx(losses["rep1"], rel=1e-3)
    assert losses["symmetric"] == pytest.approx((losses["rep1"] + losses["rep2"]) / 2, rel=1e-5)


def test_repeated_sentences_are_no_negatives(tiny: Callable[..., Path]) -> None:
    masked, plain = (_method(tiny("llama"), mask_duplicates=m) for m in (True, False))
    rep2, rep1 = _stages(masked, _rows(masked, ["Rain.", "Two dogs run"]))
    rain = info_nce(rep2[:1], rep1, 0.05).loss
    dogs = info_nce(rep2[1:], rep1[[0, 1, 0]], 0.05, offset=1).loss
    batch = _batch(masked, ["Rain.", "Two dogs run", "Rain."])
    found = masked.losses(batch).losses["info_nce"]
    torch.testing.assert_close(found, (2 * rain + dogs) / 3, **CLOSE)
    assert plain.losses(batch).losses["info_nce"] > found + 0.1


def test_t11_ranks_give_the_gradient_of_one_batch() -> None:
    """Each rank scores its rows against all positives with gradient; the release gets 1 / W of it."""
    ranks, n = 4, 3
    a, p = (v.requires_grad_() for v in _vectors(ranks * n))
    whole = torch.autograd.grad(info_nce(a, p, 0.05).loss, (a, p))
    share = [slice(r * n, (r + 1) * n) for r in range(ranks)]
    ours = sum(info_nce(a[s], p, 0.05, offset=s.start).loss for s in share) / ranks
    for g, w in zip(torch.autograd.grad(ours, (a, p)), whole, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)
    released = torch.zeros(())
    for s in share:
        views = []
        for v in (a, p):
            mixed = v.detach().clone()
            mixed[s] = v[s]
            views.append(mixed)
        released = released + info_nce(*views, 0.05).loss / ranks
    for g, w in zip(torch.autograd.grad(released, (a, p)), whole, strict=True):
        torch.testing.assert_close(ranks * g, w, rtol=1e-4, atol=1e-6)


# T9, T10: dropout


def test_t10_in_training_the_first_stage_is_exact_without_dropout_only(tiny: Callable[..., Path]) -> None:
    for dropout, exact in ((0.0, True), (0.1, False)):
        method = _method(tiny("opt"), dropout=dropout).train()
        rows, k = _rows(method), _k(method)
        torch.manual_seed(0)
        rep1 = _stages(method, rows)[1]
        torch.manual_seed(0)
        other = _stages(method, [row[:-k] + [11] * k for row in rows])[1]
        torch.manual_seed(0)
        short = [row[:-k] for row in rows]
        with torch.no_grad():
            padded = method.encoder.tokenization.pad(short)
            alone = build_pooling("last", method.encoder.backbone.info)(
                method.encoder.backbone(**padded), padded["attention_mask"], {}
            )
        assert torch.allclose(alone, rep1, atol=1e-4) is exact
        assert torch.allclose(other, rep1, atol=1e-4)  # the same shapes draw the same masks


# the method


def test_one_pass_gives_both_views(tiny: Callable[..., Path]) -> None:
    method = _method(tiny("llama"))
    calls: list[torch.Size] = []
    method.encoder.backbone.register_forward_hook(lambda m, args, out: calls.append(args[0].shape))
    outcome = method.losses(_batch(method))
    assert [s[0] for s in calls] == [len(TEXTS)]
    assert outcome.stats.keys() == {"positive_cosine", "negative_cosine", "accuracy"}
    twice = _method(tiny("llama"), cls=PromptEOL)
    twice.encoder.backbone.register_forward_hook(lambda m, args, out: calls.append(args[0].shape))
    twice.losses(_batch(twice))
    assert [s[0] for s in calls[1:]] == [2 * len(TEXTS)]
    assert (method.forward_passes, twice.forward_passes) == (1.0, 2.0)


@pytest.mark.parametrize("cls", [CSESFP, PromptEOL])
@pytest.mark.parametrize("chunk", [1, 3, len(TEXTS)])
def test_chunks_give_the_gradients_of_the_batch(tiny: Callable[..., Path], cls: Any, chunk: int) -> None:
    found = []
    for size in (None, chunk):
        method = _method(tiny("qwen2"), cls=cls, chunk=size).train()
        rows: list[int] = []
        method.encoder.backbone.register_forward_hook(
            lambda m, args, out, rows=rows: rows.append(len(args[0]))
        )
        sum(method.losses(_batch(method)).losses.values()).backward()
        found.append({n: p.grad for n, p in method.named_parameters() if p.grad is not None})
        assert size is None or max(rows) <= size
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("pooling", ["mean", "first_last", "last", "rep1", "rep_mean", "rep_concat"])
def test_trains_under_every_pooling(tiny: Callable[..., Path], pooling: str) -> None:
    """Poolings that read no mark pool the tokens up to each mark; those that do are an inference choice."""
    method = _method(tiny("llama"), pooling=pooling)
    rows, k = _rows(method), _k(method)
    rep2, rep1 = _stages(method, rows)
    assert method.losses(_batch(method)).losses["info_nce"].isfinite()
    if pooling in ("mean", "first_last"):
        pool = method.encoder.pooling
        for wanted, cut in ((rep2, rows), (rep1, [row[:-k] for row in rows])):
            padded = method.encoder.tokenization.pad(cut)
            with torch.no_grad():
                hidden = method.encoder.backbone(**padded, all_layers=pool.needs_all_layers)
            torch.testing.assert_close(wanted, pool(hidden, padded["attention_mask"], {}), **CLOSE)
    else:
        expected = _stages(_method(tiny("llama")), rows)
        torch.testing.assert_close(rep2, expected[0])
        torch.testing.assert_close(rep1, expected[1])


def test_inference_reads_the_chosen_stage(tiny: Callable[..., Path]) -> None:
    rep2, rep1 = _stages(_method(tiny("llama")), _rows(_method(tiny("llama"))))
    for pooling, expected in (("rep2", rep2), ("rep1", rep1)):
        vectors = _method(tiny("llama"), pooling=pooling).encoder.encode(TEXTS, output="tensor")
        torch.testing.assert_close(vectors, expected, **CLOSE)
    concat = _method(tiny("llama"), pooling="rep_concat").encoder
    assert concat.encode(TEXTS).shape == (len(TEXTS), concat.dim)
    assert concat.dim == 2 * rep2.shape[1]


# configurations


DECODER: Any = SimpleNamespace(
    kind="decoder", model_type="llama", dropout=0.0, adapter_dropout=0.05, width=4, inner_width=4, layers=2
)
REP2 = pooling_config("rep2")


def _check(config: Any = None, info: Any = DECODER, pooling: Any = REP2, **changes: Any) -> list[str]:
    arguments = {"template": TWO_STAGES} | changes
    return (config or CSESFPConfig()).check(info, run_of(pooling=pooling, **arguments))


def test_matryoshkas_dims_are_those_of_the_vectors_that_are_contrasted() -> None:
    """Pooled ones, which rep_concat makes twice as wide; CSE-SFP's are its stages', whichever pooling joins them."""
    nested, wide = Matryoshka((2 * DECODER.width, 2)), pooling_config("rep_concat")
    assert _check(SimCSEConfig(mlp="none", matryoshka=nested), pooling=wide) == []
    with pytest.raises(UserError, match=f"exceeds width {DECODER.width}"):
        _check(CSESFPConfig(matryoshka=nested), pooling=wide)


@pytest.mark.parametrize("config", [CSESFPConfig(), PromptEOLConfig()])
def test_refuses_a_bidirectional_encoder(config: Any) -> None:
    encoder = SimpleNamespace(**{**vars(DECODER), "kind": "encoder", "model_type": "bert"})
    with pytest.raises(UserError, match=r"trains decoders \(backbone=bert\).*Fix: backbone=smollm2"):
        _check(config, encoder)


def test_refuses_a_template_of_one_stage() -> None:
    for template in (None, Template('This sentence : "{sentence}" means in one word:"', "text")):
        with pytest.raises(UserError, match=r"two stages.*template=eol_sum"):
            _check(template=template)
    with pytest.raises(UserError, match=r"template.text"):
        _check(template=Template('"{sentence}" is a{rep2}, so it is{rep1}', "text"))


@pytest.mark.parametrize("config", [CSESFPConfig(), PromptEOLConfig()])
def test_refuses_what_has_no_meaning(config: Any) -> None:
    assert config.kinds == ("wikipedia",)
    with pytest.raises(UserError, match=r"data\.pack=null"):
        _check(config, pack=64)
    for name in ("cls", "cls_mlp"):
        with pytest.raises(UserError, match=f"first token of a decoder.*pooling={name}"):
            pooling_config(name).check(DECODER, None, config.name)
    with pytest.raises(UserError, match=r"method\.tau=0"):
        _check(replace(config, tau=0.0))
    if isinstance(config, CSESFPConfig):
        with pytest.raises(UserError, match=r"method.anchor=rep3.*symmetric"):
            method_config({"name": "csesfp", "anchor": "rep3"})


def test_warns_of_the_dropout_trap() -> None:
    assert _check() == []
    (warning,) = _check(PromptEOLConfig())
    assert "no dropout of its own" in warning
    opt = SimpleNamespace(**{**vars(DECODER), "dropout": 0.1})
    assert _check(PromptEOLConfig(), opt) == []
    still = SimpleNamespace(**{**vars(DECODER), "adapter_dropout": 0.0})
    assert _check(info=still) == []
    with pytest.raises(UserError, match=r"adapter.dropout=0.0.*method=csesfp"):
        _check(PromptEOLConfig(), still)


# what the losses are made of


def _by_hand(anchors: Tensor, positives: Tensor, tau: float) -> Tensor:
    """Equation 2, written out."""
    logits = normalize(anchors, dim=1) @ normalize(positives, dim=1).T / tau
    return -log_softmax(logits, 1).diagonal().mean()


@pytest.mark.parametrize("tau", [0.05, 0.5])
def test_both_stages_receive_the_gradient(
    tiny: Callable[..., Path], tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = _method(tiny("llama"), tau=tau)
    rep2, rep1 = (v.requires_grad_() for v in _vectors(len(TEXTS)))
    monkeypatch.setattr(method, "stages", lambda ids, mask, capacity=None: (rep2, rep1))
    loss = method.losses(_batch(method)).losses["info_nce"]
    want = _by_hand(rep2, rep1, tau)
    torch.testing.assert_close(loss, want)
    found, wanted = (torch.autograd.grad(x, (rep2, rep1)) for x in (loss, want))
    assert min(g.abs().max() for g in wanted) > 1e-3
    torch.testing.assert_close(found, wanted)


# T13: what one pass costs


def _cost(method: Any, texts: list[str]) -> tuple[int, int, float, float]:
    """Rows, padded length, floating-point operations and bytes kept for the backward pass."""
    own = {p.untyped_storage().data_ptr() for p in method.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    batch = _batch(method.train(), texts)
    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        sum(method.losses(batch).losses.values()).backward()
    rows = len(texts) * int(method.forward_passes)
    return rows, batch["sentence"]["input_ids"].shape[1], counter.get_total_flops(), sum(kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_t13_cost_is_that_of_the_tokens(tiny: Callable[..., Path], checkpointing: bool) -> None:
    folder = tiny("llama", width=128, heads=4, ffn=512, max_positions=128)
    adapter = AdapterConfig("lora", r=8, dropout=0.05, gradient_checkpointing=checkpointing)
    texts = [t[:40] for t in SENTENCES[:8]]
    one = _cost(_method(folder, adapter=adapter), texts)
    same = _cost(_method(folder, cls=PromptEOL, adapter=adapter), texts)
    assert same[:2] == (2 * one[0], one[1])
    assert one[2] / same[2] == pytest.approx(0.5, rel=0.01)
    # With two blocks checkpointed little is kept, and what the loss keeps of its own is seen.
    near = 0.03 if checkpointing else 0.01
    assert one[3] / same[3] == pytest.approx(0.5, rel=near)
    short = Template('It : "{sentence}" means a word', "text")
    other = _cost(_method(folder, cls=PromptEOL, pooling="last", adapter=adapter, template=short), texts)
    assert other[1] < one[1]
    predicted = one[1] / (2 * other[1])
    assert one[2] / other[2] == pytest.approx(predicted, rel=0.01)
    assert one[3] / other[3] == pytest.approx(predicted, rel=near)


# T16, T17: scores


def test_t16_all_aggregation_is_not_the_mean_of_subsets() -> None:
    """Each subset is ranked perfectly; joined they are not, as their cosines lie apart from their ratings."""
    table = {"a": (1.0, 0.0), "b": (0.9, 0.436), "c": (0.8, 0.6), "d": (0.1, 0.995), "e": (0.0, 1.0)}
    pairs = STSPairs(
        task="sts13",
        split="test",
        text="raw",
        first=["a"] * 4,
        second=["b", "c", "d", "e"],
        gold=np.array([2.0, 1.0, 5.0, 4.0]),
        subsets=["near", "near", "far", "far"],
        source="by hand",
    )
    scores = score_pairs(Vectors(Lookup(table), [*pairs.first, *pairs.second]), pairs)
    assert scores["spearman_mean"] == pytest.approx(100.0)
    # ranks 4 3 2 1 by cosine, 2 1 4 3 by rating: 1 - 6 * 16 / (4 * 15)
    assert scores["spearman"] == pytest.approx(-60.0)


def test_t17_thirty_steps_spread_the_vectors(tiny: Callable[..., Path]) -> None:
    """On a small decoder that has learnt some text, anchors move apart and stages of one sentence together."""
    method = _language_model(tiny("llama", layers=2, width=64, max_positions=128))
    texts = [f"{s[:30]} {o}" for s in SENTENCES for o in ("again", "today", "at last", "in May")]
    train, held_out = texts[:48], texts[48:]

    def state() -> tuple[float, float]:
        method.eval()
        rep2, rep1 = _stages(method, _rows(method, held_out))
        unit = normalize(rep2, dim=1)
        apart = ((unit @ unit.T).sum() - len(unit)) / (len(unit) * (len(unit) - 1))
        return apart.item(), _contrast(rep2, rep1).stats["accuracy"].item()

    before = state()
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-3)
    method.train()
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        chosen = torch.randperm(len(train), generator=generator)[:24].tolist()
        optimizer.zero_grad()
        sum(method.losses(_batch(method, [train[i] for i in chosen])).losses.values()).backward()
        optimizer.step()
    after = state()
    assert after[0] < before[0] - 0.1
    assert after[1] > before[1] + 0.1


def _language_model(folder: Path) -> Any:
    """CSE-SFP around a decoder after some steps of next-token prediction on prompts."""
    base = BackboneConfig(source="local", path=str(folder))
    backbone, tokenizer = load_backbone(base, head="causal_lm")
    tokenization = Tokenization(tokenizer, TWO_STAGES, 32)
    encoder = SentenceEncoder(backbone, build_pooling("rep2", backbone.info), tokenization)
    pretraining = CausalLM(encoder, CausalLMConfig(), OptimizerConfig()).train()
    optimizer = torch.optim.AdamW(pretraining.parameters(), lr=3e-3)
    view = tokenization.pad(tokenization.ids(SENTENCES))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = pretraining.losses({"sentence": view}).losses["causal_lm"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    return CSESFP(encoder, CSESFPConfig(), OptimizerConfig())


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("csesfp", tmp_path, monkeypatch)
