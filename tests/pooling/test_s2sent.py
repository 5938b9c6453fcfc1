"""S2Sent's invariants, T1 to T20 of its specification (T4 and T14 are in test_dct and test_frequencies)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, cosine_similarity

from embedlab.config.backbone import BackboneInfo
from embedlab.encoders.row_marks import Frame, RowMarks
from embedlab.pooling import build_pooling
from embedlab.pooling.frequencies import select
from embedlab.pooling.s2sent import S2Sent
from embedlab.pooling.selection import Gate, block_weights
from embedlab.pooling.squeeze import FrequencySelection

LAYERS, WIDTH = 12, 32


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def info(layers: int = LAYERS, width: int = WIDTH) -> BackboneInfo:
    return BackboneInfo("encoder", layers, width, 64, True, 0.1, "bert", True)


def s2(layers: int = LAYERS, width: int = WIDTH, scale: float = 10.0, **settings: Any) -> S2Sent:
    """A pooling whose gates differ visibly (at the initial 0.02 all weights are nearly equal)."""
    torch.manual_seed(7)
    pooling = build_pooling({"name": "s2sent", "r": 4, **settings}, info(layers, width)).eval()
    assert isinstance(pooling, S2Sent)
    if pooling.gate is not None:
        for p in pooling.gate.parameters():
            p.data = torch.randn_like(p) * 0.02 * scale
    return pooling


def states(lengths: list[int], layers: int = LAYERS, width: int = WIDTH) -> tuple[tuple[Tensor, ...], Tensor]:
    """Hidden states [B, max(lengths), D] in double precision, and the mask of right padding."""
    torch.manual_seed(3)
    longest = max(lengths)
    hidden = tuple(torch.randn(len(lengths), longest, width).double() for _ in range(layers + 1))
    return hidden, (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# Padding


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("squeeze", ["dct", "gap", "none"])
def test_t01_padding_changes_nothing(side: str, squeeze: str) -> None:
    pooling = s2(squeeze=squeeze)
    hidden, mask = states([7, 4])
    junk = torch.full((2, 3, WIDTH), 1e3).double()

    def padded(x: Tensor, fill: Tensor) -> Tensor:
        return torch.cat([fill, x] if side == "left" else [x, fill], 1)

    longer = tuple(padded(h, junk) for h in hidden)
    wider = padded(mask, torch.zeros(2, 3, dtype=torch.long))
    close(pooling(longer, wider, {}), pooling(hidden, mask, {}))
    if pooling.select is not None:
        close(pooling.weights(longer, wider, {}), pooling.weights(hidden, mask, {}))
        f = pooling.select(pooling.blocks(hidden, mask), mask)
        close(pooling.select(pooling.blocks(longer, wider), wider), f)


@pytest.mark.parametrize("settings", [{}, {"squeeze": "none"}, {"mode": "avg1d"}, {"pool": "cls"}])
def test_t13_alone_as_in_a_batch(settings: dict) -> None:
    pooling = s2(**settings)
    hidden, mask = states([7, 4, 2])
    together = pooling(hidden, mask, {})
    for i, length in enumerate([7, 4, 2]):
        alone = tuple(h[i : i + 1, :length] for h in hidden)
        close(pooling(alone, torch.ones(1, length), {}), together[i : i + 1])


def test_t15_groups_above_the_length_are_zero_and_gradients_finite() -> None:
    pairs = select(1, 8)
    squeeze = FrequencySelection(pairs, WIDTH, 1, "mean")
    hidden, mask = states([2, 9])
    f = squeeze(hidden[-1][None], mask).view(2, 8, -1)
    assert not f[0, 2:].any()
    assert f[0, :2].all()
    assert f[1].all()
    pooling = s2(mode="last1d", m=8)
    leaves = tuple(h.requires_grad_() for h in hidden)
    pooling(leaves, mask, {}).sum().backward()
    assert torch.isfinite(leaves[-1].grad).all()
    assert all(torch.isfinite(p.grad).all() for p in pooling.parameters())


def test_a_row_without_tokens_is_finite() -> None:
    hidden, _ = states([4, 4])
    assert torch.isfinite(s2()(hidden, torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]), {})).all()


# Frequency Selection


def naive(u: Tensor, length: int, pairs: tuple, norm: str = "mean") -> Tensor:
    """The definition, in loops: one sentence's U [N, L, D] to f [D]."""
    blocks, _, width = u.shape
    f = torch.zeros(width, dtype=torch.float64)
    constant = {
        "mean": lambda b, k: (1 if b == 0 else math.sqrt(2)) / k,
        "ortho": lambda b, k: math.sqrt((1 if b == 0 else 2) / k),
        "sum": lambda b, k: 1.0,
    }[norm]
    for d in range(width):
        a, b = pairs[d * len(pairs) // width]
        for n in range(blocks):
            for t in range(length):
                gamma = constant(a, blocks) * math.cos(math.pi * a * (n + 0.5) / blocks)
                beta = constant(b, length) * math.cos(math.pi * b * (t + 0.5) / length)
                f[d] += gamma * beta * u[n, t, d]
    return f


@pytest.mark.parametrize("norm", ["mean", "ortho", "sum"])
@pytest.mark.parametrize(("blocks", "m"), [(3, 4), (1, 8), (6, 16)])
def test_frequency_selection_is_its_definition(blocks: int, m: int, norm: str) -> None:
    hidden, mask = states([9, 17], layers=5)
    u = torch.stack(hidden[-blocks:])
    pairs = select(blocks, m)
    f = FrequencySelection(pairs, WIDTH, blocks, norm, gain=2.0)(u, mask)
    for i, length in enumerate([9, 17]):
        close(f[i], 2 * naive(u[:, i], length, pairs, norm), 1e-5)


def test_t02_low_1_is_global_average_pooling() -> None:
    hidden, mask = states([7, 4])
    u = torch.stack(hidden[-3:])
    f = FrequencySelection(select(3, 1), WIDTH, 3, "mean")(u, mask)
    close(f[0], u[:, 0].mean((0, 1)))
    close(f[1], u[:, 1, :4].mean((0, 1)))
    close(s2(m=1)(hidden, mask, {}), s2(squeeze="gap", m=4)(hidden, mask, {}))


def test_t03_constant_blocks_have_frequency_zero_only() -> None:
    u = torch.full((3, 1, 8, WIDTH), 2.5).double()
    f = FrequencySelection(select(3, 8), WIDTH, 3, "mean")(u, torch.ones(1, 8)).view(8, -1)
    close(f[0], torch.full_like(f[0], 2.5))
    close(f[1:], torch.zeros_like(f[1:]))


def test_t05_frequency_selection_is_linear() -> None:
    hidden, mask = states([7, 4])
    u = torch.stack(hidden[-3:])
    squeeze = FrequencySelection(select(3, 8), WIDTH, 3, "mean")
    close(squeeze(-3.5 * u, mask), -3.5 * squeeze(u, mask))


def test_t06_reversing_an_axis_turns_the_sign_of_its_odd_frequencies() -> None:
    hidden, mask = states([7])
    u = torch.stack(hidden[-3:])
    pairs = select(3, 16)
    squeeze = FrequencySelection(pairs, WIDTH, 3, "mean")
    f = squeeze(u, mask).view(16, -1)
    by_token = torch.tensor([(-1.0) ** b for _, b in pairs])[:, None]
    by_block = torch.tensor([(-1.0) ** a for a, _ in pairs])[:, None]
    close(squeeze(u.flip(2), mask).view(16, -1), by_token * f)
    close(squeeze(u.flip(0), mask).view(16, -1), by_block * f)


def test_t18_the_released_grid() -> None:
    """Three blocks on six rows: a = 3 vanishes, 4 and 5 repeat 2 and 1."""
    feature = torch.randn(3, 1, 10, 1).double()
    pairs = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    u = feature.expand(3, 1, 10, 5).contiguous()
    f = FrequencySelection(pairs, 5, 3, "ortho", grid=True)(u, torch.ones(1, 10))[0]
    close(f[2], torch.zeros_like(f[2]))
    close(f[3] / f[1], torch.tensor(-0.57735).double(), 1e-5)
    close(f[4] / f[0], torch.tensor(-0.26795).double(), 1e-5)
    one = FrequencySelection([(a, b) for a in range(6) for b in (0, 1)], 12, 1, "ortho", grid=True)
    f = one(torch.randn(1, 1, 10, 12).double(), torch.ones(1, 10))[0]
    assert f[:2].abs().min() > 1e-3
    close(f[2:], torch.zeros_like(f[2:]))


@pytest.mark.parametrize(("blocks", "length"), [(1, 4), (3, 10), (9, 6), (12, 32)])
def test_the_released_grid_is_adaptive_pooling_then_a_six_by_six_dct(blocks: int, length: int) -> None:
    u = torch.randn(blocks, 3, length, WIDTH).double()
    pairs = select(blocks, 8, invalid="grid6")
    f = FrequencySelection(pairs, WIDTH, blocks, "ortho", grid=True)(u, torch.ones(3, length))
    pooled = adaptive_avg_pool2d(u.permute(1, 3, 0, 2), 6).permute(2, 0, 3, 1)
    for i in range(3):
        close(f[i], naive(pooled[:, i], 6, pairs, "ortho"), 1e-5)
    as_mean = FrequencySelection(pairs, WIDTH, blocks, "mean", gain=6.0, grid=True)(u, torch.ones(3, length))
    close(as_mean, f)


def test_the_released_grid_counts_padding() -> None:
    pooling = s2(invalid="grid6")
    hidden, mask = states([7, 4])
    everything = torch.ones_like(mask)
    assert not torch.allclose(pooling(hidden, mask, {})[1], pooling(hidden, everything, {})[1])
    # The gate sees what stands in the padding as if it were text.
    assert torch.equal(pooling.weights(hidden, mask, {}), pooling.weights(hidden, everything, {}))
    longer = tuple(torch.cat([h, torch.ones(2, 5, WIDTH).double()], 1) for h in hidden)
    wider = torch.cat([mask, torch.zeros(2, 5, dtype=torch.long)], 1)
    assert not torch.allclose(pooling(longer, wider, {}), pooling(hidden, mask, {}))


@pytest.mark.parametrize("settings", [{}, {"squeeze": "gap"}, {"mode": "last1d"}, {"squeeze": "none"}])
def test_without_gradients_it_is_the_same(settings: dict) -> None:
    pooling = s2(**settings)
    hidden, mask = states([7, 4])
    with torch.no_grad():
        without = pooling(hidden, mask, {})
    assert torch.equal(without, pooling(hidden, mask, {}))


def test_groups_that_do_not_exist_may_be_left_empty() -> None:
    u = torch.randn(1, 1, 9, WIDTH).double()
    f = FrequencySelection(select(1, 4, invalid="zero"), WIDTH, 1, "mean")(u, torch.ones(1, 9)).view(4, -1)
    assert f[:2].all()
    assert not f[2:].any()


def test_the_basis_stays_in_fp32_when_the_model_does_not() -> None:
    squeeze = FrequencySelection(select(3, 16), WIDTH, 3, "mean")
    u = torch.randn(3, 2, 9, WIDTH)
    before = squeeze(u, torch.ones(2, 9))
    assert torch.equal(squeeze.to(torch.bfloat16)(u, torch.ones(2, 9)), before)


# Spatial Selection


@pytest.mark.parametrize(
    ("n", "low", "high"),
    [(2, 0.269, 0.731), (3, 0.155, 0.576), (6, 0.0685, 0.352), (9, 0.044, 0.254), (12, 0.032, 0.198)],
)
def test_t07_weights_sum_to_one_within_the_sigmoids_bounds(n: int, low: float, high: float) -> None:
    hidden, mask = states([7, 4, 2])
    w = s2(n=n, scale=1e4).weights(hidden, mask, {}).detach()
    close(w.sum(0), torch.ones(3, WIDTH).double())
    e = math.e
    assert w.min() >= 1 / (1 + (n - 1) * e) - 1e-9
    assert w.max() <= e / (e + n - 1) + 1e-9
    # Gates this large are nearly 0 or 1, which gets close to the bounds.
    assert w.min() == pytest.approx(low, abs=0.02)
    assert w.max() == pytest.approx(high, abs=0.06)
    free = s2(n=n, scale=1e4, pre_softmax_sigmoid=False).weights(hidden, mask, {})
    assert free.max() > 0.99


def test_t08_one_block_with_softmax_is_plain_pooling_with_a_dead_gate() -> None:
    pooling = s2(n=1)
    hidden, mask = states([7, 4])
    z = pooling(hidden, mask, {})
    close(z[1], hidden[-1][1, :4].mean(0))
    z.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in pooling.parameters())
    close(s2(mode="last1d", gate1d="softmax")(hidden, mask, {}), z)


