"""The thin base of every method: optimiser, step, logging. A method says which views meet which objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from embedlab.backbones.adapters import check_saved
from embedlab.backbones.backbone import Backbone
from embedlab.config.method import MethodConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.distributed.gather import shares, weight, world_size
from embedlab.encoders.checkpoint import encoder_record
from embedlab.encoders.grad_cache import R, cached
from embedlab.engine.dev_encoder import DevForward
from embedlab.engine.fsdp import shard, whole
from embedlab.engine.meter import Meter
from embedlab.engine.nonfinite import NonFiniteLoss
from embedlab.engine.optimizer import ReplayableAdamW, build_optimizer, parameter_groups
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.config.run import RunConfig
    from embedlab.config.template import Template
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.engine.cuda_graph import CapturedStep

Batch = dict[str, Any]
"""``rows`` [B], and by the name of each view ``input_ids`` and ``attention_mask`` [B, L] and a ``hash`` [B]."""
Fields = dict[str, tuple[str, "Template | None"]]
"""View name to (column of the data, template around it)."""

_LEAST_PADDING = 0.03
"""Share of the cells from which on packing and unpacking cost less than they save."""


@dataclass
class Outcome:
    """Of one batch: losses by name (the base adds them up) and what else to log; scalars."""

    losses: dict[str, Tensor]
    stats: dict[str, Tensor] = field(default_factory=dict)


class Method(LightningModule):
    """Owns the encoder, the optimiser and the step.

    Args:
        encoder: trained, and what is kept afterwards.
        config: of the method.
        optimizer: of the update.
        step: ``eager`` (automatic optimisation), ``compile`` (the same, transformer blocks compiled) or ``graph``
            (the whole step, from token gathering to the update, as one CUDA graph for each batch shape; needs
            one CUDA device and device-resident data).
    """

    config_class: ClassVar[type[MethodConfig]]
    head_kind: ClassVar[Literal["masked_lm", "causal_lm"] | None] = None
    """The language-modelling head that the method trains, loaded with the backbone."""
    can_unpad: ClassVar[bool] = False
    """Whether the method hands on the capacity of its views, so that a step can leave out padding."""
    unpad: bool = False
    """Leave out padding in a captured step, where the backbone and the lengths of the rows allow it, and in an eager
    one on the CPU (on CUDA the host would have to wait for the number of true tokens)."""

    def __init__(
        self, encoder: SentenceEncoder, config: MethodConfig, optimizer: OptimizerConfig, step: str = "eager"
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.encoder.chunk = optimizer.chunk
        self.config = config
        self.optimizer_config = optimizer
        self.step_mode = step
        self.automatic_optimization = step != "graph"
        self.meter = Meter()
        self._captured: CapturedStep | None = None
        self._unpadded_cells: int | None = None
        self._dev: DevForward | None = None
        self._is_sharded = False
        self.save_hyperparameters({"method": asdict(config), "optimizer": asdict(optimizer)}, logger=False)

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> Method:
        """The method around the encoder that it trains; what needs more than `make_encoder` gives overrides this."""
        return cls(cls.make_encoder(run, tokenizer), run.method, run.optimizer, run.resolved_step())

    @classmethod
    def make_encoder(cls, run: RunConfig, tokenizer: Any = None) -> SentenceEncoder:
        """The encoder of a run, its weights loaded.

        Args:
            run: the whole configuration.
            tokenizer: of a fresh backbone; None: the checkpoint's own.
        """
        from embedlab.backbones import load_backbone
        from embedlab.backbones.adapters import adapt, rank_device
        from embedlab.encoders.encoder import SentenceEncoder
        from embedlab.encoders.tokenization import Tokenization
        from embedlab.pooling import build_pooling

        backbone, tokenizer = load_backbone(run.backbone, head=cls.head_kind, tokenizer=tokenizer)
        adapt(backbone, run.adapter, run.backbone, rank_device(run.trainer.on_cuda(), run.trainer.devices))
        pooling = build_pooling(run.pooling, backbone.info)
        tokenization = Tokenization(tokenizer, run.template, preparation=run.method.preparation)
        return SentenceEncoder(backbone, pooling, tokenization)

    # ---- what a method says -------------------------------------------------------------------------------------

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        """Which views of which columns a batch has."""
        raise NotImplementedError

    def losses(self, batch: Batch) -> Outcome:
        """Named losses of one batch whose views are token tensors on the device."""
        raise NotImplementedError

    def frozen(self) -> Iterator[nn.Module]:
        """Modules that stay in evaluation mode and out of the optimiser (teachers)."""
        return iter(())

    def configure_model(self) -> None:
        """Share out the weights, once, where the strategy does that."""
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and not self._is_sharded:
            self._is_sharded = True
            shard(self, mesh["data_parallel"], str(self.trainer.precision))

    # ---- the step -----------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        wanted = self.trainer.num_devices * self.trainer.num_nodes
        if world_size() != wanted:
            raise RuntimeError(f"{wanted} processes were asked for, and {world_size()} train together")
        if self._captured is not None:
            # Graphs of an earlier fit update memory where the weights no longer are.
            self._captured = self._dev = None
            self.meter = Meter()
        # Lightning leaves a module as it arrives, and a Hugging Face model arrives in evaluation mode.
        self.train()
        for module in self.frozen():
            module.requires_grad_(False).eval()
        if self.step_mode in ("compile", "graph"):
            for module in self.modules():
                if isinstance(module, Backbone):
                    # The number of true tokens has many values: one compilation for all of them.
                    module.compile_blocks(dynamic=self.unpad and self.step_mode == "graph")

    def total(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses, and everything to log, detached."""
        outcome = self.losses(batch)
        loss = torch.stack([v.float() for v in outcome.losses.values()]).sum()
        logged = (
            {f"loss/{k}": v.detach() for k, v in outcome.losses.items()} if len(outcome.losses) > 1 else {}
        )
        logged |= {k: v.detach() for k, v in (outcome.stats | self.encoder.pooling.take_stats()).items()}
        return loss, {"loss": loss.detach(), **logged}

    def by_chunks(self, encode: Callable[..., R], *rows: Tensor) -> R:
        """``encode(*rows)``, in chunks of ``optimizer.chunk`` rows where that is set (cached gradients)."""
        return cached(encode, *rows, chunk=self.optimizer_config.chunk)

    def tokens(self, batch: Batch) -> Batch:
        """The batch with its token tensors: those of resident data are gathered on the device."""
        if "lengths" not in batch:
            return batch
        return self.resident().gather(batch["rows"], batch["lengths"])

    def resident(self) -> Any:
        return self.trainer.datamodule.resident(self.device)  # type: ignore[attr-defined]

    def training_step(self, batch: Batch, batch_idx: int) -> STEP_OUTPUT:
        if self.step_mode == "graph":
            self._graph_step(batch)
            return None
        uneven = batch.get("shares")
        with shares(uneven):
            loss, logged = self.total(self._without_padding(self.tokens(batch)))
        if uneven is not None:
            loss = loss * weight(uneven)
        if not math.isfinite(loss.item()):
            raise NonFiniteLoss(
                self.global_step, batch["rows"].tolist(), self._describe(batch["rows"].tolist())
            )
        self.meter.add(logged)
        return loss

    def _without_padding(self, batch: Batch) -> Batch:
        """The batch whose views tell their true tokens, where an eager step gains by computing no others."""
        self._unpadded_cells = None
        if not self.unpad or self.device.type != "cpu" or self.optimizer_config.chunk is not None:
            return batch
        masks = {k: v["attention_mask"] for k, v in batch.items() if isinstance(v, dict)}
        true = {name: int(mask.sum()) for name, mask in masks.items()}
        cells = sum(map(len, masks.values())) * max(mask.shape[1] for mask in masks.values())
        if sum(true.values()) > (1 - _LEAST_PADDING) * cells:
            return batch
        self._unpadded_cells = sum(true.values())
        return {k: {**v, "capacity": true[k]} if k in true else v for k, v in batch.items()}

    def _graph_step(self, batch: Batch) -> None:
        from embedlab.engine.cuda_graph import CapturedStep

        optimizer = self.optimizers()
        if self._captured is None:
            inner: ReplayableAdamW = optimizer.optimizer  # type: ignore[union-attr,assignment]
            self._captured = CapturedStep(self, inner)
        captured = self._captured
        if captured.load(batch):
            optimizer.step()  # type: ignore[union-attr]
            self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
        else:
            captured.replay()
        self.meter.add_sum(captured.totals, captured.names)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        clip = self.optimizer_config.clip
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        inner = getattr(optimizer, "optimizer", optimizer)
        if scaler is not None and getattr(inner, "_step_supports_amp_scaling", False):
            # Lightning leaves that to the fused update, which comes after clipping.
            scaler.unscale_(inner)
        norm = nn.utils.clip_grad_norm_(self.trained(), math.inf if clip is None else clip)
        self.meter.add({"grad_norm": whole(norm.detach())})

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        for module in self.frozen():
            module.requires_grad_(False)
        steps = self.schedule_steps()
        groups = parameter_groups(self, self.optimizer_config.lr)
        optimizer, scheduler = build_optimizer(self.optimizer_config, groups, steps, self.device)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def schedule_steps(self) -> int:
        """Updates of the whole run, at whose end the learning-rate schedule ends."""
        steps, accumulate = int(self.trainer.estimated_stepping_batches), self.optimizer_config.accumulate
        if self.step_mode != "graph" or accumulate == 1:
            return steps
        # A captured step adds batches up by itself, so the trainer takes each for an update.
        batches, epochs, most = (
            self.trainer.num_training_batches,
            self.trainer.max_epochs,
            self.trainer.max_steps,
        )
        if epochs is None or epochs < 0 or math.isinf(batches):
            return steps
        updates = math.ceil(batches / accumulate) * epochs
        return max(1, updates if most < 0 else min(updates, most))

    def accumulating(self) -> bool:
        """Whether the present batch is only added up. The last batch of an epoch always ends in an update."""
        if self.step_mode != "graph":
            return bool(self.trainer.fit_loop._should_accumulate())
        loop = self.trainer.fit_loop.epoch_loop
        done = loop.batch_progress.current.ready % self.optimizer_config.accumulate == 0
        return not done and not loop._num_ready_batches_reached()

    def _describe(self, rows: list[int]) -> str:
        describe = getattr(getattr(self.trainer, "datamodule", None), "describe_rows", None)
        return describe(rows) if describe else ""

    # ---- scoring ------------------------------------------------------------------------------------------------

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Scoring while training is done by the ``DevScoring`` callback, which needs the loop to exist."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Scoring after training is done by a callback, which needs the loop to exist."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Vectors ``[B, D]`` of the batch's first view."""
        batch = self.tokens(batch)
        view = next(v for v in batch.values() if isinstance(v, dict) and "input_ids" in v)
        return self.encoder(view["input_ids"], view["attention_mask"])

    def dev_rows(self, sentences: Sequence[str]) -> list[list[int]]:
        """Token ids of the sentences that are scored while training."""
        return self.encoder.tokenization.ids(sentences)

    def dev_vectors(self, rows: Sequence[Sequence[int]], batch_tokens: int) -> Tensor:
        """What scoring while training takes for tokenised rows, ``[n, D]``: the encoder's vectors.

        The same list again is neither padded nor brought to the device again.
        """
        if self._dev is None or not self._dev.holds(rows, batch_tokens):
            self._dev = DevForward(self, rows, batch_tokens)
        return self._dev()

    def longest(self, lengths: dict[str, int]) -> int:
        """Tokens of the longest row that a step encodes, from those of each view."""
        return max(lengths.values())

    # ---- what callbacks ask -------------------------------------------------------------------------------------

    def cells(self, batch: Batch) -> int:
        """Tokens that one pass over a batch computes, padding included."""
        unpadded = self._unpadded_cells if self._captured is None else self._captured.cells
        return batch.get("cells", 0) if unpadded is None else unpadded

    @property
    def passes(self) -> float:
        """How often a token of the batch goes through the encoder in one step (2 for dropout pairs)."""
        return 1.0

    @property
    def learning_rate(self) -> float:
        scheduler = self.lr_schedulers()
        assert scheduler is not None
        assert not isinstance(scheduler, list)
        return self.optimizer_config.lr * scheduler.lr_lambdas[0](scheduler.last_epoch)  # type: ignore[union-attr,attr-defined]

    def check_finite(self, means: dict[str, float]) -> None:
        """Stop a captured run whose losses ceased to be finite (the eager step looks at every loss itself)."""
        if self._captured is not None and not all(math.isfinite(v) for v in means.values()):
            self._captured.check()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Make the checkpoint whole by itself: the encoder's files beside its weights; numbers, not device tensors."""
        if self._captured is not None:
            self._captured.check()
        for state in checkpoint.get("optimizer_states", []):
            for group in state.get("param_groups", []):  # a sharded run gathers them in the first process
                group["lr"] = float(group["lr"])
                group["capturable"] = False
        for state in checkpoint.get("lr_schedulers", []):
            state["_last_lr"] = [float(lr) for lr in state["_last_lr"]]
        checkpoint["embedlab"] = {
            "encoder": encoder_record(self.encoder),
            "parameters": [n for n, _ in self._named()],
        }

    def verify_checkpoint(self, path: Path) -> None:
        """Raise if a checkpoint of adapters, which no base model could stand in for, is not what is trained."""
        if self.encoder.backbone.adapter is None:
            return
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
        check_saved({n: p.detach() for n, p in self._named()}, saved, str(path))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Optimiser state is kept by position, so refuse a model whose parameters are in another order."""
        self.check_parameters(checkpoint.get("embedlab", {}).get("parameters"))
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        # Lightning counts updates in one place for captured steps and in another for all others.
        for place in (
            loop.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {}).get("step"),
            loop.get("epoch_loop.manual_optimization.optim_step_progress"),
        ):
            if place is not None:
                place["total"] = dict.fromkeys(("ready", "completed"), checkpoint["global_step"])

    def check_parameters(self, saved: list[str] | None) -> None:
        """Raise UserError if these names of a checkpoint, in their order, are not those of what is trained here."""
        here = [n for n, _ in self._named()]
        if saved is not None and saved != here:
            odd = next(
                (f"{a} / {b}" for a, b in zip(saved, here, strict=False) if a != b), "their number differs"
            )
            raise UserError(
                f"the checkpoint's parameters are not this model's ({odd})",
                key="ckpt_path",
                fix="resume with the configuration that the checkpoint was made with",
            )

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.named_parameters() if p.requires_grad]
