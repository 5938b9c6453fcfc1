"""JTCSE (arXiv 2505.02366) and its predecessor TNCSE (AAAI 2025): twin encoders that constrain each other.

L = L_NCE + L_ICNCE + L_ICTM, all weights 1: contrast within each tower, contrast across the towers (of the main
streams and of side streams that exchange attention), and a modulus constraint across them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlab.encoders.cross_attention import CrossAttention, check_alike, cross_layers, last_exchange
from embedlab.engine.module import Batch, Fields, Method, Outcome
from embedlab.errors import UserError
from embedlab.methods.across import Across, gradient_norms, towers_apart
from embedlab.methods.jtcse_config import JTCSEConfig, TNCSEConfig
from embedlab.methods.towers import tower_pooler
from embedlab.objectives.modulus import modulus_term
from embedlab.objectives.pair_nce import interleave

if TYPE_CHECKING:
    from embedlab.config.method import MethodConfig
    from embedlab.config.optimizer import OptimizerConfig
    from embedlab.config.run import RunConfig
    from embedlab.config.template import Template
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.encoders.twin import TwinEncoder


class JTCSE(Method):
    """Two dropout views of each sentence, in neighbouring rows, through both towers."""

    config_class = JTCSEConfig
    config: JTCSEConfig
    encoder: TwinEncoder  # type: ignore[assignment]

    def __init__(
        self,
        encoder: TwinEncoder,
        config: JTCSEConfig,
        optimizer: OptimizerConfig,
        step: str = "eager",
        poolers: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__(encoder, config, optimizer, step)  # type: ignore[arg-type]
        first, second = (tower.backbone for tower in encoder.towers)
        check_alike(first, second)
        self._layers = cross_layers(config.n_ca, first.info.layers) if config.exchanges else ()
        self._cross = CrossAttention(first, second, self._layers, config.route) if config.exchanges else None
        self.poolers: nn.ModuleList | None = None
        if config.uses_poolers:
            if poolers is None:
                raise ValueError("method.tmc_use=pooler needs the towers' poolers")
            self.poolers = nn.ModuleList(poolers)
        if config.wiring == "instream" and "side" in config.terms and encoder.pooling.needs_all_layers:
            raise UserError(
                "in-stream wiring takes the vectors of X(s, t) from one layer in the middle",
                key="pooling",
                value=encoder.pooling.config.name,
                fix="a pooling of the last layer, or method.wiring=side",
            )

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> JTCSE:
        from embedlab.encoders.twin import TwinEncoder
        from embedlab.methods.towers import load_tower

        config = run.method
        assert isinstance(config, JTCSEConfig)
        if tokenizer is not None or run.adapter.r is not None:
            key = "backbone.source" if tokenizer is not None else "adapter"
            raise UserError(
                "twin towers are whole pretrained encoders", key=key, fix="backbone=local, adapter=none"
            )
        towers = [
            load_tower(path, run, f"method.tower{i}")
            for i, path in enumerate((config.tower1, config.tower2), 1)
        ]
        encoder = TwinEncoder([tower.encoder for tower in towers])
        poolers = None
        if config.uses_poolers:
            sources = [[t.source, run.backbone] if config.pooler == "auto" else [] for t in towers]
            one, two = (seed + run.seed for seed in config.pooler_seeds)
            poolers = tower_pooler(sources[0], encoder.dim, one), tower_pooler(sources[1], encoder.dim, two)
        return cls(encoder, config, run.optimizer, run.resolved_step(), poolers)

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        return {"sentence": ("sentence", template)}

    def on_fit_start(self) -> None:
        super().on_fit_start()
        first, second = (dict(tower.backbone.named_parameters()) for tower in self.encoder.towers)
        if self.config.terms and all(torch.equal(p, second[name]) for name, p in first.items()):
            raise UserError(
                "the towers have the same weights, so they have nothing to exchange",
                key="method.tower2",
                value=self.config.tower2,
                fix="two stage-1 runs that were trained apart (where the best dev score is that of the start, "
                "evaluation.select=last)",
            )

    @property
    def passes(self) -> float:
        """Two views through two towers, and the share of the layers that the side streams run again."""
        side = 0.0 if self._cross is None else 1 - self._cross.fork / self._cross.depth
        return 4.0 * (1.0 + side)

    def losses(self, batch: Batch) -> Outcome:
        view = batch["sentence"]
        ids, mask = (interleave(x, x) for x in (view["input_ids"], view["attention_mask"]))
        u, v, s, t = self.by_chunks(self._vectors, ids, mask)
        texts = view.get("hash") if self.config.mask_duplicates else None
        across = Across(self.config, None if texts is None else interleave(texts, texts))
        terms: dict[str, Tensor] = {}
        own = across.within(u), across.within(v)
        if "nce" in self.config.terms:
            terms["nce"] = own[0].loss + own[1].loss
        if "cross" in self.config.terms:
            terms["cross"] = across.between(u, v)
        if "side" in self.config.terms:
            terms["side"] = across.between(s, t)
        if "ictm" in self.config.terms:
            terms["ictm"] = self._modulus(u, v)
        stats = {
            name: torch.stack([getattr(c, name) for c in own]).mean()
            for name in ("positive_cosine", "negative_cosine", "accuracy")
        }
        stats |= towers_apart(u, v)
        if torch.is_grad_enabled():
            stats |= gradient_norms(terms, [u, v] if self._cross is None else [u, v, s, t])
        return Outcome(terms, stats)

    def _vectors(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, v of the main streams and s, t of the side streams, ``[2N, D]`` each (u, v again without one)."""
        first, second = self.encoder.towers
        if self._cross is None:
            u, v = first(ids, mask), second(ids, mask)
            return u, v, u, v
        main, (g1, g2) = self._cross(ids, mask, main=self.config.wiring == "side")
        u, v = pool(first, g1, mask), pool(second, g2, mask)
        if main is not None:
            return pool(first, main[0], mask), pool(second, main[1], mask), u, v
        s, t = last_exchange(g1, self._layers), last_exchange(g2, self._layers)
        return u, v, pool(first, (s,), mask), pool(second, (t,), mask)

    def _modulus(self, u: Tensor, v: Tensor) -> Tensor:
        """L_ICTM = Y(u, v; p, q) + Y(v, u; q, p)."""
        p, q = u, v
        if self.poolers is not None:
            with torch.autocast(u.device.type, enabled=False):
                p, q = self.poolers[0](u), self.poolers[1](v)
        options: dict[str, Any] = {
            "scale": self.config.tmc_scale,
            "floor": self.config.floor,
            "clamp": self.config.clamp,
        }
        return modulus_term(u, v, p, q, **options) + modulus_term(v, u, q, p, **options)


class TNCSE(JTCSE):
    config_class = TNCSEConfig


def pool(tower: SentenceEncoder, states: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    """A tower's sentence vectors ``[B, D]`` from hidden states of its form, of the main or of the side stream."""
    return tower.pooling(states, mask, tower.tokenization.marks)
