"""Objectives are computed in fp32 whatever the encoder's dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

P = ParamSpec("P")
R = TypeVar("R")

_compiling = False


@contextmanager
def compiled_objectives(on: bool = True) -> Iterator[None]:
    """While in it, objectives are compiled: a few kernels instead of a hundred small ones."""
    global _compiling
    if on:  # fp32 is meant; for good, because backward passes are compiled later
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    before, _compiling = _compiling, on
    try:
        yield
    finally:
        _compiling = before


def _compile(objective: Callable[P, R]) -> Callable[P, R]:
    from torch._functorch import config

    # A backward pass may be asked for twice (JTCSE's gradient norms retain the graph): its inputs must outlive it.
    config.donated_buffer = False
    return torch.compile(objective)


def full_precision(objective: Callable[P, R]) -> Callable[P, R]:
    """Run ``objective`` with autocast off.

    A bf16 matrix product of unit vectors errs by about 2e-3 in cosine, which is 0.04 in a logit at
    temperature 0.05: more than the gap between positive and negative pairs of an untrained decoder.
    """
    # Made at the first call, because it loads the compiler. Sizes that change (tokens that are masked) become symbols
    # at the second compilation; there is no third.
    compiled = cache(lambda: _compile(objective))

    @wraps(objective)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = _device(args)
        with torch.autocast(device, enabled=False):
            plain = not _compiling or torch.compiler.is_compiling()  # as a part of another objective
            return (objective if plain else compiled())(*args, **kwargs)

    return wrapped


def _device(arguments: Iterable[object]) -> str:
    """Where the first tensor is, which may be one of several vectors in a sequence."""
    flat = (x for a in arguments for x in (a if isinstance(a, list | tuple) else (a,)))
    return next((x.device.type for x in flat if isinstance(x, Tensor)), "cpu")


def to_fp32(x: Tensor) -> Tensor:
    """In fp32, or in fp64 where it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """Rows of length 1, in fp32."""
    return normalize(to_fp32(x), dim=-1)
