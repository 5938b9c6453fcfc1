"""BEPA (BERT-JEPA, arXiv 2601.00366): masked language modelling, and alignment of translations' vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlab.backbones.architecture import position_offset
from embedlab.config.method import MethodConfig
from embedlab.engine.module import Batch, Fields, Method, Outcome
from embedlab.methods.alignment import Vectors, align
from embedlab.methods.bepa_config import BEPAConfig
from embedlab.methods.bepa_views import FIRST, SECOND, Packed, hide, pack, shut_off, stack
from embedlab.methods.masked_lm import MaskedPrediction
from embedlab.methods.moving_average import average, moving_average

if TYPE_CHECKING:
    from embedlab.config.optimizer import OptimizerConfig
    from embedlab.config.template import Template
    from embedlab.encoders.encoder import SentenceEncoder

Sides = tuple[Tensor, Tensor]
View = dict[str, Tensor]


class BEPA(Method):
    """``L = L_MLM + lambda * L_align``: masked tokens of translations, and their vectors of a pass of its own."""

    config_class = BEPAConfig
    config: BEPAConfig
    head_kind = "masked_lm"

    def __init__(
        self, encoder: SentenceEncoder, config: BEPAConfig, optimizer: OptimizerConfig, step: str = "eager"
    ) -> None:
        super().__init__(encoder, config, optimizer, step)
        rule = "exact" if config.mlm_pack == "mono" else "bernoulli"
        self.prediction = MaskedPrediction(encoder.tokenizer, config.mlm_prob, rule, optimizer.chunk)
        aligns = config.lam > 0
        self.predictor = predictor(config.predictor if aligns else "identity", encoder.dim)
        self.target = moving_average(encoder) if aligns and config.target == "ema" else None
        if not aligns:
            # Weights without a gradient stop DDP.
            encoder.pooling.requires_grad_(False)
        self._averaged_at = 0  # the update whose weights the average has last taken in

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        return {"source": ("source", None), "target": ("target", None)}

    @property
    def passes(self) -> float:
        return 2.0 if self.config.lam > 0 else 1.0

    def longest(self, lengths: dict[str, int]) -> int:
        packs = self.config.mlm_pack == "bi" or self.config.align_input != "separate_clean"
        return sum(lengths.values()) if packs else max(lengths.values())

    def losses(self, batch: Batch) -> Outcome:
        config, first, second = self.config, batch["source"], batch["target"]
        loss, accuracy = self.prediction(self.encoder.backbone, *self.masked_views(first, second))
        stats = {"mlm_accuracy": accuracy}
        if config.lam == 0:
            return Outcome({"masked_lm": loss}, stats)
        online = self.vectors(self.encoder, first, second)
        target = online
        if self.target is not None:
            with torch.no_grad():
                target = self.vectors(self.target, first, second)
        elif config.target == "stopgrad":
            target = online[0].detach(), online[1].detach()
        predicted = self.predictor(online[0]), self.predictor(online[1])
        ids = (first["hash"], second["hash"]) if config.mask_duplicates and "hash" in first else None
        found = align(Vectors(online, predicted, target, ids), config)
        return Outcome({"masked_lm": loss, "align": config.lam * found.loss}, stats | found.stats)

    def masked_views(self, first: View, second: View) -> Sides:
        """Ids and mask of what the masked language modelling reads: ``[2B, L]``, or packed, ``[B, L1 + L2]``."""
        pad_id = self.encoder.tokenization.pad_id
        if self.config.mlm_pack == "mono":
            return stack(first, second, pad_id)
        packed = pack(first, second, pad_id)
        return packed.input_ids, packed.attention_mask

    def vectors(self, encoder: SentenceEncoder, first: View, second: View) -> Sides:
        """Alignment vectors ``[B, D]`` of both sides, by one forward pass."""
        pad_id = encoder.tokenization.pad_id
        if self.config.align_input == "separate_clean":
            z = encoder(*stack(first, second, pad_id)).chunk(2)
            return z[0], z[1]
        packed = pack(first, second, pad_id)
        if self.config.align_input == "packed_masked":
            return self._of_hidden_sides(encoder, packed)
        return self._of_shut_off_sides(encoder, packed)

    def _of_hidden_sides(self, encoder: SentenceEncoder, packed: Packed) -> Sides:
        mask_id = encoder.tokenizer.mask_token_id
        ids = torch.cat([hide(packed, SECOND, mask_id), hide(packed, FIRST, mask_id)])
        hidden = self._hidden(encoder, ids, packed.attention_mask.repeat(2, 1))
        halves = [tuple(h.chunk(2)[i] for h in hidden) for i in (0, 1)]
        return self._pool(encoder, halves[0], packed, FIRST), self._pool(encoder, halves[1], packed, SECOND)

    def _of_shut_off_sides(self, encoder: SentenceEncoder, packed: Packed) -> Sides:
        allowed, positions = shut_off(packed, position_offset(encoder.backbone.model.config))
        if encoder.backbone.attention == "eager":
            # This kernel adds its mask.
            allowed = torch.zeros_like(allowed, dtype=torch.float32).masked_fill(~allowed, float("-inf"))
        hidden = self._hidden(encoder, packed.input_ids, allowed, positions)
        return self._pool(encoder, hidden, packed, FIRST), self._pool(encoder, hidden, packed, SECOND)

    def _hidden(self, encoder: SentenceEncoder, *inputs: Tensor) -> tuple[Tensor, ...]:
        every = encoder.pooling.needs_all_layers
        return self.by_chunks(lambda *rows: encoder.backbone(*rows, all_layers=every), *inputs)

    def _pool(
        self, encoder: SentenceEncoder, hidden: tuple[Tensor, ...], packed: Packed, side: int
    ) -> Tensor:
        z: Tensor = encoder.pooling(hidden, (packed.side == side).long(), encoder.tokenization.marks)
        return z

    # ---- the moving average -------------------------------------------------------------------------------------

    def frozen(self) -> Iterator[nn.Module]:
        if self.target is not None:
            yield self.target

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Outside a captured step, whose warm-up must not move anything; and after the checkpoint of the update before.
        if self.target is not None and self.trainer.global_step != self._averaged_at:
            self._averaged_at = self.trainer.global_step
            average(self.target, self.encoder, self.config.ema)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["embedlab"]["averaged_at"] = self._averaged_at

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._averaged_at = checkpoint["embedlab"]["averaged_at"]

    def schedule_steps(self) -> int:
        updates = super().schedule_steps()
        return updates * self.optimizer_config.accumulate if self.config.horizon == "micro" else updates


def predictor(kind: str, width: int) -> nn.Module:
    """From a vector to the guess of its translation's: [..., D] to [..., D]."""
    if kind == "identity":
        return nn.Identity()
    if kind == "linear":
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
