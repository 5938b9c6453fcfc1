"""Frequency Selection: a stack of blocks to one number a feature (S2Sent, equations 8 to 10)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embedlab.pooling.dct import adaptive_bins, block_basis, token_basis
from embedlab.pooling.frequencies import GRID, Pair


def as_float(bits: Tensor) -> Tensor:
    """A basis of `FrequencySelection`; where an exporter cannot reinterpret bits, it is in float already."""
    return bits if bits.is_floating_point() else bits.view(torch.float32)


class FrequencySelection(nn.Module):
    """f_d = G sum over n, l of gamma_a(n) beta_b(l) U_{n,l,d}; each group of features has its own (a, b).

    No parameters, and nothing in the state dict.

    Args:
        pairs: (a, b) of each group, block axis and token axis.
        width: D, a multiple of ``len(pairs)``.
        blocks: N.
        norm: of the basis, see `embedlab.pooling.dct`.
        gain: G.
        grid: average the N x L map to 6 x 6 first, **padding included**, as the released code does.
    """

    mix: Tensor
    tokens: Tensor
    frequency: Tensor
    gamma: Tensor

    def __init__(
        self, pairs: Sequence[Pair], width: int, blocks: int, norm: str, gain: float = 1.0, grid: bool = False
    ) -> None:
        super().__init__()
        self.norm, self.grid = norm, grid
        gamma = block_basis([a for a, _ in pairs], GRID if grid else blocks, norm)
        if grid:
            gamma = gamma @ adaptive_bins(GRID, blocks)
        distinct = sorted({b for _, b in pairs})
        # One token basis for each frequency that occurs; `mix` puts the groups together from them.
        mix = torch.zeros(blocks, len(distinct), len(pairs), width // len(pairs))
        for group, (_, b) in enumerate(pairs):
            mix[:, distinct.index(b), group] = gain * gamma[group, :, None]
        # As bits, which `module.to(torch.bfloat16)` leaves alone: the basis stays in fp32.
        self.register_buffer("mix", mix.flatten(2).view(torch.int32), persistent=False)
        self.register_buffer("tokens", torch.tensor(distinct), persistent=False)
        # The same by feature, for the kernel: its token frequency, and the weight of each block.
        by_feature = torch.tensor([b for _, b in pairs]).repeat_interleave(width // len(pairs))
        self.register_buffer("frequency", by_feature, persistent=False)
        self.register_buffer("gamma", mix.sum(1).flatten(1).view(torch.int32), persistent=False)

    def forward(self, blocks: Sequence[Tensor] | Tensor, mask: Tensor) -> Tensor:
        """N blocks [B, L, D] and ``mask`` [B, L] (1 at the tokens that are counted) to f [B, D]."""
        return self.with_means(blocks, mask)[0]

    def with_means(self, blocks: Sequence[Tensor] | Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """f, and the mean [N, B, D] of each block over the tokens counted, where frequency 0 is that."""
        dtype = blocks[0].dtype
        tokens = self.tokens.to(dtype)
        if self.grid:
            on_grid = token_basis(tokens, torch.ones(1, GRID, device=tokens.device), self.norm)
            beta = on_grid @ adaptive_bins(GRID, blocks[0].shape[1], tokens.device).to(dtype)
        else:
            beta = token_basis(tokens, mask, self.norm)
        squeezed = torch.stack([beta @ u for u in blocks])
        f = (squeezed * as_float(self.mix).to(dtype)[:, None]).sum((0, 2))
        return f, squeezed[:, :, 0] if self.norm == "mean" and not self.grid else None
