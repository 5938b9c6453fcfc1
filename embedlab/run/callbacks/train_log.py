"""Loss and speed (also against the card's limit), every few steps, without making the host wait for the device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from embedlab.backbones.architecture import has_blocks
from embedlab.distributed.gather import world_size

if TYPE_CHECKING:
    from embedlab.engine.module import Method

# Dense bf16 matrix peak in TFLOP/s by the vendors' data sheets (without sparsity), by a part of the device name.
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10G": 70.0,
         "V100": 125.0, "RTX 4090": 165.0, "RTX 3090": 71.0}  # fmt: skip


class TrainLog(Callback):
    """Logs the method's means (the first of step 1), and sentences/s, true tokens/s, padding share, data wait,
    utilisation and the card's memory so far (``speed/held_gib``); of scoring, its share of the time since the last
    record (``speed/scoring_share``) and since the start (``time/dev_share``).

    Args:
        every: updates between two records.

    Attributes:
        latest: the newest values, for the progress bar and the final report, and the step that they are of.
    """

    def __init__(self, every: int = 50) -> None:
        self.every = every
        self.latest: dict[str, float] = {}
        self.latest_step = 0
        self.excluded_seconds = 0.0
        self._reset(time.perf_counter())
        self._ended = self._began = time.perf_counter()
        self._scoring_since: float | None = None
        self._speed: dict[int, dict[str, float]] = {}

    def _reset(self, now: float) -> None:
        self._since, self._waited, self._away = now, 0.0, 0.0
        self._sentences, self._true, self._padded, self._rows, self._batches = 0, 0, 0, 0, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        backbone = cast("Method", pl_module).encoder.towers[0].backbone
        blocks = backbone.blocks if has_blocks(backbone.info.model_type) else [backbone.model]
        self._parameters = matmul_parameters(blocks)
        self._peak = peak_tflops(pl_module.device)
        self._ended = self._began = time.perf_counter()
        self._reset(self._ended)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._scoring_since is None:
            self._waited += now - self._ended

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.device.type == "cuda":
            # Scoring would be taken to last for the steps that are still in the device's queue.
            torch.cuda.synchronize(pl_module.device)
        self._scoring_since = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._scoring_since is not None:
            spent = time.perf_counter() - self._scoring_since
            self._away += spent
            self.excluded_seconds += spent
            self._scoring_since = None
        self._ended = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        method = cast("Method", pl_module)
        self._sentences += len(batch["rows"])
        self._true += int(batch.get("tokens", 0) * method.forward_passes)
        self._padded += int(method.runner.padded_tokens(batch) * method.forward_passes)
        self._rows += int(len(batch["rows"]) * method.forward_passes)
        self._batches += 1
        if not method.runner.accumulating(method):
            if trainer.global_step % self.every == 0:
                self._flush(trainer, method)
            elif trainer.global_step == 1:  # its time is that of compiling, and says nothing
                method.meter.flush(1)
        if world_size() == 1:
            self._write(trainer, method)
        self._ended = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        method = cast("Method", pl_module)
        if self._batches:
            self._flush(trainer, method)
        self._write(trainer, method, wait=True)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A run that goes on from the checkpoint does not make the records before it again."""
        self._write(trainer, cast("Method", pl_module), wait=True)

    def caught_up(self, trainer: Trainer, method: Method) -> dict[str, float]:
        """`latest`, after the device has given all means that were asked of it."""
        self._write(trainer, method, wait=True)
        return self.latest

    def _flush(self, trainer: Trainer, method: Method) -> None:
        if world_size() > 1:
            # All ranks look at the means before at the same step: where these are no numbers, they stop together.
            self._write(trainer, method, wait=True)
        now = time.perf_counter()
        seconds = max(now - self._since - self._away, 1e-9)
        speed = {
            "speed/sentences_per_second": world_size() * self._sentences / seconds,
            "speed/step_ms": 1e3 * seconds / max(1, self._batches),
            "speed/data_wait_ms": 1e3 * self._waited / max(1, self._batches),
            "speed/scoring_share": self._away / (seconds + self._away),
            "lr": learning_rate(method),
        }
        if self._padded:
            speed["speed/true_tokens_per_second"] = world_size() * self._true / seconds
            speed["speed/padding_share"] = 1 - self._true / self._padded
            if self._peak is not None:
                info = method.encoder.towers[0].backbone.info
                length = self._true / max(1, self._rows)
                flops = training_flops(self._true, self._parameters, info.width, info.layers, length)
                speed["speed/tflops"] = flops / seconds / 1e12
                speed["speed/mfu"] = speed["speed/tflops"] / self._peak[0]
        if (held := held_gib(method.device)) is not None:
            speed["speed/held_gib"] = held
        if self.excluded_seconds:
            speed["time/dev_share"] = self.excluded_seconds / (now - self._began)
        self._speed[trainer.global_step] = speed
        method.meter.flush(trainer.global_step)
        self._reset(now)

    def _write(self, trainer: Trainer, method: Method, wait: bool = False) -> None:
        for step, means in method.meter.arrived(wait):
            if not all(math.isfinite(v) for v in means.values()):
                method.runner.check()  # an eager step has looked at every loss itself
            values = {f"train/{k}": v for k, v in means.items()} | self._speed.pop(step, {})
            self.latest, self.latest_step = values, step
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)


def learning_rate(method: Method) -> float:
    """Of the next update, where its group has no multiplier."""
    scheduler: Any = method.lr_schedulers()
    return float(method.optimizer_config.lr * scheduler.lr_lambdas[0](scheduler.last_epoch))


def peak_tflops(device: torch.device) -> tuple[float, str] | None:
    """Named peak of the device, or None where it is not known (no utilisation is reported then)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(((peak, key) for key, peak in PEAKS.items() if key in name), None)


def held_gib(device: torch.device) -> float | None:
    """GiB of a card that this process has held at most, graphs included: what a run needs; None off a card."""
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None


def matmul_parameters(blocks: Iterable[nn.Module]) -> int:
    """Weights of the linear layers that every token passes: those of the blocks, not the embeddings.

    A frozen one counts as two thirds: it takes 4 of the 6 operations, as it has no gradient of its own. 4-bit
    ones lie two in a byte.
    """
    total = 0.0
    for p in (p for block in blocks for p in block.parameters() if p.ndim >= 2):
        packed = 2 if p.dtype == torch.uint8 else 1
        total += packed * p.numel() * (1 if p.requires_grad else 2 / 3)
    return round(total)


def training_flops(tokens: float, parameters: int, width: int, layers: int, length: float) -> float:
    """Floating-point operations of forward and backward over ``tokens`` tokens in sequences of ``length``.

    6 per weight and token, and 12 * layers * width * length per token for the attention scores and their use.
    """
    return tokens * (6 * parameters + 12 * layers * width * length)
