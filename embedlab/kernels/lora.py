"""Linear layers of one input and their LoRA updates as few products: queries, keys and values; gate and up.

With frozen weights W_i, updates B_i A_i and masks m_i of the updates' dropout the layers give

    y_i = W_i x + s B_i A_i (m_i * x) = [W_i, s B_i] [x; h_i],    h_i = A_i (m_i * x)

so that one product over ``[x; h]`` gives all y, and one of its gradient those of x and h together: six products
instead of eight a layer, and no pass over activations to add two results. Each update has a mask of its own, as in
PEFT, of which a bit a value is kept for the backward pass. Masks are drawn with a probability in 16 binary digits, and
what is kept is scaled by that probability, so that its expectation is x exactly: 0.05 is 3277 / 2^16 = 0.0500031.

On CUDA masked products are Triton kernels (`embedlab.kernels.lora_triton`). Without dropout, and on the CPU, they are
torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embedlab.kernels.available import has_foreign_hooks, has_triton


@torch.library.custom_op("embedlab::lora_linear", mutates_args=())
def lora_linear(
    x: Tensor, down: Tensor, up: Tensor, weight: Tensor, seed: Tensor, dropout: float, wide: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """All layers' outputs, side by side.

    Args:
        x: ``[T, D]``, contiguous.
        down: A of each update, ``[n, R, D]``; on CUDA with dropout R is a power of two from 16.
        up: B of each update, scaled, ``[O, n R]``, and 0 but in its layer's rows. It is the end of `weight`, and here
            for its gradient.
        weight: ``[O, D + n R]``: frozen weights, then `up`. It gets no gradient.
        seed: int64 ``[1]`` on the device.
        dropout: of the updates' input.
        wide: give the outputs in fp32, as they were summed: rounded to bf16 they would lose the share of an update that
            has only begun to learn.

    Returns:
        ``[T, O]``; and for the backward pass ``[T, D + n R]``, x and then h, and the masks, int32
        ``[n, T, ceil(D / 32)]``: bit i of word j is 1 where an update keeps column 32 j + i (without dropout: empty).
    """
    tokens, width = x.shape
    updates, rank, _ = down.shape
    joined, bits = x.new_empty(tokens, width + updates * rank), _empty_bits(x, updates, dropout)
    kernels = _kernels(x, dropout)
    if kernels:
        kernels.launch_down(x, down, seed, joined, bits, dropped(dropout))
    else:
        if dropout > 0:  # in evaluation a graph is captured, which draws nothing
            _draw(bits, seed, dropout)
        joined[:, :width] = x
        parts = joined[:, width:].view(tokens, updates, rank)
        for i, kept in enumerate(_kept(x, bits, updates, dropout)):
            parts[:, i] = (x * kept) @ down[i].T
    return product(joined, weight.T, wide), joined, bits


def _kernels(x: Tensor, dropout: float) -> Any:
    """Their module, where masked products are Triton's."""
    if dropout == 0 or not x.is_cuda:
        return None
    from embedlab.kernels import lora_triton

    return lora_triton


