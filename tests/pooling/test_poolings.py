"""Every pooling is a function of the real tokens alone, and reads what its name says."""

from __future__ import annotations

import dataclasses
import inspect
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.parts import part_names
from embedlab.pooling import build_pooling, pooling_class, pooling_config
from embedlab.pooling.base import Pooling

INFO = BackboneInfo("encoder", 3, 16, 64, True, 0.1, "bert", True)
DECODER = dataclasses.replace(INFO, kind="decoder", has_mask_token=False, model_type="gpt2")
MASKED = Template('This sentence of "{sentence}" means {mask}.')
MARKS = {"mask": 2, "rep1": 2, "rep2": 0}
LENGTHS = (1, 3, 4, 7)
OURS = ("cls", "mean", "last", "mask", "first_last", "cls_mlp")


def build(name: str, **settings: Any) -> Pooling:
    torch.manual_seed(0)
    return build_pooling({"name": name, **settings}, INFO).eval()


def states(pooling: Pooling, rows: list[Tensor], left: int, right: int, fill: float) -> tuple[Any, Tensor]:
    """Rows [N + 1, L_i, D] padded to one batch, with `fill` in the padding."""
    longest = max(r.shape[1] for r in rows)
    width = longest + left + right
    hidden = torch.full((len(rows), rows[0].shape[0], width, rows[0].shape[2]), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        start = left + (longest - row.shape[1] if left else 0)
        hidden[i, :, start : start + row.shape[1]] = row
        mask[i, start : start + row.shape[1]] = 1
    layers = tuple(hidden.transpose(0, 1))
    return (layers if pooling.needs_all_layers else layers[-1:]), mask


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("fill", [0.0, 1e3, float("nan")])
def test_padding_has_no_influence(name: str, fill: float) -> None:
    """Pitfalls 26, 27 and 33: right, left, both and no padding, alone and in a batch, whatever stands in it."""
    pooling = build(name)
    rows = [torch.randn(4, n, 16) for n in LENGTHS if name != "mask" or n > 2]
    alone = []
    for row in rows:
        hidden, mask = states(pooling, [row], 0, 0, fill)
        alone.append(pooling(hidden, mask, MARKS)[0])
    for left, right in product((0, 1, 5), (0, 1, 4)):
        hidden, mask = states(pooling, rows, left, right, fill)
        before = mask.clone()
        pooled = pooling(hidden, mask, MARKS)
        assert torch.equal(mask, before)
        torch.testing.assert_close(pooled, torch.stack(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OURS)
def test_a_row_without_tokens_is_finite(name: str) -> None:
    pooling = build(name)
    hidden = tuple(torch.randn(2, 5, 16) for _ in range(4 if pooling.needs_all_layers else 1))
    mask = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert torch.isfinite(pooling(hidden, mask, MARKS)).all()


@pytest.mark.parametrize("name", OURS)
def test_half_precision_states_are_pooled_in_fp32(name: str) -> None:
    pooling = build(name)
    exact = tuple(torch.randn(2, 6, 16).bfloat16() for _ in range(4 if pooling.needs_all_layers else 1))
    mask = torch.ones(2, 6, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = pooling(exact, mask, MARKS)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(
        pooled, pooling(tuple(h.float() for h in exact), mask, MARKS), rtol=0, atol=1e-6
    )
    assert pooling(tuple(h.double() for h in exact), mask, MARKS).dtype == torch.float64


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "cls_mlp"},
        {"name": "scalar_mix", "n": 2},
        {"name": "feature_mix", "n": 2},
        {"name": "s2sent", "n": 2, "r": 4},
        {"name": "s2sent", "n": 2, "r": 4, "squeeze": "none"},
        {"name": "modules", "modes": ["mean"], "head": [{"kind": "dense", "out": 4}, {"kind": "layer_norm"}]},
    ],
)
def test_half_precision_weights_compute_in_fp32(settings: dict[str, Any]) -> None:
    pooling = build(**settings)
    for p in pooling.parameters():
        p.data = torch.randn_like(p)
    hidden, mask = tuple(torch.randn(2, 6, 16) for _ in range(4)), torch.ones(2, 6, dtype=torch.long)
    rounded = pooling.bfloat16()(hidden, mask, MARKS)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, pooling.float()(hidden, mask, MARKS))


