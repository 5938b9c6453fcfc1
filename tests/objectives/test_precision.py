"""Objectives in fp32, and compiled as in captured steps: the same values and gradients by few compilations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from embedlab.objectives import precision
from embedlab.objectives.bilingual_nce import bilingual_nce
from embedlab.objectives.cosent import angle_similarity, ranking
from embedlab.objectives.directions import directed_nce
from embedlab.objectives.gist import gist
from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.language_model import (
    mask_tokens,
    next_tokens,
    token_accuracy,
    token_cross_entropy,
)
from embedlab.objectives.matryoshka import nested
from embedlab.objectives.modulus import modulus_term
from embedlab.objectives.multi_positive import multi_positive
from embedlab.objectives.pair_nce import pair_nce
from embedlab.objectives.regularisers import (
    cosine_distance,
    covariance_term,
    participation,
    sigreg,
    squared_distance,
    std,
    variance_term,
)
from embedlab.objectives.sigmoid import sigmoid
from embedlab.objectives.teacher_scores import listed_scores, margin_mse, score_kl


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def info(n: int) -> list[Tensor]:
    a, b = (torch.randn(n, 16, requires_grad=True) for _ in range(2))
    ids = torch.arange(n) // 2
    c = info_nce(a, b, 0.05, anchor_hashes=ids, candidate_hashes=ids)
    return [*c, *torch.autograd.grad(c.loss, [a, b])]


def pairs(n: int) -> list[Tensor]:
    x = torch.randn(2 * n, 16, requires_grad=True)
    c = pair_nce(x, x, 0.05)
    return [*c, *torch.autograd.grad(c.loss, [x])]


def mlm(n: int) -> list[Tensor]:
    x, labels = torch.randn(n, 50, requires_grad=True), torch.randint(50, (n,))
    labels[0] = -100
    loss = token_cross_entropy(x, labels)
    return [loss, *torch.autograd.grad(loss, [x])]


@pytest.mark.parametrize("objective", [info, pairs, mlm])
def test_compiled_they_are_the_same_by_two_compilations(
    objective: Callable[[int], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    real = torch.compile

    def counting(function: Callable[..., object]) -> Callable[..., object]:
        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
            nonlocal made
            made += 1
            return graph.forward

        return real(function, backend=backend)  # type: ignore[return-value]

    monkeypatch.setattr(torch, "compile", counting)
    # The compiled form is kept for good: that of this test has another backend.
    for name in ("info_nce", "pair_nce", "token_cross_entropy"):
        function = globals()[name]
        monkeypatch.setitem(globals(), name, precision.full_precision(function.__wrapped__))
    for n in (6, 8, 12, 16, 24):
        torch.manual_seed(n)
        want = objective(n)
        torch.manual_seed(n)
        with precision.compiled_objectives():
            got = objective(n)
        for mine, its in zip(got, want, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert 1 <= made <= 2


def _calls() -> dict[str, Callable[[], object]]:
    """Every objective with everything that it can be asked for, on tensors that are there already."""
    a, b, ids = torch.randn(6, 8), torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    tokens, labels, logits = torch.randint(9, (3, 7)), torch.randint(5, (6,)), torch.randn(6, 5)
    hashes = {"anchor_hashes": ids, "candidate_hashes": ids}
    hard = {"hard_negatives": b, "hard_negative_weight": 0.3, "hard_negative_hashes": ids}
    both = dict.fromkeys(hashes, (ids, ids))
    return {
        "info_nce": lambda: info_nce(a, b, 0.05, **hard, **hashes).loss,
        "pair_nce": lambda: pair_nce(a, b, 0.05, **hashes).loss,
        "bilingual_nce": lambda: bilingual_nce((a, b), (a, b), 0.05, within_language=False, **both)[0].loss,
        "mask bernoulli": lambda: mask_tokens(tokens, tokens > 2, 1, 9).labels,
        "mask exact": lambda: mask_tokens(tokens, tokens > 2, 1, 9, rule="exact").labels,
        "next tokens": lambda: next_tokens(tokens, (tokens > 2).long()),
        "cross-entropy": lambda: token_cross_entropy(logits, labels),
        "accuracy": lambda: token_accuracy(logits, labels),
        "ranking": lambda: ranking(a[:, 0], b[:, 0]),
        "angle": lambda: angle_similarity(a, b),
        "gist": lambda: (
            gist(
                (a, b, a),
                (a, b, a),
                (b, a, b),
                (b, a, b),
                0.1,
                margin=0.1,
                hashes=(ids, ids),
                candidate_hashes=(ids, ids, ids),
            ).loss
        ),
        "n negatives": lambda: (
            info_nce(
                a,
                b,
                0.05,
                **{
                    **hard,
                    "hard_negatives": torch.stack([b, a]),
                    "hard_negative_hashes": torch.stack([ids, ids]),
                },
                **hashes,
            ).loss
        ),
        "joint": lambda: (
            directed_nce(
                (a, b, a),
                (a, b, a),
                0.1,
                directions="joint",
                hardness="all",
                strength=2.0,
                hashes=(ids, ids),
                candidate_hashes=(ids, ids, ids),
            ).loss
        ),
        "multi-positive": lambda: multi_positive(a, b, ids, ids, 0.1, itself=ids[:, None] == ids + 1)[0].loss,
        "sigmoid": lambda: sigmoid(a, b, a[0, 0], b[0, 0], excluded=ids[:, None] == ids).loss,
        "margins": lambda: margin_mse(listed_scores(a, torch.stack([a, b, a])), a[:, :3]),
        "divergence": lambda: score_kl(listed_scores(a, torch.stack([a, b, a])), a[:, :3], 2.0),
        "pairs kept": lambda: pair_nce(a, b, 0.05, kept=ids > 0, **hashes).loss,
        "matryoshka": lambda: (
            nested(lambda d: info_nce(a[:, :d], b[:, :d], 0.05, **hashes), (8, 4), (1.0, 0.5)).loss
        ),
        "modulus": lambda: modulus_term(a, b, a, b),
        "modulus official": lambda: modulus_term(a, b, a, b, clamp="official"),
        **{
            f.__name__: lambda f=f: f(a) for f in (std, participation, variance_term, covariance_term, sigreg)
        },
        **{f.__name__: lambda f=f: f(a, b) for f in (squared_distance, cosine_distance)},
    }


@pytest.mark.parametrize("name", _calls())
def test_tensors_are_made_where_the_inputs_are(name: str) -> None:
    """The default is a device without values: one that is made there is seen, as it would be on a second card."""
    call = _calls()[name]
    with torch.device("meta"):
        result = call()
    assert isinstance(result, Tensor)
    assert result.device.type == "cpu"


def test_autocast_does_not_reach_them() -> None:
    a = torch.randn(8, 16)
    want = info_nce(a, a, 0.05).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(info_nce(a, a, 0.05).loss, want)


def test_a_compiled_objective_can_be_differentiated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """JTCSE asks for gradient norms and retains the graph, where another method before it did not."""
    monkeypatch.setattr(precision, "_compile", _without_inductor(precision._compile))
    again = precision.full_precision(pair_nce.__wrapped__)  # type: ignore[attr-defined]
    x = torch.randn(12, 16, requires_grad=True)
    with precision.compiled_objectives():
        again(x, x, 0.05).loss.backward()
        loss = again(x, x, 0.05).loss
    (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
    (second,) = torch.autograd.grad(loss, [x])
    assert torch.equal(first, second)


def _without_inductor(compile_: Callable[..., object]) -> Callable[..., object]:
    def made(objective: Callable[..., object]) -> object:
        with pytest.MonkeyPatch.context() as patch:
            real = torch.compile
            patch.setattr(torch, "compile", lambda f: real(f, backend="aot_eager"))
            return compile_(objective)

    return made


def test_the_device_is_that_of_vectors_in_a_sequence_too() -> None:
    there = torch.zeros(1, device="meta")
    for arguments in ([there], [(there, there)], [[there]], [1.0, (there,)]):
        assert precision._device(arguments) == "meta"
    assert precision._device([1.0, ()]) == "cpu"
