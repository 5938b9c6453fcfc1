"""Approximate search by faiss: trained once, filled a piece at a time, merged; and what it finds of the exact answer.

Inner products of unit vectors are cosines. `rescore` times as many candidates as are asked for are found, and the best
of them by their exact cosines are the answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embedlab.config.read import read_record
from embedlab.corpus.plan import PIECE, Plan
from embedlab.corpus.stored import BLOCK, Stored
from embedlab.errors import UserError
from embedlab.evaluation.core.nearest import TopK
from embedlab.files import sha256, whole_file, write_whole

FILES = ("lists.faiss", "lists.json")
BUILD, NAMES = "build.json", r"trained\.faiss|rows-\d{12,}\.faiss"
"""In a working folder: what it is of, and a pattern of the rest."""
DEPTHS = (1, 10, 100)
QUESTIONS = 1000
TARGET = 10
"""The depth whose recall is held to the target."""
RESCORE = 10
_AT_ONCE = 1 << 24  # floats of candidates that are held
_TIE = 1e-6  # two ways of adding up a cosine in float32
_FIX = "build the index again"


@dataclass(frozen=True)
class Lists:
    """lists.json. dial: what trades time for recall (nprobe, efSearch; "" for none), at `value`; recall: of each value
    tried, with recall@k and milliseconds a query; sha256: of lists.faiss.
    """

    kind: str
    factory: str
    rows: int
    dim: int
    trained_on: int
    sha256: str
    dial: str
    value: int
    target_recall: float
    rescore: int = RESCORE
    recall: list[dict[str, float]] = field(default_factory=list)


Told = Callable[[int, int], None]
"""Rows that are in the index, of how many."""


def build(
    stored: Stored,
    plan: Plan,
    work: Path,
    told: Told = lambda done, of: None,
    piece: int = PIECE,
    identity: str = "",
) -> Any:
    """A faiss index of all rows, numbered from 0: trained on rows of all parts, an index a piece, merged.

    Args:
        stored: the vectors.
        plan: the layout.
        work: a folder for the trained index and those of the pieces. What an earlier build with the same plan left
            there is used.
        told: is called after each piece.
        identity: of the vectors, which a build that goes on must find again.
        piece: rows of one index. A graph (hnsw) cannot be merged, and grows in memory.

    Raises:
        UserError: faiss is missing, or cannot read the factory; a piece in `work` is of another plan, or damaged.
    """
    faiss = import_faiss()
    settings = {"factory": plan.factory, "train_rows": plan.train_rows, "rows": len(stored), "piece": piece}
    _claim(work, {**settings, "vectors": identity})
    trained = work / "trained.faiss"
    if not trained.is_file():
        _write(faiss, _train(faiss, stored, plan), trained)
    index = _read(faiss, trained)
    if faiss.try_extract_index_ivf(index) is None:
        for first, end in stored.pieces():
            index.add(stored.block(first, end).numpy())
            told(end, len(stored))
        return index
    for first, end in stored.pieces(piece):
        path = work / f"rows-{first:012d}.faiss"
        if not path.is_file():
            part = _read(faiss, trained)
            for begin in range(first, end, BLOCK):
                block = stored.block(begin, min(begin + BLOCK, end)).numpy()
                part.add_with_ids(block, np.arange(begin, begin + len(block)))
            _write(faiss, part, path)
        index.merge_from(_read(faiss, path), 0)
        told(end, len(stored))
    return index


def _claim(work: Path, settings: dict[str, Any]) -> None:
    """Take the folder for a build with these settings, or go on with one."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / BUILD
    if not path.is_file():
        write_whole(path, json_text(settings))
    elif path.read_text(encoding="utf-8") != json_text(settings):
        raise UserError(
            "is of other vectors or settings", file=path, key="work", fix="another folder, or empty it"
        )


