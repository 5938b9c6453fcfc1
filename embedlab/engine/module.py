"""The thin base of every method. A method says which views meet which objective; runners say how a step is run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from embedlab.backbones import load_backbone
from embedlab.backbones.adapters import adapt, rank_device
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.config.template import Template
from embedlab.distributed.devices import on_cuda
from embedlab.distributed.gather import world_size
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.grad_cache import R, cached
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.fsdp import shard, whole
from embedlab.engine.meter import Meter
from embedlab.engine.optimizer import build_optimizer, parameter_groups
from embedlab.engine.step import EagerStep, StepRunner
from embedlab.errors import UserError
from embedlab.pooling import build_pooling

log = logging.getLogger(__name__)

Batch = dict[str, Any]
"""``rows`` [B], and by the name of each view ``input_ids`` and ``attention_mask`` [B, L] and a ``hash`` [B]."""
Fields = dict[str, tuple[str, "Template | None"]]
"""View name to (column of the data, template around it)."""


@dataclass
class LossOutput:
    """Of one batch: losses by name (the base adds them up) and what else to log; scalars."""

    losses: dict[str, Tensor]
    stats: dict[str, Tensor] = field(default_factory=dict)


class Method(LightningModule):
    """Owns the encoder, what is trained beside it, and the optimiser.

    A method subclasses it, says its ``config_class`` (a record in the same file, whose name is the method's), and gives
    `losses`, and `fields` where its views are not the columns of the data.

    Args:
        encoder: trained, and what is kept afterwards.
        config: of the method.
        optimizer: of the update.

    Attributes:
        runner: how a step is run: eagerly, until a run gives another one by `use`.
        meter: means of what is logged.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[MethodConfig]]
    head_kind: ClassVar[Literal["masked_lm", "causal_lm"] | None] = None
    """The language-modelling head that the method trains, loaded with the backbone."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "config_class" in vars(cls):
            cls.name = cls.config_class.name  # type: ignore[misc]  # its default

    def __init__(self, encoder: Encoder, config: MethodConfig, optimizer: OptimizerConfig) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.encoder.chunk = optimizer.chunk
        if not config.pools:  # weights without a gradient stop DDP
            for tower in self.encoder.towers:
                tower.pooling.requires_grad_(False)
        self.config = config
        self.optimizer_config = optimizer
        self.meter = Meter()
        self.use(EagerStep())
        self._is_sharded = False
        self.save_hyperparameters({"method": asdict(config), "optimizer": asdict(optimizer)}, logger=False)

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> Method:
        """The method around the encoder that it trains; what needs more than `make_encoder` gives overrides this."""
        return cls(cls.make_encoder(run, tokenizer), run.method, run.optimizer)

    @classmethod
    def make_encoder(cls, run: RunConfig, tokenizer: Any = None) -> Encoder:
        """The encoder of a run, its weights loaded.

        Args:
            run: the whole configuration.
            tokenizer: of a backbone that begins from scratch; None: the checkpoint's own.
        """
        backbone, tokenizer = load_backbone(run.backbone, head=cls.head_kind, tokenizer=tokenizer)
        adapt(backbone, run.adapter, run.backbone, rank_device(on_cuda(run.trainer), run.trainer.devices))
        tokenization = Tokenization(tokenizer, run.template, preparation=run.method.eval_text)
        pooling = build_pooling(run.pooling, backbone.info)
        if not run.method.pools and any(p.requires_grad for p in pooling.parameters()):
            log.warning(
                "pooling=%s has weights, which method=%s as it is set does not train: they are exported as they were "
                "drawn",
                run.pooling.name,
                run.method.name,
            )
        return SentenceEncoder(backbone, pooling, tokenization)

    def use(self, runner: StepRunner) -> None:
        """Run the steps of the next fit by this runner."""
        self.runner = runner
        self.automatic_optimization = runner.automatic

    # ---- what a method says -------------------------------------------------------------------------------------

    @classmethod
    def fields(cls, config: MethodConfig, roles: tuple[str, ...], template: Template | None) -> Fields:
        """Which views of which columns a batch has; by default each column, in the run's template.

        Args:
            config: of the method.
            roles: the columns of the data, such as ``("sentence",)`` or ``("source", "target")``.
            template: of the run, around a sentence.
        """
        return {role: (role, template) for role in roles}

    def views(self, fields: Fields, max_length: int | None) -> dict[str, tuple[str, Tokenization]]:
        """`fields` with how each text is tokenised, by default as the encoder does; a method may add views.

        Args:
            fields: as `fields` gives them.
            max_length: tokens of a sentence.

        Raises:
            UserError: the model takes fewer, or they leave no room for a sentence.
        """
        tokenizer = self.encoder.tokenizer
        try:
            return {
                view: (column, Tokenization(tokenizer, template, max_length))
                for view, (column, template) in fields.items()
            }
        except UserError as error:
            if error.key == "max_length":
                error.key = "data.max_length"
            raise

    def losses(self, batch: Batch) -> LossOutput:
        """Named losses of one batch whose views are token tensors on the device."""
        raise NotImplementedError

    def frozen(self) -> Iterator[nn.Module]:
        """Modules that stay in evaluation mode and out of the optimiser (teachers)."""
        return iter(())

    @property
    def forward_passes(self) -> float:
        """How often a token of the batch goes through the encoder in one step (2 for dropout pairs)."""
        return 1.0

    def longest(self, lengths: dict[str, int]) -> int:
        """Tokens of the longest row that a step encodes, from those of each view."""
        return max(lengths.values())

    def pads(self, view: str) -> bool:
        """Whether a view is computed with its padding also where a step leaves out that of the others."""
        return False

    def dev_rows(self, sentences: Sequence[str]) -> list[list[int]]:
        """Token ids of the sentences that are scored while training."""
        return self.encoder.tokenization.ids(sentences)

    def dev_vectors(self, vectors: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """What scoring while training compares, ``[n, D]``, from the encoder's vectors of `dev_rows`."""
        return vectors

    # ---- what it may call ---------------------------------------------------------------------------------------

    def by_chunks(self, encode: Callable[..., R], *rows: Tensor) -> R:
        """``encode(*rows)``, in chunks of ``optimizer.chunk`` rows where that is set (cached gradients)."""
        return cached(encode, *rows, chunk=self.optimizer_config.chunk)

    # ---- the step -----------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Share out the weights, once, where the strategy does that."""
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and not self._is_sharded:
            self._is_sharded = True
            shard(self, mesh["data_parallel"], str(self.trainer.precision))

    def on_fit_start(self) -> None:
        wanted = self.trainer.num_devices * self.trainer.num_nodes
        if world_size() != wanted:
            raise RuntimeError(f"{wanted} processes were asked for, and {world_size()} train together")
        # Lightning leaves a module as it arrives, and a Hugging Face model arrives in evaluation mode.
        self.train()
        for module in self.frozen():
            module.requires_grad_(False).eval()
        self.runner.begin(self)

    def total(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses, and everything to log, detached."""
        output = self.losses(batch)
        loss = torch.stack([v.float() for v in output.losses.values()]).sum()
        parts = output.losses if len(output.losses) > 1 else {}
        logged = {f"loss/{k}": v.detach() for k, v in parts.items()}
        logged |= {
            k: v.detach() for k, v in (output.stats | self.encoder.towers[0].pooling.take_stats()).items()
        }
        return loss, {"loss": loss.detach(), **logged}

    def training_step(self, batch: Batch, batch_idx: int) -> STEP_OUTPUT:
        return self.runner.step(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Scoring while training is done by the ``DevScoring`` callback, which needs the loop to exist."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Scoring after training is done by a callback, which needs the loop to exist."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Vectors ``[B, D]`` of the batch's first view."""
        views = self.runner.tokens(self, batch).values()
        view = next(v for v in views if isinstance(v, dict) and "input_ids" in v)
        return self.encoder(view["input_ids"], view["attention_mask"])

    # ---- the update ---------------------------------------------------------------------------------------------

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        for module in self.frozen():
            module.requires_grad_(False)
        wanted = self.optimizer_config
        decays = wanted.decay_norms_and_biases
        if decays is None:
            decays = self.config.decays_norms_and_biases
        groups = parameter_groups(self, wanted.lr, decays or wanted.weight_decay == 0)
        optimizer, scheduler = build_optimizer(wanted, groups, self.schedule_steps(), self.device)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def schedule_steps(self) -> int:
        """Updates of the whole run, at whose end the learning-rate schedule ends."""
        return self.runner.updates(self)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        clip = self.optimizer_config.clip
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        inner = getattr(optimizer, "optimizer", optimizer)
        if scaler is not None and getattr(inner, "_step_supports_amp_scaling", False):
            # Lightning leaves that to the fused update, which comes after clipping.
            scaler.unscale_(inner)
        norm = nn.utils.clip_grad_norm_(self.trained(), math.inf if clip is None else clip)
        self.meter.add({"grad_norm": whole(norm.detach())})
