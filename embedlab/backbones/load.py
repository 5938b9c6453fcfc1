"""Backbones with their weights."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from embedlab.backbones.adapters import merged
from embedlab.backbones.architecture import (
    caps_scores,
    describe,
    head_of,
    is_encoder_decoder,
    look_both_ways,
    set_dropout,
    without_decoder,
)
from embedlab.backbones.backbone import Backbone
from embedlab.backbones.int8_rows import read_int8
from embedlab.backbones.resolve import (
    Source,
    donor_config,
    naming,
    pretrained_options,
    quiet,
    read_config,
    read_tokenizer,
    reading,
    resolve,
)
from embedlab.backbones.scratch import FreshConfig, fresh_config
from embedlab.backbones.weights import check_report, check_size
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.errors import UserError
from embedlab.kernels.attention import register

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

Head = Literal["masked_lm", "causal_lm"]
_UNLIMITED = 1_000_000
_NO_LIMIT = int(1e30)
"""What transformers says where a tokenizer knows of none."""


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
        if config.bidirectional:
            look_both_ways(found, config.attention)
        source = None
    else:
        source = resolve(config)
        found = read_config(config, source)
        tokenizer = tokenizer if tokenizer is not None else read_tokenizer(config, source)
    info = describe(found, tokenizer.mask_token is not None)
    if config.bidirectional:
        log.warning(
            "%s looks both ways with weights that learnt to look back; method=mntp teaches them.",
            config.label,
        )
    if head is not None and head != head_of(found):
        raise UserError(
            f"{info.model_type} is a {info.kind if info.kind == 'decoder' else 'bidirectional encoder'}: "
            f"no {head} head fits it",
            key=config.key,
            value=config.label,
            fix="method=causal_lm" if info.kind == "decoder" else "method=masked_lm",
        )
    with reading(config), naming(config):
        finish_tokenizer(tokenizer, info)
        check_ids(tokenizer, found)
        cls = model_class(found, head)
        attention, kernel = _kernel(config, found, cls)
        dtype = getattr(torch, config.dtype)
        if source is None:
            whole = cls._from_config(found, attn_implementation=kernel, dtype=dtype, **_no_pooler(cls, head))
            missing: list[str] = []
            if (name := FreshConfig.from_dict(config.fresh or {}).init_from) is not None:
                _take_over(whole, tokenizer, name, head)
        else:
            whole, missing = _pretrained(config, source, found, head, kernel, dtype)
    _check_head(config, missing)
    model = whole.base_model if head is not None else whole
    kept = language_model_head(whole) if head is not None else None
    backbone = Backbone(model, info, kept, attention or model.config._attn_implementation)
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
    with reading(donor), naming(donor):  # what is wrong with its files is not the fresh backbone's fault
        other, missing = _pretrained(donor, source, found, head, "eager", torch.float32)
    _check_head(donor, missing)
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
    limits = [n for n in (tokenizer.model_max_length, info.max_positions) if n and 0 < n < _UNLIMITED]
    tokenizer.model_max_length = min(limits, default=_NO_LIMIT)


def check_ids(tokenizer: Any, found: PretrainedConfig) -> None:
    """Whether the table of embeddings has a row for each id of the tokenizer.

    Raises:
        UserError: it has not, as after tokens were added without ``resize_token_embeddings``.
    """
    rows = getattr(found, "src_vocab_size", None) or getattr(found, "vocab_size", None)
    if rows is None:  # CANINE hashes the code of each character
        return
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows}
    if set(beyond.values()) == {tokenizer.pad_token}:  # padding is never looked at
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    elif beyond:
        first, last = min(beyond), max(beyond)
        raise UserError(
            f"its tokenizer has ids up to {last} ({beyond[first]!r} is {first}), and its table of embeddings has "
            f"{rows} rows",
            fix="the tokenizer that belongs to the weights, or model.resize_token_embeddings(len(tokenizer))",
        )


def _auto_class(head: Head | None) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    return {None: AutoModel, "masked_lm": AutoModelForMaskedLM, "causal_lm": AutoModelForCausalLM}[head]


def model_class(found: PretrainedConfig, head: Head | None = None) -> Any:
    """The class that reads a checkpoint: of an encoder-decoder its encoder alone, where transformers has that.

    A checkpoint that brings its own code has the auto class, which knows how to find it.
    """
    from transformers.models.auto.auto_factory import _get_model_class as get_class

    auto = _auto_class(head)
    if _is_foreign(found):
        return auto
    found.architectures = found.architectures or []  # None stops the choice between several classes
    try:
        cls = get_class(found, auto._model_mapping)
    except KeyError:
        fix = "method=simcse, or another architecture" if head else "another architecture"
        raise UserError(
            f"transformers has no {head or 'plain'} model for {found.model_type}", fix=fix
        ) from None
    if not is_encoder_decoder(found):
        return cls
    if head is not None:
        raise UserError(
            f"{found.model_type} has no {head} head of its encoder", fix="an encoder or a decoder"
        )
    if (
        found.model_type == "t5gemma" and found.is_encoder_decoder
    ):  # its encoder's class refuses the whole's files
        return cls
    name = cls.__name__.removesuffix("Model") + "EncoderModel"
    return getattr(sys.modules[cls.__module__], name, cls)


def _is_foreign(found: PretrainedConfig) -> bool:
    """Whether the model's code comes with the checkpoint."""
    return bool(getattr(found, "auto_map", None))


