"""The blocks of a decoder with LoRA in a captured step without padding, forward and backward as few kernels.

For Llama's build (RMS norms, rotary positions, SwiGLU) with updates of equal rank and dropout on all seven layers of
each block, in bf16-mixed. Beside the matrix products a block is fifteen kernels, seven of them forward
(`decoder_triton`, `decoder_gradients_triton` and `rotary_triton`). An input and the h of its updates lie side by side,
as in `embedlab.kernels.lora`; so do frozen weights and scaled B, which stay there from step to step: A and B are
brought there at each pass. Nothing is compiled. The residual stream, and what is added to it, are fp32; so are the
gradients of A and B, which `embedlab.backbones.joined_lora` rounds to bf16. ``fused_decoder=0`` in ``EMBEDLAB_KERNELS``
goes without; so does every backbone that is built in another way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from embedlab.kernels.decoder.decoder_build import LAYERS, layers_of
from embedlab.kernels.lora import dropped, product, share_of


class Plan(NamedTuple):
    """Of one pass: what is no tensor, and what all blocks share."""

    bounds: Tensor
    """int32 ``[B + 1]``: row i has the tokens from ``bounds[i]`` to ``bounds[i + 1]``."""
    cos: Tensor
    """fp32 ``[longest, W / 2]``."""
    sin: Tensor
    longest: int
    dropped: int
    """Share of the updates' input, in 2^-16."""


class Joint(NamedTuple):
    """Of layers of one input: frozen weights with the scaled B beside them ``[O, D + n R]``, and A ``[n, R, D]``."""

    weight: Tensor
    down: Tensor


class BlockWeights(NamedTuple):
    """Of query, key and value, of the output layer, of gate and up, and of down: weights and updates; of the norms:
    weights and eps."""

    qkv: Joint
    output: Joint
    gates: Joint
    last: Joint
    gamma: tuple[Tensor, Tensor]
    eps: tuple[float, float]


