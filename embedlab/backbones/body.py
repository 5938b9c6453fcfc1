"""A headless Hugging Face model with what the rest of this room asks of it: its facts, kernel and blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlab.backbones.architecture import find_blocks, position_offset, reads_with

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo


class Body(nn.Module):
    """The model of a `Backbone`, without its forward pass.

    Args:
        model: headless.
        info: of it.
        attention: the kernel in use.
    """

    def __init__(self, model: Any, info: BackboneInfo, attention: str) -> None:
        super().__init__()
        self.model = model
        self.info = info
        self.attention = attention
        self.compiled = False
        self.low_precision_weights = False
        """Whether the weights have the compute type, as in a captured step."""
        self.position_offset = position_offset(model.config)

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, first to last."""
        return find_blocks(self.model, self.info.layers)

    @property
    def reader(self) -> Any:
        """The module whose forward pass gives the hidden states: the model, or its encoder."""
        return reads_with(self.model)

    def autocast_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """For code that runs blocks by itself: low-precision weights are computed with as they are."""
        return torch.autocast(device.type, enabled=False) if self.low_precision_weights else nullcontext()


def token_positions(attention_mask: Tensor, offset: int = 0) -> Tensor:
    """Position ids, ``[B, L]``: those of real tokens counted from the mask, so that padding on the left shifts nothing.

    Padding has what transformers gives it on the right, for poolings that count it as released code does.

    Args:
        attention_mask: [B, L], 1 at real tokens.
        offset: position of the first one; where it is not 0, padding has the position before.
    """
    real = attention_mask.long()
    padding = torch.full_like(real, offset - 1)
    if offset == 0:
        padding = torch.arange(real.shape[-1], device=real.device).expand_as(real)
    return torch.where(real.bool(), real.cumsum(-1) - 1 + offset, padding)
