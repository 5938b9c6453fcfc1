"""LoRA (Hu et al. 2022) and QLoRA (Dettmers et al. 2023): a frozen, perhaps 4-bit base with small updates.

PEFT's layers are injected into the model in place, so it stays the architecture's own class. From then on the
state dictionary of a backbone holds the trained tensors only: checkpoints are small, and loading one fills
them in.
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlab.backbones.architecture import check_adapter, without_decoder
from embedlab.config.adapter import Adapter, AdapterConfig
from embedlab.console import KERNEL_HINTS, quiet
from embedlab.distributed.devices import local_rank
from embedlab.errors import UserError, one_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from embedlab.backbones.backbone import Backbone
    from embedlab.config.backbone import BackboneConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def rank_device(cuda: bool, devices: object = None) -> torch.device:
    """This process's own device: its place among ``devices`` where these are named by number.

    4-bit weights are placed here and nowhere else: ``device_map="auto"`` would spread each rank's model over
    all cards, or put every rank on the first.
    """
    if not cuda:
        return torch.device("cpu")
    place = local_rank()
    return torch.device("cuda", devices[place] if isinstance(devices, tuple) else place)


def adapt(
    backbone: Backbone, config: AdapterConfig, base: BackboneConfig, device: torch.device | None = None
) -> None:
    """Quantise, add adapters and freeze the rest, all in place.

    Args:
        backbone: with its loaded weights.
        config: ``r=None`` changes nothing but gradient checkpointing.
        base: where the weights are from; an adapter is kept with it.
        device: of this process (``rank_device``), for 4-bit weights.

    Raises:
        UserError: no linear layer has a name of ``config.targets``.
    """
    model = backbone.model
    if config.r is not None:
        check_adapter(model.config.model_type, config.name)
        digest = weights_digest(model)
        targets = _targets(model, list(backbone.blocks), config.targets)
        if config.quantization is not None:
            _quantize(model, _linears(model, list(backbone.blocks)), config, device)
        _inject(model, targets, config)
        if backbone.head is not None:
            backbone.head.requires_grad_(False)
        if base.path is not None:
            base = replace(base, path=os.path.abspath(os.path.expanduser(base.path)))
        backbone.adapter = Adapter(config, base, digest)
        _keep_trained_state(backbone)
    if config.gradient_checkpointing:
        checkpoint_blocks(model)


def checkpoint_blocks(model: PreTrainedModel) -> None:
    """Recompute activations block by block; the non-reentrant form, which frozen embeddings do not stop.

    Raises:
        UserError: the architecture cannot.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:  # transformers' word for an architecture that cannot
        raise UserError(
            f"{model.config.model_type} cannot recompute its activations",
            key="adapter.gradient_checkpointing",
            value="true",
            fix="adapter.gradient_checkpointing=false",
        ) from error


