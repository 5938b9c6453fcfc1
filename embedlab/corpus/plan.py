"""How an approximate index is laid out: its faiss factory, how many rows train it, how much memory it takes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

from embedlab.errors import UserError

Kind = Literal["exact", "ivf_pq", "ivf_flat", "hnsw"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEAST_A_LIST = 39
"""Rows a list that faiss asks for in training (`ClusteringParameters.min_points_per_centroid`)."""
_USUAL_A_LIST = 64
_CODES = 256  # centroids of each of PQ's m parts: eight bits
_LARGE = (
    1_000_000  # rows from which lists are found by a graph, and vectors turned (OPQ) before they are coded
)
_LINKS = 32
PIECE = 1 << 20
"""Rows of one index, before it is merged."""


@dataclass(frozen=True)
class Plan:
    """What faiss builds.

    factory: its description, as of `faiss.index_factory`; nlist: inverted lists, 0 for none; train_rows: that the
    training reads; memory: bytes that building takes: all rows, a piece,
    and the rows of the training.
    """

    kind: str
    factory: str
    nlist: int
    train_rows: int
    memory: int


def plan(
    kind: str,
    rows: int,
    dim: int,
    nlist: int | None = None,
    m: int | None = None,
    train_rows: int | None = None,
    factory: str | None = None,
) -> Plan:
    """The layout of an index of `rows` vectors [D].

    Args:
        kind: one of `KINDS`; not "exact".
        rows, dim: of the vectors.
        nlist: None: the power of two from 4·√rows on, of which the rows can train.
        m: bytes of a code of ivf_pq (None: 64, or the largest divisor of `dim` below); links of hnsw (None: 32).
        train_rows: None: 64 a list.
        factory: a description of one's own, in place of that of the kind.

    Raises:
        UserError: rows that are too few for `nlist`, or for codes; `m` that does not divide `dim`.
    """
    if (kind == "hnsw" and m == 1) or re.search(r"HNSW[01](?!\d)", factory or ""):
        key, value = ("factory", factory) if factory else ("m", m)
        raise UserError(
            "a graph has two links a row or more", key=key, value=value, fix="32"
        )  # faiss: SIGSEGV
    if factory is not None:
        lists = re.search(r"IVF(\d+)", factory)
        return _planned("factory", factory, int(lists[1]) if lists else 0, rows, dim, train_rows, None)
    if kind == "hnsw":
        links = m or _LINKS
        return _planned(kind, f"HNSW{links},Flat", 0, rows, dim, train_rows, dim * 4 + 8 * links + 16)
    count = nlist or _lists(rows, train_rows)
    if min(rows, train_rows or rows) < LEAST_A_LIST * count:
        key, given = ("train_rows", train_rows) if train_rows and train_rows < rows else ("nlist", count)
        what = f"{min(rows, train_rows or rows):,} rows are less than {LEAST_A_LIST} a list"
        fix = "kind=exact" if rows < LEAST_A_LIST else f"nlist={_lists(rows, None)}"
        raise UserError(f"{what} of {count:,} lists", key=key, value=given, fix=fix)
    if kind == "ivf_flat":
        return _planned(kind, f"IVF{count},Flat", count, rows, dim, train_rows, dim * 4 + 8)
    if rows < _CODES * LEAST_A_LIST:
        least = f"{_CODES * LEAST_A_LIST:,} that train {_CODES} codes a part"
        raise UserError(f"{rows:,} rows are less than the {least}", key="kind", value=kind, fix="kind=exact")
    code = _code(dim, m)
    if rows > _LARGE:
        factory = f"OPQ{code}_{min(4 * code, dim)},IVF{count}_HNSW32,PQ{code}"
    else:
        factory = f"IVF{count},PQ{code}"
    return _planned(kind, factory, count, rows, dim, train_rows, code + 8)


def _lists(rows: int, train_rows: int | None) -> int:
    """The power of two from 4·√rows on, but no more than the training rows allow."""
    wanted = 1 << max(0, int(4 * rows**0.5 - 1)).bit_length()
    trained = min(rows, train_rows or _USUAL_A_LIST * wanted)
    return min(wanted, 1 << max(0, (trained // LEAST_A_LIST).bit_length() - 1))


def _code(dim: int, m: int | None) -> int:
    if m is None:
        return next(code for code in range(min(64, dim), 0, -1) if dim % code == 0)
    if dim % m:
        fits = ", ".join(str(code) for code in (8, 16, 32, 48, 64, 96, 128) if dim % code == 0)
        raise UserError(f"does not divide {dim}", key="m", value=m, fix=f"m={fits or _code(dim, None)}")
    return m


def _planned(
    kind: str, factory: str, nlist: int, rows: int, dim: int, train_rows: int | None, each: int | None
) -> Plan:
    """each: bytes of a stored row; None: it is not known, so that of the whole vector."""
    trained = min(rows, train_rows or (_USUAL_A_LIST * nlist if nlist else _CODES * LEAST_A_LIST))
    held = (rows + min(rows, PIECE)) * (each or 4 * dim + 8)
    return Plan(kind, factory, nlist, trained, held + trained * dim * 4)


def check_memory(plan: Plan) -> None:
    """UserError where building takes more than the machine's memory."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.memory > there:
        small = plan.kind == "ivf_pq" or plan.factory.endswith("PQ")
        raise UserError(
            f"{plan.factory} takes {plan.memory / 1e9:.1f} GB, and this machine has {there / 1e9:.1f}",
            key="kind",
            value=plan.kind,
            fix="a smaller m= and train_rows=, or a larger machine" if small else "kind=ivf_pq",
        )
