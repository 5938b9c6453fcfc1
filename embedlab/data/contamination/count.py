"""How much of evaluation sets stands in tables of training text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from embedlab.data.contamination.overlap import HeldOut, Hit, Overlap
from embedlab.data.reader import Reader

_ROWS = 2048
EXAMPLES = 10


class _Tally:
    """What was met so far."""

    def __init__(self, sets: Sequence[HeldOut]) -> None:
        self.sets = sets
        self.seen: list[dict[int, bool]] = [{} for _ in sets]  # text -> whether one was equal to it
        self.pairs = [dict.fromkeys(held.pairs, False) for held in sets]
        self.roles: dict[str, Counter[str]] = {}
        self.examples: list[dict[str, Any]] = []
        self._mates = [_mates(held.pairs) for held in sets]

    def add(self, place: tuple[str, int], cells: Sequence[tuple[str, str]], hits: list[list[Hit]]) -> None:
        """One row: its file and number, its texts with their columns, and what each holds."""
        for (name, cell), some in zip(cells, hits, strict=True):
            counts = self.roles.setdefault(name, Counter(texts=0, hit=0))
            counts.update(texts=1, hit=int(bool(some)))
            for hit in some:
                known, held = self.seen[hit.held], self.sets[hit.held]
                if hit.text not in known and len(self.examples) < EXAMPLES:
                    where = {
                        "set": held.name,
                        "file": place[0],
                        "row": place[1],
                        "role": name,
                        "equal": hit.equal,
                    }
                    self.examples.append({**where, "text": cell, "evaluation_text": held.texts[hit.text]})
                known[hit.text] = known.get(hit.text, False) or hit.equal
        here = {(hit.held, hit.text) for some in hits for hit in some}
        for h, t in here:
            for pair in self._mates[h].get(t, ()):
                self.pairs[h][pair] |= all((h, side) in here for side in pair)

    def of_set(self, h: int) -> dict[str, Any]:
        """The counts of one set."""
        held = self.sets[h]
        return {
            "suite": held.suite, "set": held.name, "texts": len(held.texts), "hit": len(self.seen[h]),
            "equal": sum(self.seen[h].values()), "pairs": len(held.pairs),
            "both": sum(self.pairs[h][pair] for pair in held.pairs),
        }  # fmt: skip


def contamination(
    readers: Sequence[Reader],
    overlap: Overlap,
    columns: Sequence[str] | None = None,
    told: Callable[[int, float], None] = lambda rows, position: None,
) -> dict[str, Any]:
    """Read tables and count what they hold of evaluation sets.

    Args:
        readers: of the tables; columns that hold neither text nor lists of it are left out.
        overlap: what is looked for.
        columns: to read, for messages the key is ``columns``; None: all.
        told: is called with rows read and how much of all files that is.

    Returns: ``n``, ``rows`` and ``rows_hit``; ``files`` and ``roles`` (columns): rows or texts, and those that are hit;
    ``sets``: texts of each set, those that were met (``hit``, and ``equal`` of them whole), its pairs, and ``both``:
    those of which one row holds both sides; ``examples``: the first `EXAMPLES` texts that were met.

    Raises:
        UserError: a column that is not there, a file that cannot be read.
    """
    tally = _Tally(overlap.sets)
    files: list[dict[str, Any]] = []
    rows = read = 0
    for reader in readers:
        of_file = Counter(rows=0, hit=0)
        for some in _chunks(reader, columns):
            found = iter(overlap.find([text for _, cells in some for _, text in cells]))
            for number, cells in some:
                hits = list(islice(found, len(cells)))
                of_file.update(rows=1, hit=int(any(hits)))
                tally.add((reader.name, number), cells, hits)
            told(rows + of_file["rows"], read + reader.position)
        rows, read = rows + of_file["rows"], read + reader.size
        files.append({"file": reader.name, **of_file})
    return {
        "n": overlap.n,
        "rows": rows,
        "rows_hit": sum(one["hit"] for one in files),
        "files": files,
        "roles": {name: dict(counts) for name, counts in tally.roles.items()},
        "sets": [tally.of_set(h) for h in range(len(overlap.sets))],
        "examples": tally.examples,
    }


def _mates(pairs: Sequence[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for pair in dict.fromkeys(pairs):
        for side in set(pair):
            found.setdefault(side, []).append(pair)
    return found


def _chunks(
    reader: Reader, columns: Sequence[str] | None
) -> Iterator[list[tuple[int, list[tuple[str, str]]]]]:
    """Some rows of a table at a time: number, and each text with its column."""
    there = reader.columns
    names = list(columns or there or ["text"])
    for name in names:
        if there is not None and name not in there:
            raise reader.error(
                f"has the columns {reader.listed()}", key="columns", value=name, fix="columns=[NAME]"
            )
    rows = reader.rows(names)
    while some := list(islice(rows, _ROWS)):
        yield [
            (
                number,
                [(name, text) for name, value in zip(names, values, strict=True) for text in _texts(value)],
            )
            for number, values in some
        ]


def _texts(value: Any) -> list[str]:
    """The texts of a cell, which may be a list of them."""
    several = value if isinstance(value, list) else [value]
    return [text for text in several if isinstance(text, str) and text]
