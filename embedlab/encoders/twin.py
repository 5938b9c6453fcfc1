"""Twin encoders: towers whose vectors are added (JTCSE, arXiv 2505.02366); ensembles are the same with weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embedlab.config.backbone import Attention, Dtype
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.folder import CARD, EncoderFile, whole_folder
from embedlab.encoders.pipeline import Reader
from embedlab.encoders.sentence_transformers import summed_mode, write_index, write_sum
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.usage import Usage
from embedlab.errors import UserError
from embedlab.files import scratch_folder

_PROBE = (
    "A first sentence, with (some) marks.", "Ein zweiter Satz: Übung 12!", "", "  two  spaces\tand\nlines ",
    "日本語と中文, 한국어", "Привет, мир", "مرحبا بالعالم", "cafe\u0301 \ufb01ne \uff11\u00bd", "a\u200bb\x00c\u00ad",
    "\U0001f469\u200d\U0001f467 \U0001f389", "don't [MASK] <mask> </s>",
)  # fmt: skip
"""Texts in which tokenizers of one vocabulary differ: case, accents, Chinese, white space, controls, special tokens."""


class TwinEncoder(Encoder):
    """Encoders whose weighted sum is the vector of a sentence, each of its own tokens where they read text differently.

    The towers' vectors are not normalised before they are added: that would be another encoder.

    Args:
        towers: two or more, with vectors of one width.
        weights: of the sum, one a tower; all 1 by default.
        card: where it comes from; plain values, saved with it.
        usage: prompts, kept width and similarity.

    Raises:
        UserError: towers whose vectors cannot be added.
    """

    towers: Sequence[SentenceEncoder]

    def __init__(
        self,
        towers: Sequence[SentenceEncoder],
        weights: Sequence[float] | None = None,
        card: dict[str, Any] | None = None,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(card, usage)
        if not self.usage.include_prompt:
            raise UserError(
                "an encoder of several towers reads its prompts",
                key="include_prompt",
                value=False,
                fix="true",
            )
        if len(towers) < 2 or len(weights or towers) != len(towers):
            raise ValueError("a twin has two towers or more, and a weight for each")
        self.towers = nn.ModuleList(towers)  # type: ignore[assignment]
        self.weights = tuple(float(w) for w in weights or [1.0] * len(towers))
        for i, tower in enumerate(towers[1:], 2):
            check_widths(towers[0], tower, f"tower {i}")
        self.mixed = not all(same_tokenizer(self.tokenization, tower.tokenization) for tower in towers[1:])

    @property
    def tokenization(self) -> Tokenization:  # type: ignore[override]
        """Of the first tower, and but for length limits of all where they are not `mixed`."""
        return self.towers[0].tokenization

    @tokenization.setter
    def tokenization(self, value: Tokenization) -> None:
        """Of all towers; of `mixed` ones only its length limit."""
        for tower in self.towers:
            own = tower.tokenization
            tower.tokenization = (
                Tokenization(own.tokenizer, own.template, value.max_length, own.preparation)
                if self.mixed
                else value
            )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None) -> Tensor:
        """Token ids and mask, [B, L], to the sum of the towers' vectors, [B, `dim`] in fp32.

        Raises:
            UserError: the towers read text differently.
        """
        if self.mixed:
            raise UserError(
                "the towers have no token ids in common: they read text differently", fix="encode texts"
            )
        return _sum([tower(input_ids, attention_mask, capacity) for tower in self.towers], self.weights)

    def reader(self, skip: int) -> Reader | None:
        found = [] if self.mixed else [tower.reader(skip) for tower in self.towers]
        readers = [reader for reader in found if reader is not None]
        if len(readers) < len(self.towers) or len({reader.offset for reader in readers}) > 1:
            return None
        return Reader(
            lambda rows: _sum([reader.vectors(rows) for reader in readers], self.weights),
            min(reader.longest for reader in readers),
            readers[0].offset,
        )

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        normalize: bool = False,
        on_batch: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> Tensor:
        if not self.mixed:
            return super().encode_texts(texts, normalize=normalize, on_batch=on_batch, **settings)
        parts: list[Tensor] = []

        def tell(done: int, of: int) -> None:  # a tower's, of which `parts` are done
            self.tokens_read = before + sum(tower.tokens_read for tower in self.towers)
            if on_batch is not None:
                on_batch((len(parts) * of + done) // len(self.towers), of)

        before = self.tokens_read - sum(tower.tokens_read for tower in self.towers)
        for tower, weight in zip(self.towers, self.weights, strict=True):
            parts.append(weight * tower.encode_texts(texts, on_batch=tell, **settings)[:, : self.dim])
        total = torch.stack(parts).sum(0)
        return nn.functional.normalize(total, dim=-1) if normalize else total

    def _digest(self) -> str:
        parts = [tower._digest() for tower in self.towers]
        usage = self.usage.to_dict()
        content = [parts, self.weights, usage] if usage else [parts, self.weights]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def write(self, folder: Path, dtype: str | None = None, merge: bool = True) -> None:
        """Each tower as a whole encoder in a folder of its own (`tower1`, `tower2`), plain Hugging Face ones.

        Towers that share their weights have one folder, and their tokenizations stand in `embedlab.json`.
        """
        for name, i in self._stored.items():
            (folder / name).mkdir()
            self.towers[i].write(folder / name, dtype, merge)
        (folder / CARD).write_text(self._description().text(), encoding="utf-8")

    def manifest(self) -> dict[str, dict[str, str]]:
        texts, weights = {CARD: self._description().text()}, dict[str, str]()
        for name, i in self._stored.items():
            inner = self.towers[i].manifest()
            texts |= {f"{name}/{file}": text for file, text in inner["files"].items()}
            weights |= {f"{name}/{file}": f"towers.{i}.{prefix}" for file, prefix in inner["weights"].items()}
        return {"files": texts, "weights": weights}

    def to_sentence_transformers(self, folder: str | os.PathLike[str]) -> None:
        if self.mixed:
            raise UserError(
                "sentence-transformers has one tokenizer a model, and these towers read text differently",
                fix="to=hf",
            )
        pooling = self.towers[0].pooling
        mode = summed_mode(pooling, self.tokenization)
        with whole_folder(folder) as fresh:
            if mode is None:
                self.write(fresh)
                write_index(fresh)
                return
            with scratch_folder() as parts:
                self.write(parts)
                towers = [(parts / n, t.tokenization) for n, t in zip(self._names, self.towers, strict=True)]
                write_sum(fresh, mode, pooling.dim, towers, self.weights, self.usage)

    @property
    def _names(self) -> list[str]:
        """The folder of each tower."""
        first = [
            next(j for j, t in enumerate(self.towers) if _same_weights(t, tower)) for tower in self.towers
        ]
        order = list(dict.fromkeys(first))
        return [f"tower{order.index(j) + 1}" for j in first]

    @property
    def _stored(self) -> dict[str, int]:
        """Each folder, and the first tower that has it."""
        names = self._names
        return {name: names.index(name) for name in dict.fromkeys(names)}

    def _description(self) -> EncoderFile:
        names, readings = self._names, [tower.tokenization.to_dict() for tower in self.towers]
        shared = len(set(names)) < len(names)
        return self.description(
            towers=names, weights=list(self.weights), tokenizations=readings if shared else None
        )

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        attention: Attention | None = None,
        dtype: Dtype = "float32",
        trust_remote_code: bool = False,
    ) -> TwinEncoder:
        """Read what `save` wrote, in evaluation mode.

        Raises:
            UserError: no twin, or towers that are missing or broken.
        """
        saved = EncoderFile.read(Path(folder))
        if saved.towers is None:
            raise UserError("is no twin encoder", file=Path(folder), fix="a folder that a twin's save wrote")
        stored = {
            name: SentenceEncoder.load(Path(folder) / name, attention, dtype, trust_remote_code)
            for name in dict.fromkeys(saved.towers)
        }
        towers = [stored[name] for name in saved.towers]
        if saved.tokenizations is not None:
            towers = [
                tower.reading(Tokenization.from_dict(tower.tokenizer, values))
                for tower, values in zip(towers, saved.tokenizations, strict=True)
            ]
        return cls(towers, saved.weights, saved.card, Usage.from_dict(saved.usage)).eval()


def check_widths(first: Encoder, second: Encoder, name: str) -> None:
    """``UserError`` unless two encoders have vectors of one width."""
    if first.dim != second.dim:
        raise UserError(
            f"vectors of {first.dim} and {second.dim} features cannot be added ({name})",
            fix="encoders of one width",
        )


def _same_weights(first: SentenceEncoder, second: SentenceEncoder) -> bool:
    """Whether two towers differ in how they read text alone."""
    return (
        first.backbone is second.backbone
        and first.pooling is second.pooling
        and first.tokenizer is second.tokenizer
        and (first.card, first.usage) == (second.card, second.usage)
    )


def _sum(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    parts = [x if weight == 1.0 else weight * x for x, weight in zip(vectors, weights, strict=True)]
    return reduce(torch.add, parts)


def check_addable(first: Encoder, second: Encoder, name: str) -> None:
    """``UserError`` unless two encoders read text alike and have vectors of one width."""
    check_widths(first, second, name)
    if not same_tokenizer(first.tokenization, second.tokenization):
        raise UserError(
            f"{name} reads text differently: another tokenizer or template than the first",
            fix="encoders that descend from one backbone, with one template",
        )


def same_tokenizer(first: Tokenization, second: Tokenization) -> bool:
    """Whether two tokenizations give the same ids, length limits aside, and cut a text that is too long at one end."""
    if first is second:
        return True
    if first.template != second.template or first.preparation != second.preparation:
        return False
    if first.tokenizer.truncation_side != second.tokenizer.truncation_side:
        return False
    if first.tokenizer.get_vocab() != second.tokenizer.get_vocab():
        return False
    whole = [Tokenization(t.tokenizer, t.template, None, t.preparation) for t in (first, second)]
    return whole[0].ids(_PROBE) == whole[1].ids(_PROBE)


def ensemble(members: Sequence[Encoder], weights: Sequence[float]) -> TwinEncoder:
    """A weighted sum of encoders, as one; a twin among them is taken apart into its towers.

    JTCSE-UC is ``ensemble([twin, third], [0.3, 0.7])``.
    """
    towers: list[SentenceEncoder] = []
    flat: list[float] = []
    for member, weight in zip(members, weights, strict=True):
        shares = member.weights if isinstance(member, TwinEncoder) else (1.0,)
        towers += member.towers
        flat += [weight * share for share in shares]
    if any(member.usage != members[0].usage for member in members):
        raise UserError("the encoders' prompts or kept widths differ", fix="encoders of one usage")
    return TwinEncoder(towers, flat, usage=members[0].usage)
