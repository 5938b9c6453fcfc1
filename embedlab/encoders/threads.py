"""Mode and device of an encoder that several threads use at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Condition, get_ident
from typing import Any

import torch
from torch import nn

from embedlab.errors import UserError

_USE = Condition()
"""Guards mode and device of encoders that threads share; of none's own, which could not be copied."""
_WAITING: dict[int, SharedByThreads] = {}
"""Threads that wait until all others have left an encoder."""


class SharedByThreads(nn.Module):
    """A module that is lent to threads in evaluation mode, on the device that they want."""

    towers: Sequence[Any]
    """The encoders of one backbone each that it is made of; of one such encoder, itself."""

    def __init__(self) -> None:
        super().__init__()
        self._users: list[int] = []  # threads, one that is nested more than once
        self._home = torch.device("cpu")
        self._trained: list[nn.Module] = []

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @contextmanager
    def evaluating(self, device: str | torch.device | None) -> Iterator[None]:
        """Evaluation mode on `device` (None: where the encoder is at home) without gradients, and everything as before
        afterwards.

        Threads may be here together: mode and device are as before once the last of them leaves. One that wants
        another device than the others waits for them.
        """
        stance: AbstractContextManager[Any] = nullcontext()
        if any(tower.backbone.compiled for tower in self.towers):
            # The many shapes of scoring would each be compiled.
            stance = torch.compiler.set_stance("force_eager")
        with _USE:
            before = self._enter(None if device is None else torch.empty(0, device=device).device)
        try:
            with torch.no_grad(), stance:
                yield
        finally:
            with _USE:
                self._leave(before)

    def _enter(self, device: torch.device | None) -> torch.device:
        """A thread begins to use the encoder; returns where the encoder was."""
        me = get_ident()
        inside = me in self._users  # already: None is then where that use is

        def wanted() -> torch.device:
            return device or (self.device if inside or not self._users else self._home)

        while set(self._users) - {me} and wanted() != self.device:
            if self._waits_for(me):
                raise UserError(
                    "other threads use the encoder elsewhere, and wait for this one", key="device", value=device,
                    fix="one device for calls that are nested in several threads",
                )  # fmt: skip
            _WAITING[me] = self
            try:
                _USE.wait()
            finally:
                del _WAITING[me]
        before = self.device
        if not self._users:
            self._home = before
            self._trained = [m for m in self.modules() if m.training]
            self.eval()
        self._users.append(me)
        try:
            if wanted() != before:
                self.to(wanted())
        except BaseException:
            self._leave(before)
            raise
        return before

    def _waits_for(self, me: int) -> bool:
        """Whether a thread that uses this encoder waits, itself or through others, until this thread leaves one."""
        seen: set[int] = set()
        todo = set(self._users) & _WAITING.keys() - {me}
        while todo:
            seen |= todo
            users = {user for waiting in todo for user in _WAITING[waiting]._users}
            if me in users:
                return True
            todo = users & _WAITING.keys() - seen
        return False

    def _leave(self, before: torch.device) -> None:
        me = get_ident()
        self._users.remove(me)
        home = before if me in self._users else self._home
        if not set(self._users) - {me} and self.device != home:
            self.to(home)
        if not self._users:
            for module in self._trained:
                module.training = True
            self._trained = []
        _USE.notify_all()
