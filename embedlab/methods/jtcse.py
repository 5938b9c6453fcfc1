"""JTCSE (arXiv 2505.02366) and its predecessor TNCSE (AAAI 2025): twin encoders that constrain each other.

Rows 2i and 2i + 1 are two dropout views of sentence i; the partner of row r is r' = r XOR 1. Towers 1 and 2 give u and
v (main streams), s and t (side streams, which exchange attention), and p and q (poolers over u and v).

    X(a, b) = mean_r -log exp(cos(a_r, b_r') / tau) / sum_{c != r} exp(cos(a_r, b_c) / tau)                   (1)
    Y(u, v; p, q) = mean_i -log cos(u_2i, v_2i+1) * |p_2i - q_2i+1| / (|p_2i| + |q_2i+1|) / 2                 (2)
    L_NCE   = X(u, u) + X(v, v)                                                                               (3)
    L_ICNCE = X(u, v) + X(s, t), or X(v, u) + X(t, s), by one coin a step                                     (4)
    L_ICTM  = Y(u, v; p, q) + Y(v, u; q, p)                                                                   (5)
    L = L_NCE + L_ICNCE + L_ICTM, all weights 1                                                               (6)

TNCSE has no s and t, and always X(u, v). (Numbers are this file's; the procedure is that of the authors' release.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.distributed.gather import broadcast_coin
from embedlab.encoders.cross_attention import CrossAttention, Route, check_alike, cross_layers, last_exchange
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.twin import TwinEncoder, check_addable
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError, one_of
from embedlab.kernels.packing import FullRows, Slots
from embedlab.methods.contrast import ContrastConfig, contrast_rows, interleaved_hashes
from embedlab.methods.towers import gradient_norms, load_tower, tower_pooler, towers_apart
from embedlab.objectives.modulus import FLOOR, Clamp, modulus_term
from embedlab.objectives.pair_nce import interleave
from embedlab.objectives.softmax import Contrast

TERMS = ("nce", "cross", "side", "ictm")
X = Callable[[Tensor, Tensor], Tensor]
Y = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Pooled = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def terms_of_loss(
    x: X, y: Y, pooled: Pooled, u: Tensor, v: Tensor, s: Tensor, t: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """(6): the terms of L, each computed when it is called, so that an ablation can leave some out."""

    def ictm() -> Tensor:
        p, q = pooled(u, v)
        return y(u, v, p, q) + y(v, u, q, p)

    return {
        "nce": lambda: x(u, u) + x(v, v),  # (3)
        "cross": lambda: x(u, v),  # (4), main streams
        "side": lambda: x(s, t),  # (4), side streams
        "ictm": ictm,  # (5)
    }


# ---- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JTCSEConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    backbone_kind = "encoder"
    can_unpad: ClassVar[bool] = True
    shardable: ClassVar[bool] = False
    towers = 2

    name: str = "jtcse"
    tower1: str | None = None
    """Stage-1 checkpoint of a tower: an encoder folder or a run's folder. None: the backbone itself."""
    tower2: str | None = None
    """The other tower's stage-1 encoder or run."""
    terms: tuple[str, ...] = TERMS
    """``nce``: X(u, u) + X(v, v). ``cross``: X(u, v), of the main streams. ``side``: X(s, t), of the side
    streams. ``ictm``: the modulus constraint. None at all: the towers' sum is scored and exported as it is."""
    icnce: Literal["coin", "symmetric", "fixed"] = "coin"
    """Which tower gives the anchors across towers: one coin a step (as released), both (their mean), the first."""
    n_ca: int = 3
    """Cross-attention layers (3: the paper's best; 6: the released default)."""
    wiring: Literal["side", "instream"] = "side"
    """``instream``: the exchange replaces the layers of the main streams while training."""
    route: Route = "query_owner"
    """Who goes on with an exchanged stream: the tower of its queries or that of its values."""
    tmc_scale: float = 0.5
    """1/2 as released; 1 in TNCSE's printed formula."""
    tmc_use: Literal["pooler", "last_hidden"] = "pooler"
    """Whose modulus: of the pooler's output (dense + tanh), or of the sentence vector itself."""
    clamp: Clamp = "range"
    """``range``: the cosine of the modulus constraint in [floor, 1]; ``official``: floor in place of negative ones."""
    floor: float = within(FLOOR, above=0, below=1)
    """The least cosine in the modulus constraint."""
    pooler: Literal["auto", "new"] = "auto"
    """``auto``: the checkpoint's, a new one where it has none."""
    pooler_seeds: tuple[int, int] = (1000, 2000)
    """Of new poolers, one a tower; added to the run's seed."""

    @property
    def idle(self) -> bool:
        return not self.terms

    @property
    def exchanges(self) -> bool:
        """Whether there are cross-attention layers."""
        return "side" in self.terms or (bool(self.terms) and self.wiring == "instream")

    @property
    def uses_poolers(self) -> bool:
        return "ictm" in self.terms and self.tmc_use == "pooler"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        warnings = super().check(info, run)
        if odd := [term for term in self.terms if term not in TERMS]:
            raise UserError("unknown term", key="method.terms", value=odd[0], fix=one_of(odd[0], TERMS))
        if self.tower1 == self.tower2:
            raise UserError(
                "both towers would be the same encoder, which has nothing to exchange with itself",
                key="method.tower2",
                value=self.tower2,
                fix="two stage-1 runs as method.tower1 and method.tower2, or experiment=jtcse_mini, which makes them",
            )
        if None in (self.tower1, self.tower2):
            key = "method.tower1" if self.tower1 is None else "method.tower2"
            warnings.append(
                f"{key} is not given: that tower begins as the backbone itself, not as a stage-1 run"
            )
        if self.exchanges:
            cross_layers(self.n_ca, info.layers)
        if self.terms and info.dropout == 0.0:
            warnings.append(
                "backbone.dropout=0: the two views of a sentence are equal, so method=jtcse trains on the difference "
                "of its towers alone"
            )
        return warnings


