"""The sum of gradients over the devices of a run, as a part of the step: one message a type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from embedlab.distributed.gather import world_size

_ALIGNED = 16
"""Bytes at whose multiples a slot begins: the kernel of the update loads so many at once."""


class SummedInStep(DDPStrategy):
    """Data parallel where the step itself adds up the gradients (`GradientSum`)."""

    def configure_ddp(self) -> None:
        """Give all devices the first one's weights, and wrap nothing."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0)


class GradientSum:
    """Adds up gradients over all devices, each of which has divided its loss by their number.

    DDP's reducer does this by hooks on the parameters; those would see the fp32 weights, and backward writes to their
    copies in the compute type.

    Args:
        parameters: what is trained, in one order on all devices.
        twins: by the ``id`` of a parameter, the copy that gives its gradient's type; fp32 weights have none.
        fp32: gradients of copies are added in fp32 as well.
        device: of the parameters.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        twins: Mapping[int, Tensor],
        fp32: bool,
        device: torch.device,
    ) -> None:
        self.fp32 = fp32
        self._slots: dict[int, Tensor] = {}
        self._whole: list[Tensor] = []
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in parameters:
            twin = twins.get(id(p))
            by_type.setdefault(p.dtype if twin is None else twin.dtype, []).append(p)
        by_type.setdefault(torch.float32, [])
        for dtype, some in by_type.items():
            step = _ALIGNED // dtype.itemsize
            sizes = [-(-p.numel() // step) * step for p in some]
            account = 2 if dtype == torch.float32 else 0
            whole = torch.zeros(sum(sizes) + account, dtype=dtype, device=device)
            parts = whole[: len(whole) - account].split(sizes) if some else ()
            for p, part in zip(some, parts, strict=True):
                self._slots[id(p)] = part[: p.numel()].view_as(p)
            if account:
                self._account = whole[-account:]
            self._whole.append(whole)

    def slot(self, parameter: nn.Parameter) -> Tensor:
        """Where the sum of a parameter's gradients will be; one that is there already is not copied."""
        return self._slots[id(parameter)]

    @torch.no_grad()
    def __call__(
        self, grads: Mapping[int, Tensor], loss: Tensor, failed: Tensor
    ) -> tuple[dict[int, Tensor], Tensor, Tensor]:
        """Add up over the devices.

        Args:
            grads: of this device, by the ``id`` of the parameter; the same ones on all devices.
            loss: of this device, a scalar.
            failed: scalar, 1 where this device met a step that was not finite.

        Returns:
            The sums of the gradients, by the ``id`` of the parameter; the mean of the losses; 1 where any device's
            ``failed`` is.
        """
        slots = {key: self._slots[key] for key in grads}
        moved = [
            (slots[key], grad) for key, grad in grads.items() if grad.data_ptr() != slots[key].data_ptr()
        ]
        if moved:
            torch._foreach_copy_([slot for slot, _ in moved], [grad for _, grad in moved])
        self._account.copy_(torch.stack([loss, failed]))
        for whole in self._whole:
            dist.all_reduce(whole)
        return slots, self._account[0] / world_size(), (self._account[1] > 0).to(failed.dtype)
