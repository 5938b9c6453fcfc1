"""Folders of sentence-transformers: what they say, and such folders of our encoders.

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
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embedlab.backbones.resolve import quiet
from embedlab.errors import UserError
from embedlab.files import ordinary_mode

_ST_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_LEGACY_ST_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
CUSTOM = "embedlab.export.st_module.EmbedlabModule"
_STOCK = "sentence_transformers.models."
_Module = tuple[str, dict[str, Any], dict[str, Tensor]]
"""Class, settings and weights of a module after the transformer."""

_PROBES = (
    "a", "A plane takes off.", "  hello ", ' "Quoted," he said; (twice) ', "...and so on", "'s", "42%", "naïve café",
    "中文", "a [MASK] <mask> </s>", "new\nline", " ", "word " * 700,
)  # fmt: skip
"""Texts on which a template has to give the ids of a plain prefix."""


def write_sentence_transformers(encoder: Any, folder: Path) -> None:
    """The files of an encoder, and those by which sentence-transformers finds its way in them.

    Args:
        encoder: an `embedlab.encoders.base.Encoder`; its vectors are not normalised.
        folder: an existing, empty one.
    """
    if len(encoder.towers) > 1:
        _write_twin(encoder, folder)
    else:
        _write_single(encoder, folder)


def _write_single(encoder: Any, folder: Path) -> None:
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


def _row_limit(encoder: Any) -> int | None:
    """Tokens of a row at most."""
    t = encoder.tokenization
    if t.max_length is None:
        return t.model_limit
    return t.max_length if t.template is None else t.max_length + t.overhead


def _as_prompt(encoder: Any) -> str | None:
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


def _stock_pooling(encoder: Any) -> list[_Module] | None:
    """The modules that compute this pooling, or None."""
    build = _STOCK_POOLINGS.get(encoder.pooling.name)
    return build(encoder) if build is not None else None


def _cls_mlp(encoder: Any) -> list[_Module]:
    weights = encoder.pooling.state_dict()
    width = encoder.dim
    dense = {
        "in_features": width,
        "out_features": width,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    return [_pool("cls_token", width), ("Dense", dense, weights)]


def _first_last(encoder: Any) -> list[_Module]:
    """Token by token instead of after the mean, which comes to the same."""
    layers, width = encoder.backbone.info.layers, encoder.dim
    start = 0 if encoder.pooling.config.embeddings else 1
    weights = torch.zeros(layers + 1 - start)
    weights[0] += 1
    weights[-1] += 1
    mix = {"word_embedding_dimension": width, "layer_start": start, "num_hidden_layers": layers}
    return [("WeightedLayerPooling", mix, {"layer_weights": weights}), _pool("mean_tokens", width)]


_STOCK_POOLINGS: dict[str, Callable[[Any], list[_Module]]] = {
    "cls": lambda encoder: [_pool("cls_token", encoder.dim)],
    "mean": lambda encoder: [_pool("mean_tokens", encoder.dim)],
    "last": lambda encoder: [_pool("lasttoken", encoder.dim)],
    "cls_mlp": _cls_mlp,
    "first_last": _first_last,
}


_MODES = {"cls": "cls", "mean": "mean", "last": "lasttoken"}


def _write_twin(twin: Any, folder: Path) -> None:
    """Towers and their sum, spelled in the modules that sentence-transformers has.

    It has none that adds two encoders. So the first tower's vector waits in the feature that `Pooling` takes for the
    first token (`cls_token_embeddings`), the second tower's is pooled beside it, and a `Dense` layer of two weighted
    identities adds the two. A third tower follows in the same way.

    A pooling other than cls, mean and last, a template or a preparation make it one module of this package, as for a
    single encoder. With cls, a sentence that spells the first special token out as text (``[CLS]``) gets other
    vectors there.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights

    pooling = twin.towers[0].pooling.config.name
    if (
        pooling not in _MODES
        or twin.tokenization.template is not None
        or twin.tokenization.preparation != "raw"
    ):
        twin.write(folder)
        _write(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": CUSTOM}])
        return
    width = twin.dim
    towers = list(twin.towers)
    modules: list[nn.Module] = [_transformer(towers[0]), Pooling(width, _MODES[pooling])]
    sum_so_far = twin.weights[0]
    for tower, weight in zip(towers[1:], twin.weights[1:], strict=True):
        modules.append(_dense(torch.eye(width), "sentence_embedding", "cls_token_embeddings"))
        modules.append(_transformer(tower))
        beside = _MODES[pooling]
        if pooling == "cls":
            # "cls" now names the waiting vector; this tower's first token is the mean over it alone.
            tokenizer = twin.tokenizer
            vocabulary = [
                token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
            ]
            modules.append(WordWeights(vocabulary, {_first_token(tower): 1.0}, unknown_word_weight=0.0))
            beside = "mean"
        modules.append(Pooling(width, ("cls", beside)))
        both = torch.cat([sum_so_far * torch.eye(width), weight * torch.eye(width)], 1)
        modules.append(_dense(both, "sentence_embedding", "sentence_embedding"))
        sum_so_far = 1.0
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


def _first_token(tower: Any) -> str:
    ids = tower.tokenization.ids([""])[0]
    return str(tower.tokenizer.convert_ids_to_tokens(ids[0]))


def _transformer(tower: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Transformer

    limit = tower.tokenization.max_length or tower.tokenization.model_limit
    with tempfile.TemporaryDirectory() as name, quiet():
        tower.write(Path(name))
        return Transformer(name, max_seq_length=limit)


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
    modes = [m for key, m in _LEGACY_ST_POOLINGS.items() if pooling.get(key)]
    modes += [m for key in ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens",
                            "pooling_mode_weightedmean_tokens") if (m := key) and pooling.get(key)]  # fmt: skip
    mode = pooling.get("pooling_mode", modes[0] if len(modes) == 1 else modes)
    if not isinstance(mode, str) or mode not in _ST_POOLINGS:
        raise UserError(
            f"its pooling {mode} is not known here", file=folder, fix="one of cls, mean and lasttoken"
        )
    inner = folder / modules[0]["path"]
    settings = (
        _read(inner / "sentence_bert_config.json") if (inner / "sentence_bert_config.json").is_file() else {}
    )
    return str(inner), _ST_POOLINGS[mode], settings.get("max_seq_length")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", file=file, fix="another copy of the model") from error
