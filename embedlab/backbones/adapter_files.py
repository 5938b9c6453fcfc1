"""An adapter as PEFT stores it, beside the name of the base that it belongs to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from embedlab.backbones.adapters import (
    WEIGHTS,
    adapt,
    adapter_state,
    check_saved,
    load_adapter_state,
    rank_device,
    weights_digest,
)
from embedlab.backbones.backbone import Backbone
from embedlab.backbones.load import load_backbone
from embedlab.backbones.weight_files import corruption
from embedlab.config.adapter import Adapter
from embedlab.config.backbone import Attention
from embedlab.config.read import record
from embedlab.errors import UserError


def write_adapter(backbone: Backbone, folder: Path) -> None:
    """The adapter as PEFT stores it, without the base; read back and compared before this returns.

    Raises:
        RuntimeError: what was written is not what the model has.
    """
    assert backbone.adapter is not None
    peft = copy.copy(backbone.model.peft_config["default"])
    peft.base_model_name_or_path, peft.inference_mode = backbone.adapter.base.label, True
    peft.save_pretrained(folder)
    state = adapter_state(backbone.model)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    check_saved(state, load_file(folder / WEIGHTS), str(folder / WEIGHTS))


def read_adapter(
    card: Mapping[str, Any], folder: Path, attention: Attention | None, trust_remote_code: bool = False
) -> tuple[Backbone, Any]:
    """The backbone of ``write_adapter`` (base, quantisation and adapter), and its tokenizer.

    Args:
        card: of ``Adapter.card``.
        folder: with the adapter's weights.
        attention: another kernel than the base's.
        trust_remote_code: of the caller. What the card says of it is what its run was allowed.

    Raises:
        UserError: the card is damaged, the base is not there any more, or is not the one that the adapter was
            trained on.
    """
    saved = record(Adapter, card, folder, "adapter")
    base = replace(
        saved.base, attention=attention or saved.base.attention, trust_remote_code=trust_remote_code
    )
    if base.source == "fresh":
        raise UserError(
            "an adapter has no base of random weights", file=folder, key="adapter.base.source", value="fresh",
            fix="an adapter of weights that are in a file or on the hub",
        )  # fmt: skip
    try:
        backbone, tokenizer = load_backbone(base)
    except UserError as error:
        problem = f"this adapter needs its base model, which cannot be loaded: {error.message}"
        raise UserError(problem, file=folder, key=error.key, value=error.value, fix=error.fix) from error
    if (found := weights_digest(backbone.model)) != saved.digest:
        raise UserError(
            f"the base model is not the one that the adapter was trained on (weights {found}, not {saved.digest})",
            file=folder,
            key="backbone",
            value=base.label,
            fix="the original base model, or an export (embedlab export), which is whole by itself",
        )
    config = replace(saved.config, targets=tuple(saved.config.targets), gradient_checkpointing=False)
    adapt(backbone, config, base, rank_device(cuda=False))
    try:
        load_adapter_state(backbone.model, load_file(folder / WEIGHTS))
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(
            f"the adapter cannot be read: {corruption(error) or error}",
            file=folder / WEIGHTS,
            fix="another copy of the encoder",
        ) from error
    return backbone.eval(), tokenizer
