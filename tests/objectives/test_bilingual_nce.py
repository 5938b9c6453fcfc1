"""BEPA's InfoNCE: invariants T1 to T4, T10 and T12 of its specification, and what gathering leaves equal."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from embedlab.objectives.bilingual_nce import bilingual_nce

TAU, ROWS, WIDTH = 0.07, 16, 64


def contrast(*arguments: object, **options: object) -> SimpleNamespace:
    """The fields of the contrast, and how many anchors were kept."""
    result, kept = bilingual_nce(*arguments, **options)  # type: ignore[arg-type]
    return SimpleNamespace(**result._asdict(), kept=kept)


def loss(first: Tensor, second: Tensor, **options: object) -> SimpleNamespace:
    return contrast((first, second), (first, second), TAU, **options)


def pairs(seed: int = 0, noise: float = 2.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(ROWS, WIDTH, generator=draw)
    return z, z + noise * torch.randn(ROWS, WIDTH, generator=draw)


def by_loops(first: Tensor, second: Tensor, mask_self: bool) -> float:
    """The formula, one term at a time."""
    z = [v / v.norm() for v in torch.cat([first, second]).double()]
    total, n = 0.0, len(first)
    for own in range(2 * n):
        other = (own + n) % (2 * n)
        columns = [k for k in range(2 * n) if not (mask_self and k == own)]
        terms = [math.exp(float(z[own] @ z[k]) / TAU) for k in columns]
        total -= math.log(math.exp(float(z[own] @ z[other]) / TAU) / sum(terms))
    return total / (2 * n)


@pytest.mark.parametrize("mask_self", [True, False])
def test_it_is_the_formula(mask_self: bool) -> None:
    first, second = pairs()
    assert float(loss(first, second, mask_self=mask_self).loss) == pytest.approx(
        by_loops(first, second, mask_self), rel=1e-5
    )


def test_t1_aligned_and_orthogonal_pairs() -> None:
    z = torch.eye(ROWS)
    assert float(loss(z, z).loss) < 1e-4
    assert float(loss(z, z, mask_self=False).loss) == pytest.approx(0.693157, abs=1e-5)


def test_t2_equal_vectors() -> None:
    z = torch.ones(ROWS, WIDTH)
    assert float(loss(z, z).loss) == pytest.approx(math.log(2 * ROWS - 1), abs=1e-5)
    assert float(loss(z, z, mask_self=False).loss) == pytest.approx(math.log(2 * ROWS), abs=1e-5)


@pytest.mark.parametrize("mask_self", [True, False])
def test_t3_symmetries(mask_self: bool) -> None:
    first, second = pairs()
    expected = loss(first, second, mask_self=mask_self).loss
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)))[0]
    scale = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(3)) + 0.1
    for a, b in [
        (second, first),
        (first[order], second[order]),
        (first * scale, second / scale),
        (first @ rotation, second @ rotation),
    ]:
        torch.testing.assert_close(loss(a, b, mask_self=mask_self).loss, expected, rtol=1e-5, atol=1e-6)


def test_t4_a_pair_that_parts_costs_more() -> None:
    # The i-th translation turns away into a direction of its own, where no other vector is.
    z, found = torch.eye(ROWS, 2 * ROWS), []
    for angle in (0.0, 0.4, 0.8, 1.2, 1.6):
        turned = z.clone()
        turned[3] = math.cos(angle) * z[3] + math.sin(angle) * torch.eye(2 * ROWS)[ROWS + 3]
        found.append(float(loss(z, turned).loss))
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.1


def test_t10_repeated_texts_leave_exactly_their_columns() -> None:
    first, second = pairs()
    a, b = torch.arange(ROWS), torch.arange(100, 100 + ROWS)
    a[5] = a[2]  # one sentence with two translations
    expected = 0.0
    z = torch.nn.functional.normalize(torch.cat([first, second]).double(), dim=-1)
    logits = z @ z.T / TAU
    n = ROWS
    # Texts 2 and 5 of the first side are the same. So they are no negatives of each other, nor is each one of the
    # other's translation; the two translations differ in text, and stay negatives of each other.
    gone = {(i, i) for i in range(2 * n)} | {(2, 5), (5, 2), (n + 2, 5), (n + 5, 2)}
    for own in range(2 * n):
        kept = torch.tensor([k for k in range(2 * n) if (own, k) not in gone])
        expected += float(logits[own, kept].logsumexp(0) - logits[own, (own + n) % (2 * n)]) / (2 * n)
    found = loss(first, second, anchor_hashes=(a, b), candidate_hashes=(a, b))
    assert float(found.loss) == pytest.approx(expected, rel=1e-5)
    assert float(found.loss) < float(loss(first, second).loss)


def test_t10_a_row_without_a_negative_is_skipped() -> None:
    first, second = pairs()
    first, second = first[:2].requires_grad_(), second[:2]
    same = torch.tensor([7, 7])
    other = torch.tensor([8, 9])
    found = loss(first, second, anchor_hashes=(same, other), candidate_hashes=(same, other))
    # Anchors of the second side keep one negative each, the other translation; those of the first side do, too.
    assert int(found.kept) == 4
    ids = (same, same + 1)
    for mask_self in (True, False):  # oneself in the denominator is no negative
        found = loss(first, second, anchor_hashes=ids, candidate_hashes=ids, mask_self=mask_self)
        assert int(found.kept) == 0
        assert float(found.loss.detach()) == 0
        first.grad = None
        found.loss.backward()
        assert first.grad is not None
        assert torch.equal(first.grad, torch.zeros_like(first))


def test_a_skipped_row_does_not_dilute_the_mean() -> None:
    """Rows of one text pair only are skipped; the mean is over the others, and a repeat among them changes nothing."""
    first, second = (z[:3] for z in pairs())
    # Texts (1, 3), (1, 3), (2, 3): the second sides are all one text, so that an anchor there has no negative but
    # the first sides of other texts, and one of the first side only those.
    ids = (torch.tensor([1, 1, 2]), torch.tensor([3, 3, 3]))
    found = loss(first, second, anchor_hashes=ids, candidate_hashes=ids)
    z = torch.nn.functional.normalize(torch.cat([first, second]), dim=-1)
    logits = z @ z.T / TAU
    pairs_kept = {0: [2], 1: [2], 2: [0, 1], 3: [2], 4: [2], 5: [0, 1]}
    terms = []
    for own, negatives in pairs_kept.items():
        other = (own + 3) % 6
        terms.append(logits[own, [other, *negatives]].logsumexp(0) - logits[own, other])
    assert int(found.kept) == 6
    torch.testing.assert_close(found.loss, torch.stack(terms).mean(), rtol=1e-5, atol=1e-6)
    # Without the third pair nothing is left; beside it, the two make the same mean as when they are alone with it.
    assert int(loss(first[:2], second[:2], anchor_hashes=(ids[0][:2], ids[1][:2]),
                    candidate_hashes=(ids[0][:2], ids[1][:2])).kept) == 0  # fmt: skip
    part = contrast(
        (first[:2], second[:2]), (first[:2], second[:2]), TAU, within_language=False,
        anchor_hashes=(torch.tensor([1, 2]), torch.tensor([3, 3])),
        candidate_hashes=(torch.tensor([1, 2]), torch.tensor([3, 3])),
    )  # fmt: skip
    # Of the first side no anchor has a negative, of the second side each has one: the mean is over two rows.
    assert int(part.kept) == 2
    cross = torch.nn.functional.cross_entropy(
        torch.stack([logits[3, [0, 1]], logits[4, [0, 1]]]), torch.tensor([0, 1])
    )
    torch.testing.assert_close(part.loss, cross, rtol=1e-5, atol=1e-6)


def test_without_negatives_of_the_own_side() -> None:
    first, second = pairs()
    found = loss(first, second, within_language=False)
    unit = [torch.nn.functional.normalize(z, dim=-1) for z in (first, second)]
    logits = unit[0] @ unit[1].T / TAU
    target = torch.arange(ROWS)
    both = [torch.nn.functional.cross_entropy(x, target) for x in (logits, logits.T)]
    torch.testing.assert_close(found.loss, (both[0] + both[1]) / 2, rtol=1e-5, atol=1e-6)


def test_t12_the_nearest_candidate_is_oneself_where_oneself_is_one() -> None:
    first, second = pairs(noise=0.1)
    assert float(loss(first, second).accuracy) == 1
    assert float(loss(first, second, mask_self=False).accuracy) == 0


def test_ranks_score_their_own_rows() -> None:
    first, second = pairs()
    ids = (torch.arange(ROWS) % 11, 50 + torch.arange(ROWS) % 7)
    whole = loss(first, second, anchor_hashes=ids, candidate_hashes=ids)
    parts = []
    for r in range(4):
        rows = slice(4 * r, 4 * r + 4)
        part = contrast(
            (first[rows], second[rows]), (first, second), TAU, offset=4 * r,
            anchor_hashes=(ids[0][rows], ids[1][rows]), candidate_hashes=ids,
        )  # fmt: skip
        parts.append(part.loss * part.kept)
    torch.testing.assert_close(torch.stack(parts).sum() / whole.kept, whole.loss, rtol=1e-5, atol=1e-6)


def test_half_precision_vectors_are_compared_in_full() -> None:
    first, second = pairs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(first.bfloat16(), second.bfloat16())
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, loss(first, second).loss, rtol=0.05, atol=1e-2)
    huge = loss(1e3 * first, 1e3 * second)
    assert bool(torch.isfinite(huge.loss))
