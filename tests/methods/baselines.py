"""What the tests of the field's baselines share: a tiny encoder, and a batch of sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.pooling import build_pooling
from tests.support import SENTENCES

Tiny = Callable[..., Path]


def encoder(
    tiny: Tiny,
    model_type: str = "bert",
    pooling: str = "cls",
    head: Literal["masked_lm"] | None = None,
    **arch: Any,
) -> SentenceEncoder:
    source = BackboneConfig(source="local", path=str(tiny(model_type, **arch)))
    backbone, tokenizer = load_backbone(source, head=head)
    return SentenceEncoder(backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer))


def batch(method: Any, texts: tuple[str, ...] = SENTENCES[:6], **views: Any) -> dict[str, Any]:
    """Of the column ``sentence``, and further views by their tokenizations."""
    hashes = torch.tensor([sorted(set(texts)).index(text) for text in texts])
    made = {"rows": torch.arange(len(texts))}
    for name, tokenization in {"sentence": method.encoder.tokenization, **views}.items():
        made[name] = {**tokenization.pad(tokenization.ids(texts), 4), "hash": hashes}  # type: ignore[assignment]
    return made
