"""Which backbone, and what is known of it before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from embedlab.config.build import Record, within
from embedlab.errors import UserError

Dtype = Literal["float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
TOKENIZERS = ("wordpiece", "bpe", "unigram")


@dataclass(frozen=True)
class BackboneConfig(Record):
    """A transformer and how to load it.

    Args:
        source: ``shipped`` with the package, ``hub``, ``local`` (a Hugging Face folder or a GGUF file) or
            ``fresh`` (random weights).
        name: of the shipped encoder or on the hub; a label otherwise.
        path: of a local one.
        revision: on the hub.
        attention: kernel. ``sdpa`` can be captured in a CUDA graph and compiled whole; the other two look
            at the mask's values on the host.
        dtype: of the weights, whatever the checkpoint has (transformers 5 would keep a half-precision
            checkpoint in half precision, and train it so).
        dropout: sets every hidden and every attention dropout probability; None: the checkpoint's own.
        trust_remote_code: run code that comes with the checkpoint.
        new_head: start a language-modelling head anew where one is needed and the checkpoint has none.
        bidirectional: let a decoder look both ways (LLM2Vec): an encoder, whose weights have yet to learn that.
        fresh: architecture for ``fresh``: model_type, layers, width, heads, ffn, vocab_size, max_positions,
            tokenizer {type, lowercase}, and any key of the architecture's own Hugging Face configuration.

    Raises:
        UserError: a value that cannot be meant, by key.
    """

    section = "backbone"

    source: Literal["shipped", "hub", "local", "fresh"] = "hub"
    name: str = ""
    path: str | None = None
    revision: str | None = None
    attention: Attention = "sdpa"
    dtype: Dtype = "float32"
    dropout: float | None = within(None, least=0, below=1)
    trust_remote_code: bool = False
    new_head: bool = False
    bidirectional: bool = False
    fresh: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "local" and not self.path:
            raise UserError(
                "a local backbone needs its folder",
                key="backbone.path",
                value=self.path,
                fix="backbone.path=DIR (a Hugging Face folder, or a .gguf file)",
            )
        if self.source in ("hub", "shipped") and not self.name:
            raise UserError("which one", key="backbone.name", value=self.name, fix="backbone.name=NAME")
        if self.source == "fresh" and not self.fresh:
            raise UserError(
                "a fresh backbone needs its architecture", key="backbone.fresh", fix="backbone=fresh"
            )

    @property
    def label(self) -> str:
        """The backbone in one word or path, for messages and model cards."""
        return self.path if self.source == "local" and self.path else self.name

    @property
    def key(self) -> str:
        """The configuration key that says which backbone it is."""
        return {"local": "backbone.path", "fresh": "backbone.fresh"}.get(self.source, "backbone.name")


@dataclass(frozen=True)
class BackboneInfo:
    """What configurations and poolings need to know of a backbone.

    Args:
        kind: ``encoder`` (looks both ways) or ``decoder`` (causal).
        layers: transformer blocks L; there are L + 1 hidden states.
        width: features of the last hidden state.
        max_positions: tokens at most; None: no limit of its own.
        has_mask_token: whether the tokenizer has one.
        dropout: the highest of the effective hidden and attention dropout probabilities.
        model_type: of transformers.
        has_mlm_head: whether a masked-language-modelling head comes with it.
        inner_width: features of the hidden states before the last (OPT-350m projects down at the end).
        adapter_dropout: in training, of the adapters that a run adds (LoRA's).
    """

    kind: Literal["encoder", "decoder"]
    layers: int
    width: int
    max_positions: int | None
    has_mask_token: bool
    dropout: float
    model_type: str
    has_mlm_head: bool
    inner_width: int = 0
    adapter_dropout: float = 0.0

    def __post_init__(self) -> None:
        if not self.inner_width:
            object.__setattr__(self, "inner_width", self.width)


def _encoder(
    model_type: str, layers: int, width: int, positions: int = 512, dropout: float = 0.1
) -> BackboneInfo:
    return BackboneInfo("encoder", layers, width, positions, True, dropout, model_type, True)


def _decoder(model_type: str, layers: int, width: int, positions: int, dropout: float = 0.0) -> BackboneInfo:
    return BackboneInfo("decoder", layers, width, positions, False, dropout, model_type, False)


# With them a configuration is checked at once and without a hub. Loading reads the checkpoint itself.
KNOWN: dict[str, BackboneInfo] = {
    "google-bert/bert-base-uncased": _encoder("bert", 12, 768),
    "google-bert/bert-large-uncased": _encoder("bert", 24, 1024),
    "Luyu/condenser": _encoder("bert", 12, 768),
    "FacebookAI/roberta-base": _encoder("roberta", 12, 768),
    "FacebookAI/roberta-large": _encoder("roberta", 24, 1024),
    "distilbert/distilbert-base-uncased": _encoder("distilbert", 6, 768),
    "FacebookAI/xlm-roberta-base": _encoder("xlm-roberta", 12, 768),
    "answerdotai/ModernBERT-base": _encoder("modernbert", 22, 768, 8192, 0.0),
    "HuggingFaceTB/SmolLM2-135M": _decoder("llama", 30, 576, 8192),
    "Qwen/Qwen2.5-0.5B": _decoder("qwen2", 24, 896, 32768),
    "facebook/opt-6.7b": _decoder("opt", 32, 4096, 2048, 0.1),
    "meta-llama/Llama-2-7b-hf": _decoder("llama", 32, 4096, 4096),
    "meta-llama/Meta-Llama-3-8B": _decoder("llama", 32, 4096, 8192),
    "mistralai/Mistral-7B-v0.1": _decoder("mistral", 32, 4096, 32768),
    "google/gemma-2b": _decoder("gemma", 18, 2048, 8192),
}
"""Facts of the published checkpoints that `conf/backbone` names, by the hub's full name."""

SHORT = {name.partition("/")[2]: name for name in KNOWN}
"""The hub redirects the old short names (``bert-base-uncased``)."""


def known(name: str) -> BackboneInfo | None:
    """Facts of a hub name, if it is one of ours."""
    return KNOWN.get(SHORT.get(name, name))
