"""Reading a folder of sentence-transformers, of versions 2 to 6: each setting is obeyed, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor

from embedlab.backbones.weight_files import PACKED, corruption, packed
from embedlab.config.read import read_values
from embedlab.encoders.usage import SIMILARITIES, Usage
from embedlab.errors import UserError
from embedlab.pooling.modules import ACTIVATIONS

FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Of versions before 6, in the order in which several are joined."""
_OURS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_LIMIT_FILES = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
_RENAMED = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}
_TRANSFORMER = {
    "max_seq_length": None, "do_lower_case": None, "unpad_inputs": None, "model_kwargs": None,
    "processor_kwargs": None, "config_kwargs": None, "transformer_task": ("feature-extraction", None),
    "module_output_name": ("token_embeddings", None), "processing_kwargs": ({}, None),
    "query_length": (None,), "document_length": (None,), "query_expansion": (None,),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}}, None),
}  # fmt: skip
"""Keys of the transformer's settings, and the only values of those that nothing here reads."""
_HARMLESS = {
    "model_kwargs": {"torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "device_map",
                     "low_cpu_mem_usage", "use_safetensors", "trust_remote_code", "revision", "cache_dir"},
    "config_kwargs": {"output_hidden_states", "use_cache", "return_dict", "trust_remote_code", "revision",
                      "cache_dir"},
    "processor_kwargs": {"use_fast", "padding_side", "clean_up_tokenization_spaces", "trust_remote_code",
                         "revision", "cache_dir", "model_max_length", "truncation_side"},
}  # fmt: skip
"""Arguments of `from_pretrained` that change no vector, or that are read here. (Weights are always fp32.)"""
_TOP = {"prompts", "default_prompt_name", "truncate_dim", "similarity_fn_name", "model_type", "__version__"}
_PLAIN = {
    "LayerNorm": {"dimension"},
    "Dropout": {"dropout"},
    "Normalize": {"module_input_name", "module_output_name"},
}
"""Keys of the modules that have no choices here. Old versions write no folder for some."""
_WIDEST = 1 << 16
"""Features of a dense layer: a number in a file may not ask for any amount of memory."""
_OTHER_FIX = "sentence-transformers itself, or a model without it"


@dataclass(frozen=True)
class ModulesFile:
    """What `modules.json` and the files that it names say.

    Args:
        transformer: folder of the model and its tokenizer.
        pooling: `embedlab.pooling.pooling_config` values.
        weights: of the pooling.
        max_length: tokens of a row at most; None: as the tokenizer says.
        lower_case: whether texts are lower-cased before they are tokenised.
        truncation_side: where a text that is too long is cut; None: as the tokenizer says.
        usage: prompts, kept width, similarity.
    """

    transformer: Path
    pooling: dict[str, Any]
    weights: dict[str, Tensor]
    max_length: int | None
    lower_case: bool
    truncation_side: str | None
    usage: Usage

    @classmethod
    def read(cls, folder: Path) -> ModulesFile:
        """The folder that holds `modules.json`.

        Raises:
            UserError: a module or a setting that is not known here, or a file that cannot be read.
        """
        file = folder / "modules.json"
        modules = _json(file, list)
        kinds = []
        for i, module in enumerate(modules):
            if not isinstance(module, Mapping) or not all(
                isinstance(module.get(k), str) for k in ("type", "path")
            ):
                raise UserError(
                    "needs a type and a path, both texts", file=file, key=f"{i}", fix="another copy"
                )
            kinds.append(_kind(module["type"], file))
        if kinds[:2] != ["Transformer", "Pooling"]:
            _refuse(
                file,
                "type",
                " + ".join(kinds),
                "a Transformer, then a Pooling, then Dense, LayerNorm, Normalize",
            )
        places = [_inside(folder, module["path"], file) for module in modules]
        modes, include_prompt = _pooling(places[1] / "config.json")
        head, weights = _head(kinds[2:], places[2:])
        settings = _transformer(places[0])
        processor = settings.get("processor_kwargs") or {}
        plain = len(modes) == 1 and modes[0] in _OURS and not head
        return cls(
            transformer=places[0],
            pooling={"name": _OURS[modes[0]]} if plain else {"name": "modules", "modes": modes, "head": head},
            weights=weights,
            max_length=processor.get("model_max_length") or settings.get("max_seq_length"),
            lower_case=bool(settings.get("do_lower_case")),
            truncation_side=processor.get("truncation_side"),
            usage=_usage(folder / "config_sentence_transformers.json", include_prompt),
        )


