"""Tokenising chunks of rows, in this process or in worker processes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.encoders.tokenization import Tokenization

FieldTokens = tuple[NDArray[Any], NDArray[np.int32], int]
"""The ids of all rows, one after the other; the tokens of each row; how many rows were cut."""
Tokens = list[FieldTokens]
"""Of each field."""


_AHEAD = 3  # chunks that wait for each worker, so that none is idle while this process writes
_PROCESSES = 16  # more only wait for this process, which reads, hashes and writes


@dataclass
class Chunk:
    """Some rows: where they came from, texts by role, the 64-bit hashes of these texts, and numeric columns."""

    tables: list[int]
    rows: list[int]
    groups: list[int]
    columns: list[list[str]]
    hashes: list[bytes]
    numbers: list[NDArray[Any]]


@dataclass(frozen=True)
class FieldJob:
    """How one field is made: from the texts of `role`, the column at `place`, as ids of `dtype`.

    `prompt` stands before every text. With `last` (the token that parts one text from the next) the rows are made for
    packing: whole texts without special tokens, and `last` after each.
    """

    role: str
    place: int
    tokenization: Tokenization
    dtype: str
    last: int | None = None
    prompt: str = ""

    def __call__(self, columns: list[list[str]]) -> FieldTokens:
        texts, cut = columns[self.place], 0
        if self.prompt:
            texts = [self.prompt + text for text in texts]
        if self.last is None:
            rows, shortened = self.tokenization.ids_and_cut(texts)
            cut = sum(shortened)
        else:
            rows = [[*ids, self.last] for ids in self._whole(texts)]
        lengths = np.fromiter(map(len, rows), np.int32, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.dtype(self.dtype), int(lengths.sum())), lengths, cut

    def _whole(self, texts: list[str]) -> list[list[int]]:
        from embedlab.encoders.text_normalization import TEXT_NORMALIZATIONS

        prepare = TEXT_NORMALIZATIONS[self.tokenization.preparation]
        return self.tokenization.plain_ids([prepare(text) for text in texts])


@dataclass(frozen=True)
class Tokeniser:
    """All fields of a chunk."""

    jobs: tuple[FieldJob, ...]

    @property
    def has_threads(self) -> bool:
        return all(getattr(job.tokenization.tokenizer, "is_fast", False) for job in self.jobs)

    def __call__(self, columns: list[list[str]]) -> Tokens:
        return [job(columns) for job in self.jobs]


def tokenised(
    chunks: Iterable[Chunk],
    tokeniser: Tokeniser,
    processes: int | None,
    alone: int,
    names: Sequence[str] = (),
) -> Generator[tuple[Chunk, Tokens]]:
    """Every chunk with its tokens, in order.

    Args:
        chunks: read only as far ahead as the workers need.
        tokeniser: applied to the columns of each.
        processes: worker processes; 1 for none: the tokenizer's own threads share the work, beside this
            process, which reads and writes. None: 1 for a tokenizer that has threads (they pass nothing through a
            pipe, and start at once), else as many as there are processors, up to 16.
        alone: chunks to do in this process before worker processes are started, which takes seconds.
        names: of the tables that rows came from.

    Raises:
        UserError: a text that is too long for the tokenizer, by its table and row.
    """
    chunks = iter(chunks)
    wanted = processes if processes is not None else 1 if tokeniser.has_threads else _processors()
    if wanted == 1:
        with ThreadPoolExecutor(1) as pool:
            yield from _in_order(chunks, tokeniser, pool, 1, names)
        return
    for chunk in islice(chunks, alone):
        with _placing(chunk, names):
            tokens = tokeniser(chunk.columns)
        yield chunk, tokens
    if (following := next(chunks, None)) is None:
        return
    # Not `multiprocessing`: a forked child of a process with threads (torch, tokenizers) can hang, a spawned one
    # runs the caller's main module again, and both outlive a parent that is killed. These workers read from a pipe,
    # which closes with the parent. Each belongs to a thread, which starts it.
    workers = [_Worker(tokeniser) for _ in range(wanted)]
    idle, own = iter(workers), threading.local()
    try:
        with ThreadPoolExecutor(wanted, initializer=lambda: setattr(own, "worker", next(idle))) as pool:
            yield from _in_order(
                chain([following], chunks), lambda columns: own.worker(columns), pool, wanted, names
            )
    finally:
        for worker in workers:
            worker.close()


def _in_order(
    chunks: Iterable[Chunk],
    call: Callable[[list[list[str]]], Tokens],
    pool: ThreadPoolExecutor,
    workers: int,
    names: Sequence[str],
) -> Generator[tuple[Chunk, Tokens]]:
    def answer(chunk: Chunk, result: Future[Tokens]) -> tuple[Chunk, Tokens]:
        with _placing(chunk, names):
            return chunk, result.result()

    waiting: deque[tuple[Chunk, Future[Tokens]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(call, chunk.columns)))
            if len(waiting) >= workers * _AHEAD:
                yield answer(*waiting.popleft())
        while waiting:
            yield answer(*waiting.popleft())
    finally:
        for _, result in waiting:
            result.cancel()


@contextmanager
def _placing(chunk: Chunk, names: Sequence[str]) -> Iterator[None]:
    """Puts table and row into an error about a text of a chunk."""
    try:
        yield
    except UserError as error:
        if error.index is not None and names:
            error.file, error.row = names[chunk.tables[error.index]], chunk.rows[error.index]
        raise


def _processors() -> int:
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(free, _PROCESSES)


class _Worker:
    def __init__(self, tokeniser: Tokeniser) -> None:
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "embedlab.data.tokenise"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._send(tokeniser)

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def __call__(self, columns: list[list[str]]) -> Tokens:
        assert self._process.stdout is not None
        try:
            self._send(columns)
            result = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            raise RuntimeError(
                f"a tokenising process ended with status {self._process.wait()}; data.processes=1 uses none"
            ) from None
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def main() -> None:
    """A worker process: ``python -m embedlab.data.tokenise``.

    Reads a pickled tokeniser from its standard input, then chunks of texts, and answers each on its standard output
    with arrays or with the exception. It ends when its input does, so never later than the process that started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not mix with the answers
    questions = sys.stdin.buffer
    tokeniser = pickle.load(questions)
    while True:
        try:
            columns = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = tokeniser(columns)
        except Exception as bad:
            answer = bad
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
