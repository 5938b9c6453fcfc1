"""The model card of an export: where an encoder comes from, what it scored and by which protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from embedlab.config.read import read_values
from embedlab.console import markdown_text
from embedlab.encoders.folder import same_encoder
from embedlab.errors import printable
from embedlab.evaluation.core.table import HEADLINES

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder

_VECTORS = ("pooling", "template", "preparation", "max_length", "dtype", "checkpoint", "hub", "usage")
_RECIPE = ("backbone", "adapter", "method", "pooling", "template", "optimizer")
_DATA = ("name", "hub", "hub_config", "split", "revision", "files", "package", "limit", "decontaminate",
         "max_length", "batch_size")  # fmt: skip
_PROTOCOL = ("name", "aggregation", "text", "pooling", "template", "max_length", "dtype", "attention",
             "checkpoint")  # fmt: skip


def model_name(encoder: Encoder) -> str | None:
    """What an encoder is called: as its card or the hub says, or what it was trained from and how; None: not known."""
    card = encoder.card
    if card.get("name"):
        return str(card["name"])
    if card.get("hub"):
        return str(card["hub"]).partition("@")[0].rpartition("/")[2]
    config = card.get("config") or {}
    backbone, method = config.get("backbone") or {}, config.get("method") or {}
    base = Path(str(backbone.get("path") or backbone.get("name") or "")).name
    return f"{base} trained with {method['name']}" if base and method.get("name") else None


def model_card(encoder: Encoder, name: str, licence: str | None = None, folder: Path | None = None) -> str:
    """Markdown with the hub's front matter.

    Args:
        encoder: its ``card`` says what is known (``training``, ``config``, ``scores`` by name, ``protocol`` by suite,
            ``licence`` as a sentence); what is not known is said to be so, never guessed.
        name: of the model.
        licence: of the weights, which depends on the backbone and the data; None: not stated.
        folder: that the card is for, whose format decides how it is loaded; None: one that `embedlab.load` reads.
    """
    card = encoder.card
    config, training = card.get("config") or {}, card.get("training") or {}
    front = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-similarity", "feature-extraction", "embedlab"],
        **({"license": licence} if licence else {}),
    }
    stated = encoder.provenance()
    made = "trained and exported" if config or training else "exported"
    weights = markdown_text(str(licence or card.get("licence") or ""))
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {markdown_text(name)}",
        f"A sentence encoder with {encoder.dim}-dimensional vectors, {made} by embedlab.",
        "## Use",
        _use(encoder, folder),
        "## How vectors are made",
        _list({k: stated.get(k) for k in _VECTORS}),
        "## Recipe",
        _recipe(config, training),
        "## Training",
        _list(training) if training else "Not known.",
        "## Data",
        _data(config),
        "## Scores",
        _scores(card, _not_scored(card.get("protocol") or {}, str(stated["checkpoint"]), folder)),
        "## Licence",
        f"{weights}." if weights else "Not stated: it follows from the backbone's and the data's licences.",
    ]
    return "\n\n".join(parts) + "\n"


def _use(encoder: Encoder, folder: Path | None) -> str:
    """How the folder is loaded, with its prompts."""
    lines = ["import embedlab", "", 'encoder = embedlab.load("FOLDER")']
    asked = more = ""
    option = "dim"
    modules = folder / "modules.json" if folder is not None else None
    if folder is not None and (folder / "model.onnx").is_file():
        lines = ["from pathlib import Path", "", "from embedlab.export.onnx import load_onnx  # needs onnxruntime", "",
                 'encode = load_onnx(Path("FOLDER"))', 'vectors = encode(["a cat", "a dog"])']  # fmt: skip
        told = "\n\nOr by onnxruntime alone: inputs `input_ids` and `attention_mask` (int64)."
        if _is_int8(folder):
            told += (
                " Its weights are int8, and its activations are quantised batch by batch: the digits of a vector "
                "depend on the texts beside it. `load_onnx(…, batch_size=1)` gives the same ones every time."
            )
        return _code(lines) + told
    if modules is not None and modules.is_file():
        option = "truncate_dim"
        own = "embedlab" in modules.read_text(encoding="utf-8")
        trust = ", trust_remote_code=True" if own else ""
        lines = ["from sentence_transformers import SentenceTransformer", "",
                 f'encoder = SentenceTransformer("FOLDER"{trust})']  # fmt: skip
        asked = "The pooling is a module of embedlab: `pip install embedlab` first.\n\n" if own else ""
        if not own and not encoder.tokenization.overhead:
            more = "\n\nAn empty text has no token for these modules, which fail on it or give zeros: leave it out."
    lines.append('vectors = encoder.encode(["a cat", "a dog"])')
    if widths := _widths(encoder):
        lines.append(f'narrower = encoder.encode(["a cat", "a dog"], {option}={widths[0]})  # or {widths}')
    if "query" in encoder.usage.prompts:
        lines.append('queries = encoder.encode_query(["which animal purrs?"])')
    return asked + _code(lines) + more


def _is_int8(folder: Path | None) -> bool:
    file = folder / "embedlab.json" if folder is not None else None
    return file is not None and file.is_file() and read_values(file).get("precision") == "int8"


def _widths(encoder: Encoder) -> list[int]:
    """The narrower widths that the encoder was trained for (Matryoshka)."""
    method = (encoder.card.get("config") or {}).get("method") or {}
    dims = (method.get("matryoshka") or {}).get("dims") or []
    return sorted((dim for dim in dims if dim < encoder.dim), reverse=True)


def _code(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _list(values: Mapping[str, Any]) -> str:
    return "\n".join(
        f"- {markdown_text(key)}: {_short(value)}" for key, value in values.items() if value is not None
    )


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "`" + printable(json.dumps(value, ensure_ascii=False, default=str)).replace("`", "'") + "`"
    return markdown_text(str(value))


def _recipe(config: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    if not config and training:
        return "Not kept; what is known of the training is below."
    if not config:
        return "Not known: the encoder was not trained by a run of embedlab."
    sections = {k: config[k] for k in _RECIPE if k in config}
    text = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
    text = "".join(f"{printable(line)}\n" for line in text.splitlines())
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}yaml\n{text}{fence}"


def _data(config: Mapping[str, Any]) -> str:
    data = config.get("data")
    return _list({k: data.get(k) for k in _DATA}) if data else "Not known."


def _not_scored(protocols: Mapping[str, Any], checkpoint: str, folder: Path | None) -> str:
    """What the scores are of, where that is not what is exported."""
    blocks = [block for block in protocols.values() if isinstance(block, Mapping)]
    scored = {str(block["checkpoint"]) for block in blocks if block.get("checkpoint")}
    others = ", ".join(markdown_text(name) for name in sorted(scored) if not same_encoder(name, checkpoint))
    if others:
        return f"Scores of checkpoint {others}; this one, {checkpoint}, was not scored."
    return "Scores of the weights in float32; these, in int8, were not scored." if _is_int8(folder) else ""


def _scores(card: Mapping[str, Any], other: str) -> str:
    scores, protocols = card.get("scores") or {}, card.get("protocol") or {}
    seed = (card.get("training") or {}).get("seed")
    known = {k: v for k, v in scores.items() if isinstance(v, int | float) and not math.isnan(v)}
    if not known:
        return "Not scored."
    first = [k for k in HEADLINES if k in known]
    others = [k for k in known if k not in first and k.endswith(("/spearman", "/accuracy", "/ndcg@10"))]
    rows = [f"| {markdown_text(k)} | {known[k]:.2f} |" for k in first + sorted(others)]
    lines = [other, ""] if other else []
    lines += ["| score | value (n=1) |", "| :-- | --: |", *rows, "", f"One seed ({_short(seed)}): n=1."]
    for suite, block in protocols.items():
        if isinstance(block, Mapping):
            lines += [
                "",
                f"Protocol of {markdown_text(suite)}:",
                "",
                _list({k: block.get(k) for k in _PROTOCOL}),
            ]
    return "\n".join(lines)
