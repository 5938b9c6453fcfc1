"""A folder for sentence-transformers, made without it.

Where its own modules compute the same, they are used, and the folder loads wherever sentence-transformers is
installed: cls, mean, last, cls_mlp (Pooling + Dense) and first_last (WeightedLayerPooling), with no template or
with one that is a plain prefix. Everything else (mask tokens, marks, text after the sentence, learned poolings)
is one module of this package, `embedlab.export.st_module.EmbedlabModule`; sentence-transformers 6 imports a
foreign module only with ``SentenceTransformer(folder, trust_remote_code=True)``.

The vectors are the same, the empty text aside where a tokenizer adds no special tokens to it (GPT-2, Qwen): the
stock modules then have no token to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embedlab.files import ordinary_mode

if TYPE_CHECKING:
    from embedlab.encoders.encoder import SentenceEncoder

CUSTOM = "embedlab.export.st_module.EmbedlabModule"
_STOCK = "sentence_transformers.models."
_Module = tuple[str, dict[str, Any], dict[str, Tensor]]
"""Class, settings and weights of a module after the transformer."""

_PROBES = (
    "a", "A plane takes off.", "  hello ", ' "Quoted," he said; (twice) ', "...and so on", "'s", "42%", "naïve café",
    "中文", "a [MASK] <mask> </s>", "new\nline", " ", "word " * 700,
)  # fmt: skip
"""Texts on which a template has to give the ids of a plain prefix."""


def write_sentence_transformers(encoder: SentenceEncoder, folder: Path) -> None:
    """The files of an encoder, and those by which sentence-transformers finds its way in them.

    Args:
        encoder: as it is; its vectors are not normalised.
        folder: an existing, empty one.
    """
    encoder.write(folder)
    modules = [("0", "", CUSTOM)]
    prompt = _as_prompt(encoder)
    stock = _stock_pooling(encoder) if prompt is not None else None
    settings: dict[str, Any] = {"similarity_fn_name": "cosine"}
    if stock is not None:
        transformer: dict[str, Any] = {"max_seq_length": _row_limit(encoder), "do_lower_case": False}
        if encoder.pooling.needs_all_layers:
            transformer["config_args"] = {"output_hidden_states": True}
        _write(folder / "sentence_bert_config.json", transformer)
        modules = [("0", "", _STOCK + "Transformer")]
        for i, (kind, config, weights) in enumerate(stock, start=1):
            path = f"{i}_{kind}"
            (folder / path).mkdir()
            _write(folder / path / "config.json", config)
            if weights:
                from safetensors.torch import save_file

                file = folder / path / "model.safetensors"
                save_file({k: v.detach().cpu().float().contiguous() for k, v in weights.items()}, file)
                ordinary_mode(file)
            modules.append((str(i), path, _STOCK + kind))
        if prompt:
            settings |= {"prompts": {"template": prompt}, "default_prompt_name": "template"}
    _write(
        folder / "modules.json",
        [
            {"idx": i, "name": name, "path": path, "type": kind}
            for i, (name, path, kind) in enumerate(modules)
        ],
    )
    _write(folder / "config_sentence_transformers.json", settings)


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _row_limit(encoder: SentenceEncoder) -> int | None:
    """Tokens of a row at most."""
    t = encoder.tokenization
    if t.max_length is None:
        return t.model_limit
    return t.max_length if t.template is None else t.max_length + t.overhead


def _as_prompt(encoder: SentenceEncoder) -> str | None:
    """The template as text before the sentence ("" for none); None where that gives other ids."""
    t = encoder.tokenization
    if t.preparation != "raw":
        return None
    if t.template is None:
        return ""
    # Only a prefix that ends in a space has the same ids joined apart and as one string; the probes are for
    # tokenizers that join words.
    if t.template.after or t.template.join != "ids" or not t.template.before.endswith(" "):
        return None
    prompt = t.template.before
    theirs = t.tokenizer([prompt + text for text in _PROBES], truncation=True, max_length=_row_limit(encoder))
    return prompt if theirs["input_ids"] == t.ids(_PROBES) else None


def _pool(mode: str, width: int) -> _Module:
    return "Pooling", {"word_embedding_dimension": width, "pooling_mode_" + mode: True}, {}


def _stock_pooling(encoder: SentenceEncoder) -> list[_Module] | None:
    """The modules that compute this pooling, or None."""
    build = _STOCK_POOLINGS.get(encoder.pooling.name)
    return build(encoder) if build is not None else None


def _cls_mlp(encoder: SentenceEncoder) -> list[_Module]:
    weights = encoder.pooling.state_dict()
    width = encoder.dim
    dense = {
        "in_features": width,
        "out_features": width,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    return [_pool("cls_token", width), ("Dense", dense, weights)]


def _first_last(encoder: SentenceEncoder) -> list[_Module]:
    """Token by token instead of after the mean, which comes to the same."""
    layers, width = encoder.backbone.info.layers, encoder.dim
    start = 0 if encoder.pooling.config.embeddings else 1  # type: ignore[attr-defined]
    weights = torch.zeros(layers + 1 - start)
    weights[0] += 1
    weights[-1] += 1
    mix = {"word_embedding_dimension": width, "layer_start": start, "num_hidden_layers": layers}
    return [("WeightedLayerPooling", mix, {"layer_weights": weights}), _pool("mean_tokens", width)]


_STOCK_POOLINGS: dict[str, Callable[[SentenceEncoder], list[_Module]]] = {
    "cls": lambda encoder: [_pool("cls_token", encoder.dim)],
    "mean": lambda encoder: [_pool("mean_tokens", encoder.dim)],
    "last": lambda encoder: [_pool("lasttoken", encoder.dim)],
    "cls_mlp": _cls_mlp,
    "first_last": _first_last,
}
