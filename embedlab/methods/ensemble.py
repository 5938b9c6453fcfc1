"""A weighted sum of finished encoders (JTCSE-UC): nothing is trained, the sum is scored and exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from embedlab.config.backbone import BackboneInfo
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.encoders.base import Encoder
from embedlab.encoders.loading import load
from embedlab.encoders.twin import ensemble
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError, blamed_on
from embedlab.pooling import pooling_config


@dataclass(frozen=True)
class EnsembleConfig(MethodConfig):
    shardable: ClassVar[bool] = False
    towers = 2

    name: str = "ensemble"
    first: str | None = None
    """What `embedlab.load` takes; a twin counts as its sum."""
    second: str | None = None
    """The other encoder: a run folder or an encoder folder."""
    pooling: str | None = None
    """Read both by this pooling, which has no weights (``cls``), as a plain model says nothing of its own. None: by
    their own."""
    weights: tuple[float, float] = (0.3, 0.7)
    """Of first and second: those of JTCSE-UC and TNCSE-UC."""

    @property
    def idle(self) -> bool:
        return True

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        for key in ("first", "second"):
            if not getattr(self, key):
                raise UserError("an ensemble has two members", key=f"method.{key}", fix=f"method.{key}=RUN")
        if not any(self.weights):
            fix = "method.weights=[0.3,0.7]"
            raise UserError(
                "a weight for each member", key="method.weights", value=list(self.weights), fix=fix
            )
        if self.pooling is not None:
            pooling_config(self.pooling)
        return []


def _member(config: EnsembleConfig, key: str) -> Encoder:
    with blamed_on(f"method.{key}"):
        return load(str(getattr(config, key)))


class Ensemble(Method):
    """``first`` and ``second``, weighted and added; there is no training step."""

    config_class = EnsembleConfig
    config: EnsembleConfig

    @classmethod
    def make_encoder(cls, run: RunConfig, tokenizer: Any = None) -> Encoder:
        config = run.method
        assert isinstance(config, EnsembleConfig)
        members = [_member(config, key) for key in ("first", "second")]
        if config.pooling is not None:
            for tower in [tower for member in members for tower in member.towers]:
                tower.read_by(pooling_config(config.pooling))
        return ensemble(members, config.weights)

    def losses(self, batch: Batch) -> LossOutput:
        raise NotImplementedError("an ensemble is not trained")
