"""Attention within rows of more than 128 tokens, on a card or interpreted: its reference, and its own differences."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from embedlab.kernels.varlen_attention import heads_first, varlen_attention, varlen_attention_backward
from tests.interpreted import DEVICE, INTERPRETED, NEEDS

pytestmark = NEEDS
SHAPES: list[Any] = [(128, (100, 0, 1, 64), 2, 16)]  # which other kernels have in one tile
if not INTERPRETED:
    SHAPES += [(256, (140, 0, 1, 64, 65), 2, 16), (512, (512, 3, 300, 129, 128), 12, 64)]


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    bounds: Tensor
    seed: Tensor
    longest: int


def inputs(longest: int, lengths: tuple[int, ...], heads: int, width: int) -> Inputs:
    """Query, key and value are parts of one tensor, and there are unused slots."""
    draw = torch.Generator().manual_seed(0)
    slots = sum(lengths) + 70
    joint = torch.randn(slots, 3, heads, width, generator=draw)
    q, k, v = (joint[:, i].transpose(0, 1)[None] for i in range(3))
    grad = heads_first(q).copy_(torch.randn(q.shape, generator=draw))
    bounds = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    return Inputs(q, k, v, grad, bounds, torch.tensor([3]), longest)


def run(x: Inputs, dropout: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output, gradients and their sums by the kernels, into memory of nonsense; on the host, in fp32."""
    from embedlab.kernels import varlen_long_triton as kernels

    q, k, v, grad = (t.to(DEVICE, dtype) for t in (x.q, x.k, x.v, x.grad))
    bounds, seed = x.bounds.to(DEVICE), x.seed.to(DEVICE)
    out, *grads = (heads_first(q).fill_(float("nan")) for _ in range(4))
    sums = torch.full((len(bounds) - 1, 3, *q[0, :, 0].shape), float("nan"), device=DEVICE)
    numbers: Any = (x.longest, 0.2, dropout)
    kernels.launch_forward(q, k, v, bounds, seed, out, *numbers)
    kernels.launch_backward(q, k, v, bounds, seed, grad, *grads, *numbers, sums)
    return out.float().cpu(), [g.float().cpu() for g in grads], sums.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_are_the_reference(shape: Any, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes in numpy, which has no bf16")
    x = inputs(*shape)
    if dtype == torch.bfloat16:
        x = x._replace(**{n: getattr(x, n).to(dtype).float() for n in ("q", "k", "v", "grad")})
    numbers = (x.longest, 0.2, 0.0)
    want = varlen_attention(x.q, x.k, x.v, x.bounds, x.seed, *numbers)
    wanted = varlen_attention_backward(x.grad, x.q, x.k, x.v, x.bounds, x.seed, *numbers)
    out, grads, sums = run(x, 0.0, dtype)
    near = {"rtol": 1e-4, "atol": 3e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(out, want, **near)
    for i, (got, its) in enumerate(zip(grads, wanted, strict=True)):
        torch.testing.assert_close(got, its, **near)
        torch.testing.assert_close(sums.sum(0)[i], got[0].sum(1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_has_the_gradients_of_finite_differences(shape: Any) -> None:
    x = inputs(*shape)
    plain, _, _ = run(x, 0.0)
    out, grads, _ = run(x, 0.3)
    again, _, _ = run(x, 0.3)
    other, _, _ = run(x._replace(seed=x.seed + 1), 0.3)
    assert torch.equal(out, again)
    assert not torch.allclose(out, plain)
    assert not torch.allclose(out, other)
    # Its mean is that of no dropout.
    slots = int(x.bounds[-1])
    apart = (out - plain)[:, :, :slots]
    assert abs(float(apart.mean())) < 5 * float(apart.std()) / apart.numel() ** 0.5
    # Linear in the values; along a direction of queries and keys.
    assert float((grads[2] * x.v).sum()) == pytest.approx(float((out * x.grad).sum()), rel=1e-3, abs=1e-2)
    draw = torch.Generator().manual_seed(1)
    for name, gradient in zip(("q", "k"), grads, strict=False):
        way = torch.randn(x.q.shape, generator=draw)
        moved = [
            float(
                (run(x._replace(**{name: getattr(x, name) + s * 1e-2 * way}), 0.3)[0].double() * x.grad).sum()
            )
            for s in (1, -1)
        ]
        assert float((gradient * way).sum()) == pytest.approx(
            (moved[0] - moved[1]) / 2e-2, rel=2e-2, abs=0.05
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_share_of_the_weights_is_dropped_in_every_tile(shape: Any) -> None:
    """With equal weights and values that tell keys apart, each weight is kept or not."""
    x = inputs(*shape)
    width = x.q.shape[-1]
    length = int(x.bounds[1])
    for tile in range(0, length - width + 1, 64):
        v = torch.zeros_like(x.v)
        v[0, :, tile : tile + width] = torch.eye(width)
        out = run(x._replace(q=torch.zeros_like(x.q), v=v), 0.25)[0][0, :, :length] * length
        kept = out.round(decimals=3).unique()
        assert kept.tolist() == pytest.approx([0.0, 4 / 3], abs=2e-3)
        share = float((out > 0.5).double().mean())
        assert share == pytest.approx(0.75, abs=5 * (0.1875 / out.numel()) ** 0.5)
