"""Templates without a sentence, at the positions that sentences of any length give them (PromptBERT)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embedlab.encoders.tokenization import Tokenization


class BareTemplates(nn.Module):
    """Rows of several templates, made on the device with shapes that do not depend on values.

    Args:
        templates: with the same tokenizer.
        offset: position id of a row's first token (RoBERTa: 2).
    """

    ids: Tensor
    length: Tensor
    slot: Tensor

    def __init__(self, templates: Sequence[Tokenization], offset: int) -> None:
        super().__init__()
        self.offset = offset
        width = max(t.overhead for t in templates)
        rows = [t.prefix_ids + t.suffix_ids for t in templates]
        filled = [row + [templates[0].pad_id] * (width - len(row)) for row in rows]
        self.register_buffer("ids", torch.tensor(filled), persistent=False)
        self.register_buffer("length", torch.tensor([[len(row)] for row in rows]), persistent=False)
        self.register_buffer("slot", torch.tensor([[len(t.prefix_ids)] for t in templates]), persistent=False)

    def forward(self, templates: int, lengths: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, mask and position ids of the first templates, ``[templates * lengths, W]``, padded right.

        Row ``lengths * i + t`` is template i with every token after the slot moved on by t.
        """
        position = torch.arange(self.ids.shape[1], device=self.ids.device)
        real = position < self.length[:templates]
        moved = real & (position >= self.slot[:templates])
        by = torch.arange(lengths, device=position.device)[:, None]
        positions = self.offset + torch.where(real, position, 0)[:, None] + by * moved[:, None]

        def repeated(x: Tensor) -> Tensor:
            return x[:, None].expand(-1, lengths, -1).flatten(0, 1)

        return repeated(self.ids[:templates]), repeated(real.long()), positions.flatten(0, 1)