def json_text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _train(faiss: Any, stored: Stored, plan: Plan) -> Any:
    try:
        index = faiss.index_factory(stored.dim, plan.factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).rpartition(": ")[2]
        raise UserError(
            f"faiss: {reason}", key="factory", value=plan.factory, fix="factory=IVF4096,SQ8"
        ) from None
    lists = faiss.downcast_index(faiss.try_extract_index_ivf(index))
    if hasattr(lists, "do_polysemous_training"):
        # It numbers codes by their distance, for a filter that is not used here, and takes most of the training.
        lists.do_polysemous_training = False
    if not index.is_trained:
        chosen = np.random.default_rng(0).choice(len(stored), plan.train_rows, replace=False)
        try:
            index.train(stored.take(np.sort(chosen)).numpy())
        except RuntimeError as error:
            reason = str(error).rpartition(": ")[2]
            raise UserError(
                f"faiss: {reason}", key="factory", value=plan.factory, fix="more train_rows="
            ) from None
    return index


def _write(faiss: Any, index: Any, path: Path) -> None:
    with whole_file(path) as new, new.open("wb") as file:
        # faiss's own writer says nothing of a disk that is full when it closes the file.
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def _read(faiss: Any, path: Path) -> Any:
    try:
        return faiss.read_index(str(path))
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"is damaged ({str(error).rpartition(': ')[2]})", file=path, fix=_FIX) from None


def dial(index: Any) -> tuple[str, list[int]]:
    """What trades time for recall in a faiss index, and the values that are tried."""
    faiss = import_faiss()
    if (lists := faiss.try_extract_index_ivf(index)) is not None:
        return "nprobe", [value for value in (1, 2, 4, 8, 16, 32, 64, 128, 256) if value <= lists.nlist]
    if hasattr(_inner(faiss, index), "hnsw"):
        return "efSearch", [16, 32, 64, 128, 256, 512]
    return "", [0]


def _inner(faiss: Any, index: Any) -> Any:
    """What searches the vectors that the index has turned."""
    index = faiss.downcast_index(index)
    return _inner(faiss, index.index) if isinstance(index, faiss.IndexPreTransform) else index


def turn(index: Any, name: str, value: int) -> None:
    """Set the dial of a faiss index."""
    faiss, value = import_faiss(), min(value, (1 << 31) - 1)  # an int of C
    if name == "nprobe":
        faiss.extract_index_ivf(index).nprobe = value
    elif name == "efSearch":
        _inner(faiss, index).hnsw.efSearch = value


