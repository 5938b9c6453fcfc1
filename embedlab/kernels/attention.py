"""`sdpa` attention whose mask is built without its values.

transformers skips the mask where every token is real, which it finds out with `mask.all()`: the host waits
for the device in every forward, and no CUDA graph can be captured. Here the decision is by shape and
argument alone, through transformers' own extension points (`AttentionInterface`, `AttentionMaskInterface`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

NAME = "embedlab_sdpa"
_PLAIN = (bidirectional_mask_function, causal_mask_function)


def additive_mask(**request: Any) -> Tensor | None:
    """The mask of one forward, [B, 1, L, L]: 0 where a token may look, -inf where not; in autocast's dtype.

    None where no mask was given and the plain kernels (with their causal flag) do the same: no padding.
    `request` is what transformers asks its mask builders for.
    """
    dtype = request.get("dtype", torch.float32)
    plain = request.get("mask_function", causal_mask_function) in _PLAIN
    if request.get("attention_mask") is None and plain and request.get("local_size") is None:
        return None
    allowed = sdpa_mask(**{**request, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert allowed is not None
    # What would see nothing (padding before the first token of a decoder) sees itself: the softmax over nothing is
    # NaN in some kernels. Other padding sees what transformers lets it see, for poolings that count it.
    length = torch.arange(allowed.shape[-1], device=allowed.device)
    itself = length[-allowed.shape[-2] :, None] == length
    allowed = allowed | (itself & ~allowed.any(-1, keepdim=True))
    kind = allowed.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    # A boolean mask would be turned into this in every layer.
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def register() -> str:
    """Make the attention known to transformers; returns its name for `attn_implementation`."""
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, additive_mask)
    return NAME
