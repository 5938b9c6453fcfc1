"""The prompts of a run's data, as its encoder keeps them."""

from __future__ import annotations

from dataclasses import replace

from embedlab.config.data import DataConfig
from embedlab.data.kinds import data_kind
from embedlab.encoders.usage import Usage

_NAMES = {
    "anchor": "query",
    "positive": "document",
    "first": "sentence",
    "text": "sentence",
    "sentence": "sentence",
}
"""Role of a text -> what its prompt is called when texts are encoded."""


def with_prompts(usage: Usage, data: DataConfig) -> Usage:
    """An encoder's settings with the prompts that its training data have before their texts.

    That of anchors is ``query``, that of positives ``document``; where a sentence alone has one, it is the default.
    Sets of a mix with different ones keep each its own, as ``SET_query``.
    """
    found: dict[str, dict[str, str]] = {}
    for name, one in ({name: each.config for name, each in data.sets.items()} or {"": data}).items():
        for role, prompt in data_kind(one.name).prompts_of(one).items():
            if role in _NAMES:
                found.setdefault(_NAMES[role], {})[name] = prompt
    prompts = {
        name if len(set(texts.values())) == 1 else f"{of}_{name}": text
        for name, texts in found.items()
        for of, text in texts.items()
    }
    if not prompts:
        return usage
    default = "sentence" if set(prompts) == {"sentence"} else usage.default_prompt
    return replace(usage, prompts={**usage.prompts, **prompts}, default_prompt=default)
