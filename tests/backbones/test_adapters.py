"""LoRA and QLoRA on tiny decoders and an encoder: what is trained, what is kept, what comes out merged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embedlab.backbones import Backbone, load_backbone
from embedlab.backbones.adapters import (
    adapt,
    adapter_state,
    load_adapter_state,
    merged,
    merged_weights,
    rank_device,
)
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.errors import UserError
from tests.support import DECODERS

LORA = AdapterConfig("lora", r=4, dropout=0.0)
QLORA = AdapterConfig("qlora", r=4, dropout=0.0, quantization="nf4")
IDS = torch.randint(10, 200, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
CPU = torch.device("cpu")


def _load(folder: Path, adapter: AdapterConfig | None = None) -> Backbone:
    config = BackboneConfig(source="local", path=str(folder))
    backbone, _ = load_backbone(config)
    if adapter is not None:
        torch.manual_seed(1)
        adapt(backbone, adapter, config, CPU)
    return backbone


def _stir(backbone: nn.Module) -> None:
    """B matrices that are not zero, as after some training."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in backbone.named_parameters():
            if "lora_B" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))


def _vectors(backbone: Backbone) -> Tensor:
    with torch.no_grad():
        return backbone.eval()(IDS, MASK)[-1]


def _gradients(backbone: Backbone) -> dict[str, float]:
    backbone.train().zero_grad()
    torch.manual_seed(3)
    vectors = backbone(IDS, MASK)[-1]
    # Not the square: after the final norm it hardly varies.
    direction = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(4))
    (vectors * direction).mean().backward()
    return {n: p.grad.norm().item() for n, p in backbone.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", DECODERS)
def test_t9_zero_b_is_the_base_model(tiny: Callable[..., Path], model_type: str) -> None:
    plain = _vectors(_load(tiny(model_type, width=64)))
    torch.testing.assert_close(_vectors(_load(tiny(model_type, width=64), LORA)), plain)


@pytest.mark.parametrize("model_type", DECODERS)
def test_every_linear_layer_of_the_blocks_and_no_other(tiny: Callable[..., Path], model_type: str) -> None:
    from transformers.pytorch_utils import Conv1D

    plain = _load(tiny(model_type, width=64))
    linear = {n for n, m in plain.model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    for adapter in (LORA, QLORA):
        adapted = _load(tiny(model_type, width=64), adapter)
        layers = {n for n, m in adapted.model.named_modules() if hasattr(m, "lora_A")}
        assert layers == linear
        assert len(layers) == {"gpt2": 4, "gpt_neox": 4, "opt": 6}.get(model_type, 7) * 2


def test_the_pooler_of_an_encoder_is_left_alone(tiny: Callable[..., Path]) -> None:
    adapted = _load(tiny("bert", width=64), LORA)
    assert len([n for n, m in adapted.model.named_modules() if hasattr(m, "lora_A")]) == 2 * 6
    assert not any("pooler" in n for n, p in adapted.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("adapter", [LORA, QLORA], ids=["lora", "qlora"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_t12_only_adapters_learn(tiny: Callable[..., Path], model_type: str, adapter: AdapterConfig) -> None:
    backbone = _load(tiny(model_type, width=64), adapter)
    _stir(backbone)
    before = {n: p.detach().clone() for n, p in backbone.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in backbone.parameters() if p.requires_grad], lr=0.01)
    gradients = _gradients(backbone)
    optimizer.step()
    assert gradients.keys() == {n for n in before if ".lora_" in n}
    for name, p in backbone.named_parameters():
        assert torch.equal(p, before[name]) == (".lora_" not in name), name


@pytest.mark.parametrize("adapter", [LORA, QLORA], ids=["lora", "qlora"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_merged_state_gives_the_trained_vectors(
    tiny: Callable[..., Path], model_type: str, adapter: AdapterConfig
) -> None:
    backbone = _load(tiny(model_type, width=64), adapter)
    _stir(backbone)
    trained = _vectors(backbone)
    plain = _load(tiny(model_type, width=64))
    assert not torch.allclose(_vectors(plain), trained, atol=1e-2)
    plain.model.load_state_dict(dict(merged_weights(backbone.model)), strict=True)
    torch.testing.assert_close(_vectors(plain), trained, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(_vectors(backbone), trained)  # merging left the adapted model as it was


@pytest.mark.parametrize("adapter", [LORA, QLORA], ids=["lora", "qlora"])
def test_state_holds_adapters_only_and_loads_back(tiny: Callable[..., Path], adapter: AdapterConfig) -> None:
    one, other = _load(tiny("llama", width=64), adapter), _load(tiny("llama", width=64), adapter)
    _stir(one)
    outer = nn.ModuleDict({"encoder": one, "head": nn.Linear(2, 2)})
    state = outer.state_dict()
    assert {k for k in state if k.startswith("encoder.")} == {
        f"encoder.{n}" for n, p in one.named_parameters() if p.requires_grad
    }
    assert "head.weight" in state
    nn.ModuleDict({"encoder": other, "head": nn.Linear(2, 2)}).load_state_dict(state, strict=True)
    torch.testing.assert_close(_vectors(other), _vectors(one))
    del state[next(k for k in state if "lora_B" in k)]
    with pytest.raises(RuntimeError, match="lora_B"):
        outer.load_state_dict(state, strict=True)


@pytest.mark.parametrize("adapter", [LORA, QLORA], ids=["lora", "qlora"])
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "distilbert", "modernbert"])
def test_an_adapted_encoder_is_merged(tiny: Callable[..., Path], kind: str, adapter: AdapterConfig) -> None:
    backbone = _load(tiny(kind, width=64), adapter)
    _stir(backbone)
    torch.testing.assert_close(_vectors(merged(backbone)), _vectors(backbone), rtol=1e-3, atol=1e-3)


def test_peft_reads_the_adapter(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel
    from safetensors.torch import save_file
    from transformers import AutoModel

    backbone = _load(tiny("llama", width=64), LORA)
    _stir(backbone)
    backbone.model.peft_config["default"].save_pretrained(tmp_path)
    save_file(adapter_state(backbone.model), tmp_path / "adapter_model.safetensors")
    assert LoraConfig.from_pretrained(tmp_path).r == 4
    base = AutoModel.from_pretrained(tiny("llama", width=64), dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        vectors = theirs(input_ids=IDS, attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(vectors, _vectors(backbone), atol=1e-5, rtol=1e-5)


def test_adapter_state_refuses_another_shape(tiny: Callable[..., Path]) -> None:
    state = adapter_state(_load(tiny("llama", width=64), LORA).model)
    other = _load(tiny("llama", width=64), AdapterConfig("lora", r=2))
    with pytest.raises(ValueError, match="does not fit"):
        load_adapter_state(other.model, state)


# 4 bits


def test_4bit_weights_are_nf4_with_double_quantisation(tiny: Callable[..., Path]) -> None:
    import bitsandbytes as bnb

    backbone = _load(tiny("llama", width=64), QLORA)
    layers = [m for m in backbone.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(layers) == 14
    for layer in layers:
        assert layer.weight.quant_state.quant_type == "nf4"
        assert layer.weight.quant_state.nested
        assert layer.compute_dtype == torch.float32
        assert layer.weight.dtype == torch.uint8
    assert backbone.model.embed_tokens.weight.dtype == torch.float32
    assert all(p.dtype == torch.float32 for n, p in backbone.named_parameters() if "norm" in n or "lora" in n)


def test_quantisation_error_is_that_of_nf4(tiny: Callable[..., Path]) -> None:
    plain, adapted = _load(tiny("gpt2", width=64)), _load(tiny("gpt2", width=64), QLORA)
    was, now = plain.model.state_dict(), dict(merged_weights(adapted.model))
    for name in ("h.0.attn.c_attn.weight", "h.1.mlp.c_proj.weight"):
        error = (now[name] - was[name]).norm() / was[name].norm()
        assert 0.01 < error < 0.15


@pytest.mark.parametrize("model_type", ["llama", "opt"])  # without and with bias
def test_gradients_after_an_evaluation_pass(
    tiny: Callable[..., Path], model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs with AVX512-BF16 an evaluation pass repacks 4-bit weights for good, unless told not to.

    Such a CPU is claimed here; where it is not there, the layers' own flag shows that the path is closed.
    """
    import bitsandbytes as bnb

    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    backbone = _load(tiny(model_type, width=64), QLORA)
    assert not any(
        m.support_avx512bf16_for_cpu for m in backbone.modules() if isinstance(m, bnb.nn.Linear4bit)
    )
    _stir(backbone)
    before = _gradients(backbone)
    _vectors(backbone)
    after = _gradients(backbone)
    assert len(before) > 0
    assert after == pytest.approx(before, rel=1e-6)
    assert min(after.values()) > 0


def test_each_rank_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert rank_device(cuda=True) == torch.device("cuda", 3)
    assert rank_device(cuda=True, devices=(0, 2, 4, 6)) == torch.device("cuda", 6)
    assert rank_device(cuda=False) == CPU


def test_work_of_frozen_and_packed_weights(tiny: Callable[..., Path]) -> None:
    """Utilisation counts 4 operations a frozen weight and 6 a trained one, packed or not."""
    from embedlab.run.callbacks.train_log import matmul_parameters

    counts = [matmul_parameters(_load(tiny("llama", width=64), a).blocks) for a in (None, LORA, QLORA)]
    trained = sum(p.numel() for p in _load(tiny("llama", width=64), LORA).parameters() if p.requires_grad)
    assert counts[1] == counts[2] == round(2 / 3 * counts[0] + trained)


@pytest.mark.parametrize("adapter", [LORA, QLORA], ids=["lora", "qlora"])
def test_blocks_compile_whole(tiny: Callable[..., Path], adapter: AdapterConfig) -> None:
    """No adapter, no 4-bit layer and no checkpoint breaks the graph of a block."""
    plain = _load(tiny("llama", width=64), replace(adapter, gradient_checkpointing=True))
    _stir(plain)
    expected, gradients = plain.train()(IDS, MASK)[-1].detach(), _gradients(plain)
    plain.compile_blocks(backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(plain(IDS, MASK)[-1].detach(), expected)
    assert _gradients(plain) == pytest.approx(gradients, rel=1e-4)


# gradient checkpointing


@pytest.mark.parametrize("adapter", [LORA, QLORA], ids=["lora", "qlora"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_gradient_checkpointing_gives_the_same_gradients(
    tiny: Callable[..., Path], model_type: str, adapter: AdapterConfig
) -> None:
    found = []
    for checkpointing in (False, True):
        config = replace(adapter, dropout=0.2, gradient_checkpointing=checkpointing)
        backbone = _load(tiny(model_type, width=64), config)
        _stir(backbone)
        kept: list[int] = []

        def pack(x: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            gradients = _gradients(backbone)
        found.append((gradients, sum(kept)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] < 0.5 * found[0][1]


# configurations


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 0}, "adapter.r=0"),
        ({"r": 4, "dropout": 1.0}, "adapter.dropout=1.0"),
        ({"quantization": "nf4"}, "adapter.r"),
        ({"r": 4, "quantization": "fp4"}, "adapter.quantization=fp4"),
        ({"r": 4, "compute_dtype": "int8"}, "adapter.compute_dtype=int8"),
    ],
)
def test_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AdapterConfig("lora", **values)


def test_refuses_random_weights_beneath() -> None:
    with pytest.raises(UserError, match=r"adapter=lora.*causal_lm"):
        LORA.check("fresh")
    AdapterConfig().check("fresh")


def test_names_the_layers_that_there_are(tiny: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"adapter.targets=query.*q_proj"):
        _load(tiny("llama", width=64), AdapterConfig("lora", r=4, targets=("query",)))
    adapted = _load(tiny("llama", width=64), AdapterConfig("lora", r=4, targets=("q_proj", "v_proj")))
    assert len([n for n, m in adapted.model.named_modules() if hasattr(m, "lora_A")]) == 4


def test_rows_that_the_kernel_scrambles_are_refused(tiny: Callable[..., Path]) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    error = (dequantize_4bit(*quantize_4bit(weight, quant_type="nf4")) - weight).norm() / weight.norm()
    if error < 0.12:
        pytest.skip("this CPU's kernel takes rows of 32 weights as it should")
    with pytest.raises(UserError, match="rows of 32 weights"):
        _load(tiny("llama", width=32), QLORA)


def test_the_share_of_a_young_adapter_survives_half_precision(tiny: Callable[..., Path]) -> None:
    """In the residual stream: to bf16's last digit the base's share hides the adapter's."""
    backbone = _load(tiny("llama"), LORA)
    layer: Any = backbone.blocks[0].self_attn.o_proj
    x = torch.randn(3, layer.base_layer.in_features)
    with torch.no_grad():
        for share in layer.lora_B.values():
            share.weight.normal_(std=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            together, base = layer(x), layer.base_layer(x)
        exact = layer(x) - layer.base_layer(x)
    assert together.dtype == torch.float32
    torch.testing.assert_close(together - base, exact, rtol=0.02, atol=float(exact.abs().max()) / 50)


INJECTS = """
import sys
import transformers
from embedlab.backbones.adapters import _inject
from embedlab.config.adapter import AdapterConfig
size = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
model = transformers.BertModel(transformers.BertConfig(**size))
print("from here on ours:", file=sys.stderr, flush=True)
_inject(model, ["encoder.layer.0.attention.self.query"], AdapterConfig(r=2))
"""
WRITES = """
import sys
import embedlab
embedlab.load("mini").to_sentence_transformers(sys.argv[1])
"""


@pytest.mark.parametrize("code", [INJECTS, WRITES], ids=["adapter", "sentence-transformers"])
def test_what_is_imported_says_nothing_of_kernels(code: str, tmp_path: Path) -> None:
    """Without the command line, which silences it for its whole process."""
    if "sentence_transformers" in code:
        pytest.importorskip(
            "sentence_transformers", reason="sentence-transformers (extra st) is not installed"
        )
    call = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert "kernels" not in done.stderr.rpartition("from here on ours:")[2]
