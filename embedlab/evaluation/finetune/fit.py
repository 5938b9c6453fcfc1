"""Training of a head and its backbone by Lightning: AdamW, linear warm-up and decay, clipping, selection."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from embedlab.config.optimizer import OptimizerConfig
from embedlab.console import LEAF_SPEC, has_bars, quiet, say, short
from embedlab.engine.optimizer import build_optimizer
from embedlab.errors import UserError
from embedlab.evaluation.finetune.buckets import Batch, Buckets, Epochs
from embedlab.evaluation.finetune.config import FineTuneConfig
from embedlab.evaluation.finetune.models import sentence_encoder, trainable_copy
from embedlab.evaluation.finetune.rows import Rows

if TYPE_CHECKING:
    from embedlab.backbones import Backbone

_REPORTS = 10  # progress lines of one training, where there is no terminal


@dataclass(frozen=True)
class Fitted:
    """What one training was: updates, seconds, last loss, and the dev score of each look (empty: no dev set)."""

    steps: int
    seconds: float
    loss: float
    dev: list[float]

    def plain(self) -> dict[str, Any]:
        """For the protocol block."""
        return {
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "last_loss": round(self.loss, 4),
            "dev": [round(score, 2) for score in self.dev],
        }


class FineTuning(LightningModule):
    """A model with `loss(batch)`, trained with AdamW; biases and norms without weight decay."""

    def __init__(self, model: nn.Module, config: FineTuneConfig, steps: int) -> None:
        super().__init__()
        self.model, self.config, self.steps = model, config, steps

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss: Tensor = self.model.loss(batch)  # type: ignore[operator]
        return loss

    def configure_optimizers(self) -> Any:
        config = self.config
        settings = OptimizerConfig(
            lr=config.lr, weight_decay=config.weight_decay, warmup_steps=round(config.warmup * self.steps)
        )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.dim() > 1]},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer, schedule = build_optimizer(settings, groups, self.steps, self.device)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **more: Any) -> None:
        # Lightning refuses its own clipping with a fused optimiser under mixed precision.
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)


def train(
    model: nn.Module,
    data: Buckets,
    config: FineTuneConfig,
    *,
    name: str,
    half: bool,
    dev: Callable[[], float] | None = None,
) -> Fitted:
    """Trains `model` in place on `data` (on its device) and leaves it in evaluation mode.

    half: in bfloat16 (autocast), weights stay in float32. dev: a score of the model as it stands, higher is
    better; looked at `config.evaluations` times, and the best weights are kept. Without it: the last ones.

    Raises UserError when the loss is not finite.
    """
    steps = config.steps or max(1, math.ceil(config.epochs * data.steps(config.batch_size)))
    task = FineTuning(model, config, steps)
    losses = _Losses(name, steps)
    looks = _Looks(dev, steps, config.evaluations) if dev is not None else None
    device = data.device
    terminal = has_bars()
    started = time.perf_counter()
    quieter = quiet("lightning.pytorch", "lightning.fabric")  # the data are on the device already
    with quieter, warnings.catch_warnings(), seeded(config.seed, device):
        warnings.filterwarnings("ignore", module="lightning.*")
        warnings.filterwarnings("ignore", message=LEAF_SPEC)
        trainer = Trainer(
            max_steps=steps,
            accelerator={"cuda": "gpu"}.get(device.type, device.type),
            devices=[device.index or 0] if device.type == "cuda" else 1,
            precision="bf16-mixed" if half else "32-true",
            plugins=[LightningEnvironment()],
            callbacks=[losses, *([looks] if looks is not None else [])],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=terminal,
            use_distributed_sampler=False,
        )
        model.train()
        trainer.fit(task, train_dataloaders=Epochs(data, config.batch_size, steps, config.seed))
        # Lightning moves a module back to the CPU in some strategies.
        model.to(device).eval()
    if looks is not None:
        looks.restore(model)
    return Fitted(
        steps, time.perf_counter() - started, losses.last, looks.scores if looks is not None else []
    )


@torch.no_grad()
def predict(model: nn.Module, data: Buckets, half: bool) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch of `data` with the model's output, in evaluation mode, without gradients."""
    was = model.training
    model.eval()
    try:
        for batch in data.in_order():
            with torch.autocast(data.device.type, dtype=torch.bfloat16, enabled=half):
                output = model(batch)
            yield batch, output.float()
    finally:
        model.train(was)


