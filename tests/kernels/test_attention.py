"""The forward pass: no look at values on the host, one graph for the compiler, no influence of padding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embedlab.backbones import Backbone, load_backbone
from embedlab.config.backbone import BackboneConfig
from tests.support import DECODERS, ENCODERS, MODEL_TYPES

Tiny = Callable[..., Path]


class NoHostReads(TorchDispatchMode):
    """Fails where a tensor's value is asked for: what a CUDA graph cannot capture.

    One number, drawn by itself, is the host's whatever the device is; OPT draws and reads one for each layer
    of a step (transformers 5.17; 5.24 only where it is wanted).
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_the_host: set[int] = set()
        self._kept: list[Any] = []  # so that no other tensor gets its id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in args if isinstance(a, torch.Tensor)]
        ours = {id(a) for a in given} <= self._of_the_host
        reads = any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "unique"))
        if reads and not ours:
            raise AssertionError(f"the host waits for the device: {func}")
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 0 and (ours if given else "rand" in str(func)):
            self._of_the_host.add(id(out))
            self._kept.append(out)
        return out


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def load(tiny: Tiny, model_type: str, attention: str = "sdpa", **arch: Any) -> Backbone:
    path = str(tiny(model_type, **arch))
    return load_backbone(BackboneConfig(source="local", path=path, attention=attention))[0]


def batch(padded: bool = True, side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(10, 200, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 5:] = 0
        mask[2, 1:] = 0
    return ids, mask if side == "right" else mask.flip(1)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_value_is_read_on_the_host(tiny: Tiny, model_type: str) -> None:
    backbone = load(tiny, model_type)
    backbone.train()
    for padded in (True, False):
        ids, mask = batch(padded)
        with NoHostReads():
            backbone(ids, mask)[0].sum().backward()
            backbone(ids, mask, all_layers=True)
            backbone(ids, None)


def test_transformers_own_sdpa_would_read_them(tiny: Tiny) -> None:
    """What this is for; where it no longer fails, `embedlab.kernels.attention` can go."""
    backbone = load(tiny, "bert")
    backbone.model.set_attn_implementation("sdpa")
    with pytest.raises(AssertionError, match="host waits"), NoHostReads():
        backbone(*batch())


@pytest.mark.parametrize(
    ("model_type", "all_layers"),
    [("bert", False), ("bert", True), ("distilbert", False), ("modernbert", False), ("llama", True)],
)
def test_one_graph_for_the_compiler(tiny: Tiny, model_type: str, all_layers: bool) -> None:
    backbone = load(tiny, model_type, layers=1)
    if all_layers:
        backbone.prepare_all_layers()
    ids, mask = batch()
    compiled = torch.compile(backbone, fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        for ours, eager in zip(
            compiled(ids, mask, all_layers=all_layers),
            backbone(ids, mask, all_layers=all_layers),
            strict=True,
        ):
            torch.testing.assert_close(ours, eager, rtol=0, atol=1e-6)


def test_one_graph_under_autocast_and_without_a_mask(tiny: Tiny) -> None:
    backbone = load(tiny, "bert", layers=1)
    ids, mask = batch()
    compiled = torch.compile(backbone, fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(ids, mask)[0], backbone(ids, mask)[0])
        torch.testing.assert_close(compiled(ids)[0], backbone(ids)[0])


def test_blocks_compiled_in_place_keep_names_and_vectors(tiny: Tiny) -> None:
    """Pitfall 40; and the hooks by which transformers collects all layers still work."""
    backbone = load(tiny, "bert")
    plain = copy.deepcopy(backbone)
    backbone.compile_blocks(backend="eager")
    assert backbone.compiled
    assert list(backbone.state_dict()) == list(plain.state_dict())
    ids, mask = batch()
    with torch.no_grad():
        for all_layers in (False, True, False):
            ours, eager = backbone(ids, mask, all_layers=all_layers), plain(ids, mask, all_layers=all_layers)
            assert len(ours) == len(eager) == (3 if all_layers else 1)
            for a, b in zip(ours, eager, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_has_no_influence(tiny: Tiny, model_type: str, attention: str) -> None:
    """Pitfalls 28 to 30: every layer of each real token, padded left, right or not, alone or in a batch."""
    backbone = load(tiny, model_type, attention)
    rows = [torch.randint(10, 200, (1, n), generator=torch.Generator().manual_seed(n)) for n in (1, 4, 12)]
    with torch.no_grad():
        alone = [backbone(r, all_layers=True) for r in rows]
        for side in ("right", "left"):
            for extra in (0, 3):
                ids = torch.full((3, 12 + extra), 7)
                mask = torch.zeros_like(ids)
                for i, row in enumerate(rows):
                    n = row.shape[1]
                    at = slice(0, n) if side == "right" else slice(12 + extra - n, None)
                    ids[i, at], mask[i, at] = row[0], 1
                for got, expected in zip(
                    backbone(ids, mask, all_layers=True), zip(*alone, strict=True), strict=True
                ):
                    assert torch.isfinite(got).all()
                    for i, one in enumerate(expected):
                        torch.testing.assert_close(got[i][mask[i].bool()], one[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("model_type", ["mistral", "modernbert"])
def test_sliding_windows_are_kept(tiny: Tiny, model_type: str) -> None:
    key = {"mistral": {"sliding_window": 4}, "modernbert": {"local_attention": 4, "layers": 3}}[model_type]
    ours, eager = load(tiny, model_type, **key), load(tiny, model_type, "eager", **key)
    wide = load(
        tiny,
        model_type,
        **(key | ({"sliding_window": 64} if model_type == "mistral" else {"local_attention": 64})),
    )
    ids, mask = batch()
    with torch.no_grad():
        a, b, c = (m(ids, mask)[0][mask.bool()] for m in (ours, eager, wide))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        assert (a - c).abs().max() > 1e-3
        torch.testing.assert_close(ours(ids)[0], eager(ids)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_mask_is_a_mask_of_ones(tiny: Tiny, model_type: str) -> None:
    backbone = load(tiny, model_type)
    ids, mask = batch(padded=False)
    with torch.no_grad():
        torch.testing.assert_close(backbone(ids)[0], backbone(ids, mask)[0], rtol=0, atol=1e-5)


def test_a_decoder_looks_back_only_and_an_encoder_both_ways(tiny: Tiny) -> None:
    ids, mask = batch(padded=False)
    changed = ids.clone()
    changed[:, -1] += 1
    for model_type in MODEL_TYPES:
        backbone = load(tiny, model_type)
        with torch.no_grad():
            moved = (backbone(ids, mask)[0] - backbone(changed, mask)[0])[:, :-1].abs().max()
        assert (moved > 1e-4) == (model_type in ENCODERS), model_type
        assert (moved == 0) == (model_type in DECODERS), model_type


def test_given_positions_are_taken(tiny: Tiny) -> None:
    """PromptBERT's template-only pass shifts the suffix."""
    backbone = load(tiny, "bert")
    ids, mask = batch(padded=False)
    counted = torch.arange(12).expand(3, -1)
    with torch.no_grad():
        plain = backbone(ids, mask)[0]
        torch.testing.assert_close(backbone(ids, mask, position_ids=counted)[0], plain)
        assert (backbone(ids, mask, position_ids=counted + 5)[0] - plain).abs().max() > 1e-3