@dataclass(frozen=True)
class TNCSEConfig(JTCSEConfig):
    """No side stream, and anchors across towers always from the first."""

    name: str = "tncse"
    terms: tuple[str, ...] = ("nce", "cross", "ictm")
    icnce: Literal["coin", "symmetric", "fixed"] = "fixed"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if "side" in self.terms or self.wiring == "instream":
            raise UserError("TNCSE has no side stream", key="method.terms", value="side", fix="method=jtcse")
        return super().check(info, run)


# ---- training -----------------------------------------------------------------------------------------------------


class TwinLoss:
    """X and Y (1, 2) of one step: with candidates of all devices, repeated texts, and the step's coin.

    Args:
        config: of the method.
        hashes: ``[2N]``, equal for equal texts; None: a text that comes again is a negative.
    """

    def __init__(self, config: JTCSEConfig, hashes: Tensor | None) -> None:
        self.config, self.hashes = config, hashes
        self.within: list[Contrast] = []
        """X(u, u) and X(v, v), as they are asked for."""
        self._candidate_hashes = config.in_batch.candidates(hashes)
        self._heads: Tensor | None = None

    def x(self, a: Tensor, b: Tensor) -> Tensor:
        """(1). Across towers ``icnce`` says who gives the anchors: a coin of the step, both (their mean), the first."""
        if a is b:
            self.within.append(self._x(a, a))
            return self.within[-1].loss
        if self.config.icnce == "fixed":
            return self._x(a, b).loss
        if self.config.icnce == "symmetric":
            return (self._x(a, b).loss + self._x(b, a).loss) / 2
        if self._heads is None:
            self._heads = broadcast_coin(a.device)
        return self._x(torch.where(self._heads, a, b), torch.where(self._heads, b, a)).loss

    def y(self, u: Tensor, v: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """(2), with ``tmc_scale`` for the 1/2."""
        config = self.config
        return modulus_term(u, v, p, q, scale=config.tmc_scale, floor=config.floor, clamp=config.clamp)

    def _x(self, a: Tensor, b: Tensor) -> Contrast:
        return contrast_rows(a, b, self.hashes, self._candidate_hashes, self.config)


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
        poolers: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__(encoder, config, optimizer)  # type: ignore[arg-type]
        first, second = (tower.backbone for tower in encoder.towers)
        check_alike(first, second)
        self._layers = cross_layers(config.n_ca, first.info.layers) if config.exchanges else ()
        self._cross = CrossAttention(first, second, self._layers, config.route) if config.exchanges else None
        self.poolers: nn.ModuleList | None = None
        if config.uses_poolers:
            if poolers is None:
                raise ValueError("method.tmc_use=pooler needs the towers' poolers")
            self.poolers = nn.ModuleList(poolers)
        if (
            config.wiring == "instream"
            and "side" in config.terms
            and encoder.towers[0].pooling.needs_all_layers
        ):
            raise UserError(
                "in-stream wiring takes the vectors of X(s, t) from one layer in the middle",
                key="pooling",
                value=encoder.towers[0].pooling.config.name,
                fix="a pooling of the last layer, or method.wiring=side",
            )

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> JTCSE:
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
        first, second = (tower.encoder for tower in towers)
        check_addable(first, second, "tower 2")
        encoder = TwinEncoder([tower.encoder for tower in towers])
        poolers = None
        if config.uses_poolers:
            sources = [[t.source, run.backbone] if config.pooler == "auto" else [] for t in towers]
            one, two = (seed + run.seed for seed in config.pooler_seeds)
            poolers = tower_pooler(sources[0], encoder.dim, one), tower_pooler(sources[1], encoder.dim, two)
        return cls(encoder, config, run.optimizer, poolers)

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
    def forward_passes(self) -> float:
        """Two views through two towers, and the share of the layers that the side streams run again."""
        side = 0.0 if self._cross is None else 1 - self._cross.fork / self._cross.depth
        return 4.0 * (1.0 + side)

    def losses(self, batch: Batch) -> LossOutput:
        view, config = batch["sentence"], self.config
        ids, mask = (interleave(x, x) for x in (view["input_ids"], view["attention_mask"]))
        budget = view.get("token_budget")
        capacity = None if budget is None else 2 * budget
        u, v, s, t = self.by_chunks(lambda i, m: self.streams(i, m, capacity), ids, mask)
        hashes = config.in_batch.text_hashes(view)
        loss = TwinLoss(config, interleaved_hashes(hashes, hashes))
        terms = terms_of_loss(loss.x, loss.y, self.pooled, u, v, s, t)
        losses = {name: term() for name, term in terms.items() if name in config.terms}
        if "nce" not in losses:
            terms["nce"]()  # for its diagnostics
        stats = {
            name: torch.stack([c.stats[name] for c in loss.within]).mean() for name in loss.within[0].stats
        }
        stats |= towers_apart(u, v)
        if torch.is_grad_enabled():
            stats |= gradient_norms(losses, [u, v] if self._cross is None else [u, v, s, t])
        return LossOutput(losses, stats)

    def streams(
        self, ids: Tensor, mask: Tensor, capacity: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, v of the main streams and s, t of the side streams, ``[2N, D]`` each (u, v again without one).

        With a `capacity` that many tokens are computed, the true ones (`Backbone.forward`).
        """
        first, second = self.encoder.towers
        if self._cross is None:
            u, v = first(ids, mask, capacity), second(ids, mask, capacity)
            return u, v, u, v
        beside, position = self.config.wiring == "side", None
        if beside and first.backbone.reads_one(ids.device, capacity is not None):
            position = first.pooling.position(mask, first.tokenization.marks)
        main, (g1, g2), slots = self._cross(ids, mask, main=beside, capacity=capacity, position=position)
        u, v = pool(first, g1, mask, slots), pool(second, g2, mask, slots)
        if main is not None:
            return pool(first, main[0], mask, slots), pool(second, main[1], mask, slots), u, v
        s, t = last_exchange(g1, self._layers), last_exchange(g2, self._layers)
        return u, v, pool(first, (s,), mask, slots), pool(second, (t,), mask, slots)

    def pooled(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """p and q ``[2N, D]``, whose modulus counts: u and v themselves without poolers."""
        if self.poolers is None:
            return u, v
        with torch.autocast(u.device.type, enabled=False):
            return self.poolers[0](u), self.poolers[1](v)


class TNCSE(JTCSE):
    """Without side streams, and with anchors across towers always from the first."""

    config_class = TNCSEConfig


def pool(
    tower: SentenceEncoder, states: tuple[Tensor, ...], mask: Tensor, slots: Slots | FullRows | None
) -> Tensor:
    """A tower's sentence vectors ``[B, D]`` from hidden states of its form, of the main or of the side stream."""
    pooling = tower.pooling
    if slots is not None:
        states = slots.unpack_all(states if pooling.needs_all_layers else states[-1:])
    return pooling(states, mask, tower.tokenization.marks)
