"""MetaEOL (Lei et al., ACL 2024): a sentence in several prompts, each for another task; the mean of their vectors.

Nothing is trained. Each prompt ends where one word is to follow, which the last token's state stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from embedlab.backbones import load_backbone
from embedlab.backbones.adapters import adapt, rank_device
from embedlab.config.backbone import BackboneInfo
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.config.template import Template
from embedlab.distributed.devices import on_cuda
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.text_normalization import TEXT_NORMALIZATIONS
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError, blamed_on, one_of
from embedlab.pooling import build_pooling


@dataclass(frozen=True)
class MetaEOLConfig(MethodConfig):
    shardable: ClassVar[bool] = False
    towers = 2

    name: str = "metaeol"
    templates: tuple[str, ...] = ()
    """Each with ``{sentence}`` once."""
    text: str = "closed"
    """Text normalization before encoding; ``closed``: a sentence ends in a full stop."""

    @property
    def idle(self) -> bool:
        return True

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if not self.templates:
            raise UserError("no prompts", key="method.templates", value=[], fix="method=metaeol has eight")
        if len(set(self.templates)) < len(self.templates):
            fix = "each prompt once"
            raise UserError(
                "a prompt stands there twice", key="method.templates", value=len(self.templates), fix=fix
            )
        if self.text not in TEXT_NORMALIZATIONS:
            fix = one_of(self.text, TEXT_NORMALIZATIONS)
            raise UserError("unknown text normalization", key="method.text", value=self.text, fix=fix)
        for template in self.made:
            run.pooling.check(info, template, self.name)
        if run.template is not None:
            raise UserError("the prompts are the method's", key="template", fix="template=none")
        return super().check(info, run)

    @property
    def made(self) -> list[Template]:
        """The templates; joined as text, as PromptEOL's."""
        found = []
        for text in self.templates:
            with blamed_on("method.templates", text):
                found.append(Template(text, "text"))
        return found


class MetaEOL(Method):
    """One backbone in several prompts."""

    config_class = MetaEOLConfig
    config: MetaEOLConfig

    @classmethod
    def make_encoder(cls, run: RunConfig, tokenizer: Any = None) -> Encoder:
        config = run.method
        assert isinstance(config, MetaEOLConfig)
        backbone, tokenizer = load_backbone(run.backbone, tokenizer=tokenizer)
        adapt(backbone, run.adapter, run.backbone, rank_device(on_cuda(run.trainer), run.trainer.devices))
        pooling = build_pooling(run.pooling, backbone.info)
        ways = []
        for template in config.made:
            with blamed_on("method.templates", template.text):
                ways.append(Tokenization(tokenizer, template, preparation=config.text))
        towers: Sequence[SentenceEncoder] = [SentenceEncoder(backbone, pooling, way) for way in ways]
        return towers[0] if len(towers) == 1 else TwinEncoder(towers, [1 / len(towers)] * len(towers))

    def losses(self, batch: Batch) -> LossOutput:
        raise NotImplementedError("MetaEOL is not trained")
