"""Next-token prediction on packed text (Radford et al. 2018): pretrains a small decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from embedlab.config.run import MethodConfig
from embedlab.engine.module import Batch, Fields, LossOutput, Method
from embedlab.errors import UserError
from embedlab.objectives.language_model import next_tokens, token_accuracy, token_cross_entropy

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.run import RunConfig
    from embedlab.config.template import Template


@dataclass(frozen=True)
class CausalLMConfig(MethodConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    # GPT decays "all non bias or gain weights" (Radford et al. 2018, section 4.1).
    decays_norms_and_biases: ClassVar[bool] = False
    shardable: ClassVar[bool] = False

    name: str = "causal_lm"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if info.kind != "decoder":
            raise UserError(
                "an encoder sees the tokens that it would predict",
                key="method",
                value=self.name,
                fix="method=masked_lm",
            )
        if run.template is not None:
            raise UserError("running text has no template", key="template", fix="template=none")
        return []


class CausalLM(Method):
    """Cross-entropy of each token given those before it."""

    name = "causal_lm"
    config_class = CausalLMConfig
    config: CausalLMConfig
    head_kind = "causal_lm"

    @classmethod
    def fields(cls, config: MethodConfig, roles: tuple[str, ...], template: Template | None) -> Fields:
        return {"sentence": ("sentence", None)}

    def losses(self, batch: Batch) -> LossOutput:
        ids, mask = batch["sentence"]["input_ids"], batch["sentence"]["attention_mask"]
        backbone = self.encoder.backbone
        assert backbone.head is not None
        logits = backbone.head(backbone(ids, mask)[-1])
        labels = next_tokens(ids, mask)
        return LossOutput(
            {"causal_lm": token_cross_entropy(logits, labels)}, {"accuracy": token_accuracy(logits, labels)}
        )