def use_half(settings: Any, device: torch.device) -> bool:
    """Whether to train and score in bfloat16: what `dtype` says, else on CUDA.

    Raises UserError for float16, which would need loss scaling.
    """
    dtype = settings.get("dtype")
    if dtype == "float16":
        raise UserError(
            "fine-tuning needs bfloat16 or float32", key="dtype", value=dtype, fix="dtype=bfloat16"
        )
    return dtype == "bfloat16" or (dtype is None and device.type == "cuda")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from `seed` inside; those outside go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Learner:
    """A head on a copy of an encoder's backbone, to be trained and asked; the encoder itself stays as it is.

    Args:
        encoder: as a suite gets it.
        config: how to train.
        settings: of the suite.
        head: makes the model of the copied backbone.
    """

    def __init__(
        self,
        encoder: object,
        config: FineTuneConfig,
        settings: Mapping[str, Any],
        head: Callable[[Backbone], nn.Module],
    ) -> None:
        source = sentence_encoder(encoder)
        self.config, self.device = config, source.device
        self.half = use_half(settings, self.device)
        self.rows = Rows(source, config.max_length)
        # The new head's weights depend on the seed too.
        with seeded(config.seed, self.device):
            self.model = head(trainable_copy(source)).to(self.device)

    def buckets(self, rows: Sequence[Sequence[int]], **targets: Tensor) -> Buckets:
        """Rows of token ids with their targets, on the device."""
        return Buckets(rows, targets, self.rows.pad_id, self.device)

    def fit(self, data: Buckets, name: str, dev: Callable[[], float] | None = None) -> dict[str, Any]:
        """`train` on `data`; says for the protocol block what the training was."""
        fitted = train(self.model, data, self.config, name=name, half=self.half, dev=dev)
        precision = "bf16-mixed" if self.half else "float32"
        return {"row_tokens": self.rows.max_length, "precision": precision} | fitted.plain()

    def predict(self, data: Buckets) -> Iterator[tuple[Batch, Tensor]]:
        """`predict` of the model."""
        return predict(self.model, data, self.half)


class _Losses(Callback):
    """Says how training goes where there is no terminal, and stops at a loss that is no number."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.last = name, steps, math.nan
        self._every = max(1, steps // _REPORTS)
        self._since, self._started = 0, time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        done = index + 1
        if done % self._every and done != self.steps:
            return
        # The only moments at which the host waits for the device.
        self.last = float(outputs["loss"])
        if not math.isfinite(self.last):
            raise UserError(
                f"{self.name}: the loss is not finite at step {done}",
                key="finetune.lr",
                value=module.config.lr,  # type: ignore[union-attr]
                fix="a lower learning rate, or dtype=float32",
            )
        now = time.perf_counter()
        rate = (done - self._since) / max(now - self._started, 1e-9)
        self._since, self._started = done, now
        if not has_bars():
            say(f"{self.name}: step {done} of {self.steps}, loss {short(self.last)}, {rate:.1f} steps/s")


class _Looks(Callback):
    """Scores the model a few times, at even distances and at the end, and keeps the best weights."""

    def __init__(self, score: Callable[[], float], steps: int, looks: int) -> None:
        self._score = score
        self._at = {max(1, round(steps * (i + 1) / looks)) for i in range(looks)}
        self.scores: list[float] = []
        self._best: dict[str, Tensor] | None = None

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index + 1 not in self._at:
            return
        score = self._score()
        if self._best is None or score > max(self.scores):
            model: nn.Module = module.model  # type: ignore[assignment]
            self._best = {key: value.detach().clone() for key, value in model.state_dict().items()}
        self.scores.append(score)

    def restore(self, model: nn.Module) -> None:
        """Put the best weights back."""
        if self._best is not None:
            model.load_state_dict(self._best)
            self._best = None
