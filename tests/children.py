"""Processes that a process has started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Those that live, the oldest first. (Not every kernel has /proc/PID/task/PID/children.)"""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append((int(fields[19]), int(stat.parent.name)))  # by the time of its start
    return [number for _, number in sorted(found)]
