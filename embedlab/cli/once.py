"""What every rank of a run would say, said by the first one: the ranks share a file of what has been said."""

from __future__ import annotations

import fcntl
import os
import sys

SAID = "EMBEDLAB_SAID"
"""The variable that names the file, in the environment of ranks that one command has started."""


def say_once(line: str) -> None:
    """Print a line on stderr, unless another rank has."""
    path = os.environ.get(SAID)
    if path is not None:
        with open(path, "a+", encoding="utf-8") as said:
            fcntl.flock(said, fcntl.LOCK_EX)
            said.seek(0)
            if line in said.read().splitlines():
                return
            said.write(f"{line}\n")
    print(line, file=sys.stderr)
