"""What every pooling shares: its contract, and how to find tokens by the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.kernels.packed_rows import PackedRows
from embedlab.objectives.precision import to_fp32

Marks = Mapping[str, int]
"""Mark name to its distance from a row's last real token (0: the last); `Tokenization.marks`."""
Token = Literal["cls", "last", "mask"]
"""A row's first real token, its last one, or the ``{mask}`` of the template."""


class Pooling(nn.Module):
    """Hidden states of a batch to one vector a row.

    A subclass is a pure function of the real tokens: the same for left, right and no padding, whatever stands
    in the padding, and whoever the batch mates are. It computes in fp32 at least, also under autocast.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[PoolingConfig]]
    """Its settings, whose name is the pooling's; they stand in the same file."""
    needs_all_layers: bool = False
    """Whether `forward` gets all N + 1 hidden states, or a tuple of the last one only."""
    dim: int
    """Width of the vectors."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "config_class" in vars(cls):
            cls.name = cls.config_class.name  # type: ignore[misc]  # its default
        if "forward" in vars(cls) and "packed" not in vars(cls):
            cls.packed = Pooling.packed  # type: ignore[method-assign]  # a base's is of the base's forward

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__()
        self.config = config
        self.dim = info.width

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        """Pool.

        Args:
            hidden: of the layers, [B, L, D] each.
            attention_mask: [B, L], 1 at real tokens; left as it is.
            marks: of the template.

        Returns:
            [B, `dim`], fp32 or wider.
        """
        raise NotImplementedError

    def packed(self, hidden: tuple[Tensor, ...], rows: PackedRows, marks: Marks) -> Tensor:
        """`forward` of rows without padding; a subclass may know a way that does not put it back.

        Args:
            hidden: of the layers, [C, D] each.
            rows: R of them, of which the first `PackedRows.rows` count.
            marks: of the template.

        Returns:
            [R, `dim`], fp32 or wider.
        """
        vectors: Tensor = self(tuple(rows.padded(x) for x in hidden), rows.mask(), marks)
        return vectors

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor | None:
        """The only token of each row that `forward` reads in the last layer, [B]; None: it reads more."""
        return None

    def take_stats(self) -> dict[str, Tensor]:
        """What the last training batch shows of the pooling, as scalars to log; empty until the next one."""
        return {}


def last_index(attention_mask: Tensor) -> Tensor:
    """Position of each row's last real token, [B]; 0 where there is none."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (attention_mask.long() * positions).argmax(dim=1)


def first_index(attention_mask: Tensor) -> Tensor:
    """Position of each row's first real token, [B]; 0 where there is none."""
    return attention_mask.long().argmax(dim=1)


def mark_index(attention_mask: Tensor, marks: Marks, mark: str) -> Tensor:
    """Position of a mark in each row, [B]."""
    return (last_index(attention_mask) - marks[mark]).clamp(min=0)


def token_index(attention_mask: Tensor, marks: Marks, token: Token) -> Tensor:
    """Position of a token in each row, [B], whatever the padding side.

    A mask is found by its distance from the row's end: a [MASK] in a text is no harm.
    """
    if token == "cls":
        return first_index(attention_mask)
    return last_index(attention_mask) if token == "last" else mark_index(attention_mask, marks, "mask")


def check_token(token: str, info: BackboneInfo, template: Template | None, key: str, value: str) -> None:
    """Whether a token has something to read in a backbone's rows.

    Args:
        token: that is read; others than those of `Token` are not checked.
        info: of the backbone.
        template: around the sentence.
        key, value: the configuration key that names the token, and what it says.

    Raises:
        UserError: it is not there, or has seen nothing of the sentence.
    """
    why = None
    if token == "cls" and info.kind == "decoder":
        why, fix = (
            "the first token of a decoder has seen nothing of the sentence",
            f"{key}=last or {key}=mean",
        )
    elif token == "mask" and not info.has_mask_token:
        why = f"{info.model_type}'s tokenizer has no mask token to read out"
        fix = f"an encoder backbone, or {key}=mean"
    elif token == "mask" and (template is None or "mask" not in template.marks):
        why = "there is no {mask} in the template to read out"
        fix = f"template=promptbert_bert, or {key}=mean"
    if why is not None:
        raise UserError(why, key=key, value=value, fix=fix)


def token_at(hidden: Tensor, index: Tensor) -> Tensor:
    """The vectors of `hidden` [B, L, D] at `index` [B]: [B, D], fp32 or wider."""
    at = index[:, None, None].expand(-1, 1, hidden.shape[2])
    return to_fp32(hidden.gather(1, at).squeeze(1))


def mean_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean of `hidden` [..., B, L, D] over the tokens where `mask` [B, L] is 1: [..., B, D], fp32 or wider.

    Zero where there is none. What stands at other tokens, NaN included, has no influence.
    """
    kept = to_fp32(hidden).masked_fill(~mask.bool()[..., None], 0.0)
    return kept.sum(dim=-2) / mask.sum(dim=1, keepdim=True).clamp(min=1).to(kept.dtype)


def mean_packed(hidden: Tensor, rows: PackedRows) -> Tensor:
    """`mean_tokens` of `hidden` [C, D] over the tokens of packed rows that are read: [R, D]."""
    tokens = to_fp32(hidden[: rows.tokens])
    if rows.skip:
        tokens = tokens.masked_fill((rows.within < rows.skip)[:, None], 0.0)
    lengths = rows.bounds.diff()
    # Its own checks would wait for the device.
    sums = torch.segment_reduce(tokens, "sum", lengths=lengths.long(), initial=0.0, unsafe=True)
    return sums / (lengths - rows.skip).clamp(min=1)[:, None].to(sums.dtype)
