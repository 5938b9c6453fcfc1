"""One trial of a sweep in its own process: `python -m embedlab.cli.trial CONFIG FOLDER`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from embedlab.cli.exits import guarded
from embedlab.cli.train import train_one
from embedlab.config.read import read_values


def main(argv: list[str]) -> int:
    path, folder = argv
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
    return train_one(read_values(Path(path)), Path(folder))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