class DecoderWeights:
    """What the kernels of a backbone read, made at the first pass; one instance as long as graphs read it.

    Args:
        backbone: any; `embedlab.kernels.decoder.decoder_build.known` says whether it can run so.
        dtype: of products.
    """

    def __init__(self, backbone: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self._backbone = backbone
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._frozen: list[tuple[Tensor, Tensor]] = []
        self._seen = 0
        self.blocks: list[BlockWeights] = []
        self.parameters: list[nn.Parameter] = []
        """A of the layers of a block, then B of them, block by block."""

    def ready(self) -> None:
        """Bring the present values of A and B to where products read them."""
        if not self.blocks:
            self._make()
        self._copies.refresh()

    @torch.no_grad()
    def refresh_if_written(self) -> None:
        """Bring the frozen weights there again, where torch has written to them since: an adapter merged by hand."""
        if self._writes() != self._seen:
            for base, rows in self._frozen:
                rows.copy_(base)
            self._seen = self._writes()

    def _writes(self) -> int:
        return sum(base._version for base, _ in self._frozen)

    @torch.no_grad()
    def _make(self) -> None:
        from embedlab.kernels.decoder.decoder_triton import Copies

        model = self._backbone.model
        config = model.config
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads
        first = layers_of(model.layers[0])[0]
        self.scale = float(model.layers[0].self_attn.scaling)
        self.rank, self.scaling = len(first.lora_A["default"].weight), float(first.scaling["default"])
        pairs: list[tuple[Tensor, Tensor]] = []
        for block in model.layers:
            layers = layers_of(block)
            self.parameters += [layer.lora_A["default"].weight for layer in layers]
            self.parameters += [layer.lora_B["default"].weight for layer in layers]
            qkv, output, gates, last = (
                self._group(layers[i:j], pairs) for i, j in ((0, 3), (3, 4), (4, 6), (6, 7))
            )
            norms = block.input_layernorm, block.post_attention_layernorm
            gamma = norms[0].weight.detach(), norms[1].weight.detach()
            eps = norms[0].variance_epsilon, norms[1].variance_epsilon
            self.blocks.append(BlockWeights(qkv, output, gates, last, gamma, eps))
        factors = [1.0, self.scaling] * (len(pairs) // 2)
        self._copies = Copies(pairs, factors)
        self._seen = self._writes()

    def _group(self, layers: list[Any], pairs: list[tuple[Tensor, Tensor]]) -> Joint:
        """Weight and A of layers of one input; adds where their A and B belong to `pairs`."""
        bases = [layer.base_layer.weight for layer in layers]
        width, rank = bases[0].shape[1], self.rank
        weight = bases[0].new_zeros(sum(map(len, bases)), width + len(layers) * rank, dtype=self.dtype)
        downs = weight.new_empty(len(layers), rank, width)
        top = 0
        for i, (layer, base) in enumerate(zip(layers, bases, strict=True)):
            rows, left = weight[top : top + len(base)], width + i * rank
            rows[:, :width] = base
            self._frozen.append((base, rows[:, :width]))
            pairs.append((layer.lora_A["default"].weight.detach(), downs[i]))
            pairs.append((layer.lora_B["default"].weight.detach(), rows[:, left : left + rank]))
            top += len(base)
        return Joint(weight, downs)

    def table(self, longest: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions, ``[longest, W / 2]``."""
        if longest in self._tables:
            return self._tables[longest]
        device = self.blocks[0].qkv.weight.device
        positions = torch.arange(longest, device=device)[None]
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            found = self._backbone.model.rotary_emb(torch.zeros(1, device=device), positions)
        half = found[0].shape[-1] // 2
        table = found[0][0, :, :half].contiguous(), found[1][0, :, :half].contiguous()
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._tables[longest] = table  # a graph's own memory is not for others
        return table


def applies(weights: DecoderWeights | None, device: torch.device) -> bool:
    """Whether a forward over packed rows can run so here: in a captured step on a card, under bf16-mixed."""
    if weights is None or device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == weights.dtype


def states(
    weights: DecoderWeights,
    ids: Tensor,
    bounds: Tensor,
    longest: int,
    slot: Tensor | None = None,
    every: bool = False,
) -> tuple[Tensor, ...]:
    """Hidden states of packed rows, fp32 ``[1, C, D]``: the last one, after the final norm.

    Args:
        weights: of a backbone that is `known`.
        ids: int64 ``[1, C]``.
        bounds: int32 ``[B + 1]``: row i has the slots from ``bounds[i]`` to ``bounds[i + 1]``.
        longest: at least the tokens of every row.
        slot: int64 [N]: those whose states are wanted, ``[N, D]``; the last block computes no more of others than keys
            and values.
        every: the embeddings, and the states after each block (without `slot`).
    """
    weights.ready()
    model = weights._backbone.model
    share = share_of(layers_of(model.layers[0])[0])
    plan = Plan(bounds, *weights.table(max(16, longest)), longest, dropped(share) if share else 0)
    # One draw for all; 16 bytes apart, at which kernels take addresses to be aligned.
    seeds = torch.randint(2**31 - 1, (len(weights.blocks), 4, 2), device=ids.device)[..., 0]
    x = model.embed_tokens(ids)[0].float()
    with torch.autocast(ids.device.type, enabled=False):
        if torch.is_grad_enabled():
            found: tuple[Tensor, ...] = _Blocks.apply(
                x, seeds, slot, every, plan, weights, *weights.parameters
            )
        else:
            kept: list[_Kept] = []
            last = _run(x, seeds, slot, plan, weights, kept if every else None)
            found = (*(one.x1 for one in kept[1:]), last.joined)
    if slot is not None:
        return found
    return tuple(y[None] for y in ((x, *found) if every else found))


class _Kept(NamedTuple):
    """Of a block, for its gradient."""

    x1: Tensor
    first: Tensor
    bits1: Tensor
    roots1: Tensor
    qkv: Tensor
    context: Tensor
    bits_o: Tensor
    x2: Tensor
    second: Tensor
    bits2: Tensor
    roots2: Tensor
    gates: Tensor
    fed: Tensor
    bits_d: Tensor


def _run(
    x: Tensor,
    seeds: Tensor,
    slot: Tensor | None,
    plan: Plan,
    weights: DecoderWeights,
    kept: list[_Kept] | None,
) -> Any:
    """The last norm's `Normed`, over all blocks; what gradients need is added to `kept`."""
    from embedlab.kernels.decoder import decoder_triton as kernels

    more: Tensor | None = None
    for block, seed in zip(weights.blocks, seeds, strict=True):
        read = slot if block is weights.blocks[-1] else None
        x, more, found = _forward(x, more, seed, read, plan, weights, block)
        if kept is not None:
            kept.append(found)
    norm = weights._backbone.model.norm
    return kernels.norm_down(x, more, norm.weight.detach(), norm.variance_epsilon, None)


def _forward(
    x: Tensor,
    more: Tensor | None,
    seed: Tensor,
    slot: Tensor | None,
    plan: Plan,
    weights: DecoderWeights,
    w: BlockWeights,
) -> tuple[Tensor, Tensor, _Kept]:
    """The residual stream after attention, and what the feed-forward part adds to it; in the slots of ``slot``."""
    from embedlab.kernels.decoder import decoder_triton as kernels
    from embedlab.kernels.decoder import rotary_triton

    reads = _updates(w, plan, seed)
    tokens, heads = len(x), weights.heads
    first = kernels.norm_down(x, more, w.gamma[0], w.eps[0], reads[0])
    qkv = first.joined @ w.qkv.weight.T
    context = qkv.new_empty(tokens, w.output.weight.shape[1])
    rotary_triton.launch_forward(
        qkv, plan.cos, plan.sin, plan.bounds, context, plan.longest, weights.scale, heads, weights.shared
    )
    read = first.x
    if slot is not None:
        context, read = context[slot], read[slot]
    bits_o = kernels.down(context, reads[1])
    second = kernels.norm_down(
        read, product(context, w.output.weight.T, True), w.gamma[1], w.eps[1], reads[2]
    )
    gates = second.joined @ w.gates.weight.T
    fed = gates.new_empty(len(gates), w.last.weight.shape[1])
    bits_d = kernels.down(fed, reads[3], gates)
    out = product(fed, w.last.weight.T, True)
    return second.x, out, _Kept(*first, qkv, context, bits_o, *second, gates, fed, bits_d)


def _updates(w: BlockWeights, plan: Plan, seed: Tensor) -> list[Any]:
    from embedlab.kernels.decoder.decoder_triton import Updates

    joints = w.qkv, w.output, w.gates, w.last
    return [Updates(joint.down, plan.dropped, seed[i]) for i, joint in enumerate(joints)]


def _backward(
    dx: Tensor, half: Tensor, seed: Tensor, slot: Tensor | None, plan: Plan, weights: DecoderWeights, w: BlockWeights,
    kept: _Kept, inner: bool, beside: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the residual stream before a block, in fp32 and rounded (`inner`, else those given), and of A and B.

    Args:
        dx, half: of the residual stream after it, in fp32 and rounded.
        seed, slot, plan, weights, w, kept: of the forward.
        inner: whether the gradient before the block is wanted.
        beside: that of the residual stream before it, as somebody else read it.
    """
    from embedlab.kernels.decoder import decoder_gradients_triton as gradients
    from embedlab.kernels.decoder import decoder_triton as kernels
    from embedlab.kernels.decoder import rotary_triton

    reads = _updates(w, plan, seed)
    width, rank, query = dx.shape[1], weights.rank, w.output.weight.shape[1] - weights.rank
    ups = [rank * len(x.weight) for x in (w.qkv, w.output, w.gates, w.last)]
    downs = [r.down.numel() for r in reads]
    shares = gradients.Shares((*downs, *ups), max(len(dx), len(kept.qkv)), dx)
    first = kernels.Normed(kept.x1, kept.first, kept.bits1, kept.roots1)
    second = kernels.Normed(kept.x2, kept.second, kept.bits2, kept.roots2)
    dgates = gradients.swiglu_backward(
        half @ w.last.weight, kept.gates, kept.fed, kept.second[:, width:], reads[3], kept.bits_d, shares
    )
    of_second = dgates @ w.gates.weight
    dx, attended = kernels.norm_backward(of_second, second, w.gamma[1], reads[2], dx, half.dtype)
    of_context, dqkv = attended @ w.output.weight, torch.empty_like(kept.qkv)
    above, share = of_context, plan.dropped
    if slot is not None:
        above, share = _spread(of_context, kept.bits_o, reads[1], slot, len(dqkv)), 0
        dx = dx.new_zeros(len(dqkv), width).index_add_(0, slot, dx)
    rotary_triton.launch_backward(
        kept.qkv, plan.cos, plan.sin, plan.bounds, above, w.output.down, kept.bits_o, dqkv, plan.longest,
        weights.scale, weights.heads, weights.shared, share,
    )  # fmt: skip
    of_first = dqkv @ (w.qkv.weight if inner else w.qkv.weight[:, width:])
    gradients.matrices(
        gradients.Read(kept.first, kept.bits1, of_first[:, width:] if inner else of_first),
        gradients.Read(kept.context, kept.bits_o, of_context[:, query:]),
        gradients.Read(kept.second, kept.bits2, of_second[:, width:]),
        kept.fed[:, kept.gates.shape[1] // 2 :], (dqkv, attended, half), query, rank, plan.dropped, shares,
    )  # fmt: skip
    if inner:
        dx = dx if beside is None else dx + beside
        dx, attended = kernels.norm_backward(of_first, first, w.gamma[0], reads[0], dx, half.dtype)
    return dx, attended, shares.total(weights.scaling)


def _spread(of_context: Tensor, bits: Tensor, updates: Any, slot: Tensor, tokens: int) -> Tensor:
    """The gradient of a context of which some slots were read, ``[C, D + R]``: by the frozen weights and the update
    together, and 0 of h."""
    from embedlab.kernels.lora_triton import launch_of_x

    _, _, width = updates.sizes
    own = launch_of_x(of_context, bits, updates.down, updates.dropped)
    out = of_context.new_zeros(tokens, of_context.shape[1])
    # Rows without a token may share a slot with another: their gradients are 0.
    out[:, :width].index_add_(0, slot, own)
    return out


class _Blocks(torch.autograd.Function):
    """All blocks and the last norm, of [C, D]: what the last norm gives, or (`every`) the states before it too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seeds: Tensor,
        slot: Tensor | None,
        every: bool,
        plan: Plan,
        weights: DecoderWeights,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        kept: list[_Kept] = []
        last = _run(x, seeds, slot, plan, weights, kept)
        ctx.save_for_backward(seeds, slot, last.x, last.roots, *(t for one in kept for t in one))
        ctx.plan, ctx.weights = plan, weights
        ctx.set_materialize_grads(False)
        return (*(one.x1 for one in kept[1:]), last.joined) if every else (last.joined,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        from embedlab.kernels.decoder import decoder_triton as kernels

        seeds, slot, x, roots, *saved = ctx.saved_tensors
        plan, weights = ctx.plan, ctx.weights
        size = len(_Kept._fields)
        norm = weights._backbone.model.norm
        last = kernels.Normed(x, x, x, roots)
        grad = torch.zeros_like(x) if grads[-1] is None else grads[-1].contiguous()
        dx, half = kernels.norm_backward(grad, last, norm.weight, None, None, weights.dtype)
        found: list[Tensor] = []
        for i, w in reversed(list(enumerate(weights.blocks))):
            kept = _Kept(*saved[i * size : (i + 1) * size])
            inner = i > 0 or ctx.needs_input_grad[0]
            read = slot if i == len(weights.blocks) - 1 else None
            beside = grads[i - 1] if 0 < i < len(grads) else None
            dx, half, flat = _backward(dx, half, seeds[i], read, plan, weights, w, kept, inner, beside)
            some = weights.parameters[i * 2 * len(LAYERS) : (i + 1) * 2 * len(LAYERS)]
            parts = flat.split([p.numel() for p in some])
            found = [*(part.view_as(p) for part, p in zip(parts, some, strict=True)), *found]
        return (dx if ctx.needs_input_grad[0] else None), *[None] * 5, *found
