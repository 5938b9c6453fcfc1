"""The Triton kernels between a block's products: what the lines of `block_ops` say, on a card or interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embedlab.kernels import block_ops
from tests.interpreted import DEVICE, INTERPRETED, NEEDS

pytestmark = NEEDS
SHAPES = [(37, 48), (64, 256), (5, 768), (300, 1024)]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    loose = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(got.float().cpu(), want.float(), rtol=loose, atol=loose)


def here(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_norm_and_its_gradients(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from embedlab.kernels import block_triton as kernels

    count, width = shape
    x, r, up = (draw(count, width, dtype=dtype) for _ in range(3))
    gamma, beta = (draw(width, dtype=dtype) for _ in range(2))
    seed = torch.tensor(11)
    want = block_ops.add_norm(x, r, gamma, beta, seed, 0.0, 1e-5)
    z, y, stats = torch.empty_like(x), torch.empty_like(x), torch.empty(2, count)
    args = here(x, r, gamma, beta, seed)
    z, y, stats = here(z, y, stats)
    kernels.launch_add_norm(*args, z, y, stats, 0.0, 1e-5)
    close(y, want.y, dtype)
    close(z, want.z, dtype)
    if dtype == torch.float32 or not INTERPRETED:  # the interpreter cuts bf16 off instead of rounding it
        torch.testing.assert_close(stats.cpu(), want.stats, rtol=1e-4, atol=1e-5)
    for after in (False, True):
        sums = torch.empty(3 * width)
        dz_want, _ = block_ops.norm_backward(up, want.z, want.stats, gamma, seed, sums, 0.0, after)
        (dz, partial, gz, gstats, gup) = here(
            torch.empty_like(x), torch.empty(kernels.norm_programs(count) * 3 * width), want.z, want.stats, up
        )
        kernels.launch_norm_backward(gup, gz, gstats, args[2], args[4], dz, dz, partial, 0.0, after)
        close(dz, dz_want, dtype)
        torch.testing.assert_close(
            partial.view(-1, 3 * width).sum(0).cpu(), sums, rtol=1e-4, atol=1e-3 * count**0.5
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_dropped_forward_is_dropped_backward(shape: tuple[int, int]) -> None:
    from embedlab.kernels import block_triton as kernels

    count, width = shape
    p = 0.3
    x, r, up = torch.ones(count, width), torch.zeros(count, width), draw(count, width)
    gamma, beta, seed = torch.ones(width), torch.zeros(width), torch.tensor(7)
    x, r, up, gamma, beta, seed = here(x, r, up, gamma, beta, seed)
    z, y, stats = torch.empty_like(x), torch.empty_like(x), torch.empty(2, count, device=DEVICE)
    kernels.launch_add_norm(x, r, gamma, beta, seed, z, y, stats, p, 1e-5)
    share = float((z == 0).float().mean())
    assert share == pytest.approx(p, abs=4 * (p * (1 - p) / z.numel()) ** 0.5)
    assert z[z != 0].unique().cpu() == pytest.approx([1 / (1 - p)])
    columns = (z == 0).float().mean(0).cpu()  # no column always, none never
    assert count < 30 or (columns.min() > 0 and columns.max() < 1)
    dz, dx = torch.empty_like(x), torch.empty_like(x)
    sums = torch.empty(kernels.norm_programs(count) * 3 * width, device=DEVICE)
    kernels.launch_norm_backward(up, z, stats, gamma, seed, dz, dx, sums, p, False)
    torch.testing.assert_close(dx, dz * z, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.view(-1, 3, width).sum(0)[2], dx.sum(0), rtol=1e-4, atol=1e-4)
    again = torch.empty_like(z)
    kernels.launch_add_norm(x, r, gamma, beta, seed + 1, again, y, stats, p, 1e-5)
    assert not torch.equal(again, z)


@pytest.mark.parametrize("dtype", TYPES)
def test_embeddings(dtype: torch.dtype) -> None:
    from embedlab.kernels import block_triton as kernels

    count, width = 50, 80
    words, places = draw(99, width, dtype=dtype), draw(12, width, dtype=dtype)
    gamma, beta, kind = (draw(width, dtype=dtype) for _ in range(3))
    ids, positions, seed = torch.randint(99, (count,)), torch.randint(12, (count,)), torch.tensor(3)
    for typed in (kind, None):
        want = block_ops.embed_norm(ids, positions, words, places, typed, gamma, beta, seed, 0.0, 1e-5)
        gids, gpositions, gwords, gplaces, ggamma, gbeta, gseed = here(
            ids, positions, words, places, gamma, beta, seed
        )
        z, y, stats = here(torch.empty_like(want.z), torch.empty_like(want.z), torch.empty(2, count))
        gkind = None if typed is None else typed.to(DEVICE)
        kernels.launch_embed(
            gids, gpositions, gwords, gplaces, gkind, ggamma, gbeta, gseed, z, y, stats, 0.0, 1e-5
        )
        close(y, want.y, dtype)
        close(z, want.z, dtype)
    dropped, up = torch.empty_like(y), torch.ones_like(y)
    kernels.launch_embed(
        gids, gpositions, gwords, gplaces, None, ggamma, gbeta, gseed, z, dropped, stats, 0.25, 1e-5
    )
    close(dropped, torch.where(dropped == 0, 0.0, y.float() / 0.75).cpu(), dtype)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    # The gradient of beta is that of what was kept.
    sums = torch.empty(kernels.norm_programs(count) * 3 * width, device=DEVICE)
    dz = torch.empty_like(y)
    kernels.launch_norm_backward(up, z, stats, ggamma, gseed, dz, dz, sums, 0.25, True)
    close(sums.view(-1, 3, width).sum(0)[1], ((dropped != 0).float() / 0.75).sum(0).cpu(), torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(37, 48), (129, 512), (3, 3072)])
def test_gelu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from embedlab.kernels import block_triton as kernels

    u, up = draw(*shape, dtype=dtype, scale=3.0), draw(*shape, dtype=dtype)
    gu, gup = here(u, up)
    out = torch.empty_like(gu)
    kernels.launch_gelu(gu, out)
    close(out, block_ops.gelu(u), dtype)
    sums = torch.empty(shape[1])
    want = block_ops.gelu_backward(up.clone(), u, sums)
    partial = torch.empty(kernels.gelu_groups(*shape) * shape[1], device=DEVICE)
    kernels.launch_gelu_backward(gup, gu, gup, partial)
    close(gup, want, dtype)
    torch.testing.assert_close(
        partial.view(-1, shape[1]).sum(0).cpu(), sums, rtol=1e-4, atol=1e-3 * shape[0] ** 0.5
    )


def test_column_sums() -> None:
    from embedlab.kernels import block_triton as kernels

    sections = [(3, 96), (200, 40), (1, 33), (130, 7)]
    parts = [draw(r, w) for r, w in sections]
    for n in (1, 2, 4):
        out = torch.empty(sum(w for _, w in sections[:n]), device=DEVICE)
        flat = torch.cat([p.flatten() for p in parts[:n]]).to(DEVICE)
        kernels.launch_column_sums(flat, sections[:n], out)
        torch.testing.assert_close(out.cpu(), torch.cat([p.sum(0) for p in parts[:n]]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("longest", [8, 32])
def test_sums_of_the_attentions_gradients(longest: int) -> None:
    from embedlab.kernels.varlen_attention import _backward
    from embedlab.kernels.varlen_triton import launch_backward

    lengths, slots, heads, width = [longest, 1, 0, 5], longest + 9, 2, 16
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v, up = (draw(1, heads, slots, width) for _ in range(4))
    seed = torch.tensor([1])
    want = [torch.empty_like(q) for _ in range(3)]
    sums = torch.empty(len(lengths), 3, heads, width)
    _backward(q, k, v, bounds, seed, up, *want, longest, 0.25, 0.0, sums)
    args = here(q, k, v, bounds, seed, up)
    got = [torch.empty_like(args[0]) for _ in range(3)]
    its = torch.full_like(sums, 9.0).to(DEVICE)
    launch_backward(*args, *got, longest, 0.25, 0.0, its)
    torch.testing.assert_close(its.cpu(), sums, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_attention_drops_the_same_weights_forward_and_backward() -> None:
    """The output is linear in the values, so that with one mask <up, out> = <dv, v>, whatever was dropped."""
    from embedlab.kernels.varlen_triton import launch_backward, launch_forward

    lengths, heads, width, p = [16, 9, 13], 2, 16, 0.4
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    slots = int(bounds[-1])
    q, k, v, up = (draw(1, heads, slots, width) for _ in range(4))
    q.zero_()  # all weights of a row of n tokens are 1 / n
    args = here(q, k, v, bounds, torch.tensor([5]))
    out, ones = torch.empty_like(args[0]), torch.empty_like(args[0])
    launch_forward(*args, out, 16, 0.25, p)
    got = [torch.empty_like(args[0]) for _ in range(3)]
    launch_backward(*args, up.to(DEVICE), *got, 16, 0.25, p)
    assert float((got[2].cpu() * v).sum()) == pytest.approx(float((out.cpu() * up).sum()), rel=1e-4)
    # With values of 1 the output is the sum of a row's weights that are left.
    args[2] = torch.ones_like(args[2])
    launch_forward(*args, ones, 16, 0.25, p)
    left = ones.cpu()[0, :, :, 0]
    assert float(left.mean()) == pytest.approx(1.0, abs=0.12)
    assert float(left.std()) > 0.05