def weights_digest(model: nn.Module) -> str:
    """Of names, shapes and some values of each tensor: whether an adapter was made for these weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        flat = value.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)][:64].float().cpu()
        digest.update(f"{name}{tuple(value.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


# construction


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    # Routers of experts, and a grouped layer, are linear ones whose forward pass is not y = xW + b.
    other = type(module).__name__.endswith(("Router", "GroupedLinear"))
    return isinstance(module, nn.Linear | Conv1D) and not other


def _linears(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    """Names of the linear layers of the blocks: neither head, nor pooler, nor embeddings."""
    inside = {id(m) for block in blocks for m in block.modules()}
    return [n for n, m in model.named_modules() if id(m) in inside and _is_linear(m)]


def _targets(model: nn.Module, blocks: list[nn.Module], wanted: tuple[str, ...]) -> list[str]:
    names = _linears(model, blocks)
    if not names:
        raise UserError(
            "no linear layer in this backbone's blocks", key="adapter", value="lora", fix="adapter=none"
        )
    if not wanted:
        return names
    known = sorted({n.rsplit(".", 1)[-1] for n in names})
    for name in wanted:
        if name not in known:
            raise UserError(
                "no linear layer of this backbone has that name",
                key="adapter.targets",
                value=name,
                fix=f"{one_of(name, known)} [] is all",
            )
    return [n for n in names if n.rsplit(".", 1)[-1] in wanted]


def _quantize(model: nn.Module, names: list[str], config: AdapterConfig, device: torch.device | None) -> None:
    """Replace linear layers by 4-bit ones, one at a time, so that no second copy of the model exists."""
    with quiet(KERNEL_HINTS):
        from bitsandbytes.nn.modules import Linear4bit, Params4bit
    from transformers.pytorch_utils import Conv1D

    for name in names:
        old: Any = model.get_submodule(name)
        weight: Tensor = old.weight.detach()
        if isinstance(old, Conv1D):
            weight = weight.T.contiguous()
        _check_kernel(weight.shape[1], device or weight.device)
        new: Any = Linear4bit(
            weight.shape[1],
            weight.shape[0],
            bias=old.bias is not None,
            compute_dtype=DTYPES[config.compute_dtype],
            compress_statistics=config.double_quantization,
            quant_type="nf4",
            device="meta",
        )
        # Else one evaluation pass on a CPU with AVX512-BF16 repacks the weights for good, and layers without
        # bias then give no gradient.
        new.support_avx512bf16_for_cpu = False
        new.was_conv1d = isinstance(old, Conv1D)
        packed: Any = Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=config.double_quantization,
            quant_type="nf4",
            module=new,
        )
        new.weight = packed.to(device or weight.device)
        if old.bias is not None:
            new.bias = nn.Parameter(old.bias.detach().to(device or weight.device), requires_grad=False)
        model.set_submodule(name, new)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what PEFT looks at to choose its layer
    if device is not None:
        model.to(device)


@cache
def _check_kernel(width: int, device: torch.device) -> None:
    """Raise UserError where bitsandbytes does not give back rows of this width as NF4 should (error about 9 %).

    Its kernel for CPUs with AVX-512 takes blocks of 64 to lie within rows: narrower rows come back scrambled.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, width, generator=generator).to(device)
    error = (dequantize_4bit(*quantize_4bit(weight, quant_type="nf4")) - weight).norm() / weight.norm()
    if not error < 0.12:
        raise UserError(
            f"bitsandbytes' 4-bit kernel for this {device.type} is wrong for rows of {width} weights",
            key="adapter.quantization",
            value="nf4",
            fix="layers whose inputs are a multiple of 64 wide, adapter=lora, or a CUDA device",
        )


def _inject(model: PreTrainedModel, targets: list[str], config: AdapterConfig) -> None:
    with quiet(KERNEL_HINTS):
        from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    assert config.r is not None
    conv = any(isinstance(model.get_submodule(t), Conv1D) for t in targets)
    lora = LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        bias="none",
        target_modules=targets,
        fan_in_fan_out=conv,
    )
    model.requires_grad_(False)
    with warnings.catch_warnings(), quiet(KERNEL_HINTS):  # some versions of PEFT import bitsandbytes here
        warnings.filterwarnings("ignore", ".*fan_in_fan_out.*")
        # Within a module that has no configuration: for one that says it is a mixture of experts, PEFT would take
        # `down_proj` for the stacked experts', whose adapters cannot be merged.
        holder: Any = nn.ModuleDict({"model": model})
        holder.is_loaded_in_4bit = getattr(model, "is_loaded_in_4bit", False)
        inject_adapter_in_model(lora, holder)
    model.peft_config = {"default": lora}  # type: ignore[dict-item]  # where PEFT's own classes have it
    for name, p in model.named_parameters():
        adapter = ".lora_" in name
        p.requires_grad_(adapter)
        if adapter:
            p.data = p.data.float()
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_B")]
    for layer in layers:
        for share in (layer.base_layer, *layer.lora_B.values()):
            share.register_forward_hook(_in_fp32)


