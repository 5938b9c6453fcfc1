"""Transformers from the hub, a folder, the package or nothing: token ids to hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embedlab.backbones.resolve import probe
from embedlab.config.backbone import BackboneConfig, BackboneInfo

if TYPE_CHECKING:
    from embedlab.backbones.backbone import Backbone
    from embedlab.backbones.load import load_backbone, load_pooler
    from embedlab.backbones.scratch import train_tokenizer

__all__ = [
    "Backbone",
    "BackboneConfig",
    "BackboneInfo",
    "load_backbone",
    "load_pooler",
    "probe",
    "train_tokenizer",
]

_LATER = {"Backbone": "backbone", "load_backbone": "load", "load_pooler": "load", "train_tokenizer": "scratch"}


def __getattr__(name: str) -> Any:
    # Deferred: checking a configuration does not need torch.
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f"embedlab.backbones.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
