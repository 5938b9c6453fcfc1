"""Ranks that train by captured steps, on cards, or by the same work without a graph on the CPU.

``python -m tests.distributed.captured_ranks FOLDER`` trains what FOLDER/runs.json says, in turn, in one process a rank.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import Tensor

from embedlab.cli.compose import compose
from embedlab.distributed.gather import rank, world_size
from embedlab.engine.module import Method
from embedlab.engine.step import NonFiniteLoss
from embedlab.engine.whole_step import WholeStep
from embedlab.run.callbacks.checkpoints import Interrupted, LastCheckpoint
from embedlab.run.parse import parse_run
from embedlab.run.processes import start_ranks
from embedlab.run.run import Run
from tests.run.test_resume import StopAt

LIMIT_SECONDS = 120
"""Of one run: a rank may wait for another for ever."""


@dataclass(frozen=True)
class Spec:
    """One run: its overrides, the step at which a signal stops it, one at which rank 1 has no loss, whether messages
    and waits are counted, and which of `FAULTS` it has."""

    line: Sequence[str]
    stop: int | None = None
    poisoned: int | None = None
    counted: bool = False
    fault: str = ""


def train_all(runs: dict[str, Spec]) -> None:
    """Train every run in its folder, in this process; ``rankN.json`` there says what it was at the end.

    Without an end ``rankN.txt`` is there instead: what a run and the libraries below it said, what it raised, which
    ends the process, or where it stood after `LIMIT_SECONDS`.
    """
    for folder, spec in runs.items():
        account = Path(folder) / f"rank{os.environ.get('RANK', 0)}.txt"
        account.parent.mkdir(parents=True, exist_ok=True)
        with account.open("a") as file, _said_in(file):
            faulthandler.enable(file)
            faulthandler.dump_traceback_later(LIMIT_SECONDS, file=file, exit=True)
            try:
                _train(folder, spec)
            except BaseException:
                traceback.print_exc(file=file)
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
                faulthandler.disable()
        account.unlink()


@contextmanager
def _said_in(file: IO[str]) -> Iterator[None]:
    """Output goes to the file, that of NCCL and of a C++ abort too."""
    kept = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


def _train(folder: str, spec: Spec) -> None:
    with pytest.MonkeyPatch.context() as patch, _captured(patch, spec.line):
        patch.setattr("embedlab.methods.masked_lm.MaskedPrediction.forward", _without_masks)
        if spec.stop is not None:
            StopAt(spec.stop, patch)
        if spec.poisoned is not None and rank() == 1:
            _poison(patch, spec.poisoned)
        counts = _count(patch) if spec.counted else {}
        if spec.fault:
            FAULTS[spec.fault](patch)
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
            "counts": counts,
        }
    (Path(folder) / f"rank{rank()}.json").write_text(json.dumps(found))


def train_on_ranks(runs: dict[str, Spec], world: int, folder: Path) -> int:
    """The same on several ranks; the exit status."""
    (folder / "runs.json").write_text(json.dumps({name: asdict(spec) for name, spec in runs.items()}))
    return start_ranks(["tests.distributed.captured_ranks", str(folder)], world)


def train_each(runs: dict[str, Spec], world: int, folder: Path) -> None:
    """The same where a run may fail: the ranks are started anew for those after it. See `check_ended`."""
    left = dict(runs)
    for old in [p for run in left for p in Path(run).glob("rank*.*")]:
        old.unlink()
    while left:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("embedlab.run.processes.GRACE_SECONDS", 5.0)
            status = train_on_ranks(left, world, folder)
        for run in list(left):
            del left[run]
            if len(list(Path(run).glob("rank*.json"))) < world:
                began = any(Path(run).glob("rank*.txt"))
                # Ranks that end before they begin would end so again: their reason is in the test's output.
                for failed in (run, *(() if began else left)):
                    Path(failed).mkdir(parents=True, exist_ok=True)
                    (Path(failed) / "rank.txt").write_text(f"the ranks ended with status {status}\n")
                left = left if began else {}
                break


def check_ended(folder: Path) -> None:
    """Fail with what the ranks said of a run of `train_each` that failed."""
    if accounts := sorted(folder.glob("rank*.txt")):
        pytest.fail("\n".join(f"{p}: {p.read_text()}" for p in accounts), pytrace=False)


@contextmanager
def _captured(patch: pytest.MonkeyPatch, line: Sequence[str]) -> Iterator[None]:
    """Runs on the CPU do the work of a captured step. Only runs in bf16 on a card compile anything: it takes longer
    than their steps."""
    if "trainer=cpu" in line:
        for room in ("check", "run", "finish"):
            patch.setattr(f"embedlab.run.{room}.resolved_step", lambda run: "graph")
    if "trainer=cpu" in line or "trainer.precision=bf16-mixed" not in line:
        patch.setattr(torch, "compile", lambda model, **options: model)
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


def _scaled(patch: pytest.MonkeyPatch, scale: Callable[[], float]) -> None:
    total = Method.total

    def scaled(self: Method, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, logged = total(self, batch)
        return loss * scale(), logged

    patch.setattr(Method, "total", scaled)


def _without_a_row(patch: pytest.MonkeyPatch) -> None:
    load = WholeStep.load

    def loaded(self: WholeStep, batch: dict[str, Any]) -> bool:
        rows = batch["rows"].clone()
        rows[-1] = rows[-1 - rank()]
        return load(self, batch | {"rows": rows})

    patch.setattr(WholeStep, "load", loaded)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a rank's share left out": lambda patch: _scaled(patch, lambda: 1.0 - rank()),
    "not divided by the number of ranks": lambda patch: _scaled(patch, world_size),
    "a row of a rank missing": _without_a_row,
}
"""Of the sum over ranks: what the bounds of the tests that compare runs have to find."""


def _count(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Messages to other ranks and values read on the host, from the first step on, by the module that asked."""
    found: dict[str, int] = {}
    on = [False]

    def counting(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch."):
                frame = frame.f_back
            key = f"{frame.f_globals['__name__']}: {name}"
            found[key] = found.get(key, 0) + on[0]
            return original(*args, **kwargs)

        patch.setattr(owner, name, counted)

    def switching(name: str, value: bool) -> None:
        original = getattr(LastCheckpoint, name)

        def switched(*args: Any) -> None:
            original(*args)
            on[0] = value

        patch.setattr(LastCheckpoint, name, switched)

    for name in (
        "broadcast",
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "broadcast_object_list",
        "barrier",
    ):
        counting(torch.distributed, name)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        counting(Tensor, name)
    switching("on_train_start", True)
    switching("on_train_end", False)
    return found


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "disabled")
    torch.set_num_threads(1)
    content = json.loads((Path(sys.argv[1]) / "runs.json").read_text())
    train_all({name: Spec(**values) for name, values in content.items()})
