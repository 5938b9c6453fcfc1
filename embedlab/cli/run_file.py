"""`embedlab train … --cli-config`: a composed configuration as the file for `embedlab fit --config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from embedlab.cli.compose import compose
from embedlab.errors import UserError

_FOLDER = "hydra.run.dir="


def print_run_file(argv: Sequence[str]) -> int:
    """Print the file; returns 0.

    Raises:
        UserError: the arguments compose to no run, or to a sweep.
    """
    from embedlab.cli.lightning_values import as_file
    from embedlab.run.parse import parse_run

    if sweep := next((a for a in argv if a in ("-m", "--multirun")), None):
        raise UserError(f"a file holds one run, and {sweep} asks for several", fix="--cli-config without it")
    values: dict[str, Any] = compose("train", [a for a in argv if not a.startswith("hydra.")])
    parse_run({k: v for k, v in values.items() if k not in ("stages", "stages_dir")})
    folder = next((a.removeprefix(_FOLDER) for a in reversed(argv) if a.startswith(_FOLDER)), None)
    command = " ".join(argv)
    print(f"# embedlab train {command}\n# Run it: embedlab fit --config FILE")
    print(yaml.safe_dump(as_file(values, folder), sort_keys=False, allow_unicode=True), end="")
    return 0
