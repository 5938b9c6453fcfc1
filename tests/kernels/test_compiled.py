"""Every Triton kernel compiled for an H100 and H200 (sm_90), by its own launcher, on a machine without one.

The interpreter takes what the compiler refuses: types, layouts, shared memory. Not under ``TRITON_INTERPRET=1``, which
leaves no compiler.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.interpreted import INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")]
BF16, FP32 = torch.bfloat16, torch.float32
SHARED = 227 * 1024
"""Bytes of a block's shared memory (CUDA C++ Programming Guide, table of compute capabilities, 9.0)."""
STACK = {"_backward": 600, "_rotary_backward": 300}
"""Bytes of a thread that find no register, at most; of other kernels 64. Several query heads that share keys of width
128 are too much for the gradients' program. Of fp32 none is asked: its products are no tensor cores' and spill."""


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches compile; afterwards a module's kernels have all been, and each fits a multiprocessor."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[Any, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append((self, run(self, *args, grid=grid, warmup=True, **options)))

    # Compiled kernels are kept by device: those made here are of none.
    card = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "none",
        get_current_stream=lambda device: None,
    )
    monkeypatch.setattr(driver, "_active", card)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    yield
    for name in {function.__module__ for function, _ in found}:
        assert {f.__name__ for f, _ in found if f.__module__ == name} == launched(sys.modules[name])
    for name, kernel in {kernel.hash: (function.__name__, kernel) for function, kernel in found}.values():
        assert kernel.metadata.shared <= SHARED, name
        if request.node.callspec.params.get("dtype") != FP32:
            assert stack(kernel) <= STACK.get(name, 64), name


def launched(module: Any) -> set[str]:
    """Names of the functions that Triton compiles, without those that others call."""
    from triton.runtime.jit import JITFunction

    own = [f for f in vars(module).values() if isinstance(f, JITFunction) and f.__module__ == module.__name__]
    return {
        f.__name__ for f in own if not any(re.search(rf"\b{f.__name__}\(", g.src) for g in own if g is not f)
    }


def stack(kernel: Any) -> int:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, check=True)
    (number,) = re.findall(rb"STACK:(\d+)", told.stdout)
    return int(number)


def new(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("updates", "width", "rank", "dtype"),
    [(3, 576, 16, BF16), (1, 1536, 16, BF16), (2, 4096, 64, BF16), (3, 900, 128, BF16), (3, 576, 16, FP32)],
)
def test_lora(updates: int, width: int, rank: int, dtype: torch.dtype) -> None:
    lora(updates, width, rank, dtype)


