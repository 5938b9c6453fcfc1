"""The forward pass over packed rows by kernels, on a card or interpreted: what transformers' modules give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedlab.backbones import Backbone
from embedlab.encoders.token_rows import TokenRows
from embedlab.kernels import inference
from embedlab.kernels.packed_rows import PackedRows, pack
from tests.encoders.test_encoder import build
from tests.encoders.test_pipeline import lines, padded
from tests.interpreted import DEVICE, INTERPRETED, NEEDS
from tests.kernels.test_attention import load

pytestmark = NEEDS
Tiny = Callable[..., Path]
LENGTHS = (12, 5, 1, 20, 3, 0)
LOOSE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
TYPES = [torch.float32] if INTERPRETED else [*LOOSE]  # the interpreter's products of bf16 are wrong
WIDE: dict[str, Any] = {"width": 64, "heads": 4}
"""Heads of 16, as narrow as kernels take them."""
needs_card = pytest.mark.skipif(INTERPRETED, reason="copies and torch's kernels of a card")


@contextmanager
def by_kernels() -> Iterator[None]:
    """Tensors say that they are on a card, so that interpreted kernels take them."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
        yield


def drawn(lengths: tuple[int, ...], backbone: Backbone) -> tuple[list[torch.Tensor], PackedRows]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 200, (n,), generator=generator) for n in lengths]
    flat = TokenRows.of([row.numpy() for row in rows])
    chosen = np.arange(len(rows))
    return rows, pack(
        flat.ids, flat.bounds, chosen, torch.device(DEVICE), pad=1, offset=backbone.position_offset
    )


@torch.no_grad()
def alone(backbone: Backbone, rows: list[torch.Tensor]) -> torch.Tensor:
    """All hidden states of the tokens, each row by itself by the modules on the CPU in fp32."""
    found = [backbone.model(row[None], output_hidden_states=True).hidden_states for row in rows if len(row)]
    return torch.cat([torch.stack(states)[:, 0] for states in found], 1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_states_are_those_of_the_modules(tiny: Tiny, model_type: str, dtype: torch.dtype) -> None:
    backbone = load(tiny, model_type, **WIDE).eval()
    rows, packed = drawn(LENGTHS, backbone)
    want, loose = alone(backbone, rows), LOOSE[dtype]
    weights = inference.Weights(backbone.to(DEVICE), dtype)
    slot = packed.bounds[:-1].long().clamp(max=packed.tokens - 1)
    with by_kernels():
        states = weights.states(packed, every=True)
        one = weights.states(packed, slot=slot)
    got = torch.stack([x[: packed.tokens].float().cpu() for x in states])
    torch.testing.assert_close(got, want, rtol=loose, atol=loose)
    assert len(one) == 1
    torch.testing.assert_close(one[0].float().cpu(), want[-1][slot.cpu()], rtol=loose, atol=loose)


@needs_card
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_rows_by_torch(tiny: Tiny, dtype: torch.dtype) -> None:
    backbone = load(tiny, "bert", max_positions=300, **WIDE).eval()
    rows, packed = drawn((300, 129, 256, 4), backbone)
    want = alone(backbone, rows)
    weights = inference.Weights(backbone.to(DEVICE), dtype)
    assert weights.longest >= packed.longest > inference.Weights(backbone, torch.float32).longest
    got = weights.states(packed)[0][: packed.tokens].float().cpu()
    torch.testing.assert_close(got, want[-1], rtol=6e-2, atol=6e-2)


@needs_card
@pytest.mark.parametrize("output", ["numpy", "tensor"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "first_last", "cls_mlp"])
def test_vectors_of_a_card_are_those_of_the_cpu(tiny: Tiny, pooling: str, output: str) -> None:
    encoder = build(tiny("bert", max_positions=300, **WIDE), pooling)
    texts = [*lines(5000), "a cat " * 140, *("word " * n for n in range(100, 200))]
    want = encoder.encode(texts, normalize=True)
    encoder.to(DEVICE)
    for dtype, least in (("float32", 0.999999), ("bfloat16", 0.998), ("float16", 0.9999)):
        found = encoder.encode(texts, dtype=dtype, output=output, normalize=True)
        got = np.asarray(found.cpu() if output == "tensor" else found)
        assert (got * want).sum(1).min() > least
        assert (got * padded(encoder, texts, dtype=dtype, normalize=True)).sum(1).min() > least
