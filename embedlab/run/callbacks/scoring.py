"""Scores a development set, or looks at the loss, while training; keeps the best encoder, and warns of collapse."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from embedlab.distributed.gather import gather_rows, rank, world_size
from embedlab.engine.dev_encoder import DevEncoder
from embedlab.engine.fsdp import sharded
from embedlab.errors import UserError
from embedlab.evaluation.core.geometry import singular_values
from embedlab.files import sha256_of
from embedlab.run.callbacks.train_log import TrainLog

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder
    from embedlab.engine.module import Method
    from embedlab.run.dev import Dev

log = logging.getLogger(__name__)

BEST = "best"
COLLAPSED_COSINE = 0.95
COLLAPSED_RANK = 10.0


class Selection(Callback):
    """Writes the best encoder so far with each checkpoint, and goes on from it after a resume."""

    best: BestEncoder | None
    _trains = False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.best is not None and trainer.is_global_zero:
            self.best.write(pl_module.encoder)  # type: ignore[arg-type]
            # The states of callbacks are in the checkpoint already.
            checkpoint["callbacks"][self.state_key]["files"] = self.best.files

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._trains = trainer.state.fn == TrainerFn.FITTING

    def state_dict(self) -> dict[str, Any]:
        best = self.best
        return {"score": best.score if best else None, "step": best.step if best else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.best is not None and state_dict["score"] is not None and self._trains:
            self.best.resume(state_dict["score"], state_dict["step"], state_dict.get("files"))


class DevScoring(Selection):
    """Scores at every validation and remembers the weights of the best score.

    Args:
        dev: the set to score; every rank encodes its share.
        folder: of the run; `best/` in it gets the encoder.
        before: of the run that this one goes on with; None: the same.
        select: ``dev`` keeps the weights of the best score; ``last`` scores without selecting.
        batch_tokens: padded tokens that are encoded at once.
        rank_every: scorings from one effective rank to the next on CUDA, where its eigenvalues take longer than
            all the rest.

    The best weights are copied on the device (a fraction of a millisecond) and written with each checkpoint and at
    the end, so that a frequent cadence does not wait for the disk.
    """

    def __init__(
        self,
        dev: Dev,
        folder: Path,
        select: Literal["dev", "last"] = "dev",
        batch_tokens: int = 16_384,
        rank_every: int = 4,
        before: Path | None = None,
    ) -> None:
        self.dev = dev
        self.best = BestEncoder(folder, before) if select == "dev" else None
        self.batch_tokens = batch_tokens
        self.rank_every = rank_every
        self.history: list[dict[str, float]] = []
        self._rows: list[list[int]] | None = None
        self._encoder: DevEncoder | None = None
        self._share: list[int] = []
        self._scored_at = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is None and trainer.global_step == 0 and not self.history:
            self._score(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and self._scored_at != trainer.global_step:
            self._score(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._scored_at != trainer.global_step:
            self._score(trainer, pl_module)

    def _score(self, trainer: Trainer, pl_module: LightningModule) -> None:
        method = cast("Method", pl_module)
        encoder = method.encoder
        # Ranks with a share of the weights must run equally many forward passes: each encodes all.
        one = sharded(method)
        total = len(self.dev.sentences)
        self._share = list(range(total) if one else range(rank(), total, world_size()))
        with trainer.precision_plugin.forward_context():
            local = self._vectors(method)
        vectors = local.float() if one else gather_rows(local.float(), self._share, total)
        ranked = vectors.device.type != "cuda" or len(self.history) % self.rank_every == 0
        scores = self.dev.score(vectors, rank=ranked)
        self._scored_at = trainer.global_step
        self.history.append({"step": trainer.global_step, **scores})
        named = {f"dev/{k}": v for k, v in scores.items()}
        for name, value in named.items():
            trainer.callback_metrics[name] = torch.tensor(value)
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)
        log_histograms(trainer, self.dev, vectors, spectrum=ranked)
        warn_of_collapse(scores)
        if self.best is not None:
            self.best.offer(scores[self.dev.metric], trainer.global_step, encoder)

    def _vectors(self, method: Method) -> Tensor:
        """Vectors ``[n, D]`` of this rank's share of the set."""
        encoder = method.encoder
        if encoder.mixed:
            found: Tensor = encoder.encode_texts([self.dev.sentences[i] for i in self._share])
            return found
        if self._rows is None:
            rows = method.dev_rows(self.dev.sentences)
            self._rows = [rows[i] for i in self._share]
        if self._encoder is None or self._encoder.device != encoder.device:
            self._encoder = DevEncoder(method, self._rows, self.batch_tokens)
        return method.dev_vectors(self._encoder(), self._rows)

    def state_dict(self) -> dict[str, Any]:
        own = {"history": self.history, "scored_at": self._scored_at, "dev": self.dev.fingerprint}
        return {**own, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        of = state_dict.get("dev", self.dev.fingerprint)
        if self.best is not None and self._trains and of != self.dev.fingerprint:
            raise UserError(
                "the best score so far is of another development set, with which no other can be compared",
                key="evaluation.dev",
                fix="the set that the checkpoint was made with (evaluation.dev, or stsb_dev in evaluation.sts_dir)",
            )
        self.history = state_dict["history"]
        self._scored_at = state_dict["scored_at"]
        super().load_state_dict(state_dict)


class LossSelection(Selection):
    """Without a development set: every ``every`` updates, offers the weights with the negative of the newest mean loss.

    It waits for that: the host may be many captured steps ahead of the device.
    The loss of a contrastive method falls while the vectors get worse, so prefer ``select=dev`` or ``last``.
    """

    best: BestEncoder

    def __init__(self, folder: Path, every: int, before: Path | None = None) -> None:
        self.best = BestEncoder(folder, before)
        self.every = every

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        method = cast("Method", pl_module)
        if trainer.global_step % self.every or method.runner.accumulating(method):
            return
        logs = [c for c in trainer.callbacks if isinstance(c, TrainLog)]  # type: ignore[attr-defined]
        loss = logs[0].caught_up(trainer, method).get("train/loss") if logs else None
        if loss is not None:
            self.best.offer(-loss, trainer.global_step, pl_module.encoder)  # type: ignore[arg-type]


class BestEncoder:
    """The weights of the best score so far, on the device until they are written to `best/`.

    Args:
        folder: of the run.
        before: of the run that this one goes on with; None: the same.
    """

    def __init__(self, folder: Path, before: Path | None = None) -> None:
        self.folder = Path(folder) / BEST
        self._before = Path(before or folder) / BEST
        self._source: Path | None = None
        self.files: str | None = None
        """Hash of the weights in `best/`, once they are written."""
        self.score: float | None = None
        self.step: int | None = None
        self._weights: dict[str, Tensor] = {}
        self._written: int | None = None

    def offer(self, score: float, step: int, encoder: Encoder) -> bool:
        """Keep the encoder's present weights if the score is higher than all before.

        NaN is kept only as the first, and any number is higher.
        """
        if not (self.score is None or score > self.score or (math.isnan(self.score) and score == score)):
            return False
        self.score, self.step = score, step
        with torch.no_grad():
            present = encoder.state_dict()
            # Shares of a weight have no such operation.
            plain = all(type(v) is Tensor for v in present.values())
            places = {v.device for v in (*present.values(), *self._weights.values())}
            if plain and len(places) == 1 and self._weights.keys() == present.keys():
                torch._foreach_copy_(list(self._weights.values()), [present[n] for n in self._weights])
            else:
                self._weights = copied_weights(encoder)
        return True

    def resume(self, score: float, step: int, files: str | None) -> None:
        """Go on with the best encoder of the run before, which lies in its `best/`.

        That may hold another one: what was scored after a checkpoint that the run goes back to, or nothing where the
        checkpoint alone was copied. The selection then begins anew; a better encoder of later steps is found again.

        Args:
            score, step: of the best so far.
            files: hash of what was written; None: the checkpoint is of before there was one.
        """
        there = hash_of(self._before) if self._before.is_dir() else None
        if there is None or files not in (None, there):
            log.warning(
                "%s does not hold the best weights so far, of step %d: what is scored from here on is selected from.",
                self._before, step,
            )  # fmt: skip
            return
        self.score, self.step = score, step
        self._source = self._before
        if self._before.resolve() == self.folder.resolve():
            self._written, self.files = step, there

    def write(self, encoder: Encoder) -> None:
        """Write `best/`, if it is not there yet; the encoder's own weights are as before afterwards."""
        if self.step is None or self._written == self.step:
            return
        current = copied_weights(encoder)
        try:
            self.load_into(encoder)
            encoder.save(self.folder, merge=False)
        finally:
            encoder.load_state_dict(current)
        self._written, self._source, self.files = self.step, self.folder, hash_of(self.folder)

    def load_into(self, encoder: Encoder) -> None:
        """Give the encoder the best weights, where there are any (from memory, or after a resume from a folder)."""
        if self._weights:
            encoder.load_state_dict(self._weights)
        elif self._source is not None:
            from embedlab.encoders.loading import load

            encoder.load_state_dict(load(self._source).state_dict())


def hash_of(folder: Path) -> str:
    """Hex hash of the weights below a folder, and of their names; scores may come beside them later."""
    return sha256_of(folder, sorted(folder.rglob("*.safetensors")))


def copied_weights(encoder: Encoder) -> dict[str, Tensor]:
    """The encoder's state in new memory; what towers share is there once, by all its names."""
    copies: dict[int, Tensor] = {}
    found = {}
    for name, value in encoder.state_dict(keep_vars=True).items():
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        found[name] = copies[id(value)]
    return found


def log_histograms(trainer: Trainer, dev: Dev, vectors: Tensor, spectrum: bool = True) -> None:
    """Of the pairs' cosines, the vectors' norms and, with `spectrum`, their singular values, for the loggers that
    show histograms."""
    loggers = [x for x in trainer.loggers if isinstance(x, TensorBoardLogger | WandbLogger)]
    if not loggers or not trainer.is_global_zero:
        return
    shown = {
        "dev/pair_cosines": dev.pair_cosines(vectors),
        "dev/norms": vectors.float().norm(dim=-1),
    }
    if spectrum:
        shown["dev/singular_values"] = singular_values(vectors, center=True)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            for name, values in shown.items():
                logger.experiment.add_histogram(name, values.float().cpu(), trainer.global_step)
        else:
            import wandb

            content = {n: wandb.Histogram(v.float().cpu().numpy()) for n, v in shown.items()}
            logger.experiment.log({**content, "trainer/global_step": trainer.global_step})


def warn_of_collapse(scores: dict[str, float]) -> bool:
    """Say loudly when all sentences get nearly the same vector."""
    cosine, effective_rank = scores.get("mean_cosine", 0.0), scores.get("effective_rank", float("inf"))
    if cosine <= COLLAPSED_COSINE and effective_rank >= COLLAPSED_RANK:
        return False
    log.warning(
        "The vectors collapse: mean cosine of unrelated sentences %.3f, effective rank %.1f. "
        "A contrastive method usually repairs this within some hundred steps; if not, lower optimizer.lr, "
        "and check pooling and temperature.",
        cosine,
        effective_rank,
    )
    return True
