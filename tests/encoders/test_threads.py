"""Threads that encode with one encoder share its mode: dropout stays off until the last of them is done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import numpy as np
import pytest
import torch

import embedlab
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.twin import TwinEncoder
from embedlab.errors import UserError
from tests.support import SENTENCES


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_the_first_to_leave_does_not_turn_dropout_on(
    towers: int, training: bool, tiny: Callable[..., Path]
) -> None:
    several = [embedlab.load(tiny("bert", seed=seed, dropout=0.5)) for seed in range(towers)]
    encoder = several[0] if towers == 1 else TwinEncoder(several)
    expected = encoder.encode(list(SENTENCES))
    encoder.train(training)
    entered, first_is_done = Event(), Event()

    def wait(done: int, of: int) -> None:
        entered.set()
        assert first_is_done.wait(60)

    with ThreadPoolExecutor(1) as pool:
        # One sentence a forward: all but the first are encoded after the other thread has left.
        late = pool.submit(encoder.encode, list(SENTENCES), batch_size=1, on_batch=wait)
        assert entered.wait(60)
        early = encoder.encode(list(SENTENCES))
        first_is_done.set()
        found = late.result()
    np.testing.assert_allclose(early, expected, atol=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert encoder.training == training
    assert {m.training for m in encoder.modules()} == {training}


def test_modes_are_as_before_after_an_error_and_inside_of_another(tiny: Callable[..., Path]) -> None:
    encoder: SentenceEncoder = embedlab.load(tiny("bert"))
    encoder.train()
    encoder.backbone.eval()
    before = [m.training for m in encoder.modules()]

    def fail() -> None:
        with encoder.evaluating(None):
            with encoder.evaluating(None):
                assert not any(m.training for m in encoder.modules())
            assert not any(m.training for m in encoder.modules())
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [m.training for m in encoder.modules()] == before


class Moved(SentenceEncoder):
    """Says that it is where it was last sent; a CPU has no second device to go to."""

    place = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self.place

    def to(self, device: torch.device) -> Moved:  # type: ignore[override]
        self.place = device
        return self


def test_a_thread_waits_for_the_device_that_others_use(tiny: Callable[..., Path]) -> None:
    encoder: SentenceEncoder = embedlab.load(tiny("bert"))
    encoder.__class__ = Moved
    home, away = torch.device("cpu"), torch.device("meta")
    entered, go_on = Event(), Event()
    seen: list[tuple[str, torch.device]] = []

    def use(name: str, device: torch.device | None, *, hold: bool = False) -> None:
        with encoder.evaluating(device):
            seen.append((name, encoder.device))
            if hold:
                entered.set()
                assert go_on.wait(60)
                assert encoder.device == device
                with encoder.evaluating(None):
                    assert encoder.device == device

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(use, "first", away, hold=True)
        assert entered.wait(60)
        others = [pool.submit(use, "home", None), pool.submit(use, "home", home)]
        pool.submit(use, "beside", away).result()
        assert [name for name, _ in seen] == ["first", "beside"]
        go_on.set()
        for task in (first, *others):
            task.result()
    assert seen == [("first", away), ("beside", away), ("home", home), ("home", home)]
    assert encoder.device == home


def test_a_device_that_cannot_be_had_leaves_the_encoder_free(tiny: Callable[..., Path]) -> None:
    encoder: SentenceEncoder = embedlab.load(tiny("bert"))
    encoder.__class__ = type("Full", (Moved,), {"to": lambda self, device: 1 / 0})
    encoder.train()
    with pytest.raises(ZeroDivisionError), encoder.evaluating("meta"):
        pass
    assert encoder.training
    with encoder.evaluating(None):
        assert not encoder.training


@pytest.mark.parametrize("encoders", [1, 2, 3])
def test_threads_that_would_wait_for_each_other_are_told(encoders: int, tiny: Callable[..., Path]) -> None:
    """As many threads, each inside one encoder, go on to the next one's on another device."""
    several: list[SentenceEncoder] = [embedlab.load(tiny("bert", seed=seed)) for seed in range(encoders)]
    for encoder in several:
        encoder.__class__ = Moved
    threads = max(2, encoders)
    all_inside = Barrier(threads)

    def nest(number: int) -> str:
        with several[number % encoders].evaluating(torch.device("meta")):
            all_inside.wait(60)
            try:
                with several[(number + 1) % encoders].evaluating(torch.device("cpu")):
                    return "done"
            except UserError as error:
                return str(error.value)

    with ThreadPoolExecutor(threads) as pool:
        tasks = [pool.submit(nest, number) for number in range(threads)]
        assert sorted(task.result(60) for task in tasks) == ["cpu"] + ["done"] * (threads - 1)
    for encoder in several:
        assert encoder.device == torch.device("cpu")
        assert not encoder._users.threads
