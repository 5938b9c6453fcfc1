"""Masked next-token prediction (LLM2Vec, BehnamGhader et al. 2024): a decoder that looks both ways learns to use it.

As masked language modelling, but the word at place t is predicted from the state at t - 1, where the decoder's head has
always found the next word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from embedlab.backbones.architecture import BOTH_WAYS
from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.objectives.language_model import mask_tokens, token_accuracy, token_cross_entropy


@dataclass(frozen=True)
class MNTPConfig(MethodConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    backbone_kind = "encoder"
    decays_norms_and_biases: ClassVar[bool] = False
    shardable: ClassVar[bool] = False

    name: str = "mntp"
    probability: float = within(0.20, above=0, below=1)
    """Share of tokens to predict; of them 80 % masked, 10 % replaced, 10 % kept."""
    mask_token: str = "_"
    """A token of the vocabulary that stands for a masked one; a decoder has none of its own."""

    @property
    def pools(self) -> bool:
        return False

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if info.model_type not in BOTH_WAYS or info.kind != "encoder":
            raise UserError(
                "for decoders that look both ways",
                key="backbone.bidirectional",
                value=run.backbone.bidirectional,
                fix=f"backbone.bidirectional=true with one of {', '.join(BOTH_WAYS)}, or method=masked_lm",
            )
        if run.template is not None:
            raise UserError("masks are filled in plain text", key="template", fix="template=none")
        return super().check(info, run)


class MNTP(Method):
    """Cross-entropy at the selected tokens, each from the state before it."""

    config_class = MNTPConfig
    config: MNTPConfig
    head_kind = "causal_lm"
    special_ids: torch.Tensor

    def __init__(self, encoder: SentenceEncoder, config: MNTPConfig, optimizer: OptimizerConfig) -> None:
        super().__init__(encoder, config, optimizer)
        tokenizer = encoder.tokenizer
        found = tokenizer.get_vocab().get(config.mask_token)
        if found is None:
            raise UserError(
                "the vocabulary has no such token",
                key="method.mask_token",
                value=config.mask_token,
                fix="a token that the text rarely has",
            )
        self.mask_id = int(found)
        special = torch.tensor(sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}))
        self.register_buffer("special_ids", special, persistent=False)

    def losses(self, batch: Batch) -> LossOutput:
        ids, mask = batch["sentence"]["input_ids"], batch["sentence"]["attention_mask"]
        backbone = self.encoder.backbone
        assert backbone.head is not None
        maskable = mask.bool() & ~torch.isin(ids, self.special_ids)
        maskable = maskable & (torch.arange(ids.shape[1], device=ids.device) > 0)  # none stands before it
        vocabulary = len(self.encoder.tokenizer)
        masked = mask_tokens(ids, maskable, self.mask_id, vocabulary, self.config.probability)
        states = self.by_chunks(lambda *rows: backbone(*rows)[-1], masked.input_ids, mask)
        before = (masked.positions - 1).clamp(min=0)  # of a place that is not selected, any
        logits = backbone.head(states.flatten(0, 1)[before])
        loss, accuracy = token_cross_entropy(logits, masked.labels), token_accuracy(logits, masked.labels)
        return LossOutput({"mntp": loss}, {"accuracy": accuracy})
