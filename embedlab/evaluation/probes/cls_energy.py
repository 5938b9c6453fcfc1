"""CLS energy and the attention-sink profile of an encoder, layer by layer (JTCSE, arXiv 2505.02366).

The paper's exact formula of E_CLS is not known to us; these are the readings of the specification (1.9), all
reported, the first of them as ``E_CLS``. With h_j the state of token j after a layer, over the n real
tokens::

    E1 = ||h_CLS|| / mean_{j != CLS} ||h_j||     1 when uniform
    E2 = ||h_CLS|| / sum_j ||h_j||               n E2 = 1 when uniform
    E3 = ||h_CLS||^2 / sum_j ||h_j||^2
    A_j = mean over heads and real queries i of P[i, j], the attention that token j receives

BERT norms the states after each layer, so that at the last one E1 reflects mostly the norm's gain: E1 of the
attention's output (``E1_context``: P V W_O) and of its sum with the residual (``E1_sum``) stand beside it.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embedlab.errors import UserError
from embedlab.evaluation.core.correlation import flat
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import Scores
from embedlab.evaluation.core.vectors import unique
from embedlab.evaluation.sts.sts import STSPairs, all_sentences, load_sts, row_count_warnings

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.encoders.encoder import SentenceEncoder

ENERGIES = ("E1", "E2", "nE2", "E3", "E1_context", "E1_sum")
MASSES = ("A_CLS", "A_SEP", "A_punct", "A_other")
"""Attention received by the first token, the last, punctuation between them, the rest; they add up to 1."""
SINKS = ("sink", "sink_is_CLS", "sink_is_SEP", "sink_is_punct", "deficit")
"""The largest A_j, the share of sentences in which it belongs to each kind of token, and A_CLS - 1 / n."""
METRICS = (*ENERGIES, *MASSES, *SINKS)


@dataclass(frozen=True)
class Profile:
    """Means over sentences, ``[layers]`` each, by the names of `METRICS`; layer 1 is the first row."""

    values: dict[str, Tensor]
    sentences: int

    @property
    def layers(self) -> int:
        return len(self.values["E1"])


def profile(tower: SentenceEncoder, sentences: Sequence[str], batch_tokens: int = 8192) -> Profile:
    """The profile of one encoder over `sentences`.

    Raises:
        UserError: a decoder, or an encoder whose blocks are not known.
    """
    from embedlab.backbones.blocks import block_adapter

    parts = block_adapter(tower.backbone, "suite=cls_energy")
    rows = tower.tokenization.ids(list(sentences))
    punctuation = _punctuation(tower.tokenizer).to(tower.device)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    total = torch.zeros(tower.backbone.info.layers, len(METRICS), dtype=torch.float64)
    with tower.evaluating(None):
        start = 0
        while start < len(order):
            size = max(1, batch_tokens // max(1, len(rows[order[start]])))
            chosen = [rows[i] for i in order[start : start + size]]
            start += size
            padded = tower.tokenization.pad(chosen)
            ids = padded["input_ids"].to(tower.device)
            mask = padded["attention_mask"].to(tower.device)
            states = tower.backbone(ids, mask, all_layers=True)
            frame = parts.frame(states[0], mask)
            marks = _marks(mask, punctuation[ids])
            for m in range(tower.backbone.info.layers):
                heads = parts.project(m, states[m], frame)
                weights = parts.weights(m, heads, frame)
                context = (weights @ heads.value.float()).transpose(1, 2).flatten(2)
                written = parts.output(m, context.to(states[m].dtype))
                found = measure(states[m + 1], written, written + states[m], weights, mask, *marks)
                total[m] += torch.stack([found[name].sum() for name in METRICS]).cpu().double()
    means = total / len(rows)
    return Profile({name: means[:, i] for i, name in enumerate(METRICS)}, len(rows))


def looks_into(info: BackboneInfo) -> bool:
    """Whether `profile` can look into such a backbone: it is an encoder of a known build."""
    from transformers import AutoConfig, AutoModel

    from embedlab.backbones.architecture import find_blocks
    from embedlab.backbones.blocks import BUILDS

    if info.kind != "encoder":
        return False
    try:
        config = AutoConfig.for_model(info.model_type)
    except ValueError:  # its code comes with the checkpoint
        return True
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
        block = find_blocks(model, config.num_hidden_layers)[0]
    except (TypeError, ValueError, UserError):  # no single list of blocks
        return False
    return any(build.fits(block) for build in BUILDS)


def measure(
    states: Tensor,
    context: Tensor,
    before_norm: Tensor,
    weights: Tensor,
    mask: Tensor,
    first: Tensor,
    last: Tensor,
    punctuation: Tensor,
) -> dict[str, Tensor]:
    """Every quantity of one layer, ``[B]`` each.

    Args:
        states, context, before_norm: ``[B, L, D]``: the layer's output, its attention's output, and that with
            the residual added.
        weights: attention ``[B, H, L, L]``, rows are queries.
        mask: ``[B, L]``, 1 at real tokens.
        first, last, punctuation: bool ``[B, L]``, which token is which; disjoint.
    """
    real = mask.bool()
    n = real.sum(1).float()
    norms = {
        k: x.float().norm(dim=-1) * real
        for k, x in (("", states), ("_context", context), ("_sum", before_norm))
    }
    found = {f"E1{k}": _ratio(x, first, n) for k, x in norms.items()}
    norm = norms[""]
    own = (norm * first).sum(1)
    found["E2"] = own / norm.sum(1)
    found["nE2"] = n * found["E2"]
    found["E3"] = own**2 / (norm**2).sum(1)
    received = (weights.float().mean(1) * real[:, :, None]).sum(1) / n[:, None] * real
    kinds = {"CLS": first, "SEP": last, "punct": punctuation, "other": real & ~first & ~last & ~punctuation}
    for name, chosen in kinds.items():
        found[f"A_{name}"] = (received * chosen).sum(1)
    found["sink"], at = received.max(1)
    for name in ("CLS", "SEP", "punct"):
        found[f"sink_is_{name}"] = kinds[name].gather(1, at[:, None])[:, 0].float()
    found["deficit"] = found["A_CLS"] - 1 / n
    return found


def _ratio(norm: Tensor, first: Tensor, n: Tensor) -> Tensor:
    own = (norm * first).sum(1)
    return own / ((norm.sum(1) - own) / (n - 1).clamp(min=1))


def _marks(mask: Tensor, punctuation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens are the first, the last and punctuation between them, bool ``[B, L]``."""
    real = mask.bool()
    place = real.long().cumsum(1)
    first = real & (place == 1)
    last = real & (place == real.sum(1, keepdim=True)) & ~first
    return first, last, real & punctuation & ~first & ~last


