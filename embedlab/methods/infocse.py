"""InfoCSE (Wu et al. 2022): SimCSE, and a vector that helps to predict words masked in its sentence.

    L = N + w CE                                                                                            (1)

N is SimCSE's loss. CE is that of a shallow masked language model whose input is the sentence's vector (of the unmasked
sentence, before the head) in place of the first state, and for the rest what the frozen lower half of the start makes
of the masked sentence: with so little context, it has to learn from the vector.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from embedlab.backbones import Backbone
from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.methods.conditioned import Conditioned, check_conditioned, with_head
from embedlab.methods.contrast import ContrastConfig, check_dropout, contrast
from embedlab.methods.heads import Head, new_head
from embedlab.methods.masked_lm import MaskedPrediction
from embedlab.methods.simcse import joint_token_budget, stacked
from embedlab.objectives.language_model import Masked


@dataclass(frozen=True)
class InfoCSEConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    backbone_kind = "encoder"
    can_unpad: ClassVar[bool] = True
    shardable: ClassVar[bool] = False

    name: str = "infocse"
    weight: float = within(1e-5, least=0)
    """w, of the auxiliary masked language modelling; 0: none, which is SimCSE with this head."""
    mask: float = within(0.40, above=0, below=1)
    """Share of tokens that are masked for it."""
    skip_from: int | None = None
    """Blocks of the start that read the masked sentence; None: half of them (6 of BERT-base's 12)."""
    aux_layers: int = 2
    """New blocks behind them, which read the vector too."""
    aux_dropout: bool = False
    """Whether the new blocks have the backbone's dropout (the release: for BERT-large)."""
    mlp: Head = "bn2"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if self.skip_from is not None and not 0 < self.skip_from < info.layers:
            raise UserError(
                f"this backbone has {info.layers} blocks",
                key="method.skip_from",
                value=self.skip_from,
                fix=f"1 to {info.layers - 1}",
            )
        if not 0 < self.aux_layers <= info.layers:
            raise UserError(
                "new blocks are made like the backbone's",
                key="method.aux_layers",
                value=self.aux_layers,
                fix=f"1 to {info.layers}",
            )
        check_conditioned(info, run)
        check_dropout(self.name, info)
        warnings = super().check(info, run)
        if self.weight and run.backbone.name != "Luyu/condenser":
            warnings.append(
                "InfoCSE's figures are of a start that was pretrained so that its vectors help to fill masks "
                "(backbone=condenser)"
            )
        return warnings


class InfoCSE(Method):
    """(1) over two dropout views, each with masks of its own."""

    config_class = InfoCSEConfig
    config: InfoCSEConfig

    def __init__(
        self,
        encoder: SentenceEncoder,
        config: InfoCSEConfig,
        optimizer: OptimizerConfig,
        start: Backbone | None = None,
    ) -> None:
        """As any method's; ``start`` is another copy of the encoder's checkpoint, with its head."""
        super().__init__(encoder, config, optimizer)
        self.head = new_head(config.mlp, encoder.dim)
        self._lower: list[Backbone] = []  # in a list, it is no sub-module
        self.auxiliary: Conditioned | None = None
        if not config.weight:
            return
        assert start is not None
        assert start.head is not None
        if encoder.dim != start.info.width:
            raise UserError(
                f"a vector of {encoder.dim} features does not fit states of {start.info.width}",
                key="pooling",
                value=encoder.pooling.config.name,
                fix="pooling=cls",
            )
        self.masking = MaskedPrediction(encoder.tokenizer, config.mask, "bernoulli")
        upper = copy.deepcopy(start)  # untied: its output layer is trained, and the embeddings are not
        kept = config.skip_from or start.info.layers // 2
        self._lower = [_shortened(start, kept).requires_grad_(False).eval()]
        self.auxiliary = Conditioned(_shortened(upper, config.aux_layers, new=True))
        _train_apart(upper)

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> InfoCSE:
        config = run.method
        assert isinstance(config, InfoCSEConfig)
        encoder = cls.make_encoder(run, tokenizer)
        assert isinstance(encoder, SentenceEncoder)
        if not config.weight:
            return cls(encoder, config, run.optimizer)
        source = run.backbone if config.aux_dropout else replace(run.backbone, dropout=0.0)
        return cls(encoder, config, run.optimizer, with_head(source)[0])

    @property
    def forward_passes(self) -> float:
        return 3.0 if self.config.weight else 2.0

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for lower in self._lower:
            lower.to(self.device)
            self.runner.compile_beside(lower)

    def losses(self, batch: Batch) -> LossOutput:
        config, view = self.config, batch["sentence"]
        views = [view, view]
        ids, mask = stacked(views, self.encoder.tokenization.pad_id)
        masked = None if self.auxiliary is None else self.masking.mask(ids, mask)
        vectors = self.encoder(ids, mask, joint_token_budget(views))
        result = contrast(self.head(vectors).chunk(2), [config.in_batch.text_hashes(view)] * 2, config)
        if masked is None:
            return LossOutput({"info_nce": result.loss}, result.stats)
        loss, accuracy = self._predicted(masked, mask, vectors)
        stats = result.stats | {"mlm": loss, "mlm_accuracy": accuracy}
        return LossOutput({"info_nce": result.loss, "masked_lm": config.weight * loss}, stats)

    def _predicted(self, masked: Masked, mask: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and accuracy at the masks of rows ``[2B, L]`` with their vectors ``[2B, D]``."""
        assert self.auxiliary is not None
        with torch.no_grad():
            lower = self._lower[0](masked.input_ids, mask)[-1]
        read = torch.cat([vectors[:, None].to(lower.dtype), lower[:, 1:]], 1)
        states = self.auxiliary(masked.input_ids, mask, lambda embedded: read.to(embedded.dtype))
        return self.masking.score(self.auxiliary.backbone, states, masked)


def _shortened(backbone: Backbone, layers: int, new: bool = False) -> Backbone:
    """A backbone's first blocks alone, in place; ``new``: with weights as a new model has them."""
    blocks = backbone.blocks
    del blocks[layers:]
    backbone.info = replace(backbone.info, layers=layers)
    if new:
        for module in blocks.modules():
            backbone.model._init_weights(module)
    return backbone


def _train_apart(backbone: Backbone) -> None:
    """Train blocks and head of a copy; the head no longer shares a weight with the embeddings, which nothing reads."""
    assert backbone.head is not None
    own = {id(p) for p in backbone.model.embeddings.parameters()}
    for module in backbone.head.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and id(p) in own:
                module._parameters[name] = torch.nn.Parameter(p.detach().clone())
    backbone.requires_grad_(True)
    backbone.model.embeddings.requires_grad_(False)
