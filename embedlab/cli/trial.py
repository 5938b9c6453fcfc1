"""One trial of a sweep in its own process: `python -m embedlab.cli.trial CONFIG FOLDER`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import yaml

from embedlab.cli.exits import guarded
from embedlab.cli.train import train_one


def main(argv: list[str]) -> int:
    path, folder = argv
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
    return train_one(yaml.safe_load(Path(path).read_text(encoding="utf-8")), Path(folder))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
