"""Ranks on the CPU that train by the work of a captured step; `python -m tests.distributed.captured_ranks FOLDER`.

FOLDER/runs.json names each run's folder and its line of overrides; all are trained in turn, in one process a rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.cli.compose import compose
from embedlab.run.parse import parse_run
from embedlab.run.processes import start_ranks
from embedlab.run.run import train


@contextmanager
def uncaptured() -> Iterator[None]:
    """Runs on the CPU do the work of a captured step, with blocks that are not compiled."""
    with pytest.MonkeyPatch.context() as patch:
        for room in ("check", "run", "finish"):
            patch.setattr(f"embedlab.run.{room}.resolved_step", lambda run: "graph")
        patch.setattr("embedlab.backbones.backbone.Backbone.compile_blocks", lambda self, **k: None)
        yield


def train_all(runs: dict[str, Sequence[str]]) -> None:
    """Train every run in its folder, in this process."""
    with uncaptured(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("embedlab.methods.masked_lm.MaskedPrediction.forward", _without_masks)
        for folder, line in runs.items():
            train(parse_run(compose("train", list(line))), Path(folder))


def train_on_ranks(runs: dict[str, Sequence[str]], world: int, folder: Path) -> int:
    """The same on several ranks; the exit status."""
    (folder / "runs.json").write_text(json.dumps(runs))
    return start_ranks(["tests.distributed.captured_ranks", str(folder)], world)


def _without_masks(self: Any, backbone: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Masks are drawn by each rank anew: in their place a mean over rows through body and head."""
    logits = backbone.head(backbone(ids, mask)[-1][:, 0])
    return logits.logsumexp(-1).mean(), logits.new_zeros(())


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "disabled")
    torch.set_num_threads(1)
    train_all(json.loads((Path(sys.argv[1]) / "runs.json").read_text()))
