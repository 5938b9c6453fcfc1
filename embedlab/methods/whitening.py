"""BERT-whitening (Su et al. 2021): a finished encoder's vectors are mapped to unit covariance; nothing is trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.loading import load
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError, blamed_on
from embedlab.pooling import build_pooling
from embedlab.pooling.whitening import Whitening, WhiteningConfig, fit_whitening

log = logging.getLogger(__name__)

_WIDTH = 256
"""Directions of the paper's base models."""
_AT_ONCE = 8192
_TOKENS = 16384


@dataclass(frozen=True)
class WhiteningMethodConfig(MethodConfig):
    shardable: ClassVar[bool] = False

    name: str = "whitening"
    encoder: str | None = None
    """What `embedlab.load` takes, of one tower. None: the run's backbone with the run's pooling."""
    k: int | None = None
    """Directions that are kept, of largest variance (the paper: 256 for base, 384 for large); 0: all in which the
    vectors vary; None: 256, or fewer where they vary in fewer."""

    @property
    def idle(self) -> bool:
        return True

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        k = self.k or 0
        width = build_pooling(run.pooling, info).dim  # which need not be the backbone's
        if k < 0 or (self.encoder is None and k > width):
            raise UserError(
                "no more directions than a vector has", key="method.k", value=k, fix=f"0 to {width}"
            )
        if run.data.pack is not None:
            raise UserError("vectors are of single sentences", key="data.pack", fix="data.pack=null")
        return super().check(info, run)


class WhiteningMethod(Method):
    """Fits the map to the run's text, all its columns; the encoder that is scored before has none."""

    config_class = WhiteningMethodConfig
    config: WhiteningMethodConfig

    @classmethod
    def make_encoder(cls, run: RunConfig, tokenizer: Any = None) -> Encoder:
        config = run.method
        assert isinstance(config, WhiteningMethodConfig)
        if config.encoder is None:
            return super().make_encoder(run, tokenizer)
        with blamed_on("method.encoder", config.encoder):
            encoder = load(config.encoder)
        if not isinstance(encoder, SentenceEncoder):
            raise UserError(
                "the towers of a twin have no pooling in common",
                key="method.encoder",
                value=config.encoder,
                fix="an encoder of one tower, such as the twin's student",
            )
        if encoder.dim != encoder.pooling.dim:
            raise UserError(
                f"its vectors are cut to {encoder.dim} features, and would be cut again behind the map",
                key="method.encoder",
                value=config.encoder,
                fix="a copy of it without truncate_dim",
            )
        if (config.k or 0) > encoder.pooling.dim:
            raise UserError(
                "no more directions than a vector has",
                key="method.k",
                value=config.k,
                fix=f"0 to {encoder.pooling.dim}",
            )
        return encoder

    def on_fit_start(self) -> None:
        super().on_fit_start()
        encoder = self.encoder
        inner = encoder.pooling
        asked = self.config.k
        wanted = min(_WIDTH, inner.dim) if asked is None else asked or inner.dim
        fitted = fit_whitening(self._vectors(), wanted, fewer=not asked)
        k = fitted.matrix.shape[1]
        if k < wanted:
            log.info("method.k=%d: the vectors vary in no more directions (of %d).", k, inner.dim)
        mapped = Whitening(WhiteningConfig(of=asdict(inner.config), k=k), encoder.backbone.info).to(
            self.device
        )
        mapped.inner.load_state_dict(inner.state_dict())
        mapped.set(fitted)
        encoder.pooling = mapped

    def _vectors(self) -> Iterator[Tensor]:
        table = self.trainer.datamodule.table  # type: ignore[attr-defined]
        for view in table.fields.values():
            for start in range(0, table.n_rows, _AT_ONCE):
                rows = [view.row(i) for i in range(start, min(start + _AT_ONCE, table.n_rows))]
                yield self.encoder.encode_ids(rows, batch_tokens=_TOKENS)

    def losses(self, batch: Batch) -> LossOutput:
        raise NotImplementedError("whitening is fitted, not trained")
