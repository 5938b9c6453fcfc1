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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embedlab.backbones.resolve import quiet
from embedlab.encoders.modules_file import FLAGS
from embedlab.encoders.text_normalization import lower_cases
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.usage import Usage
from embedlab.pooling import Pooling
from embedlab.pooling.mean import FirstLast
from embedlab.pooling.modules import Modules
from embedlab.pooling.whitening import Whitening

_FLAGS = {mode: flag for flag, mode in FLAGS.items()}
"""What versions before 6 call the modes of pooling."""
CUSTOM = "embedlab.export.st_module.EmbedlabModule"
_STOCK = "sentence_transformers.models."
_Module = tuple[str, dict[str, Any], dict[str, Tensor]]
"""Class, settings and weights of a module after the transformer."""

_PROBES = (
    "a", "A plane takes off.", "  hello ", ' "Quoted," he said; (twice) ', "...and so on", "'s", "42%", "naïve café",
    "中文", "a [MASK] <mask> </s>", "new\nline", " ", "word " * 700,
)  # fmt: skip
"""Texts on which a template has to give the ids of a plain prefix."""


def write_modules(
    folder: Path, pooling: Pooling, tokenization: Tokenization, layers: int, usage: Usage
) -> None:
    """The files by which sentence-transformers finds its way in an encoder's folder.

    Args:
        folder: that holds the files of the encoder; its vectors are not normalised.
        pooling: of the encoder.
        tokenization: of the encoder.
        layers: of the backbone.
        usage: of the encoder.
    """
    prompt = _as_prompt(tokenization)
    if prompt and not usage.include_prompt:
        prompt = None  # it would be left out with the prompt
    stock = _stock_pooling(pooling, layers, usage.include_prompt) if prompt is not None else None
    if stock is None:
        write_index(folder)
    else:
        transformer: dict[str, Any] = {"max_seq_length": tokenization.row_limit,
                                       "do_lower_case": lower_cases(tokenization.tokenizer)}  # fmt: skip
        if pooling.needs_all_layers:  # WeightedLayerPooling reads them
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
    _write(
        folder / "config_sentence_transformers.json", _settings(usage, prompt if stock is not None else None)
    )


def _settings(usage: Usage, template: str | None) -> dict[str, Any]:
    """`config_sentence_transformers.json`: prompts, after the template where that is a prompt too."""
    prompts, default = _prompts(usage, template or "")
    settings: dict[str, Any] = {"similarity_fn_name": usage.similarity}
    if prompts:
        settings |= {"prompts": prompts, "default_prompt_name": default}
    if usage.truncate_dim is not None:
        settings["truncate_dim"] = usage.truncate_dim
    return settings


def _prompts(usage: Usage, template: str) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the default one's name."""
    prompts = {name: template + text for name, text in usage.prompts.items()}
    default = usage.default_prompt
    if template:
        # Every text has the template: also one without a prompt.
        default = default or next(n for n in ("template", "template_") if n not in prompts)
        prompts.setdefault(default, template)
    if prompts:  # there the default one is not for queries and documents, and no other name stands for them
        prompts |= {role: template + usage.role(role) for role in ("query", "document")}
    return prompts, default


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


def _stock_pooling(pooling: Pooling, layers: int, include_prompt: bool) -> list[_Module] | None:
    """The modules of sentence-transformers that compute this pooling, or None."""
    width = pooling.dim

    def pool(*modes: str, width: int = width) -> _Module:
        # A flag for the mean too: without any, old versions take it.
        flags = {flag: mode in modes for mode, flag in _FLAGS.items() if mode in (*modes, "mean")}
        if len(modes) > 1:
            flags = {flag: mode in modes for mode, flag in _FLAGS.items()}
        values = {"word_embedding_dimension": width, **flags}
        return "Pooling", values | ({} if include_prompt else {"include_prompt": False}), {}

    if isinstance(pooling, Modules):
        return _stock_modules(pooling, pool)
    if isinstance(pooling, Whitening):
        inner = _stock_pooling(pooling.inner, layers, include_prompt)
        state = {"linear.weight": pooling.matrix.T, "linear.bias": -pooling.mean @ pooling.matrix}
        return inner and [*inner, _dense_module(pooling.inner.dim, width, "Identity", state)]
    if pooling.config.stock_mode is None:
        return None
    stock = [pool(pooling.config.stock_mode)]
    if pooling.config.has_head:
        stock.append(_dense_module(width, width, "Tanh", pooling.state_dict()))
    if isinstance(pooling, FirstLast):
        # Averaged token by token instead of after the mean, which comes to the same.
        start = 0 if pooling.config.embeddings else 1
        weights = torch.zeros(layers + 1 - start)
        weights[0] += 1
        weights[-1] += 1
        mix = {"word_embedding_dimension": width, "layer_start": start, "num_hidden_layers": layers}
        stock.insert(0, ("WeightedLayerPooling", mix, {"layer_weights": weights}))
    return stock


