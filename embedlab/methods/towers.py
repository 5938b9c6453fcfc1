"""JTCSE's towers: from their stage-1 checkpoints with their poolers, and what shows whether they act on each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from embedlab.backbones import load_backbone, load_pooler
from embedlab.backbones.weight_files import corruption
from embedlab.config.backbone import BackboneConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.folder import POOLING_WEIGHTS, EncoderFile, holds_twin
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.pooling import Pooling, build_pooling
from embedlab.pooling.one_token import new_dense

log = logging.getLogger(__name__)


def tower_pooler(sources: Sequence[BackboneConfig], width: int, seed: int) -> nn.Module:
    """BERT's pooler, dense + tanh on the sentence vector.

    That of the first source that has one of this width, else a new one.

    Args:
        sources: checkpoints to look in.
        width: of the vectors that it takes.
        seed: of a new one's weights, N(0, 0.02) with zero bias as in Hugging Face models.
    """
    for source in sources:
        try:
            pooler = load_pooler(source)
        except UserError as error:  # such as a hub that cannot be reached, when the towers are on the disk
            log.info("No pooler from %s: %s", source.label, error)
            continue
        if pooler is not None and pooler[0].in_features == width:  # type: ignore[index,union-attr]
            log.info("Pooler of %s.", source.label)
            return pooler.float()
    log.info("A new pooler, seed %d.", seed)
    return nn.Sequential(new_dense(width, torch.Generator().manual_seed(seed)), nn.Tanh())


class Tower(NamedTuple):
    """A tower to train, and the checkpoint that it comes from."""

    encoder: SentenceEncoder
    source: BackboneConfig


def load_tower(path: str | None, run: RunConfig, key: str) -> Tower:
    """A tower from its stage-1 checkpoint, with the run's pooling, template, attention kernel and dropout.

    Args:
        path: an encoder folder, a run folder (its export, else its best), or a plain Hugging Face one; None: the
            run's backbone.
        run: configuration of the twin.
        key: that named the path, for messages.

    Raises:
        UserError: there is no single encoder.
    """
    source = run.backbone
    if path is not None:
        source = replace(run.backbone, source="local", name=path, path=str(_folder(path, key)), revision=None)
    backbone, tokenizer = load_backbone(source)
    pooling = build_pooling(run.pooling, backbone.info)
    if path is not None and pooling.state_dict():
        _take_weights(pooling, Path(str(source.path)), key)
    return Tower(SentenceEncoder(backbone, pooling, Tokenization(tokenizer, run.template)), source)


def _folder(path: str, key: str) -> Path:
    given = Path(path).expanduser()
    for folder in (given, given / "export", given / "best"):
        if holds_twin(folder):
            raise UserError("is a twin itself", file=folder, key=key, value=path, fix="a single encoder")
        if (folder / "config.json").is_file():
            return folder
    raise UserError(
        "no encoder in this folder",
        file=given,
        key=key,
        value=path,
        fix="the folder of a stage-1 run or encoder",
    )


def _take_weights(pooling: Pooling, folder: Path, key: str) -> None:
    """A pooling with weights goes on from those of the checkpoint."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / POOLING_WEIGHTS
    saved = EncoderFile.read(folder).pooling if file.is_file() else {}
    if saved.get("name") != pooling.config.name:
        raise UserError(
            f"the checkpoint's pooling is {saved.get('name', 'without weights')}, not {pooling.config.name}",
            file=folder,
            key=key,
            fix="the pooling of the stage-1 run",
        )
    try:
        pooling.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise UserError(
            f"the pooling's weights do not fit: {corruption(error) or error}",
            file=file,
            key=key,
            fix="another copy of the stage-1 run",
        ) from error


# ---- diagnostics --------------------------------------------------------------------------------------------------


def gradient_norms(terms: dict[str, Tensor], vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The norm of each term's gradient at the towers' vectors: what the weights 1 of the terms hide."""
    norms = {}
    for name, term in terms.items():
        grads = torch.autograd.grad(term, vectors, retain_graph=True, allow_unused=True)
        parts = [g.float().norm() for g in grads if g is not None]
        norms[f"gradient/{name}"] = torch.stack(parts).norm() if parts else torch.zeros_like(term)
    return norms


@torch.no_grad()
def towers_apart(u: Tensor, v: Tensor) -> dict[str, Tensor]:
    """How near the towers are, and whether one outweighs the other in the sum."""
    return {
        "towers/cosine": cosine_similarity(u.float(), v.float()).mean(),
        "towers/cka": linear_cka(u, v),
        "towers/norm_ratio": (u.float().norm(dim=-1) / v.float().norm(dim=-1)).mean(),
    }


@torch.no_grad()
def linear_cka(a: Tensor, b: Tensor) -> Tensor:
    """Linear centred kernel alignment of two sets of vectors of the same rows (Kornblith et al. 2019), in [0, 1]."""
    with torch.autocast(a.device.type, enabled=False):
        a, b = a.float() - a.float().mean(0), b.float() - b.float().mean(0)
        k, m = a @ a.T, b @ b.T
        return (k * m).sum() / (k.norm() * m.norm()).clamp(min=1e-12)