def fuse(pooling: S2Sent, hidden: tuple[Tensor, ...], mask: Tensor, marks: Any) -> Tensor:
    """The mixed tokens v, [B, L, D], by equation 4; padding has no meaning."""
    u = torch.stack(pooling.blocks(hidden, mask))
    if pooling.gate is None:
        return u.mean(0)
    w = pooling.weights(hidden, mask, marks)
    return ((w if pooling.select is None else w[:, :, None]) * u).sum(0)


def test_t09_equal_blocks_give_that_block_whatever_the_gate() -> None:
    hidden, mask = states([7, 4])
    same = tuple(hidden[-1] for _ in hidden)
    close(fuse(s2(n=6, scale=100), same, mask, {}) * mask[..., None], hidden[-1] * mask[..., None])


@pytest.mark.parametrize("pool", ["mean", "cls", "mask", "last"])
@pytest.mark.parametrize(
    "settings",
    [
        {"n": 6},
        {"n": 3, "block_offset": 1},
        {"mode": "avg1d"},
        {"mode": "last1d", "gate1d": "sigmoid"},
        {"squeeze": "gap"},
        {"squeeze": "none"},
        {"squeeze": "none", "no_fs": "fused"},
        {"squeeze": "none", "mode": "avg1d"},
        {"block_norm": "global_exp", "n": 2},
        {"mode": "none"},
    ],
)
def test_t10_pooling_then_mixing_is_mixing_then_pooling(pool: str, settings: dict) -> None:
    pooling = s2(pool=pool, **settings)
    hidden, mask = states([7, 4])
    marks = {"mask": 1}
    v = fuse(pooling, hidden, mask, marks)
    at = {"cls": [0, 0], "mask": [5, 2], "last": [6, 3]}
    if pool == "mean":
        expected = torch.stack([v[0].mean(0), v[1, :4].mean(0)])
    else:
        expected = torch.stack([v[i, t] for i, t in enumerate(at[pool])])
    close(pooling(hidden, mask, marks), expected)


