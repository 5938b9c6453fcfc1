"""S2Sent (arXiv 2508.18164): the last n blocks mixed by a gate that has seen the sentence's low frequencies.

Frequency Selection squeezes the stack of blocks to one number a feature (`embedlab.pooling.squeeze`), Spatial
Selection turns these into a weight for each block and feature (`embedlab.pooling.selection`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.kernels.available import has_triton
from embedlab.pooling.base import Marks
from embedlab.pooling.blocks import Blocks, BlocksConfig, inner_tokens
from embedlab.pooling.frequencies import LONGEST, Invalid, Order, select
from embedlab.pooling.selection import Gate, block_weights
from embedlab.pooling.squeeze import FrequencySelection


@dataclass(frozen=True)
class S2SentConfig(BlocksConfig):
    """The paper's letters, and every choice that it leaves open or that the released code makes otherwise."""

    name: str = "s2sent"
    m: int = within(4, least=1)
    """Groups of features, each with a frequency pair of its own (Low-m); divides the width."""
    r: int = within(12, least=1)
    """Width over bottleneck width of the gate."""
    mode: Literal["stack2d", "avg1d", "last1d", "auto", "none"] = "stack2d"
    """``stack2d``: a weight for each of the n blocks. ``avg1d``, ``last1d``: a gate on the features of one
    block, the mean of the last n or the last of them. ``auto``: stack2d, but last1d for n=1, where the
    soft-max of stack2d is the constant 1. ``none``: no gate, the mean of the blocks."""
    squeeze: Literal["dct", "gap", "none"] = "dct"
    """What the gate sees: ``dct``, ``gap`` (the mean of blocks and tokens) or ``none`` (each token)."""
    no_fs: Literal["per_block", "fused"] = "per_block"
    """With squeeze=none, a block's gate sees that block (``per_block``) or the mean of all (``fused``)."""
    order: Order = "fcanet"
    """Of the frequencies: ``fcanet``'s list or JPEG's ``zigzag``."""
    invalid: Invalid = "skip"
    """Block frequencies from n on: ``skip`` takes the next pair, ``zero`` leaves the group empty, ``grid6``
    works on a 6 x 6 average of blocks and padded tokens, as the released code does."""
    dct_norm: Literal["mean", "ortho", "sum"] = "mean"
    """``mean``: frequency 0 is the mean; ``ortho``: times the length's root; ``sum``: times the length."""
    gain: float = 1.0
    """Factor on what the gate sees; 6 gives the released code's scale."""
    act: Literal["tanh", "relu"] = "tanh"
    bias: bool = True
    """Whether the gate's two layers have biases."""
    bn: bool = False
    """Batch norm before the sigmoid, as in the released code."""
    block_norm: Literal["softmax", "global_exp"] = "softmax"
    """``softmax`` over the blocks; ``global_exp`` divides by one sum over the whole batch (released code)."""
    gate1d: Literal["exp", "sigmoid", "softmax"] = "exp"
    """Of a single block: ``exp``, ``sigmoid``, or ``softmax``, which is 1 (null control)."""
    pre_softmax_sigmoid: bool = True
    """The sigmoid keeps every weight between 1/(1 + (n-1)e) and e/(e + n-1)."""
    detach_gate: bool = False
    """No gradient through what the gate sees."""
    exclude_special: bool = False
    """Leave [CLS], [SEP] and the like out of what the gate sees and of the mean."""
    fs_tokens: Literal["all", "sentence"] = "all"
    """``sentence``: the gate sees the sentence's tokens, not those of a template around it."""
    gate: Literal["learned", "frozen"] = "learned"
    """``frozen``: as initialised (control)."""
    init: Literal["normal", "zero"] = "normal"
    """``zero``: W_2 = 0, so that training starts from the plain average."""

    def __post_init__(self) -> None:
        if self.bn and self.squeeze == "none":
            raise UserError(
                "batch norm over single tokens would count padding",
                key="pooling.bn",
                value=self.bn,
                fix="pooling.bn=false, or pooling.squeeze=dct or gap",
            )
        if self.invalid != "skip" and self.m > LONGEST:
            raise UserError(
                f"the list has {LONGEST} frequencies",
                key="pooling.m",
                value=self.m,
                fix="pooling.invalid=skip",
            )

    @property
    def kind(self) -> str:
        """`mode` with ``auto`` resolved."""
        return ("last1d" if self.n == 1 else "stack2d") if self.mode == "auto" else self.mode

    @property
    def counts_padding(self) -> bool:
        return self.kind != "none" and self.squeeze == "dct" and self.invalid == "grid6"

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        warnings = super().check(info, template, method)
        if self.kind == "none":
            return warnings
        width = info.width
        if width % self.m:
            raise UserError(
                f"does not divide the backbone's {width} features",
                key="pooling.m",
                value=self.m,
                fix=f"one of {', '.join(str(m) for m in (1, 2, 4, 8, 16, 32) if width % m == 0)}",
            )
        if self.r > width:
            raise UserError(
                f"no bottleneck is left of {width} features",
                key="pooling.r",
                value=self.r,
                fix=f"1 to {width}",
            )
        if self.fs_tokens == "sentence" and template is not None and template.join == "text":
            raise UserError(
                "a template joined as text may merge with the sentence, whose tokens are then not known",
                key="pooling.fs_tokens",
                value=self.fs_tokens,
                fix="template.join=ids, or pooling.fs_tokens=all",
            )
        if (self.exclude_special or self.fs_tokens == "sentence") and method == "csesfp":
            raise UserError(
                "CSE-SFP pools up to a mark, where the frame of the row is not known",
                key="pooling.exclude_special" if self.exclude_special else "pooling.fs_tokens",
                value=self.exclude_special or self.fs_tokens,
                fix="pooling.exclude_special=false pooling.fs_tokens=all",
            )
        return warnings + self._doubts(width)

    def _doubts(self, width: int) -> list[str]:
        stacked, dct = self.kind == "stack2d", self.squeeze == "dct"
        constant = stacked and self.n == 1 and self.block_norm == "softmax"
        null_control = not stacked and self.gate1d == "softmax"
        grows = dct and self.dct_norm == "sum"
        doubts = {
            f"pooling.r={self.r} does not divide the backbone's {width} features: the bottleneck has "
            f"{width // self.r}": width % self.r > 0,
            "pooling.pool=cls: S2Sent's table 3 has a collapse with it (BERT 66.88 instead of 78.50, "
            "RoBERTa 61.17); the paper takes pooling.pool=mean": self.pool == "cls",
            "pooling.n=1 pooling.mode=stack2d: the soft-max over one block is 1, which is plain pooling with a "
            "gate that does not train; pooling.mode=auto or last1d gates its features": constant,
            "pooling.gate1d=softmax: the gate of a single block is then 1 (a null control)": null_control,
            "pooling.dct_norm=sum grows with length and blocks, and saturates the sigmoid": grows,
            "pooling.invalid=grid6 averages over padding, as released: a sentence's vector depends on the "
            "length of its batch mates": self.counts_padding,
            "pooling.block_norm=global_exp: the length of a vector, not its direction, depends on its batch "
            "mates": self.block_norm == "global_exp",
        }
        return [text for text, applies in doubts.items() if applies]


