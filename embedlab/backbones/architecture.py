"""What an architecture's configuration says: its kind, sizes, dropout, position ids, blocks. No weights, no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from embedlab.config.backbone import BackboneInfo
from embedlab.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


_OFFSET_TYPES = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "data2vec-text", "xmod",
     "roberta-prelayernorm", "ibert", "esm", "lilt", "luke", "markuplm")
)  # fmt: skip
"""Position ids of these start at padding_idx + 1, which their table of positions has room for."""


def position_offset(config: Any) -> int:
    """The position id of the first token."""
    if config.model_type not in _OFFSET_TYPES:
        return 0
    return int(config.pad_token_id if config.pad_token_id is not None else 1) + 1


_MIXES_PADDING = frozenset(
    ("canine", "convbert", "cpmant", "fnet", "mobilebert", "nystromformer", "reformer", "yoso")
)
"""Padding reaches the real tokens of these (convolutions, Fourier transforms, landmarks, hashing), whatever the mask
says: their rows are computed by lengths."""

_RUNS_ALONG = frozenset(("recurrent_gemma",))
"""Their state runs along the row and takes in padding before the tokens, though they are told position ids."""

_NO_BLOCKS = frozenset(("albert", "canine", "flaubert", "hrm_text", "longcat_flash", "xlm"))
"""No list with a module for each layer: shared ones (ALBERT), two in one (LongCat), or a list for each part (XLM)."""

_NO_ADAPTERS = frozenset(
    (
        "falcon_h1",
        "falcon_mamba",
        "ibert",
        "jamba",
        "mamba",
        "mamba2",
        "nemotron_h",
        "reformer",
        "squeezebert",
    )
)
"""Mamba's kernels read weights of projections without calling them, Reformer's reversible layers need an input with
gradients, and the projections of SqueezeBERT (convolutions) and I-BERT (quantised) are no linear layers."""

_EAGER = frozenset((
     "big_bird", "bigbird_pegasus", "bloom", "canine", "convbert", "cpmant", "deberta",
     "deberta-v2", "deepseek_v4", "falcon_mamba", "flaubert", "flint", "fnet", "fsmt", "gemma2",
     "gpt_neo", "gpt_neox_japanese", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4",
     "hy_v4_vl_text", "ibert", "inkling2_loop_text", "inkling2_text", "led", "lilt", "longformer",
     "longt5", "luke", "mamba", "mamba2", "markuplm", "megatron-bert", "mimo_v2_flash", "mpnet",
     "mpt", "mvp", "nllb-moe", "nystromformer", "openai-gpt", "openai_privacy_filter", "pegasus_x",
     "prophetnet", "reformer", "rembert", "roformer", "rwkv", "splinter", "squeezebert",
     "switch_transformers", "t5gemma", "tapas", "vaultgemma", "xglm", "xlm", "xlnet", "xlstm",
     "yoso",
))  # fmt: skip
"""transformers has no sdpa attention for these, so that they run eager, which looks at the mask on the host."""

_OLD_SDPA = frozenset(("falcon",))
"""Those with an sdpa of their own, outside of transformers' interface."""

_NO_LAYER_STATES = frozenset(
    ("canine", "dory", "gemma3n_text", "hrm_text", "longcat_flash", "pegasus_x", "qwen4_exp_text")
)
"""Their hidden states are not one after each layer."""


def mixes_padding(model_type: str) -> bool:
    """Whether real tokens of an architecture are changed by padding that the mask leaves out."""
    return model_type in _MIXES_PADDING


def counts_places(model_type: str) -> bool:
    """Whether padding has to stand behind the tokens, although the architecture takes position ids."""
    return model_type in _RUNS_ALONG


def has_blocks(model_type: str) -> bool:
    """Whether an architecture's layers can be adapted, compiled and sharded one by one."""
    return model_type not in _NO_BLOCKS


def runs_eager(model_type: str) -> bool:
    """Whether transformers has no sdpa attention for an architecture."""
    return model_type in _EAGER


def can_be_captured(model_type: str) -> bool:
    """Whether a step over an architecture can be a CUDA graph: nothing in it looks at the tokens on the host."""
    return model_type not in _MIXES_PADDING | _EAGER | _OLD_SDPA


def check_blocks(model_type: str, key: str, value: object) -> None:
    """Raise UserError where a setting (`key`) works on single blocks and the architecture has none."""
    if not has_blocks(model_type):
        raise UserError(
            f"{model_type} has no list of transformer blocks for it",
            key=key,
            value=value,
            fix="another architecture, or the default",
        )


def can_be_adapted(model_type: str) -> bool:
    """Whether LoRA can be put on an architecture's linear layers, and merged into them."""
    return has_blocks(model_type) and model_type not in _NO_ADAPTERS


