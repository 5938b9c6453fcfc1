"""BEPA on tiny encoders: invariants T5 to T9 and T11 of its specification, its options, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.backbones import load_backbone
from embedlab.backbones.adapters import adapt
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.cuda_graph import CapturedStep
from embedlab.errors import UserError
from embedlab.evaluation.core.geometry import rankme
from embedlab.methods import method_config
from embedlab.methods.averages import average
from embedlab.methods.bepa import BEPA, BEPAConfig
from embedlab.methods.bepa_views import FIRST, PADDING, SECOND, mask_side, pack
from embedlab.methods.simcse import stacked
from embedlab.objectives.bilingual_nce import bilingual_nce
from embedlab.objectives.language_model import IGNORED
from embedlab.pooling import build_pooling
from tests.kernels.test_attention import NoHostReads
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import SENTENCES

Tiny = Callable[..., Path]
SOURCE = [SENTENCES[0], "a cat", SENTENCES[4], "rain"]
TARGET = [SENTENCES[1], SENTENCES[9], "two dogs", "the lake is quiet"]
LIMIT = 10


def method(
    tiny: Tiny,
    kind: str = "bert",
    pooling: str = "cls",
    attention: str = "sdpa",
    chunk: int | None = None,
    **settings: Any,
) -> BEPA:
    """Without dropout, in evaluation mode."""
    source = BackboneConfig(source="local", path=str(tiny(kind)), attention=attention)
    backbone, tokenizer = load_backbone(source, head="masked_lm")
    torch.manual_seed(1)
    encoder = SentenceEncoder(backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer))
    return BEPA(encoder, BEPAConfig(**settings), OptimizerConfig(chunk=chunk)).eval()


def batch(
    bepa: BEPA, source: list[str] = SOURCE, target: list[str] = TARGET, multiple: int = 8
) -> dict[str, Any]:
    """As the data module gives it: each side cut at LIMIT, and padded to a multiple of 8."""
    made: dict[str, Any] = {"rows": torch.arange(len(source))}
    words = Tokenization(bepa.encoder.tokenizer, None, LIMIT)
    known: dict[str, int] = {}
    for view, texts in (("source", source), ("target", target)):
        made[view] = words.pad(words.ids(texts), multiple)
        made[view]["hash"] = torch.tensor([known.setdefault(t, len(known)) for t in texts])
    return made


def gradients(bepa: BEPA, loss: Tensor) -> dict[str, Tensor]:
    bepa.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in bepa.named_parameters() if p.grad is not None}


def losses(bepa: BEPA, data: dict[str, Any] | None = None, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return bepa.losses(data or batch(bepa)).losses


# ---- T5


def test_t5_the_alignment_reaches_both_sides(tiny: Tiny) -> None:
    bepa = method(tiny)
    data = batch(bepa)
    z = [v.detach().requires_grad_() for v in bepa.vectors(bepa.encoder, data["source"], data["target"])]
    bilingual_nce((z[0], z[1]), (z[0], z[1]), 0.07)[0].loss.backward()
    for v in z:
        assert v.grad is not None
        assert bool((v.grad.norm(dim=1) > 0).all())


@pytest.mark.parametrize("mlm_pack", ["mono", "bi"])
def test_t5_lambda_0_is_masked_language_modelling_alone(tiny: Tiny, mlm_pack: str) -> None:
    bepa, control = method(tiny, mlm_pack=mlm_pack), method(tiny, mlm_pack=mlm_pack, lam=0.0)
    found = losses(control)
    assert list(found) == ["masked_lm"]
    both = losses(bepa)
    torch.testing.assert_close(found["masked_lm"], both["masked_lm"])
    alone = gradients(bepa, both["masked_lm"])
    kept = gradients(control, found["masked_lm"])
    assert kept.keys() == alone.keys()
    for name, grad in kept.items():
        torch.testing.assert_close(grad, alone[name])


def test_the_control_leaves_no_weight_without_a_gradient(tiny: Tiny) -> None:
    control = method(tiny, pooling="cls_mlp", predictor="mlp", target="ema", lam=0.0)
    kept = gradients(control, losses(control)["masked_lm"])
    assert {n for n, p in control.named_parameters() if p.requires_grad} == kept.keys()
    assert control.target is None


def test_the_weight_is_lambda(tiny: Tiny) -> None:
    one, three = losses(method(tiny)), losses(method(tiny, lam=3.0))
    torch.testing.assert_close(3 * one["align"], three["align"])
    torch.testing.assert_close(one["masked_lm"], three["masked_lm"])


# ---- T6


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_t6_clean_views_have_no_mask(tiny: Tiny, kind: str) -> None:
    bepa, seen = method(tiny, kind), []
    inner = bepa.encoder.backbone.forward
    bepa.encoder.backbone.forward = lambda ids, *a, **k: (seen.append(ids), inner(ids, *a, **k))[1]  # type: ignore[method-assign]
    losses(bepa)
    masked, clean = seen
    mask_id = bepa.encoder.tokenizer.mask_token_id
    assert bool((masked == mask_id).any())
    assert not bool((clean == mask_id).any())
    assert len(masked) == len(clean) == 2 * len(SOURCE)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("mlm_pack", ["mono", "bi"])
def test_t6_only_words_are_predicted(tiny: Tiny, kind: str, mlm_pack: str) -> None:
    bepa = method(tiny, kind, mlm_pack=mlm_pack, mlm_prob=0.9)
    data = batch(bepa)
    ids, mask = bepa.masked_views(data["source"], data["target"])
    torch.manual_seed(0)
    masked = bepa.prediction.mask(ids, mask)
    chosen = masked.positions[masked.labels != IGNORED]
    assert len(chosen) > 20
    assert bool((mask.flatten()[chosen] == 1).all())
    assert not bool(torch.isin(ids.flatten()[chosen], bepa.prediction.special_ids).any())
    torch.testing.assert_close(masked.labels[masked.labels != IGNORED], ids.flatten()[chosen])
    if mlm_pack == "mono":
        # exactly the floor of the share of each sentence's words
        words = (mask.bool() & ~torch.isin(ids, bepa.prediction.special_ids)).sum(1)
        per_row = torch.bincount(chosen // ids.shape[1], minlength=len(ids))
        assert per_row.tolist() == [max(1, int(0.9 * n)) for n in words.tolist()]


@pytest.mark.parametrize(("mlm_pack", "counts_vary"), [("mono", False), ("bi", True)])
def test_t6_of_packed_rows_each_token_is_masked_by_chance(
    tiny: Tiny, mlm_pack: str, counts_vary: bool
) -> None:
    bepa = method(tiny, mlm_pack=mlm_pack)
    data = batch(bepa)
    views = bepa.masked_views(data["source"], data["target"])
    torch.manual_seed(0)
    counts = {int((bepa.prediction.mask(*views).labels != IGNORED).sum()) for _ in range(20)}
    assert (len(counts) > 1) == counts_vary


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_t6_packed_rows(tiny: Tiny, kind: str) -> None:
    bepa = method(tiny, kind)
    tokenizer = bepa.encoder.tokenizer
    data = batch(bepa)
    assert max(len(tokenizer(t)["input_ids"]) for t in SOURCE + TARGET) > LIMIT, "something has to be cut"
    packed = pack(data["source"], data["target"], tokenizer.pad_token_id)
    for i in range(len(SOURCE)):
        row = packed.input_ids[i].tolist()
        parts = [
            v["input_ids"][i][: v["attention_mask"][i].sum()].tolist()
            for v in (data["source"], data["target"])
        ]
        n, m = map(len, parts)
        assert row == parts[0] + parts[1] + [tokenizer.pad_token_id] * (len(row) - n - m)
        assert row.count(tokenizer.cls_token_id) == row.count(tokenizer.sep_token_id) == 2
        assert row[n - 1] == row[n + m - 1] == tokenizer.sep_token_id
        assert row[0] == row[n] == tokenizer.cls_token_id
        assert packed.side[i].tolist() == [FIRST] * n + [SECOND] * m + [PADDING] * (len(row) - n - m)
    assert packed.attention_mask.sum() == sum(
        int(v["attention_mask"].sum()) for v in (data["source"], data["target"])
    )


def test_t6_mono_rows_are_both_sides_on_top_of_each_other(tiny: Tiny) -> None:
    bepa = method(tiny)
    data = batch(bepa, multiple=1)
    ids, mask = stacked((data["source"], data["target"]), bepa.encoder.tokenization.pad_id)
    assert ids.shape == mask.shape == (2 * len(SOURCE), LIMIT)
    assert torch.equal(
        ids[: len(SOURCE), : data["source"]["input_ids"].shape[1]], data["source"]["input_ids"]
    )
    assert torch.equal(
        ids[len(SOURCE) :, : data["target"]["input_ids"].shape[1]], data["target"]["input_ids"]
    )


# ---- T7 and T8


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_t7_a_side_out_of_sight_is_a_sentence_alone(
    tiny: Tiny, kind: str, attention: str, pooling: str
) -> None:
    bepa = method(tiny, kind, pooling, attention)
    vectors = {}
    with torch.no_grad():
        for form in ("separate_clean", "packed_blockmask"):
            object.__setattr__(bepa.config, "align_input", form)
            for multiple in (1, 8, 32):
                data = batch(bepa, multiple=multiple)
                vectors[form, multiple] = torch.cat(
                    bepa.vectors(bepa.encoder, data["source"], data["target"])
                )
        alone = torch.cat([
            bepa.encoder(*(v[k][None] for k in ("input_ids", "attention_mask")))
            for side in ("source", "target") for v in _rows(batch(bepa)[side])
        ])  # fmt: skip
    for z in vectors.values():
        torch.testing.assert_close(z, alone, rtol=1e-4, atol=1e-5)


def _rows(view: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [
        {k: view[k][i][: view["attention_mask"][i].sum()] for k in ("input_ids", "attention_mask")}
        for i in range(len(view["input_ids"]))
    ]


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_t8_what_is_hidden_is_not_seen(tiny: Tiny, kind: str) -> None:
    bepa = method(tiny, kind, align_input="packed_masked")
    data, other = batch(bepa), batch(bepa)
    words = other["target"]["attention_mask"].bool() & ~torch.isin(
        other["target"]["input_ids"], bepa.prediction.special_ids
    )
    other["target"]["input_ids"] = torch.where(words, 41, other["target"]["input_ids"])
    with torch.no_grad():
        before = bepa.vectors(bepa.encoder, data["source"], data["target"])
        after = bepa.vectors(bepa.encoder, other["source"], other["target"])
    assert torch.equal(before[0], after[0]), "the first side's vector does not see the second"
    assert bool(((before[1] - after[1]).abs().amax(1) > 1e-3).all())


def test_t8_the_hidden_side_is_masked_whole(tiny: Tiny) -> None:
    bepa = method(tiny)
    data, mask_id = batch(bepa), bepa.encoder.tokenizer.mask_token_id
    packed = pack(data["source"], data["target"], 0)
    second = mask_side(packed, SECOND, mask_id)
    assert bool((second[packed.side == SECOND] == mask_id).all())
    assert torch.equal(second[packed.side != SECOND], packed.input_ids[packed.side != SECOND])
    first = mask_side(packed, FIRST, mask_id)
    assert torch.equal(first[:, 0], packed.input_ids[:, 0]), "the first [CLS] stays"
    gone = packed.side == FIRST
    gone[:, 0] = False
    assert bool((first[gone] == mask_id).all())
    assert torch.equal(first[~gone], packed.input_ids[~gone])


# ---- T9 and T11


def test_t9_rankme() -> None:
    line = torch.outer(torch.rand(20) + 0.1, torch.randn(8))
    assert float(rankme(line)) == pytest.approx(1, abs=1e-2)
    for k in (2, 5):
        assert float(rankme(torch.eye(k, 8).repeat(3, 1))) == pytest.approx(k, rel=1e-4)
    z = torch.randn(6, 30)
    assert 1 < float(rankme(z)) <= 6 + 1e-6


def test_t11_accumulation_averages_small_contrasts(tiny: Tiny) -> None:
    """Four batches of four are four 4-way losses: not one of sixteen, whose every anchor meets more negatives."""
    bepa = method(tiny)
    texts = list(SENTENCES)
    data = [batch(bepa, texts[i : i + 4], texts[::-1][i : i + 4]) for i in range(0, 16, 4)]
    pieces, mean = [], None
    for part in data:
        torch.manual_seed(0)
        loss = bepa.losses(part).losses["align"]
        pieces.append(float(loss.detach()))
        found = gradients(bepa, loss / 4)
        mean = found if mean is None else {n: mean[n] + g for n, g in found.items()}
    assert mean is not None
    whole = losses(bepa, batch(bepa, texts, texts[::-1]))["align"]
    assert abs(sum(pieces) / 4 - float(whole.detach())) > 0.3
    bepa.zero_grad()
    for part in data:
        torch.manual_seed(0)
        (bepa.losses(part).losses["align"] / 4).backward()
    for name, p in bepa.named_parameters():
        if name in mean:
            torch.testing.assert_close(p.grad, mean[name])


# ---- options


@pytest.mark.parametrize("loss", ["infonce", "mse", "cosine", "vicreg", "sigreg"])
@pytest.mark.parametrize("target", ["shared", "stopgrad", "ema"])
@pytest.mark.parametrize("predictor", ["identity", "linear", "mlp"])
def test_every_loss_with_every_target_and_predictor(
    tiny: Tiny, loss: str, target: str, predictor: str
) -> None:
    bepa = method(tiny, loss=loss, target=target, predictor=predictor)
    torch.manual_seed(0)
    outcome = bepa.losses(batch(bepa))
    grads = gradients(bepa, outcome.losses["align"])
    assert bool(torch.isfinite(outcome.losses["align"]))
    assert grads
    assert all(bool(torch.isfinite(g).all()) for g in grads.values())
    assert any(n.startswith("encoder") and float(g.abs().max()) > 0 for n, g in grads.items())
    trained = {n for n, _ in bepa.predictor.named_parameters()}
    assert len(trained) == {"identity": 0, "linear": 2, "mlp": 4}[predictor]
    assert {f"predictor.{n}" for n in trained} <= grads.keys()
    assert not any(n.startswith("target") for n in grads)
    assert {"positive_cosine", "spread", "participation"} <= outcome.stats.keys()


@pytest.mark.parametrize("align_input", ["separate_clean", "packed_masked", "packed_blockmask"])
@pytest.mark.parametrize("mlm_pack", ["mono", "bi"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "cls_mlp", "first_last"])
def test_every_input_with_every_packing(tiny: Tiny, align_input: str, mlm_pack: str, pooling: str) -> None:
    bepa = method(tiny, "xlm-roberta", pooling, align_input=align_input, mlm_pack=mlm_pack)
    found = losses(bepa)
    assert all(bool(torch.isfinite(v)) for v in found.values())
    grads = gradients(bepa, torch.stack(list(found.values())).sum())
    # What is left without a gradient would stop DDP.
    assert {n for n, p in bepa.named_parameters() if p.requires_grad} == grads.keys()


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss": loss, "predictor": "mlp"} for loss in ("infonce", "mse", "cosine", "vicreg", "sigreg")),
        {"align_input": "packed_masked", "mlm_pack": "bi", "target": "ema"},
        {"align_input": "packed_blockmask", "within_lang_neg": False},
        {"lam": 0.0, "mlm_pack": "bi"},
    ],
    ids=lambda s: "-".join(str(v) for v in s.values()),
)
def test_a_step_asks_the_device_for_no_value(tiny: Tiny, settings: dict[str, Any]) -> None:
    """So that it can be captured in a CUDA graph."""
    bepa = method(tiny, "xlm-roberta", **settings).train()
    data = batch(bepa)
    with NoHostReads():
        total, _ = bepa.total(data)
        total.backward()


@pytest.mark.parametrize("align_input", ["separate_clean", "packed_masked", "packed_blockmask"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_have_the_gradient_of_the_whole(tiny: Tiny, align_input: str, chunk: int) -> None:
    whole, parts = (method(tiny, chunk=c, align_input=align_input, mlm_pack="bi") for c in (None, chunk))
    sizes = []
    inner = parts.encoder.backbone.forward
    parts.encoder.backbone.forward = lambda *rows, **k: (sizes.append(len(rows[0])), inner(*rows, **k))[1]  # type: ignore[method-assign]
    found = [losses(bepa) for bepa in (whole, parts)]
    torch.testing.assert_close(found[0], found[1])
    assert max(sizes) == chunk
    a, b = (
        gradients(bepa, each["masked_lm"] + each["align"])
        for bepa, each in zip((whole, parts), found, strict=True)
    )
    assert a.keys() == b.keys()
    for name, grad in a.items():
        torch.testing.assert_close(grad, b[name], rtol=1e-4, atol=1e-6)


def test_a_target_without_gradient_halves_the_gradient_of_a_distance(tiny: Tiny) -> None:
    shared, stopped = (method(tiny, loss="mse", target=t) for t in ("shared", "stopgrad"))
    a, b = gradients(shared, losses(shared)["align"]), gradients(stopped, losses(stopped)["align"])
    name = next(n for n in a if "query.weight" in n)
    torch.testing.assert_close(a[name], 2 * b[name])


def test_the_moving_average(tiny: Tiny) -> None:
    bepa = method(tiny, target="ema", ema=0.75)
    target = bepa.target
    assert target is not None
    assert bepa.encoder.backbone.head is not None
    assert target.backbone.head is None
    name, p = next((n, p) for n, p in target.named_parameters() if p.dim() > 1)
    own = dict(bepa.encoder.named_parameters())[name]
    assert p.data_ptr() != own.data_ptr()
    assert torch.equal(p, own)
    before = p.clone()
    with torch.no_grad():
        own.add_(1.0)
    average(target, bepa.encoder, 0.75)
    torch.testing.assert_close(p, before + 0.25)
    bepa.train()
    for module in bepa.frozen():
        module.eval()
    assert bepa.encoder.training
    assert not target.training


def test_the_moving_average_of_adapters_is_in_a_checkpoint(tiny: Tiny) -> None:
    def adapted(seed: int) -> BEPA:
        source = BackboneConfig(source="local", path=str(tiny("xlm-roberta")))
        backbone, tokenizer = load_backbone(source, head="masked_lm")
        adapt(backbone, AdapterConfig(name="lora", r=2), source)
        encoder = SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))
        bepa = BEPA(encoder, BEPAConfig(target="ema"), OptimizerConfig())
        with torch.no_grad():
            for name, p in bepa.named_parameters():
                if ".lora_" in name:
                    p.normal_(generator=torch.Generator().manual_seed(seed + name.startswith("target")))
        return bepa

    bepa, resumed = adapted(0), adapted(10)
    resumed.load_state_dict(bepa.state_dict())
    assert bepa.target is not None
    assert resumed.target is not None
    saved = dict(bepa.target.named_parameters())
    for name, p in resumed.target.named_parameters():
        assert torch.equal(p, saved[name]), name
    assert any(".lora_" in name for name in saved)
    assert not any("base_layer" in name for name in bepa.state_dict()), "the base is where it was"
    gone = {k: v for k, v in bepa.state_dict().items() if not k.startswith("target.")}
    with pytest.raises(RuntimeError, match="lora_A"):
        adapted(10).load_state_dict(gone)


def test_a_repeated_text_is_no_negative_unless_asked(tiny: Tiny) -> None:
    texts = ["a cat", "a cat", "two dogs", "rain"]
    on, off = method(tiny), method(tiny, mask_duplicates=False)
    data = batch(on, texts, TARGET)
    assert float(losses(on, data)["align"]) < float(losses(off, data)["align"]) - 0.05


def test_the_longest_row_of_a_step(tiny: Tiny) -> None:
    lengths = {"source": 24, "target": 32}
    assert method(tiny).longest(lengths) == 32
    # Without padding, both halves have the width of the longest row, a power of two.
    assert method(tiny, mlm_pack="bi").longest(lengths) == 64
    assert method(tiny, align_input="packed_masked").longest({"source": 20, "target": 33}) == 128


@pytest.mark.parametrize(("horizon", "expected"), [("opt", 100), ("micro", 400)])
def test_the_horizon_of_the_schedule(tiny: Tiny, horizon: str, expected: int) -> None:
    bepa = method(tiny, horizon=horizon)
    bepa.optimizer_config = OptimizerConfig(accumulate=4)
    bepa._trainer = SimpleNamespace(estimated_stepping_batches=100, max_steps=100)  # type: ignore[assignment]
    assert bepa.schedule_steps() == expected
    # A captured step adds up by itself: without a limit of steps its trainer counts batches.
    bepa.use(CapturedStep())
    bepa._trainer = SimpleNamespace(  # type: ignore[assignment]
        estimated_stepping_batches=400, max_steps=-1, num_training_batches=200, max_epochs=2
    )
    assert bepa.schedule_steps() == expected


# ---- what is refused


INFO = BackboneInfo("encoder", 12, 256, 512, True, 0.1, "xlm-roberta", True)
DECODER = BackboneInfo("decoder", 12, 256, 512, False, 0.0, "gpt2", False)
MODERN = BackboneInfo("encoder", 12, 256, 512, True, 0.1, "modernbert", True)


@pytest.mark.parametrize(
    ("settings", "info", "data", "key"),
    [
        ({"loss": "l2"}, INFO, "parallel", "method.loss"),
        ({"mlm_pack": "both"}, INFO, "parallel", "method.mlm_pack"),
        ({"align_input": "packed"}, INFO, "parallel", "method.align_input"),
        ({"predictor": "deep"}, INFO, "parallel", "method.predictor"),
        ({"target": "momentum"}, INFO, "parallel", "method.target"),
        ({"horizon": "batch"}, INFO, "parallel", "method.horizon"),
        ({"tau": 0.0}, INFO, "parallel", "method.tau"),
        ({"lam": -1.0}, INFO, "parallel", "method.lam"),
        ({"mlm_prob": 1.0}, INFO, "parallel", "method.mlm_prob"),
        ({"ema": 1.0}, INFO, "parallel", "method.ema"),
        ({"vicreg_weights": [1.0, 2.0]}, INFO, "parallel", "method.vicreg_weights"),
        ({"sigreg_weight": -0.1}, INFO, "parallel", "method.sigreg_weight"),
        ({"sigreg_slices": 0}, INFO, "parallel", "method.sigreg_slices"),
        ({}, DECODER, "parallel", "backbone"),
        ({"align_input": "packed_blockmask"}, MODERN, "parallel", "method.align_input"),
    ],
)
def test_what_has_no_meaning_is_refused(
    settings: dict[str, Any], info: BackboneInfo, data: str, key: str
) -> None:
    def refuse() -> None:  # a value by itself when it is read, a combination when it is checked
        config = method_config({"name": "bepa", **settings})
        config.check(info, run_of(data))

    with pytest.raises(UserError) as caught:
        refuse()
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_two_sentences_of_half_the_positions_are_packed() -> None:
    bi = BEPAConfig(mlm_pack="bi")
    for config, longest in ((bi, 256), (BEPAConfig(), None), (BEPAConfig(), 512)):
        config.check(INFO, run_of("parallel", max_length=longest))
    for config in (bi, BEPAConfig(align_input="packed_masked")):
        for longest in (257, None):
            with pytest.raises(UserError, match=r"data\.max_length"):
                config.check(INFO, run_of("parallel", max_length=longest))


def test_a_template_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        BEPAConfig().check(INFO, run_of("parallel", template=Template("{sentence} .")))
    assert caught.value.key == "template"


def test_what_collapses_is_said() -> None:
    assert "one vector for every sentence" in " ".join(BEPAConfig(loss="mse").check(INFO, run_of("parallel")))
    assert BEPAConfig(loss="mse", target="stopgrad").check(INFO, run_of("parallel")) == []
    assert BEPAConfig(loss="mse", lam=0.0).check(INFO, run_of("parallel")) == []
    warned = BEPAConfig(align_input="packed_masked").check(INFO, run_of("parallel"))
    assert "collapsed" in " ".join(warned)


@pytest.mark.parametrize(
    ("settings", "length", "attention", "key"),
    [
        ({"target": "ema"}, 64, "sdpa", "trainer.strategy"),
        ({"target": "ema", "lam": 0.0}, 64, "sdpa", None),
        ({"mlm_pack": "bi"}, 257, "sdpa", "data.max_length"),
        ({"mlm_pack": "bi"}, None, "sdpa", "data.max_length"),
        ({"align_input": "packed_masked"}, 257, "sdpa", "data.max_length"),
        ({"align_input": "packed_blockmask"}, 64, "flash_attention_2", "backbone.attention"),
        ({"mlm_pack": "bi"}, 256, "sdpa", None),
        ({}, 512, "sdpa", None),
        ({"align_input": "packed_masked", "lam": 0.0}, 512, "sdpa", None),
    ],
)
def test_what_only_the_run_shows(
    settings: dict[str, Any], length: int | None, attention: str, key: str | None
) -> None:
    run = run_of("parallel", max_length=length, attention=attention, strategy="fsdp")
    config = BEPAConfig(**settings)
    if key is None:
        config.check(INFO, run)
        return
    with pytest.raises(UserError) as caught:
        config.check(INFO, run)
    assert caught.value.key == key


# ---- experiments


def composed(*line: str) -> dict[str, Any]:
    from embedlab.cli.compose import compose

    return compose("train", list(line))


def test_the_table_has_its_controls() -> None:
    arms = {
        arm: composed("experiment=bepa_table", f"arm={arm}") for arm in ("mlm_mono", "mlm_bi", "mono", "bi")
    }
    assert {a: (v["method"]["lam"], v["method"]["mlm_pack"]) for a, v in arms.items()} == {
        "mlm_mono": (0.0, "mono"), "mlm_bi": (0.0, "bi"), "mono": (1.0, "mono"), "bi": (1.0, "bi")}  # fmt: skip
    for values in arms.values():  # the same data and steps
        assert {k: values[k] for k in ("data", "trainer", "optimizer")} == {
            k: arms["bi"][k] for k in ("data", "trainer", "optimizer")
        }


def test_the_official_preset() -> None:
    values = composed("experiment=bepa_official")
    method, data, optimizer = values["method"], values["data"], values["optimizer"]
    assert (method["mask_self"], method["mask_duplicates"], method["gather_negatives"]) == (
        False,
        False,
        False,
    )
    assert (method["tau"], method["lam"], method["horizon"]) == (0.07, 1.0, "micro")
    assert (data["batch_size"], optimizer["accumulate"], data["pair_limit"], data["pair_sample"]) == (
        16,
        4,
        10000,
        "first",
    )
    assert (data["min_chars"], data["max_chars"], data["overlong"]) == (10, 500, "drop")
    assert (optimizer["lr"], optimizer["weight_decay"], optimizer["warmup_steps"], optimizer["clip"]) == (
        2e-5,
        0.01,
        500,
        1.0,
    )


def test_every_arm_of_the_ablations_is_a_method() -> None:
    values = composed("experiment=bepa_loss_ablation")
    for arm in values["arms"]:
        method = composed("experiment=bepa_loss_ablation", f"arm={arm}")["method"]
        method_config(method).check(INFO, run_of("parallel"))
    assert values["method"]["loss"] == "infonce"
    for size, pairs in (("b16", 16), ("b64", 64), ("b256", 256)):
        batch = composed("experiment=bepa_batch", f"size={size}")
        assert batch["data"]["batch_size"] == pairs
        assert batch["data"]["batch_size"] * batch["optimizer"]["accumulate"] == 256


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("bepa", tmp_path, monkeypatch)
