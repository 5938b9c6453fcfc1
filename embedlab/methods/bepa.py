"""BEPA (BERT-JEPA, arXiv 2601.00366): masked language modelling, and alignment of translations' vectors.

For translations (x_i, y_i) and the [CLS] states Z1, Z2 of each sentence encoded alone and unmasked:

    L = L_MLM + lambda * L_align                                                                      (1)
    L_align = (mean_i l1(i) + mean_i l2(i)) / 2                                                       (2)
    l1(i) = -log exp(z1_i . z2_i / tau) / sum_k exp(z1_i . A_k / tau),   l2 the same with 1 <-> 2     (3)

with unit rows z, A = [Z1; Z2], tau = 0.07, lambda = 1: one encoder, no predictor, no target network. (Numbers are
this file's; the procedure is that of the authors' release.) Everything else here is a variant of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from embedlab.backbones.architecture import position_offset
from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput
from embedlab.errors import UserError
from embedlab.kernels.packing import row_capacity
from embedlab.methods.alignment import AlignmentConfig, Sides, Vectors, align
from embedlab.methods.averages import Averaging, moving_average
from embedlab.methods.bepa_views import FIRST, SECOND, Packed, block_diagonal_mask, mask_side, pack
from embedlab.methods.masked_lm import MaskedPrediction, check_masking
from embedlab.methods.simcse import joint_token_budget, stacked, widened
from embedlab.objectives.language_model import Rule

View = dict[str, Tensor]
TAKES_A_MASK_OF_PAIRS = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra")
"""Architectures that take a mask of query and key, see everything it allows, and take positions."""


@dataclass(frozen=True)
class BEPAConfig(AlignmentConfig):
    kinds: ClassVar[tuple[str, ...]] = ("parallel",)
    backbone_kind = "encoder"
    """A decoder has no masks to fill."""
    can_unpad: ClassVar[bool] = True
    shardable: ClassVar[bool] = False

    name: str = "bepa"
    lam: float = within(1.0, least=0)
    """lambda, the weight of the alignment beside the masked language modelling. 0: the control of the same data and
    steps without alignment (``mlm_pack=bi`` is then TLM); no alignment vectors are computed."""
    mlm_pack: Literal["mono", "bi"] = "mono"
    """``mono``: each sentence alone, an exact 15 % masked. ``bi``: both in one row, each token masked by chance."""
    mlm_prob: float = within(0.15, above=0, below=1)
    """Share of the tokens that are masked."""
    align_input: Literal["separate_clean", "packed_masked", "packed_blockmask"] = "separate_clean"
    """What the alignment vectors are of: each sentence alone and unmasked; the packed row with the other side masked
    (the authors' first design, which collapsed); the packed row with the other side out of sight."""
    predictor: Literal["identity", "linear", "mlp"] = "identity"
    target: Literal["shared", "stopgrad", "ema"] = "shared"
    """What a predicted vector is held against: the other side's vector with its gradient, without, or that of a
    moving average of the encoder."""
    ema: float = within(0.999, above=0, below=1)
    """Of its weights, what an update keeps."""
    horizon: Literal["opt", "micro"] = "opt"
    """What the learning-rate schedule counts to its end: updates, or, as released, batches while it moves on by
    updates, so that with accumulation it stops far from its end."""

    @property
    def pools(self) -> bool:
        return self.lam > 0

    @property
    def needs_others(self) -> bool:
        return self.loss == "infonce" and self.pools

    @property
    def nests(self) -> bool:
        return self.needs_others

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        super().check(info, run)
        check_masking(info, run)
        if self.target != "ema":
            self.refuse_unread(
                "ema", f"method.target={self.target} is no moving average", "method.target=ema"
            )
        self._check_packing(info, run)
        if self.lam > 0 and self.target == "ema" and run.trainer.strategy.startswith("fsdp"):
            raise UserError(
                "the moving average is of whole weights, and this strategy shares them out",
                key="trainer.strategy",
                value=run.trainer.strategy,
                fix="trainer=ddp, or method.target=stopgrad",
            )
        return self._warnings()

    def _check_packing(self, info: BackboneInfo, run: RunConfig) -> None:
        """Whether backbone and lengths allow two sentences in one row."""
        longest, blocks = run.data.max_length, self.align_input == "packed_blockmask"
        if blocks and info.model_type not in TAKES_A_MASK_OF_PAIRS:
            raise UserError(
                "this architecture takes no mask of query and key",
                key="method.align_input",
                value=self.align_input,
                fix="method.align_input=separate_clean, which is the same",
            )
        packs = self.mlm_pack == "bi" or (self.lam > 0 and self.align_input != "separate_clean")
        if packs and info.max_positions is not None and (longest is None or 2 * longest > info.max_positions):
            raise UserError(
                f"two sentences of that length do not fit the model's {info.max_positions} positions together",
                key="data.max_length",
                value=longest,
                fix=f"data.max_length={info.max_positions // 2} at most, or method.mlm_pack=mono",
            )
        if blocks and run.backbone.attention == "flash_attention_2":
            raise UserError(
                "this kernel takes no mask of query and key",
                key="backbone.attention",
                value=run.backbone.attention,
                fix="backbone.attention=sdpa",
            )

    def _warnings(self) -> list[str]:
        warnings = []
        if self.lam > 0 and self.loss in ("mse", "cosine") and self.target == "shared":
            warnings.append(
                f"method.loss={self.loss} has no negatives and method.target=shared no asymmetry: one vector for "
                "every sentence satisfies it, and only the masked language modelling stands against that"
            )
        if self.lam > 0 and self.align_input == "packed_masked":
            warnings.append(
                "method.align_input=packed_masked collapsed for BEPA's authors (specification A1.5)"
            )
        return warnings


class BEPA(Averaging):
    """``L = L_MLM + lambda * L_align`` (1): masked tokens of translations, and their vectors of a pass of its own."""

    config_class = BEPAConfig
    config: BEPAConfig
    head_kind = "masked_lm"

    def __init__(self, encoder: SentenceEncoder, config: BEPAConfig, optimizer: OptimizerConfig) -> None:
        super().__init__(encoder, config, optimizer)
        rule: Rule = "exact" if config.mlm_pack == "mono" else "bernoulli"
        self.prediction = MaskedPrediction(encoder.tokenizer, config.mlm_prob, rule, optimizer.chunk)
        self.predictor = predictor(config.predictor if config.pools else "identity", encoder.dim)
        self.target = moving_average(encoder) if config.pools and config.target == "ema" else None

    @property
    def forward_passes(self) -> float:
        return 2.0 if self.config.lam > 0 else 1.0

    def longest(self, lengths: dict[str, int]) -> int:
        packs = self.config.mlm_pack == "bi" or self.config.align_input != "separate_clean"
        longest = max(lengths.values())
        # Both halves of a row have the width that all views get where padding is left out.
        return 2 * row_capacity(longest) if packs else longest

    def losses(self, batch: Batch) -> LossOutput:
        config, first, second = self.config, batch["source"], batch["target"]
        capacity = joint_token_budget((first, second))
        if capacity is not None and config.lam > 0 and config.align_input != "packed_masked":
            (loss, accuracy), online = self._by_one_pass(first, second, capacity)
        else:
            views = self.masked_views(first, second)
            loss, accuracy = self.prediction(self.encoder.backbone, *views, capacity)
            if config.lam == 0:
                return LossOutput({"masked_lm": loss}, {"mlm_accuracy": accuracy})
            online = self.vectors(self.encoder, first, second, capacity)
        stats = {"mlm_accuracy": accuracy}
        hashes = [config.in_batch.text_hashes(v) for v in (first, second)]
        texts = None if hashes[0] is None or hashes[1] is None else (hashes[0], hashes[1])
        predicted = self.predictor(online[0]), self.predictor(online[1])
        targets = self.targets(online, first, second, capacity)
        distance, more = align(Vectors(online, predicted, targets, texts), config)  # (2), (3)
        return LossOutput({"masked_lm": loss, "align": config.lam * distance}, stats | more)  # (1)

    def masked_views(self, first: View, second: View) -> Sides:
        """Ids and mask of what the masked language modelling reads: ``[2B, L]``, or packed, ``[B, L1 + L2]``."""
        pad_id = self.encoder.tokenization.pad_id
        if self.config.mlm_pack == "mono":
            return stacked((first, second), pad_id)
        packed = pack(first, second, pad_id)
        return packed.input_ids, packed.attention_mask

    def vectors(
        self, encoder: SentenceEncoder, first: View, second: View, capacity: int | None = None
    ) -> Sides:
        """Alignment vectors ``[B, D]`` of both sides, by one forward pass.

        With a `capacity` it computes that many tokens for both sides together (`Backbone.forward`).
        """
        pad_id, kind = encoder.tokenization.pad_id, self.config.align_input
        # Out of sight of each other is the same as apart, and without padding the cheaper way.
        if kind == "separate_clean" or (kind == "packed_blockmask" and capacity is not None):
            z = encoder(*stacked((first, second), pad_id), capacity).chunk(2)
            return z[0], z[1]
        packed = pack(first, second, pad_id)
        if kind == "packed_masked":
            return self._of_masked_sides(encoder, packed, capacity)
        return self._of_separate_blocks(encoder, packed)

    def _by_one_pass(self, first: View, second: View, capacity: int) -> tuple[Sides, Sides]:
        """The prediction's loss and accuracy, and the alignment vectors: masked rows and clean ones together.

        Half the launches of two passes, and one gradient of each weight.
        """
        encoder = self.encoder
        pad_id, pooling = encoder.tokenization.pad_id, encoder.pooling
        ids, mask = self.masked_views(first, second)
        clean, clean_mask = stacked((first, second), pad_id)
        masked = self.prediction.mask(ids, mask)
        rows, attended = widened([masked.input_ids, clean], pad_id), widened([mask, clean_mask], 0)
        hidden = encoder.backbone(rows, attended, all_layers=pooling.needs_all_layers, capacity=2 * capacity)
        n, width = ids.shape
        states = tuple(h[n:] for h in hidden)
        z = pooling(states, attended[n:], encoder.tokenization.marks).chunk(2)
        return self.prediction.score(encoder.backbone, hidden[-1][:n, :width], masked), (z[0], z[1])

    # ---- variants -------------------------------------------------------------------------------------------------

    def targets(self, online: Sides, first: View, second: View, capacity: int | None = None) -> Sides:
        """What predictions are held against: the vectors themselves, without gradient, or a moving average's."""
        if self.target is not None:
            with torch.no_grad():
                return self.vectors(self.target, first, second, capacity)
        return (online[0].detach(), online[1].detach()) if self.config.target == "stopgrad" else online

    def _of_masked_sides(self, encoder: SentenceEncoder, packed: Packed, capacity: int | None) -> Sides:
        mask_id = encoder.tokenizer.mask_token_id
        ids = torch.cat([mask_side(packed, SECOND, mask_id), mask_side(packed, FIRST, mask_id)])
        doubled = None if capacity is None else 2 * capacity
        hidden = self._hidden(encoder, ids, packed.attention_mask.repeat(2, 1), capacity=doubled)
        halves = [tuple(h.chunk(2)[i] for h in hidden) for i in (0, 1)]
        return self._pool(encoder, halves[0], packed, FIRST), self._pool(encoder, halves[1], packed, SECOND)

    def _of_separate_blocks(self, encoder: SentenceEncoder, packed: Packed) -> Sides:
        allowed, positions = block_diagonal_mask(packed, position_offset(encoder.backbone.model.config))
        if encoder.backbone.attention == "eager":
            # This kernel adds its mask.
            allowed = torch.zeros_like(allowed, dtype=torch.float32).masked_fill(~allowed, float("-inf"))
        hidden = self._hidden(encoder, packed.input_ids, allowed, positions)
        return self._pool(encoder, hidden, packed, FIRST), self._pool(encoder, hidden, packed, SECOND)

    def _hidden(
        self, encoder: SentenceEncoder, *inputs: Tensor, capacity: int | None = None
    ) -> tuple[Tensor, ...]:
        every = encoder.pooling.needs_all_layers
        return self.by_chunks(
            lambda *rows: encoder.backbone(*rows, all_layers=every, capacity=capacity), *inputs
        )

    def _pool(
        self, encoder: SentenceEncoder, hidden: tuple[Tensor, ...], packed: Packed, side: int
    ) -> Tensor:
        z: Tensor = encoder.pooling(hidden, (packed.side == side).long(), encoder.tokenization.marks)
        return z

    # ---- the moving average -------------------------------------------------------------------------------------

    @property
    def keep(self) -> float:
        return self.config.ema

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
