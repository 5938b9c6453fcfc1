"""Twin encoders: towers whose vectors are added (JTCSE, arXiv 2505.02366); ensembles are the same with weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from embedlab.encoders.encoder import _FORMAT, CARD, SentenceEncoder, read_card, whole_folder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.backbones import Backbone
    from embedlab.encoders.cross_attention import Route
    from embedlab.pooling import Pooling

_PROBE = ("A first sentence, with (some) marks.", "Ein zweiter Satz: Übung 12!", "")


class TwinEncoder(SentenceEncoder):
    """Encoders of one tokenizer; the vector of a sentence is the weighted sum of theirs.

    The towers' vectors are not normalised before they are added: that would be another encoder.

    Args:
        towers: two or more, with vectors of one width.
        weights: of the sum, one a tower; all 1 by default.
        card: where it comes from; plain values, saved with it.

    Raises:
        UserError: towers that read text differently, or whose vectors cannot be added.
    """

    towers: Sequence[SentenceEncoder]

    def __init__(
        self,
        towers: Sequence[SentenceEncoder],
        weights: Sequence[float] | None = None,
        card: dict[str, Any] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if len(towers) < 2 or len(weights or towers) != len(towers):
            raise ValueError("a twin has two towers or more, and a weight for each")
        self.towers = nn.ModuleList(towers)  # type: ignore[assignment]
        self.weights = tuple(float(w) for w in weights or [1.0] * len(towers))
        self.card = card or {}
        for i, tower in enumerate(towers[1:], 2):
            check_addable(towers[0], tower, f"tower {i}")

    # What reads one encoder's parts gets the first tower's, which has the build of all.

    @property
    def backbone(self) -> Backbone:  # type: ignore[override]
        return self.towers[0].backbone

    @property
    def pooling(self) -> Pooling:  # type: ignore[override]
        return self.towers[0].pooling

    @property
    def tokenization(self) -> Tokenization:  # type: ignore[override]
        return self.towers[0].tokenization

    @tokenization.setter
    def tokenization(self, value: Tokenization) -> None:
        for tower in self.towers:
            tower.tokenization = value

    def forward(self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None) -> Tensor:
        """Token ids and mask, [B, L], to the sum of the towers' vectors, [B, `dim`] in fp32."""
        total = None
        for tower, weight in zip(self.towers, self.weights, strict=True):
            vectors = tower(input_ids, attention_mask, capacity)
            vectors = vectors if weight == 1.0 else weight * vectors
            total = vectors if total is None else total + vectors
        assert total is not None
        return total

    def crossed(self, n_ca: int, route: Route = "query_owner") -> CrossedTwin:
        """This twin with cross-attention at inference too, for comparison: the released protocol is without.

        Raises:
            UserError: ``n_ca`` does not divide the depth, or the towers are not two of one build.
        """
        return CrossedTwin(self, n_ca, route)

    def fingerprint(self) -> str:
        """Hex hash of the towers and their weights."""
        parts = [tower.fingerprint() for tower in self.towers]
        return hashlib.sha256(json.dumps([parts, self.weights]).encode()).hexdigest()[:16]

    def write(self, folder: Path, dtype: str | None = None, merge: bool = True) -> None:
        """Each tower as a whole encoder in a folder of its own (`tower1`, `tower2`), plain Hugging Face ones."""
        for name, tower in zip(self._names, self.towers, strict=True):
            (folder / name).mkdir()
            tower.write(folder / name, dtype, merge)
        (folder / CARD).write_text(self.card_text(), encoding="utf-8")

    def skeleton(self) -> tuple[dict[str, str], dict[str, str]]:
        """The same files without the weights, and where in the state those are: for checkpoints."""
        texts, weights = {CARD: self.card_text()}, dict[str, str]()
        for i, (name, tower) in enumerate(zip(self._names, self.towers, strict=True)):
            own_texts, own_weights = tower.skeleton()
            texts |= {f"{name}/{file}": text for file, text in own_texts.items()}
            weights |= {f"{name}/{file}": f"towers.{i}.{prefix}" for file, prefix in own_weights.items()}
        return texts, weights

    @property
    def _names(self) -> list[str]:
        return [f"tower{i}" for i in range(1, len(self.towers) + 1)]

    def card_text(self, merge: bool = True) -> str:
        """The contents of `embedlab.json`."""
        from embedlab import __version__

        card = {
            "format": _FORMAT,
            "embedlab": __version__,
            "towers": self._names,
            "weights": self.weights,
            "pooling": asdict(self.pooling.config),
            "tokenization": self.tokenization.to_dict(),
            "backbone": asdict(self.backbone.info) | {"attention": self.backbone.attention},
            "card": self.card,
        }
        return json.dumps(card, indent=2, ensure_ascii=False, default=str) + "\n"

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], attention: str | None = None, dtype: str = "float32"
    ) -> TwinEncoder:
        """Read what `save` wrote, in evaluation mode.

        Raises:
            UserError: no twin, or towers that are missing or broken.
        """
        read_card(Path(folder))  # says what is wrong with it
        card = twin_card(Path(folder))
        if card is None:
            raise UserError("is no twin encoder", file=Path(folder), fix="a folder that a twin's save wrote")
        towers = [SentenceEncoder.load(Path(folder) / name, attention, dtype) for name in card["towers"]]
        return cls(towers, card["weights"], card.get("card")).eval()

    def to_sentence_transformers(self, folder: str | os.PathLike[str]) -> None:
        """Write one folder for `sentence_transformers.SentenceTransformer` that gives the same vectors.

        `embedlab.export.twin` says how, and when it needs code of this package.
        """
        from embedlab.export.twin import write_sentence_transformers

        with whole_folder(folder) as fresh:
            write_sentence_transformers(self, fresh)


