"""Which kernels of this project run: those that the user leaves on, that can run here, and that get in nobody's way."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import nn

from embedlab.errors import UserError, one_of

SWITCHES = "EMBEDLAB_KERNELS"
"""Environment variable with those options that are not the default: ``"dev_graph=0,static=1"``."""
SHORT_LONGEST = 128
"""Tokens of a row that one program can hold."""
LONGEST = 512
"""Tokens of a row whose padding is left out: the encoders' limit, and nobody has timed more."""
_HARMLESS = ("transformers.utils.output_capturing", "embedlab.backbones.adapters")
"""Modules whose hooks do not count: they collect hidden states for the forward of transformers' models, and give the
parts of a LoRA layer in fp32."""


@dataclass(frozen=True)
class KernelOptions:
    """What a captured step is made of; to leave a part out shows whether it is at fault."""

    dev_graph: bool = True
    """Development scoring by a CUDA graph."""
    fused_block: bool = True
    """Blocks whose backward pass is written out (`embedlab.kernels.fused_block`), instead of compiled ones; and
    encoding without padding (`embedlab.kernels.inference`)."""
    fused_decoder: bool = True
    """Blocks of a decoder with LoRA whose backward pass is written out (`embedlab.kernels.decoder`), instead of
    compiled ones."""
    fused_update: bool = True
    """Weights, moments and bf16 copies in one pass (`embedlab.engine.fused_adamw`), instead of torch's AdamW."""
    graph: bool = True
    """A CUDA graph of the step; without it, the same work is launched piece by piece."""
    joined_lora: bool = True
    """LoRA layers of one input as one (`embedlab.backbones.joined_lora`), instead of PEFT's products one by one."""
    last_block: bool = True
    """The last block for one token, where a pooling reads no other (`embedlab.backbones.last_block`), for two (CSE-SFP)
    and for masked tokens alone."""
    static: bool = False
    """A compilation of the blocks for each shape (about 10 s), never one for several."""


def kernel_options() -> KernelOptions:
    """The options of this process, from the environment.

    Raises:
        UserError: an option that does not exist, or a value that is neither 0 nor 1.
    """
    return _parsed(os.environ.get(SWITCHES, ""))


@cache
def _parsed(text: str) -> KernelOptions:
    known, chosen = [f.name for f in fields(KernelOptions)], {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in known:
            raise UserError("unknown option", key=SWITCHES, value=part, fix=one_of(name, known))
        if value not in ("0", "1"):
            raise UserError("neither on nor off", key=SWITCHES, value=part, fix=f"{name}=0 or {name}=1")
        chosen[name] = value == "1"
    return KernelOptions(**chosen)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; looked up once, because a training step asks."""
    return importlib.util.find_spec("triton") is not None


def packed_kernel(config: Any, longest: int) -> bool:
    """Whether the kernel for rows without padding can run: CUDA, Triton, and heads whose width is a power of two.

    In fp32 a program has no room for the longest rows of the widest heads.
    """
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_heads", None) or 0
    width = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    most = SHORT_LONGEST // 2 if width == 128 else SHORT_LONGEST
    return torch.cuda.is_available() and has_triton() and longest <= most and width in (16, 32, 64, 128)


def is_transformers(module: nn.Module) -> bool:
    """Whether a module is of one of transformers' model classes."""
    return type(module).__module__.startswith("transformers.models.")


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at a module or runs it, so that its parts must not be run around it.

    That is: it has hooks of any kind, or a forward of its own that is not its class's.
    """
    hooks = [
        hook
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        for hook in getattr(module, kind).values()
    ]
    return "forward" in vars(module) or any(getattr(h, "__module__", "") not in _HARMLESS for h in hooks)
