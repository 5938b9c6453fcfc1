"""The side stream: invariants 21 (gradient routing, first), 16, 18, 19 and parts of 17 and 20."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embedlab.backbones import load_backbone
from embedlab.backbones.backbone import Backbone
from embedlab.backbones.blocks import block_adapter
from embedlab.config.backbone import BackboneConfig
from embedlab.encoders.cross_attention import CrossAttention, check_alike, cross_layers, last_exchange
from embedlab.errors import UserError

KINDS = ("bert", "roberta", "distilbert", "modernbert")
LAYERS = 4
Tiny = Callable[..., Path]


def tower(
    tiny: Tiny, kind: str = "bert", seed: int = 0, attention: str = "sdpa", layers: int = LAYERS
) -> Backbone:
    folder = tiny(kind, layers=layers, seed=seed)
    config = BackboneConfig(source="local", path=str(folder), attention=attention)
    return load_backbone(config)[0].eval()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(10, 100, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 5:], mask[2, 8:] = 0, 0
    return ids, mask


def streams(
    first: Backbone, second: Backbone, layers: tuple[int, ...], route: str = "query_owner"
) -> tuple[tuple[Tensor, ...], ...]:
    """H1, H2, T1, T2 with all layers."""
    main, side, _ = CrossAttention(first, second, layers, route)(*batch())  # type: ignore[arg-type]
    assert main is not None
    return *main, *side


def gradients(backbone: Backbone, part: str) -> float:
    """The largest gradient of the parameters whose name holds ``part``; 0 where none has any."""
    named = [p for n, p in backbone.named_parameters() if part in n]
    assert named, f"no parameter with {part}"
    return max((float(p.grad.abs().max()) for p in named if p.grad is not None), default=0.0)


@pytest.mark.parametrize("route", ["query_owner", "value_owner"])
def test_invariant_21_gradient_routing_at_a_cross_attention_layer(tiny: Tiny, route: str) -> None:
    """From T1 alone, with one exchange in the last layer."""
    first, second = tower(tiny, seed=0), tower(tiny, seed=1)
    last = f"layer.{LAYERS - 1}."
    _, _, t1, _ = streams(first, second, (LAYERS,), route)
    t1[-1][:, 0].square().sum().backward()
    # C1 = P1 V2 flows into tower 1 (query owner), or P2 V1 does (value owner).
    maps, values = (first, second) if route == "query_owner" else (second, first)
    assert gradients(maps, last + "attention.self.query") > 1e-6
    assert gradients(maps, last + "attention.self.key.weight") > 1e-6
    assert gradients(values, last + "attention.self.value") > 1e-6
    assert gradients(first, last + "attention.output.dense") > 1e-6
    assert gradients(first, last + "intermediate.dense") > 1e-6
    assert gradients(first, last + "output.dense") > 1e-6
    assert gradients(values, last + "attention.self.query") == 0
    assert gradients(values, last + "attention.self.key") == 0
    assert gradients(maps, last + "attention.self.value") == 0
    assert gradients(second, last + "attention.output.dense") == 0
    assert gradients(second, last + "intermediate.dense") == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_invariant_16_equal_towers_exchange_nothing(tiny: Tiny, kind: str, attention: str) -> None:
    one, two = tower(tiny, kind, attention=attention), tower(tiny, kind, attention=attention)
    h1, h2, t1, t2 = streams(one, two, cross_layers(2, LAYERS))
    for h, t in zip((*h1, *h2), (*t1, *t2), strict=True):
        assert torch.equal(h, t)


@pytest.mark.parametrize("kind", KINDS)
def test_different_towers_differ_from_the_first_exchange_on(tiny: Tiny, kind: str) -> None:
    h1, _, t1, _ = streams(tower(tiny, kind, 0), tower(tiny, kind, 1), (2, 4))
    assert len(t1) == LAYERS + 1
    assert torch.equal(h1[0], t1[0])
    assert torch.equal(h1[1], t1[1])
    for m in (2, 3, 4):
        assert (h1[m] - t1[m]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["query_owner", "value_owner"])
def test_a_layer_equals_the_formula_written_out(tiny: Tiny, kind: str, route: str) -> None:
    """C1 = softmax(Q1 K1^T / sqrt(d) + M) V2, head by head, then the rest of the layer."""
    first, second = tower(tiny, kind, 0), tower(tiny, kind, 1)
    mask = batch()[1]
    h1, h2, t1, t2 = streams(first, second, (LAYERS,), route)
    parts = block_adapter(first, "test"), block_adapter(second, "test")
    m = LAYERS - 1
    frames = [p.frame(h[0], mask) for p, h in zip(parts, (h1, h2), strict=True)]
    heads = [p.project(m, h[m], f) for p, h, f in zip(parts, (h1, h2), frames, strict=True)]
    maps = []
    for q, k, _ in heads:
        rows = torch.empty(*q.shape[:3], q.shape[2])
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                scores = q[b, h] @ k[b, h].T / math.sqrt(q.shape[-1])
                rows[b, h] = scores.masked_fill(mask[b, None] == 0, -math.inf).softmax(-1)
        maps.append(rows)
    for p, h, f, written in zip(parts, heads, frames, maps, strict=True):
        real = mask[:, None, :, None].bool().expand_as(written)
        torch.testing.assert_close(p.weights(m, h, f)[real], written[real])
    contexts = [
        (maps[0] @ heads[1].value).transpose(1, 2).flatten(2),
        (maps[1] @ heads[0].value).transpose(1, 2).flatten(2),
    ]
    if route == "value_owner":
        contexts.reverse()
    real = mask.bool()
    for p, context, h, t in zip(parts, contexts, (h1, h2), (t1, t2), strict=True):
        torch.testing.assert_close(
            p.last(p.finish(m, context, h[m]))[real], t[-1][real], rtol=1e-4, atol=1e-5
        )


def test_invariant_17_swapped_towers_give_swapped_streams(tiny: Tiny) -> None:
    first, second = tower(tiny, seed=0), tower(tiny, seed=1)
    _, _, t1, t2 = streams(first, second, (2, 4))
    _, _, s1, s2 = streams(second, first, (2, 4))
    assert torch.equal(t1[-1], s2[-1])
    assert torch.equal(t2[-1], s1[-1])


def test_invariant_18_without_exchange_the_side_is_the_main_stream(tiny: Tiny) -> None:
    first, second = tower(tiny, seed=0), tower(tiny, seed=1)
    h1, h2, t1, t2 = streams(first, second, ())
    assert torch.equal(t1[-1], h1[-1])
    assert torch.equal(t2[-1], h2[-1])
    for layers in ((4,), (2, 4), (1, 2, 3, 4)):
        again = streams(first, second, layers)
        assert torch.equal(again[0][-1], h1[-1])
        assert torch.equal(again[1][-1], h2[-1])


@pytest.mark.parametrize("kind", [*KINDS, "xlm-roberta"])
def test_the_main_streams_are_the_backbones_own_forward_pass(tiny: Tiny, kind: str) -> None:
    first, second = tower(tiny, kind, 0), tower(tiny, kind, 1)
    ids, mask = batch()
    h1, h2, _, _ = streams(first, second, (2, 4))
    for states, backbone in ((h1, first), (h2, second)):
        for ours, theirs in zip(states, backbone(ids, mask, all_layers=True), strict=True):
            assert torch.equal(ours, theirs)
    left = ids.flip(1), mask.flip(1)  # padding on the left
    main, *_ = CrossAttention(first, second, (4,))(*left)
    assert main is not None
    assert torch.equal(main[0][-1], first(*left)[-1])
    assert CrossAttention(first, second, (4,))(ids, mask, main=False).main is None


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_19_padding_changes_no_first_token(tiny: Tiny, kind: str) -> None:
    cross = CrossAttention(tower(tiny, kind, 0), tower(tiny, kind, 1), (2, 4))
    ids, mask = batch()

    def first_tokens(ids: Tensor, mask: Tensor) -> Tensor:
        main, side, _ = cross(ids, mask)
        assert main is not None
        return torch.cat([states[-1][:, 0] for states in (*main, *side)], 1)

    lengths = mask.sum(1).tolist()
    narrow = [first_tokens(ids[i : i + 1, :n], mask[i : i + 1, :n]) for i, n in enumerate(lengths)]
    wide = first_tokens(torch.cat([ids, ids.new_zeros(4, 6)], 1), torch.cat([mask, mask.new_zeros(4, 6)], 1))
    torch.testing.assert_close(torch.cat(narrow), wide, rtol=1e-4, atol=1e-5)


def test_a_compiled_tower_stays_in_one_piece(tiny: Tiny) -> None:
    """No hook of transformers in the blocks, at which compilation would break; both streams call them alike."""
    from torch._dynamo.utils import counters

    first, second = tower(tiny, seed=0).train(), tower(tiny, seed=1).train()
    torch._dynamo.reset()
    counters.clear()
    for backbone in (first, second):
        backbone.compile_blocks(dynamic=False, backend="eager", fullgraph=True)
    assert CrossAttention(first, second, (2, 4))(*batch()).main is not None
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_attention_dropout_is_on_in_training_and_differs_between_views(tiny: Tiny) -> None:
    first, second = tower(tiny, seed=0).train(), tower(tiny, seed=1).train()
    parts = block_adapter(first, "test")
    ids, mask = batch()
    states = first.eval()(ids, mask, all_layers=True)
    first.train()
    frame = parts.frame(states[0], mask)
    heads = parts.project(1, states[1], frame)
    assert not torch.equal(parts.attend(1, heads, frame), parts.attend(1, heads, frame))
    first.eval()
    assert torch.equal(parts.attend(1, heads, frame), parts.attend(1, heads, frame))
    assert second.training


def test_cross_layers_are_equally_spaced_and_divide_the_depth() -> None:
    assert cross_layers(3, 12) == (4, 8, 12)
    assert cross_layers(6, 12) == (2, 4, 6, 8, 10, 12)
    assert cross_layers(1, 12) == (12,)
    assert cross_layers(3, 6) == (2, 4, 6)
    for n, layers in ((5, 12), (4, 6), (0, 12), (12, 6)):
        with pytest.raises(UserError, match=r"method\.n_ca"):
            cross_layers(n, layers)


def test_in_stream_wiring_takes_the_state_after_the_last_inner_exchange() -> None:
    states = tuple(torch.full((1,), float(i)) for i in range(13))
    assert last_exchange(states, (4, 8, 12)).item() == 8
    assert last_exchange(states, (12,)).item() == 12


def test_towers_must_fit_each_other(tiny: Tiny) -> None:
    check_alike(tower(tiny, seed=0), tower(tiny, seed=1))
    with pytest.raises(UserError, match="layers 4 and 2"):
        check_alike(tower(tiny), tower(tiny, layers=2))
    with pytest.raises(UserError, match="model_type"):
        check_alike(tower(tiny), tower(tiny, "distilbert"))


def test_a_decoder_has_no_side_stream(tiny: Tiny) -> None:
    llama = tower(tiny, "llama")
    with pytest.raises(UserError, match="cross-attention"):
        CrossAttention(llama, llama, (4,))
