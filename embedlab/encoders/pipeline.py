"""Texts to vectors, a window of texts at a time: a thread tokenises the next one while this one is encoded, and
vectors come back from a card while it goes on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embedlab.encoders.token_rows import TokenRows
from embedlab.encoders.tokenization import AT_ONCE, Tokenization
from embedlab.encoders.windows import ROWS, numbered, windows
from embedlab.errors import UserError
from embedlab.kernels.available import SHORT_LONGEST
from embedlab.kernels.packed_rows import PackedRows, pack

S = TypeVar("S")
T = TypeVar("T")
Numbers = NDArray[np.int64]
"""Of rows."""

_AUTO_TOKENS = {"cpu": 2048, "cuda": 65536}  # a padded forward; larger ones fall out of a CPU core's cache
_FEATURES = 1 << 26  # of a packed forward's hidden states: fewer, and a card waits for the host's launches
_SLOTS = (16384, 131072)  # of a packed forward, whatever the width
_OVER = 0.25  # part of a packed forward's tokens that it may have beyond them, as two small ones cost the host more
_AHEAD = 3  # windows that are tokenised before they are asked for
_BEHIND = 2  # batches whose vectors are on their way to the host
_FEW = 64  # texts that are not worth a thread
_THREADS = {
    "cuda": 2
}  # that tokenise, by device, else 1: the library's own threads rest while Python takes the ids
_WINDOWS = {"cuda": (8192, 1 << 21)}  # texts and bytes of a window, by device
_FIRST = {"cuda": 8}  # part of them that the first window has: a device waits for it


class Reader(NamedTuple):
    """How an encoder reads packed rows.

    Attributes:
        vectors: rows [R] to their vectors [R, `dim` of the pooling].
        longest: tokens of the longest row that can be read.
        offset: the position of a row's first token.
    """

    vectors: Callable[[PackedRows], Tensor]
    longest: int
    offset: int


class Encodes(Protocol):
    """What is asked of an encoder."""

    tokenization: Tokenization

    @property
    def device(self) -> torch.device: ...
    @property
    def dim(self) -> int: ...
    def reader(self, skip: int) -> Reader | None: ...
    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Tensor: ...


class Window(NamedTuple):
    """Rows to encode.

    Attributes:
        tokens: the rows.
        places: [n], which row of the result each one's vector is.
        texts: that are done with this window.
    """

    tokens: TokenRows
    places: NDArray[np.int64]
    texts: int


class DistinctRows:
    """The rows of texts, those of the same tokens once: repeats, and for an uncased tokenizer what differs in case.

    Args:
        tokenization: of the texts.
        texts: any number.
        device: that will encode them.

    Attributes:
        repeats: once all windows are taken: texts whose vector is that of an earlier one, and which.
    """

    def __init__(self, tokenization: Tokenization, texts: Sequence[str], device: torch.device) -> None:
        self.tokenization = tokenization
        rows, size = _WINDOWS.get(device.type, (ROWS, AT_ONCE))
        self.windows = windows(texts, rows, size, first=_FIRST.get(device.type, 1))
        self.threads = _THREADS.get(device.type, 1) if len(texts) > _FEW else 0
        tokenization.plain_ids(
            []
        )  # a truncation that the tokenizer may have is taken away before threads read it
        self.repeats: tuple[list[int], list[int]] = ([], [])

    def __iter__(self) -> Generator[Window]:
        first: dict[bytes, int] = {}
        done = 0
        tokenise = self.tokenization.tokenise
        for tokens in ahead(lambda item: tokenise(item[1], item[0]), numbered(self.windows), self.threads):
            places = [first.setdefault(key, place) for place, key in enumerate(tokens.as_bytes(), done)]
            found = np.array(places)
            own = np.arange(done, done + len(found))
            new = found == own
            self.repeats[0].extend(own[~new].tolist())
            self.repeats[1].extend(found[~new].tolist())
            done += len(found)
            yield Window(tokens if new.all() else tokens.take(new), own[new], done)

    def spread(self, vectors: Tensor) -> Tensor:
        """Give the repeats their vectors, in place."""
        if self.repeats[0]:
            to, of = (torch.tensor(x, device=vectors.device) for x in self.repeats)
            vectors[to] = vectors[of]
        return vectors


def ahead(call: Callable[[S], T], items: Iterable[S], threads: int) -> Iterator[T]:
    """What `call` makes of `items`, in their order, a few of them by threads before they are asked for."""
    if not threads:
        yield from map(call, items)
        return
    with ThreadPoolExecutor(threads, "ahead") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(call, item))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def padded_batches(
    lengths: Sequence[int] | Numbers, size: int | None, tokens: int | None, device: torch.device
) -> Iterator[Numbers]:
    """Row numbers of similar lengths, longest first: what does not fit into memory fails at once.

    Args:
        lengths: of the rows.
        size: rows of a batch.
        tokens: instead: of a batch, padding included; None of both: what suits the device.
        device: that encodes them.
    """
    if size is None and tokens is None:
        tokens = _AUTO_TOKENS.get(device.type, _AUTO_TOKENS["cpu"])
    lengths = np.asarray(lengths)
    order, at = (-lengths).argsort(kind="stable"), 0
    while at < len(order):
        longest = max(1, int(lengths[order[at]]))
        n = size if size is not None else max(1, (tokens or 0) // longest)
        yield order[at : at + n]
        at += n


def packed_batches(
    lengths: Numbers, size: int | None, tokens: int | None, width: int = 768
) -> Iterator[Numbers]:
    """Row numbers of similar lengths, longest first, in equal batches; `size` and `tokens` as of `padded_batches`.

    Without them a batch has about as many tokens as suit vectors of `width` features.

    Rows of over `SHORT_LONGEST` tokens are apart from the others: another kernel attends to them.
    """
    order = (-lengths).argsort(kind="stable")
    long = int((lengths > SHORT_LONGEST).sum())
    most = tokens or min(max(_FEATURES // width, _SLOTS[0]), _SLOTS[1])
    for part in (order[:long], order[long:]):
        if size is not None:
            cuts: Any = np.arange(size, len(part), size)
        else:
            ends = lengths[part].cumsum()
            over = 0 if tokens else _OVER
            n = max(1, math.ceil(ends[-1] / most - over)) if len(part) else 1
            cuts = np.unique(ends.searchsorted(np.arange(1, n) * (ends[-1] / n))) if n > 1 else []
        yield from (batch for batch in np.split(part, cuts) if len(batch))


class Encoding:
    """One run of an encoder, in evaluation mode, over windows of rows.

    Args:
        encoder: any.
        out: [n, D], gets the vectors; on the encoder's device or on the CPU.
        size, tokens: of a batch, as of `padded_batches`.
        normalize: vectors to length 1.
        skip: tokens at the start of each row that the pooling leaves out.

    Raises:
        UserError: a size below 1.
    """

    def __init__(
        self, encoder: Encodes, out: Tensor, size: int | None, tokens: int | None, normalize: bool, skip: int
    ) -> None:
        if size is not None and size < 1:
            fix = "batch_size=64, or null"
            raise UserError("not a whole number from 1 up", key="batch_size", value=size, fix=fix)
        self.encoder, self.out = encoder, out
        self.size, self.tokens = size, tokens
        self.normalize, self.skip = normalize, skip
        self.tokens_read = 0
        self.device = encoder.device
        self._reader = encoder.reader(skip)
        # On the host NumPy takes the rows: index_copy_ has threads, which would wait for the tokenizer's.
        self._rows = np.empty(0) if out.is_cuda else out.numpy()
        self._waiting: deque[tuple[Numbers, Tensor, torch.cuda.Event]] = deque()

    def __call__(self, windows: Iterable[Window], texts: int) -> Iterator[int]:
        """Encode windows of so many texts; the number of these that are done, after each batch."""
        before = done = 0
        for window in windows:
            encoded, lengths = 0, window.tokens.lengths
            for rows, vectors in self._vectors(window.tokens):
                vectors = vectors.float()[:, : self.out.shape[1]]
                if self.normalize:
                    vectors = nn.functional.normalize(vectors, dim=-1)
                self._put(window.places[rows], vectors)
                encoded += len(rows)
                self.tokens_read += int(lengths[rows].sum())
                done = before + (window.texts - before) * encoded // len(window.places)
                yield done
            before = window.texts
        while self._waiting:
            self._land()
        if done < texts:  # the last ones repeat others
            yield texts

    def _vectors(self, tokens: TokenRows) -> Iterator[tuple[Numbers, Tensor]]:
        lengths, reader = tokens.lengths, self._reader
        fits = lengths <= (-1 if reader is None else reader.longest)
        yield from self._padded(tokens, np.flatnonzero(~fits))
        if reader is None:
            return
        packed = np.flatnonzero(fits)
        for batch in packed_batches(lengths[packed], self.size, self.tokens, self.encoder.dim):
            rows = packed[batch]
            packed_rows = pack(
                tokens.ids, tokens.bounds, rows, self.device, self.encoder.tokenization.pad_id, reader.offset,
                self.skip,
            )  # fmt: skip
            yield rows, reader.vectors(packed_rows)[: len(rows)]

    def _padded(self, tokens: TokenRows, chosen: Numbers) -> Iterator[tuple[Numbers, Tensor]]:
        multiple = 8 if self.device.type == "cuda" else 1
        options: dict[str, Any] = {"skip": self.skip} if self.skip else {}
        for batch in padded_batches(tokens.lengths[chosen], self.size, self.tokens, self.device):
            rows = chosen[batch]
            found = self.encoder.tokenization.pad([tokens.row(i) for i in rows], multiple)
            inputs = (_sent(found[k], self.device) for k in ("input_ids", "attention_mask"))
            yield rows, self.encoder(*inputs, **options)

    def _put(self, places: Numbers, vectors: Tensor) -> None:
        """Put vectors into their rows of the result; those for the host once they are there."""
        if self.out.is_cuda:
            index = _sent(torch.from_numpy(places), self.out.device)
            self.out.index_copy_(0, index, vectors.to(self.out.device))
            return
        if not vectors.is_cuda:
            self._rows[places] = vectors.cpu().numpy()
            return
        host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
        host.copy_(vectors, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(vectors.device))
        self._waiting.append((places, host, event))
        if len(self._waiting) > _BEHIND:
            self._land()

    def _land(self) -> None:
        places, host, event = self._waiting.popleft()
        event.synchronize()
        self._rows[places] = host.numpy()


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On a device; the host does not wait for a card."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
