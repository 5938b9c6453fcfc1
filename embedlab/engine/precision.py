"""bf16-true with adapters: the frozen base in bf16, what is trained in fp32."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import Precision
from torch import nn


class FrozenHalf(Precision):
    """Half the memory of the base, and no lost updates: a bf16 weight does not change by less than 1 / 256 of itself.

    Lightning's own bf16-true would round the adapters too, and make bf16 the type of every new tensor in a step.
    """

    precision = "bf16-true"

    def convert_module(self, module: nn.Module) -> nn.Module:
        for p in module.parameters():
            if not p.requires_grad and p.is_floating_point():
                p.data = p.data.to(torch.bfloat16)
        return module
