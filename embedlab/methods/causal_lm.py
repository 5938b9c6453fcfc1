"""Next-token prediction on packed text (Radford et al. 2018): pretrains a small decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from embedlab.config.backbone import BackboneInfo
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.objectives.language_model import next_tokens, token_accuracy, token_cross_entropy


@dataclass(frozen=True)
class CausalLMConfig(MethodConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    backbone_kind = "decoder"
    """An encoder sees the tokens that it would predict."""
    # GPT decays "all non bias or gain weights" (Radford et al. 2018, section 4.1).
    decays_norms_and_biases: ClassVar[bool] = False
    shardable: ClassVar[bool] = False

    name: str = "causal_lm"

    @property
    def pools(self) -> bool:
        return False

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if run.template is not None:
            raise UserError("running text has no template", key="template", fix="template=none")
        return super().check(info, run)


class CausalLM(Method):
    """Cross-entropy of each token given those before it."""

    config_class = CausalLMConfig
    config: CausalLMConfig
    head_kind = "causal_lm"

    def losses(self, batch: Batch) -> LossOutput:
        ids, mask = batch["sentence"]["input_ids"], batch["sentence"]["attention_mask"]
        backbone = self.encoder.backbone
        assert backbone.head is not None
        logits = backbone.head(backbone(ids, mask)[-1])
        labels = next_tokens(ids, mask)
        return LossOutput(
            {"causal_lm": token_cross_entropy(logits, labels)}, {"accuracy": token_accuracy(logits, labels)}
        )
