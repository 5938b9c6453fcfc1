"""Whether the parts of a run fit each other, and what its ``auto`` values come to; reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from embedlab.backbones import probe
from embedlab.backbones.architecture import can_be_captured, check_adapter, check_blocks, has_blocks
from embedlab.config.backbone import BackboneInfo
from embedlab.config.data import DataConfig, kind_name
from embedlab.config.run import RunConfig
from embedlab.data.kinds import has_negatives
from embedlab.data.plan import BatchPlan
from embedlab.distributed.devices import device_count, on_cuda, precision_of
from embedlab.errors import UserError
from embedlab.evaluation.core.suite import suite
from embedlab.kernels.available import kernel_options
from embedlab.kernels.packing import DECODER_TYPES, MODEL_TYPES, packable


def check_run(run: RunConfig) -> list[str]:
    """Whether the parts fit each other.

    Returns:
        Warnings: combinations that are known to be poor.

    Raises:
        UserError: combinations that have no meaning, naming the key, the value and the fix.
    """
    kernel_options()  # a wrong one is refused here, and not in the first step
    run.adapter.check(run.backbone.source)
    _check_sharded(run)
    _check_backbone(run)
    info = backbone_info(run)
    if run.adapter.r is not None:
        check_adapter(info.model_type, run.adapter.name)
    if run.trainer.strategy.startswith("fsdp"):
        check_blocks(info.model_type, "trainer.strategy", run.trainer.strategy)
    warnings = run.pooling.check(info, run.template, run.method.name)
    known = {kind_name(kind) for kind in run.method.kinds}
    for name in run.data.names:
        if kind_name(name) in known:
            continue
        raise UserError(
            f"method={run.method.name} does not train on this kind of data",
            key="data",
            value=name,
            fix=f"data={' or '.join(run.method.kinds)}",
        )
    warnings += run.method.check(info, run)
    if precision_of(run.trainer) in ("bf16-mixed", "bf16-true") and not on_cuda(run.trainer):
        warnings.append(
            f"precision {precision_of(run.trainer)} without a CUDA device: slower there, and less exact than"
            " trainer.precision=32-true"
        )
    _check_batch(run)
    _check_final(run, info)
    resolved_step(run)
    resolved_packing(run)
    if precision_of(run.trainer) == "bf16-true" and run.adapter.r is None:
        raise UserError(
            "trained weights in bf16 lose updates below 1/256 of a weight",
            key="trainer.precision",
            value="bf16-true",
            fix="bf16-mixed, or adapter=lora (a bf16 base, adapters in fp32)",
        )
    return warnings


def check_rows(run: RunConfig, rows: int | None) -> None:
    """UserError if training on so many rows has no batch for every device; None: not known yet."""
    if rows is not None and not run.method.idle:
        BatchPlan(rows, run.data.batch_size, world=_world(run), drop_last=run.data.drop_last)


def compared(run: RunConfig) -> dict[str, DataConfig]:
    """The run's data, or those of its mix by name, whose rows the loss compares with each other; of a run that does not
    train none."""
    sets = {name: (one.config, run.method.of(one.objective)) for name, one in run.data.sets.items()}
    found = (sets or {"": (run.data, run.method)}).items()
    return {name: data for name, (data, method) in found if method.needs_others and not run.method.idle}


def check_distinct(run: RunConfig, report: Mapping[str, Any]) -> None:
    """Raises UserError where all rows of the data report, or of a set of its mix, are one, and a method compares each
    with the others."""
    for name, data in compared(run).items():
        found = report["sets"][name] if name else report
        if found["duplicates"] == found["rows"] - 1 and not has_negatives(data):
            rows = "there is one row" if found["rows"] == 1 else f"all {found['rows']:,} rows are the same"
            raise UserError(
                f"{rows}: no step would change anything",
                file=data.source,
                key=f"data.mix.{name}" if name else "data",
                fix="text with different sentences",
            )


def planned_steps(run: RunConfig, batches: int) -> int:
    """Updates of the whole run, of so many batches an epoch: ``max_steps``, or ``max_epochs`` where that gives less."""
    steps = run.trainer.max_epochs * ceil(batches / run.optimizer.accumulate)
    return steps if run.trainer.max_steps == -1 else min(steps, run.trainer.max_steps)


def backbone_info(run: RunConfig) -> BackboneInfo:
    """What is known of the backbone before its weights are loaded."""
    info = probe(run.backbone)
    return replace(info, adapter_dropout=run.adapter.dropout) if run.adapter.r is not None else info


def resolved_step(run: RunConfig) -> str:
    """How a step runs. ``auto``: graph on CUDA devices in bf16-mixed or fp32, each with the whole model, else compile;
    eager on the CPU.

    Raises:
        UserError: a captured step that cannot be.
    """
    cuda = on_cuda(run.trainer)
    one = _world(run) == 1 and not run.trainer.strategy.startswith("fsdp")
    whole = one or run.trainer.strategy in ("auto", "ddp")
    own = run.method.why_not_captured(run.data)
    capturable = cuda and whole and own is None and precision_of(run.trainer) in ("bf16-mixed", "32-true")
    recomputes = run.adapter.gradient_checkpointing
    model_type = backbone_info(run).model_type if cuda or run.step not in ("auto", "eager") else ""
    if run.step == "auto":
        if not has_blocks(model_type):
            return "eager"
        if not can_be_captured(model_type):
            return "compile"
        if capturable and not recomputes:
            return "graph"
        return "compile" if cuda else "eager"
    if run.step in ("compile", "graph"):
        check_blocks(model_type, "step", run.step)
    if run.step != "graph":
        return run.step
    fix = "step=compile, or step=auto"
    why = None
    if not can_be_captured(model_type):
        why = f"needs shapes and masks that depend on no token, and {model_type}'s do"
    elif own is not None:
        why = own
    elif recomputes:
        # A graph has one course: transformers' checkpoints restore random states on the host.
        why = "computes no activation twice, as adapter.gradient_checkpointing does (optimizer.chunk can be captured)"
    elif not capturable:
        why = "needs CUDA devices, precision bf16-mixed or 32-true, and trainer.strategy=ddp where there are several"
    if why is not None:
        raise UserError(f"a captured step {why}", key="step", value=run.step, fix=fix)
    return run.step


def resolved_packing(run: RunConfig) -> bool:
    """Whether a captured step, or an eager one on the CPU, leaves out padding (``unpad``).

    Raises:
        UserError: asked for where it cannot be.
    """
    if run.unpad is False:
        return False
    why = _cannot_pack(run)
    if run.unpad is True and why is not None:
        raise UserError(f"padding cannot be left out: {why}", key="unpad", value="true", fix="unpad=auto")
    return why is None


def _cannot_pack(run: RunConfig) -> str | None:
    step = resolved_step(run)
    if step != "graph" and (step != "eager" or on_cuda(run.trainer)):
        return "that is for captured steps (step=graph), and for eager ones on the CPU"
    if run.optimizer.chunk is not None or run.adapter.gradient_checkpointing:
        return "optimizer.chunk and adapter.gradient_checkpointing compute padded rows again"
    if not run.method.can_unpad:
        return f"method={run.method.name} computes padded rows"
    if run.pooling.counts_padding:
        return f"pooling={run.pooling.name} counts it here (pooling.invalid=grid6, as released)"
    info = backbone_info(run)
    if not packable(info.model_type, info.kind):
        return f"{info.model_type} is none of {', '.join(sorted(MODEL_TYPES | DECODER_TYPES))}"
    if run.backbone.attention != "sdpa":
        return f"it needs backbone.attention=sdpa, not {run.backbone.attention}"
    return None


def _world(run: RunConfig) -> int:
    return device_count(run.trainer) * run.trainer.num_nodes


def _check_backbone(run: RunConfig) -> None:
    """A path that nothing reads: the run would train another model than the one that is named."""
    if run.backbone.path and run.backbone.source != "local":
        raise UserError(
            f"is read with backbone=local alone, and the backbone is {run.backbone.name or 'fresh'}",
            key="backbone.path",
            value=run.backbone.path,
            fix=f"backbone=local backbone.path={run.backbone.path}, or leave the path out",
        )


def _check_batch(run: RunConfig) -> None:
    in_batch = run.data.batch_size * (_world(run) if getattr(run.method, "gather_negatives", True) else 1)
    if in_batch == 1 and not all(map(has_negatives, compared(run).values())):
        raise UserError(
            f"method={run.method.name} compares a sentence with the others of its batch, and there are none",
            key="data.batch_size",
            value=run.data.batch_size,
            fix="data.batch_size=64",
        )


def _check_final(run: RunConfig, info: BackboneInfo) -> None:
    for name in run.evaluation.final:
        # Without training the encoder is made of others than the run's backbone.
        why = suite(name).fits(None if run.method.idle else info, run.method.towers)
        if why is not None:
            raise UserError(
                f"{name} is not for what this run makes: {why}",
                key="evaluation.final",
                value=name,
                fix=f"leave {name} out",
            )


def _check_sharded(run: RunConfig) -> None:
    """Whether a run's weights can be sharded.

    Raises:
        UserError: not with this method, adapter or selection.
    """
    strategy = run.trainer.strategy
    if not strategy.startswith("fsdp"):
        return
    if run.adapter.r is not None:
        raise UserError(
            "frozen and 4-bit weights cannot be sharded with the trained ones",
            key="trainer.strategy",
            value=strategy,
            fix="trainer=ddp: each card has the whole (4-bit) base",
        )
    if not run.method.shardable:
        raise UserError(
            "this method cannot be sharded",
            key="trainer.strategy",
            value=strategy,
            fix="trainer=ddp, or a method that calls the backbone as a whole, such as simcse",
        )
    if run.evaluation.selection != "last":
        raise UserError(
            "the best weights of a sharded model are not kept aside",
            key="evaluation.select",
            value=run.evaluation.select,
            fix="evaluation.select=last",
        )
