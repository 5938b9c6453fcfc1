"""``embedlab benchmark ckpt=…``: how long an encoder takes, as a table and as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embedlab.cli.compose import compose
from embedlab.cli.encoders import check_device, load_encoder, named, placed
from embedlab.console import print_table
from embedlab.errors import UserError, one_of
from embedlab.files import check_absent, check_writable, write_whole

_LEAST = {"batch_size": 1, "length": 8, "threads": 1}
_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
_LIST = re.compile(r"((?:format|batch_size|length|threads))=([^\[\]{}'\"]+,[^\[\]{}'\"]*)")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    # Hydra reads a comma outside brackets as a sweep.
    config = compose("benchmark", [_LIST.sub(r"\1=[\2]", argument) for argument in argv])
    formats, numbers = _formats(config["format"]), {key: _numbers(config, key) for key in _LEAST}
    if config["out"] is not None:
        check_absent(Path(str(config["out"])), config["overwrite"])
        check_writable(Path(str(config["out"])))
    if type(config["calls"]) is not int or config["calls"] < 1:
        raise UserError("not a whole number", key="calls", value=config["calls"], fix="1 or more")

    ckpt = named(config["ckpt"])
    place = placed(ckpt)
    device = check_device(config["device"])
    encoder = load_encoder(place, config["max_length"], dim=config["dim"])

    import torch

    from embedlab.export.latency import latency_table, measure, record

    rows = []
    threads = numbers["threads"] or [torch.get_num_threads()]
    for row in measure(
        encoder, formats, numbers["batch_size"], numbers["length"], threads, config["calls"], device
    ):
        rows.append(row)
        print(
            f"{row.format}, {row.threads} threads, {row.batch_size} x {row.length}: {row.p50} ms",
            file=sys.stderr,
        )
    print_table(latency_table(rows))
    if config["out"] is not None:
        content = record(rows, encoder, ckpt, config["calls"])
        write_whole(Path(str(config["out"])), json.dumps(content, indent=2) + "\n")
        print(f"Latency: {config['out']}")
    return 0


def _formats(given: Any) -> list[str]:
    known = ("torch", "onnx", "onnx-int8")
    formats = [str(form) for form in (given if isinstance(given, list) else [given])]
    for form in formats:
        if form not in known:
            raise UserError("no such format", key="format", value=form, fix=one_of(form, known))
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing and formats != ["torch"]:
        raise UserError(
            f"{missing[0]} is not installed", key="format", value=",".join(formats),
            fix="pip install 'embedlab[onnx]', or format=torch",
        )  # fmt: skip
    return formats


def _numbers(config: dict[str, Any], key: str) -> list[int]:
    given = config[key]
    numbers = [] if given is None else given if isinstance(given, list) else [given]
    for number in numbers:
        if type(number) is not int or number < _LEAST[key]:
            raise UserError("not a whole number", key=key, value=number, fix=f"{_LEAST[key]} or more")
    if not numbers and key != "threads":
        raise UserError("no number is given", key=key, fix=f"{key}=32")
    return numbers
