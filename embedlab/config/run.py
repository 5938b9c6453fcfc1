"""A run's whole configuration, checked before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from embedlab.backbones import probe
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.config.build import from_dict, section
from embedlab.config.data import DataConfig
from embedlab.config.method import MethodConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.config.trainer import CallbacksConfig, LoggerConfig, ScoringConfig, TrainerConfig
from embedlab.data.kinds import data_kind
from embedlab.data.plan import BatchPlan
from embedlab.engine.fsdp import check_sharded
from embedlab.errors import UserError
from embedlab.evaluation.core.preflight import unfit
from embedlab.kernels.packing import MODEL_TYPES
from embedlab.methods import method_class, method_config
from embedlab.pooling import pooling_config
from embedlab.run.parse import light_sections

STEPS = ("auto", "eager", "compile", "graph")


@dataclass(frozen=True)
class RunConfig:
    """Backbone x method x pooling on data, and how. ``plain`` is the dictionary that it was read from."""

    backbone: BackboneConfig
    adapter: AdapterConfig
    method: MethodConfig
    pooling: PoolingConfig
    template: Template | None
    data: DataConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    callbacks: CallbacksConfig
    evaluation: ScoringConfig
    seed: int
    step: str
    unpad: bool | str
    ckpt_path: str | None
    plain: dict[str, Any]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Read a composed configuration.

        Raises:
            UserError: a missing section, an unknown key or a value out of range.
        """
        # A key that no section resembles is a variable of an experiment's file, such as `arm`.
        sections = [f.name for f in fields(cls) if f.name != "plain"]
        for key in values:
            near = get_close_matches(key, sections, n=1, cutoff=0.8)
            if near and key not in (*sections, "stages"):
                raise UserError("unknown key", key=key, value=values[key], fix=f"did you mean {near[0]}?")
        try:
            template = values.get("template")
            template = template if template and section(template, "template").get("text") else None
            return cls(
                **light_sections(values),
                adapter=from_dict(AdapterConfig, values.get("adapter", {}), "adapter"),
                method=method_config(values["method"]),
                pooling=pooling_config(values["pooling"]),
                template=from_dict(Template, template, "template") if template else None,
                optimizer=from_dict(OptimizerConfig, values["optimizer"], "optimizer"),
                seed=values["seed"],
                step=values["step"],
                unpad=values.get("unpad", "auto"),
                ckpt_path=values.get("ckpt_path"),
                plain=values,
            )
        except KeyError as missing:
            raise UserError("a section of the configuration is missing", key=str(missing.args[0])) from None

    def check(self) -> list[str]:
        """Whether the parts fit each other; reads no weights.

        Returns:
            Warnings: combinations that are known to be poor.

        Raises:
            UserError: combinations that have no meaning, naming the key, the value and the fix.
        """
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**32:
            raise UserError(
                "the seed is a number from 0 on",
                key="seed",
                value="null" if self.seed is None else self.seed,
                fix="a whole number from 0 to 4294967295",
            )
        if self.ckpt_path is not None and not isinstance(self.ckpt_path, str):
            raise UserError(
                "not a path", key="ckpt_path", value=self.ckpt_path, fix="FILE.ckpt, last or auto"
            )
        if self.step not in STEPS:
            raise UserError("unknown way to run a step", key="step", value=self.step, fix=", ".join(STEPS))
        self.adapter.check(self.backbone.source)
        check_sharded(self)
        self._check_backbone()
        info = self.info()
        warnings = self.pooling.check(info, self.template, self.method.name)
        packed = self.data.pack is not None
        warnings += self.method.check(info, self.pooling, self.template, self.data.name, packed)
        warnings += self.method.check_run(info, self)
        self._check_batch()
        self._check_final(info)
        self.resolved_step()
        self.resolved_unpad()
        if self.trainer.resolved_precision() == "bf16-true" and self.adapter.r is None:
            raise UserError(
                "trained weights in bf16 lose updates below 1/256 of a weight",
                key="trainer.precision",
                value="bf16-true",
                fix="bf16-mixed, or adapter=lora (a bf16 base, adapters in fp32)",
            )
        return warnings

    def _check_backbone(self) -> None:
        folder = Path(self.backbone.path or "").expanduser()
        if self.backbone.source != "local" or (folder / "config.json").is_file():
            return
        if (folder / "export" / "config.json").is_file():
            raise UserError(
                "the folder of a run, not of a model",
                key="backbone.path",
                value=self.backbone.path,
                fix=f"backbone.path={folder / 'export'}",
            )

    def check_rows(self, rows: int | None) -> None:
        """UserError if training on so many rows has no batch for every device; None: not known yet."""
        if rows is not None and not self.method.idle:
            BatchPlan(rows, self.data.batch_size, world=self._world(), drop_last=self.data.drop_last)

    def _world(self) -> int:
        return self.trainer.device_count() * self.trainer.num_nodes

    def _check_batch(self) -> None:
        in_batch = self.data.batch_size * self._world()
        if in_batch == 1 and self.method.needs_others and "negative" not in data_kind(self.data.name).roles:
            raise UserError(
                f"method={self.method.name} compares a sentence with the others of its batch, and there are none",
                key="data.batch_size",
                value=self.data.batch_size,
                fix="data.batch_size=64",
            )

    def _check_final(self, info: BackboneInfo) -> None:
        for suite in self.evaluation.final:
            # Without training the encoder is made of others than the run's backbone.
            why = unfit(suite, None if self.method.idle else info, self.method.towers)
            if why is not None:
                raise UserError(
                    f"{suite} is not for what this run makes: {why}",
                    key="evaluation.final",
                    value=suite,
                    fix=f"leave {suite} out",
                )

    def info(self) -> BackboneInfo:
        info = probe(self.backbone)
        return replace(info, adapter_dropout=self.adapter.dropout) if self.adapter.r is not None else info

    def resolved_step(self) -> str:
        """``auto``: graph on one CUDA device in bf16-mixed or fp32 with batches of one size, else compile; eager on
        the CPU."""
        cuda = self.trainer.on_cuda()
        one = self.trainer.device_count() == 1 and self.trainer.num_nodes == 1
        precision = self.trainer.resolved_precision()
        recomputes = self.optimizer.chunk is not None or self.adapter.gradient_checkpointing
        if self.step == "graph" and recomputes:
            # A graph has one course: activations cannot be computed again with the random state of before.
            raise UserError(
                "a captured step computes no activation twice, as optimizer.chunk and "
                "adapter.gradient_checkpointing do",
                key="step",
                value=self.step,
                fix="step=compile, or step=auto",
            )
        capturable = cuda and one and precision in ("bf16-mixed", "32-true")
        if self.step == "graph" and not capturable:
            raise UserError(
                "a captured step needs one CUDA device and precision bf16-mixed or 32-true",
                key="step",
                value=self.step,
                fix="step=compile, or step=auto",
            )
        if self.step == "graph" and not self.data.drop_last:
            raise UserError(
                "a captured step needs batches of one size, and the last one of an epoch may be smaller "
                "(data.drop_last=false)",
                key="step",
                value=self.step,
                fix="data.drop_last=true, or step=compile",
            )
        if self.step != "auto":
            return self.step
        if capturable and self.data.drop_last and not recomputes:
            return "graph"
        return "compile" if cuda else "eager"

    def resolved_unpad(self) -> bool:
        """Whether a captured step, or an eager one on the CPU, leaves out padding; ``auto``: where method and backbone
        can."""
        # YAML has read true and false; LightningCLI hands them on as words.
        wanted = {"true": True, "false": False}.get(str(self.unpad).lower(), self.unpad)
        if not isinstance(wanted, bool) and wanted != "auto":
            raise UserError("neither yes nor no", key="unpad", value=self.unpad, fix="auto, true or false")
        if wanted is False:
            return False
        why = self._cannot_unpad()
        if wanted is True and why is not None:
            raise UserError(f"padding cannot be left out: {why}", key="unpad", value="true", fix="unpad=auto")
        return why is None

    def _cannot_unpad(self) -> str | None:
        step = self.resolved_step()
        if step != "graph" and (step != "eager" or self.trainer.on_cuda()):
            return "that is for captured steps (step=graph), and for eager ones on the CPU"
        if self.optimizer.chunk is not None or self.adapter.gradient_checkpointing:
            return "optimizer.chunk and adapter.gradient_checkpointing compute padded rows again"
        if not method_class(self.method.name).can_unpad:
            return f"method={self.method.name} computes padded rows"
        if self.data.pack is not None:
            return "packed rows (data.pack) have none"
        if self.info().model_type not in MODEL_TYPES:
            return f"{self.info().model_type} is none of {', '.join(sorted(MODEL_TYPES))}"
        if self.backbone.attention != "sdpa":
            return f"it needs backbone.attention=sdpa, not {self.backbone.attention}"
        return None
