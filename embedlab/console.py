"""What reaches a terminal: a line that all ranks have is said once, and other packages' loggers are kept silent."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedlab.errors import printable
from embedlab.files import locked


def markdown_text(text: str) -> str:
    """Text for a cell or a paragraph of Markdown, in which it opens no tag, code, link or cell."""
    text = re.sub(r"[\\|<`]", r"\\\g<0>", printable(text))
    return text.replace("](", "]\\(")


LEAF_SPEC = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""torch to Lightning, in every run: the pattern for `warnings.filterwarnings`."""


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Only the errors of the loggers `names` inside."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def show_log() -> None:
    """The log on stderr: of the first rank what is worth knowing, of the others their warnings."""
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")


SAID = "EMBEDLAB_SAID"
"""The variable that names the file, in the environment of ranks that one command has started."""


def say_once(line: str) -> None:
    """Print a line on stderr, unless another rank has."""
    path = os.environ.get(SAID)
    if path is not None:
        with locked(Path(path)), open(path, "a+", encoding="utf-8") as said:
            said.seek(0)
            if line in said.read().splitlines():
                return
            said.write(f"{line}\n")
    print(line, file=sys.stderr)