def test_t11_w2_of_zero_is_the_average_of_the_blocks() -> None:
    hidden, mask = states([7, 4])
    pooling = build_pooling({"name": "s2sent", "init": "zero", "r": 4}, info())
    average = build_pooling({"name": "last_n"}, info())
    close(pooling(hidden, mask, {}), average(hidden, mask, {}))
    pooling(hidden, mask, {}).square().sum().backward()
    assert pooling.gate.excite.weight.grad.any()


def count(n: int, width: int = 768, **settings: Any) -> int:
    with torch.device("meta"):
        gate = Gate(width, n, width // settings.pop("r", 12), **settings)
    return sum(p.numel() for p in gate.parameters())


def test_t12_parameters_at_width_768_and_r_12() -> None:
    assert [count(n, bias=False) for n in (1, 3, 6)] == [98_304, 196_608, 344_064]
    pooling = build_pooling({"name": "s2sent", "bias": False}, info(width=768))
    assert sum(p.numel() for p in pooling.parameters()) == 196_608
    for mode in ("avg1d", "last1d"):
        pooling = build_pooling({"name": "s2sent", "bias": False, "mode": mode, "n": 6}, info(width=768))
        assert sum(p.numel() for p in pooling.parameters()) == 98_304


@pytest.mark.parametrize(
    ("r", "parameters"),
    [(4, 589_824), (8, 294_912), (12, 196_608), (16, 147_456), (24, 98_304), (32, 73_728)],
)
def test_t12_parameters_over_r(r: int, parameters: int) -> None:
    assert count(3, r=r, bias=False) == parameters


def test_t12_biases_and_batch_norm_add_theirs() -> None:
    assert count(3) == 196_608 + 64 + 3 * 768
    assert count(3, bn=True) == 196_608 + 64 + 3 * 768 + 2 * 3 * 768


def test_t16_the_mean_of_one_block_is_the_last_block() -> None:
    hidden, mask = states([7, 4])
    close(s2(mode="avg1d", n=1)(hidden, mask, {}), s2(mode="last1d", n=3)(hidden, mask, {}))
    close(s2(mode="auto", n=1)(hidden, mask, {}), s2(mode="last1d", n=1)(hidden, mask, {}))


@pytest.mark.parametrize(("offset", "layer"), [(0, 12), (1, 11)])
def test_t17_which_block_is_last(offset: int, layer: int) -> None:
    hidden, mask = states([7, 4])
    close(s2(n=1, block_offset=offset)(hidden, mask, {})[0], hidden[layer][0].mean(0))
    stack = s2(n=3, block_offset=offset).blocks(hidden, mask)
    for i, u in enumerate(stack):
        close(u[0], hidden[layer - 2 + i][0])


def test_t17_an_offset_takes_the_embedding_layer_for_twelve_blocks() -> None:
    hidden, mask = states([7])
    close(s2(n=12, block_offset=1).blocks(hidden, mask)[0], hidden[0])


def test_t19_one_common_divisor_does_not_change_cosines() -> None:
    hidden, mask = states([7, 4, 5])
    pooling = s2(block_norm="global_exp")
    z = pooling(hidden, mask, {})
    u = torch.stack(pooling.blocks(hidden, mask))
    e = pooling.gate(pooling.select(u, mask)).transpose(0, 1)
    plain = (e.exp() * pooling.read(u, mask, {})).sum(0)
    for i, j in itertools.combinations(range(3), 2):
        close(cosine_similarity(z[i], z[j], 0), cosine_similarity(plain[i], plain[j], 0))
    close(pooling.weights(hidden, mask, {}).sum(), torch.tensor(1.0).double())


def test_t20_frequency_selection_has_no_parameters_and_no_state() -> None:
    pooling = s2()
    assert not list(pooling.select.parameters())
    assert not pooling.select.state_dict()
    assert set(pooling.state_dict()) == {
        f"gate.{layer}.{kind}" for layer in ("squeeze", "excite") for kind in ("weight", "bias")
    }


def test_the_gate_is_its_definition() -> None:
    """e^(n) = sigmoid(tanh(f W1 + b1) W2^(n) + b2^(n)), for each block by itself."""
    gate = s2(n=3).gate
    f = torch.randn(2, WIDTH).double()
    s = torch.tanh(f @ gate.squeeze.weight.double().T + gate.squeeze.bias)
    for n in range(3):
        rows = slice(n * WIDTH, (n + 1) * WIDTH)
        e = torch.sigmoid(s @ gate.excite.weight[rows].double().T + gate.excite.bias[rows])
        close(gate(f)[:, n], e)
        each = gate.each(f.expand(3, 4, 2, WIDTH))
        close(each[n], e.expand(4, 2, WIDTH))
    close(block_weights(gate(f), 1), gate(f).exp() / gate(f).exp().sum(1, keepdim=True))


def test_batch_norm_is_the_released_codes() -> None:
    """On what the sigmoid takes, with eps 1e-6."""
    gate = s2(n=2, bn=True).gate
    norm = gate.norm
    for x in (norm.running_mean, norm.weight.data, norm.bias.data):
        x.normal_()
    norm.running_var.uniform_(0, 3e-6)
    f = torch.randn(3, WIDTH)
    plain = s2(n=2).gate
    plain.load_state_dict({k: v for k, v in gate.state_dict().items() if not k.startswith("norm")})
    x = plain.logits(f).flatten(1)
    x = (x - norm.running_mean) / (norm.running_var + 1e-6).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(gate.logits(f).flatten(1), x, rtol=1e-4, atol=1e-4)
    norm.reset_running_stats()
    gate.train().logits(f)
    torch.testing.assert_close(norm.running_mean, 0.1 * plain.logits(f).flatten(1).mean(0))


@pytest.mark.parametrize("no_fs", ["per_block", "fused"])
def test_without_frequency_selection_a_token_is_gated_by_itself(no_fs: str) -> None:
    """A block's gate sees that block, or the mean of all."""
    pooling = s2(squeeze="none", no_fs=no_fs)
    hidden, mask = states([7, 4])
    u = torch.stack(pooling.blocks(hidden, mask))
    seen = u if no_fs == "per_block" else u.mean(0).expand_as(u)
    e = torch.stack([pooling.gate(seen[n])[..., n, :] for n in range(3)])
    close(pooling.weights(hidden, mask, {}), e.exp() / e.exp().sum(0))
    default = s2(squeeze="none").weights(hidden, mask, {})
    assert torch.equal(default, pooling.weights(hidden, mask, {})) == (no_fs == "per_block")


@pytest.mark.parametrize(("kind", "factor"), [("exp", torch.exp), ("sigmoid", lambda e: e)])
def test_a_single_block_is_gated_by_feature(kind: str, factor: Any) -> None:
    pooling = s2(mode="last1d", gate1d=kind)
    hidden, mask = states([7])
    e = pooling.gate(pooling.select(hidden[-1][None], mask))[:, 0]
    close(pooling(hidden, mask, {}), factor(e) * hidden[-1].mean(1))


def test_batch_norm_counts_in_training_only() -> None:
    pooling = s2(bn=True)
    hidden, mask = states([7, 4, 5])
    alone = tuple(h[:1] for h in hidden), mask[:1]
    close(pooling(*alone, {}), pooling(hidden, mask, {})[:1])
    pooling.train()
    assert not torch.allclose(
        pooling(hidden, mask, {})[:2], pooling(tuple(h[:2] for h in hidden), mask[:2], {})
    )


# Options


def test_no_gradient_through_a_detached_gate() -> None:
    hidden, mask = states([7, 4])
    grads = {}
    for detach in (True, False):
        pooling = s2(detach_gate=detach)
        leaves = tuple(h.clone().requires_grad_() for h in hidden)
        pooling(leaves, mask, {}).sum().backward()
        grads[detach] = leaves[-1].grad
        assert pooling.gate.squeeze.weight.grad.any()
    w = s2().weights(hidden, mask, {})[-1]
    close(grads[True][0, 0], w[0] / 7)
    assert not torch.allclose(grads[False], grads[True])


def test_a_frozen_gate_is_random_and_passes_gradients_on() -> None:
    pooling = build_pooling({"name": "s2sent", "gate": "frozen", "r": 4}, info())
    hidden, mask = states([7, 4])
    leaves = tuple(h.requires_grad_() for h in hidden)
    pooling(leaves, mask, {}).sum().backward()
    assert leaves[-1].grad.any()
    assert not any(p.requires_grad for p in pooling.parameters())
    assert pooling.gate.excite.weight.std() == pytest.approx(0.02, rel=0.05)
    assert not pooling.gate.excite.bias.any()


def marks() -> RowMarks:
    found = RowMarks()
    found.frame = Frame(1, 1, 2, 3)
    return found


def test_special_tokens_may_be_left_out() -> None:
    hidden, mask = states([7, 4])
    inner = tuple(h[:1, 1:6] for h in hidden)
    out = s2(exclude_special=True)(hidden, mask, marks())
    close(out[:1], s2()(inner, torch.ones(1, 5), {}))
    nothing_else = torch.tensor([[1, 1, 0, 0, 0, 0, 0]])
    only = s2(exclude_special=True, n=1)(tuple(h[:1] for h in hidden), nothing_else, marks())
    close(only[0], hidden[-1][0, :2].mean(0))


def test_the_gate_may_see_the_sentence_of_a_template_alone() -> None:
    hidden, mask = states([9, 7])
    pooling = s2(fs_tokens="sentence")
    seen = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0]])
    u = torch.stack(pooling.blocks(hidden, mask))
    w = block_weights(pooling.gate(pooling.select(u, seen)), 1)
    close(pooling.weights(hidden, mask, marks()), w.transpose(0, 1))
    expected = (w.transpose(0, 1) * pooling.read(u, mask, {})).sum(0)
    close(pooling(hidden, mask, marks()), expected)