def lora(updates: int, width: int, rank: int, dtype: torch.dtype) -> None:
    from embedlab.kernels import lora_triton as kernels

    tokens, words = 9408, -(-width // 32)
    joined, down = new(tokens, width + updates * rank, dtype=dtype), new(updates, rank, width, dtype=dtype)
    seed, bits = new(1, dtype=torch.int64), new(updates, tokens, words, dtype=torch.int32)
    kernels.launch_down(new(tokens, width, dtype=dtype), down, seed, joined, bits, 3277)
    kernels.launch_backward(torch.empty_like(joined), joined, bits, down, 3277)


@pytest.mark.parametrize(
    ("longest", "heads", "shared", "width", "dtype"),
    [
        (32, 12, 12, 64, BF16),
        (32, 12, 12, 64, FP32),
        (32, 9, 3, 64, BF16),
        (64, 16, 8, 128, BF16),
        (128, 12, 12, 64, BF16),
        (512, 12, 12, 64, BF16),
    ],
)
def test_attention(longest: int, heads: int, shared: int, width: int, dtype: torch.dtype) -> None:
    from embedlab.kernels.varlen_attention import _kernels, heads_first

    slots, rows = 9408, 256
    query, grad, out, dq = (heads_first(new(1, heads, slots, width, dtype=dtype)) for _ in range(4))
    key, value, dk, dv = (heads_first(new(1, shared, slots, width, dtype=dtype)) for _ in range(4))
    inputs = query, key, value, new(rows + 1, dtype=torch.int32), new(1, dtype=torch.int64)
    causal = shared < heads
    sums = None if causal else new(rows, 3, heads, width)
    for dropout in (0.0, 0.1):
        _kernels(longest).launch_forward(*inputs, out, longest, 0.125, dropout, causal)
        _kernels(longest).launch_backward(*inputs, grad, dq, dk, dv, longest, 0.125, dropout, sums, causal)


@pytest.mark.parametrize(("width", "dtype"), [(384, BF16), (768, BF16), (768, FP32), (1024, BF16)])
def test_blocks(width: int, dtype: torch.dtype) -> None:
    from embedlab.kernels import block_triton as kernels

    count = 9408
    x, y, z = (new(count, width, dtype=dtype) for _ in range(3))
    gamma, beta = new(width, dtype=dtype), new(width, dtype=dtype)
    seed, stats = new(1, dtype=torch.int64), new(2, count)
    ids, positions = new(count, dtype=torch.int64), new(count, dtype=torch.int64)
    sums = new(kernels.norm_programs(count) * 3 * width)
    for dropout in (0.0, 0.1):
        kernels.launch_add_norm(x, x, gamma, beta, seed, z, y, stats, dropout, 1e-12)
        kernels.launch_embed(ids, positions, x, x, gamma, gamma, beta, seed, z, y, stats, dropout, 1e-12)
        kernels.launch_embed(ids, positions, x, x, None, gamma, beta, seed, z, y, stats, dropout, 1e-12)
        for after in (False, True):
            kernels.launch_norm_backward(x, z, stats, gamma, seed, z, y, sums, dropout, after)
    inner = new(count, 4 * width, dtype=dtype)
    partial = new(kernels.gelu_groups(*inner.shape) * 4 * width)
    kernels.launch_gelu(inner, torch.empty_like(inner))
    kernels.launch_gelu_backward(inner, inner, inner, partial)
    sections = [(kernels.norm_programs(count), 3 * width), (kernels.gelu_groups(*inner.shape), 4 * width)]
    kernels.launch_column_sums(new(sum(r * w for r, w in sections)), sections, new(7 * width))


@pytest.mark.parametrize("length", [32, 100])
def test_packing(length: int) -> None:
    from embedlab.kernels import packing_triton as kernels

    rows, slots = 256, 9408
    mask, ends, cell, index = (new(n, dtype=torch.int64) for n in (rows * length, rows, slots, slots))
    bounds, order = new(rows + 1, dtype=torch.int32), new(rows, length, dtype=torch.int64)
    kernels.launch_place(mask.view(rows, length), ends, cell, order, index, bounds)
    kernels.launch_pack(mask, cell, index, 0)
    for kind, bits in ((torch.int16, 2**16 - 1), (torch.int32, 2**32 - 1)):
        kernels.gather_ragged(new(10**6, dtype=kind), index, index, ends, length, bits, 0)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_s2sent(dtype: torch.dtype) -> None:
    from embedlab.kernels.s2sent import pool

    blocks, mask = [new(64, 32, 768, dtype=dtype)] * 13, new(64, 32, dtype=torch.int64)
    for norm, sigmoid in (("mean", True), ("ortho", False), ("sum", False)):
        pool(
            blocks, mask, new(768, dtype=torch.int64), new(13, 768), norm, lambda f: new(64, 13, 768), sigmoid
        )


@pytest.mark.parametrize("twins", [True, False])
def test_adamw(twins: bool) -> None:
    from embedlab.engine.fused_adamw import FusedUpdate

    parameters = [nn.Parameter(torch.zeros(n)) for n in (5000, 768)]
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(1e-3))
    for p in parameters:
        optimizer.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    update = FusedUpdate(optimizer, torch.zeros(2), lambda p: p.detach().to(BF16) if twins else None, False)
    ready = update.take([torch.zeros_like(p) for p in parameters])
    update.norm(ready)
    update(ready, torch.ones(()), torch.zeros(()))


