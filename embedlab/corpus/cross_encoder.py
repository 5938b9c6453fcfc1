"""A cross-encoder of sentence-transformers as the judge of mined texts: it reads query and text together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedlab.backbones.hub import snapshot, split_revision
from embedlab.config.read import read_values
from embedlab.errors import UserError
from embedlab.files import sha256_of

if TYPE_CHECKING:
    from embedlab.corpus.mine import Candidates, Pairs

_KIND = "ForSequenceClassification"


def cross_encoder_folder(name: str) -> Path | None:
    """The folder of a cross-encoder, whose model is a classifier of sequences; None for anything else.

    Args:
        name: a folder, or ``ORG/NAME`` or ``ORG/NAME@REVISION`` of a hub, whose configuration is fetched first.
    """
    folder = Path(name).expanduser()
    if not folder.exists() and name.count("/") == 1:
        repository, revision = split_revision(name)
        folder = snapshot(repository, revision, key="teacher", weights=False)
        if _classifies(folder):
            return snapshot(repository, revision, key="teacher")
    return folder if _classifies(folder) else None


def _classifies(folder: Path) -> bool:
    config = folder / "config.json"
    if (folder / "embedlab.json").is_file() or not config.is_file():
        return False
    values = read_values(config)
    kinds = values.get("architectures") if isinstance(values, dict) else None
    return isinstance(kinds, list) and any(str(kind).endswith(_KIND) for kind in kinds)


class CrossEncoderScores:
    """Scores of pairs of texts, of one label each (through a sigmoid, 0 to 1, unless the model says otherwise).

    Args:
        folder: of the model.
        device: that computes.
        batch_size: pairs of a forward; None: 32.

    Raises:
        UserError: sentence-transformers is not installed, or the model has several labels.
    """

    def __init__(self, folder: Path, device: str, batch_size: int | None = None) -> None:
        try:
            from sentence_transformers import CrossEncoder
        except ImportError as error:
            fix = "pip install 'embedlab[st]'"
            raise UserError("a cross-encoder needs sentence-transformers", key="teacher", fix=fix) from error
        self.folder, self.batch_size = folder, batch_size or 32
        self.model: Any = CrossEncoder(str(folder), device=device, local_files_only=True)
        if (labels := int(self.model.num_labels)) != 1:
            fix = "a cross-encoder with one score, or an encoder"
            raise UserError(f"has {labels} labels", file=folder, key="teacher", value=folder, fix=fix)

    def fingerprint(self) -> str:
        """Hex hash of the model's files."""
        kinds = (".json", ".txt", ".model", ".safetensors", ".bin")
        files = [file for file in sorted(self.folder.iterdir()) if file.suffix in kinds]
        return sha256_of(self.folder, files)[:16]

    def __call__(self, query: str, texts: Sequence[str]) -> NDArray[np.float64]:
        """Of each text with the query, [n]."""
        pairs = [(query, text) for text in texts]
        found = self.model.predict(pairs, batch_size=self.batch_size, show_progress_bar=False)
        return np.asarray(found, dtype=np.float64)


class CrossJudge:
    """`Judging` by a cross-encoder: a query with its positives and candidates is a call of its own, so that other
    queries of a block change no digit.

    Args:
        pairs: queries and positives.
        candidates: what is judged.
        model: of the scores.
    """

    def __init__(self, pairs: Pairs, candidates: Candidates, model: CrossEncoderScores) -> None:
        self.pairs, self.candidates, self.model = pairs, candidates, model

    def scores(
        self, query: int, own: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Scores of the positives `own`, and of the candidates `rows`."""
        texts = [*(self.pairs.corpus[row] for row in own.tolist()), *self.candidates.texts(rows.tolist())]
        found = self.model(self.pairs.queries[query], texts)
        return found[: len(own)], found[len(own) :]
