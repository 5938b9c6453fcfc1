"""RankCSE (Liu et al. 2023): the ranking of a batch, the same in both dropout views, and as its teachers have it.

    L = N + beta mean_i JS(P_i, Q_i) + gamma R                                                         (1)
    P = softmax(S / tau), Q = softmax(S' / tau),  S_ij = cos(z1_i, z2_j),  S'_ij = cos(z2_i, z1_j)     (2)
    T = alpha cos(t1_i, t1_j) + (1 - alpha) cos(t2_i, t2_j), of one teacher cos(t1_i, t1_j)            (3)

N is SimCSE's loss and R = R(S, T) ListNet's or ListMLE's. (Numbers are this file's.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig, check_dropout, contrast
from embedlab.methods.heads import Head, new_head
from embedlab.methods.simcse import encode_views
from embedlab.methods.teachers import TaughtMethod, load_teacher, teacher_pooling
from embedlab.objectives.ranking import jensen_shannon, list_mle, list_net
from embedlab.objectives.similarity import cosines

GAMMA = {"listnet": 0.1, "listmle": 1.0}
"""Defaults of an unofficial script."""


@dataclass(frozen=True)
class RankCSEConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    can_unpad: ClassVar[bool] = True
    shardable: ClassVar[bool] = False

    name: str = "rankcse"
    teacher: str | None = None
    """What `embedlab.load` takes: any encoder, with vectors of any width. A SimCSE run will do."""
    teacher2: str | None = None
    cached: bool = False
    """The teachers' vectors are computed once, before the first step, and kept in half precision; False: in each step
    anew."""
    alpha: float = within(1 / 3, least=0, most=1)
    """Weight of the first of two teachers' similarities."""
    teacher_pooling: str | None = None
    """Read the teachers by this pooling, which has no weights (``cls``). None: by their own."""
    ranking: Literal["listnet", "listmle"] = "listmle"
    beta: float = within(1.0, least=0)
    """Weight of the Jensen-Shannon divergence of the two views' rankings."""
    gamma: float | None = within(None, least=0)
    """Weight of the teacher's ranking; None: 0.1 for ``listnet``, 1 for ``listmle``."""
    tau2: float = within(0.05, above=0)
    """Of the student's similarities in the ranking."""
    tau3: float | None = within(None, above=0)
    """Of the teacher's in ListNet; None: half of ``tau2``."""
    self_in_list: bool = True
    """Whether a sentence's own second view is in its list."""
    form: Literal["paper", "released"] = "paper"
    """``released``, of an unofficial script: the student's temperature is ``tau`` in the ranking too and the teacher's
    ``tau2``, ListNet's list has no own view, ListMLE draws lots between equals, and the divergence, always of weight 1,
    has a mixture of probability 1, so that it rewards flat rankings."""
    mlp: Head = "train"

    @property
    def weight(self) -> float:
        """gamma."""
        return GAMMA[self.ranking] if self.gamma is None else self.gamma

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if not self.teacher:
            raise UserError(
                "there is no teacher", key="method.teacher", fix="method.teacher=RUN; a SimCSE run will do"
            )
        if self.teacher_pooling is not None:
            teacher_pooling(self.teacher_pooling)
        check_dropout(self.name, info)
        self._check_read()
        return super().check(info, run)

    def _check_read(self) -> None:
        """UserError for a key that was set and that this form of the ranking does not read."""
        if not self.teacher2:
            self.refuse_unread("alpha", "there is one teacher", "method.teacher2=RUN")
        if self.form == "released":
            self.refuse_unread("beta tau3", "method.form=released does not read it", "method.form=paper")
        if self.ranking == "listmle":
            why, fix = "method.ranking=listmle has no temperature of the teacher's", "method.ranking=listnet"
            self.refuse_unread("tau3" if self.form == "paper" else "tau2", why, fix)
        elif self.form == "released":
            self.refuse_unread("self_in_list", "this form's list has no own view", "method.form=paper")


class RankCSE(TaughtMethod):
    """Both dropout views of a sentence against each other and against frozen teachers (1)."""

    config_class = RankCSEConfig
    config: RankCSEConfig

    def __init__(
        self,
        encoder: SentenceEncoder,
        config: RankCSEConfig,
        optimizer: OptimizerConfig,
        teachers: tuple[Encoder, ...],
    ) -> None:
        super().__init__(encoder, config, optimizer)
        self.head: nn.Module = new_head(config.mlp, encoder.dim)
        self.teach_by(teachers, config.cached)

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> RankCSE:
        config = run.method
        assert isinstance(config, RankCSEConfig)
        named = {key: path for key in ("teacher", "teacher2") if (path := getattr(config, key))}
        teachers = tuple(
            load_teacher(path, f"method.{key}", config.teacher_pooling) for key, path in named.items()
        )
        encoder = cls.make_encoder(run, tokenizer)
        assert isinstance(encoder, SentenceEncoder)
        return cls(encoder, config, run.optimizer, teachers)

    @property
    def forward_passes(self) -> float:
        return 2.0

    def losses(self, batch: Batch) -> LossOutput:
        config, view = self.config, batch["sentence"]
        released = config.form == "released"
        z1, z2 = encode_views(self.encoder, [view, view], self.head)
        result = contrast((z1, z2), [config.in_batch.text_hashes(view)] * 2, config)
        candidates, offset = config.in_batch.candidates, config.in_batch.offset(z1)
        s, s2 = cosines(z1, candidates(z2)), cosines(z2, candidates(z1))  # (2)
        divergence = jensen_shannon(s / config.tau, s2 / config.tau, released)
        rank = self._ranking(s, self._teachers_list(batch), offset)
        beta = 1.0 if released else config.beta
        losses = {"info_nce": result.loss, "consistency": beta * divergence, "ranking": config.weight * rank}
        return LossOutput(losses, result.stats)  # (1)

    def _teachers_list(self, batch: Batch) -> Tensor:
        """T ``[B, M]`` (3)."""
        vectors = [teacher(batch) for teacher in self.teachers]
        lists = [cosines(t, self.config.in_batch.candidates(t)) for t in vectors]
        alpha = self.config.alpha
        return lists[0] if len(lists) == 1 else alpha * lists[0] + (1 - alpha) * lists[1]

    def _ranking(self, scores: Tensor, teacher: Tensor, offset: int) -> Tensor:
        """R(S, T)."""
        config, released = self.config, self.config.form == "released"
        own = None
        if not config.self_in_list or (released and config.ranking == "listnet"):
            row = torch.arange(len(scores), device=scores.device) + offset
            own = torch.arange(scores.shape[1], device=scores.device) == row[:, None]
        tau = config.tau if released else config.tau2
        if config.ranking == "listnet":
            half = config.tau2 / 2 if config.tau3 is None else config.tau3
            return list_net(scores, teacher, tau, config.tau2 if released else half, own)
        if released:
            lots = torch.rand(scores.shape[1], device=scores.device).argsort()
            scores, teacher = scores[:, lots], teacher[:, lots]
            own = None if own is None else own[:, lots]
        return list_mle(scores, teacher, tau, own)
