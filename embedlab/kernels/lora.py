"""Linear layers of one input and their LoRA updates as few products: queries, keys and values; gate and up.

With frozen weights W_i, updates B_i A_i and masks m_i of the updates' dropout the layers give

    y_i = W_i x + s B_i A_i (m_i * x) = [W_i, s B_i] [x; h_i],    h_i = A_i (m_i * x)

so that one product over ``[x; h]`` gives all y, and one of its gradient those of x and h together: six products
instead of eight a layer, and no pass over activations to add two results. Each update has a mask of its own, as in
PEFT, drawn again in the backward pass instead of being kept.

On CUDA masked products are Triton kernels (`embedlab.kernels.lora_triton`). Without dropout, and on the CPU, they are
torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("embedlab::lora_linear", mutates_args=())
def lora_linear(
    x: Tensor, down: Tensor, up: Tensor, weight: Tensor, seed: Tensor, dropout: float, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """All layers' outputs, side by side.

    Args:
        x: ``[T, D]``, contiguous.
        down: A of each update, ``[n, R, D]``; on CUDA with dropout R is a power of two from 16, D a multiple of 4.
        up: B of each update, scaled, ``[O, n R]``, and 0 but in its layer's rows. It is the end of `weight`, and here
            for its gradient.
        weight: ``[O, D + n R]``: frozen weights, then `up`. It gets no gradient.
        seed: int64 ``[1]`` on the device.
        dropout: of the updates' input.
        wide: give the outputs in fp32, as they were summed: rounded to bf16 they would lose the share of an update that
            has only begun to learn.

    Returns:
        ``[T, O]``, and ``[T, D + n R]`` for the backward pass: x, then h.
    """
    tokens, width = x.shape
    updates, rank, _ = down.shape
    joined = x.new_empty(tokens, width + updates * rank)
    if dropout > 0 and x.is_cuda:
        from embedlab.kernels.lora_triton import launch_down

        launch_down(x, down, seed, joined, dropout)
    else:
        joined[:, :width] = x
        parts = joined[:, width:].view(tokens, updates, rank)
        for i, kept in enumerate(_kept(x, updates, seed, dropout)):
            parts[:, i] = (x * kept) @ down[i].T
    return _product(joined, weight.T, wide), joined


def _product(a: Tensor, b: Tensor, wide: bool) -> Tensor:
    if not wide or a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@torch.library.custom_op("embedlab::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    grad: Tensor, joined: Tensor, down: Tensor, weight: Tensor, seed: Tensor, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `lora_linear` with respect to x, down and up."""
    updates, rank, width = down.shape
    grad = grad.contiguous()
    above = grad @ weight  # of x by way of the frozen weights, then of h
    of_up = grad.T @ joined[:, width:]
    if dropout > 0 and grad.is_cuda:
        from embedlab.kernels.lora_triton import launch_backward

        return *launch_backward(above, joined, down, seed, dropout), of_up
    of_x, of_down = above[:, :width].clone(), torch.empty_like(down)
    x, of_h = joined[:, :width], above[:, width:].view(-1, updates, rank)
    for i, kept in enumerate(_kept(x, updates, seed, dropout)):
        of_x += (of_h[:, i] @ down[i]) * kept
        of_down[i] = of_h[:, i].T @ (x * kept)
    return of_x, of_down, of_up


def _kept(x: Tensor, updates: int, seed: Tensor, dropout: float) -> list[Tensor]:
    """Of each update 1 / (1 - dropout) where a value of x is kept, else 0; without dropout a plain 1."""
    if dropout == 0:
        return [x.new_ones(())] * updates
    generator = torch.Generator(x.device).manual_seed(int(seed))
    drawn = torch.rand(updates, *x.shape, generator=generator, device=x.device)
    return list(((drawn >= dropout) / (1 - dropout)).to(x.dtype))


@lora_linear.register_fake
def _(
    x: Tensor, down: Tensor, up: Tensor, weight: Tensor, seed: Tensor, dropout: float, wide: bool = False
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32 if wide else x.dtype)
    return out, x.new_empty(x.shape[0], weight.shape[1])


@lora_linear_backward.register_fake
def _(
    grad: Tensor, joined: Tensor, down: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    updates, rank, width = down.shape
    of_up = grad.new_empty(weight.shape[0], updates * rank)
    return grad.new_empty(grad.shape[0], width), torch.empty_like(down), of_up


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, down, _, weight, seed, ctx.dropout, _ = inputs
    ctx.save_for_backward(output[1], down, weight, seed)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    joined, *others = ctx.saved_tensors
    gradients = lora_linear_backward(grad.to(joined.dtype), joined, *others, ctx.dropout)
    return *gradients, None, None, None, None


lora_linear.register_autograd(_gradients, setup_context=_save)
