"""The model card of an export: where an encoder comes from, what it scored and by which protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder

_USE = """```python
import embedlab

encoder = embedlab.load("FOLDER")
vectors = encoder.encode(["a cat", "a dog"])
```"""
_HEADLINES = ("sts7/spearman", "dev/spearman", "lee/spearman")
_PROTOCOL = (
    "name",
    "aggregation",
    "text",
    "pooling",
    "template",
    "max_length",
    "dtype",
    "attention",
    "checkpoint",
)


def model_card(encoder: Encoder, name: str, licence: str | None = None) -> str:
    """Markdown with the hub's front matter.

    Args:
        encoder: its ``card`` says what is known (``training``, ``config``, ``scores`` by name, ``protocol`` by suite,
            ``licence`` as a sentence); what is not known is said to be so, never guessed.
        name: of the model.
        licence: of the weights, which depends on the backbone and the data; None: not stated.
    """
    card = encoder.card
    config, training = card.get("config") or {}, card.get("training") or {}
    front = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-similarity", "feature-extraction", "embedlab"],
        **({"license": licence} if licence else {}),
    }
    facts = encoder.provenance()
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A sentence encoder with {encoder.dim}-dimensional vectors, trained and exported by embedlab.",
        "## Use",
        _USE,
        "## How vectors are made",
        _list(
            {
                k: facts.get(k)
                for k in ("pooling", "template", "preparation", "max_length", "dtype", "checkpoint")
            }
        ),
        "## Recipe",
        _recipe(config, training),
        "## Training",
        _list(training) if training else "Not known.",
        "## Data",
        _data(config),
        "## Scores",
        _scores(card.get("scores") or {}, card.get("protocol") or {}, training.get("seed")),
        "## Licence",
        f"{licence or card['licence']}."
        if licence or card.get("licence")
        else "Not stated: it follows from the backbone's and the data's licences.",
    ]
    return "\n\n".join(parts) + "\n"


def _list(values: Mapping[str, Any]) -> str:
    return "\n".join(f"- {key}: {_short(value)}" for key, value in values.items() if value is not None)


def _short(value: Any) -> str:
    return (
        f"`{json.dumps(value, ensure_ascii=False, default=str)}`"
        if isinstance(value, (dict, list))
        else f"{value}"
    )


def _recipe(config: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    if not config and training:
        return "Not kept; what is known of the training is below."
    if not config:
        return "Not known: the encoder was not trained by a run of embedlab."
    sections = {
        k: config[k]
        for k in ("backbone", "adapter", "method", "pooling", "template", "optimizer")
        if k in config
    }
    return f"```yaml\n{yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)}```"


def _data(config: Mapping[str, Any]) -> str:
    data = config.get("data")
    if not data:
        return "Not known."
    told = (
        "name",
        "hub",
        "hub_config",
        "split",
        "revision",
        "files",
        "package",
        "limit",
        "max_length",
        "batch_size",
    )
    return _list({k: data.get(k) for k in told})


def _scores(scores: Mapping[str, float], protocols: Mapping[str, Any], seed: Any) -> str:
    known = {k: v for k, v in scores.items() if v is not None and not math.isnan(v)}
    if not known:
        return "Not scored."
    first = [k for k in _HEADLINES if k in known]
    order = first + sorted(
        k for k in known if k not in first and k.endswith(("/spearman", "/accuracy", "/ndcg@10"))
    )
    rows = [f"| {k} | {known[k]:.2f} |" for k in order]
    lines = ["| score | value (n=1) |", "| :-- | --: |", *rows, "", f"One seed ({seed}): n=1."]
    for suite, block in protocols.items():
        if isinstance(block, Mapping):
            told = {k: block.get(k) for k in _PROTOCOL if block.get(k) is not None}
            lines += ["", f"Protocol of `{suite}`:", "", _list(told)]
    return "\n".join(lines)