def _punctuation(tokenizer: Any) -> Tensor:
    """Which ids of the vocabulary are punctuation, bool ``[V]``; marks of word pieces are ignored."""
    signs = set(string.punctuation) | set("–—‘’“”…«»¿¡、。，：；？！（）")
    found = torch.zeros(len(tokenizer), dtype=torch.bool)
    for token, index in tokenizer.get_vocab().items():
        text = token.removeprefix("##").strip("▁Ġ ")
        found[index] = bool(text) and all(c in signs for c in text)
    found[torch.tensor([i for i in tokenizer.all_special_ids if i < len(found)], dtype=torch.long)] = False
    return found


def towers(encoder: Any) -> list[SentenceEncoder]:
    """The encoders of which this one is made: itself, or the two of a twin.

    Raises:
        UserError: not an encoder of this project.
    """
    inner = getattr(encoder, "encoder", encoder)
    found = list(getattr(inner, "towers", [inner]))
    if not all(hasattr(tower, "backbone") and hasattr(tower, "tokenization") for tower in found):
        raise UserError(
            "suite=cls_energy looks inside the encoder", key="ckpt", fix="a checkpoint that embedlab loads"
        )
    return found


def flatten(profiles: Sequence[Profile]) -> dict[str, float]:
    """Flat scores: ``cls_energy/E_CLS`` (E1) and all others at the last layer, ``layer04/E1`` and so on at
    each, means over the towers; with two, ``tower1/E1`` and so on at the last layer of each.
    """
    mean = {name: torch.stack([p.values[name] for p in profiles]).mean(0) for name in METRICS}
    parts = {"cls_energy": (mean, -1)}
    parts |= {f"layer{m + 1:02d}": (mean, m) for m in range(profiles[0].layers)}
    if len(profiles) > 1:
        parts |= {f"tower{i}": (p.values, -1) for i, p in enumerate(profiles, 1)}
    found = {part: {name: float(of[name][m]) for name in METRICS} for part, (of, m) in parts.items()}
    return {"cls_energy/E_CLS": found["cls_energy"]["E1"], **flat(found)}


class CLSEnergy(Suite):
    """Energy and attention on the sentences of STS-B dev.

    Settings: data_dir (None: the hub), sts_text, and figure (a file to draw the profile in; needs matplotlib).
    """

    name = "cls_energy"
    folders = ("sts",)
    keys = ("sts_text", "figure")
    pictures = ("figure",)

    def fits(self, info: BackboneInfo | None, towers: int) -> str | None:
        """Only encoders whose blocks are known."""
        if info is None or looks_into(info):
            return None
        return f"it cannot look into the blocks of {info.model_type}"

    def load(self, settings: Settings) -> STSPairs:
        """STS-B dev."""
        return load_sts("stsb", settings.get("data_dir"), settings.get("sts_text") or "raw", split="dev")

    def score(self, encoder: Any, data: STSPairs, settings: Settings) -> Scored:
        """Every quantity by layer."""
        sentences, _ = unique(all_sentences([data]))
        profiles = [profile(tower, sentences) for tower in towers(encoder)]
        scores = flatten(profiles)
        if not all(map(math.isfinite, scores.values())):
            raise UserError(
                "the encoder's states are not finite", fix="check the checkpoint (a diverged run?)"
            )
        return self.result(
            encoder,
            scores,
            name="cls_energy_stsb_dev",
            aggregation="mean over sentences, by layer, then over towers; E_CLS is E1 at the last layer",
            text=data.text,
            sentences=sentences,
            data={"stsb (dev)": {**data.counts(), "sentences": len(sentences)}},
            warnings=row_count_warnings([data]),
            notes=[
                "our reading of E_CLS: the paper's formula is not known",
                "attention weights without dropout, fp32",
                *data.notes,
            ],
            towers=len(profiles),
        )

    def figures(self, scores: Scores, protocol: Mapping[str, Any], settings: Settings) -> None:
        """The profile, where a file is named for it."""
        if settings.get("figure"):
            from embedlab.evaluation.core.figures import save_profile

            save_profile({"encoder": scores}, Path(str(settings["figure"])))
