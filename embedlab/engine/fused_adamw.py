"""AdamW of a captured step in one pass: gradients are read as backward left them, bf16 twins written with the weights.

torch's fused AdamW wants gradients in the weights' type. With twins that is a pass to copy them over and another to
bring the new weights back, as many bytes again as the update itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embedlab.kernels.available import has_triton, kernel_options

_ALIGNED = 16
"""Bytes that the kernel loads at once."""
_ROWS = 256


def usable(parameters: list[nn.Parameter]) -> bool:
    """Whether the kernel can update these: Triton, CUDA, contiguous fp32 weights (`KernelOptions.fused_update`)."""
    return (
        kernel_options().fused_update
        and has_triton()
        and all(
            p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() and p.data_ptr() % _ALIGNED == 0
            for p in parameters
        )
    )


class Ready(NamedTuple):
    """Gradients as the kernels read them, one for each parameter: their addresses [n], and what must live till then."""

    addresses: Tensor
    kept: list[Tensor | None]


@dataclass
class _Part:
    """Pieces of the tensors whose gradients have one type; int32 [programs] each."""

    dtype: torch.dtype
    tensors: Tensor
    pieces: Tensor


class FusedUpdate:
    """The update of all of an optimiser's parameters.

    Args:
        optimizer: plain AdamW; every parameter has its state, and every group's ``lr`` is a tensor.
        steps: fp32 [n], counts of updates of the parameters in the order of the groups; ``state["step"]`` are
            views of it.
        twin: of a parameter, in the type that it computes in; None: it has none.
        fp32_gradients: those of all are fp32 (accumulated), else those of twins are in their type.
    """

    def __init__(
        self,
        optimizer: torch.optim.AdamW,
        steps: Tensor,
        twin: Callable[[nn.Parameter], Tensor | None],
        fp32_gradients: bool,
    ) -> None:
        from embedlab.kernels.adamw import BLOCK

        self.groups = optimizer.param_groups
        self.parameters = [p for group in self.groups for p in group["params"]]
        self.steps = steps
        device = steps.device
        twins = [twin(p) for p in self.parameters]
        self._twin_dtype = next((t.dtype for t in twins if t is not None), torch.bfloat16)
        self._dtypes = [torch.float32 if t is None or fp32_gradients else t.dtype for t in twins]
        # Addresses are all that the kernel knows: the tensors must stay.
        self._kept: list[Any] = [twins]
        addresses = []
        for p, t in zip(self.parameters, twins, strict=True):
            state = optimizer.state[p]
            tensors = (p, state["exp_avg"], state["exp_avg_sq"], *(() if t is None else (t,)))
            if any(not x.is_contiguous() or x.data_ptr() % _ALIGNED for x in tensors):
                raise ValueError("the kernel needs contiguous weights, moments and twins")
            self._kept.append(tensors)
            addresses.append([x.data_ptr() for x in tensors] + ([] if t is not None else [0]))
        self._tensors = torch.tensor(addresses, device=device)
        self._sizes = torch.tensor([p.numel() for p in self.parameters], device=device)
        self._parts = [self._part(dtype, BLOCK) for dtype in dict.fromkeys(self._dtypes)]
        self._group = torch.tensor([i for i, g in enumerate(self.groups) for _ in g["params"]], device=device)
        constants = [_constants(g) for g in self.groups for _ in g["params"]]
        self._rates = torch.tensor([[0.0, 0.0, 0.0, *row[:5]] for row in constants], device=device)
        logarithms = [[math.log(b) if b > 0 else -math.inf for b in (r[0], r[2])] + [r[5]] for r in constants]
        self._logarithms = torch.tensor(logarithms, dtype=torch.float64, device=device)
        self._addresses = _Addresses(len(self.parameters), device)
        if device.type == "cuda":  # compiles the kernels: that cannot be done while a graph is captured
            nothing = Ready(self._addresses.nothing, [])
            self.norm(nothing)
            self(nothing, torch.ones((), device=device), torch.zeros((), device=device))

    def _part(self, dtype: torch.dtype, size: int) -> _Part:
        """The pieces of `size` elements of the tensors whose gradients have this type."""
        chosen = zip(self.parameters, self._dtypes, strict=True)
        counts = torch.tensor([-(-p.numel() // size) if d == dtype else 0 for p, d in chosen])
        tensors = torch.repeat_interleave(torch.arange(len(counts)), counts)
        pieces = torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]
        return _Part(dtype, *(x.int().to(self.steps.device) for x in (tensors, pieces)))

    @torch.no_grad()
    def take(self, grads: list[Tensor | None]) -> Ready:
        """Gradients of ``parameters`` in their order; None leaves one as it is."""
        kept = [
            None if g is None else _plain(g, p, dtype)
            for g, p, dtype in zip(grads, self.parameters, self._dtypes, strict=True)
        ]
        return Ready(self._addresses.take([0 if g is None else g.data_ptr() for g in kept]), kept)

    def norm(self, ready: Ready) -> Tensor:
        """L2 norm of all gradients together, an fp32 scalar; sums that repeat."""
        from embedlab.kernels.adamw import BLOCK, RUN, TYPES, WARPS, squares

        counts = [-(-len(p.tensors) // RUN) for p in self._parts]
        sums = torch.empty(sum(counts), device=self.steps.device)
        for part, count, out in zip(self._parts, counts, sums.split(counts), strict=True):
            squares[(count,)](
                ready.addresses, self._sizes, part.tensors, part.pieces, out, len(part.tensors),
                GRAD=TYPES[part.dtype], SIZE=BLOCK, RUN=RUN, num_warps=WARPS,
            )  # fmt: skip
        return sums.sum().sqrt()

    def fill(self) -> None:
        """Tell the graphs captured since the last call where their gradients are; before they are replayed."""
        self._addresses.fill()

    @torch.no_grad()
    def __call__(self, ready: Ready, scale: Tensor, found_inf: Tensor) -> None:
        """Update weights, moments, steps and twins.

        Args:
            ready: of `take`.
            scale: scalar that divides the gradients.
            found_inf: fp32 scalar; 1 leaves everything as it is.
        """
        from embedlab.kernels.adamw import BLOCK, TYPES, WARPS, rates, update

        n, size = len(self.parameters), 128
        rates[(-(-n // size),)](
            self.steps, ready.addresses, torch.stack([g["lr"] for g in self.groups]), self._group, self._logarithms,
            found_inf, self._rates, n, SIZE=size,
        )  # fmt: skip
        for part in self._parts:
            update[(len(part.tensors),)](
                self._tensors, ready.addresses, self._sizes, self._rates, part.tensors, part.pieces, scale,
                found_inf, GRAD=TYPES[part.dtype], TWIN=TYPES[self._twin_dtype], SIZE=BLOCK, num_warps=WARPS,
            )  # fmt: skip


def total_norm(grads: list[Tensor]) -> Tensor:
    """L2 norm of all gradients together, fp32, whatever types they have; summed in fp32 (fp64 where they are)."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for g in grads:
        by_type.setdefault(g.dtype, []).append(g)
    norms = [
        norm.float()
        for dtype, some in by_type.items()
        for norm in torch._foreach_norm(some, 2.0, dtype=torch.promote_types(dtype, torch.float32))
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


class _Addresses:
    """Rows of the gradients' addresses, int64 [n], one for each captured graph.

    Each capture puts its gradients elsewhere, and while it goes on nothing can be brought to the device: rows are
    made beforehand and filled before the first replay.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        self._n, self._device = n, device
        self._free: list[Tensor] = []
        self._waiting: list[tuple[Tensor, list[int]]] = []
        self._blocks: list[Tensor] = []  # graphs read them as long as they live
        self._more()
        self.nothing = self._free.pop()

    def _more(self) -> None:
        # A row begins at a multiple of 16 bytes, or the kernel would be compiled anew for it.
        width = -(-self._n // 2) * 2
        block = torch.zeros(_ROWS, width, dtype=torch.int64, device=self._device)
        self._blocks.append(block)
        self._free += [row[: self._n] for row in block.unbind(0)]

    def take(self, addresses: list[int]) -> Tensor:
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return torch.tensor(addresses, device=self._device)
        return self._reserve(addresses)

    def _reserve(self, addresses: list[int]) -> Tensor:
        row = self._free.pop()
        self._waiting.append((row, addresses))
        return row

    def fill(self) -> None:
        for row, addresses in self._waiting:
            row.copy_(torch.tensor(addresses))
        self._waiting.clear()
        if len(self._free) < _ROWS // 2:
            self._more()


def _constants(group: dict[str, Any]) -> list[float]:
    (beta1, beta2), eps = group["betas"], group["eps"]
    return [beta1, 1 - beta1, beta2, 1 - beta2, eps, group["weight_decay"]]


def _plain(grad: Tensor, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """The gradient as the kernel reads it; it is nearly always so already."""
    if grad.dtype == dtype and grad.is_contiguous() and grad.data_ptr() % _ALIGNED == 0:
        return grad
    return torch.empty_like(parameter, dtype=dtype).copy_(grad)
