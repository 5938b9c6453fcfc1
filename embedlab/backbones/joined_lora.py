"""LoRA layers that read one input, as one layer (`embedlab.kernels.lora`), while a captured step computes.

A block calls its layers one by one: the first of a group computes all of them, the others hand on their part. Other
arithmetic than PEFT's by rounding alone: under autocast base and update are summed in fp32 and handed on so, as
`embedlab.backbones.adapters` has PEFT's layers do. Each step copies the frozen weights, joined with the updates, which
live until its backward pass: ``EMBEDLAB_KERNELS=joined_lora=0`` goes without, where a large base leaves no room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from embedlab.kernels.available import is_transformers, kernel_options
from embedlab.kernels.lora import is_plain_lora, lora_linear, share_of

_KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma3", "SmolLM3", "Olmo2", "Granite")
_TOGETHER = {f"{kind}Attention": ("q_proj", "k_proj", "v_proj") for kind in _KINDS} | {
    f"{kind}MLP": ("gate_proj", "up_proj") for kind in _KINDS
}
"""Layers that a module calls in this order with one input, by classes of transformers 5.17 to 5.24; of others each
layer is a group of its own."""


class _Group:
    """Layers of one input; `waiting` are the outputs that have not been asked for yet, first to last."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.waiting: list[Tensor] = []

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        if layer is self.layers[0]:
            self.waiting = list(self._outputs(x))
        return self.waiting.pop(0)

    def _outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        layers, kind = self.layers, x.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
        downs = [layer.lora_A["default"].weight for layer in layers]
        ups = [layer.lora_B["default"].weight * layer.scaling["default"] for layer in layers]
        ranks = [up.shape[1] for up in ups]
        rows = []
        for i, (layer, up) in enumerate(zip(layers, ups, strict=True)):
            before, after = sum(ranks[:i]), sum(ranks[i + 1 :])
            up = nn.functional.pad(up, (before, after))
            rows.append(torch.cat([layer.base_layer.weight.to(dtype), up.to(dtype)], 1))
        weight = torch.cat(rows)
        seed = torch.randint(2**31 - 1, (1,), device=x.device)
        with torch.autocast(kind, enabled=False):
            y, *_ = lora_linear(
                x.reshape(-1, x.shape[-1]).to(dtype),
                torch.stack(downs).to(dtype),
                weight[:, x.shape[-1] :],
                weight.detach(),
                seed,
                share_of(layers[0]),
                autocast,
            )
        outputs = y.view(*x.shape[:-1], -1).split([r.shape[0] for r in rows], -1)
        biases = [layer.base_layer.bias for layer in layers]
        return tuple(o if b is None else o + b.to(o.dtype) for o, b in zip(outputs, biases, strict=True))


class _Part:
    """The forward of a layer of a group."""

    group: _Group

    def forward(self, x: Tensor) -> Tensor:
        return self.group(self, x)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _part_class(of: type[nn.Module]) -> type[nn.Module]:
    """The class with the other forward; another class, so that compiled code knows the two apart."""
    if of not in _CLASSES:
        _CLASSES[of] = type(f"Joined{of.__name__}", (_Part, of), {"__module__": __name__})
    return _CLASSES[of]


@contextmanager
def joined(model: nn.Module) -> Iterator[None]:
    """The model's LoRA layers compute in groups, where there are some that can."""
    groups = [_Group(layers) for layers in _groups(model)] if kernel_options().joined_lora else []
    parts = [(layer, group, type(layer)) for group in groups for layer in group.layers]
    for layer, group, plain in parts:
        layer.__dict__["group"] = group
        layer.__class__ = _part_class(plain)
    try:
        yield
    finally:
        for layer, _, plain in parts:
            layer.__class__ = plain
            del layer.__dict__["group"]


def _groups(model: nn.Module) -> list[list[Any]]:
    found, taken = [], set()
    for module in model.modules():
        names = _TOGETHER.get(type(module).__name__, ()) if is_transformers(module) else ()
        layers = [module._modules.get(name) for name in names]
        if layers and all(is_plain_lora(layer) for layer in layers) and _alike(layers):
            found.append(layers)
            taken |= {id(layer) for layer in layers}
    return found + [[m] for m in model.modules() if is_plain_lora(m) and id(m) not in taken]


def _alike(layers: list[Any]) -> bool:
    """Whether layers differ in their outputs' width alone."""
    facts = {
        (
            layer.lora_A["default"].weight.shape,
            getattr(layer.lora_dropout["default"], "p", 0.0),
            layer.training,
        )
        for layer in layers
    }
    return len(facts) == 1
