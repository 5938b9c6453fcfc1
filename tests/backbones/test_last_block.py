"""The last block for the one token that a pooling reads: the same vectors and gradients, for less work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.backbones import Backbone, last_block
from embedlab.pooling import build_pooling
from tests.backbones.test_attention import load

Tiny = Callable[..., Path]
MODELS = ("bert", "roberta", "distilbert")
LENGTHS = (12, 5, 1, 7, 12, 3)


def batch(side: str = "right", length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(10, 200, (len(LENGTHS), length), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()
    return ids, mask if side == "right" else mask.flip(1)


@contextmanager
def rows_of_the_feed_forward(backbone: Backbone) -> Iterator[list[int]]:
    """Tokens that the last block's feed-forward saw, a call each."""
    block: Any = backbone.blocks[-1]
    dense = block.ffn.lin1 if hasattr(block, "ffn") else block.intermediate.dense
    seen: list[int] = []
    hook = dense.register_forward_hook(lambda m, args, out: seen.append(out[..., 0].numel()))
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["cls", "cls_mlp", "last"])
@pytest.mark.parametrize("model_type", MODELS)
def test_vectors_and_gradients_are_those_of_the_whole_block(
    tiny: Tiny, model_type: str, pooling: str, side: str, packed: bool
) -> None:
    backbone = load(tiny, model_type).eval()
    ids, mask = batch(side)
    pool = build_pooling(pooling, backbone.info)
    capacity = int(mask.sum()) + 7 if packed else None
    found = []
    for position in (None, pool.position(mask, {})):
        with rows_of_the_feed_forward(backbone) as rows:
            hidden = backbone(ids, mask, capacity=capacity, position=position)
        vectors = pool(hidden, mask, {})
        gradients = torch.autograd.grad(vectors.sin().sum(), list(backbone.parameters()), allow_unused=True)
        found.append((vectors, [g for g in gradients if g is not None], rows))
    (whole, its_gradients, all_rows), (one, gradients, few) = found
    assert few == [len(LENGTHS)] < all_rows
    torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)
    assert len(gradients) == len(its_gradients)
    for got, want in zip(gradients, its_gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_row_without_tokens_is_no_other_row(tiny: Tiny, packed: bool) -> None:
    backbone = load(tiny, "bert").eval()
    ids, mask = batch()
    mask[2] = 0
    pool = build_pooling("cls", backbone.info)
    capacity = int(mask.sum()) if packed else None
    whole = pool(backbone(ids, mask, capacity=capacity), mask, {})
    position = pool.position(mask, {})
    one = pool(backbone(ids, mask, capacity=capacity, position=position), mask, {})
    others = [i for i in range(len(mask)) if i != 2]
    torch.testing.assert_close(one[others], whole[others], rtol=1e-5, atol=1e-5)
    assert one[2].isfinite().all()
    if packed:
        torch.testing.assert_close(one[2], torch.zeros_like(one[2]))


def test_dropout_still_tells_views_apart(tiny: Tiny) -> None:
    backbone = load(tiny, "bert").train()
    ids, mask = batch()
    position = mask.argmax(1)
    for capacity in (None, int(mask.sum())):
        first = backbone(ids, mask, capacity=capacity, position=position)[0][:, 0]
        assert not torch.allclose(first, backbone(ids, mask, capacity=capacity, position=position)[0][:, 0])


def test_it_leaves_the_block_as_it_was_and_alone_where_others_look_at_it(tiny: Tiny) -> None:
    backbone = load(tiny, "bert").eval()
    ids, mask = batch()
    position = mask.argmax(1)
    here = torch.device("cpu")
    assert last_block.applies(backbone, here)
    assert not last_block.applies(backbone, torch.device("cuda"))
    backbone(ids, mask, position=position)
    block: Any = backbone.blocks[-1]
    assert "forward" not in vars(block)
    states = []
    hook = block.register_forward_hook(lambda m, args, out: states.append(out))
    assert not last_block.applies(backbone, here)
    backbone(ids, mask, position=position)
    assert bool((states[0][0, :12].abs().sum(-1) > 0).all())
    hook.remove()
    block.gradient_checkpointing = True
    assert last_block.applies(backbone, here)
    block.train()
    assert not last_block.applies(backbone, here)
    block.gradient_checkpointing = False
    backbone.compiled = True
    assert not last_block.applies(backbone, here)


def test_a_model_of_another_build_runs_its_whole_block(tiny: Tiny) -> None:
    backbone = load(tiny, "modernbert").eval()
    ids, mask = batch()
    torch.testing.assert_close(backbone(ids, mask, position=mask.argmax(1))[0], backbone(ids, mask)[0])
