"""Facts of the published checkpoints that `conf/backbone` names.

With them a configuration is checked at once and without a hub. Loading reads the checkpoint itself.
"""

from __future__ import annotations

from embedlab.config.backbone import BackboneInfo


def _encoder(
    model_type: str, layers: int, width: int, positions: int = 512, dropout: float = 0.1
) -> BackboneInfo:
    return BackboneInfo("encoder", layers, width, positions, True, dropout, model_type, True)


def _decoder(model_type: str, layers: int, width: int, positions: int, dropout: float = 0.0) -> BackboneInfo:
    return BackboneInfo("decoder", layers, width, positions, False, dropout, model_type, False)


KNOWN: dict[str, BackboneInfo] = {
    "google-bert/bert-base-uncased": _encoder("bert", 12, 768),
    "google-bert/bert-large-uncased": _encoder("bert", 24, 1024),
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
"""By the hub's full name."""

SHORT = {name.partition("/")[2]: name for name in KNOWN}
"""The hub redirects the old short names (``bert-base-uncased``)."""


def known(name: str) -> BackboneInfo | None:
    """Facts of a hub name, if it is one of ours."""
    return KNOWN.get(SHORT.get(name, name))
