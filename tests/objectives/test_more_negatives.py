"""InfoNCE with a queue and with mixtures: by hand, their limits, repeated texts, ranks, and where gradients go."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.more_negatives import mix_nce, queue_nce, released_mix_nce

TAU = 0.2


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ring(n: int) -> Tensor:
    return torch.arange(n).roll(-1)


def count(n: int) -> Tensor:
    return torch.tensor(n)


def test_an_empty_queue_is_none_and_equal_vectors_count_all() -> None:
    a, b, q = normal(5, 8, seed=0), normal(5, 8, seed=1), normal(9, 8, seed=2)
    torch.testing.assert_close(queue_nce(a, b, q, count(0), TAU).loss, info_nce(a, b, TAU).loss)
    torch.testing.assert_close(queue_nce(a, b, q[:0], count(0), TAU).loss, info_nce(a, b, TAU).loss)
    ones = torch.ones(64, 4)
    loss = queue_nce(ones, ones, torch.ones(160, 4), count(160), TAU).loss
    assert loss.item() == pytest.approx(5.411646, abs=1e-5)  # ln 224


@pytest.mark.parametrize("filled", [1, 4, 9])
def test_only_what_is_filled_counts(filled: int) -> None:
    a, b, q = normal(5, 8, seed=0), normal(5, 8, seed=1), normal(9, 8, seed=2)
    columns = normalize(torch.cat([b, q[:filled]]).double(), dim=1)
    logits = normalize(a.double(), dim=1) @ columns.T / TAU
    expected = (logits.logsumexp(1) - logits.diagonal()).mean()
    assert queue_nce(a, b, q, count(filled), TAU).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_queued_text_of_the_batch_is_no_negative() -> None:
    a, b, q = normal(4, 8, seed=0), normal(4, 8, seed=1), normal(3, 8, seed=2)
    texts = torch.tensor([10, 11, 12, 13])
    hashes: Any = {"anchor_hashes": texts, "candidate_hashes": texts}
    found = queue_nce(a, b, q, count(3), TAU, queue_hashes=torch.tensor([11, 50, 51]), **hashes).loss
    rows = [
        queue_nce(a[i : i + 1], b, q[1:] if i == 1 else q, count(2 if i == 1 else 3), TAU, offset=i).loss
        for i in range(4)
    ]
    torch.testing.assert_close(found, torch.stack(rows).mean())


def test_the_queue_gets_no_gradient() -> None:
    a, b, q = (normal(4, 8, seed=s).requires_grad_() for s in range(3))
    queue_nce(a, b, q, count(4), TAU).loss.backward()
    assert q.grad is None
    assert a.grad is not None
    assert b.grad is not None


def test_a_mixture_of_orthogonal_vectors() -> None:
    """lambda = .2: the cosine to the own positive is .2 / sqrt(.2^2 + .8^2)."""
    u = torch.eye(4)
    row = math.exp(1 / TAU) + 3 + math.exp(0.242536 / TAU)
    assert mix_nce(u, u, ring(4), TAU, 0.2).loss.item() == pytest.approx(math.log(row) - 1 / TAU, rel=1e-5)


def test_a_share_of_nothing_is_the_neighbour_twice() -> None:
    a, b = normal(5, 8, seed=0), normal(5, 8, seed=1)
    logits = normalize(a, dim=1) @ normalize(b, dim=1).T / TAU
    doubled = torch.cat([logits, logits.roll(-1, 1).diagonal()[:, None]], 1)
    torch.testing.assert_close(
        mix_nce(a, b, ring(5), TAU, 0.0).loss, (doubled.logsumexp(1) - logits.diagonal()).mean()
    )


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_a_negative_more_costs_more_and_has_no_gradient(share: float) -> None:
    a, b = normal(5, 8, seed=0), normal(5, 8, seed=1).requires_grad_()
    plain, mixed = info_nce(a, b, TAU).loss, mix_nce(a, b, ring(5), TAU, share).loss
    assert mixed > plain
    mixed.backward()
    assert b.grad is not None
    found = b.grad.clone()
    b.grad = None
    constant = b.detach()
    u = normalize(constant, dim=1)
    fixed = normalize(share * u + (1 - share) * u.roll(-1, 0), dim=1)
    logits = normalize(a, dim=1) @ normalize(b, dim=1).T / TAU
    own = (normalize(a, dim=1) * fixed).sum(1, keepdim=True) / TAU
    (torch.cat([logits, own], 1).logsumexp(1) - logits.diagonal()).mean().backward()
    torch.testing.assert_close(found, b.grad)


def test_a_mixture_with_ones_own_text_is_none() -> None:
    a, b = normal(4, 8, seed=0), normal(4, 8, seed=1)
    texts = torch.tensor([5, 5, 6, 7])
    hashes: Any = {"anchor_hashes": texts, "candidate_hashes": texts}
    plain = info_nce(a[:1], b, TAU, anchor_hashes=texts[:1], candidate_hashes=texts).loss
    first = mix_nce(a[:1], b, ring(4), TAU, 0.2, anchor_hashes=texts[:1], candidate_hashes=texts).loss
    torch.testing.assert_close(first, plain)
    assert mix_nce(a, b, ring(4), TAU, 0.2, **hashes).loss > info_nce(a, b, TAU, **hashes).loss


def test_the_released_mixtures_by_a_loop() -> None:
    a, b = normal(4, 6, seed=0), normal(4, 6, seed=1)
    total, mix = 0.0, (lambda x, j: 0.2 * x[j] + 0.8 * x[(j + 1) % 4])

    def cosine(x: Tensor, y: Tensor) -> float:
        return float(torch.cosine_similarity(x.double(), y.double(), dim=0)) / TAU

    for i in range(4):
        logits = [cosine(a[i], b[j]) for j in range(4)]
        logits += [0.0 if (j + 1) % 4 == i else cosine(a[i], mix(b, j)) for j in range(4)]
        logits += [0.0 if j == (i + 1) % 4 else cosine(mix(a, i), b[j]) for j in range(4)]
        total += math.log(sum(map(math.exp, logits))) - logits[i]
    assert released_mix_nce(a, b, a, ring(4), TAU, 0.2).loss.item() == pytest.approx(total / 4, rel=1e-5)


def test_mixtures_are_made_in_fp32() -> None:
    """The vectors of a step in bf16 are in bf16: what is mixed of them is rounded no further."""
    a, b = normal(8, 64, seed=0).bfloat16(), normal(8, 64, seed=1).bfloat16()
    x, y = a.float(), b.float()
    assert mix_nce(a, b, ring(8), 0.05, 0.2).loss == mix_nce(x, y, ring(8), 0.05, 0.2).loss
    released = released_mix_nce(a, b, a, ring(8), 0.05, 0.2).loss
    assert released == released_mix_nce(x, y, x, ring(8), 0.05, 0.2).loss


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_score_their_rows_average_to_the_whole_batch(world: int) -> None:
    a, b, q = normal(8, 5, seed=0), normal(8, 5, seed=1), normal(6, 5, seed=2)
    rows = 8 // world
    own = [(a[r * rows : (r + 1) * rows], r * rows) for r in range(world)]
    after = ring(8)
    for whole, parts in (
        (mix_nce(a, b, after, TAU, 0.2), [mix_nce(x, b, after, TAU, 0.2, offset=at) for x, at in own]),
        (queue_nce(a, b, q, count(4), TAU), [queue_nce(x, b, q, count(4), TAU, offset=at) for x, at in own]),
        (
            released_mix_nce(a, b, a, after, TAU, 0.2),
            [released_mix_nce(x, b, a, after, TAU, 0.2, offset=at) for x, at in own],
        ),
    ):
        torch.testing.assert_close(torch.stack([p.loss for p in parts]).mean(), whole.loss)


def test_neighbours_are_the_rings_in_whatever_order_the_rows_come() -> None:
    a, b, texts = normal(6, 5, seed=0), normal(6, 5, seed=1), torch.tensor([1, 1, 2, 3, 2, 4])
    order = torch.tensor([4, 0, 3, 5, 1, 2])  # place of each row
    x, y, named, after = a.clone(), b.clone(), texts.clone(), ring(6)
    x[order], y[order], named[order], after[order] = a, b, texts, order.roll(-1)
    hashes: Any = {"anchor_hashes": texts, "candidate_hashes": texts}
    moved: Any = {"anchor_hashes": named, "candidate_hashes": named}
    torch.testing.assert_close(
        mix_nce(x, y, after, TAU, 0.2, **moved).loss, mix_nce(a, b, ring(6), TAU, 0.2, **hashes).loss
    )
    torch.testing.assert_close(
        released_mix_nce(x, y, x, after, TAU, 0.2).loss, released_mix_nce(a, b, a, ring(6), TAU, 0.2).loss
    )