def _in_fp32(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Under autocast, the shares of base and adapter are added and handed on in fp32, whatever kind of step it is:
    rounded to bf16, the share of an adapter that has only begun to learn would be lost in the base's."""
    return output.float() if torch.is_autocast_enabled(output.device.type) else output


# state


def _keep_trained_state(backbone: nn.Module) -> None:
    """Leave the frozen base out of the backbone's state dictionary, and do not miss it when one is loaded."""

    def named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        return module.named_parameters(remove_duplicate=False)  # a head's weights may be the embeddings'

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        trained = {f"{prefix}{n}" for n, p in named(module) if _is_own(n, p)}
        for key in [k for k in state if k.startswith(prefix) and k not in trained]:
            del state[key]

    def forgive(module: nn.Module, incompatible: Any) -> None:
        frozen = {n for n, p in named(module) if not _is_own(n, p)}
        frozen |= {n for n, _ in module.named_buffers()}
        missing: list[str] = incompatible.missing_keys
        missing[:] = [k for k in missing if not any(tail in frozen for tail in _tails(k))]

    backbone.register_state_dict_post_hook(drop)
    backbone.register_load_state_dict_post_hook(forgive)


def _is_own(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is no part of the base: a moving average's adapters are not trained, and not there either."""
    return parameter.requires_grad or ".lora_" in name


def _tails(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' tensors by PEFT's names (``base_model.model.<layer>.lora_A.weight``)."""
    return {_peft_name(n): p.detach().cpu().contiguous() for n, p in _adapters(model)}


def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill injected adapters from ``adapter_state``, or from a state dictionary of the model itself.

    Raises:
        ValueError: other tensors or shapes than this model has.
    """
    here = {_peft_name(n): p for n, p in _adapters(model)}
    state = {_peft_name(n): v for n, v in state.items()}
    odd = sorted(here.keys() ^ state.keys()) or [k for k in here if here[k].shape != state[k].shape]
    if odd:
        raise ValueError(f"the adapter does not fit this model: {odd[0]} and {len(odd) - 1} others")
    with torch.no_grad():
        for name, value in state.items():
            here[name].copy_(value)


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((n, p) for n, p in model.named_parameters() if ".lora_" in n)


def _peft_name(name: str) -> str:
    return _PEFT_PREFIX + name.removeprefix(_PEFT_PREFIX).replace(".default", "")


# merging


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of the plain architecture's state, with the adapters added to the (dequantised) weights.

    One at a time and in fp32 on the CPU, in the order of the names; the model stays as it is. The sum gives the
    vectors that were trained: with 4-bit weights it differs from an adapter put on the original ones by the
    quantisation error.
    """
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    # The constants of 4-bit weights stand under their names (`weight.absmax`).
    keys = [k for k in model.state_dict() if ".lora_" not in k and ".weight." not in k]
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for plain, key in sorted((k.replace(".base_layer.", "."), k) for k in keys):
        owner, _, kind = key.rpartition(".")
        value = tensors[key].detach()
        if kind == "weight":
            module = model.get_submodule(owner)
            value = dense_weight(module)
            layer = layers.get(owner.removesuffix(".base_layer"))
            if layer is not None:
                delta = _delta(layer)
                value = value.cpu() + (delta.T if getattr(module, "was_conv1d", False) else delta)
        value = value.float() if value.is_floating_point() else value
        yield plain, value.cpu().contiguous()


def _delta(layer: Any) -> Tensor:
    """What an adapter adds to a layer's weight. On the CPU, as a card's products differ in the last digits: an export
    that was merged here and the run that it is of have one fingerprint."""
    down, up = (getattr(layer, n)["default"].weight.detach().float().cpu() for n in ("lora_A", "lora_B"))
    delta: Tensor = (up @ down) * layer.scaling["default"]
    return delta.T if layer.fan_in_fan_out else delta


def plain_weights(backbone: Backbone) -> Iterator[tuple[str, Tensor]]:
    """Name and parameter of the model in the order of the names, with an adapter merged into it."""
    if backbone.adapter is None:
        yield from sorted(backbone.model.named_parameters())
        return
    buffers = {n for n, _ in backbone.model.named_buffers()}
    yield from ((n, v) for n, v in merged_weights(backbone.model) if n not in buffers)


def dense_weight(module: nn.Module) -> Tensor:
    """The weight of a layer in fp32 and in the layout of the original layer, also of a 4-bit one."""
    weight: Any = module.weight
    quant_state = getattr(weight, "quant_state", None)
    if quant_state is None:
        return weight.detach().float()
    from bitsandbytes.functional import dequantize_4bit

    dense = dequantize_4bit(weight.data, quant_state).float()
    return dense.T if module.was_conv1d else dense


def merged(backbone: Backbone) -> Backbone:
    """A backbone without adapters that gives the same hidden states, in fp32 on the CPU; shares the head."""
    from embedlab.backbones.backbone import Backbone

    config = copy.deepcopy(backbone.model.config)
    config.dtype = torch.float32
    model: Any = backbone.model
    # BERT and its like are loaded without their pooler.
    bare = {"add_pooling_layer": False} if getattr(model, "pooler", model) is None else {}
    with torch.device("meta"):
        plain = without_decoder(type(model)(config, **bare))
    plain.load_state_dict(dict(merged_weights(backbone.model)), assign=True)
    for (
        name,
        buffer,
    ) in backbone.model.named_buffers():  # those that no state dictionary has: rotary frequencies
        owner, _, kind = name.rpartition(".")
        setattr(plain.get_submodule(owner), kind, buffer.detach().cpu().clone())
    return Backbone(plain, backbone.info, backbone.head, backbone.attention)


# folders


def check_saved(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Raise ``RuntimeError`` unless ``found`` holds all of ``wanted``, and that is something."""
    bad = [k for k, v in wanted.items() if k not in found or not torch.equal(found[k].to(v.device), v)]
    if bad or not wanted:
        raise RuntimeError(
            f"{where} does not hold the trained weights ({bad[0] if bad else 'there are none'})"
        )
