"""The modules that sentence-transformers puts after a transformer: pooling modes side by side, then dense layers.

Source: sentence_transformers 6.2, modules Pooling, Dense, LayerNorm and Normalize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.errors import UserError
from embedlab.objectives.precision import to_fp32
from embedlab.pooling.base import Marks, Pooling, first_index, last_index, mean_tokens, token_at

Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU", "LeakyReLU", "ELU", "Mish", "Softplus")
"""Classes of `torch.nn` that a dense layer may name."""


@dataclass(frozen=True)
class ModulesConfig(PoolingConfig):
    """Pooling modes and what follows.

    Args:
        modes: each gives a vector as wide as the model; several stand side by side.
        head: modules in their order, each by its ``kind``: ``dense`` (with ``out``; ``bias`` true, ``activation``
            of `ACTIVATIONS`, ``residual`` false), ``layer_norm`` or ``normalize``.
    """

    name: str = "modules"
    modes: tuple[Mode, ...] = ("mean",)
    head: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.modes:
            raise UserError("no pooling mode", key="pooling.modes", value=[], fix="pooling.modes=[mean]")


class Dense(nn.Module):
    """activation(W x + b), and with `residual` x added (through a projection, where the widths differ)."""

    def __init__(
        self, width: int, out: int, bias: bool = True, activation: str = "Tanh", residual: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UserError(
                "unknown activation",
                key="pooling.head.activation",
                value=activation,
                fix=", ".join(ACTIVATIONS),
            )
        self.linear = nn.Linear(width, out, bias=bias)
        self.activation = getattr(nn, activation)()
        self.adds = residual
        if residual and width != out:
            self.residual = nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] to [B, out]."""
        y: Tensor = self.activation(self.linear(x))
        return y + (self.residual(x) if hasattr(self, "residual") else x) if self.adds else y


class Normalize(nn.Module):
    """To length 1."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        return nn.functional.normalize(x, dim=-1)


class Modules(Pooling):
    """Pooling modes over the last layer, then dense layers."""

    config_class = ModulesConfig

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__(config, info)
        self.settings = cast(ModulesConfig, config)
        width = self.input_width = info.width * len(self.settings.modes)
        parts: list[nn.Module] = []
        for values in self.settings.head:
            settings = dict(values)
            kind = settings.pop("kind", None)
            try:
                parts.append(_part(kind, width, settings))
            except TypeError:
                raise UserError(
                    "unknown module or key",
                    key="pooling.head",
                    value=values,
                    fix="dense, layer_norm or normalize",
                ) from None
            width = settings.get("out", width)
        self.head = nn.Sequential(*parts)
        self.dim = width

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        last = to_fp32(hidden[-1])
        pooled = torch.cat([_pooled(mode, last, attention_mask) for mode in self.settings.modes], dim=-1)
        with torch.autocast(pooled.device.type, enabled=False):
            given = next((p.dtype for p in self.head.parameters()), pooled.dtype)
            dtype = torch.promote_types(given, torch.float32)
            if dtype == given:
                return cast(Tensor, self.head(pooled.to(dtype)))
            wide = {name: p.to(dtype) for name, p in self.head.named_parameters()}
            return cast(Tensor, torch.func.functional_call(self.head, wide, pooled.to(dtype)))


def _part(kind: Any, width: int, settings: dict[str, Any]) -> nn.Module:
    if kind == "dense":
        return Dense(width, **settings)
    if settings or kind not in ("layer_norm", "normalize"):
        raise TypeError
    return nn.LayerNorm(width) if kind == "layer_norm" else Normalize()


def _pooled(mode: Mode, last: Tensor, mask: Tensor) -> Tensor:
    """One mode over `last` [B, L, D]: [B, D]."""
    match mode:
        case "cls":
            return token_at(last, first_index(mask))
        case "lasttoken":
            return token_at(last, last_index(mask)).where(mask.any(dim=1)[:, None], 0.0)
        case "max":
            largest = last.masked_fill(~mask.bool()[..., None], -torch.inf).amax(dim=1)
            return largest.where(
                mask.any(dim=1)[:, None], 0.0
            )  # a prompt that is left out may be all there is
        case "weightedmean":
            # A token's weight is its position in the row, from 1 on, as in SGPT (arXiv:2202.08904, eq. 2).
            weights = (
                torch.arange(mask.shape[1], device=mask.device) - first_index(mask)[:, None] + 1
            ) * mask
            kept = last.masked_fill(~mask.bool()[..., None], 0.0)
            return (kept * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1).to(
                last.dtype
            )
    mean = mean_tokens(last, mask)
    return mean if mode == "mean" else mean * mask.sum(1, keepdim=True).to(last.dtype).sqrt()
