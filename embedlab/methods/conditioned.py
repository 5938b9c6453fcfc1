"""A second network that sees a sentence's vector: in place of a token's embedding (DiffCSE, InfoCSE)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from embedlab.backbones import Backbone, load_backbone
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.config.run import RunConfig
from embedlab.errors import UserError
from embedlab.methods.masked_lm import check_masking

TYPES = ("bert", "camembert", "distilbert", "roberta", "xlm-roberta")
"""Architectures whose embedding layer, with its norm and dropout, is one module before the blocks."""


class Conditioned(nn.Module):
    """A backbone that reads what a caller makes of its embedding layer's output."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids: Tensor, mask: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Last states ``[B, L, D]`` of right-padded rows.

        Args:
            input_ids, mask: ``[B, L]``.
            change: from the embedding layer's output, ``[B, L, D]``, to what the blocks read.
        """
        # Not inputs_embeds, which would be normalised a second time.
        embeddings: nn.Module = self.backbone.model.embeddings
        hook = embeddings.register_forward_hook(lambda module, inputs, output: change(output))
        try:
            states: Tensor = self.backbone(input_ids, mask)[-1]
            return states
        finally:
            hook.remove()


def check_conditioned(info: BackboneInfo, run: RunConfig) -> None:
    """Whether a backbone can be conditioned, and masks be filled.

    Args:
        info: of the backbone.
        run: the whole configuration.

    Raises:
        UserError: another architecture, adapters, or nothing to learn.
    """
    check_masking(info, run)
    if info.model_type not in TYPES:
        raise UserError(
            "a sentence's vector cannot be put into this architecture's embeddings",
            key="backbone",
            value=info.model_type,
            fix=f"one of {', '.join(TYPES)}",
        )
    if run.adapter.r is not None:
        raise UserError(
            "the second network is trained whole", key="adapter", value=run.adapter.name, fix="adapter=none"
        )
    if run.backbone.source == "fresh":
        raise UserError(
            "random weights predict no masked words",
            key="backbone",
            value="fresh",
            fix="method=masked_lm first",
        )


def with_head(config: BackboneConfig) -> tuple[Backbone, Any]:
    """A backbone that predicts masked words, and its tokenizer.

    Raises:
        UserError: it has no head for that; a new one would draw words at random.
    """
    try:
        return load_backbone(replace(config, new_head=False), head="masked_lm")
    except UserError as error:
        if error.key == "backbone.new_head":
            error.message = "this checkpoint predicts no masked words"
            error.key, error.value = "backbone", config.label
            learn = "method=masked_lm backbone.new_head=true first"
            error.fix = (
                f"{learn}, and its run as backbone=local backbone.path=RUN/export, or another checkpoint"
            )
        raise


def named(path: str, attention: Any) -> BackboneConfig:
    """A checkpoint by its folder, a run's folder, or its name on the hub."""
    given = Path(path).expanduser()
    for folder in (given, given / "export"):
        if (folder / "config.json").is_file():
            return BackboneConfig("local", path, str(folder), attention=attention)
    if given.exists():
        raise UserError(
            "no checkpoint in this folder", file=given, fix="the folder of a masked language model"
        )
    return BackboneConfig("hub", path, attention=attention)
