"""The kernel at inference gives what the operations one by one give: on a device, and interpreted on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.pooling import build_pooling
from embedlab.pooling.s2sent import S2Sent
from tests.interpreted import needs_triton

SMALL: list[tuple[int, int, dict[str, Any]]] = [
    (96, 33, {"n": 6, "m": 16}),
    (100, 1, {"m": 2}),
    (64, 17, {"dct_norm": "sum", "gain": 0.1, "bias": False, "act": "relu", "block_offset": 1}),
    (64, 17, {"squeeze": "gap", "pre_softmax_sigmoid": False}),
    (64, 17, {"n": 1, "invalid": "zero", "m": 8, "dct_norm": "ortho"}),
]
LARGE: list[tuple[int, int, dict[str, Any]]] = [
    (768, 32, {}),
    (256, 300, {"n": 12, "dct_norm": "ortho", "gain": 3.0}),
]


def pooling(width: int, device: str = "cpu", **settings: Any) -> S2Sent:
    torch.manual_seed(0)
    info = BackboneInfo("encoder", 12, width, 512, True, 0.1, "bert", True)
    made = build_pooling({"name": "s2sent", "r": 4, **settings}, info).eval().to(device)
    assert isinstance(made, S2Sent)
    for p in made.parameters():
        p.data = torch.randn_like(p) * 0.2
    return made


def compare(width: int, length: int, settings: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    made = pooling(width, device, **settings)
    hidden = tuple(torch.randn(5, length, width, device=device, dtype=dtype) for _ in range(13))
    mask = torch.randint(0, 2, (5, length), device=device)
    mask[0], mask[1], mask[2, : length // 2], mask[3] = 1, 0, 0, torch.arange(length, device=device) < 3
    for h in hidden:
        h[mask == 0] = torch.nan
    slow = made(hidden, mask, {}).detach()
    with torch.no_grad():
        assert made._has_kernel
        fast = made._by_kernel(hidden, mask)
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "length", "settings"), [*SMALL, *LARGE])
def test_the_kernel_is_the_definition(width: int, length: int, settings: dict, dtype: torch.dtype) -> None:
    compare(width, length, settings, dtype, "cuda")


@needs_triton
def test_the_kernel_is_the_definition_when_interpreted() -> None:
    code = "from tests.kernels.test_s2sent import interpreted; interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def interpreted() -> None:
    """Run in a process of its own: the variable decides when kernels are defined."""
    for width, length, settings in SMALL:
        compare(width, length, settings, torch.float32, "cpu")


def plain_pool(
    blocks: Sequence[Tensor],
    mask: Tensor,
    frequency: Tensor,
    gamma: Tensor,
    norm: str,
    logits_of: Callable[[Tensor], Tensor],
    sigmoid: bool,
) -> Tensor:
    """What `embedlab.kernels.s2sent.pool` says that it does, in float64."""
    real = mask != 0
    count = real.sum(1)[:, None]
    size = count.clamp(min=1).double()
    position = real.cumsum(1)[..., None] - 0.5
    cosine = torch.cos(torch.pi * frequency * position / size[..., None])
    constant = torch.where(frequency > 0, 2.0, 1.0).double()
    scale = {"mean": constant.sqrt() / size, "ortho": (constant / size).sqrt(), "sum": torch.ones(1)}[norm]
    scale = torch.where(frequency < count, scale, 0)
    masked = [torch.where(real[..., None], h, 0).double() for h in blocks]
    f = sum((cosine * h).sum(1) * scale * g for h, g in zip(masked, gamma, strict=True))
    assert isinstance(f, Tensor)
    e = logits_of(f.float())
    weights = (e.sigmoid() if sigmoid else e).softmax(1)
    means = torch.stack([h.sum(1) / size for h in masked], 1)
    return (weights * means).sum(1).float()


@pytest.mark.parametrize(("width", "length", "settings"), SMALL)
def test_without_triton_the_kernel_gets_what_the_definition_takes(
    width: int, length: int, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("embedlab.kernels.s2sent")
    module.pool = plain_pool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    compare(width, length, settings, torch.float32, "cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"pool": "cls"},
        {"mode": "avg1d"},
        {"mode": "last1d"},
        {"mode": "none"},
        {"squeeze": "none"},
        {"bn": True},
        {"block_norm": "global_exp"},
        {"invalid": "grid6"},
        {"exclude_special": True},
        {"fs_tokens": "sentence"},
    ],
)
def test_what_it_does_not_cover_goes_one_by_one(settings: dict) -> None:
    with torch.no_grad():
        assert not pooling(64, **settings)._has_kernel
        assert pooling(64)._has_kernel
        assert not pooling(64).train()._has_kernel
    assert not pooling(64)._has_kernel
