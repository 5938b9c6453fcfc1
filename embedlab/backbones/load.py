"""Backbones with their weights."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from embedlab.backbones.adapters import merged
from embedlab.backbones.architecture import describe, kind_of, set_dropout
from embedlab.backbones.backbone import Backbone
from embedlab.backbones.resolve import (
    Source,
    donor_config,
    pretrained_options,
    quiet,
    read_config,
    read_tokenizer,
    reading,
    resolve,
)
from embedlab.backbones.scratch import FreshConfig, fresh_config
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.errors import UserError
from embedlab.kernels.attention import register

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

Head = Literal["masked_lm", "causal_lm"]
_UNLIMITED = 1_000_000


def load_backbone(
    config: BackboneConfig, head: Head | None = None, tokenizer: Any = None
) -> tuple[Backbone, PreTrainedTokenizerFast]:
    """A backbone with its weights (in evaluation mode, as Hugging Face models arrive), and its tokenizer.

    Args:
        config: which, and how.
        head: keep the language-modelling head too.
        tokenizer: for ``source=fresh``, from `train_tokenizer`; else the checkpoint's own is loaded.

    Raises:
        UserError: no such model, broken files, weights that are missing, or a head that the checkpoint lacks.
    """
    if config.source == "fresh":
        if tokenizer is None:
            raise ValueError("a fresh backbone needs its tokenizer: train_tokenizer(config.fresh, texts)")
        found = set_dropout(
            fresh_config(FreshConfig.from_dict(config.fresh or {}), tokenizer), config.dropout
        )
        source = None
    else:
        source = resolve(config)
        found = read_config(config, source)
        tokenizer = tokenizer if tokenizer is not None else read_tokenizer(config, source)
    info = describe(found, tokenizer.mask_token is not None)
    if head is not None and (head == "causal_lm") != (info.kind == "decoder"):
        raise UserError(
            f"{info.model_type} is a {info.kind if info.kind == 'decoder' else 'bidirectional encoder'}: "
            f"no {head} head fits it",
            key=config.key,
            value=config.label,
            fix="method=causal_lm" if info.kind == "decoder" else "method=masked_lm",
        )
    finish_tokenizer(tokenizer, info)
    with reading(config):
        attention = register() if config.attention == "sdpa" and _takes_interface(found) else config.attention
        dtype = getattr(torch, config.dtype)
        if source is None:
            whole = _auto_class(head).from_config(
                found, attn_implementation=attention, dtype=dtype, **_no_pooler(found, head)
            )
            missing: list[str] = []
            if (name := FreshConfig.from_dict(config.fresh or {}).init_from) is not None:
                _take_over(whole, tokenizer, name, head)
        else:
            whole, missing = _pretrained(config, source, found, head, attention, dtype)
    _check_missing(config, whole, missing)
    model = whole.base_model if head is not None else whole
    kept = language_model_head(whole) if head is not None else None
    backbone = Backbone(model, info, kept, config.attention)
    backbone.commit = source.commit if source is not None else None
    backbone.eval()
    return backbone, tokenizer


def _take_over(whole: Any, tokenizer: Any, name: str, head: Head | None) -> None:
    """Begin a fresh model with the body of a shipped encoder or of a folder (`embedlab.backbones.warm_start`)."""
    from embedlab.backbones.warm_start import check_donor, warm_start

    donor = donor_config(name)
    source = resolve(donor)
    found = read_config(donor, source)
    theirs = read_tokenizer(donor, source)
    check_donor(whole.config, found, name)
    with reading(donor):  # what is wrong with its files is not the fresh backbone's fault
        other, missing = _pretrained(donor, source, found, head, "eager", torch.float32)
    _check_missing(donor, other, missing)
    took = warm_start(whole, tokenizer, other, theirs, name)
    log.warning(
        "the body is that of %s; %d of %d token embeddings are its own, the others are drawn like them",
        name,
        took.tokens,
        took.vocabulary,
    )


def finish_tokenizer(tokenizer: Any, info: BackboneInfo) -> None:
    """Give a tokenizer what batches need: a padding token, padding on the right, the model's limit.

    Padding is never looked at, so where there is no token for it another special one serves.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    tokenizer.padding_side = "right"
    limits = [n for n in (tokenizer.model_max_length, info.max_positions) if n and n < _UNLIMITED]
    if limits:
        tokenizer.model_max_length = min(limits)


def _auto_class(head: Head | None) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    return {None: AutoModel, "masked_lm": AutoModelForMaskedLM, "causal_lm": AutoModelForCausalLM}[head]


def _takes_interface(found: PretrainedConfig) -> bool:
    """Whether the architecture is transformers' own; a checkpoint's code may know kernels by name only."""
    return not getattr(found, "auto_map", None)


def _no_pooler(found: PretrainedConfig, head: Head | None) -> dict[str, Any]:
    """Leave BERT's pooler out: it is not used, and DDP stops at parameters without gradients."""
    from transformers import AutoModel

    if head is not None:
        return {}
    try:
        cls: Any = AutoModel._model_mapping[type(found)]
    except KeyError:
        return {}
    takes = "add_pooling_layer" in inspect.signature(cls).parameters
    return {"add_pooling_layer": False} if takes else {}


