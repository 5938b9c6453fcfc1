"""The layout of an approximate index: faiss's own limits, the paper arithmetic, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlab.corpus import plan as planning
from embedlab.corpus.plan import LEAST_A_LIST, PIECE, check_memory, plan
from embedlab.errors import UserError


@pytest.mark.parametrize(
    ("rows", "nlist", "train_gb"), [(10**6, 4096, 0.8), (10**7, 16384, 3.2), (10**8, 65536, 12.9)]
)
def test_lists_and_training_of_large_corpora(rows: int, nlist: int, train_gb: float) -> None:
    made = plan("ivf_pq", rows, 768)
    assert made.nlist == nlist
    assert round(made.train_rows * 768 * 4 / 1e9, 1) == train_gb
    codes = made.memory - made.train_rows * 768 * 4
    assert codes == (rows + min(rows, PIECE)) * 72, "64 bytes of code and 8 of number"


def test_factories() -> None:
    assert plan("ivf_pq", 10**6, 768).factory == "IVF4096,PQ64"
    assert plan("ivf_pq", 2 * 10**6, 768).factory == "OPQ64_256,IVF8192_HNSW32,PQ64"
    assert plan("ivf_pq", 10**7, 384, m=48).factory == "OPQ48_192,IVF16384_HNSW32,PQ48"
    assert plan("ivf_pq", 10**7, 128, m=64).factory == "OPQ64_128,IVF16384_HNSW32,PQ64"
    assert plan("ivf_pq", 10**5, 96).factory == "IVF2048,PQ48", "the largest divisor up to 64"
    assert plan("hnsw", 100, 768, m=16).factory == "HNSW16,Flat"


@given(st.integers(LEAST_A_LIST, 10**9), st.integers(1, 4096))
def test_every_default_can_be_trained(rows: int, dim: int) -> None:
    for kind in ("ivf_flat", "ivf_pq"):
        if kind == "ivf_pq" and rows < 256 * LEAST_A_LIST:
            continue
        made = plan(kind, rows, dim)
        assert made.nlist & (made.nlist - 1) == 0
        assert LEAST_A_LIST * made.nlist <= made.train_rows <= rows
        wanted = 4 * rows**0.5
        assert made.nlist < 2 * wanted
        assert made.nlist >= wanted or 2 * made.nlist * LEAST_A_LIST > made.train_rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rows": 20_000, "nlist": 4096},
            r"20,000 rows are less than 39 a list .*\(nlist=4096\)\. Fix: nlist=512",
        ),
        (
            {"rows": 10**6, "nlist": 4096, "train_rows": 5000},
            r"5,000 rows are less than 39 a list .*train_rows=5000",
        ),
        ({"rows": 10**5, "m": 50}, r"does not divide 768 \(m=50\). Fix: m=8, 16, 32, 48, 64, 96, 128"),
        ({"rows": 38, "kind": "ivf_flat"}, r"38 rows are less than 39 a list .*Fix: kind=exact"),
        ({"rows": 10**5, "kind": "hnsw", "m": 1}, r"two links a row or more \(m=1\)"),
        ({"rows": 10**5, "factory": "IVF16_HNSW1,Flat"}, r"two links .*\(factory=IVF16_HNSW1,Flat\)"),
        ({"rows": 9_983, "nlist": 1}, r"9,983 rows are less than the 9,984 .*Fix: kind=exact"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**({"kind": "ivf_pq", "dim": 768} | change))  # type: ignore[arg-type]


def test_nlist_by_hand_is_refused_only_under_39_rows_a_list() -> None:
    assert plan("ivf_flat", 39 * 512, 8, nlist=512).nlist == 512
    with pytest.raises(UserError, match="less than 39 a list"):
        plan("ivf_flat", 39 * 512 - 1, 8, nlist=512)


def test_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    check_memory(plan("ivf_pq", 10**6, 768))
    monkeypatch.setattr(planning.os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 250_000)
    with pytest.raises(
        UserError, match=r"IVF4096,Flat takes 7.0 GB, and this machine has 1.0 .*Fix: kind=ivf_pq"
    ):
        check_memory(plan("ivf_flat", 10**6, 768))
    with pytest.raises(UserError, match=r"smaller m="):
        check_memory(plan("ivf_pq", 10**7, 768))