def check_adapter(model_type: str, adapter: str) -> None:
    """Raise UserError where an architecture's linear layers cannot be adapted."""
    check_blocks(model_type, "adapter", adapter)
    if not can_be_adapted(model_type):
        raise UserError(
            f"there is no LoRA for {model_type}", key="adapter", value=adapter, fix="adapter=none"
        )


def has_layer_states(model_type: str) -> bool:
    """Whether an architecture gives its hidden states before the first layer and after each."""
    return model_type not in _NO_LAYER_STATES


def check_layer_states(model_type: str) -> None:
    """Raise UserError where an architecture has no hidden state for each layer, as poolings over layers need."""
    if not has_layer_states(model_type):
        raise UserError(
            f"{model_type} has no hidden state after each layer",
            key="pooling",
            fix="a pooling of the last layer (pooling=mean), or another architecture",
        )


def find_blocks(model: nn.Module, layers: int) -> nn.ModuleList:
    """The list of `layers` transformer blocks in a model: the outermost module list of that length.

    Raises:
        UserError: there is none.
    """
    from torch import nn

    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if has_blocks(model_type):
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == layers:
                return module
    raise UserError(
        f"{model_type or type(model).__name__} has no list of {layers} transformer blocks",
        key="backbone",
        fix="another architecture, without adapter, compilation or shards",
    )


