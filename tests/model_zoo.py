"""Tiny random models of every text architecture of the installed transformers, made from their configurations alone."""

from __future__ import annotations

import copy
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from embedlab.backbones.architecture import UNREADABLE

WIDTH, LAYERS, HEADS, VOCABULARY, POSITIONS = 32, 2, 4, 120, 80

# What a configuration's sizes are called, and how small they become. The first pattern that fits decides.
SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH, "d_model": WIDTH, "n_embd": WIDTH, "dim": WIDTH, "emb_dim": WIDTH,
    "embedding_size": WIDTH, "word_embed_proj_dim": WIDTH, "attention_hidden_size": WIDTH,
    "num_hidden_layers": LAYERS, "num_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS,
    "encoder_layers": LAYERS, "decoder_layers": LAYERS, "num_encoder_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "num_encoder_attention_heads": HEADS, "num_decoder_attention_heads": HEADS,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_head": 8, "d_kv": 8,
    "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "n_inner": 64, "d_inner": 64, "hidden_dim": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_hidden_size": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "max_position_embeddings": POSITIONS, "n_positions": POSITIONS, "max_seq_len": POSITIONS,
    "n_ctx": POSITIONS,
    "linear_head_dim": 8, "linear_num_heads": 4,
    "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 8, "mamba_head_dim": 8,
    "mamba_d_state": 8, "ssm_state_size": 8, "state_size": 8, "mamba_chunk_size": 16, "chunk_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}

OVERRIDES: dict[str, dict[str, Any]] = {
    "canine": {"num_hash_buckets": 128},
    "cpmant": {"dim_ff": 64},
    "ctrl": {"dff": 64},
    "esm": {
        "vocab_size": VOCABULARY,
        "pad_token_id": 1,
        "mask_token_id": 3,
        "position_embedding_type": "rotary",
    },
    "esmc": {"num_key_value_heads": HEADS},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "led": {
        "max_encoder_position_embeddings": POSITIONS,
        "max_decoder_position_embeddings": POSITIONS,
        "attention_window": 8,
    },
    "longformer": {"attention_window": 8},
    "mamba2": {"num_heads": 8},
    "nemotron": {"head_dim": 8},
    "reformer": {
        "max_position_embeddings": 128,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
    },
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "axk1": {"n_group": 2, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
    },
    "dots3_note_text": {},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
    },
    "glm5_next_text": {"num_key_value_heads": HEADS, "qk_rope_head_dim": 0},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "dory": {"num_hidden_layers": 8, "n_input_layers": 1, "n_output_layers": 1},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "mistral4": {"head_dim": 16, "num_key_value_heads": HEADS},
    "xlstm": {"qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 64},
    "zaya": {"num_experts_per_tok": 1},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "nemotron_h": {"moe_shared_expert_intermediate_size": 32},
}


for _name in ("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text"):
    OVERRIDES[_name] = {
        "head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    }  # fmt: skip
_GEMMA = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": POSITIONS,
    **_TOKENS,
}  # fmt: skip
OVERRIDES["t5gemma"] = {"encoder": _GEMMA, "decoder": _GEMMA, "vocab_size": VOCABULARY}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
for _name in (
    "cosmos3_edge_text", "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text", "hunyuan_vl_text",
    "hy_v4_vl_text", "qwen2_5_vl_text", "qwen2_vl_text",
):  # fmt: skip
    OVERRIDES[_name] = {"rope_parameters": _SECTIONS}
OVERRIDES["glm4v_moe_text"] = {"rope_parameters": _SECTIONS, "head_dim": 16}  # of which half is rotated


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of an architecture with every size that it has made small."""
    cls = CONFIG_MAPPING[model_type]
    default = cls()
    return cls(**_small(default) | copy.deepcopy(OVERRIDES.get(model_type, {})))


def _small(default: PreTrainedConfig) -> dict[str, Any]:
    names = {default.attribute_map.get(k, k) for k in SIZES} & set(vars(default))
    back = {v: k for k, v in default.attribute_map.items()}
    found: dict[str, Any] = {n: SIZES.get(n, SIZES.get(back.get(n, ""))) for n in names}
    unsaid = (
        "head_dim",
        "num_key_value_heads",
        "num_experts_per_tok",
    )  # None: worked out, or forgotten, elsewhere
    found = {k: v for k, v in found.items() if isinstance(vars(default)[k], int) or k in unsaid}
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = HEADS
    found |= {k: v for k, v in _TOKENS.items() if k in vars(default)}
    return found


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Random weights, large enough that neither words nor places are lost in rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(model_type)
        config.architectures = []  # None stops the choice between several classes
        model = AutoModel.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() >= 2 or name.endswith("bias"):
                    p.normal_(0, 0.1)
    return model.eval()


LEFT_OUT: dict[str, str] = {
    **UNREADABLE,
    "dia": "speech from text: its decoder writes sound",
    "diffusion_gemma": "pictures and text, by steps of denoising",
    "fastspeech2_conformer": "speech from text",
    "fastspeech2_conformer_with_hifigan": "speech from text",
    "kyutai_speech_to_text": "text from speech",
    "musicgen": "music from text",
    "musicgen_melody": "music from text",
    "vits": "speech from text",
}
"""Types whose model takes token ids and that are not tested, and why."""

_OTHER_SENSES = ("pixel", "image", "audio", "input_features", "video", "speech", "input_values", "waveform")


@cache
def text_types() -> tuple[str, ...]:
    """Every type whose model without a head takes token ids, and nothing that is no text."""
    found = []
    for model_type in MODEL_MAPPING_NAMES:
        try:
            classes = AutoModel._model_mapping[CONFIG_MAPPING[model_type]]
            several = classes if isinstance(classes, tuple) else (classes,)
            takes = {name for c in several for name in inspect.signature(c.forward).parameters}
        except (ImportError, ValueError, KeyError, AttributeError):
            continue  # needs a package that nothing here uses, or has no class of that name
        if "input_ids" in takes and not any(s in name for name in takes for s in _OTHER_SENSES):
            found.append(model_type)
    return tuple(sorted(found))


def tiny_words() -> PreTrainedTokenizerFast:
    """Words w0, w1, ... with BERT's frame; ids as `tiny_config` says."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words = {w: i for i, w in enumerate([*special, *(f"w{i}" for i in range(VOCABULARY - len(special)))])}
    tok = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>",
        pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
    )  # fmt: skip


def tiny_folder(model_type: str, folder: Path) -> Path:
    """`tiny_model` as Hugging Face saves it, with `tiny_words`."""
    tiny_model(model_type).save_pretrained(folder)
    tiny_words().save_pretrained(folder)
    return folder
