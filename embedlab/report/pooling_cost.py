"""What a pooling costs beside another: parameters, and latency as a ratio within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from embedlab.kernels.capture import capturing

Encode = Callable[[], Tensor]


@dataclass(frozen=True)
class Cost:
    """Of one pooling.

    Args:
        parameters: of the pooling.
        seconds: median of one forward pass, backbone included.
        ratio: median over rounds of its time over the plain pooling's in the same round.
        spread: lower and upper quartile of these ratios.
    """

    parameters: int
    seconds: float
    ratio: float
    spread: tuple[float, float]


def parameters(module: nn.Module) -> int:
    """Number of a module's parameters, trained or not."""
    return sum(p.numel() for p in module.parameters())


def compare(
    arms: Mapping[str, tuple[nn.Module, Encode]],
    rounds: int = 30,
    repeats: int = 10,
    synchronise: Callable[[], None] = lambda: None,
) -> dict[str, Cost]:
    """Time several arms against the first, interleaved: machines drift by more than the difference in question.

    Args:
        arms: name to (pooling, one forward pass of backbone and pooling). The first is the plain one.
        rounds: each arm once a round, in turn first.
        repeats: passes in a row for one time.
        synchronise: waits for the device.

    Returns: the cost of each arm; times in seconds.
    """
    for _, encode in arms.values():
        encode()
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for start in range(rounds):
        first = start % len(names)
        for name in names[first:] + names[:first]:
            synchronise()
            begun = time.perf_counter()
            for _ in range(repeats):
                arms[name][1]()
            synchronise()
            times[name].append((time.perf_counter() - begun) / repeats)
    found = {}
    for name in names:
        ratios = [t / plain for t, plain in zip(times[name], times[names[0]], strict=True)]
        low, middle, high = (float(q) for q in np.quantile(ratios, [0.25, 0.5, 0.75]))
        found[name] = Cost(parameters(arms[name][0]), statistics.median(times[name]), middle, (low, high))
    return found


def captured(encode: Encode) -> Encode:
    """The same pass as a CUDA graph: the time of the device, without that of starting kernels one by one.

    Args:
        encode: one pass on CUDA, whose input tensors stay where they are.

    Returns: the pass, replayed; its result is written over by the next one.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            encode()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        result = encode()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
