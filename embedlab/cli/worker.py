"""One rank of a run that `embedlab train` starts with torchrun.

`python -m embedlab.cli.worker CONFIG FOLDER WHOLE`, where WHOLE is the folder to resume in:
FOLDER, or that of the run of which this one is a stage.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from embedlab.cli.exits import guarded
from embedlab.cli.train import fit
from embedlab.config.read import read_values


def main(argv: list[str]) -> int:
    path, folder, whole = argv
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
    from embedlab.run.parse import parse_run

    values = read_values(Path(path))
    return fit(parse_run(values), Path(folder), Path(whole))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