_HIDDEN_DROPOUTS = (
    "hidden_dropout_prob", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "embd_dropout",
    "mlp_dropout", "dropout_rate", "embedding_dropout", "embed_dropout", "resid_dropout", "residual_dropout",
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
    """What a Hugging Face configuration says of the model; of an encoder-decoder, of its encoder."""
    kind = kind_of(found)
    both = is_encoder_decoder(found)
    architectures = getattr(found, "architectures", None) or []
    body = _body(found)
    width = int(body.hidden_size)
    return BackboneInfo(
        kind=kind,
        layers=int(body.num_hidden_layers),
        width=_last_width(body),
        max_positions=max_positions(body),
        has_mask_token=has_mask_token,
        dropout=effective_dropout(body),
        model_type=found.model_type,
        has_mlm_head=kind == "encoder"
        and not both
        and any(a.endswith(("ForMaskedLM", "ForPreTraining", "LMHeadModel")) for a in architectures),
        inner_width=width,
    )


def _body(found: Any) -> Any:
    """The configuration of the part that is taken: of an encoder-decoder its encoder's, where that has one."""
    encoder = getattr(found, "encoder", None)
    return encoder if is_encoder_decoder(found) and hasattr(encoder, "hidden_size") else found


def caps_scores(found: PretrainedConfig) -> bool:
    """Whether attention caps its scores, as torch's cannot: transformers before 5.21 leaves it out unsaid."""
    return getattr(_body(found), "attn_logit_softcapping", None) is not None


def _last_width(found: Any) -> int:
    """Features of the last hidden state, where that is not as wide as the others."""
    if found.model_type == "reformer":  # both streams of its reversible layers
        return 2 * int(found.hidden_size)
    key = {"opt": "word_embed_proj_dim", "embedding_gemma2_text": "embedding_dim"}.get(
        found.model_type, "hidden_size"
    )
    return int(getattr(found, key, None) or found.hidden_size)


def max_positions(found: Any) -> int | None:
    """Tokens that a model takes at most; None: no limit of its own."""
    for key in ("max_encoder_position_embeddings", "max_position_embeddings", "max_seq_len"):
        positions = getattr(found, key, None)
        if positions and positions > 0:
            return int(positions) - position_offset(found)
    return None


def kind_of(found: PretrainedConfig) -> Literal["encoder", "decoder"]:
    """Whether the model looks both ways. A causal architecture set to look both ways is an encoder."""
    if is_encoder_decoder(found):
        return "encoder"
    if getattr(found, "is_decoder", False):
        return "decoder"
    causal = is_decoder(found.model_type) and getattr(found, "is_causal", True) is not False
    # Gemma's: true or false, later "all", or "vision" for pictures alone.
    both_ways = getattr(found, "use_bidirectional_attention", False) in (True, "all")
    return "decoder" if causal and not both_ways else "encoder"


BOTH_WAYS = ("gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2")
"""Decoders that look both ways where their configuration says so, with and without padding."""


def look_both_ways(found: PretrainedConfig, attention: str) -> None:
    """Make a decoder's configuration that of an encoder, as it is then saved.

    Raises:
        UserError: it is none, or one of which this is not known to work.
    """
    if kind_of(found) == "encoder":
        raise UserError(
            f"{found.model_type} looks both ways as it is",
            key="backbone.bidirectional",
            value=True,
            fix="backbone.bidirectional=false",
        )
    if found.model_type not in BOTH_WAYS or attention != "sdpa":
        raise UserError(
            f"{found.model_type} is not known to look both ways by {attention}",
            key="backbone.bidirectional",
            value=True,
            fix=f"{', '.join(BOTH_WAYS)}, by backbone.attention=sdpa",
        )
    found.is_causal = False


def head_of(found: PretrainedConfig) -> Literal["masked_lm", "causal_lm"]:
    """The language-modelling head that an architecture has, whichever way it looks."""
    return "causal_lm" if kind_of(found) == "decoder" or is_decoder(found.model_type) else "masked_lm"


_CAUSAL = frozenset(("clip_text_model", "mistral4"))
_BIDIRECTIONAL = frozenset(("bert-generation", "cpmant", "embedding_gemma2_text", "xlnet"))
"""What the lists of heads do not tell: causal without a causal head, and the other way round."""


def is_decoder(model_type: str) -> bool:
    """Whether an architecture is causal."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if model_type in _CAUSAL or model_type in _BIDIRECTIONAL:
        return model_type in _CAUSAL
    # The text parts of models of pictures are decoders, and have no head of their own.
    headed = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type.endswith("_text")
    return headed and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def is_encoder_decoder(found: PretrainedConfig) -> bool:
    """Whether a model has an encoder, which is taken, and a decoder, which is not read.

    The type says it: an encoder that was saved by itself keeps the type, and says that it is none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    return found.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def without_decoder(model: Any) -> Any:
    """An encoder-decoder without its decoder, in place, under the names of its checkpoint; others as they are."""
    if is_encoder_decoder(model.config) and getattr(model, "decoder", None) is not None:
        model.decoder = None
        tied: dict[str, str] = model.all_tied_weights_keys
        model.all_tied_weights_keys = {k: v for k, v in tied.items() if not f"{k} {v}".count("decoder.")}
    return model


def reads_with(model: Any) -> Any:
    """The module whose forward pass gives the hidden states."""
    return model.get_encoder() if getattr(model, "decoder", model) is None else model


UNREADABLE = {
    "blt": "reads bytes in patches that a second model cuts",
    "bros": "needs the place of each word on a page",
    "dpr": "gives one vector and no hidden states",
    "funnel": "pools its tokens in pairs, so that short texts fail and padding changes the others",
    "evolla": "reads proteins beside text",
    "imagegpt": "reads colours, not text",
    "lxmert": "needs pictures beside text",
    "mra": "needs a CUDA kernel that is fetched from the hub",
    "neomme": "reads pictures beside text",
    "perceiver": "reads what a preprocessor of its own makes of a text",
    "seamless_m4t": "reads speech beside text",
    "seamless_m4t_v2": "reads speech beside text",
    "t5gemma2": "reads pictures beside text",
    "whisper": "reads speech",
    "sam3_lite_text_text_model": "does not give its hidden states",
}
"""Types whose model takes token ids and is of no use here, and why."""


def check_config(found: PretrainedConfig) -> None:
    """Whether a configuration is that of a text model.

    Raises:
        UserError: it is not; neither file nor key is named.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    name, fix = found.model_type, "a text encoder (bert, roberta, t5, ...) or decoder (llama, opt, ...)"
    if name in UNREADABLE:
        raise UserError(f"{name} {UNREADABLE[name]}", fix=fix)
    if getattr(found, "auto_map", None) is None and name not in MODEL_MAPPING_NAMES:
        raise UserError(f"transformers has no model of type {name} without a head", fix=fix)
    parts = set(getattr(found, "sub_configs", {}))
    words = hasattr(found, "vocab_size") or name == "canine"  # which hashes characters
    if parts & {"text_config", "vision_config", "audio_config"} or not words:
        raise UserError(f"{name} is no model of text alone", fix=fix)


_LIMITS = (
    (re.compile(r"^(num_hidden_layers|num_layers|n_layers?|encoder_layers)$"), 1, 1000),
    (re.compile(r"^(hidden_size|d_model|n_embd|vocab_size|num_attention_heads|n_heads?|num_heads)$"), 1, 1 << 31),
    (re.compile(r"(_layers|experts)$"), 0, 1000),
    (re.compile(r"(_size|_position_embeddings|_dim|_heads|_rank)$"), -1, 1 << 40),
)  # fmt: skip
"""Sizes by name, the first pattern that fits: the least and the most that a configuration may say."""


def check_sizes(values: Any) -> None:
    """Whether the sizes of a configuration, as its file says them, can be: before lists of that length are made.

    Raises:
        UserError: one cannot; neither file nor key is named.
    """
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            check_sizes(value)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        for pattern, least, most in _LIMITS:
            if pattern.search(key):
                if not least <= value <= most:
                    raise UserError(f"its configuration says {key}={value}", fix="another copy of the model")
                break
