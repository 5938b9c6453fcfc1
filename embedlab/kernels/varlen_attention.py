"""Attention among the tokens of each row, for rows that lie one after another without padding.

transformers hands on ``cu_seq_lens_q`` (here the bounds of the rows) and ``max_length_q`` to attention functions, as
for those of flash-attn. On CUDA the function is a Triton kernel (`embedlab.kernels.varlen_triton`). On the CPU rows
are padded for attention alone (`padded_attention`); the operator itself has a mask over all pairs of slots there, and
is what the kernel is tested against.

Keys and values may have fewer heads than queries (grouped-query attention): query head h reads number h // group.

torch's own `varlen_attn` is no substitute: it leaves whatever memory held in slots of no row, which may be NaN and then
reaches the gradients of all weights; and it has neither dropout nor fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from embedlab.kernels.available import SHORT_LONGEST

VARLEN = "embedlab_varlen"


def heads_first(like: Tensor) -> Tensor:
    """``[B, H, L, D]`` in the memory order ``[B, L, H, D]``, in which the output projection reads it."""
    b, h, length, d = like.shape
    return like.new_empty(b, length, h, d).transpose(1, 2)


@torch.library.custom_op("embedlab::varlen_attention", mutates_args=())
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    seed: Tensor,
    longest: int,
    scale: float,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    """Soft-max attention within each row, with dropout on the weights.

    Args:
        query: ``[1, H, C, D]``, the last dimension contiguous; on CUDA D is a power of two from 16.
        key, value: the same, or of fewer heads, of which H is a multiple.
        bounds: int32 ``[B + 1]``: row i has the slots from ``bounds[i]`` to ``bounds[i + 1]``.
        seed: int64 ``[1]`` on the device.
        longest: at least the tokens of every row; on CUDA beyond 128 a power of two.
        scale: of the scores.
        dropout: share of weights dropped.
        causal: no token sees those after it.

    Returns:
        ``[1, H, C, D]`` in the memory order ``[1, C, H, D]``; 0 in slots of no row.
    """
    out = heads_first(query)
    _forward(query, key, value, bounds, seed, out, longest, scale, dropout, causal)
    return out


def _kernels(longest: int) -> Any:
    """Their module, for rows of at most `longest` tokens."""
    if longest > SHORT_LONGEST:
        from embedlab.kernels import varlen_long_triton

        return varlen_long_triton
    from embedlab.kernels import varlen_triton

    return varlen_triton


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, out: Tensor,
    longest: int, scale: float, dropout: float, causal: bool = False,
) -> None:  # fmt: skip
    """Fill `out`."""
    if query.is_cuda:
        _kernels(longest).launch_forward(
            query, key, value, bounds, seed, out, longest, scale, dropout, causal
        )
        return
    weights, kept = _weights(query, key, bounds, seed, scale, dropout, causal)
    out.copy_((weights * kept) @ _for_each(query, value))


@torch.library.custom_op("embedlab::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    seed: Tensor,
    longest: int,
    scale: float,
    dropout: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `varlen_attention` with respect to query, key and value."""
    dq, dk, dv = (heads_first(x) for x in (query, key, value))
    _backward(query, key, value, bounds, seed, grad, dq, dk, dv, longest, scale, dropout, causal=causal)
    return dq, dk, dv


def _backward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, grad: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, longest: int, scale: float, dropout: float, sums: Tensor | None = None,
    causal: bool = False,
) -> None:  # fmt: skip
    """Fill `dq`, `dk` and `dv`; `sums` [B, 3, H, D], if any, with their sums over each row's slots."""
    if query.is_cuda:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        _kernels(longest).launch_backward(
            query, key, value, bounds, seed, grad, dq, dk, dv, longest, scale, dropout, sums, causal
        )
        return
    weights, kept = _weights(query, key, bounds, seed, scale, dropout, causal)
    dp = grad.float() @ _for_each(query, value).transpose(-1, -2) * kept
    ds = weights * (dp - (weights * dp).sum(-1, keepdim=True)) * scale
    dq.copy_(ds @ _for_each(query, key))
    groups = 1, key.shape[1], -1, *key.shape[2:]
    dk.copy_((ds.transpose(-1, -2) @ query.float()).view(groups).sum(2))
    dv.copy_(((weights * kept).transpose(-1, -2) @ grad.float()).view(groups).sum(2))
    if sums is not None:
        row = torch.searchsorted(bounds[1:].long(), torch.arange(query.shape[2]), right=True)
        for i, x in enumerate((dq, dk, dv)):  # slots of no row are 0
            sums[:, i] = x.new_zeros(len(bounds), *x[0, :, 0].shape).index_add_(0, row, x[0].transpose(0, 1))[
                :-1
            ]


