"""GIST against a plain loop: which candidates the guide takes out, and sentence-transformers' loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from embedlab.objectives.gist import gist
from embedlab.objectives.info_nce import info_nce

B = 5


def views(n: int, width: int = 6, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(B, width, generator=draw, dtype=torch.float64) for _ in range(n)]


def by_hand(v: list[Tensor], g: list[Tensor], tau: float, margin: float, relative: bool) -> float:
    v, g = [normalize(x, dim=-1) for x in v], [normalize(x, dim=-1) for x in g]
    blocks = [(0, k) for k in range(1, len(v))] + [(0, 0), (1, 1)]
    total = 0.0
    for i in range(B):
        true = float(g[0][i] @ g[1][i])
        limit = true - margin * (abs(true) if relative else 1)
        terms = []
        for left, right in blocks:
            for j in range(B):
                own = (left, right, j) == (0, 1, i)
                if own or (not (left == right and i == j) and float(g[left][i] @ g[right][j]) <= limit):
                    terms.append(math.exp(float(v[left][i] @ v[right][j]) / tau))
        total -= math.log(math.exp(float(v[0][i] @ v[1][i]) / tau) / sum(terms))
    return total / B


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    ("margin", "kind"), [(0.0, "absolute"), (0.1, "absolute"), (0.3, "relative"), (-0.2, "absolute")]
)
def test_equals_the_sum_written_out(n: int, margin: float, kind: Any) -> None:
    v, g = views(n), views(n, 4, seed=1)
    loss = gist(v, v, g, g, 0.1, margin=margin, margin_kind=kind).loss
    assert loss.item() == pytest.approx(by_hand(v, g, 0.1, margin, kind == "relative"), rel=1e-12)


def test_gradients() -> None:
    v, g = [x.requires_grad_() for x in views(3)], views(3, 4, seed=1)
    assert torch.autograd.gradcheck(lambda *x: gist(x, x, g, g, 0.5).loss, v)


def test_without_a_filter_it_is_info_nce() -> None:
    v, g = views(3), views(3, seed=1)
    found = gist(v, v, g, g, 0.1, margin=-math.inf, anchors=False, positives=False).loss
    torch.testing.assert_close(found, info_nce(v[0], v[1], 0.1, hard_negatives=v[2]).loss)


def test_a_known_false_negative_has_no_weight_and_no_row_meets_itself() -> None:
    v, g = views(2), views(2, seed=1)
    g[1][3] = g[0][0]  # the guide finds row 3's positive to be row 0's
    moved = [v[0], v[1].clone()]
    moved[1][3] += 10 * v[0][0]
    options = {"anchors": False, "positives": False}
    change = [gist(x, x, g, g, 0.1, **options).loss for x in (v, moved)]
    kept = [gist([x[:1] for x in y], y, [z[:1] for z in g], g, 0.1, **options).loss for y in (v, moved)]
    torch.testing.assert_close(kept[0], kept[1])
    assert (change[0] - change[1]).abs() > 1e-6
    same = [g[0], g[0]]  # guide(p) = guide(a): the released code then keeps a row's cosine with itself
    loss = gist(v, v, same, same, 0.1).loss
    assert loss.item() == pytest.approx(by_hand(v, same, 0.1, 0.0, False), rel=1e-12)


def test_a_larger_margin_filters_more_where_the_guide_says_less_than_nothing() -> None:
    v = views(2)
    g = [normalize(x, dim=-1) for x in views(2, 2, seed=3)]
    g[1] = -g[0]
    losses = [gist(v, v, g, g, 0.1, margin=m, margin_kind="relative").loss.item() for m in (-2.5, -1.0, 0.0)]
    assert losses[0] >= losses[1] >= losses[2]
    assert losses[0] > losses[2]


@pytest.mark.parametrize("world", [1, 5])
def test_ranks_that_score_their_rows_average_to_the_whole_batch(world: int) -> None:
    v, g = views(3), views(3, 4, seed=1)
    rows = B // world
    parts = [
        gist(
            [x[r * rows : (r + 1) * rows] for x in v], v, [x[r * rows : (r + 1) * rows] for x in g], g, 0.1,
            offset=r * rows,
        ).loss
        for r in range(world)
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(parts).mean(), gist(v, v, g, g, 0.1).loss)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", ["absolute", "relative"])
def test_equal_to_sentence_transformers(n: int, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("sentence_transformers.sentence_transformer.losses.gist_embed")
    v, g = views(n), views(n, 4, seed=1)
    theirs = module.GISTEmbedLoss.__new__(module.GISTEmbedLoss)
    nn.Module.__init__(theirs)
    settings = {"temperature": 0.1, "margin": 0.05, "margin_strategy": kind, "contrast_anchors": True,
                "contrast_positives": True, "gather_across_devices": False, "must_retokenize": False}  # fmt: skip
    for name, value in settings.items():
        setattr(theirs, name, value)
    theirs.cross_entropy_loss, theirs.similarity_fct = nn.CrossEntropyLoss(), nn.CosineSimilarity(dim=-1)
    theirs.model, theirs.guide = SimpleNamespace(v=v), SimpleNamespace(v=g)
    monkeypatch.setattr(module, "embed_columns", lambda model, features: [x.clone() for x in model.v])
    expected = theirs([{}] * n, None)
    found = gist(v, v, g, g, 0.1, margin=0.05, margin_kind=kind).loss
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