def test_a_mean_of_many_large_fp16_states_does_not_overflow() -> None:
    """Pitfall 20: 100 x 60000 is beyond fp16."""
    hidden = (torch.full((1, 100, 16), 6e4, dtype=torch.float16),)
    torch.testing.assert_close(
        build("mean")(hidden, torch.ones(1, 100), {}), torch.full((1, 16), 59968.0), rtol=1e-3, atol=0
    )


def test_first_last_takes_the_first_block_and_not_the_embeddings() -> None:
    """Pitfall 35, by hand: layer k holds the value k at every token; the last is 2."""
    layers = tuple(torch.full((1, 3, 4), float(k)) for k in range(3))
    mask = torch.ones(1, 3)
    info = dataclasses.replace(INFO, layers=2, width=4, inner_width=4)
    assert build_pooling("first_last", info)(layers, mask, {}).unique().tolist() == [1.5]
    assert build_pooling({"name": "first_last", "embeddings": True}, info)(
        layers, mask, {}
    ).unique().tolist() == [1.0]


def test_what_each_reads() -> None:
    hidden = torch.arange(12.0).view(1, 6, 2)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0]])
    info = dataclasses.replace(INFO, width=2, inner_width=2)
    read = {
        n: build_pooling(n, info)((hidden,), mask, {"mask": 1})[0].tolist()
        for n in ("cls", "last", "mask", "mean")
    }
    assert read == {"cls": [2.0, 3.0], "last": [8.0, 9.0], "mask": [6.0, 7.0], "mean": [5.0, 6.0]}


def test_cls_mlp_is_a_dense_layer_and_tanh_with_bert_initialisation() -> None:
    pooling = build("cls_mlp")
    assert set(pooling.state_dict()) == {"linear.weight", "linear.bias"}
    weight, bias = pooling.state_dict()["linear.weight"], pooling.state_dict()["linear.bias"]
    assert bias.abs().max() == 0
    assert 0.015 < weight.std() < 0.025
    hidden = torch.randn(2, 3, 16)
    expected = torch.tanh(hidden[:, 0] @ weight.T)
    torch.testing.assert_close(pooling((hidden,), torch.ones(2, 3), {}), expected)


def test_gradients_reach_every_weight_and_the_states() -> None:
    pooling = build("cls_mlp")
    hidden = torch.randn(2, 3, 16, requires_grad=True)
    pooling((hidden,), torch.ones(2, 3), {}).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[:, 0].abs().min() > 0
    assert hidden.grad[:, 1:].abs().max() == 0
    assert all(p.grad is not None for p in pooling.parameters())


@pytest.mark.parametrize(
    ("name", "info", "template", "fix"),
    [
        ("cls", DECODER, None, "pooling=last"),
        ("cls_mlp", DECODER, None, "pooling=last"),
        ("mask", INFO, None, "template="),
        ("mask", INFO, Template("query: {sentence}"), "template="),
        ("mask", DECODER, MASKED, "encoder backbone"),
        ("first_last", dataclasses.replace(INFO, inner_width=32), None, "pooling=mean"),
    ],
)
def test_meaningless_combinations(name: str, info: BackboneInfo, template: Template | None, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        pooling_config(name).check(info, template, "simcse")
    assert caught.value.key == "pooling"
    assert caught.value.value == name
    assert fix in str(caught.value.fix)


def test_fitting_combinations() -> None:
    for name, info, template in (
        ("cls", INFO, None), ("cls_mlp", INFO, None), ("mean", INFO, None), ("mean", DECODER, None),
        ("last", DECODER, None), ("mask", INFO, MASKED), ("first_last", INFO, None), ("first_last", DECODER, None),
    ):  # fmt: skip
        assert pooling_config(name).check(info, template, "simcse") == []
    assert "SEP" in pooling_config("last").check(INFO, None, "simcse")[0]


def test_unknown_names_and_keys() -> None:
    with pytest.raises(UserError, match="pooling=mean"):
        pooling_config("maen")
    with pytest.raises(UserError, match=r"did you mean pooling\.embeddings"):
        pooling_config({"name": "first_last", "embedding": True})
    with pytest.raises(UserError, match="unknown pooling"):
        pooling_config({})


@pytest.mark.parametrize("name", part_names("pooling"))
def test_every_pooling_is_found_by_its_own_name(name: str) -> None:
    pooling = pooling_class(name)
    config = pooling.config_class
    assert config.__module__ == pooling.__module__
    assert dataclasses.is_dataclass(config)
    assert config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert next(f.default for f in dataclasses.fields(config) if f.name == "name") == name
    assert pooling.name == name
    assert not inspect.isabstract(pooling)
