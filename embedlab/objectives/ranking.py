"""Lists of similarities held to a teacher's and to each other (RankCSE, Liu et al. 2023).

A row is one sentence's list: its similarities to all sentences of the batch, its own other view among them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from embedlab.objectives.precision import full_precision, to_fp32


@full_precision
def jensen_shannon(first: Tensor, second: Tensor, released: bool = False) -> Tensor:
    """``(KL(P || M) + KL(Q || M)) / 2`` with ``M = (P + Q) / 2``, the mean over rows, in nats.

    Args:
        first, second: logits ``[B, M]`` of P and Q.
        released: as an unofficial script has it, which clamps log M, never above 0, to at least 1e-7. What is left,
            minus the mean entropy, rewards flat lists.
    """
    p, q = log_softmax(to_fp32(first), -1), log_softmax(to_fp32(second), -1)
    mixture = torch.logaddexp(p, q) - math.log(2)
    if released:
        mixture = mixture.clamp(min=1e-7)
    return (p.exp() * (p - mixture) + q.exp() * (q - mixture)).sum(-1).mean() / 2


@full_precision
def list_net(
    scores: Tensor, teacher: Tensor, tau: float, teacher_tau: float, left_out: Tensor | None = None
) -> Tensor:
    """Cross-entropy of the teacher's top-one probabilities and the student's (ListNet), the mean over rows.

    Args:
        scores, teacher: similarities ``[B, M]``; the teacher's get no gradient.
        tau, teacher_tau: temperatures of the two.
        left_out: bool ``[B, M]``, entries that are in no list. A row without others counts as 0.
    """
    s, t = to_fp32(scores) / tau, to_fp32(teacher).detach() / teacher_tau
    if left_out is None:
        return -(t.softmax(-1) * log_softmax(s, -1)).sum(-1).mean()
    absent = left_out & ~left_out.all(-1, keepdim=True)  # a softmax of nothing is no number
    s, t = (x.masked_fill(absent, float("-inf")) for x in (s, t))
    return -(t.softmax(-1) * log_softmax(s, -1).masked_fill(left_out, 0.0)).sum(-1).mean()


@full_precision
def list_mle(scores: Tensor, teacher: Tensor, tau: float, left_out: Tensor | None = None) -> Tensor:
    """Minus the log-likelihood of the teacher's order (ListMLE, Plackett-Luce): a sum over places, the mean over rows.

    ``-sum_t (s_t - log sum_{k >= t} exp s_k)`` with s the student's scores in the teacher's descending order. Where
    all M scores are equal it is log M!: about 496 at M = 128.

    Args:
        scores, teacher: similarities ``[B, M]``; the teacher's only give the order.
        tau: temperature of the student.
        left_out: bool ``[B, M]``, one entry a row that is in no list.
    """
    order = to_fp32(teacher).detach()
    if left_out is not None:
        order = order.masked_fill(left_out, float("inf"))
    s = (to_fp32(scores) / tau).gather(1, order.argsort(dim=1, descending=True, stable=True))
    rest = s.flip(1).logcumsumexp(1).flip(1)
    places = slice(int(left_out is not None), None)  # what is left out comes first, and is in no later sum
    return (rest - s)[:, places].sum(1).mean()
