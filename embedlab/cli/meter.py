"""How fast texts are encoded, and how long it will take: a bar on a terminal, lines now and then elsewhere.

`metered` is for files of texts, whose size says how many there are; `told` for an encoder that is used many times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

from embedlab.cli.encoders import Configured
from embedlab.console import Pace, has_bars, progress_bar, say
from embedlab.corpus.inputs import Texts
from embedlab.corpus.parts import Parts
from embedlab.distributed.devices import local_rank


class Meter:
    """Counts a process's texts and tokens, batch by batch.

    Args:
        texts: that are read.
        parts: that are written.
        worker, workers: this process of so many.

    Attributes:
        texts: that are read.
        count, tokens: encoded so far.
        position: how much of `texts.size` they are.
        pace: since when, and when a line is due.
    """

    def __init__(self, texts: Texts, parts: Parts, worker: int, workers: int) -> None:
        self.texts, self._part_rows, self._workers = texts, parts.manifest.part_rows, workers
        self._whole = {n: c.rows for n, c in parts.whole().items() if n % workers == worker}
        self.pace = Pace()
        self._before, self._at = 0, 0.0  # texts of earlier chunks, and where the last of them ended
        self.count = self.tokens = 0
        self._read_ahead = 0  # texts of this chunk that are not done
        self.position = 0.0

    def move(self, done: int, of: int, tokens: int) -> None:
        """So many texts of a chunk are done, and so many tokens in all."""
        self.count, self.tokens, self._read_ahead = self._before + done, tokens, of - done
        self.position = self._at + (self.texts.position - self._at) * done / of
        if done == of:
            self._before, self._at = self.count, self.position

    @property
    def left(self) -> float:
        """Seconds until this process's share is done, as far as what was read tells how much there is."""
        row = self.texts.row
        ahead = sum(rows for number, rows in self._whole.items() if number * self._part_rows > row)
        rows = (self.texts.expected - row) / self._workers - ahead
        return (max(0.0, rows) + self._read_ahead) * self.pace.seconds / max(1, self.count)

    def __str__(self) -> str:
        seconds = self.pace.seconds
        rates = f"{self.count / seconds:,.0f} texts/s, {self.tokens / seconds:,.0f} tokens/s"
        return f"{self.count:,} texts, {rates}, {timedelta(seconds=round(self.left))} left"


@contextmanager
def metered(encoder: Configured, meter: Meter, who: str = "") -> Iterator[Configured]:
    """The encoder, which tells after every batch how far it is; of a machine's processes the first one alone does.

    Args:
        encoder: encodes chunks of texts.
        meter: counts them.
        who: the process, at the end of a line.
    """
    model, first = encoder.encoder, local_rank() == 0
    read = model.tokens_read

    def on_batch(done: int, of: int) -> None:
        meter.move(done, of, model.tokens_read - read)
        move(meter.count, meter.position, f"{meter.tokens / meter.pace.seconds:,.0f} tokens/s")
        if first and meter.pace.is_due() and not has_bars():
            say(f"{meter}{who}")

    size = meter.texts.size
    with progress_bar("encoding", "texts", size, None if first else False, lines=False) as move:
        yield replace(encoder, arguments={**encoder.arguments, "on_batch": on_batch})


@contextmanager
def told(encoder: Configured, label: str) -> Iterator[Configured]:
    """The encoder, which on a terminal shows its own bars, and elsewhere tells how many texts it has encoded so far."""
    if has_bars():
        yield replace(encoder, arguments={**encoder.arguments, "show_progress_bar": True})
        return
    before = 0

    def on_batch(done: int, of: int) -> None:
        nonlocal before
        move(before + done, 0)
        before += of if done == of else 0

    with progress_bar(label, "texts encoded", 0) as move:
        yield replace(encoder, arguments={**encoder.arguments, "on_batch": on_batch})