class S2Sent(Blocks):
    """v = sum over n of w^(n) * U_n, then read out (equations 1 to 4).

    w is the same for all tokens of a sentence, so that the read-out of the mix is the mix of the read-outs:
    `forward` pools each block first. `weights` shows w.
    """

    config_class = S2SentConfig
    config: S2SentConfig

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__(config, info)
        c, width = self.config, info.width
        self.select: FrequencySelection | None = None
        self.gate: Gate | None = None
        self._stats: dict[str, Tensor] = {}
        if c.kind == "none":
            return
        blocks = c.n if c.kind == "stack2d" else 1
        if c.squeeze == "gap":
            self.select = FrequencySelection([(0, 0)], width, blocks, "mean", c.gain)
        elif c.squeeze == "dct":
            pairs = select(blocks, c.m, c.order, c.invalid)
            self.select = FrequencySelection(pairs, width, blocks, c.dct_norm, c.gain, c.invalid == "grid6")
        self.gate = Gate(
            width,
            blocks,
            bottleneck=width // c.r,
            act=c.act,
            bias=c.bias,
            bn=c.bn,
            sigmoid=c.pre_softmax_sigmoid,
            init=c.init,
        )
        if c.gate == "frozen":
            self.gate.requires_grad_(False)

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        with torch.autocast(attention_mask.device.type, enabled=False):
            if self._has_kernel and not _traced(attention_mask):
                return self._by_kernel(hidden, attention_mask)
            blocks = self.blocks(hidden, attention_mask)
            mask = self._pooled(attention_mask, marks)
            if self.gate is None or self.select is not None:
                return self._mix_vectors(blocks, mask, attention_mask, marks)
            u = torch.stack(blocks)
            if self.config.pool == "mean":
                return self.read((self._token_weights(u, attention_mask) * u).sum(0), mask, marks)
            u = self.read(u, mask, marks)[:, :, None]
            return (self._token_weights(u, None) * u).sum(0).squeeze(1)

    def weights(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        """w, [n, B, D], oldest block first; [n, B, L, D] with squeeze=none; n is 1 for a single block."""
        with torch.autocast(attention_mask.device.type, enabled=False):
            blocks = self.blocks(hidden, attention_mask)
            if self.select is None:
                return self._token_weights(torch.stack(blocks), attention_mask)
            return self._weights(self.select(self._source(blocks), self._seen(attention_mask, marks)))

    def take_stats(self) -> dict[str, Tensor]:
        """Of the last training batch: spread of w, and the share of gates outside 5 % to 95 %."""
        stats, self._stats = self._stats, {}
        return stats

    def blocks(self, hidden: tuple[Tensor, ...], mask: Tensor | None) -> list[Tensor]:
        """U^(n), [B, L, D] each, oldest first; a single one for ``avg1d`` and ``last1d``."""
        blocks = super().blocks(hidden, None if self.config.counts_padding else mask)
        if self.config.kind == "last1d":
            return blocks[-1:]
        return [torch.stack(blocks).mean(0)] if self.config.kind == "avg1d" else blocks

    def _mix_vectors(self, blocks: list[Tensor], mask: Tensor, real: Tensor, marks: Marks) -> Tensor:
        """Read each block, then mix."""
        means = w = None
        if self.select is not None:
            seen = self._seen(real, marks)
            f, means = self.select.with_means(self._source(blocks), seen)
            w = self._weights(f)
            if seen is not mask or self.config.pool != "mean" or self.config.detach_gate:
                means = None
        vectors = means if means is not None else torch.stack([self.read(u, mask, marks) for u in blocks])
        return vectors.mean(0) if w is None else (w * vectors).sum(0)

    @property
    def _has_kernel(self) -> bool:
        """Whether one kernel pass over each block gives the vectors (`embedlab.kernels.s2sent`)."""
        c = self.config
        return (
            not self.training
            and not torch.is_grad_enabled()
            and (c.kind, c.pool, c.block_norm) == ("stack2d", "mean", "softmax")
            and c.squeeze != "none"
            and not (c.bn or c.exclude_special or c.fs_tokens == "sentence")
            and self.select is not None
            and not self.select.grid
        )

    def _by_kernel(self, hidden: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        from embedlab.kernels.s2sent import pool

        select, gate = self.select, self.gate
        assert select is not None
        assert gate is not None
        end = len(hidden) - self.config.block_offset
        gamma, blocks = select.gamma.view(torch.float32), hidden[end - self.config.n : end]
        return pool(blocks, mask, select.frequency, gamma, select.norm, gate.logits, gate.sigmoid)

    def _source(self, blocks: list[Tensor]) -> list[Tensor]:
        return [u.detach() for u in blocks] if self.config.detach_gate else blocks

    def _weights(self, f: Tensor) -> Tensor:
        """w [n, B, D] from f [B, D]."""
        assert self.gate is not None
        return self._normalised(self.gate(f).transpose(0, 1), None)

    def _token_weights(self, u: Tensor, mask: Tensor | None) -> Tensor:
        """w for U [n, B, L, D], of the same shape, each token from itself."""
        assert self.gate is not None
        u = u.detach() if self.config.detach_gate else u
        if self.config.no_fs == "per_block":
            e = self.gate.each(u)
        else:
            e = self.gate(u.mean(0)).movedim(-2, 0)
        return self._normalised(e, None if mask is None else mask.to(e.dtype)[None, ..., None])

    def _normalised(self, e: Tensor, counted: Tensor | None) -> Tensor:
        c = self.config
        norm = c.gate1d if c.kind != "stack2d" and c.block_norm == "softmax" else c.block_norm
        w = block_weights(e, 0, norm, counted)
        if self.training:
            self._stats = _statistics(e.detach(), w.detach(), c.pre_softmax_sigmoid)
        return w

    def _pooled(self, mask: Tensor, marks: Marks) -> Tensor:
        """Tokens that the mean is over; all real ones where nothing else is left."""
        if not self.config.exclude_special or self.config.pool != "mean":
            return mask
        inner = inner_tokens(mask, *_frame(marks)[:2])
        return torch.where(inner.any(1, keepdim=True), inner, mask)

    def _seen(self, mask: Tensor, marks: Marks) -> Tensor:
        """Tokens that Frequency Selection counts."""
        if self.config.fs_tokens == "sentence":
            return inner_tokens(mask, *_frame(marks)[2:])
        return inner_tokens(mask, *_frame(marks)[:2]) if self.config.exclude_special else mask


def _frame(marks: Marks) -> tuple[int, int, int, int]:
    """`Tokenization.marks` knows what stands around a sentence; other marks say nothing of it."""
    return getattr(marks, "frame", (0, 0, 0, 0))[:4]


def _traced(mask: Tensor) -> bool:
    """Whether operations one by one are wanted: no CUDA, or a compiler that fuses them itself."""
    return not mask.is_cuda or torch.compiler.is_compiling() or not has_triton()


def _statistics(e: Tensor, w: Tensor, is_sigmoid: bool) -> dict[str, Tensor]:
    stats = {"s2sent/weight_mean": w.mean(), "s2sent/weight_std": w.std()}
    if is_sigmoid:
        stats["s2sent/gate_saturated"] = ((e < 0.05) | (e > 0.95)).to(e.dtype).mean()
    return stats
