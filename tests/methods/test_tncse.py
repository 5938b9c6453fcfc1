"""TNCSE: JTCSE's losses without a side stream, anchors across towers always from the first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embedlab.errors import UserError
from embedlab.methods.jtcse import TNCSEConfig
from embedlab.objectives.modulus import modulus_term
from embedlab.objectives.pair_nce import pair_nce
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.methods.test_jtcse import BASE, Tiny, losses, method, vectors

CONFIG = TNCSEConfig(tower1="a", tower2="b")


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("tncse", tmp_path, monkeypatch)


def test_the_terms_are_the_papers(tiny: Tiny) -> None:
    """Equations (3), (4) and (5) of methods/jtcse.py without s and t, from the vectors of both towers."""
    tncse = method(tiny, CONFIG)
    u, v, _, _ = vectors(tncse)
    terms, (p, q) = losses(tncse), tncse.pooled(u, v)
    x = lambda a, b: pair_nce(a, b, 0.05).loss  # noqa: E731
    torch.testing.assert_close(terms["nce"], x(u, u) + x(v, v))
    torch.testing.assert_close(terms["cross"], x(u, v))
    torch.testing.assert_close(terms["ictm"], modulus_term(u, v, p, q) + modulus_term(v, u, q, p))


def test_tncse_is_the_same_without_the_side_stream(tiny: Tiny) -> None:
    tncse, jtcse = method(tiny, CONFIG), method(tiny, replace(BASE, icnce="fixed"))
    there, here = losses(tncse), losses(jtcse)
    assert set(there) == {"nce", "cross", "ictm"}
    for name in there:
        torch.testing.assert_close(there[name], here[name], rtol=1e-5, atol=1e-6)
    assert tncse.forward_passes == 4.0
    assert jtcse.forward_passes == 4.0 * (1 + 3 / 4), (
        "with exchanges in layers 2 and 4 of 4, layers 2 to 4 run twice"
    )


def test_anchors_across_towers_are_the_firsts(tiny: Tiny) -> None:
    """No coin: swapped towers cost something else, and the same every time."""
    one, other = (losses(method(tiny, CONFIG, seeds))["cross"] for seeds in ((0, 1), (1, 0)))
    assert abs(one - other) > 1e-4
    assert all(torch.equal(losses(method(tiny, CONFIG))["cross"], one) for _ in range(3))


@pytest.mark.parametrize("change", [{"terms": ("nce", "side")}, {"wiring": "instream"}])
def test_a_side_stream_is_refused(tiny: Tiny, change: dict[str, object]) -> None:
    info = method(tiny, CONFIG).encoder.towers[0].backbone.info
    assert CONFIG.check(info, run_of()) == []
    with pytest.raises(UserError, match=r"TNCSE has no side stream.*method=jtcse"):
        replace(CONFIG, **change).check(info, run_of())  # type: ignore[arg-type]
