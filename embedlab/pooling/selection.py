"""S2Sent's Spatial Selection: squeezed features to a gate for each block, and gates to block weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": relu}
_STD = 0.02


class Gate(nn.Module):
    """e^(n) = sigmoid(phi(f W_1 + b_1) W_2^(n) + b_2^(n)) for N blocks (equation 3), in fp32 or wider.

    Args:
        width: D.
        blocks: N; the W_2 of all blocks are the rows of one matrix, block 1 first.
        bottleneck: k.
        act: phi, ``tanh`` or ``relu``.
        bias: in both layers. D k (1 + N) parameters without, k + N D more with.
        bn: batch norm before the sigmoid, as in the released code; 2 N D parameters more.
        sigmoid: False leaves it out.
        init: ``normal`` (standard deviation 0.02, biases 0) or ``zero`` (W_2 = 0 too: all gates start equal).
    """

    def __init__(
        self,
        width: int,
        blocks: int,
        bottleneck: int,
        act: str = "tanh",
        bias: bool = True,
        bn: bool = False,
        sigmoid: bool = True,
        init: str = "normal",
    ) -> None:
        super().__init__()
        self.blocks, self.width = blocks, width
        self.act, self.sigmoid = ACTIVATIONS[act], sigmoid
        self.squeeze = nn.Linear(width, bottleneck, bias)
        self.excite = nn.Linear(bottleneck, blocks * width, bias)
        self.norm = nn.BatchNorm1d(blocks * width, eps=1e-6, momentum=0.1) if bn else None
        for layer in (self.squeeze, self.excite):
            nn.init.normal_(layer.weight, std=_STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        if init == "zero":
            nn.init.zeros_(self.excite.weight)

    def forward(self, f: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., N, D]``."""
        return self._gate(self.logits(f))

    def logits(self, f: Tensor) -> Tensor:
        """The same before the sigmoid."""
        out = _linear(self.act(_linear(f, self.squeeze)), self.excite)
        if self.norm is not None:
            out = self.norm(out.to(self.norm.weight.dtype)).to(out.dtype)
        return out.unflatten(-1, (self.blocks, self.width))

    def each(self, u: Tensor) -> Tensor:
        """``[N, ..., D]`` to the same shape: the gate of block n, seen from the features of block n alone."""
        hidden = self.act(_linear(u, self.squeeze))
        weight = self.excite.weight.to(hidden.dtype).view(self.blocks, self.width, -1)
        out = torch.einsum("n...k,ndk->n...d", hidden, weight)
        if self.excite.bias is not None:
            bias = self.excite.bias.to(hidden.dtype).view(self.blocks, self.width)
            out = out + bias.view(self.blocks, *(1,) * (u.dim() - 2), self.width)
        return self._gate(out)

    def _gate(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) if self.sigmoid else x


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer in the dtype of ``x``, whatever its weights are kept in."""
    return linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def block_weights(e: Tensor, dim: int, norm: str = "softmax", counted: Tensor | None = None) -> Tensor:
    """w from gates e with the blocks along ``dim`` (equation 4), of the same shape.

    Args:
        norm: ``softmax`` over the blocks; ``global_exp`` divides exp(e) by one number, its sum over blocks,
            features, tokens and the whole batch, as the released code does: the cosine of two vectors is that
            of the sums over n of exp(e) u, their length shrinks with the batch. For a single block, where the
            soft-max is the constant 1 (a null control): ``exp``, its numerator, which is what the released
            code comes to, or ``sigmoid``, the gate of squeeze-and-excitation.
        counted: 1 at the entries that the sum of ``global_exp`` counts (real tokens); all when None.
    """
    if norm == "softmax":
        return torch.softmax(e, dim)
    if norm == "sigmoid":
        return e
    w = torch.exp(e)
    if norm == "exp":
        return w
    return w / (w if counted is None else w * counted).sum()