def _pretrained(
    config: BackboneConfig,
    source: Source,
    found: PretrainedConfig,
    head: Head | None,
    attention: str,
    dtype: torch.dtype,
) -> tuple[Any, list[str]]:
    """The model, and the names of weights that the checkpoint did not have."""
    whole, report = _auto_class(head).from_pretrained(
        source.location,
        config=found,
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
        **_no_pooler(found, head),
        **pretrained_options(config, source),
    )
    if source.gguf is not None:
        whole = _plain_copy(whole)
    missing = {k for k in report["missing_keys"] if not k.endswith("position_ids")}
    return whole, sorted(missing)


def _plain_copy(whole: Any) -> Any:
    """A model read from GGUF refuses to be saved; one with the same weights and no memory of it does not."""
    config = copy.deepcopy(whole.config)
    config.__dict__.pop("quantization_config", None)
    attention = whole.config._attn_implementation
    fresh = type(whole)._from_config(config, attn_implementation=attention, dtype=whole.dtype)
    fresh.load_state_dict(whole.state_dict())
    fresh.tie_weights()
    return fresh


def _check_missing(config: BackboneConfig, whole: Any, missing: list[str]) -> None:
    if not missing:
        return
    inside = {n for n, _ in whole.base_model.named_parameters()} | {
        n for n, _ in whole.base_model.named_buffers()
    }
    prefix = whole.base_model_prefix + "."
    body = [
        n
        for n in missing
        if n.removeprefix(prefix) in inside and (whole.base_model is whole or n.startswith(prefix))
    ]
    if body:
        raise UserError(
            f"the checkpoint lacks {len(body)} of the model's weights, the first {body[0]}",
            key=config.key,
            value=config.label,
            fix="a complete checkpoint of this architecture",
        )
    if not config.new_head:
        raise UserError(
            f"the checkpoint has no language-modelling head ({missing[0]} is missing)",
            key="backbone.new_head",
            value=False,
            fix="backbone.new_head=true starts one anew, or a backbone that has one",
        )
    log.warning("%s: its language-modelling head starts from random weights.", config.label)


class LanguageModelHead(nn.Module):
    """What a Hugging Face model has after its body, under the same names: hidden states to logits."""

    def __init__(self, parts: dict[str, nn.Module], order: tuple[str, ...], activation: Any = None) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.order = order
        self._activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        for name in self.order:
            hidden = self._activation(hidden) if name == "activation" else getattr(self, name)(hidden)
        return hidden


_SEQUENCES = {
    "distilbert": ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
    "modernbert": ("head", "decoder"),
    "electra": ("generator_predictions", "generator_lm_head"),
}
"""Heads of several parts, in the order of their forward pass."""


def language_model_head(whole: Any) -> LanguageModelHead:
    """The head of a model for masked or causal language modelling.

    Raises:
        UserError: an architecture whose head has parts that this code does not know the order of.
    """
    body = whole.base_model
    parts = {n: m for n, m in whole.named_children() if m is not body and any(True for _ in m.parameters())}
    order = _SEQUENCES.get(whole.config.model_type, tuple(parts))
    if len(parts) != 1 and whole.config.model_type not in _SEQUENCES:
        raise UserError(
            f"the head of {whole.config.model_type} has parts of unknown order: {', '.join(parts)}",
            key="backbone",
            value=whole.config.model_type,
            fix="another architecture",
        )
    return LanguageModelHead(parts, order, getattr(whole, "activation", None))


def whole_model(backbone: Backbone) -> Any:
    """The Hugging Face model to save: with its head, where the backbone has one. Shares all weights."""
    if backbone.head is None:
        return backbone.model
    found = backbone.model.config
    head: Head = "causal_lm" if kind_of(found) == "decoder" else "masked_lm"
    with torch.device("meta"), quiet():
        whole = _auto_class(head).from_config(found)
    for name, module in whole.named_children():
        if module is whole.base_model:
            setattr(whole, name, backbone.model)
            break
    for name, part in backbone.head.named_children():
        setattr(whole, name, part)
    return whole


def load_pooler(config: BackboneConfig) -> nn.Sequential | None:
    """The pretrained pooler's dense layer and tanh, [..., D] to [..., D]; None where the checkpoint has none.

    For methods that use it (JTCSE's modulus): backbones come without.

    Raises:
        UserError: as `load_backbone`.
    """
    if config.source == "fresh":
        return None
    from transformers import AutoModel

    source = resolve(config)
    found = read_config(config, source)
    if not _no_pooler(found, None):
        return None
    with reading(config):
        model, report = AutoModel.from_pretrained(
            source.location,
            config=found,
            dtype=getattr(torch, config.dtype),
            output_loading_info=True,
            **pretrained_options(config, source),
        )
    dense = getattr(getattr(model, "pooler", None), "dense", None)
    if dense is None or any(k.startswith("pooler.") for k in report["missing_keys"]):
        return None
    return nn.Sequential(dense, nn.Tanh())


def write_model(backbone: Backbone, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write config and weights (safetensors) as Hugging Face does.

    Args:
        backbone: with its head, where it has one; an adapter is merged into the stored weights.
        folder: an existing one.
        dtype: of the stored weights, where not their own.
    """
    if backbone.adapter is not None:
        backbone = merged(backbone)
    whole = whole_model(backbone)
    state = whole.state_dict()
    if dtype is not None:
        cast: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights stay tied
        for name, value in state.items():
            if value.is_floating_point():
                key = (value.data_ptr(), value.shape)
                state[name] = cast.setdefault(key, value.to(dtype))
    with quiet():
        whole.save_pretrained(folder, state_dict=state)
    if dtype is not None:
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
