"""The last block for the one token that a pooling reads: the same vectors and gradients, for less work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.backbones import Backbone
from embedlab.engine.precision import ComputeCopy
from embedlab.kernels import block_ops, fused_block
from embedlab.pooling import build_pooling
from tests.kernels.test_attention import NoHostReads, load

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
    (whole, its_gradients, all_rows), (one, its_own, few) = found
    assert few == [len(LENGTHS)] < all_rows
    torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)
    assert len(its_own) == len(its_gradients)
    for got, want in zip(its_own, its_gradients, strict=True):
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


def test_it_leaves_the_block_as_it_was_and_alone_where_others_look_at_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load(tiny, "bert").eval()
    ids, mask = batch()
    here = torch.device("cpu")
    assert backbone.reads_one(here, packed=False)
    backbone(ids, mask, position=mask.argmax(1))
    block: Any = backbone.blocks[-1]
    assert "forward" not in vars(block)
    hook = block.register_forward_hook(lambda m, args, out: None)
    assert not backbone.reads_one(here, packed=True)
    hook.remove()
    block.gradient_checkpointing = True
    assert backbone.reads_one(here, packed=True)
    block.train()
    assert not backbone.reads_one(here, packed=True)
    block.gradient_checkpointing = False
    monkeypatch.setenv("EMBEDLAB_KERNELS", "last_block=0")
    assert not backbone.reads_one(here, packed=True)
    monkeypatch.delenv("EMBEDLAB_KERNELS")
    backbone.compiled = True
    assert not backbone.reads_one(here, packed=True)


def test_on_a_card_only_fused_blocks_do_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_block, "has_triton", lambda: True)
    backbone, card = load(tiny, "bert").eval(), torch.device("cuda")
    backbone.compile_blocks(backend="eager")
    with backbone.computing(low_precision_weights=True):
        assert not backbone.reads_one(card, packed=True)
        with ComputeCopy(backbone, torch.float32).swapped():
            assert backbone.reads_one(card, packed=True)
            assert not backbone.reads_one(card, packed=False)
            monkeypatch.setenv("EMBEDLAB_KERNELS", "last_block=0")
            assert not backbone.reads_one(card, packed=True)
            monkeypatch.delenv("EMBEDLAB_KERNELS")
            assert backbone.reads_one(card, packed=True)
            next(backbone.parameters()).requires_grad_(False)
            assert not backbone.reads_one(card, packed=True)


def test_in_a_captured_step_the_host_waits_for_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))
    backbone = load(tiny, "bert").eval()
    ids, mask = batch()
    position = mask.argmax(1)
    with ComputeCopy(backbone, torch.float32).swapped(), NoHostReads():
        backbone(ids, mask, capacity=64, position=position)[0].sin().sum().backward()


def test_a_model_of_another_build_runs_its_whole_block(tiny: Tiny) -> None:
    assert not load(tiny, "modernbert").eval().reads_one(torch.device("cpu"), packed=False)


@pytest.mark.parametrize("full", [False, True], ids=["packed", "full rows"])
@pytest.mark.parametrize("model_type", MODELS)
def test_masked_tokens_alone_are_those_of_all(
    tiny: Tiny, model_type: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fused blocks. Cells without a token, which the surplus of a draw may be, say nothing and learn nothing."""
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))
    backbone = load(tiny, model_type).eval()
    ids, mask = batch()
    mask = torch.ones_like(mask) if full else mask
    cells = torch.tensor([3, 0, 14, 40, 61, 71, 26])
    real = mask.flatten()[cells].bool()
    assert full or not real.all()
    tokens = int(mask.sum())
    sizes: list[int] = []
    gelu = block_ops.gelu
    monkeypatch.setattr(block_ops, "gelu", lambda u: [sizes.append(len(u)), gelu(u)][1])
    found = []
    with ComputeCopy(backbone, torch.float32).swapped():
        for switch in ("last_block=0", ""):
            monkeypatch.setenv("EMBEDLAB_KERNELS", switch)
            with NoHostReads():
                states = backbone.states_at(ids, None if full else mask, cells, capacity=tokens + 7)
            read = states.sin().sum(1) @ real.float()
            gradients = torch.autograd.grad(read, list(backbone.parameters()), allow_unused=True)
            found.append((states[real], [g for g in gradients if g is not None]))
    blocks = len(backbone.blocks)
    assert sizes[blocks - 1] >= tokens > sizes[-1] == len(cells)
    (whole, its_gradients), (some, its_own) = found
    torch.testing.assert_close(some, whole, rtol=1e-5, atol=1e-5)
    assert len(its_own) == len(its_gradients)
    for got, want in zip(its_own, its_gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_masked_tokens_of_other_blocks_are_selected_from_all(tiny: Tiny) -> None:
    backbone = load(tiny, "bert").eval()
    ids, mask = batch()
    cells = torch.tensor([0, 14, 3])
    for capacity in (None, int(mask.sum())):
        states = backbone(ids, mask, capacity=capacity)[-1]
        assert torch.equal(backbone.states_at(ids, mask, cells, capacity), states.flatten(0, 1)[cells])