def _kind(name: str, file: Path) -> str:
    """The class of a module, if it is one of sentence-transformers' own."""
    package, kind = name.partition(".")[0], name.rpartition(".")[2]
    known = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")
    if package != "sentence_transformers" or kind not in known:
        _refuse(file, "type", name, f"modules of sentence-transformers: {', '.join(known)}; or {_OTHER_FIX}")
    return kind


def _inside(folder: Path, path: str, file: Path) -> Path:
    place = folder / path
    if not place.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            "leads out of the folder", file=file, key="path", value=path, fix="another copy of the model"
        )
    return place


def _pooling(file: Path) -> tuple[list[str], bool]:
    """The modes, and whether a prompt's tokens are read."""
    values = _json(file, dict)
    width_keys = {"word_embedding_dimension", "embedding_dimension"}
    _known(file, values, {"pooling_mode", "include_prompt", *width_keys, *FLAGS})
    flagged = [mode for flag, mode in FLAGS.items() if values.get(flag)]
    given = values.get("pooling_mode", flagged or "mean")
    modes = [given] if isinstance(given, str) else given
    if not isinstance(modes, list) or not modes or not all(m in FLAGS.values() for m in modes):
        _refuse(file, "pooling_mode", given, ", ".join(FLAGS.values()))
    include = values.get("include_prompt", True)
    if not isinstance(include, bool) or (not include and "weightedmean" in modes):
        _refuse(file, "include_prompt", include, "true or false; with weightedmean true")
    return modes, include


