"""What stands between the matrix products of a transformer block, with gradients written out.

On CUDA each is a Triton kernel (`embedlab.kernels.block_triton`). Off it, the lines here define what the kernels
compute, up to the draws of dropout; they are what the kernels are tested against.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu as torch_gelu


def _kernels() -> Any:
    """Their module, where Triton is installed."""
    from embedlab.kernels import block_triton

    return block_triton


class Normed(NamedTuple):
    """A layer norm's output [C, D], and for its gradient its input [C, D], means and inverse deviations [2, C]."""

    y: Tensor
    z: Tensor
    stats: Tensor


class Sums:
    """Gradients that are sums over rows, of up to four kinds, in one buffer and one last pass.

    Args:
        sections: of each kind, partial rows and columns.
        like: a tensor on the device, of the type that the sums are wanted in.
    """

    def __init__(self, sections: list[tuple[int, int]], like: Tensor) -> None:
        self._sections = sections
        self._like = like
        self._buffer = torch.empty(sum(r * w for r, w in sections), dtype=torch.float32, device=like.device)
        self.parts = list(self._buffer.split([r * w for r, w in sections]))
        """Where each kind's partial rows go, flat fp32."""

    def total(self) -> list[Tensor]:
        """The sums, flat, one tensor a kind."""
        widths = [w for _, w in self._sections]
        if not self._buffer.is_cuda:
            sums = [p.view(r, w).sum(0) for p, (r, w) in zip(self.parts, self._sections, strict=True)]
            return [x.to(self._like.dtype) for x in sums]
        out = torch.empty(sum(widths), dtype=self._like.dtype, device=self._like.device)
        _kernels().launch_column_sums(self._buffer, self._sections, out)
        return list(out.split(widths))


def norm_rows(x: Tensor) -> int:
    """Partial rows of `norm_backward`'s sums."""
    return _kernels().norm_programs(len(x)) if x.is_cuda else 1


def gelu_rows(u: Tensor) -> int:
    """Partial rows of `gelu_backward`'s sums."""
    return _kernels().gelu_groups(*u.shape) if u.is_cuda else 1


def add_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, seed: Tensor, dropout: float, eps: float,
    overwrite: bool = False,
) -> Normed:  # fmt: skip
    """Layer norm of ``dropout(x) + residual``.

    Args:
        x, residual: [C, D].
        gamma, beta: [D].
        seed: int64, one number on the device.
        dropout: share of `x` dropped.
        eps: of the norm.
        overwrite: write the output over `x` and keep no input, for passes without a gradient.
    """
    z, y = (x, x) if overwrite else (torch.empty_like(residual), torch.empty_like(residual))
    stats = torch.empty(2, len(z), dtype=torch.float32, device=z.device)
    if x.is_cuda:
        _kernels().launch_add_norm(x, residual, gamma, beta, seed, z, y, stats, dropout, eps)
    else:
        z.copy_(x.float() * kept(x.shape, seed, dropout) + residual.float())
        y.copy_(_normalised(z, stats, eps) * gamma.float() + beta.float())
    return Normed(y, z, stats)


def embed_norm(
    ids: Tensor, positions: Tensor, words: Tensor, places: Tensor, kind: Tensor | None, gamma: Tensor,
    beta: Tensor, seed: Tensor, dropout: float, eps: float,
) -> Normed:  # fmt: skip
    """Dropout of the layer norm of ``words[ids] + places[positions] + kind``.

    Args:
        ids, positions: int64 [C].
        words: [V, D]; ``places`` [P, D].
        kind: [D], or None.
        gamma, beta: [D].
        seed: int64, one number on the device.
        dropout: share of the result dropped.
        eps: of the norm.
    """
    z = words.new_empty(len(ids), words.shape[1])
    y, stats = torch.empty_like(z), torch.empty(2, len(z), dtype=torch.float32, device=z.device)
    if ids.is_cuda:
        _kernels().launch_embed(
            ids, positions, words, places, kind, gamma, beta, seed, z, y, stats, dropout, eps
        )
    else:
        z.copy_(words[ids].float() + places[positions].float() + (0.0 if kind is None else kind.float()))
        normed = _normalised(z, stats, eps) * gamma.float() + beta.float()
        y.copy_(normed * kept(z.shape, seed, dropout))
    return Normed(y, z, stats)


def norm_backward(
    grad: Tensor, z: Tensor, stats: Tensor, gamma: Tensor, seed: Tensor, sums: Tensor, dropout: float,
    after: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of a norm's input [C, D], and of what was dropped out before it was added [C, D].

    Args:
        grad: [C, D], of the output.
        z, stats: of `Normed`.
        gamma: [D].
        seed, dropout: of the forward.
        sums: flat, `norm_rows` times 3 D: gets partial sums of the gradients of gamma and beta, and over the
            second gradient here.
        after: dropout stands after the norm, and both gradients here are that of the norm's input.
    """
    dz = torch.empty_like(z)
    dx = torch.empty_like(z) if dropout > 0 and not after else dz
    if grad.is_cuda:
        _kernels().launch_norm_backward(grad, z, stats, gamma, seed, dz, dx, sums, dropout, after)
        return dz, dx
    mask = kept(z.shape, seed, dropout)
    above = grad.float() * mask if after else grad.float()
    normed = (z.float() - stats[0][:, None]) * stats[1][:, None]
    inner = above * gamma.float()
    along = (inner * normed).mean(-1, keepdim=True)
    full = stats[1][:, None] * (inner - inner.mean(-1, keepdim=True) - normed * along)
    dropped = full if after else full * mask
    dz.copy_(full)
    dx.copy_(dropped)
    sums.view(3, -1).copy_(torch.stack([(above * normed).sum(0), above.sum(0), dropped.sum(0)]))
    return dz, dx


def gelu(u: Tensor, overwrite: bool = False) -> Tensor:
    """``u Phi(u)`` of [C, F], with the exact normal distribution function; over `u` where told to."""
    if not u.is_cuda:
        return torch_gelu(u)
    out = u if overwrite else torch.empty_like(u)
    _kernels().launch_gelu(u, out)
    return out


def gelu_backward(grad: Tensor, u: Tensor, sums: Tensor) -> Tensor:
    """Gradient of `gelu` [C, F], written over `grad`; ``sums`` (flat, `gelu_rows` times F) gets its partial sums."""
    if grad.is_cuda:
        _kernels().launch_gelu_backward(grad, u, grad, sums)
        return grad
    slope = (
        0.5 * (1 + torch.erf(u.float() * 0.5**0.5))
        + u.float() * torch.exp(-0.5 * u.float() ** 2) * (2 * torch.pi) ** -0.5
    )
    full = grad.float() * slope
    sums.copy_(full.sum(0))
    return grad.copy_(full)


def kept(shape: torch.Size, seed: Tensor, dropout: float) -> Tensor | float:
    """1 / (1 - p) where an element is kept, else 0; off CUDA."""
    if dropout == 0:
        return 1.0
    generator = torch.Generator().manual_seed(int(seed))
    return (torch.rand(shape, generator=generator) >= dropout) / (1 - dropout)


def _normalised(z: Tensor, stats: Tensor, eps: float) -> Tensor:
    """fp32, without weights; fills `stats`."""
    z = z.float()
    stats[0] = z.mean(-1)
    stats[1] = (z.var(-1, unbiased=False) + eps).rsqrt()
    return (z - stats[0][:, None]) * stats[1][:, None]