def _for_each(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values in fp32, those of each query head."""
    return x.float().repeat_interleave(query.shape[1] // x.shape[1], 1)


def _weights(
    query: Tensor, key: Tensor, bounds: Tensor, seed: Tensor, scale: float, dropout: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Soft-max weights ``[1, H, C, C]`` in fp32, and 1 / (1 - dropout) where one is kept, else 0."""
    slots = query.shape[2]
    number = torch.arange(slots, device=query.device)
    row = torch.searchsorted(bounds[1:].long(), number, right=True)
    same = (row[:, None] == row) & (row < len(bounds) - 1)
    if causal:
        same &= number[:, None] >= number
    scores = query.float() @ _for_each(query, key).transpose(-1, -2) * scale
    weights = scores.masked_fill(~same, -1.0e30).softmax(-1) * same
    if dropout == 0:
        return weights, torch.ones_like(weights)
    generator = torch.Generator(query.device).manual_seed(int(seed))
    drawn = torch.rand(weights.shape, generator=generator, device=query.device)
    return weights, (drawn >= dropout) / (1 - dropout)


@varlen_attention.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    return heads_first(query)


@varlen_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads_first(query), heads_first(key), heads_first(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, longest, scale, dropout, causal = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers = longest, scale, dropout, causal


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *varlen_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 6


varlen_attention.register_autograd(_gradients, setup_context=_save)


def _heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """``[1, C, parts H D]`` as `parts` views ``[1, H, C, D]``."""
    return x.view(1, x.shape[1], parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def joined_forward(
    joined: Tensor, bounds: Tensor, seed: Tensor, heads: int, longest: int, scale: float, dropout: float,
    values: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`varlen_attention` of the query, key and value in one ``[C, 3 H D]``, without a graph; gives ``[C, H D]``.

    The values are those of ``values`` [C, 3 H D], if any (of another tower); ``out`` [C, H D], if any, is filled.
    """
    if out is None:
        out = joined.new_empty(joined.shape[0], joined.shape[1] // 3)
    (into,) = _heads(out[None], 1, heads)
    query, key, value = _heads(joined[None], 3, heads)
    if values is not None:
        value = _heads(values[None], 3, heads)[2]
    _forward(query, key, value, bounds, seed, into, longest, scale, dropout)
    return out


def joined_backward(
    grad: Tensor, joined: Tensor, bounds: Tensor, seed: Tensor, heads: int, longest: int, scale: float,
    dropout: float, sums: Tensor | None = None, values: Tensor | None = None, out: Tensor | None = None,
    values_out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of `joined_forward` with respect to `joined`, ``[C, 3 H D]``.

    ``sums`` (flat fp32, B times 3 H D), if any, gets its sums over each row's slots: partial sums of the bias's.
    ``out`` [C, 3 H D], if any, is filled; with `values` its last third is not, but that of `values_out`.
    """
    if out is None:
        out = torch.empty_like(joined)
    (above,) = _heads(grad[None], 1, heads)
    query, key, value = _heads(joined[None], 3, heads)
    dq, dk, dv = _heads(out[None], 3, heads)
    if values is not None:
        assert values_out is not None
        value, dv = (_heads(x[None], 3, heads)[2] for x in (values, values_out))
    partial = None if sums is None else sums.view(len(bounds) - 1, 3, heads, -1)
    _backward(query, key, value, bounds, seed, above, dq, dk, dv, longest, scale, dropout, partial)
    return out


class _Collect(torch.autograd.Function):
    """Rows in the cells of the slots. (An indexing's own gradient would add rows up one by one; here no two have one
    cell.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Tensor) -> Tensor:
        ctx.save_for_backward(cell)
        ctx.cells = len(x)
        return x.index_select(0, cell)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        cells = grad.new_zeros(ctx.cells, grad.shape[-1])
        return cells.index_copy_(0, ctx.saved_tensors[0], grad), None


class Padded:
    """Packed rows in padded form, for attention alone; reads the bounds on the host.

    Args:
        bounds: ``[B + 1]``: row i has the slots from ``bounds[i]`` to ``bounds[i + 1]``.
        slots: C.
    """

    def __init__(self, bounds: Tensor, slots: int) -> None:
        bounds = bounds.long()
        lengths = bounds.diff()
        rows, longest = len(lengths), int(lengths.max())
        # Slots of no row, if any, meet in a last row of their own, which nothing reads.
        self._spare = int(int(bounds[-1]) < slots)
        self._rows, self._longest, self._lengths = rows + self._spare, longest, lengths
        number = torch.arange(slots, device=bounds.device)
        row = torch.searchsorted(bounds[1:], number, right=True)
        self._cell = torch.where(row < rows, row * longest + number - bounds[row], rows * longest)

    def spread(self, x: Tensor) -> Tensor:
        """``[1, H, C, D]`` to ``[B (+ 1), H, longest, D]``, 0 in cells of no slot."""
        _, heads, slots, width = x.shape
        flat = x.transpose(1, 2).reshape(slots, heads * width)
        padded = flat.new_zeros(self._rows * self._longest, heads * width).index_copy_(0, self._cell, flat)
        return padded.view(self._rows, self._longest, heads, width).transpose(1, 2)

    def collect(self, x: Tensor) -> Tensor:
        """The way back, in the memory order ``[1, C, H, D]``; no meaning in slots of no row."""
        _, heads, _, width = x.shape
        flat = _Collect.apply(x.transpose(1, 2).reshape(-1, heads * width), self._cell)
        return flat.view(1, -1, heads, width).transpose(1, 2)  # type: ignore[no-any-return]

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """What to add to the scores, ``[B (+ 1), 1, 1, longest]``: -inf at cells of no slot.

        With a window ``[B (+ 1), 1, longest, longest]``, -inf too where a cell is that many places away.
        """
        # A row without tokens looks at its first cell: a softmax over nothing may be NaN.
        number = torch.arange(self._longest, device=self._lengths.device)
        real = number < self._lengths.clamp(min=1)[:, None]
        real = torch.nn.functional.pad(real, (0, 0, 0, self._spare), value=True)[:, None, None]
        if window is not None:
            real = (real | (number == number[:, None])) & ((number - number[:, None]).abs() < window)
        return torch.zeros_like(real, dtype=dtype).masked_fill_(~real, float("-inf"))


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    dropout: float,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """`varlen_attention` by PyTorch's own kernel on rows padded to the longest; reads the bounds on the host.

    Args:
        query: ``[1, H, C, D]``.
        key, value: the same, or of fewer heads.
        bounds: ``[B + 1]``: row i has the slots from ``bounds[i]`` to ``bounds[i + 1]``.
        scale: of the scores.
        dropout: share of weights dropped, drawn from torch's own random state.
        causal: no token sees those after it, so that padding behind them needs no mask.
        window: a token sees those less than that many places away (not with `causal`); None: all of its row.

    Returns:
        ``[1, H, C, D]`` in the memory order ``[1, C, H, D]``; no meaning in slots of no row.
    """
    padded = Padded(bounds, query.shape[2])
    out = nn.functional.scaled_dot_product_attention(
        padded.spread(query), padded.spread(key), padded.spread(value),
        None if causal else padded.mask(query.dtype, window), dropout,
        is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return padded.collect(out)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for ``attn_implementation="embedlab_varlen"``: ``[1, C, H, D]`` and no weights.

    With a sliding window a token sees those less than that many places away.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(f"{VARLEN} needs the bounds of the rows, and this model does not hand them on")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    causal = bool(getattr(module, "is_causal", False))
    window = None if sliding_window is None or sliding_window >= max_length_q else sliding_window
    if window is not None and (causal or query.is_cuda):
        raise ValueError(
            f"{VARLEN} has no sliding windows, and rows of {max_length_q} tokens reach out of theirs"
        )
    if not query.is_cuda and not torch.compiler.is_compiling():
        out = padded_attention(query, key, value, cu_seq_lens_q, scale, float(dropout), causal, window)
        return out.transpose(1, 2), None
    # Rotary positions and adapters leave them in fp32 under autocast.
    kind = value.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    seed = torch.randint(2**31 - 1, (1,), device=query.device)
    out = varlen_attention(
        query, key, value, cu_seq_lens_q, seed, max_length_q, scale, float(dropout), causal
    )
    return out.transpose(1, 2), None


def register() -> str:
    """Make the function known to transformers; returns its name for `attn_implementation`.

    It has no mask, and so no builder of one: the usual ones look on the host whether positions start anew.
    """
    AttentionInterface.register(VARLEN, attention_function)
    return VARLEN
