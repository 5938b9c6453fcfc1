"""InfoNCE against hand-written sums, its limits, and what is a negative."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from embedlab.objectives.info_nce import info_nce


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(a: torch.Tensor, b: torch.Tensor, tau: float) -> float:
    a, b = normalize(a.double(), dim=-1), normalize(b.double(), dim=-1)
    total = 0.0
    for i in range(len(a)):
        scores = [math.exp(float(a[i] @ b[j]) / tau) for j in range(len(b))]
        total -= math.log(scores[i] / sum(scores))
    return total / len(a)


def test_equals_the_sum_written_out() -> None:
    a, b = vectors(5, 7), vectors(5, 7, seed=1)
    assert info_nce(a, b, 0.05).loss.item() == pytest.approx(by_hand(a, b, 0.05), rel=1e-5)


def test_limits() -> None:
    same = torch.ones(6, 4)
    assert info_nce(same, same, 0.05).loss.item() == pytest.approx(math.log(6), rel=1e-6)
    far = torch.eye(6)
    assert info_nce(far, far, 0.05).loss.item() < 1e-6
    assert info_nce(far, far, 0.05).accuracy.item() == 1.0


def test_scale_of_a_vector_is_nothing_and_the_order_of_the_batch_is_nothing() -> None:
    a, b = vectors(6, 8), vectors(6, 8, seed=1)
    expected = info_nce(a, b, 0.1).loss
    torch.testing.assert_close(info_nce(a * torch.rand(6, 1).add(0.1), b * 7, 0.1).loss, expected)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    torch.testing.assert_close(info_nce(a[order], b[order], 0.1).loss, expected)


def test_it_is_one_directional() -> None:
    a, b = vectors(6, 8), vectors(6, 8, seed=1)
    assert abs(info_nce(a, b, 0.1).loss - info_nce(b, a, 0.1).loss) > 1e-4


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_that_score_their_rows_average_to_the_whole_batch(world: int) -> None:
    a, p, n = vectors(8, 5), vectors(8, 5, seed=1), vectors(8, 5, seed=2)
    whole = info_nce(a, p, 0.05, hard_negatives=n).loss
    rows = 8 // world
    parts = [
        info_nce(a[r * rows : (r + 1) * rows], p, 0.05, offset=r * rows, hard_negatives=n).loss
        for r in range(world)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_with_hard_negatives_the_target_stays_the_positive() -> None:
    # One-hot vectors: the loss vanishes only if each anchor is drawn to its own positive (a label off by the
    # number of hard negatives would train towards negatives).
    a = torch.eye(8)[:3]
    negatives = torch.eye(8)[3:6]
    contrast = info_nce(a, a, 0.05, hard_negatives=negatives)
    assert contrast.loss.item() < 1e-6
    assert info_nce(a, negatives, 0.05, hard_negatives=a).loss.item() > 10


def test_weight_of_the_own_hard_negative() -> None:
    a, p, n = vectors(4, 6), vectors(4, 6, seed=1), vectors(4, 6, seed=2)
    logits = normalize(a, dim=-1) @ normalize(torch.cat([p, n]), dim=-1).T / 0.5
    logits[torch.arange(4), 4 + torch.arange(4)] += math.log(2.0)
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(4))
    got = info_nce(a, p, 0.5, hard_negatives=n, hard_negative_weight=math.log(2.0)).loss
    torch.testing.assert_close(got, expected)


def test_a_repeated_sentence_is_no_negative() -> None:
    a, p = vectors(4, 6), vectors(4, 6, seed=1)
    ids = torch.tensor([1, 2, 1, 3])  # rows 0 and 2 are the same sentence
    got = info_nce(a, p, 0.05, anchor_hashes=ids, candidate_hashes=ids).loss
    logits = normalize(a, dim=-1) @ normalize(p, dim=-1).T / 0.05
    logits[0, 2] = logits[2, 0] = -math.inf
    torch.testing.assert_close(got, torch.nn.functional.cross_entropy(logits, torch.arange(4)))
    assert got < info_nce(a, p, 0.05).loss


def test_a_hard_negative_with_the_text_of_the_positive_is_left_out() -> None:
    a, p, n = vectors(3, 6), vectors(3, 6, seed=1), vectors(3, 6, seed=2)
    ids, positive, negative = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), torch.tensor([7, 4, 9])
    got = info_nce(
        a,
        p,
        0.1,
        hard_negatives=n,
        anchor_hashes=ids,
        candidate_hashes=positive,
        hard_negative_hashes=negative,
    ).loss
    logits = normalize(a, dim=-1) @ normalize(torch.cat([p, n]), dim=-1).T / 0.1
    logits[0, 3 + 1] = -math.inf
    torch.testing.assert_close(got, torch.nn.functional.cross_entropy(logits, torch.arange(3)))


def test_all_equal_texts_leave_only_the_positive() -> None:
    a, ids = vectors(3, 6).requires_grad_(), torch.zeros(3, dtype=torch.long)
    contrast = info_nce(a, vectors(3, 6, seed=1), 0.05, anchor_hashes=ids, candidate_hashes=ids)
    contrast.loss.backward()
    assert contrast.loss.item() == contrast.negative_cosine.item() == 0.0
    assert torch.isfinite(a.grad).all()


def test_computed_in_fp32_under_autocast() -> None:
    a, b = vectors(16, 64), vectors(16, 64, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        inside = info_nce(a, b, 0.05).loss
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, info_nce(a, b, 0.05).loss, rtol=0, atol=0)


def test_finite_at_a_tiny_temperature_with_huge_vectors() -> None:
    a = (1e3 * vectors(8, 16)).half().requires_grad_()
    loss = info_nce(a, a.detach(), 0.01).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(a.grad).all()


def test_memory_grows_with_the_batch_squared_not_times_the_width() -> None:
    # 1024 x 1024 x 768 floats would be 3.2 GB.

    a = vectors(1024, 768)
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        info_nce(a, a, 0.05)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 50e6


@pytest.mark.parametrize("n", [1, 2, 3])
def test_n_hard_negatives_are_blocks_after_the_positives(n: int) -> None:
    a, p, negatives = (
        vectors(4, 6).double(),
        vectors(4, 6, seed=1).double(),
        vectors(n, 4, 6, seed=2).double(),
    )
    hashes = [torch.arange(4), torch.arange(4, 8), torch.arange(8, 8 + 4 * n).view(n, 4)]
    hashes[2][-1, 2] = 1  # the last negative of row 2 is anchor 1's text
    got = info_nce(
        a, p, 0.1, hard_negatives=negatives, hard_negative_weight=0.5,
        anchor_hashes=hashes[0], candidate_hashes=hashes[1], hard_negative_hashes=hashes[2],
    ).loss  # fmt: skip
    logits = normalize(a, dim=-1) @ normalize(torch.cat([p, *negatives]), dim=-1).T / 0.1
    for k in range(1, n + 1):
        logits[torch.arange(4), 4 * k + torch.arange(4)] += 0.5
    logits[1, 4 * n + 2] = -math.inf
    torch.testing.assert_close(got, torch.nn.functional.cross_entropy(logits, torch.arange(4)))
    plain = info_nce(a, p, 0.1, hard_negatives=negatives).loss
    torch.testing.assert_close(info_nce(a, p, 0.1, hard_negatives=negatives.flip(0)).loss, plain)
    if n == 1:
        assert plain == info_nce(a, p, 0.1, hard_negatives=negatives[0]).loss
    a.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: info_nce(x, p, 0.5, hard_negatives=negatives).loss, a)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_equal_to_sentence_transformers(n: int) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    x = vectors(2 + n, 5, 6).double()
    theirs = losses.MultipleNegativesRankingLoss(torch.nn.Identity()).compute_loss_from_embeddings(
        list(x), None
    )
    ours = info_nce(x[0], x[1], 0.05, hard_negatives=x[2:] if n else None).loss
    torch.testing.assert_close(ours, theirs)
