"""Ranks that train by captured steps, on cards, or by the same work without a graph on the CPU.

``python -m tests.distributed.captured_ranks FOLDER`` trains what FOLDER/runs.json says, in turn, in one process a rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.cli.compose import compose
from embedlab.distributed.gather import rank
from embedlab.engine.module import Method
from embedlab.engine.step import NonFiniteLoss
from embedlab.run.callbacks.checkpoints import Interrupted
from embedlab.run.parse import parse_run
from embedlab.run.processes import start_ranks
from embedlab.run.run import Run
from tests.run.test_resume import StopAt


@dataclass(frozen=True)
class Spec:
    """One run: its overrides, the step at which a signal stops it, and one at which rank 1 has no loss."""

    line: Sequence[str]
    stop: int | None = None
    poisoned: int | None = None


def train_all(runs: dict[str, Spec]) -> None:
    """Train every run in its folder, in this process; ``rankN.json`` there says what it was at the end."""
    for folder, spec in runs.items():
        with pytest.MonkeyPatch.context() as patch, _captured(patch, spec.line):
            patch.setattr("embedlab.methods.masked_lm.MaskedPrediction.forward", _without_masks)
            if spec.stop is not None:
                StopAt(spec.stop, patch)
            if spec.poisoned is not None and rank() == 1:
                _poison(patch, spec.poisoned)
            run, error = Run(parse_run(compose("train", list(spec.line))), Path(folder)), ""
            try:
                run.fit()
            except (Interrupted, NonFiniteLoss) as ended:
                error = str(ended)
            weights = run.method.state_dict().items()
            found = {
                "error": error,
                "step": run.trainer.global_step,
                "weights": sha256(b"".join(v.cpu().numpy().tobytes() for _, v in weights)).hexdigest(),
                "seed": torch.cuda.initial_seed() if torch.cuda.is_available() else torch.initial_seed(),
            }
        (Path(folder) / f"rank{rank()}.json").write_text(json.dumps(found))


def train_on_ranks(runs: dict[str, Spec], world: int, folder: Path) -> int:
    """The same on several ranks; the exit status."""
    (folder / "runs.json").write_text(json.dumps({name: asdict(spec) for name, spec in runs.items()}))
    return start_ranks(["tests.distributed.captured_ranks", str(folder)], world)


@contextmanager
def _captured(patch: pytest.MonkeyPatch, line: Sequence[str]) -> Iterator[None]:
    """Runs on the CPU do the work of a captured step. Blocks are compiled in bf16 on a card alone."""
    if "trainer=cpu" in line:
        for room in ("check", "run", "finish"):
            patch.setattr(f"embedlab.run.{room}.resolved_step", lambda run: "graph")
    if "trainer=cpu" in line or "trainer.precision=bf16-mixed" not in line:
        patch.setattr("embedlab.backbones.backbone.Backbone.compile_blocks", lambda self, **k: None)
    yield


def _without_masks(
    self: Any, backbone: Any, ids: Tensor, mask: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    """Masks are drawn by each rank anew: in their place a mean over rows through body and head."""
    logits = backbone.head(backbone(ids, mask)[-1][:, 0])
    return logits.logsumexp(-1).mean(), logits.new_zeros(())


def _poison(patch: pytest.MonkeyPatch, step: int) -> None:
    total = Method.total

    def poisoned(self: Method, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, logged = total(self, batch)
        return (loss * float("nan") if self.global_step == step else loss), logged

    patch.setattr(Method, "total", poisoned)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "disabled")
    torch.set_num_threads(1)
    content = json.loads((Path(sys.argv[1]) / "runs.json").read_text())
    train_all({name: Spec(**values) for name, values in content.items()})
