"""AdamW and the norm of its gradients over many tensors in one launch each: fp32 weights and moments, gradients in any
type, twins written along.

A program has one piece of one tensor and finds it by addresses in a table, so that the number of launches does not
grow with the number of tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Elements a program."""
WARPS = 8
RUN = 8
"""Pieces a program of `squares`: adding up over threads is what takes its time."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _piece(
    param, mean, square, grad, offsets, inside, scale, RATES, row,
    FULL: tl.constexpr,
):  # fmt: skip
    """New values of the elements at `offsets`; those not `inside` are left (a `FULL` piece has none)."""
    step_size, correction, decay = tl.load(RATES + row), tl.load(RATES + row + 1), tl.load(RATES + row + 2)
    beta1, rest1 = tl.load(RATES + row + 3), tl.load(RATES + row + 4)
    beta2, rest2, eps = tl.load(RATES + row + 5), tl.load(RATES + row + 6), tl.load(RATES + row + 7)
    if FULL:
        g = tl.load(grad + offsets).to(tl.float32)
        p, m, v = tl.load(param + offsets), tl.load(mean + offsets), tl.load(square + offsets)
    else:
        g = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(param + offsets, mask=inside, other=0.0)
        m = tl.load(mean + offsets, mask=inside, other=0.0)
        v = tl.load(square + offsets, mask=inside, other=0.0)
    g = g / scale
    p = p - decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p = p - step_size * m / (tl.sqrt(v) * correction + eps)
    if FULL:
        tl.store(param + offsets, p)
        tl.store(mean + offsets, m)
        tl.store(square + offsets, v)
    else:
        tl.store(param + offsets, p, mask=inside)
        tl.store(mean + offsets, m, mask=inside)
        tl.store(square + offsets, v, mask=inside)
    return p


@triton.jit
def update(
    PLACES, GRADS, SIZES, RATES, TENSORS, PIECES, SCALE, FOUND_INF,
    GRAD: tl.constexpr, TWIN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One piece of one tensor.

    Args:
        PLACES: int64 [n, 4], addresses of a tensor's weight, moments, and twin (0: it has none); multiples of 16.
        GRADS: int64 [n], of its gradient (0: nothing is done), a multiple of 16.
        SIZES: int64 [n], elements.
        RATES: fp32 [n, 8]: lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), lr * weight decay, beta1, 1 - beta1, beta2,
            1 - beta2, eps.
        TENSORS, PIECES: int32 [programs], the tensor of each and its piece of `SIZE` elements.
        SCALE: fp32, divides the gradients.
        FOUND_INF: fp32; nothing is done unless it is 0.
        GRAD, TWIN: types of gradients and twins.
    """
    program = tl.program_id(0)
    tensor = tl.load(TENSORS + program).to(tl.int64)
    start = tl.load(PIECES + program).to(tl.int64) * SIZE
    address = tl.load(GRADS + tensor)
    if (address != 0) & (tl.load(FOUND_INF) == 0):
        size = tl.load(SIZES + tensor)
        scale = tl.load(SCALE)
        entry = PLACES + tensor * 4
        # Nothing is known of an address out of a table; without the hint each element is loaded by itself.
        grad = tl.multiple_of(address.to(tl.pointer_type(GRAD)), 16)
        param = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.float32)), 16)
        mean = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.float32)), 16)
        square = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.float32)), 16)
        other = tl.load(entry + 3)
        twin = tl.multiple_of(other.to(tl.pointer_type(TWIN)), 16)
        offsets = start + tl.arange(0, SIZE)
        inside = offsets < size
        # A mask of unknown length would also split the loads, so only the last piece has one.
        if start + SIZE <= size:
            p = _piece(param, mean, square, grad, offsets, inside, scale, RATES, tensor * 8, FULL=True)
            if other != 0:
                tl.store(twin + offsets, p.to(TWIN))
        else:
            p = _piece(param, mean, square, grad, offsets, inside, scale, RATES, tensor * 8, FULL=False)
            if other != 0:
                tl.store(twin + offsets, p.to(TWIN), mask=inside)


@triton.jit
def squares(
    GRADS, SIZES, TENSORS, PIECES, OUT, programs, GRAD: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr
):
    """Sum of the squares of `RUN` pieces, fp32, to the program's element of OUT.

    ``programs`` is the length of TENSORS and PIECES; other arguments as of `update`.
    """
    first = tl.program_id(0) * RUN
    total = tl.zeros([SIZE], tl.float32)
    for i in range(RUN):
        inside = first + i < programs
        tensor = tl.load(TENSORS + first + i, mask=inside, other=0).to(tl.int64)
        start = tl.load(PIECES + first + i, mask=inside, other=0).to(tl.int64) * SIZE
        address = tl.load(GRADS + tensor, mask=inside, other=0)
        grad = tl.multiple_of(address.to(tl.pointer_type(GRAD)), 16)
        size = tl.where(address != 0, tl.load(SIZES + tensor), 0)
        offsets = start + tl.arange(0, SIZE)
        if start + SIZE <= size:
            g = tl.load(grad + offsets).to(tl.float32)
            total += g * g
        else:
            g = tl.load(grad + offsets, mask=offsets < size, other=0.0).to(tl.float32)
            total += g * g
    tl.store(OUT + tl.program_id(0), tl.sum(total))


@triton.jit
def rates(STEPS, GRADS, LRS, GROUPS, LOGARITHMS, FOUND_INF, RATES, n, SIZE: tl.constexpr):
    """Count an update of each tensor that has a gradient, and fill the first three columns of RATES.

    Args:
        STEPS: fp32 [n].
        GRADS: int64 [n], 0 where there is no gradient.
        LRS: fp32, of each group; GROUPS: int64 [n], each tensor's.
        LOGARITHMS: fp64 [n, 3]: logarithms of beta1 and beta2, weight decay.
        FOUND_INF: fp32, 0 or 1; at 1 nothing is counted.
        RATES: as of `update`.
    """
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    counted = tl.where(tl.load(GRADS + at, mask=inside, other=0) != 0, 1.0 - tl.load(FOUND_INF), 0.0)
    step = tl.load(STEPS + at, mask=inside, other=1.0) + counted
    tl.store(STEPS + at, step, mask=inside)
    lr = tl.load(LRS + tl.load(GROUPS + at, mask=inside, other=0), mask=inside, other=0.0).to(tl.float64)
    step = step.to(tl.float64)
    first = 1.0 - tl.exp(step * tl.load(LOGARITHMS + at * 3, mask=inside, other=-1.0))
    second = 1.0 - tl.exp(step * tl.load(LOGARITHMS + at * 3 + 1, mask=inside, other=-1.0))
    decay = tl.load(LOGARITHMS + at * 3 + 2, mask=inside, other=0.0)
    tl.store(RATES + at * 8, (lr / first).to(tl.float32), mask=inside)
    tl.store(RATES + at * 8 + 1, (1.0 / tl.sqrt(second)).to(tl.float32), mask=inside)
    tl.store(RATES + at * 8 + 2, (lr * decay).to(tl.float32), mask=inside)
