"""Vectors of the same rows at every scoring: in a captured run by one CUDA graph, on the CPU padded once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from embedlab.engine.cuda_graph import CapturedStep, StepGraphs
from embedlab.engine.module import Method
from embedlab.engine.whole_step import packs
from embedlab.kernels.available import kernel_options
from embedlab.kernels.capture import capturing

log = logging.getLogger(__name__)

_GRAPH_TOKENS = 4096
"""Of a forward in a graph, where launches cost little: short rows are then padded to short neighbours."""


class DevEncoder:
    """A method's encoder over rows that stay the same, as `SentenceEncoder.encode_ids` would encode them.

    Args:
        method: whose encoder it is.
        rows: token ids, of `Tokenization.ids`.
        batch_tokens: tokens a forward, padding included.

    Once there is a captured step, all forward passes are one graph, on the weights that the step computes with, and
    without padding where the step leaves it out (`KernelOptions.dev_graph`). Another step's encoder on a card encodes
    them as any others, which leaves out padding too.
    """

    def __init__(self, method: Method, rows: Sequence[Sequence[int]], batch_tokens: int) -> None:
        self.method = method
        encoder = method.encoder
        self.device = encoder.device
        cuda = self.device.type == "cuda"
        self._capturable = cuda and isinstance(method.runner, CapturedStep) and kernel_options().dev_graph
        lengths = [len(r) for r in rows]
        self._packs = self._capturable and packs(method, max(lengths, default=1))
        padded = self._capturable and not self._packs
        tokens_at_once = min(batch_tokens, _GRAPH_TOKENS) if padded else batch_tokens
        self._rows, self._tokens = rows, batch_tokens
        self._batches: list[tuple[Tensor, Tensor, Tensor, int]] = []
        for batch in encoder.batches(lengths, None, tokens_at_once) if self._capturable or not cuda else ():
            tokens = encoder.tokenization.pad([rows[i] for i in batch], 8 if cuda else 1)
            parts = (torch.tensor(batch), tokens["input_ids"], tokens["attention_mask"])
            index, ids, mask = (t.to(self.device) for t in parts)
            self._batches.append((index, ids, mask, sum(lengths[i] for i in batch)))
        self._out = torch.empty(len(rows), encoder.dim, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._step: StepGraphs | None = None

    def __call__(self) -> Tensor:
        """Vectors of the encoder as it is now, ``[n, D]``, fp32, in the order of the rows."""
        runner = self.method.runner
        step = runner.work if self._capturable and isinstance(runner, CapturedStep) else None
        if isinstance(step, StepGraphs):
            if step is not self._step:
                self._graph, self._step = self._capture(step), step
            if self._graph is not None:
                step.refresh()
                with _same_randomness(self.device):  # some kernels draw a seed though nothing is dropped
                    self._graph.replay()
                return self._out.clone()
        if self.device.type == "cuda":
            return self.method.encoder.encode_ids(self._rows, batch_tokens=self._tokens)
        with self.method.encoder.evaluating(None):
            self._encode()
        return self._out.clone()

    def _encode(self, packed: bool = False) -> None:
        for index, ids, mask, tokens in self._batches:
            vectors = self.method.encoder(ids, mask, tokens if packed else None)
            self._out.index_copy_(0, index, vectors.float())

    def _capture(self, step: StepGraphs) -> torch.cuda.CUDAGraph | None:
        """The graph of all forward passes; None where one cannot be captured, which the log says."""
        arguments, graph = step.capture_arguments, torch.cuda.CUDAGraph()
        stream = arguments["stream"]
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with _same_randomness(self.device), self.method.encoder.evaluating(None), step.scoring():
                with torch.cuda.stream(stream):
                    self._encode(self._packs)
                torch.cuda.current_stream().wait_stream(stream)
                with capturing(graph, **arguments):
                    self._encode(self._packs)
        except RuntimeError as error:
            torch.cuda.synchronize()
            log.warning("Scoring while training runs without a CUDA graph: %s", str(error).partition("\n")[0])
            return None
        return graph


@contextmanager
def _same_randomness(device: torch.device) -> Iterator[None]:
    """The device's generator is afterwards as it was before."""
    state = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        torch.cuda.set_rng_state(state, device)
