"""Lightning's other entries: score the dev set, score the final suites, encode the data; nothing is trained."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from embedlab.console import LEAF_SPEC, print_table, table
from embedlab.distributed.gather import gather_rows
from embedlab.evaluation.core.protocol import write_json
from embedlab.files import whole_file, write_array

if TYPE_CHECKING:
    from embedlab.data.module import SentenceDataModule
    from embedlab.run.finish import FinalEvaluation
    from embedlab.run.run import Run

log = logging.getLogger(__name__)
VALIDATED, TESTED, VECTORS = "validate.json", "test.json", "vectors.npy"


def validate(run: Run, subcommand: str) -> None:
    """Do what ``subcommand`` (validate, test, predict) says with the encoder as configured, or of ``ckpt_path``.

    Leaves ``validate.json``, ``test.json`` or ``vectors.npy`` (the data's first view, in its order) in the folder.
    """
    if run.checkpoint is None:
        log.warning("No ckpt_path: this is the encoder as it is before training.")
    trainer, method = run.trainer, run.method
    options: dict[str, Any] = {"ckpt_path": run.checkpoint, "weights_only": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", LEAF_SPEC)
        if subcommand == "validate":
            trainer.validate(method, datamodule=run.data, verbose=False, **options)
            scores = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("dev/")}
            _write(trainer, run.folder / VALIDATED, scores)
        elif subcommand == "test":
            suites = FinalSuites(run.finale)
            trainer.callbacks.append(suites)  # type: ignore[attr-defined]
            trainer.test(method, dataloaders=[torch.zeros(1)], verbose=False, **options)
            _write(trainer, run.folder / TESTED, suites.scores)
        else:
            trainer.callbacks.append(Vectors(run.data, run.folder / VECTORS))  # type: ignore[attr-defined]
            trainer.predict(method, datamodule=run.data, return_predictions=False, **options)


class FinalSuites(Callback):
    """Scores the encoder on the suites of ``evaluation.final``, in the first process."""

    def __init__(self, finale: FinalEvaluation) -> None:
        self.finale = finale
        self.scores: dict[str, float] = {}

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.scores, _ = self.finale.score()


class Vectors(Callback):
    """Gathers what every rank encodes, and writes it in the order of the data."""

    def __init__(self, data: SentenceDataModule, path: Path) -> None:
        self.data, self.path = data, path
        self._rows: list[int] = []
        self._parts: list[Tensor] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._rows += batch["rows"].tolist()
        self._parts.append(cast("Tensor", outputs).float())

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        vectors = gather_rows(torch.cat(self._parts), self._rows, self.data.n_rows)
        if trainer.is_global_zero:
            with whole_file(self.path) as new:
                write_array(new, vectors.cpu().numpy())
            print(f"Vectors {tuple(vectors.shape)}: {self.path}")


def _write(trainer: Trainer, path: Path, scores: dict[str, float]) -> None:
    if trainer.is_global_zero:
        write_json(path, {"scores": scores})
        print_table(table(("metric", "score"), [(name, f"{value:.4f}") for name, value in scores.items()]))
        print(f"Scores: {path}")
