"""What the other processes of a run see when one of them is gone."""

from __future__ import annotations

import torch.distributed as dist

_SAID = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)  # by gloo, in a plain RuntimeError


class PeerLost(RuntimeError):
    """Another process of the run has ended, so that this one cannot go on.

    Args:
        then: what the user can do.
    """

    def __init__(self, then: str) -> None:
        super().__init__(f"another process of the run has ended; {then}")


def peer_is_gone(error: BaseException) -> bool:
    """Whether an error comes of a message that another process did not answer."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(text in str(error) for text in _SAID)
    )
