"""Mode and device of a module that threads use together: as before once the last of them leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, get_ident
from typing import Any

import torch
from torch import nn

from embedlab.errors import UserError

_USE = Condition()
"""Guards all `Users`; of none's own, which could not be copied with its module."""
_WAITING: dict[int, Users] = {}
"""Threads that wait until all others have left a module."""


@dataclass
class Users:
    """Of a module.

    Attributes:
        threads: that use it, one that is nested more than once.
        home: where it is when nobody uses it.
        trained: its parts that are then in training mode.
    """

    threads: list[int] = field(default_factory=list)
    home: torch.device = field(default_factory=lambda: torch.device("cpu"))
    trained: list[nn.Module] = field(default_factory=list)

    def wait_for(self, me: int) -> bool:
        """Whether one of them waits, itself or through others, until thread `me` leaves a module."""
        seen: set[int] = set()
        todo = set(self.threads) & _WAITING.keys() - {me}
        while todo:
            seen |= todo
            users = {user for waiting in todo for user in _WAITING[waiting].threads}
            if me in users:
                return True
            todo = users & _WAITING.keys() - seen
        return False


@contextmanager
def shared(module: Any, device: torch.device | None) -> Iterator[None]:
    """Use a module in evaluation mode on a device; None: where it is at home, or inside of another use where that is.

    Args:
        module: has a `device` and its `Users` in ``_users``.
        device: wanted; a thread that wants another one than the others waits for them.

    Raises:
        UserError: the others wait for this thread, too.
    """
    with _USE:
        before = _enter(module, device)
    try:
        yield
    finally:
        with _USE:
            _leave(module, before)


def _enter(module: Any, device: torch.device | None) -> torch.device:
    """Returns where the module was."""
    me, users = get_ident(), module._users
    inside = me in users.threads

    def wanted() -> torch.device:
        found: torch.device = device or (module.device if inside or not users.threads else users.home)
        return found

    while set(users.threads) - {me} and wanted() != module.device:
        if users.wait_for(me):
            raise UserError(
                "other threads use the encoder elsewhere, and wait for this one", key="device", value=device,
                fix="one device for calls that are nested in several threads",
            )  # fmt: skip
        _WAITING[me] = users
        try:
            _USE.wait()
        finally:
            del _WAITING[me]
    before: torch.device = module.device
    if not users.threads:
        users.home = before
        users.trained = [m for m in module.modules() if m.training]
        module.eval()
    users.threads.append(me)
    try:
        if wanted() != before:
            module.to(wanted())
    except BaseException:
        _leave(module, before)
        raise
    return before


def _leave(module: Any, before: torch.device) -> None:
    me, users = get_ident(), module._users
    users.threads.remove(me)
    home = before if me in users.threads else users.home
    if not set(users.threads) - {me} and module.device != home:
        module.to(home)
    if not users.threads:
        for part in users.trained:
            part.training = True
        users.trained = []
    _USE.notify_all()
