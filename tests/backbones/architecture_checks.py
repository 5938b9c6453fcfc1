"""What is claimed of an architecture, checked on a tiny random model of it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from embedlab.backbones import Backbone, load_backbone
from embedlab.backbones.adapters import adapt, merged
from embedlab.backbones.architecture import has_layer_states, is_encoder_decoder
from embedlab.backbones.load import write_model
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.objectives.info_nce import info_nce
from tests.model_zoo import tiny_words

TOLERANCE = 1e-5
LENGTHS = (11, 4, 7)
LORA = AdapterConfig("lora", r=2, dropout=0.0)


def load(folder: Path) -> Backbone:
    return load_backbone(BackboneConfig(source="local", path=str(folder)))[0]


def rows() -> list[Tensor]:
    """Sentences in the tokenizer's frame, [1, L] each."""
    generator = torch.Generator().manual_seed(1)
    inner = [torch.randint(5, 100, (n - 2,), generator=generator) for n in LENGTHS]
    return [torch.cat([torch.tensor([0]), ids, torch.tensor([2])])[None] for ids in inner]


def batch(side: str, ids: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(LENGTHS) + 2
    table = torch.full((len(ids), longest), 1)
    mask = torch.zeros_like(table)
    for i, row in enumerate(ids):
        at = slice(0, row.shape[1]) if side == "right" else slice(longest - row.shape[1], longest)
        table[i, at], mask[i, at] = row[0], 1
    return table, mask


def by_hugging_face(folder: Path, backbone: Backbone, ids: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Each sentence by itself through Hugging Face's own class: the states after each layer, or the last alone."""
    whole: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    model = whole.get_encoder() if is_encoder_decoder(whole.config) else whole
    found = []
    for row in ids:
        more: dict[str, Tensor] = {}
        if backbone.info.model_type == "xlnet":  # as its tokenizer says
            more["token_type_ids"] = torch.zeros_like(row)
            more["token_type_ids"][0, -1] = 2
        if "use_cache" in inspect.signature(model.forward).parameters:
            more["use_cache"] = False  # type: ignore[assignment]
        out = model(input_ids=row, output_hidden_states=True, **more)
        every = has_layer_states(backbone.info.model_type)
        found.append((*(out.hidden_states[:-1] if every else ()), out.last_hidden_state))
    return found


def check_states(folder: Path, backbone: Backbone) -> None:
    """Hidden states are Hugging Face's: single, and padded on either side."""
    ids = rows()
    every = has_layer_states(backbone.info.model_type)
    with torch.no_grad():
        expected = by_hugging_face(folder, backbone, ids)
        assert not every or len(expected[0]) == backbone.info.layers + 1
        assert not every or expected[0][0].shape[-1] == backbone.info.inner_width
        for row, theirs in zip(ids, expected, strict=True):
            for mask in (None, torch.ones_like(row)):
                same(backbone(row, mask, all_layers=every), theirs)
        for side in ("right", "left"):
            table, mask = batch(side, ids)
            ours = backbone(table, mask, all_layers=every)
            same(backbone(table, mask), ours[-1:])
            for i, theirs in enumerate(expected):
                same(tuple(h[i][mask[i].bool()][None] for h in ours), theirs)


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], atol: float = TOLERANCE) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def check_facts(backbone: Backbone) -> None:
    """Its kind, width and longest row are those that its configuration was read to say."""
    row = rows()[0]
    other = row.clone()
    other[0, -2] = (other[0, -2] + 7) % 90 + 5
    with torch.no_grad():
        first, second = (backbone(r, torch.ones_like(r))[0][0, :4] for r in (row, other))
        longest = torch.randint(5, 100, (1, min(backbone.info.max_positions or 40, 100)))
        assert backbone(longest, torch.ones_like(longest))[0].isfinite().all()
    sees_what_comes = float((first - second).abs().max()) > 10 * TOLERANCE
    assert sees_what_comes == (backbone.info.kind == "encoder")
    assert first.shape[1] == backbone.info.width


def check_step(backbone: Backbone) -> list[str]:
    """One step of SimCSE gives finite gradients, and the dropout that is set is used; returns weights without one."""
    backbone.train().zero_grad()
    table, mask = batch("right", rows())
    torch.manual_seed(0)
    views = [backbone(table, mask)[0] for _ in range(2)]
    pooled = [(h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for h in views]
    loss = info_nce(pooled[0], pooled[1], 0.05).loss
    loss.backward()
    assert loss.isfinite()
    trained = {n: p for n, p in backbone.named_parameters() if p.requires_grad}
    assert all(p.grad.isfinite().all() for p in trained.values() if p.grad is not None)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values())
    backbone.eval()
    return [n for n, p in trained.items() if p.grad is None]


def check_written(backbone: Backbone, folder: Path) -> None:
    """What this project writes gives the same states, here and in Hugging Face's class."""
    folder.mkdir()
    write_model(backbone, folder)
    tiny_words().save_pretrained(folder)
    ids = rows()
    with torch.no_grad():
        ours = [backbone(row, torch.ones_like(row)) for row in ids]
        again = load(folder)
        for row, states, theirs in zip(ids, ours, by_hugging_face(folder, backbone, ids), strict=True):
            same(again(row, torch.ones_like(row)), states)
            same(theirs[-1:], states)


def check_adapters(folder: Path) -> None:
    """LoRA trains, and merged into the weights it gives the same states."""
    config = BackboneConfig(source="local", path=str(folder))
    backbone = load_backbone(config)[0]
    adapt(backbone, LORA, config, torch.device("cpu"))
    check_step(backbone)
    with torch.no_grad():
        for name, p in backbone.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
        row = rows()[0]
        same(
            merged(backbone).eval()(row, torch.ones_like(row)),
            backbone(row, torch.ones_like(row)),
            10 * TOLERANCE,
        )


def check_compiled(backbone: Backbone) -> None:
    """Compiled blocks give the same states (by the tracer alone; the code that it makes is not this project's)."""
    row = rows()[0]
    mask = torch.ones_like(row)
    with torch.no_grad():
        plain = backbone(row, mask)
        backbone.compile_blocks(backend="eager")
        same(backbone(row, mask), plain)
