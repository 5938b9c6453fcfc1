"""Writes each sentence beside its negation, as method=sncse reads them (data=parallel).

    python tools/negations.py TEXT.txt OUT.tsv

SNCSE's own negations come from rules on spaCy's parses, with a prefix where no rule fits; here every sentence has the
prefix ("It is not true that ..."), which is a departure from the paper.
"""

from __future__ import annotations

import sys
from pathlib import Path

PREFIX = "It is not true that"


def negation(sentence: str) -> str:
    """A sentence's negation; a first word in capitals or with one inside, or "I", keeps its case."""
    first = sentence.split(" ", 1)[0]
    keeps = first == "I" or first.startswith("I'") or first[1:] != first[1:].lower()
    return f"{PREFIX} {sentence if keeps else sentence[:1].lower() + sentence[1:]}"


def main(arguments: list[str]) -> int:
    """Write the table; returns the exit status."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as table:
        table.write("sentence\tnegation\n")
        for line in lines:
            text = " ".join(line.split())
            if text:
                table.write(f"{text}\t{negation(text)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