def _kernel(config: BackboneConfig, found: PretrainedConfig, cls: Any) -> tuple[str | None, str | None]:
    """The attention of a backbone, and the name that transformers is given for it; None: as it chooses."""
    wanted = config.attention
    if _is_foreign(found):
        return (None, None) if wanted == "sdpa" else (wanted, wanted)
    if wanted == "flash_attention_2" and not getattr(cls, "_supports_flash_attn", False):
        raise UserError(
            f"{found.model_type} has no flash attention",
            key="backbone.attention",
            value=wanted,
            fix="backbone.attention=sdpa",
        )
    if wanted != "sdpa":
        return wanted, wanted
    if not cls._supports_sdpa or caps_scores(found):
        log.warning("%s: %s has no sdpa attention, so it runs eager.", config.label, found.model_type)
        return "eager", "eager"
    # A class of before transformers' interface knows kernels by name only.
    new = hasattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS")
    return "sdpa", register() if new else "sdpa"


def _no_pooler(cls: Any, head: Head | None) -> dict[str, Any]:
    """Leave BERT's pooler out: it is not used, and DDP stops at parameters without gradients."""
    takes = head is None and "add_pooling_layer" in inspect.signature(cls).parameters
    return {"add_pooling_layer": False} if takes else {}


def _pretrained(
    config: BackboneConfig,
    source: Source,
    found: PretrainedConfig,
    head: Head | None,
    attention: str | None,
    dtype: torch.dtype,
) -> tuple[Any, list[str]]:
    """The model, and the names of weights outside its body that the checkpoint did not have."""
    cls = model_class(found, head)
    if not _is_foreign(found):
        check_size(cls, found, source)
    state = None if source.gguf is not None else read_int8(Path(source.location))
    whole, report = cls.from_pretrained(
        source.location if state is None else None,
        state_dict=state,
        config=found,
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # else the loader stops with a list that is not shown
        **_no_pooler(cls, head),
        **pretrained_options(config, source),
    )
    missing = check_report(without_decoder(whole), report)
    if source.gguf is not None:
        whole = _plain_copy(whole)
    return whole, missing


def _plain_copy(whole: Any) -> Any:
    """A model read from GGUF refuses to be saved; one with the same weights and no memory of it does not."""
    config = copy.deepcopy(whole.config)
    config.__dict__.pop("quantization_config", None)
    attention = whole.config._attn_implementation
    fresh = type(whole)._from_config(config, attn_implementation=attention, dtype=whole.dtype)
    fresh.load_state_dict(whole.state_dict())
    fresh.tie_weights()
    return fresh


def _check_head(config: BackboneConfig, missing: list[str]) -> None:
    if not missing:
        return
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
    head: Head = head_of(found)
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
    if _is_foreign(found) or not _no_pooler(model_class(found), None):
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
