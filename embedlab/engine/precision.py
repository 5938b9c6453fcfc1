"""Weights in bf16: copies of trained ones once a step (`ComputeCopy`), and the frozen base under adapters.

Autocast keeps the residual stream in fp32, because layer norm gives fp32, and casts each weight where it is used.
Here the weights stay fp32 for the optimiser, and forward and backward run on a copy in bf16: half the traffic
between the matrix products. This is what FSDP's mixed precision does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from embedlab.kernels.fused_block import joinable


@dataclass
class _Joint:
    """A self-attention whose query, key and value can be one product: the twins of its layers are slices of one."""

    module: nn.Module
    whole: dict[str, nn.Parameter]
    parts: dict[str, list[nn.Parameter]]


class ComputeCopy:
    """Twins of a module's fp32 parameters in another type.

    Args:
        module: whose parameters are swapped; all its floating-point parameters are fp32.
        dtype: of the twins.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        twins: dict[int, nn.Parameter] = {}
        self._joints = [
            _join(m, layers, dtype, twins) for m in module.modules() if (layers := joinable(m, dtype))
        ]
        self._slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or parameter.dtype != torch.float32:
                    continue
                if id(parameter) not in twins:  # a tied weight has one twin
                    twin = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                    twins[id(parameter)] = twin
                self._slots.append((owner, name, parameter, twins[id(parameter)]))
        pairs = {id(p): (p, t) for _, _, p, t in self._slots if p.requires_grad}
        self.masters = [p for p, _ in pairs.values()]
        self.twins = [t for _, t in pairs.values()]
        self.leaves = [*self.twins, *(p for joint in self._joints for p in joint.whole.values())]
        """What a forward pass may have read: twins, and what holds several of them."""
        self._seen = self._writes()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the masters' present values to the twins."""
        torch._foreach_copy_([t.detach() for t in self.twins], [m.detach() for m in self.masters])
        self._seen = self._writes()

    def refresh_if_written(self) -> None:
        """`refresh`, where torch has written to the masters since the last: the kernel of a captured update, which
        writes twins too, is not counted, nor is what a graph replays."""
        if self._writes() != self._seen:
            self.refresh()

    def _writes(self) -> int:
        return sum(m._version for m in self.masters)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The module computes with the twins."""
        for owner, name, _, twin in self._slots:
            owner._parameters[name] = twin
        for joint in self._joints:
            joint.module._parameters.update(joint.whole)
        try:
            yield
        finally:
            for joint in self._joints:
                for name in joint.whole:
                    del joint.module._parameters[name]
            for owner, name, parameter, _ in self._slots:
                owner._parameters[name] = parameter

    def gradients(self) -> Iterator[tuple[nn.Parameter, list[nn.Parameter]]]:
        """Of each of `leaves`, the masters whose gradients come in its own, one below the other."""
        master = {id(t): m for m, t in zip(self.masters, self.twins, strict=True)}
        for twin in self.twins:
            yield twin, [master[id(twin)]]
        for joint in self._joints:
            for name, whole in joint.whole.items():
                if whole.requires_grad and all(id(part) in master for part in joint.parts[name]):
                    yield whole, [master[id(part)] for part in joint.parts[name]]

    @torch.no_grad()
    def collect(self) -> None:
        """After a backward pass: twins whose gradients came as one have their slices of it."""
        for joint in self._joints:
            for name, whole in joint.whole.items():
                if whole.grad is None:
                    continue
                for twin, grad in zip(joint.parts[name], whole.grad.chunk(3), strict=True):
                    twin.grad = grad if twin.grad is None else twin.grad + grad
                whole.grad = None

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    @torch.no_grad()
    def hand_over(self, add: bool) -> None:
        """Give the masters the gradients of the twins, in fp32; ``add`` to those that they have."""
        self.collect()
        pairs = [(m, t.grad) for m, t in zip(self.masters, self.twins, strict=True) if t.grad is not None]
        grads: list[Tensor] = []
        for master, _ in pairs:
            if master.grad is None:
                master.grad = torch.empty_like(master) if not add else torch.zeros_like(master)
            grads.append(master.grad)
        if add:
            torch._foreach_add_(grads, [g.float() for _, g in pairs])
        else:
            torch._foreach_copy_(grads, [g for _, g in pairs])
        self.clear()


@torch.no_grad()
def _join(
    module: nn.Module, layers: tuple[nn.Linear, ...], dtype: torch.dtype, twins: dict[int, nn.Parameter]
) -> _Joint:
    """Make the twins of the layers, slices of one weight and one bias, and add them to `twins`."""
    whole: dict[str, nn.Parameter] = {}
    parts: dict[str, list[nn.Parameter]] = {}
    for kind in ("weight", "bias"):
        masters = [getattr(layer, kind) for layer in layers]
        name = f"joined_{kind}"
        whole[name] = nn.Parameter(torch.cat([m.detach().to(dtype) for m in masters]))
        parts[name] = [nn.Parameter(piece) for piece in whole[name].detach().chunk(3)]
        twins |= {id(m): twin for m, twin in zip(masters, parts[name], strict=True)}
    return _Joint(module, whole, parts)


def copyable(module: nn.Module) -> bool:
    """Whether every floating-point parameter is fp32 (quantised or half-precision weights are left to autocast)."""
    return all(p.dtype == torch.float32 for p in module.parameters() if p.is_floating_point()) and not any(
        p.dtype in (torch.uint8, torch.int8) for p in module.parameters()
    )


class FrozenBF16(Precision):
    """bf16-true with adapters: the frozen base in bf16, what is trained in fp32.

    Half the memory of the base, and no lost updates: a bf16 weight does not change by less than 1 / 256 of itself.
    Lightning's own bf16-true would round the adapters too, and make bf16 the type of every new tensor in a step.
    """

    precision = "bf16-true"

    def convert_module(self, module: nn.Module) -> nn.Module:
        for p in module.parameters():
            if not p.requires_grad and p.is_floating_point():
                p.data = p.data.to(torch.bfloat16)
        return module
