"""Folders of sentence-transformers, read and written.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embedlab.backbones.resolve import quiet
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.pooling import Pooling

_MODES = {"cls": "cls", "mean": "mean", "last": "lasttoken"}
"""Poolings of this package, by what sentence-transformers calls them."""
_FLAGS = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
"""Those, as `pooling_mode_...` flags of versions before 6."""
_OTHER_FLAGS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
CUSTOM = "embedlab.export.st_module.EmbedlabModule"
_STOCK = "sentence_transformers.models."
_Module = tuple[str, dict[str, Any], dict[str, Tensor]]
"""Class, settings and weights of a module after the transformer."""

_PROBES = (
    "a", "A plane takes off.", "  hello ", ' "Quoted," he said; (twice) ', "...and so on", "'s", "42%", "naïve café",
    "中文", "a [MASK] <mask> </s>", "new\nline", " ", "word " * 700,
)  # fmt: skip
"""Texts on which a template has to give the ids of a plain prefix."""


def write_modules(folder: Path, pooling: Pooling, tokenization: Tokenization, layers: int) -> None:
    """The files by which sentence-transformers finds its way in an encoder's folder.

    Args:
        folder: that holds the files of the encoder; its vectors are not normalised.
        pooling: of the encoder.
        tokenization: of the encoder.
        layers: of the backbone.
    """
    prompt = _as_prompt(tokenization)
    stock = _stock_pooling(pooling, layers) if prompt is not None else None
    settings: dict[str, Any] = {"similarity_fn_name": "cosine"}
    if stock is None:
        write_index(folder)
    else:
        transformer: dict[str, Any] = {"max_seq_length": tokenization.row_limit, "do_lower_case": False}
        if pooling.needs_all_layers:
            transformer["config_args"] = {"output_hidden_states": True}
        _write(folder / "sentence_bert_config.json", transformer)
        modules = [("", _STOCK + "Transformer")]
        for i, (kind, config, weights) in enumerate(stock, start=1):
            inner = folder / f"{i}_{kind}"
            inner.mkdir()
            _write(inner / "config.json", config)
            if weights:
                state = {k: v.detach().cpu().float().contiguous() for k, v in weights.items()}
                save_file(state, inner / "model.safetensors")
            modules.append((inner.name, _STOCK + kind))
        write_index(folder, modules)
        if prompt:
            settings |= {"prompts": {"template": prompt}, "default_prompt_name": "template"}
    _write(folder / "config_sentence_transformers.json", settings)


def write_index(folder: Path, modules: Sequence[tuple[str, str]] = (("", CUSTOM),)) -> None:
    """`modules.json`: folder and class of each module; by default the encoder as one module of this package."""
    index = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    _write(folder / "modules.json", index)


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _as_prompt(t: Tokenization) -> str | None:
    """The template as text before the sentence ("" for none); None where that gives other ids."""
    if t.preparation != "raw":
        return None
    if t.template is None:
        return ""
    # Only a prefix that ends in a space has the same ids joined apart and as one string; the probes are for
    # tokenizers that join words.
    if t.template.after or t.template.join != "ids" or not t.template.before.endswith(" "):
        return None
    prompt = t.template.before
    theirs = t.tokenizer([prompt + text for text in _PROBES], truncation=True, max_length=t.row_limit)
    return prompt if theirs["input_ids"] == t.ids(_PROBES) else None


def _stock_pooling(pooling: Pooling, layers: int) -> list[_Module] | None:
    """The modules of sentence-transformers that compute this pooling, or None."""
    width = pooling.dim

    def pool(flag: str) -> _Module:
        return "Pooling", {"word_embedding_dimension": width, "pooling_mode_" + flag: True}, {}

    if pooling.name in _MODES:
        return [pool(_FLAGS[_MODES[pooling.name]])]
    if pooling.name == "cls_mlp":
        tanh = "torch.nn.modules.activation.Tanh"
        dense = {"in_features": width, "out_features": width, "bias": True, "activation_function": tanh}
        return [pool("cls_token"), ("Dense", dense, pooling.state_dict())]
    if pooling.name == "first_last":
        # Averaged token by token instead of after the mean, which comes to the same.
        start = 0 if pooling.config.embeddings else 1  # type: ignore[attr-defined]
        weights = torch.zeros(layers + 1 - start)
        weights[0] += 1
        weights[-1] += 1
        mix = {"word_embedding_dimension": width, "layer_start": start, "num_hidden_layers": layers}
        return [("WeightedLayerPooling", mix, {"layer_weights": weights}), pool("mean_tokens")]
    return None


def sums(pooling: str, tokenization: Tokenization) -> bool:
    """Whether `write_sum` can write encoders of this pooling and tokenization."""
    return pooling in _MODES and tokenization.template is None and tokenization.preparation == "raw"


def write_sum(
    folder: Path,
    pooling: str,
    width: int,
    towers: Sequence[tuple[Path, Tokenization]],
    weights: Sequence[float],
) -> None:
    """Encoders and the weighted sum of their vectors, spelled in the modules that sentence-transformers has.

    It has none that adds two encoders. So the first tower's vector waits in the feature that `Pooling` takes for the
    first token (`cls_token_embeddings`), the second tower's is pooled beside it, and a `Dense` layer of two weighted
    identities adds the two. A third tower follows in the same way. With cls, a sentence that spells the first
    special token out as text (``[CLS]``) gets other vectors there.

    Args:
        folder: an empty one.
        pooling: of all towers, one that `sums`.
        width: of the vectors.
        towers: folder and tokenization of each.
        weights: of the sum.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights

    mode, eye = _MODES[pooling], torch.eye(width)
    modules: list[nn.Module] = [_transformer(*towers[0]), Pooling(width, mode)]
    sum_so_far = weights[0]
    for (path, tokenization), weight in zip(towers[1:], weights[1:], strict=True):
        modules.append(_dense(eye, "sentence_embedding", "cls_token_embeddings"))
        modules.append(_transformer(path, tokenization))
        beside = mode
        if mode == "cls":
            # "cls" now names the waiting vector; this tower's first token is the mean over it alone.
            tokenizer = tokenization.tokenizer
            vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
            first = str(tokenizer.convert_ids_to_tokens(tokenization.ids([""])[0][0]))
            modules.append(WordWeights(vocabulary, {first: 1.0}, unknown_word_weight=0.0))
            beside = "mean"
        modules.append(Pooling(width, ("cls", beside)))
        both = torch.cat([sum_so_far * eye, weight * eye], 1)
        modules.append(_dense(both, "sentence_embedding", "sentence_embedding"))
        sum_so_far = 1.0
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


