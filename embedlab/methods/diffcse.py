"""DiffCSE (Chuang et al. 2022): SimCSE, and a vector from which another network tells what was changed in its sentence.

    L = N + lambda CE(D(x'', z), y),  y_t = 1[x''_t != x_t]                                              (1)

N is SimCSE's loss; x'' is the sentence with masked tokens filled by a frozen generator; the discriminator D, which
begins as the encoder does, reads x'' with the sentence's vector z in place of the first token's embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from embedlab.backbones import Backbone, load_backbone
from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError, blamed_on
from embedlab.methods.conditioned import Conditioned, check_conditioned, named, with_head
from embedlab.methods.contrast import ContrastConfig, check_dropout, contrast
from embedlab.methods.heads import Head, new_head
from embedlab.methods.masked_lm import MaskedPrediction
from embedlab.methods.simcse import joint_token_budget, stacked
from embedlab.objectives.replaced_tokens import fill_masks, replaced_token_loss


@dataclass(frozen=True)
class DiffCSEConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    backbone_kind = "encoder"
    can_unpad: ClassVar[bool] = True
    shardable: ClassVar[bool] = False

    name: str = "diffcse"
    lam: float = within(0.005, least=0)
    """lambda, the weight of the discriminator's loss; 0: none, which is SimCSE with this head."""
    mask: float = within(0.30, above=0, below=1)
    """Share of tokens that are masked for the generator."""
    generator: str = "self"
    """What fills masks: the folder or hub name of a masked language model with the backbone's vocabulary
    (distilbert/distilbert-base-uncased in the release). ``self``: the backbone as it begins, with its own head."""
    condition: Literal["head", "raw"] = "head"
    """What D reads of a sentence: its vector after the head, or before."""
    form: Literal["paper", "released"] = "paper"
    """``released``: the generator, with dropout, replaces every token but the first by its likeliest, masked or not;
    the mean is over all cells, padding counted as unchanged."""
    mlp: Head = "bn2"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        check_conditioned(info, run)
        check_dropout(self.name, info)
        return super().check(info, run)


class DiffCSE(Method):
    """(1) over two dropout views, each with masks of its own."""

    config_class = DiffCSEConfig
    config: DiffCSEConfig

    def __init__(
        self,
        encoder: SentenceEncoder,
        config: DiffCSEConfig,
        optimizer: OptimizerConfig,
        discriminator: Backbone | None = None,
        generator: Backbone | None = None,
    ) -> None:
        """As any method's; without lambda there are neither discriminator nor generator."""
        super().__init__(encoder, config, optimizer)
        self.head = new_head(config.mlp, encoder.dim)
        self._generator: list[Backbone] = []  # in a list, it is no sub-module
        self.discriminator: Conditioned | None = None
        if not config.lam:
            return
        assert discriminator is not None
        assert generator is not None
        if encoder.dim != discriminator.info.width:
            raise UserError(
                f"a vector of {encoder.dim} features does not fit embeddings of {discriminator.info.width}",
                key="pooling",
                value=encoder.pooling.config.name,
                fix="pooling=cls",
            )
        self.masking = MaskedPrediction(encoder.tokenizer, config.mask, "bernoulli")
        self.discriminator = Conditioned(discriminator)
        self.classifier = nn.Linear(discriminator.info.width, 2)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)
        self._generator = [generator.requires_grad_(False)]

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> DiffCSE:
        config = run.method
        assert isinstance(config, DiffCSEConfig)
        encoder = cls.make_encoder(run, tokenizer)
        assert isinstance(encoder, SentenceEncoder)
        if not config.lam:
            return cls(encoder, config, run.optimizer)
        if config.generator == "self":
            generator, _ = with_head(run.backbone)
        else:
            fix = "method.generator=self, or a masked language model of the backbone's tokenizer"
            with blamed_on("method.generator", config.generator, fix):
                generator, other = with_head(named(config.generator, run.backbone.attention))
                if other.get_vocab() != encoder.tokenizer.get_vocab():
                    raise UserError("the generator has another vocabulary than the backbone", fix=fix)
        discriminator, _ = load_backbone(run.backbone)
        return cls(encoder, config, run.optimizer, discriminator, generator)

    @property
    def forward_passes(self) -> float:
        return 4.0 if self.config.lam else 2.0

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for generator in self._generator:
            generator.to(self.device).train(self.config.form == "released")
            self.runner.compile_beside(generator)

    def losses(self, batch: Batch) -> LossOutput:
        config, view = self.config, batch["sentence"]
        views = [view, view]
        ids, mask = stacked(views, self.encoder.tokenization.pad_id)
        changed = None if self.discriminator is None else self.changed(ids, mask)
        vectors = self.encoder(ids, mask, joint_token_budget(views))
        z = self.head(vectors)
        result = contrast(z.chunk(2), [config.in_batch.text_hashes(view)] * 2, config)
        if changed is None:
            return LossOutput({"info_nce": result.loss}, result.stats)
        loss, stats = self._differences(ids, mask, changed, z if config.condition == "head" else vectors)
        return LossOutput({"info_nce": result.loss, "difference": config.lam * loss}, result.stats | stats)

    def _differences(
        self, ids: Tensor, mask: Tensor, changed: Tensor, z: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """D's cross-entropy on changed rows ``[2B, L]`` with vectors ``[2B, D]``, and how well it does."""
        assert self.discriminator is not None
        replaced = changed != ids

        def conditioned(embedded: Tensor) -> Tensor:
            return torch.cat([z[:, None].to(embedded.dtype), embedded[:, 1:]], 1)

        logits = self.classifier(self.discriminator(changed, mask, conditioned))
        counted = mask if self.config.form == "paper" else torch.ones_like(mask)
        hits = ((logits[..., 1] > logits[..., 0]) == replaced) & mask.bool()
        stats = {
            "replaced": (replaced & mask.bool()).sum() / mask.sum(),
            "discriminated": hits.sum() / mask.sum(),
        }
        return replaced_token_loss(logits, replaced, counted), stats

    @torch.no_grad()
    def changed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """x'' of rows ``[2B, L]``: masked and filled anew."""
        generator = self._generator[0]
        assert generator.head is not None
        masked = self.masking.mask(ids, mask)
        states = generator(masked.input_ids, mask)[-1]
        if self.config.form == "paper":
            return fill_masks(ids, masked, generator.head(states.flatten(0, 1)[masked.positions]))
        likeliest = generator.head(states).argmax(-1)
        first = torch.arange(ids.shape[1], device=ids.device) == 0
        return torch.where(first | ~mask.bool(), ids, likeliest)
