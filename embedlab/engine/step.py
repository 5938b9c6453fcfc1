"""How a training step is run: eagerly, or with compiled blocks. (`embedlab.engine.cuda_graph` has the third way.)"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embedlab.backbones.backbone import Backbone
from embedlab.distributed.gather import rows_per_rank, weighted

LEAST_PADDING = 0.03
"""Share of padding from which on packing and unpacking cost less than they save."""


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite. The weights are those before the update; saved checkpoints are good.

    Attributes:
        step: updates made before it.
        rows: of the batch, in the order of the data.
        checkpoint: the newest that is there.
    """

    checkpoint: Path | None = None

    def __init__(self, step: int, rows: list[int], detail: str = "") -> None:
        self.step, self.rows = step, rows
        shown = ", ".join(map(str, rows[:16])) + (f", ... ({len(rows)} in all)" if len(rows) > 16 else "")
        where = (
            f"; rows of the batch: {shown}{': ' + detail if detail else ''}" if rows else " on another device"
        )
        advice = "Lower optimizer.lr, or look at these rows." if rows else "Lower optimizer.lr."
        super().__init__(f"the loss is not finite at step {step}{where}. {advice}")

    def __str__(self) -> str:
        kept = "" if self.checkpoint is None else f" The checkpoint {self.checkpoint} is intact."
        return f"{super().__str__()}{kept}"


def non_finite(method: Any, rows: list[int]) -> NonFiniteLoss:
    """The error for these rows, with their place in the data where that is known."""
    describe = getattr(getattr(method.trainer, "datamodule", None), "describe_rows", None)
    return NonFiniteLoss(method.global_step, rows, describe(rows) if describe else "")


def backbones_of(module: nn.Module) -> list[Backbone]:
    """The transformers in a method or an encoder."""
    return [m for m in module.modules() if isinstance(m, Backbone)]


class StepRunner:
    """The steps of one method; ``method`` is an `embedlab.engine.module.Method` in a Lightning trainer.

    Args:
        packing: leave out padding where the backbone and the lengths of the rows allow it: in a captured step, and
            in an eager one on the CPU (on CUDA the host would have to wait for the number of true tokens).
    """

    automatic = True
    """Whether Lightning does the backward pass and the update."""
    compiles = False
    """Whether transformer blocks are compiled."""
    dynamic: bool | None = False
    """Whether they are compiled for any number of tokens; None: for the first shape alone, then for any."""
    resident = False
    """Whether a step takes its tokens from data that is resident on the device, wherever that is."""

    def __init__(self, packing: bool = False) -> None:
        self.packing = packing
        self.packed_tokens: int | None = None
        """Tokens that one pass over the present batch computes, where padding is left out."""

    def begin(self, method: Any) -> None:
        """Before the first step of a fit."""
        if self.compiles:
            # What earlier runs of the process compiled counts against the compiler's limit, past which it runs eagerly.
            torch.compiler.reset()
            for backbone in backbones_of(method):
                backbone.compile_blocks(dynamic=self.dynamic)

    def compile_beside(self, model: nn.Module) -> None:
        """After `begin`: compile the blocks of a model beside the method's, where its own are; its padding is kept."""
        if self.compiles:
            for backbone in backbones_of(model):
                backbone.compile_blocks(dynamic=None if self.dynamic is None else False)

    def step(self, method: Any, batch: dict[str, Any]) -> Tensor | None:
        """Run a step on a batch; the loss, where Lightning is to go on from it."""
        raise NotImplementedError

    def tokens(self, method: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with its token tensors: those of resident data are gathered on the device."""
        if "lengths" not in batch:
            return batch
        resident = method.trainer.datamodule.resident(method.device)
        tokens: dict[str, Any] = resident.gather(batch["rows"], batch["lengths"])
        return tokens | {key: batch[key] for key in ("data_set",) if key in batch}

    def accumulating(self, method: Any) -> bool:
        """Whether the present batch is only added up. The last batch of an epoch always ends in an update."""
        return bool(method.trainer.fit_loop._should_accumulate())

    def updates(self, method: Any) -> int:
        """Updates of the whole run."""
        return int(method.trainer.estimated_stepping_batches)

    def padded_tokens(self, batch: dict[str, Any]) -> int:
        """Tokens that one pass over a batch computes, padding included."""
        return batch.get("padded_tokens", 0) if self.packed_tokens is None else self.packed_tokens

    def check(self) -> None:
        """Raise `NonFiniteLoss` if a step so far was not finite and has not said so itself."""

    def close(self) -> None:
        """After the last step of a fit, also of one that failed."""


class EagerStep(StepRunner):
    """Lightning's automatic optimisation."""

    def step(self, method: Any, batch: dict[str, Any]) -> Tensor:
        uneven = batch.get("rows_per_rank")
        with rows_per_rank(uneven):
            loss: Tensor
            loss, logged = method.total(self.without_padding(method, self.tokens(method, batch)))
        if uneven is not None:
            loss, logged = weighted(loss, logged, uneven)
        if not math.isfinite(loss.item()):
            raise non_finite(method, batch["rows"].tolist())
        method.meter.add(logged)
        return loss

    def without_padding(self, method: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch whose views tell their true tokens, where a step on the CPU gains by computing no others."""
        self.packed_tokens = None
        if not self.packing or method.device.type != "cpu" or method.optimizer_config.chunk is not None:
            return batch
        masks = {k: v["attention_mask"] for k, v in batch.items() if isinstance(v, dict)}
        true = {name: int(mask.sum()) for name, mask in masks.items()}
        longest = max(mask.shape[1] for mask in masks.values())
        padded = sum(map(len, masks.values())) * longest
        if sum(true.values()) > (1 - LEAST_PADDING) * padded:
            return batch
        if not all(b.unpads(longest, on_card=False) for b in backbones_of(method)):
            return batch
        self.packed_tokens = sum(true.values())
        return {k: {**v, "token_budget": true[k]} if k in true else v for k, v in batch.items()}


class CompiledStep(EagerStep):
    """The same with compiled transformer blocks.

    One compilation for each length would be minutes where there are many, and past the compiler's limit of 8 none.
    """

    compiles = True
    dynamic = None