def nearest(
    index: Any, stored: Stored, queries: Tensor, k: int, rescore: int = RESCORE
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows and cosines [q, at most k] of each query's best candidates, by exact cosine, then row; -1 and -inf for none.

    Args:
        index: of faiss.
        stored: the vectors that it stands for.
        queries: [q, D], of length one.
        k: answers of a query.
        rescore: candidates an answer.
    """
    most = min(k * rescore, len(stored))
    step = max(1, _AT_ONCE // (most * stored.dim))
    parts = [_best(index, stored, some, k, most) for some in queries.split(step)]
    return np.concatenate([rows for rows, _ in parts]), np.concatenate([scores for _, scores in parts])


def _best(
    index: Any, stored: Stored, queries: Tensor, k: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    _, found = index.search(queries.numpy(), most)
    found.sort(axis=1)  # of equal cosines the first row stands first
    vectors = stored.take(np.maximum(found, 0).reshape(-1)).view(*found.shape, -1)
    cosines = np.where(found >= 0, (vectors @ queries[:, :, None])[..., 0].numpy(), -np.inf)
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(found, order, 1), np.take_along_axis(cosines, order, 1)


@dataclass(frozen=True)
class Questions:
    """Queries [q, D], the cosines [q, k] of their exact answers, and own: the row that is no answer to each, or -1."""

    vectors: Tensor
    best: NDArray[np.float32]
    own: NDArray[np.int64]


def questions(stored: Stored, queries: Tensor | None, count: int | None = None) -> Questions:
    """Queries with their exact answers: those given, or `count` (None: `QUESTIONS`) rows drawn, each without itself."""
    own: NDArray[np.int64]
    count = count or QUESTIONS
    if queries is None:
        own = np.sort(np.random.default_rng(1).choice(len(stored), min(count, len(stored)), replace=False))
        vectors = stored.take(own)
    else:
        own, vectors = np.full(len(queries), -1), queries
    top = TopK(vectors, min(max(DEPTHS) + 1, len(stored)))
    for first, end in stored.pieces():
        top.add(stored.block(first, end))
    scores, rows = top.scores.numpy(), top.rows.numpy()
    return Questions(vectors, _without(own, rows, scores), own)


def _without(own: NDArray[Any], rows: NDArray[Any], scores: NDArray[Any]) -> NDArray[np.float32]:
    """Scores [q, k] without that of each query's own row, or where it is not among them, the last."""
    keep = rows != own[:, None]
    if (own >= 0).any():
        keep[keep.all(axis=1), -1] = False
        return scores[keep].reshape(len(scores), -1)
    return scores


def measure(
    index: Any, stored: Stored, asked: Questions, target: float, rescore: int = RESCORE
) -> tuple[str, int, list[dict[str, float]]]:
    """Recall at each value of the dial, up to 256 lists: the share of the exact k answers that are found.

    Of equal cosines any counts. Milliseconds are of one query in a batch of all, on all threads.

    Returns: the dial, the least value whose recall@10 is `target` (else the last), and what was measured.
    """
    name, values = dial(index)
    depths = [k for k in DEPTHS if k <= asked.best.shape[1]]
    measured: list[dict[str, float]] = []
    for value in values:
        turn(index, name, value)
        point = {"value": float(value)}
        for k in depths:  # each with the candidates that a query for so many has
            start = time.perf_counter()
            rows, scores = nearest(index, stored, asked.vectors, k + 1, rescore)
            spent = time.perf_counter() - start
            found = _without(asked.own, rows, scores)[:, :k]
            point |= {f"recall@{k}": float((found >= asked.best[:, k - 1 : k] - _TIE).mean())}
            point |= {"ms": 1000 * spent / len(rows)} if k <= TARGET else {}
        measured.append(point)
    key = f"recall@{max([k for k in depths if k <= TARGET], default=0)}"
    good = [point for point in measured if point.get(key, 0) >= target]
    return name, int((good or measured[-1:])[0]["value"]), measured


def save(index: Any, folder: Path, facts: dict[str, Any]) -> Lists:
    """Write lists.faiss and lists.json; `facts`: the fields of `Lists` beside sha256."""
    path = folder / "lists.faiss"
    _write(import_faiss(), index, path)
    lists = Lists(sha256=sha256(path), **facts)
    (folder / "lists.json").write_text(json_text(asdict(lists)), encoding="utf-8")
    return lists


def load(folder: Path, rows: int, dim: int) -> tuple[Any, Lists]:
    """The faiss index of a folder, of `rows` vectors [D], with its dial set.

    Raises:
        UserError: faiss is missing; a file is damaged, or of another index.
    """
    faiss = import_faiss()
    lists, path = read_record(folder / "lists.json", Lists, _FIX), folder / "lists.faiss"
    try:
        digest = sha256(path)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", file=path, fix=_FIX) from None
    if digest != lists.sha256:  # before faiss reads it, which trusts what it reads
        raise UserError("is damaged (its sha256 is not that of lists.json)", file=path, fix=_FIX)
    index = _read(faiss, path)
    if (lists.rows, lists.dim, index.ntotal, index.d) != (rows, dim, rows, dim):
        raise UserError("is of other vectors", file=path, fix=_FIX)
    name, _ = dial(index)
    if name != lists.dial or lists.value < 0 or lists.rescore < 1:
        raise UserError("does not fit lists.faiss", file=folder / "lists.json", fix=_FIX)
    turn(index, name, lists.value)
    return index, lists


def import_faiss() -> Any:
    """faiss; UserError where it is not installed."""
    try:
        import faiss
    except ImportError:
        raise UserError(
            "faiss is not installed", key="kind", fix="pip install 'embedlab[faiss]', or kind=exact"
        ) from None
    return faiss
