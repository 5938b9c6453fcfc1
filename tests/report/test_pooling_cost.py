"""What a pooling costs: the parameters that are printed are the modules', times are compared within a round."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.s2sent_cost import print_parameters
from embedlab.config.backbone import BackboneInfo
from embedlab.pooling import build_pooling
from embedlab.report import pooling_cost
from embedlab.report.pooling_cost import compare, parameters

BERT_BASE = BackboneInfo("encoder", 12, 768, 512, True, 0.1, "bert", True)


def of_pooling(**settings: object) -> int:
    with torch.device("meta"):
        return parameters(build_pooling(settings, BERT_BASE))


def test_the_specifications_integers() -> None:
    assert [of_pooling(name="s2sent", n=n, bias=False) for n in (1, 3, 6)] == [98_304, 196_608, 344_064]
    assert [of_pooling(name=name) for name in ("mean", "last_n")] == [0, 0]


def test_what_is_not_trained_counts_too() -> None:
    module = nn.Linear(3, 2).requires_grad_(False)
    assert parameters(module) == 8


def test_the_printed_numbers_are_those_of_the_modules(capsys: pytest.CaptureFixture[str]) -> None:
    print_parameters(768, 12)
    printed = re.findall(r"n=(\d): ([\d,]+) ([\d,]+)", capsys.readouterr().out)
    assert [(int(n), *(int(x.replace(",", "")) for x in counts)) for n, *counts in printed] == [
        (n, *(of_pooling(name="s2sent", n=n, r=12, bias=bias) for bias in (False, True))) for n in (1, 3, 6)
    ]


def test_the_shares_of_bert_base_are_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    """Table 2 prints 0.17 % for three blocks; by its own formula it is 0.18 %."""
    print_parameters(768, 12)
    assert "0.1796% of BERT-base, 0.1577% of RoBERTa-base; printed: 0.17 %, 0.15 %" in capsys.readouterr().out
    print_parameters(384, 12)
    assert "printed" not in capsys.readouterr().out


class Clock:
    """Time that passes only while an arm runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def arm(self, name: str, *seconds: float) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        """An arm whose passes take these times, in turn; the last one from then on."""
        left = list(seconds)

        def run() -> torch.Tensor:
            self.ran.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return torch.empty(0)

        return nn.Linear(2, len(name)), run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pooling_cost, "time", made)
    return made


def test_each_arm_is_first_in_turn_and_runs_once_before_it_counts(clock: Clock) -> None:
    compare({"a": clock.arm("a", 1), "b": clock.arm("b", 1), "c": clock.arm("c", 1)}, rounds=4, repeats=1)
    assert "".join(clock.ran) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_a_slow_round_slows_both_arms_and_not_their_ratio(clock: Clock) -> None:
    plain = clock.arm("plain", 99, 1, 1, 8, 1)  # the first pass of each is not counted
    gated = clock.arm("gated", 99, 2, 2, 16, 2)
    found = compare({"plain": plain, "gated": gated}, rounds=4, repeats=1)
    assert (found["gated"].ratio, found["gated"].spread) == (2, (2, 2))
    assert found["plain"].ratio == 1
    assert (found["plain"].seconds, found["gated"].seconds) == (1, 2)
    assert (found["plain"].parameters, found["gated"].parameters) == (15, 15)


def test_quartiles_are_those_of_the_rounds(clock: Clock) -> None:
    arms = {"a": clock.arm("a", 1), "b": clock.arm("b", 1, 1, 2, 3, 4, 5)}
    assert compare(arms, rounds=5, repeats=1)["b"].spread == (2, 4)
    assert compare(arms, rounds=1, repeats=3)["b"] == pooling_cost.Cost(3, 5, 5, (5, 5))


def test_the_device_is_waited_for_around_each_time(clock: Clock) -> None:
    def wait() -> None:
        clock.ran.append("|")

    compare({"a": clock.arm("a", 1), "b": clock.arm("b", 1)}, rounds=2, repeats=2, synchronise=wait)
    assert "".join(clock.ran) == "ab" + "|aa|" + "|bb|" + "|bb|" + "|aa|"