class CrossedTwin(TwinEncoder):
    """Two towers whose vectors come from the streams that exchange attention. It shares the twin's weights."""

    def __init__(self, twin: TwinEncoder, n_ca: int, route: Route) -> None:
        from embedlab.encoders.cross_attention import CrossAttention, check_alike, cross_layers

        super().__init__(twin.towers, twin.weights, twin.card)
        if len(twin.towers) != 2:
            raise UserError("attention is exchanged between two towers", value=len(twin.towers))
        first, second = (tower.backbone for tower in twin.towers)
        check_alike(first, second)
        self._name = f"n_ca={n_ca} route={route}"
        self._cross = CrossAttention(first, second, cross_layers(n_ca, first.info.layers), route)
        self.train(twin.training)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None) -> Tensor:
        states = self._cross(input_ids, attention_mask, main=False).side
        parts = [
            weight * tower.pooling(own, attention_mask, tower.tokenization.marks)
            for tower, weight, own in zip(self.towers, self.weights, states, strict=True)
        ]
        return parts[0] + parts[1]

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{super().fingerprint()} {self._name}".encode()).hexdigest()[:16]

    def write(self, folder: Path, dtype: str | None = None, merge: bool = True) -> None:
        raise UserError("a twin is saved without its cross-attention", fix="save the twin itself")


def twin_card(folder: Path) -> dict[str, Any] | None:
    """`embedlab.json` of a folder that holds a twin; None where it holds something else."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return card if isinstance(card, dict) and "towers" in card else None


def check_addable(first: SentenceEncoder, second: SentenceEncoder, name: str) -> None:
    """``UserError`` unless two encoders read text alike and have vectors of one width."""
    if first.dim != second.dim:
        raise UserError(
            f"vectors of {first.dim} and {second.dim} features cannot be added ({name})",
            fix="encoders of one width",
        )
    if not same_tokenizer(first.tokenization, second.tokenization):
        raise UserError(
            f"{name} reads text differently: another tokenizer or template than the first",
            fix="encoders that descend from one backbone, with one template",
        )


def same_tokenizer(first: Tokenization, second: Tokenization) -> bool:
    """Whether two tokenizations give the same ids, their length limits aside."""
    if first is second:
        return True
    if first.template != second.template or first.preparation != second.preparation:
        return False
    if first.tokenizer.get_vocab() != second.tokenizer.get_vocab():
        return False
    whole = [Tokenization(t.tokenizer, t.template, None, t.preparation) for t in (first, second)]
    return whole[0].ids(_PROBE) == whole[1].ids(_PROBE)


def ensemble(members: Sequence[SentenceEncoder], weights: Sequence[float]) -> TwinEncoder:
    """A weighted sum of encoders, as one; a twin among them is taken apart into its towers.

    JTCSE-UC is ``ensemble([twin, third], [0.3, 0.7])``.
    """
    towers: list[SentenceEncoder] = []
    flat: list[float] = []
    for member, weight in zip(members, weights, strict=True):
        inner = list(member.towers) if isinstance(member, TwinEncoder) else [member]
        shares = member.weights if isinstance(member, TwinEncoder) else (1.0,)
        towers += inner
        flat += [weight * share for share in shares]
    return TwinEncoder(towers, flat)
