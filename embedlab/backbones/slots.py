"""The rows of a batch one after another without their padding, as a backbone's embeddings and blocks take them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from embedlab.backbones.body import Body
from embedlab.kernels.packing import FullRows, Slots, row_capacity


class InSlots(NamedTuple):
    """Token ids and positions in slots."""

    ids: Tensor
    """``[1, C]``."""
    positions: Tensor
    """``[1, C]``."""
    slots: Slots | FullRows
    longest: int
    """At least the tokens of every row; few distinct numbers."""

    @property
    def bounds(self) -> dict[str, Any]:
        """What transformers' blocks hand on to attention."""
        return {"cu_seq_lens_q": self.slots.bounds, "max_length_q": self.longest}


def in_slots(
    body: Body, input_ids: Tensor, mask: Tensor | None, capacity: int, position_ids: Tensor | None = None
) -> InSlots:
    """The rows of ``input_ids`` [B, L] in `capacity` slots.

    Args:
        body: whose padding token and first position unused slots have.
        input_ids: [B, L].
        mask: [B, L], 1 at the true tokens; None: all are, and there is a slot for each whatever `capacity` is.
        capacity: slots C; at least the true tokens.
        position_ids: [B, L]; None: counted from each row's first token.
    """
    slots = FullRows(input_ids) if mask is None else Slots(mask, capacity)
    ids = slots.pack(input_ids, body.model.config.pad_token_id or 0)
    if position_ids is None:
        positions = slots.index[None] + body.position_offset
    else:
        positions = slots.pack(position_ids, body.position_offset)
    return InSlots(ids, positions, slots, row_capacity(input_ids.shape[1]))