def _transformer(folder: Path, tokenization: Tokenization) -> Any:
    from sentence_transformers.sentence_transformer.modules import Transformer

    with quiet():
        return Transformer(str(folder), max_seq_length=tokenization.row_limit)


def _dense(weight: Tensor, source: str, target: str) -> Any:
    from sentence_transformers.sentence_transformer.modules import Dense

    return Dense(
        weight.shape[1],
        weight.shape[0],
        bias=False,
        activation_function=nn.Identity(),
        init_weight=weight,
        module_input_name=source,
        module_output_name=target,
    )


def read_modules(folder: Path) -> tuple[str, str, int | None]:
    """What a folder of sentence-transformers says, if its modules are those that this project has too.

    A final Normalize is left out: `encode(normalize=True)` does it.

    Returns:
        The folder of the transformer, the pooling's name and the most tokens of a row.

    Raises:
        UserError: modules or a pooling that are not known here, or files that cannot be read.
    """
    modules = _read(folder / "modules.json")
    kinds = [str(m["type"]).rpartition(".")[2] for m in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"its modules {', '.join(kinds)} are not all known here",
            file=folder,
            fix="a model of Transformer, Pooling and Normalize; or sentence-transformers itself",
        )
    pooling = _read(folder / modules[1]["path"] / "config.json")
    modes = [mode for mode, flag in _FLAGS.items() if pooling.get("pooling_mode_" + flag)]
    modes += ["pooling_mode_" + flag for flag in _OTHER_FLAGS if pooling.get("pooling_mode_" + flag)]
    mode = pooling.get("pooling_mode", modes[0] if len(modes) == 1 else modes)
    ours = {theirs: name for name, theirs in _MODES.items()}
    if not isinstance(mode, str) or mode not in ours:
        raise UserError(
            f"its pooling {mode} is not known here", file=folder, fix="one of cls, mean and lasttoken"
        )
    inner = folder / modules[0]["path"]
    limits = inner / "sentence_bert_config.json"
    max_length = _read(limits).get("max_seq_length") if limits.is_file() else None
    return str(inner), ours[mode], max_length


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", file=file, fix="another copy of the model") from error
