"""Embeddings and transformer blocks of a captured step without padding, forward and backward as few kernels.

Between its matrix products a block has dropout, residuals, norms and a GELU. Each is one kernel here
(`embedlab.kernels.block_ops`), gradients of biases and norms fall off along the way, and the gradient of a residual
is added by the product beside it. Query, key and value are one product: at batch 64 each of three has 156 tiles for
some 132 multiprocessors, two rounds, the second nearly empty. Nothing is compiled, so that a run begins at once.
``fused_block=0`` in ``EMBEDLAB_KERNELS`` goes without; so does every backbone that is built in another way.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from embedlab.kernels import block_ops
from embedlab.kernels.available import has_foreign_hooks, has_triton, is_transformers, kernel_options
from embedlab.kernels.block_parts import (
    AfterAttention,
    Kept,
    Settings,
    Weights,
    after_attention,
    attend,
    attend_backward,
)

_BERTS = ("Bert", "Roberta", "XLMRoberta", "Camembert")
_BLOCKS = {f"{name}Layer": "bert" for name in _BERTS} | {"TransformerBlock": "distilbert"}
_EMBEDDINGS = (*(f"{name}Embeddings" for name in _BERTS), "Embeddings")
_PROJECTIONS = {f"{name}SelfAttention": ("query", "key", "value") for name in _BERTS} | {
    "DistilBertSelfAttention": ("q_lin", "k_lin", "v_lin")
}
"""By classes of transformers 5.17 to 5.24 that this is written for; all others are left alone."""
_ALIGNED = 16
"""Bytes at which each layer's part of a joined weight begins: the update loads so many at once."""


class Transformer(Protocol):
    """What is asked of a backbone."""

    model: Any
    low_precision_weights: bool

    @property
    def blocks(self) -> nn.ModuleList: ...


class Layers(NamedTuple):
    """What a block is made of, whatever transformers calls it."""

    attention: Any
    output: nn.Linear
    drop_attended: nn.Dropout | None
    first_norm: nn.LayerNorm
    up: nn.Linear
    activation: nn.Module
    down: nn.Linear
    drop_fed: nn.Dropout
    second_norm: nn.LayerNorm


def applies(backbone: Transformer, device: torch.device) -> bool:
    """Whether a forward over packed rows can run so here: in captured steps on a card, blocks of a known build."""
    if torch.compiler.is_compiling() or not kernel_options().fused_block:
        return False
    if device.type != "cuda" or not backbone.low_precision_weights or not has_triton():
        return False
    return fusable(backbone)


def fusable(backbone: Transformer) -> bool:
    """Whether embeddings and blocks are `known`, all of them trained, and query, key and value joined (`joinable`)."""
    model: Any = backbone.model
    return (
        known(backbone)
        and _one_mind(model.embeddings)
        and all(_one_mind(block) and _trainable(block) for block in backbone.blocks)
    )


def known(backbone: Transformer) -> bool:
    """Whether embeddings and blocks are of a build that is known here, and nobody else looks at them or runs them."""
    model = backbone.model
    config = model.config
    embeddings: Any = getattr(model, "embeddings", None)
    if (getattr(config, "hidden_act", None) or getattr(config, "activation", None)) != "gelu":
        return False
    if any(has_foreign_hooks(m) for m in model.modules()) or not _plain(embeddings, _EMBEDDINGS):
        return False
    tables = [m for m in embeddings.modules() if isinstance(m, nn.Embedding)]
    if any(t.max_norm is not None or t.scale_grad_by_freq or t.sparse for t in tables):
        return False
    return _ordinary([embeddings.LayerNorm], [embeddings.dropout]) and all(
        _block_fits(block) for block in backbone.blocks
    )


def _trainable(block: Any) -> bool:
    if block.training and getattr(block, "gradient_checkpointing", False):
        return False
    return "joined_weight" in layers(block).attention._parameters


