"""What an architecture's configuration says: its kind, sizes, dropout, position ids, blocks. No weights, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from embedlab.config.backbone import BackboneInfo

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


_OFFSET_TYPES = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "data2vec-text", "xmod",
     "roberta-prelayernorm", "ibert", "esm", "lilt", "luke")
)  # fmt: skip
"""Position ids of these start at padding_idx + 1, which their table of positions has room for."""


def position_offset(config: Any) -> int:
    """The position id of the first token."""
    if config.model_type not in _OFFSET_TYPES:
        return 0
    return int(config.pad_token_id if config.pad_token_id is not None else 1) + 1


def find_blocks(model: nn.Module, layers: int) -> nn.ModuleList:
    """The list of `layers` transformer blocks in a model: the outermost module list of that length."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {layers} blocks")


_HIDDEN_DROPOUTS = (
    "hidden_dropout_prob", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "embd_dropout",
    "mlp_dropout", "embedding_dropout", "embed_dropout", "resid_dropout", "residual_dropout",
)  # fmt: skip


_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "attn_dropout")


_DROPOUTS = _HIDDEN_DROPOUTS + _ATTENTION_DROPOUTS


def set_dropout(found: PretrainedConfig, dropout: float | None) -> PretrainedConfig:
    """Set every hidden and attention dropout probability that the architecture has; None changes nothing."""
    if dropout is not None:
        for key in _DROPOUTS:
            if isinstance(getattr(found, key, None), int | float):
                setattr(found, key, float(dropout))
    return found


def effective_dropout(found: PretrainedConfig) -> float:
    """The highest of the hidden and attention dropout probabilities."""
    values = [getattr(found, key, None) for key in _DROPOUTS]
    return max(
        (float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)), default=0.0
    )


def describe(found: PretrainedConfig, has_mask_token: bool) -> BackboneInfo:
    """What a Hugging Face configuration says of the model."""
    kind = kind_of(found)
    architectures = getattr(found, "architectures", None) or []
    positions = getattr(found, "max_position_embeddings", None)
    width = int(found.hidden_size)
    return BackboneInfo(
        kind=kind,
        layers=int(found.num_hidden_layers),
        width=int(getattr(found, "word_embed_proj_dim", None) or width),
        max_positions=int(positions) - position_offset(found) if positions and positions > 0 else None,
        has_mask_token=has_mask_token,
        dropout=effective_dropout(found),
        model_type=found.model_type,
        has_mlm_head=kind == "encoder"
        and any(a.endswith(("ForMaskedLM", "ForPreTraining", "LMHeadModel")) for a in architectures),
        inner_width=width,
    )


def kind_of(found: PretrainedConfig) -> Literal["encoder", "decoder"]:
    """Whether the model looks both ways. A causal architecture set to look both ways is an encoder."""
    if getattr(found, "is_decoder", False):
        return "decoder"
    causal = is_decoder(found.model_type) and getattr(found, "is_causal", True) is not False
    return "decoder" if causal and not getattr(found, "use_bidirectional_attention", False) else "encoder"


def is_decoder(model_type: str) -> bool:
    """Whether an architecture is causal."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    return (
        model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )
