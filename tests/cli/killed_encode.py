"""`embedlab encode` killed at lines that are drawn, and started again: run by `tests.cli.test_encode_parts`.

    python -m tests.cli.killed_encode CKPT SOURCE HOME KIND SEED

KIND is a suffix (a single file is killed three times), ``shards`` (three shards are killed, others go on) or
``together`` (two processes at one shard). Prints what was found as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow.parquet  # noqa: F401

import embedlab
from embedlab.cli.main import main

PACKAGE = Path(embedlab.__file__).parent
ROOMS = ("files", "locks", "corpus/parts", "corpus/encode", "corpus/vector_files", "cli/encode")
FILES = {str(PACKAGE / f"{name}.py") for name in ROOMS}


def start(argv: list[str], kill_at: int | None = None) -> tuple[int, int]:
    """A command in a process of its own, killed at its `kill_at`-th line of `FILES`: its number and a pipe's end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        lines += event == "line"
        if lines == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.settrace(trace)
    status = main(argv)
    sys.settrace(None)
    os.write(writing, json.dumps([status, lines]).encode())
    os._exit(0)


def wait(started: tuple[int, int]) -> list[int]:
    """Exit status and lines; a status of -9 where it was killed."""
    child, reading = started
    with os.fdopen(reading) as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(said) if code == 0 else [code, 0]


def seen(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def whole(folder: Path, reference: dict[str, bytes]) -> bool:
    """Whether each file that a reader sees is that of a run that nobody touched."""
    found = (
        {name: data for name, data in seen(folder).items() if not name.startswith(".")}
        if folder.is_dir()
        else {}
    )
    return found.items() <= reference.items()


def shards(command: list[str], home: Path, draw: random.Random) -> list[Any]:
    """Three shards, each killed; then n others, each killed; then all of one that does the rest."""
    reference = home / "reference"
    _, lines = wait(start([*command, f"{reference}/"]))
    wanted, found = seen(reference), []
    for trial in range(2):
        out, kills = home / f"out{trial}", 0
        for n in (3, draw.choice((1, 2, 4))):
            for shard in range(n):
                kill_at = draw.randrange(lines // n)
                kills += wait(start([*command, f"{out}/", f"shard={shard}/{n}"], kill_at))[0] == -9
                found.append(whole(out, wanted))
        status, _ = wait(start([*command, f"{out}/"]))
        found.append(status == 0 and kills >= 3 and seen(out) == wanted)
    return found


def single(command: list[str], home: Path, draw: random.Random, suffix: str) -> list[Any]:
    """One file, killed three times before it is left alone; once the old output is there."""
    reference = home / f"reference{suffix}"
    _, lines = wait(start([*command, str(reference)]))
    found = []
    for trial in range(2):
        out = home / f"trial{trial}" / f"a{suffix}"
        out.parent.mkdir()
        replaces = ["overwrite=true"] if trial % 2 else []
        if trial % 2:
            out.write_bytes(b"old")
        for _ in range(3):
            status, _ = wait(start([*command, str(out), *replaces], draw.randrange(lines)))
            content = out.read_bytes() if out.exists() else b"old"
            found.append(content == reference.read_bytes() or (content == b"old" and status == -9))
        status, _ = wait(start([*command, str(out), *replaces]))
        found.append(status == 0 and seen(out.parent) == {out.name: reference.read_bytes()})
    return found


def together(command: list[str], home: Path) -> list[Any]:
    """Two processes at the same shard at the same time, and two more at all."""
    reference = home / "reference"
    wait(start([*command, f"{reference}/"]))
    out = f"{home / 'out'}/"
    arguments = ["shard=0/2"], ["shard=0/2"], [], ["shard=1/2"]
    statuses = [wait(s)[0] for s in [start([*command, out, *more]) for more in arguments]]
    return [statuses == [0] * 4, seen(home / "out") == seen(reference)]


if __name__ == "__main__":
    ckpt, source, home, kind, seed = sys.argv[1:]
    embedlab.load(ckpt)  # what is imported here no child imports again
    told = ["encode", source, f"ckpt={ckpt}", "chunk=8", "device=cpu"]
    draw = random.Random(int(seed))
    if kind == "shards":
        print(json.dumps(shards([*told, "part_rows=20"], Path(home), draw)))
    elif kind == "together":
        print(json.dumps(together([*told, "part_rows=20"], Path(home))))
    else:
        from embedlab.cli import encode

        encode._KEPT = 16
        print(json.dumps(single(told, Path(home), draw, kind)))
