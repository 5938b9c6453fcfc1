"""Random states: one seed a rank, and exact resume."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from embedlab.distributed.gather import rank, world_size


def random_states() -> dict[str, Any]:
    """Of Python, numpy and torch (and the present CUDA device), as tensors, numbers and strings only."""
    version, internal, gauss = random.getstate()
    kind, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(pos),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, pos, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), pos, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


class Randomness(Callback):
    """Gives every rank its own stream (dropout must differ between ranks), and carries the streams over a resume.

    Args:
        seed: base seed; rank r draws from ``seed + r``. The order of the data has the base seed on every rank.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._restored: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._restored is None:
            own = self.seed + rank()
            random.seed(own)
            np.random.seed(own % 2**32)
            torch.manual_seed(own)
            return
        if len(self._restored) == world_size():
            set_random_states(self._restored[rank()])
        self._restored = None

    def state_dict(self) -> dict[str, Any]:
        states: list[Any] = [random_states()]
        if world_size() > 1:
            states = [None] * world_size()
            torch.distributed.all_gather_object(states, random_states())
        return {"ranks": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict["ranks"]
