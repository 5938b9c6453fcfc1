"""A transformer as the rest of the project sees it: token ids to hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlab.backbones import joined_lora, last_block
from embedlab.backbones.architecture import check_layer_states, counts_places, mixes_padding
from embedlab.backbones.body import Body, token_positions
from embedlab.backbones.padding import by_length, filled_on_the_right, special_types
from embedlab.backbones.slots import InSlots, in_slots
from embedlab.errors import UserError
from embedlab.kernels import fused_block
from embedlab.kernels.available import LONGEST, SHORT_LONGEST, kernel_options, packed_kernel
from embedlab.kernels.decoder import decoder_build, fused_decoder
from embedlab.kernels.packing import packable, row_capacity

if TYPE_CHECKING:
    from embedlab.config.adapter import Adapter
    from embedlab.config.backbone import BackboneInfo


_COMPILATIONS = 64
"""Of a block's code: a shape of the batch each, with and without gradients, or a few for each model of its type."""


def _allow_compilations(n: int) -> None:
    """The compiler runs code eagerly (and fails with ``fullgraph``) that it compiled more often than this."""
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(getattr(config, name), n))


class Backbone(Body):
    """A headless Hugging Face model, and its language-modelling head where one was asked for.

    Forward is free of host syncs with ``attention="sdpa"``: it can be captured in a CUDA graph, and
    compiled with ``fullgraph=True``. Hidden states of real tokens depend neither on padding side or amount
    nor on batch mates.

    Args:
        model: headless.
        info: of it.
        head: hidden states [..., D] to logits [..., V]; its decoder may be tied to the model's embeddings.
        attention: the kernel in use.
    """

    commit: str | None = None
    """Of a model from a hub."""

    def __init__(
        self, model: Any, info: BackboneInfo, head: nn.Module | None = None, attention: str = "sdpa"
    ) -> None:
        super().__init__(model, info, attention)
        self.head = head
        self.adapter: Adapter | None = None
        self._decoder: fused_decoder.DecoderWeights | None = None
        accepted = inspect.signature(self.reader.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_mask = "attention_mask" in accepted
        self._mixes_padding = mixes_padding(info.model_type)
        self._told_places = self._takes_positions and not counts_places(info.model_type)
        self._takes_token_types = "token_type_ids" in accepted
        self._extra: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}

    def prepare_all_layers(self) -> None:
        """Install the hooks that collect all layers now: a compiler cannot trace how transformers does it later."""
        check_layer_states(self.info.model_type)
        from transformers.utils import output_capturing

        output_capturing.maybe_install_capturing_hooks(self.reader)

    def compile_blocks(self, **options: Any) -> None:
        """Compile each transformer block in place: names of weights stay as they are.

        With `KernelOptions.static` there is a compilation for each shape (about 10 s), never one for several.
        """
        if kernel_options().static:
            options["dynamic"] = False
        if kernel_options().static or options.get("dynamic", False) is None:
            _allow_compilations(_COMPILATIONS)
        for block in self.blocks:
            block.compile(**options)
        self.compiled = True

    @contextmanager
    def computing(
        self, low_precision_weights: bool, decoder: fused_decoder.DecoderWeights | None = None
    ) -> Iterator[None]:
        """How a captured training step runs the forward pass.

        Args:
            low_precision_weights: the weights have the compute type already, so autocast would only slow the residual
                stream.
            decoder: what fused blocks of a decoder with LoRA read, of this backbone, where they may run.
        """
        before = self.low_precision_weights, self._decoder
        self.low_precision_weights = low_precision_weights
        self._decoder = decoder if decoder is not None and decoder_build.known(self) else None
        try:
            with joined_lora.joined(self.model):
                yield
        finally:
            self.low_precision_weights, self._decoder = before

    def unpads(self, longest: int, on_card: bool = True) -> bool:
        """Whether `forward` can leave out padding, in rows of at most `longest` tokens."""
        config = self.model.config
        if self.attention != "sdpa" or not packable(config.model_type, self.info.kind):
            return False
        # Where no token is out of another's sight, a sliding window is none. (An encoder's does not count the token.)
        window, decodes = getattr(config, "sliding_window", None), self.info.kind == "decoder"
        whole = window is None or row_capacity(longest) <= window + (not decodes)
        if on_card:
            # The kernel for longer rows is an encoder's.
            short = longest if decodes else min(longest, SHORT_LONGEST)
            return whole and longest <= LONGEST and packed_kernel(config, short)
        return whole or not decodes

    def reads_one(self, device: torch.device, packed: bool, told: bool = False) -> bool:
        """Whether `forward` can be told the one token of each row that is read (its `position`), and gains by it; a
        decoder that can be told one can be told several.

        Args:
            device: of the batch.
            packed: whether it will leave out padding (its `capacity`).
            told: whether it will be told positions, which the kernels of a decoder count by themselves.
        """
        plain = packed and not told and kernel_options().last_block
        if plain and fused_decoder.applies(self._decoder, device):
            return True
        return last_block.applies(self, device, packed)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        all_layers: bool = False,
        capacity: int | None = None,
        position: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Hidden states, the last one after the final norm.

        Args:
            input_ids: [B, L].
            attention_mask: [B, L], 1 at real tokens; None: all are real (an encoder then runs without a
                mask).
            position_ids: [B, L]; None: counted from the mask, so that padding on the left shifts nothing.
            all_layers: the states before the first block and after each, N + 1; else the last one in a
                1-tuple.
            capacity: compute that many tokens, the true ones (which may not be more) and no padding; for
                models that `unpads` says it of. Without a mask any number says that rows are attended one by one.
                None: compute all cells.
            position: [B], the one token of each row whose last state is wanted, or of a decoder [B, k]; where
                `reads_one` says so, and with a mask and neither `position_ids` nor `all_layers`.

        Returns:
            [B, L, D] each, with a capacity 0 at padding; with a position [B, 1, D] or [B, k, D], those tokens' alone.
        """
        if capacity is not None:
            return self._unpadded(input_ids, attention_mask, position_ids, all_layers, capacity, position)
        if position_ids is not None and not self._takes_positions:
            raise UserError(
                f"{self.info.model_type} takes no position ids", key="backbone", fix="a BERT or RoBERTa"
            )
        if attention_mask is None and self.info.kind == "decoder":
            # Without a mask transformers looks whether the positions are those of packed sequences, on the
            # host.
            attention_mask = torch.ones_like(input_ids)
        with self.autocast_context(input_ids.device):
            if position is not None and attention_mask is not None:
                return (last_block.padded(self, input_ids, attention_mask, position),)
            if attention_mask is None or position_ids is not None:
                return self._states(input_ids, attention_mask, position_ids, all_layers)
            if self._mixes_padding:
                return by_length(self._states, input_ids, attention_mask, all_layers)
            if self._told_places:
                places = token_positions(attention_mask, self.position_offset)
                return self._states(input_ids, attention_mask, places, all_layers)
            return filled_on_the_right(self._states, input_ids, attention_mask, all_layers)

    def _states(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, all_layers: bool
    ) -> tuple[Tensor, ...]:
        """What the model makes of a batch."""
        arguments = dict(self._extra)
        if self._takes_positions:
            arguments["position_ids"] = position_ids
        if self._takes_mask:
            arguments["attention_mask"] = attention_mask
        kinds = special_types(self.info.model_type, input_ids, attention_mask)
        if kinds is not None:
            arguments["token_type_ids"] = kinds
        out = self.reader(input_ids=input_ids, output_hidden_states=all_layers, **arguments)
        if not all_layers:
            return (out.last_hidden_state,)
        # Some give the last state before the final norm.
        return (*out.hidden_states[: self.info.layers], out.last_hidden_state)

    def _unpadded(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        all_layers: bool,
        capacity: int,
        position: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """`forward` on the true tokens alone, [1, C], and back to [B, L, D]."""
        rows = in_slots(self, input_ids, mask, capacity, position_ids)
        ids, slots = rows.ids, rows.slots
        arguments: dict[str, Any] = {}
        if self._takes_token_types:  # the models' own are for no more tokens than there are positions
            arguments["token_type_ids"] = torch.zeros_like(ids)
        if self._takes_positions:
            arguments["position_ids"] = rows.positions
        if fused_block.applies(self, ids.device):
            return self._fused(rows, all_layers, position)
        if position_ids is None and fused_decoder.applies(self._decoder, ids.device):
            return self._decoded(rows, all_layers, position)
        with self.autocast_context(ids.device), self.packing(), self._placed(rows.positions):
            if position is not None:
                embedded = self.model.embeddings(input_ids=ids, **arguments)
                return (last_block.packed(self, embedded, slots, position, **rows.bounds),)
            out = self.model(
                input_ids=ids,
                attention_mask=None,
                output_hidden_states=all_layers,
                **rows.bounds,
                **arguments,
                **self._extra,
            )
        return slots.unpack_all(out.hidden_states if all_layers else (out.last_hidden_state,))

    def _fused(self, rows: InSlots, all_layers: bool, position: Tensor | None) -> tuple[Tensor, ...]:
        """`_unpadded` by `embedlab.kernels.fused_block`."""
        slots = rows.slots
        arguments = (self, rows.ids, rows.positions, slots.bounds, rows.longest)
        with self.autocast_context(rows.ids.device):
            if position is not None:
                slot, real = slots.of(position)
                return (last_block.zero_where_absent(fused_block.states_in(*arguments, slot), real),)
            states = fused_block.states(*arguments, every=all_layers)
        return slots.unpack_all(states)

    def states_at(
        self, input_ids: Tensor, attention_mask: Tensor | None, cells: Tensor, capacity: int | None = None
    ) -> Tensor:
        """The last states ``[P, D]`` in `cells` [P] of the flattened batch; other arguments as `forward`.

        In a captured step the last block's feed-forward is computed for these tokens alone. States of cells without a
        token mean nothing, and must have no gradient.
        """
        device = input_ids.device
        if (
            capacity is None
            or not self.reads_one(device, packed=True)
            or not fused_block.applies(self, device)
        ):
            states = self(input_ids, attention_mask, capacity=capacity)[-1]
            # No cell comes twice, and the gradient of this selection sorts none.
            return states.flatten(0, 1).index_select(0, cells)
        rows = in_slots(self, input_ids, attention_mask, capacity)
        arguments = (self, rows.ids, rows.positions, rows.slots.bounds, rows.longest)
        with self.autocast_context(device):
            return fused_block.states_in(*arguments, rows.slots.of_cells(cells))

    def _decoded(self, rows: InSlots, all_layers: bool, position: Tensor | None) -> tuple[Tensor, ...]:
        """`_unpadded` by `embedlab.kernels.decoder.fused_decoder`."""
        slots = rows.slots
        assert self._decoder is not None
        arguments = (self._decoder, rows.ids, slots.bounds, rows.longest)
        if position is None:
            return slots.unpack_all(fused_decoder.states(*arguments, every=all_layers))
        slot, real = slots.of(position.view(len(position), -1))
        states = fused_decoder.states(*arguments, slot.flatten())[0].view(*slot.shape, -1)
        return (torch.where(real[..., None], states, 0.0),)

    @contextmanager
    def packing(self) -> Iterator[None]:
        """With the attention for packed rows."""
        from embedlab.kernels.varlen_attention import register

        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(register())
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    @contextmanager
    def _placed(self, positions: Tensor) -> Iterator[None]:
        """Position ids for a model whose forward takes none (DistilBERT, by version of transformers)."""
        if self._takes_positions:
            yield
            return
        table = self.model.embeddings.position_embeddings
        hook = table.register_forward_pre_hook(lambda module, inputs: (positions,))
        try:
            yield
        finally:
            hook.remove()