def _head(kinds: list[str], places: list[Path]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The modules after the pooling as `ModulesConfig.head`, and their weights."""
    head: list[dict[str, Any]] = []
    weights: dict[str, Tensor] = {}
    for kind, place in zip(kinds, places, strict=True):
        if kind in _PLAIN and (place / "config.json").is_file():
            _settings(place / "config.json", _PLAIN[kind])
        if kind == "Dropout":  # nothing, outside of training
            continue
        if kind == "Dense":
            head.append(_dense(place / "config.json"))
        elif kind == "LayerNorm":
            head.append({"kind": "layer_norm"})
        elif kind == "Normalize":
            head.append({"kind": "normalize"})
        else:
            _refuse(place.parent / "modules.json", "type", kind, "one Transformer and one Pooling")
        if kind in ("Dense", "LayerNorm"):
            # Both libraries call a Dense layer's parts `linear` and `residual`; its norm is `norm` there.
            names = {k.removeprefix("norm."): v for k, v in _weights(place).items()}
            weights |= {f"head.{len(head) - 1}.{name}": value for name, value in names.items()}
    return head, weights


def _dense(file: Path) -> dict[str, Any]:
    own = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
    values = _settings(file, own | _PLAIN["Normalize"])
    function = values.get("activation_function") or "torch.nn.modules.activation.Tanh"
    package, _, name = str(function).rpartition(".")
    if not package.startswith("torch.nn") or name not in ACTIVATIONS:
        _refuse(file, "activation_function", function, f"of torch.nn: {', '.join(ACTIVATIONS)}")
    width = values.get("out_features")
    if type(width) is not int or not 1 <= width <= _WIDEST:
        _refuse(file, "out_features", width, f"a whole number from 1 to {_WIDEST:,}")
    return {
        "kind": "dense", "out": values["out_features"], "bias": bool(values.get("bias", True)),
        "activation": name, "residual": bool(values.get("use_residual", False)),
    }  # fmt: skip


def _settings(file: Path, known: set[str]) -> dict[str, Any]:
    """The settings of a module that reads and writes the sentence's vector."""
    values: dict[str, Any] = _json(file, dict)
    _known(file, values, known)
    for key in ("module_input_name", "module_output_name"):
        if values.get(key) not in (None, "sentence_embedding"):
            _refuse(file, key, values[key], "sentence_embedding")
    return values


def _weights(place: Path) -> dict[str, Tensor]:
    safe, old = place / "model.safetensors", place / "pytorch_model.bin"
    file = safe if safe.is_file() else old
    if packed(file):
        raise UserError(PACKED, file=file, fix="another copy of the model")
    try:
        state: dict[str, Tensor] = (
            load_file(file) if file == safe else torch.load(file, map_location="cpu", weights_only=True)
        )
        return {str(name): value.float() for name, value in state.items()}
    except Exception as error:
        text = (
            corruption(error)
            or f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        )
        raise UserError(f"cannot be read: {text}", file=file, fix="another copy of the model") from error


def _transformer(folder: Path) -> dict[str, Any]:
    """The transformer's settings by their newest names."""
    file = next((folder / name for name in _LIMIT_FILES if (folder / name).is_file()), None)
    if file is None:
        return {}
    values = {_RENAMED.get(key, key): value for key, value in _json(file, dict).items()}
    _known(file, values, set(_TRANSFORMER))
    for key, only in _TRANSFORMER.items():
        if only is not None and key in values and values[key] not in only:
            _refuse(file, key, values[key], _OTHER_FIX)
    for key, known in _HARMLESS.items():
        arguments = values.get(key) or {}
        if not isinstance(arguments, dict):
            _refuse(file, key, arguments, "a mapping")
        _known(file, arguments, known, f"{key}.")
    for part, key in ((values, "max_seq_length"), (values.get("processor_kwargs") or {}, "model_max_length")):
        length = part.get(key)
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            _refuse(file, key, length, "a whole number from 1 up")
    return values


def _usage(file: Path, include_prompt: bool) -> Usage:
    values = _json(file, dict) if file.is_file() else {}
    _known(file, values, _TOP)
    if values.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        _refuse(file, "model_type", values["model_type"], "a SentenceTransformer")
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str | None) for p in prompts.values()):
        _refuse(file, "prompts", prompts, "texts by name")
    if not isinstance(values.get("default_prompt_name"), str | None):
        _refuse(file, "default_prompt_name", values["default_prompt_name"], "the name of a prompt")
    similarity = values.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        _refuse(file, "similarity_fn_name", similarity, ", ".join(SIMILARITIES))
    # As there: a model without a prompt for queries or documents has an empty one, which goes before the default.
    texts = {"query": "", "document": ""} | {name: text or "" for name, text in prompts.items()}
    default = values.get("default_prompt_name")
    if not any(texts.values()) and (default is None or default in texts):
        texts, default = {}, None
    usage: dict[str, Any] = {
        "prompts": texts, "default_prompt": default,
        "include_prompt": include_prompt, "truncate_dim": values.get("truncate_dim"), "similarity": similarity,
    }  # fmt: skip
    try:
        return Usage.from_dict(usage)
    except UserError as error:
        raise UserError(error.message, file=file, key=error.key, value=error.value, fix=error.fix) from error


def _known(file: Path, values: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
    """What is not known could change the vectors."""
    for key, value in values.items():
        if key not in known:
            _refuse(file, prefix + key, value, _OTHER_FIX)


def _refuse(file: Path, key: str, value: Any, fix: str) -> NoReturn:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    raise UserError("is not known here", file=file, key=key, value=text[:200], fix=fix)


def _json(file: Path, kind: type) -> Any:
    content = read_values(file, "another copy of the model")
    if not isinstance(content, kind):
        wanted = "a list" if kind is list else "a mapping"
        raise UserError(f"is not {wanted}", file=file, fix="another copy of the model")
    return content
