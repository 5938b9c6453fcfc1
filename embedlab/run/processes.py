"""Processes that a command starts: the ranks of a run on one machine, and the trials of a sweep."""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.console import SAID, say_once
from embedlab.distributed.devices import device_count, launched
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.config.run import RunConfig

log = logging.getLogger(__name__)
Process = subprocess.Popen[bytes]
GRACE_SECONDS = 60.0  # for the other ranks, when one has failed; for all, when their starter is gone
STARTER = "EMBEDLAB_STARTER"
"""Names the end of a pipe that is closed when the process that started this one ends, in whatever way."""
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def start(command: Sequence[str], environment: Mapping[str, str], output: Path | None = None) -> Process:
    """Start ``python -m command`` with the variables of ``environment`` added to this process's.

    A command that calls `end_with_starter` does not outlive this process. Where its output goes to a file, a
    terminal's Ctrl-C does not reach it: who has started it hands that on.
    """
    pipe = _life()
    arguments, more = [sys.executable, "-m", *command], os.environ | environment | {STARTER: str(pipe)}
    if output is None:
        return subprocess.Popen(arguments, env=more, pass_fds=[pipe])
    with open(output, "ab", opener=_not_through_a_link) as file:
        return subprocess.Popen(
            arguments, env=more, pass_fds=[pipe], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@functools.cache
def _life() -> int:
    """The end to read of a pipe into which nothing is written; the other end is open as long as this process lives."""
    reading, *writing = os.pipe()
    os.register_at_fork(after_in_child=lambda: os.close(writing.pop()) if writing else None)
    return reading


def end_with_starter() -> None:
    """Be ended when the process that started this one by `start` is gone: SIGTERM, and SIGKILL `GRACE_SECONDS` later.

    Linux alone could say so by a signal (PR_SET_PDEATHSIG); a pipe is closed everywhere.
    """
    pipe = os.environ.pop(STARTER, None)
    if pipe is None:
        return

    def watch() -> None:
        os.read(int(pipe), 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="starter", daemon=True).start()


def end(processes: Iterable[Process], number: int) -> None:
    """Send a signal to those that still run, and to what they have started; after SIGKILL they are gone."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                leads = os.getpgid(process.pid) == process.pid
                (os.killpg if leads else os.kill)(process.pid, number)
            if number == signal.SIGKILL:
                process.wait()


def wants_processes(config: RunConfig) -> bool:
    """Whether this process has to start the run's ranks.

    Raises:
        UserError: on several machines that only a launcher can do.
    """
    if launched():
        return False
    if config.trainer.num_nodes > 1:
        raise UserError(
            "a run on several machines is started on each of them",
            key="trainer.num_nodes",
            value=config.trainer.num_nodes,
            fix="srun embedlab fit --config FILE, or torchrun (docs/clusters.md)",
        )
    return device_count(config.trainer) > 1


def start_ranks(command: Sequence[str], processes: int, again: str = "ckpt_path=auto") -> int:
    """Run ``python -m command`` as ``processes`` ranks of this machine; returns the exit status.

    ``again`` is how the command goes on after a rank was killed.

    The status is that of the first rank that fails. A signal to this process goes to the ranks, which write their
    checkpoint; the status is then the shell's for it. When a rank fails the others are ended: they wait for it.
    """
    log.info("Starting %d processes.", processes)
    ranks: list[Process] = []
    received: list[int] = []

    def hand_on(number: int, _: Any) -> None:
        received.append(number)
        end(ranks, signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in FORWARDED}
    try:
        with tempfile.NamedTemporaryFile() as said:
            shared = {SAID: said.name, "MASTER_PORT": str(_free_port())}
            for rank in range(processes):
                ranks.append(start(command, _environment(rank, processes) | shared))
            status = _wait(ranks, received)
            if status > 128 and not received and not Path(said.name).read_text():
                name = signal.Signals(status - 128).name
                say_once(f"embedlab: a process of the run was ended by {name}; go on with {again}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        end(ranks, signal.SIGKILL)
    return 128 + received[0] if received and status else status


def _wait(ranks: list[Process], received: list[int]) -> int:
    """Until all ranks have ended; the first failure decides."""
    status, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks):
        try:
            time.sleep(0.1)
        except KeyboardInterrupt:  # the terminal has told the ranks too
            received.append(signal.SIGINT)
        failed = [rank.returncode for rank in ranks if rank.poll()]
        if failed and not status:
            # A negative code is the signal that killed a rank; shells report 128 + its number.
            status = failed[0] if failed[0] > 0 else 128 - failed[0]
            deadline = time.monotonic() + GRACE_SECONDS
            if not received:
                end(ranks, signal.SIGTERM)
        if time.monotonic() > deadline:
            end(ranks, signal.SIGKILL)
    return status or next((1 for rank in ranks if rank.returncode), 0)


def _environment(rank: int, processes: int) -> dict[str, str]:
    """As torchrun sets it."""
    own: dict[str, Any] = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes,
        "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    threads = os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // processes))
    return {name: str(value) for name, value in (own | {"OMP_NUM_THREADS": threads}).items()}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
