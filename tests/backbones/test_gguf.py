"""A GGUF file as a local backbone: read, and saved as an ordinary folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import embedlab
from embedlab.backbones import load_backbone, probe
from embedlab.config.backbone import BackboneConfig
from embedlab.encoders.encoder import SentenceEncoder
from tests.support import SENTENCES, tiny_backbone, tiny_tokenizer

gguf: Any = pytest.importorskip("gguf", reason="gguf (extra gguf) is not installed")

_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write(folder: Path, file: Path) -> None:
    """What llama.cpp's converter writes, of a Llama with as many key heads as heads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    tokenizer = tiny_tokenizer("gpt2")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_token_list([t for t, _ in vocabulary])
    writer.add_token_types([3 if t == "<|endoftext|>" else 1 for t, _ in vocabulary])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(m) for m in merges])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)

    def permuted(weight: np.ndarray) -> np.ndarray:
        heads = config.num_attention_heads
        return (
            weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
            .swapaxes(1, 2)
            .reshape(weight.shape)
        )

    for name, value in model.state_dict().items():
        array = value.numpy()
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", array)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", array)
        elif name == "lm_head.weight":
            writer.add_tensor("output.weight", array)
        else:
            _, _, block, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                array = np.ascontiguousarray(permuted(array))
            writer.add_tensor(f"blk.{block}.{_NAMES[part]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    folder = tiny_backbone("llama", tmp_path / "llama", num_key_value_heads=4, vocab_size=144)
    write(folder, file)
    config = BackboneConfig(source="local", path=str(file))
    assert probe(config).kind == "decoder"
    backbone, tokenizer = load_backbone(config)
    assert {p.dtype for p in backbone.parameters()} == {torch.float32}
    plain, _ = load_backbone(BackboneConfig(source="local", path=str(folder)))
    ids = torch.randint(10, 200, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(backbone(ids)[0], plain(ids)[0], rtol=0, atol=1e-5)
    assert tokenizer("the cat")["input_ids"] == tiny_tokenizer("gpt2")("the cat")["input_ids"]
    encoder = embedlab.load(file)
    encoder.save(tmp_path / "saved")
    again = SentenceEncoder.load(tmp_path / "saved")
    np.testing.assert_allclose(again.encode(SENTENCES), encoder.encode(SENTENCES), atol=1e-6)