def test_training_shows_the_spread_of_the_weights() -> None:
    pooling = s2()
    hidden, mask = states([7, 4])
    pooling(hidden, mask, {})
    assert pooling.take_stats() == {}
    pooling.train()(hidden, mask, {})
    stats = pooling.take_stats()
    assert float(stats["s2sent/weight_mean"]) == pytest.approx(1 / 3)
    assert 0 < float(stats["s2sent/weight_std"]) < 0.2
    assert pooling.take_stats() == {}
    assert not any(value.requires_grad for value in stats.values())


def test_training_shows_how_many_gates_are_saturated() -> None:
    pooling = s2(scale=60).train()
    hidden, mask = states([7, 4])
    pooling(hidden, mask, {})
    stats = pooling.take_stats()
    e = pooling.gate(pooling.select(pooling.blocks(hidden, mask), mask))
    assert 0 < float(stats["s2sent/gate_saturated"]) < 1
    assert float(stats["s2sent/gate_saturated"]) == pytest.approx(
        float(((e - 0.5).abs() > 0.45).double().mean())
    )
    assert float(stats["s2sent/weight_std"]) == pytest.approx(float(e.detach().softmax(1).std()))
    plain = s2(pre_softmax_sigmoid=False).train()
    plain(hidden, mask, {})
    assert "s2sent/gate_saturated" not in plain.take_stats()


# What training relies on


def test_gate_and_softmax_are_fp32_under_autocast() -> None:
    pooling = s2()
    hidden, mask = states([7, 4])
    plain = tuple(h.float() for h in hidden)
    with torch.autocast("cpu", torch.bfloat16):
        under = pooling(plain, mask, {})
    assert torch.equal(under, pooling(plain, mask, {}))
    half = pooling(tuple(h.bfloat16() for h in plain), mask, {})
    assert half.dtype == torch.float32


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"squeeze": "none"},
        {"mode": "avg1d"},
        {"invalid": "grid6", "bn": True, "block_norm": "global_exp"},
    ],
)
def test_nothing_depends_on_values(settings: dict) -> None:
    """One graph without breaks: a compiler and a captured CUDA graph can take it as it is."""
    pooling = s2(exclude_special=True, **settings)
    hidden, mask = states([7, 4])
    compiled = torch.compile(pooling, backend="eager", fullgraph=True)
    close(compiled(hidden, mask, marks()), pooling(hidden, mask, marks()))
