"""InfoNCE in several directions: plain sums, sentence-transformers' loss, and what the hashes leave out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from embedlab.objectives.directions import directed_nce
from embedlab.objectives.info_nce import info_nce

B, TAU = 5, 0.1
THEIRS = {
    "forward": (("query_to_doc",), "joint"),
    "symmetric": (("query_to_doc", "doc_to_query"), "per_direction"),
    "joint": (("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "joint"),
}
MODES = {None: None, "in_batch": "in_batch_negatives", "hard": "hard_negatives", "all": "all_negatives"}


def views(n: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(B, 6, generator=draw, dtype=torch.float64) for _ in range(n)]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("hardness", MODES)
@pytest.mark.parametrize("directions", THEIRS)
def test_equal_to_sentence_transformers(n: int, hardness: Any, directions: Any) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    which, partition = THEIRS[directions]
    theirs = losses.MultipleNegativesRankingLoss(
        torch.nn.Identity(), 1 / TAU, directions=which, partition_mode=partition, hardness_mode=MODES[hardness],
        hardness_strength=0.0 if hardness is None else 2.0,
    )  # fmt: skip
    v = views(n)
    found = directed_nce(v, v, TAU, directions=directions, hardness=hardness, strength=2.0)
    torch.testing.assert_close(found.loss, theirs.compute_loss_from_embeddings(v, None))


@pytest.mark.parametrize("n", [2, 4])
def test_forward_is_info_nce_texts_that_come_again_included(n: int) -> None:
    v, draw = views(n), torch.Generator().manual_seed(3)
    hashes = [torch.randint(7, (B,), generator=draw) for _ in range(n)]
    found = directed_nce(v, v, TAU, hashes=hashes, candidate_hashes=hashes)
    hard = (
        {}
        if n == 2
        else {"hard_negatives": torch.stack(v[2:]), "hard_negative_hashes": torch.stack(hashes[2:])}
    )
    expected = info_nce(v[0], v[1], TAU, anchor_hashes=hashes[0], candidate_hashes=hashes[1], **hard)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), its.double())


def test_the_joint_sum_written_out_with_texts_that_come_again() -> None:
    v, texts = views(3), [[0, 1, 2, 0, 4], [5, 6, 7, 8, 6], [9, 10, 5, 2, 11]]
    x = [normalize(view, dim=-1) for view in v]
    total = 0.0
    for i in range(B):
        known = {texts[0][i], texts[1][i]}
        terms = []
        for left, right in ((0, 1), (0, 2), (0, 0), (1, 0), (1, 1), (1, 2)):
            for j in range(B):
                own = i == j and (left, right) in ((0, 1), (1, 0))
                itself = i == j and (left, right) in ((0, 0), (1, 1), (1, 2))
                if own or not (itself or texts[right][j] in known):
                    terms.append(math.exp(float(x[left][i] @ x[right][j]) / TAU))
        total += math.log(sum(terms)) - float(x[0][i] @ x[1][i]) / TAU
    hashes = [torch.tensor(row) for row in texts]
    loss = directed_nce(v, v, TAU, directions="joint", hashes=hashes, candidate_hashes=hashes).loss
    assert loss.item() == pytest.approx(total / B, rel=1e-12)


@pytest.mark.parametrize("directions", THEIRS)
def test_gradients_and_ranks(directions: Any) -> None:
    v = [x.requires_grad_() for x in views(3)]
    assert torch.autograd.gradcheck(lambda *x: directed_nce(x, x, 0.5, directions=directions).loss, v)
    parts = [
        directed_nce([x[r : r + 1] for x in v], v, TAU, directions=directions, offset=r).loss
        for r in range(B)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), directed_nce(v, v, TAU, directions=directions).loss)