def product(a: Tensor, b: Tensor, wide: bool) -> Tensor:
    if not wide or a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@torch.library.custom_op("embedlab::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    grad: Tensor, joined: Tensor, bits: Tensor, down: Tensor, weight: Tensor, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `lora_linear` with respect to x, down and up."""
    updates, rank, width = down.shape
    grad = grad.contiguous()
    above = grad @ weight  # of x by way of the frozen weights, then of h
    of_up = grad.T @ joined[:, width:]
    kernels = _kernels(grad, dropout)
    if kernels:
        return *kernels.launch_backward(above, joined, bits, down, dropped(dropout)), of_up
    of_x, of_down = above[:, :width].clone(), torch.empty_like(down)
    x, of_h = joined[:, :width], above[:, width:].view(-1, updates, rank)
    for i, kept in enumerate(_kept(x, bits, updates, dropout)):
        of_x += (of_h[:, i] @ down[i]) * kept
        of_down[i] = of_h[:, i].T @ (x * kept)
    return of_x, of_down, of_up


def dropped(dropout: float) -> int:
    """The probability in 2^-16, as it is drawn; never 1, where nothing would be left to scale."""
    return min(round(dropout * 2**16), 2**16 - 1)


def _empty_bits(x: Tensor, updates: int, dropout: float) -> Tensor:
    words = -(-x.shape[1] // 32) if dropout > 0 else 0
    return x.new_empty(updates, x.shape[0], words, dtype=torch.int32)


def _draw(bits: Tensor, seed: Tensor, dropout: float) -> None:
    """Fill the masks: each bit 0 with the probability of `dropped`, by its binary digits, the last one first."""
    generator = torch.Generator(bits.device).manual_seed(int(seed))
    bits.fill_(-1)
    for digit in range(16):
        random = torch.empty_like(bits).random_(-(2**31), 2**31, generator=generator)
        # Of a bit that is 1 with probability q and a random one, "and" has q / 2, and "or" (1 + q) / 2.
        if dropped(dropout) >> digit & 1:
            bits &= random
        else:
            bits |= random


def _kept(x: Tensor, bits: Tensor, updates: int, dropout: float) -> list[Tensor]:
    """Of each update 1 / (1 - p) where a value of x is kept, else 0; without dropout a plain 1."""
    if dropout == 0:
        return [x.new_ones(())] * updates
    each = bits[..., None] >> torch.arange(32, dtype=torch.int32, device=bits.device) & 1
    scale = 2**16 / (2**16 - dropped(dropout))
    return list((each.flatten(2)[..., : x.shape[1]] * scale).to(x.dtype))


@lora_linear.register_fake
def _(
    x: Tensor, down: Tensor, up: Tensor, weight: Tensor, seed: Tensor, dropout: float, wide: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32 if wide else x.dtype)
    return out, x.new_empty(x.shape[0], weight.shape[1]), _empty_bits(x, len(down), dropout)


@lora_linear_backward.register_fake
def _(
    grad: Tensor, joined: Tensor, bits: Tensor, down: Tensor, weight: Tensor, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    updates, rank, width = down.shape
    of_up = grad.new_empty(weight.shape[0], updates * rank)
    return grad.new_empty(grad.shape[0], width), torch.empty_like(down), of_up


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, down, _, weight, _, ctx.dropout, _ = inputs
    _, joined, bits = output
    ctx.save_for_backward(joined, bits, down, weight)
    ctx.mark_non_differentiable(joined, bits)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    joined, *others = ctx.saved_tensors
    gradients = lora_linear_backward(grad.to(joined.dtype), joined, *others, ctx.dropout)
    return *gradients, None, None, None, None


lora_linear.register_autograd(_gradients, setup_context=_save)


def is_plain_lora(layer: Any) -> bool:
    """Whether a module is a LoRA layer as PEFT makes it, over a frozen plain one, and nobody looks at it."""
    from peft.tuners.lora.layer import Linear

    if type(layer) is not Linear or list(layer.active_adapters) != ["default"] or layer.merged_adapters:
        return False
    base, down, up = layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]
    drop = layer.lora_dropout["default"]
    inside = (layer, base, down, up, drop)
    if (
        {type(base), type(down), type(up)} != {nn.Linear}
        or base.weight.requires_grad
        or layer.disable_adapters
        or layer.lora_variant
    ):
        return False
    if down.bias is not None or up.bias is not None or type(drop) not in (nn.Dropout, nn.Identity):
        return False
    rank = len(down.weight)
    drawn = base.weight.is_cuda and type(drop) is nn.Dropout
    if drawn and not (has_triton() and rank in (16, 32, 64, 128)):
        return False
    return not any(has_foreign_hooks(m) for m in inside)


def share_of(layer: Any) -> float:
    """Dropped of a LoRA layer's input to its update, as it is now: nothing in evaluation."""
    dropout = layer.lora_dropout["default"]
    return float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0