def projections(module: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """The layers of query, key and value of a self-attention of known build in which all tokens see all; else None.

    Each is a product and a bias: adapters, quantisation, parametrisations and hooks do more.
    """
    names = _PROJECTIONS.get(type(module).__name__) if is_transformers(module) else None
    if names is None or getattr(module, "is_decoder", False) or getattr(module, "is_causal", False):
        return None
    query, key, value = (getattr(module, name) for name in names)
    for layer in (query, key, value):
        if type(layer) is not nn.Linear or has_foreign_hooks(layer):
            return None
        if layer.bias is None or layer.weight.shape != query.weight.shape:
            return None
    return query, key, value


def joinable(module: nn.Module, dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """The layers of query, key and value of a self-attention whose weights can be slices of one; else None.

    Args:
        module: any.
        dtype: that it will compute in.
    """
    layers = projections(module)
    if layers is None or not kernel_options().fused_block:
        return None
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    for p in parameters:
        if not p.requires_grad or p.dtype != torch.float32 or p.numel() * dtype.itemsize % _ALIGNED:
            return None
    return layers if len({id(p) for p in parameters}) == 6 else None


def _plain(module: Any, names: Any) -> bool:
    return type(module).__name__ in names and is_transformers(module)


def _ordinary(norms: list[Any], dropouts: list[Any], linears: list[Any] | None = None) -> bool:
    return (
        all(type(x) is nn.LayerNorm and x.elementwise_affine and x.bias is not None for x in norms)
        and all(type(x) is nn.Dropout for x in dropouts)
        and all(type(x) is nn.Linear and x.bias is not None for x in linears or [])
    )


def _one_mind(module: nn.Module) -> bool:
    """All of it is trained, and in one mode."""
    return all(p.requires_grad for p in module.parameters()) and all(
        m.training == module.training for m in module.modules()
    )


def _block_fits(block: Any) -> bool:
    if not _plain(block, _BLOCKS):
        return False
    others = ("chunk_size_feed_forward", "is_decoder", "add_cross_attention")
    if any(getattr(block, name, False) for name in others):
        return False
    if not all(_plain(module, (name,)) for name, module in _inner(block).items()):
        return False
    parts = layers(block)
    return type(parts.activation).__name__ == "GELUActivation" and _ordinary(
        [parts.first_norm, parts.second_norm],
        [x for x in (parts.attention.dropout, parts.drop_attended, parts.drop_fed) if x is not None],
        [parts.output, parts.up, parts.down],
    )


def _inner(block: Any) -> dict[str, nn.Module]:
    """The modules whose forward does not run here, by the class that each must be of."""
    if _BLOCKS[type(block).__name__] != "bert":
        return {"FFN": block.ffn}
    family = type(block).__name__.removesuffix("Layer")
    return {
        f"{family}Attention": block.attention,
        f"{family}SelfOutput": block.attention.output,
        f"{family}Intermediate": block.intermediate,
        f"{family}Output": block.output,
    }


def layers(block: Any) -> Layers:
    """The parts of a block of known build."""
    if _BLOCKS[type(block).__name__] == "bert":
        attended, up, fed = block.attention.output, block.intermediate, block.output
        return Layers(
            block.attention.self, attended.dense, attended.dropout, attended.LayerNorm, up.dense,
            up.intermediate_act_fn, fed.dense, fed.dropout, fed.LayerNorm,
        )  # fmt: skip
    attention, fed = block.attention, block.ffn
    return Layers(
        attention, attention.out_lin, None, block.sa_layer_norm, fed.lin1, fed.activation, fed.lin2, fed.dropout,
        block.output_layer_norm,
    )  # fmt: skip


def states(
    backbone: Transformer,
    ids: Tensor,
    positions: Tensor,
    bounds: Tensor,
    longest: int,
    every: bool = False,
    last: int | None = None,
) -> list[Tensor]:
    """Hidden states of packed rows, ``[1, C, D]`` each: the last, or the embeddings and those after each block.

    Args:
        backbone: that `fusable` is true of.
        ids, positions: int64 ``[1, C]``.
        bounds: int32 ``[B + 1]``: row i has the slots from ``bounds[i]`` to ``bounds[i + 1]``.
        longest: at least the tokens of every row.
        every: all states.
        last: blocks to run; None: all.
    """
    blocks = list(backbone.blocks)
    # One draw for all: of each block's three dropouts (weights, after attention, after the feed-forward), 16 bytes
    # apart, at which kernels take addresses to be aligned.
    seeds = torch.randint(2**31 - 1, (len(blocks) + 1, 3, 2), device=ids.device)[..., 0]
    outputs = [embed(backbone.model.embeddings, ids[0], positions[0], seeds[-1, 0])]
    for block, seed in zip(blocks[:last], seeds, strict=False):
        outputs = [*(outputs if every else ()), run_block(block, outputs[-1], seed, bounds, longest, None)]
    return [x[None] for x in outputs]


def states_in(
    backbone: Transformer, ids: Tensor, positions: Tensor, bounds: Tensor, longest: int, slot: Tensor
) -> Tensor:
    """The last block's output ``[P, D]`` in the slots of ``slot`` [P] alone; other arguments as `states`.

    A slot that comes twice has a gradient from one of its places at most, so that its sum repeats.
    """
    before = states(backbone, ids, positions, bounds, longest, last=len(backbone.blocks) - 1)[-1][0]
    seed = torch.randint(2**31 - 1, (3, 2), device=ids.device)[:, 0]
    return run_block(backbone.blocks[-1], before, seed, bounds, longest, slot)


def run_block(
    block: Any, x: Tensor, seed: Tensor, bounds: Tensor, longest: int, slot: Tensor | None, streams: int = 1
) -> Tensor:
    """A block's output [S C, D], or in the slots of ``slot`` alone; ``x`` [S C, D] has `streams` streams."""
    settings, weights = settings_of(block, x.shape[1], longest, streams), weights_of(block)
    out: Tensor = _Block.apply(x, bounds, seed, slot, settings, *weights)
    return out


def settings_of(block: Any, width: int, longest: int, streams: int = 1) -> Settings:
    """Of a block that `fusable` knows, over rows of at most `longest` tokens with `width` features."""
    parts = layers(block)
    attention = parts.attention
    drop_weights, drop_attended, drop_fed = (
        float(module.p) if block.training and module is not None else 0.0
        for module in (attention.dropout, parts.drop_attended, parts.drop_fed)
    )
    eps = parts.first_norm.eps, parts.second_norm.eps
    heads = width // attention.attention_head_size
    scale = float(attention.scaling)
    return Settings(heads, longest, scale, drop_weights, drop_attended, drop_fed, eps, streams)


def weights_of(block: Any) -> Weights:
    """Of a block that `fusable` knows."""
    parts = layers(block)
    rest = (parts.output, parts.first_norm, parts.up, parts.down, parts.second_norm)
    attention = parts.attention
    return Weights(
        attention.joined_weight,
        attention.joined_bias,
        *(t for m in rest for t in (m.weight, m.bias)),
    )


def embed(embeddings: Any, ids: Tensor, positions: Tensor, seed: Tensor) -> Tensor:
    """The states before the first block, [C, D]; ``ids`` and ``positions`` [C]."""
    kinds = getattr(embeddings, "token_type_embeddings", None)
    norm = embeddings.LayerNorm
    dropout = float(embeddings.dropout.p) if embeddings.training else 0.0
    words, places = embeddings.word_embeddings, embeddings.position_embeddings
    out: Tensor = _Embed.apply(
        ids, positions, seed, (words.padding_idx, places.padding_idx), dropout, norm.eps,
        words.weight, places.weight, None if kinds is None else kinds.weight, norm.weight, norm.bias,
    )  # fmt: skip
    return out


class _Block(torch.autograd.Function):
    """A post-norm block: ``h = norm(x + drop(A(x)))``, ``y = norm(h + drop(F(h)))``, of [C, D]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bounds: Tensor, seed: Tensor, slot: Tensor | None, settings: Settings, *weights: Tensor
    ) -> Tensor:  # fmt: skip
        w = Weights(*weights)
        joined, context = linear(x, w.wj, w.bj), torch.empty_like(x)
        attend(joined, bounds, seed, settings, context)
        out, kept = after_attention(context, x, slot, seed, settings, w)
        ctx.save_for_backward(x, bounds, seed, slot, joined, *kept, *weights)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, bounds, seed, slot, joined, *saved = ctx.saved_tensors
        kept, w = Kept(*saved[: len(Kept._fields)]), Weights(*saved[len(Kept._fields) :])
        settings: Settings = ctx.settings
        rows, djoined = settings.streams * (len(bounds) - 1), torch.empty_like(joined)
        after = AfterAttention(grad, x, rows, slot, seed, settings, kept, w)
        attend_backward(after.context, joined, bounds, seed, settings, after.joined_sums, djoined)
        dx, *gradients = after.end(djoined)
        return dx, None, None, None, None, *gradients


class _Embed(torch.autograd.Function):
    """``drop(norm(words[ids] + places[positions] + kinds[0]))``, [C, D]."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, positions: Tensor, seed: Tensor, padding: tuple[int | None, int | None],
        dropout: float, eps: float,
        words: Tensor, places: Tensor, kinds: Tensor | None, gamma: Tensor, beta: Tensor,
    ) -> Tensor:  # fmt: skip
        kind = None if kinds is None else kinds[0]
        normed = block_ops.embed_norm(ids, positions, words, places, kind, gamma, beta, seed, dropout, eps)
        ctx.save_for_backward(ids, positions, seed, normed.z, normed.stats, gamma)
        ctx.padding, ctx.dropout = padding, dropout
        ctx.sizes = len(words), len(places), None if kinds is None else len(kinds)
        return normed.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ids, positions, seed, z, stats, gamma = ctx.saved_tensors
        words, places, kinds = ctx.sizes
        pad_word, pad_place = ctx.padding
        width = z.shape[1]
        sums = block_ops.Sums([(block_ops.norm_rows(z), 3 * width)], gamma)
        dz, _ = block_ops.norm_backward(
            grad.contiguous(), z, stats, gamma, seed, sums.parts[0], ctx.dropout, after=True
        )
        # Half the bits, half the passes of its sort. (Its sums repeat, atomic ones would not.)
        dwords = torch.ops.aten.embedding_dense_backward(
            dz, ids.int(), words, -1 if pad_word is None else pad_word, False
        )
        # Of few rows: as a product with the choice of rows, instead of another sort.
        number = torch.arange(places, device=z.device)
        chosen = (positions[:, None] == number).to(z.dtype)
        dplaces = chosen.t() @ dz
        if pad_place is not None:
            dplaces[pad_place] = 0
        (total,) = sums.total()
        dgamma, dbeta, dkind = total.split(width)
        dkinds = None
        if kinds is not None:
            dkinds = torch.zeros(kinds, width, dtype=z.dtype, device=z.device)
            dkinds[0] = dkind
        return None, None, None, None, None, None, dwords, dplaces, dkinds, dgamma, dbeta
