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
from embedlab.errors import UserError


@dataclass(frozen=True)
class EnsembleConfig(MethodConfig):
    shardable: ClassVar[bool] = False
    towers = 2

    name: str = "ensemble"
    first: str | None = None
    """What `embedlab.load` takes; a twin counts as its sum."""
    second: str | None = None
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
            raise UserError("a weight for each member", key="method.weights", value=list(self.weights))
        return []


class Ensemble(Method):
    """``first`` and ``second``, weighted and added; there is no training step."""

    config_class = EnsembleConfig
    config: EnsembleConfig

    @classmethod
    def make_encoder(cls, run: RunConfig, tokenizer: Any = None) -> Encoder:
        config = run.method
        assert isinstance(config, EnsembleConfig)
        members = [load(str(path)) for path in (config.first, config.second)]
        return ensemble(members, config.weights)

    def losses(self, batch: Batch) -> LossOutput:
        raise NotImplementedError("an ensemble is not trained")
