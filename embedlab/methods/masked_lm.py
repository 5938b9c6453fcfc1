"""Masked language modelling on packed text (BERT, Devlin et al. 2019): pretraining, and the control of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from embedlab.backbones import Backbone
from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.grad_cache import cached
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.objectives.language_model import (
    Masked,
    Rule,
    mask_tokens,
    token_accuracy,
    token_cross_entropy,
)


@dataclass(frozen=True)
class MaskedLMConfig(MethodConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    backbone_kind = "encoder"
    """A decoder has no masks to fill."""
    # BERT's release: exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"].
    decays_norms_and_biases: ClassVar[bool] = False
    can_unpad: ClassVar[bool] = True
    shardable: ClassVar[bool] = False

    name: str = "masked_lm"
    probability: float = within(0.15, above=0, below=1)
    """Share of tokens to predict; of them 80 % masked, 10 % replaced, 10 % kept."""
    rule: Rule = "bernoulli"
    """``bernoulli``: each token by itself; ``exact``: a fixed number of each row."""

    @property
    def pools(self) -> bool:
        return False

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        check_masking(info, run)
        return super().check(info, run)


def check_masking(info: BackboneInfo, run: RunConfig) -> None:
    """Whether masks can be filled.

    Args:
        info: of the backbone.
        run: the whole configuration.

    Raises:
        UserError: a tokenizer or template with which there is nothing to learn.
    """
    if not info.has_mask_token:
        fix = "backbone=mini, or another masked language model"
        raise UserError("the tokenizer has no mask token", key="backbone", value=info.model_type, fix=fix)
    if run.template is not None:
        raise UserError("masks are filled in plain text", key="template", fix="template=none")


class MaskedPrediction(nn.Module):
    """Corrupts rows and predicts what was there; the vocabulary projection of other positions is not computed.

    Args:
        tokenizer: its special tokens are never selected (the unknown token is a word).
        probability, rule: of `mask_tokens`.
        chunk: rows encoded at once (`embedlab.encoders.grad_cache`); None: all.
    """

    special_ids: Tensor

    def __init__(self, tokenizer: Any, probability: float, rule: Rule, chunk: int | None = None) -> None:
        super().__init__()
        self.mask_id, self.vocab_size = int(tokenizer.mask_token_id), len(tokenizer)
        self.probability, self.rule, self.chunk = probability, rule, chunk
        special = torch.tensor(sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}))
        self.register_buffer("special_ids", special, persistent=False)

    def forward(
        self, backbone: Backbone, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None,
        full: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Mean cross-entropy in nats, and the share of the selected tokens that were guessed, of rows ``[B, L]``.

        With a `capacity` the backbone computes that many tokens (`Backbone.forward`); `full` rows have no padding.
        """
        masked = self.mask(input_ids, attention_mask)
        if self.chunk is None:
            attended = None if full and capacity is not None else attention_mask
            states = backbone.states_at(masked.input_ids, attended, masked.positions, capacity)
            return self._predicted(backbone, states, masked)

        def encode(ids: Tensor, mask: Tensor) -> Tensor:
            return backbone(ids, mask)[-1]

        return self.score(
            backbone, cached(encode, masked.input_ids, attention_mask, chunk=self.chunk), masked
        )

    def score(self, backbone: Backbone, hidden: Tensor, masked: Masked) -> tuple[Tensor, Tensor]:
        """`forward` from the last states of the corrupted rows, ``[B, L, D]``."""
        # No position comes twice, and the gradient of this selection sorts none.
        return self._predicted(backbone, hidden.flatten(0, 1).index_select(0, masked.positions), masked)

    def _predicted(self, backbone: Backbone, states: Tensor, masked: Masked) -> tuple[Tensor, Tensor]:
        """From the last states at the selected positions, ``[P, D]``."""
        assert backbone.head is not None
        logits = backbone.head(states)
        return token_cross_entropy(logits, masked.labels), token_accuracy(logits, masked.labels)

    def mask(self, input_ids: Tensor, attention_mask: Tensor) -> Masked:
        maskable = attention_mask.bool() & ~torch.isin(input_ids, self.special_ids)
        return mask_tokens(input_ids, maskable, self.mask_id, self.vocab_size, self.probability, self.rule)


class MaskedLM(Method):
    """Cross-entropy at the selected positions of packed text."""

    config_class = MaskedLMConfig
    config: MaskedLMConfig
    head_kind = "masked_lm"

    def __init__(self, encoder: SentenceEncoder, config: MaskedLMConfig, optimizer: OptimizerConfig) -> None:
        super().__init__(encoder, config, optimizer)
        self.prediction = MaskedPrediction(
            encoder.tokenizer, config.probability, config.rule, optimizer.chunk
        )

    def losses(self, batch: Batch) -> LossOutput:
        view = batch["sentence"]
        loss, accuracy = self.prediction(
            self.encoder.backbone, view["input_ids"], view["attention_mask"], view.get("token_budget"),
            view.get("full", False),
        )  # fmt: skip
        return LossOutput({"masked_lm": loss}, {"accuracy": accuracy})
