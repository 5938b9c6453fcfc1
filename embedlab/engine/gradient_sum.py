"""The sum of gradients over the devices of a run, as a part of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from embedlab.distributed.gather import world_size

_ALIGNED = 16
"""Bytes at whose multiples a slot begins: the kernel of the update loads so many at once."""
_BUCKET = 25 * 2**20
"""Bytes of a message, as of DDP's: smaller ones are slower, larger ones begin later."""


class SummedInStep(DDPStrategy):
    """Data parallel where the step itself adds up the gradients (`GradientSum`)."""

    def configure_ddp(self) -> None:
        """Give all devices the first one's weights, and wrap nothing."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            plain = tensor.detach().contiguous()
            dist.broadcast(plain, 0)
            tensor.detach().copy_(plain)


class GradientSum:
    """Adds up gradients over all devices, each of which has divided its loss by their number.

    DDP's reducer does this by hooks on the parameters; those would see the fp32 weights, and backward writes to their
    copies in the compute type. Messages are sent while the backward pass goes on: gradients lie in buckets in the order
    in which they come, and a full one is sent.

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
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._account = torch.zeros(2, device=device)
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in reversed(parameters):  # as their gradients come
            twin = twins.get(id(p))
            by_type.setdefault(p.dtype if twin is None else twin.dtype, []).append(p)
        for dtype, some in by_type.items():
            for members in _filled(some, dtype):
                self._add_bucket(members, dtype, device)
        # NCCL connects devices when the first message of a kind is sent (NCCL_RUNTIME_CONNECT). That must not be
        # within a capture.
        for message in (*(bucket.whole for bucket in self._buckets), self._account):
            dist.all_reduce(message)
        self._hooks: list[RemovableHandle] = []
        self._known: dict[Any, Counter[int]] = {}
        """By the shapes of a step: how often each parameter's gradient comes in one backward pass."""
        self._coming: Counter[int] | None = None
        self._seen: Counter[int] = Counter()
        self._works: list[dist.Work] = []
        self._sent: set[int] = set()

    def _add_bucket(self, members: list[nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [_aligned(p.numel(), dtype) for p in members]
        whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
        bucket = _Bucket(whole, {id(p) for p in members})
        self._buckets.append(bucket)
        for p, part in zip(members, whole.split(sizes), strict=True):
            self._slots[id(p)] = part[: p.numel()].view_as(p)
            self._bucket_of[id(p)] = bucket

    def slot(self, parameter: nn.Parameter) -> Tensor:
        """Where the sum of a parameter's gradients will be; one that is there already is not copied."""
        return self._slots[id(parameter)]

    def watch(self, leaf: nn.Parameter, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradient of ``leaf`` as it comes: it is that of the parameters, one below the other."""
        keys = [id(p) for p in parameters]
        self._hooks.append(leaf.register_post_accumulate_grad_hook(partial(self._came, keys)))

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def coming(self, shapes: Any) -> Iterator[None]:
        """A backward pass that ends in an update, over a batch of these shapes.

        The first pass of its shapes sends nothing: it shows which gradients come, and how often.
        """
        self._coming, self._seen = self._known.get(shapes), Counter()
        self._sent.clear()
        for bucket in self._buckets:
            bucket.sent = False
            bucket.missing = set() if self._coming is None else {k for k in bucket.keys if self._coming[k]}
        try:
            yield
            for work in self._works:
                work.wait()
        finally:
            self._known.setdefault(shapes, self._seen)
            self._works.clear()
            self._coming = None

    @torch.no_grad()
    def _came(self, keys: Sequence[int], leaf: Tensor) -> None:
        assert leaf.grad is not None
        parts = leaf.grad.chunk(len(keys)) if len(keys) > 1 else (leaf.grad,)
        for key, grad in zip(keys, parts, strict=True):
            self._seen[key] += 1
            # What comes in several parts is summed by others first, and sent in the end.
            if self._coming is None or self._coming[key] != 1:
                continue
            self._slots[key].copy_(grad)
            self._sent.add(key)
            bucket = self._bucket_of[key]
            bucket.missing.discard(key)
            if not bucket.missing:
                bucket.sent = True
                work = dist.all_reduce(bucket.whole, async_op=True)
                assert work is not None
                self._works.append(work)

    @torch.no_grad()
    def __call__(
        self, grads: Mapping[int, Tensor], loss: Tensor, failed: Tensor
    ) -> tuple[dict[int, Tensor], Tensor, Tensor]:
        """Add up over the devices what has not been sent.

        Args:
            grads: of this device, by the ``id`` of the parameter; the same ones on all devices.
            loss: of this device, a scalar.
            failed: scalar, 1 where this device met a step that was not finite.

        Returns:
            The sums of the gradients, by the ``id`` of the parameter; the mean of the losses; 1 where any device's
            ``failed`` is.
        """
        rest = {key: grad for key, grad in grads.items() if not self._bucket_of[key].sent}
        late = [key for key in grads if key not in rest and key not in self._sent]
        if late:
            raise RuntimeError("a gradient came that none came for in the first step of these shapes")
        moved = [(self._slots[k], g) for k, g in rest.items() if g.data_ptr() != self._slots[k].data_ptr()]
        if moved:
            torch._foreach_copy_([slot for slot, _ in moved], [grad for _, grad in moved])
        self._account.copy_(torch.stack([loss, failed]))
        dist.all_reduce(self._account)
        for bucket in self._buckets:
            if not bucket.sent:
                dist.all_reduce(bucket.whole)
            bucket.sent = False
        slots = {key: self._slots[key] for key in grads}
        return slots, self._account[0] / world_size(), (self._account[1] > 0).to(failed.dtype)


@dataclass(eq=False)
class _Bucket:
    """Slots that are sent as one, and what is missing in them of the present backward pass."""

    whole: Tensor
    keys: set[int]
    missing: set[int] = field(default_factory=set)
    sent: bool = False


def _filled(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> Iterator[list[nn.Parameter]]:
    """The parameters in their order, cut where a bucket is full."""
    members: list[nn.Parameter] = []
    for p in parameters:
        members.append(p)
        if sum(_aligned(m.numel(), dtype) for m in members) * dtype.itemsize >= _BUCKET:
            yield members
            members = []
    if members:
        yield members


def _aligned(numel: int, dtype: torch.dtype) -> int:
    step = _ALIGNED // dtype.itemsize
    return -(-numel // step) * step