@pytest.mark.parametrize(
    ("width", "inner", "rank", "query", "key", "dropped"),
    [(576, 1536, 16, 576, 192, 3277), (2048, 8192, 32, 2048, 512, 0)],
)
def test_decoder(width: int, inner: int, rank: int, query: int, key: int, dropped: int) -> None:
    """SmolLM2-135M's shape, and that of Llama 3.2 1B."""
    from embedlab.kernels.decoder import decoder_gradients_triton as gradients
    from embedlab.kernels.decoder import decoder_triton as kernels

    lora(3, width, rank, BF16)  # whose kernels are used too
    tokens = 9408
    seed = new(1, dtype=torch.int64)
    reads = [kernels.Updates(new(n, rank, d, dtype=BF16), dropped, seed)
             for n, d in ((3, width), (1, query), (2, width), (1, inner))]  # fmt: skip
    x, gamma = new(tokens, width), new(width)
    first = kernels.norm_down(x, None, gamma, 1e-5, reads[0])
    second = kernels.norm_down(x, x, gamma, 1e-5, reads[2])
    kernels.norm_down(x, x, gamma, 1e-5, None)
    context, fed = new(tokens, query + rank, dtype=BF16), new(tokens, inner + rank, dtype=BF16)
    gates = new(tokens, 2 * inner, dtype=BF16)
    bits_o, bits_d = kernels.down(context, reads[1]), kernels.down(fed, reads[3], gates)
    sizes = [r.down.numel() for r in reads] + [rank * n for n in (query + 2 * key, width, 2 * inner, width)]
    shares = gradients.Shares(tuple(sizes), tokens, x)
    gradients.swiglu_backward(fed, gates, fed, second.joined[:, width:], reads[3], bits_d, shares)
    for normed, read in ((first, reads[0]), (second, reads[2])):
        kernels.norm_backward(torch.empty_like(normed.joined), normed, gamma, read, x, BF16)
    kernels.norm_backward(x, kernels.Normed(x, x, x, gamma), gamma, None, None, BF16)
    joint, half = new(tokens, query + 2 * key, dtype=BF16), new(tokens, width, dtype=BF16)
    gradients.matrices(
        *(gradients.Read(j, b, j[:, width:])
          for j, b in ((first.joined, first.bits), (context, bits_o), (second.joined, second.bits))),
        fed[:, inner:], (joint, half, half), query, rank, dropped, shares,
    )  # fmt: skip
    shares.total(2.0)
    kernels.Copies([(new(rank, width), reads[0].down[0])], [1.0]).refresh()


@pytest.mark.parametrize(
    ("longest", "heads", "shared", "width"), [(64, 9, 3, 64), (32, 9, 3, 64), (64, 16, 8, 128)]
)
def test_rotary_attention(longest: int, heads: int, shared: int, width: int) -> None:
    from embedlab.kernels.decoder import rotary_triton as kernels

    tokens, query = 9408, heads * width
    qkv, context = new(tokens, (heads + 2 * shared) * width, dtype=BF16), new(tokens, query + 16, dtype=BF16)
    down, bits = new(1, 16, query, dtype=BF16), new(1, tokens, query // 32, dtype=torch.int32)
    table, bounds = new(longest, width // 2), new(257, dtype=torch.int32)
    kernels.launch_forward(qkv, table, table, bounds, context, longest, 0.1, heads, shared)
    kernels.launch_backward(
        qkv, table, table, bounds, context, down, bits, torch.empty_like(qkv), longest, 0.1, heads, shared, 3277
    )  # fmt: skip


def test_every_module_with_kernels_has_a_test_here() -> None:
    import embedlab.kernels

    folder = Path(embedlab.kernels.__file__).parent
    assert {path.stem for path in folder.rglob("*.py") if "@triton.jit" in path.read_text()} == {
        "adamw", "block_triton", "decoder_gradients_triton", "decoder_triton", "lora_triton", "packing_triton",
        "rotary_triton", "s2sent", "varlen_long_triton", "varlen_triton",
    }  # fmt: skip
