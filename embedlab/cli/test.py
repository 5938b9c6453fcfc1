"""`embedlab test --config FILE` (`lightning_cli`)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from embedlab.cli.exits import guarded


def main(argv: Sequence[str]) -> int:
    from embedlab.cli import lightning_cli

    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
    return lightning_cli.main("test", argv)


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
