"""Lists of similarities: values written out by hand, their least values, and who gets a gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from embedlab.objectives.ranking import jensen_shannon, list_mle, list_net

S = torch.tensor([[0.9, 0.5, 0.1]])
T = torch.tensor([[0.8, 0.4, 0.0]])
P, Q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.1, 0.2, 0.7]])


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(scores: list[float], teacher: list[float]) -> float:
    order = sorted(range(len(teacher)), key=lambda j: -teacher[j])
    ranked = [scores[j] for j in order]
    return -sum(s - math.log(sum(map(math.exp, ranked[t:]))) for t, s in enumerate(ranked))


def test_list_mle_is_the_sum_written_out() -> None:
    assert list_mle(S, S, 0.5).item() == pytest.approx(0.872618, abs=1e-6)
    assert list_mle(S, -S, 0.5).item() == pytest.approx(3.272618, abs=1e-6)
    assert list_mle(torch.ones(1, 3), T, 0.5).item() == pytest.approx(math.log(6), rel=1e-6)
    s, t = normal(4, 7, seed=0), normal(4, 7, seed=1)
    expected = sum(by_hand((a / 0.3).tolist(), b.tolist()) for a, b in zip(s, t, strict=True)) / 4
    assert list_mle(s, t, 0.3).item() == pytest.approx(expected, rel=1e-5)


def test_a_students_own_order_is_the_likeliest() -> None:
    found = {
        order: list_mle(S, torch.tensor([order], dtype=torch.float32), 0.5).item()
        for order in itertools.permutations(range(3))
    }
    assert min(found, key=found.__getitem__) == (2, 1, 0)


def test_list_net_is_a_cross_entropy() -> None:
    loss = list_net(S, T, 0.5, 0.25).item()
    assert loss == pytest.approx(0.683979, abs=1e-6)
    t = (T / 0.25).softmax(1)
    entropy = -(t * t.log()).sum().item()
    assert entropy == pytest.approx(0.582175, abs=1e-6)
    assert loss > entropy
    assert list_net(2 * T, T, 0.5, 0.25).item() == pytest.approx(entropy, abs=1e-6)


def test_the_divergence_is_symmetric_bounded_and_zero_between_equals() -> None:
    value = jensen_shannon(P.log(), Q.log()).item()
    assert value == pytest.approx(0.253102, abs=1e-6)
    assert jensen_shannon(Q.log(), P.log()).item() == pytest.approx(value, abs=1e-6)
    assert jensen_shannon(P.log(), P.log() + 3).item() == pytest.approx(0, abs=1e-6)
    far = jensen_shannon(torch.tensor([[90.0, 0.0]]), torch.tensor([[0.0, 90.0]])).item()
    assert far == pytest.approx(math.log(2), rel=1e-5)
    assert jensen_shannon(P.log(), Q.log(), released=True).item() == pytest.approx(-0.801819, abs=1e-6)


@pytest.mark.parametrize("loss", [list_mle, lambda s, t, tau, own: list_net(s, t, tau, tau / 2, own)])
def test_what_is_left_out_is_in_no_list(loss) -> None:  # type: ignore[no-untyped-def]
    s, t = normal(3, 5, seed=0), normal(3, 5, seed=1)
    own = torch.eye(3, 5).bool()
    found = loss(s, t, 0.3, own)
    rest = [torch.stack([row[~out] for row, out in zip(x, own, strict=True)]) for x in (s, t)]
    torch.testing.assert_close(found, loss(*rest, 0.3, None))
    moved = s + 7 * own
    torch.testing.assert_close(loss(moved, t, 0.3, own), found)


@pytest.mark.parametrize("loss", [list_mle, lambda s, t, tau, own: list_net(s, t, tau, tau / 2, own)])
def test_a_list_of_nothing_counts_as_nothing(loss) -> None:  # type: ignore[no-untyped-def]
    """What the last batch of an epoch may be: one row, whose own view is in no list."""
    s = torch.tensor([[0.9]], requires_grad=True)
    found = loss(s, torch.ones(1, 1), 0.05, torch.ones(1, 1).bool())
    found.backward()
    assert found.item() == 0
    assert s.grad is not None
    assert s.grad.item() == 0


@pytest.mark.parametrize("own", [None, torch.eye(3, 5).bool()])
def test_the_teacher_gets_no_gradient_and_the_student_one_that_sums_to_nothing(
    own: torch.Tensor | None,
) -> None:
    s, t = normal(3, 5, seed=0).requires_grad_(), normal(3, 5, seed=1).requires_grad_()
    (list_mle(s, t, 0.3, own) + list_net(s, t, 0.3, 0.1, own)).backward()  # type: ignore[no-untyped-call]
    assert t.grad is None
    assert s.grad is not None
    assert s.grad.abs().sum() > 0.1
    torch.testing.assert_close(s.grad.sum(1), torch.zeros(3), atol=1e-5, rtol=0)


def test_the_divergence_pulls_two_lists_together() -> None:
    p = P.log().requires_grad_()
    jensen_shannon(p, Q.log()).backward()  # type: ignore[no-untyped-call]
    assert p.grad is not None
    nearer = jensen_shannon(p.detach() - p.grad, Q.log())
    assert nearer < jensen_shannon(P.log(), Q.log())
    logits = normal(2, 6, seed=3)
    assert jensen_shannon(logits, logits * 0.9) < cross_entropy(logits, logits.softmax(1))
