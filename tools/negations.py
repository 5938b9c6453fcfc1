"""Writes each sentence beside its negation, as method=sncse reads them (data=parallel).

    python tools/negations.py [--released] TEXT.txt OUT.tsv

SNCSE's own negations come from rules on spaCy's parses, with a prefix where no rule fits; here every sentence has the
prefix ("It is not true that ..."), which is a departure from the paper. With --released the prefix is the release's
("Not", before the sentence as it is), and every text ends in a punctuation mark, as there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from string import punctuation

PREFIX = "It is not true that"


def negation(sentence: str) -> str:
    """A sentence's negation; a first word in capitals or with one inside, or "I", keeps its case."""
    first = sentence.split(" ", 1)[0]
    keeps = first == "I" or first.startswith("I'") or first[1:] != first[1:].lower()
    return f"{PREFIX} {sentence if keeps else sentence[:1].lower() + sentence[1:]}"


def released(sentence: str) -> tuple[str, str]:
    """A sentence and its negation as SNCSE's script has them where it has stored none."""
    closed = sentence if sentence[-1] in punctuation else f"{sentence} ."
    return closed, f"Not {closed}"


def main(arguments: list[str]) -> int:
    """Write the table; returns the exit status."""
    as_released = arguments[:1] == ["--released"]
    arguments = arguments[as_released:]
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as table:
        table.write("sentence\tnegation\n")
        for line in lines:
            text = " ".join(line.split())
            if text:
                pair = released(text) if as_released else (text, negation(text))
                table.write("\t".join(pair) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