def _dense_module(
    width: int, out: int, activation: str, state: dict[str, Tensor], bias: bool = True, residual: bool = False
) -> _Module:
    values = {
        "in_features": width, "out_features": out, "bias": bias,
        "activation_function": f"{getattr(nn, activation).__module__}.{activation}",
    }  # fmt: skip
    return "Dense", values | ({"use_residual": True} if residual else {}), state


def _stock_modules(pooling: Modules, pool: Callable[..., _Module]) -> list[_Module] | None:
    """`Modules` as they were read; None for modes that the flags join in another order."""
    config = pooling.settings
    modes = list(config.modes)
    if modes != [mode for mode in _FLAGS if mode in modes]:
        return None
    width = pooling.input_width
    made = [pool(*modes, width=width // len(modes))]
    for values, part in zip(config.head, pooling.head, strict=True):
        state = part.state_dict()
        if values["kind"] == "dense":
            told = {key: values[key] for key in ("bias", "residual") if key in values}
            made.append(_dense_module(width, values["out"], values.get("activation", "Tanh"), state, **told))
            width = values["out"]
        elif values["kind"] == "layer_norm":
            made.append(("LayerNorm", {"dimension": width}, {f"norm.{k}": v for k, v in state.items()}))
        else:
            made.append(("Normalize", {}, {}))
    return made


def summed_mode(pooling: Pooling, tokenization: Tokenization) -> str | None:
    """The mode of pooling by which `write_sum` writes encoders of this pooling and tokenization; None: it cannot."""
    plain = not pooling.config.has_head and not pooling.needs_all_layers
    as_text = tokenization.template is None and tokenization.preparation == "raw"
    return pooling.config.stock_mode if plain and as_text else None


def write_sum(
    folder: Path,
    mode: str,
    width: int,
    towers: Sequence[tuple[Path, Tokenization]],
    weights: Sequence[float],
    usage: Usage,
) -> None:
    """Encoders and the weighted sum of their vectors, spelled in the modules that sentence-transformers has.

    It has none that adds two encoders. So the first tower's vector waits in the feature that `Pooling` takes for the
    first token (`cls_token_embeddings`), the second tower's is pooled beside it, and a `Dense` layer of two weighted
    identities adds the two. A third tower follows in the same way. With cls, a sentence that spells the first
    special token out as text (``[CLS]``) gets other vectors there.

    Args:
        folder: an empty one.
        mode: of all towers' pooling, of `summed_mode`.
        width: of the vectors.
        towers: folder and tokenization of each.
        weights: of the sum.
        usage: of the encoder.
    """
    with quiet():
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights

    eye = torch.eye(width)
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
    prompts, default = _prompts(usage, "")
    SentenceTransformer(
        modules=modules, device="cpu", prompts=prompts or None, default_prompt_name=default,
        similarity_fn_name=usage.similarity, truncate_dim=usage.truncate_dim,
    ).save(str(folder), create_model_card=False)  # fmt: skip


def _transformer(folder: Path, tokenization: Tokenization) -> Any:
    from sentence_transformers.sentence_transformer.modules import Transformer

    with quiet():
        return Transformer(
            str(folder),
            max_seq_length=tokenization.row_limit,
            do_lower_case=lower_cases(tokenization.tokenizer),
        )


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
