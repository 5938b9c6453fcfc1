"""One run, from its configuration to its exported encoder and scores."""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import Logger

from embedlab.backbones import train_tokenizer
from embedlab.config.data import DataConfig
from embedlab.config.run import RunConfig
from embedlab.console import LEAF_SPEC
from embedlab.data.build import FieldSpec
from embedlab.data.kinds import data_kind
from embedlab.data.module import SentenceDataModule
from embedlab.data.rows import iter_texts
from embedlab.data.sources import check_source
from embedlab.distributed.devices import device_count, global_rank, on_cuda, precision_of
from embedlab.distributed.lost import PeerLost, peer_is_gone
from embedlab.encoders.folder import whole_folder
from embedlab.encoders.loading import load_checkpoint
from embedlab.encoders.usage import Usage
from embedlab.engine.cuda_graph import CapturedStep
from embedlab.engine.fsdp import Sharded, sharded
from embedlab.engine.gradient_sum import SummedInStep
from embedlab.engine.module import Method
from embedlab.engine.precision import FrozenBF16
from embedlab.engine.step import CompiledStep, EagerStep, NonFiniteLoss
from embedlab.errors import UserError
from embedlab.locks import locked
from embedlab.methods import method_class
from embedlab.run.callbacks.checkpoints import (
    LAST,
    LastCheckpoint,
    WholeFile,
    check_parameters,
    find_checkpoint,
    how_to_go_on,
    kept_in,
    read_checkpoint,
    step_of,
)
from embedlab.run.callbacks.interrupt import GracefulStop
from embedlab.run.callbacks.progress import Progress
from embedlab.run.callbacks.randomness import Randomness
from embedlab.run.callbacks.scoring import DevScoring, LossSelection, Selection
from embedlab.run.callbacks.train_log import TrainLog
from embedlab.run.check import (
    check_distinct,
    check_run,
    compared,
    planned_steps,
    resolved_packing,
    resolved_step,
)
from embedlab.run.dev import early_stopping, load_dev
from embedlab.run.finish import FinalEvaluation, check_final, overlap_of
from embedlab.run.loggers import finish, quiet_loggers, run_loggers
from embedlab.run.resume import check_recipe, finished
from embedlab.run.run_folder import Record, check_free, check_own, given_checkpoint, owned

log = logging.getLogger(__name__)
_OF_STRUCTURE = (AttributeError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError)


def train(config: RunConfig, folder: Path) -> dict[str, float]:
    """Train, select, export and score.

    Args:
        config: checked here first.
        folder: of the run. Gets ``config.yaml``, ``metrics.csv``, ``last.ckpt`` (resume), ``best/`` (weights of the
            best dev score, where there is one), ``export/`` (the result, for ``embedlab.load``), ``scores.json``
            and ``data_report.json``.

    Returns:
        The final scores, ``task/metric``.

    Raises:
        UserError: bad configuration or data, or a folder that holds another run or is in use.
        Interrupted: a signal; the checkpoint is written.
        NonFiniteLoss: the loss is no number.
    """
    check_own(Path(folder), "folder")
    with owned(Path(folder), "folder"):
        check_free(Path(folder), config.ckpt_path, "folder")
        return Run(config, folder).fit()


class Run:
    """The parts of one run, made from its configuration: ``method``, ``data``, ``trainer`` and ``finale``.

    Where the checkpoint to go on from is the end of the run and it has been scored, none is made: ``finished`` has
    the scores.

    Args:
        config: checked here first.
        folder: of the run.
        purpose: ``fit``, or to look at an encoder that is there: ``validate``, ``test``, ``predict``.
        extra: arguments of Lightning's trainer beyond the configuration's.
        part: whether it is a stage of a larger run.

    Raises:
        UserError: bad configuration or data.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        purpose: str = "fit",
        extra: dict[str, Any] | None = None,
        part: bool = False,
    ) -> None:
        for line in check_run(config):
            log.warning(line)
        self.config, self.folder = config, Path(folder)
        quiet_loggers()
        self.checkpoint = find_checkpoint(config.ckpt_path, self.folder)
        trains = purpose == "fit" and not config.method.idle
        if purpose == "fit" and self.checkpoint is not None:
            check_recipe(self.checkpoint, config.plain)
        self.finished = finished(config, self.folder, self.checkpoint) if trains else None
        if self.finished is not None:
            return
        dev = load_dev(
            config.evaluation, config.data
        )  # before hours of tokenising: a wrong folder is said at once
        loaded = check_final(config.evaluation) if purpose == "fit" else None
        if purpose in ("fit", "predict"):
            check_source(config.data)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started = time.time()
        seed_everything(config.seed, workers=False, verbose=False)
        self.method, self.data = build(config, self.folder)
        fits = purpose == "fit"
        rank_zero = global_rank() == 0
        if trains:
            # Nothing of an earlier run is touched before it is known that this one can begin.
            if self.checkpoint is not None and not config.trainer.strategy.startswith("fsdp"):
                check_parameters(self.method, read_checkpoint(self.checkpoint).embedlab.parameters)
            self.data.plan(device_count(config.trainer) * config.trainer.num_nodes)
            check_distinct(config, self.data.report)
        if fits or purpose == "predict":  # prints the report: of data that are refused the refusal is enough
            self.data.prepare_data()
        self.record = Record(self.folder) if rank_zero and fits else None
        self.finale = FinalEvaluation(config, self.folder, self.method.encoder, self.data, dev, part, loaded)
        loggers = run_loggers(config, self.folder, self.checkpoint) if fits else []
        self.trainer, self.selection = build_trainer(config, self.folder, loggers, self.finale, extra)
        self.finale.device = self.trainer.strategy.root_device
        if self.checkpoint is None and rank_zero and fits:
            self.finale.before()

    def fit(self) -> dict[str, float]:
        """Train, select, export and score; what it raises and returns is said at `train`."""
        if self.finished is not None:
            return self.finished
        trainer, selection = self.trainer, self.selection
        _banner(self.config, trainer, self.data, self.checkpoint)
        if self.record is not None:
            self.record.write(self.config.plain)
        try:
            with warnings.catch_warnings():
                _quiet()
                try:
                    trainer.fit(
                        self.method, datamodule=self.data, ckpt_path=self.checkpoint, weights_only=True
                    )
                except NonFiniteLoss as error:
                    error.checkpoint = next(iter(kept_in(self.folder)), self.checkpoint)
                    raise
                except Exception as error:
                    self._not_begun(error)
                    if trainer.world_size > 1 and peer_is_gone(error):
                        raise PeerLost(how_to_go_on(self.folder)) from error
                    raise
            if not trainer.is_global_zero:
                return {}
            if trainer.global_step < self.config.trainer.max_steps and not self.config.method.idle:
                wanted = self.config.trainer.max_steps
                log.warning("The run ended after %d of max_steps=%d steps.", trainer.global_step, wanted)
            if sharded(self.method):
                self.finale.encoder = load_checkpoint(self.folder / LAST)
            if selection is not None and selection.best is not None:
                if selection.best.step not in (None, trainer.global_step):
                    self.finale.replaced()
                selection.best.write(self.method.encoder)
                selection.best.load_into(self.method.encoder)
            scores = self.finale.after(trainer, selection, time.time() - self.started)
            for logger in trainer.loggers if scores else ():
                logger.log_metrics({f"final/{k}": v for k, v in scores.items()}, step=trainer.global_step)
            return scores
        finally:
            self.method.runner.close()
            finish(trainer.loggers)

    def _not_begun(self, error: Exception) -> None:
        """Leave no configuration behind where training has not begun; a checkpoint may be of other data, or damaged.

        Raises:
            UserError: Lightning cannot restore the checkpoint, whose structure it does not look at.
        """
        keeper = next(c for c in self.trainer.callbacks if isinstance(c, LastCheckpoint))  # type: ignore[attr-defined]
        if keeper.begun:
            return
        if self.record is not None:
            self.record.put_back()
        # torch's own errors of memory and of a card are of further types.
        of_torch = type(error) is RuntimeError and not peer_is_gone(error)
        if self.checkpoint is not None and (of_torch or isinstance(error, _OF_STRUCTURE)):
            raise UserError(
                f"the checkpoint cannot be restored ({type(error).__name__}: {error})",
                file=self.checkpoint,
                key="ckpt_path",
                fix="another copy of it, or the run's previous.ckpt",
            ) from error


def build(config: RunConfig, folder: Path) -> tuple[Method, SentenceDataModule]:
    """The method around its encoder, and the data in the views that the method wants."""
    cls = method_class(config.method.name)
    tokenizer = _fresh_tokenizer(config, folder) if config.backbone.source == "fresh" else None
    overlap = overlap_of(config)  # before the weights: a folder that is missing is said at once
    method = cls.from_run(config, tokenizer)
    data = [one.config for one in config.data.sets.values()] or [config.data]
    method.encoder.usage = Usage.of_training(one.prompts or {} for one in data)
    runners = {"eager": EagerStep, "compile": CompiledStep, "graph": CapturedStep}
    method.use(runners[resolved_step(config)](packing=resolved_packing(config)))

    def views(data: DataConfig) -> dict[str, FieldSpec]:
        fields = cls.fields(config.method, data_kind(data.name).roles_of(data), config.template)
        return method.views(fields, data.max_length)

    fields: Any = {name: views(one.config) for name, one in config.data.sets.items()} or views(config.data)
    emit = "rows" if on_cuda(config.trainer) or method.runner.resident else "tokens"
    validation = [torch.zeros(1)] if config.evaluation.has_dev else None
    # Without training there are no batches, of which the text might have too few rows for one.
    idle = config.method.idle and not config.data.mix
    read = replace(config.data, drop_last=False) if idle else config.data
    return method, SentenceDataModule(read, fields, config.seed, emit, validation, overlap)


def build_trainer(
    config: RunConfig,
    folder: Path,
    loggers: list[Logger],
    finale: FinalEvaluation,
    extra: dict[str, Any] | None = None,
) -> tuple[Trainer, Selection | None]:
    """An ordinary Lightning trainer with this project's callbacks; ``extra`` adds to them, and to its arguments."""
    more = dict(extra or {})
    settings, scoring = config.trainer, config.evaluation
    saving = config.callbacks.checkpoint
    keeper = LastCheckpoint(folder, saving.every_minutes, saving.every_steps, saving.at_end, config.plain)
    callbacks: list[Callback] = [Randomness(config.seed), GracefulStop(keeper)]
    selection: Selection | None = None
    given = None if config.ckpt_path is None else given_checkpoint(config.ckpt_path)
    before = None if given is None else given.parent
    # Without training there is nothing to select, and what the fit adds (a whitening) is not in the weights before it.
    select = "last" if config.method.idle else scoring.selection
    if finale.dev is not None:
        selection = DevScoring(finale.dev, folder, "dev" if select == "dev" else "last", before=before)
        callbacks.append(selection)
    if select == "loss":
        selection = LossSelection(folder, scoring.every, before)
        callbacks.append(selection)
    if config.callbacks.early_stopping is not None:
        callbacks.append(early_stopping(finale.dev, config.callbacks.early_stopping))
    callbacks += [TrainLog(settings.log_every_n_steps), keeper]
    if config.callbacks.progress != "none":
        callbacks.append(Progress(config))
    accumulate = config.optimizer.accumulate
    captured = resolved_step(config) == "graph"
    frozen_bf16 = precision_of(settings) == "bf16-true" and config.adapter.r is not None
    trainer = _trainer(
        accelerator=settings.accelerator,
        devices=list(settings.devices) if isinstance(settings.devices, tuple) else settings.devices,
        num_nodes=settings.num_nodes,
        strategy=_strategy(config) if "strategy" not in more else more.pop("strategy"),
        precision=None if frozen_bf16 else cast("Any", precision_of(settings)),
        max_epochs=settings.max_epochs,
        max_steps=0 if config.method.idle else settings.max_steps,
        accumulate_grad_batches=1 if captured else accumulate,
        val_check_interval=scoring.every * accumulate if finale.dev is not None else None,
        check_val_every_n_epoch=None if finale.dev is not None else 1,
        limit_val_batches=1 if finale.dev is not None else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=settings.log_every_n_steps,
        deterministic=settings.deterministic,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*callbacks, *more.pop("callbacks", [])],
        logger=[*loggers, *more.pop("logger", [])],
        plugins=[*_plugins(), *([FrozenBF16()] if frozen_bf16 else []), *more.pop("plugins", [])],
        default_root_dir=folder,
        **more,
    )
    return trainer, selection


def _trainer(**arguments: Any) -> Trainer:
    """Lightning's trainer, whose objections to its arguments are the user's to mend."""
    try:
        return Trainer(**arguments)
    except (ValueError, TypeError, MisconfigurationException) as error:
        raise UserError(
            f"Lightning refuses the trainer: {str(error).partition('. ')[0]}",
            key="trainer",
            fix="look at strategy, devices and precision",
        ) from error


def _strategy(config: RunConfig) -> Any:
    devices = device_count(config.trainer) * config.trainer.num_nodes
    if config.trainer.strategy.startswith("fsdp"):
        return Sharded(devices)
    summed = devices > 1 and resolved_step(config) == "graph"
    return SummedInStep() if summed else config.trainer.strategy


def _plugins() -> list[Any]:
    """How checkpoints are written, and on SLURM that Lightning leaves its signals to `GracefulStop`."""
    slurm = [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    return [WholeFile(), *slurm]


def _fresh_tokenizer(config: RunConfig, folder: Path) -> Any:
    """A tokenizer trained on the run's own text; a resumed run takes the one that it began with."""
    from transformers import AutoTokenizer

    kept = folder / "tokenizer"

    assert config.backbone.fresh is not None
    folder.mkdir(parents=True, exist_ok=True)
    # The ranks of one run come here together.
    with locked(folder / "tokenizer.lock", doing="trains this run's tokenizer"):
        if not (kept / "tokenizer.json").is_file():
            with whole_folder(kept) as new:
                train_tokenizer(config.backbone.fresh, iter_texts(config.data)).save_pretrained(new)
    return AutoTokenizer.from_pretrained(kept, trust_remote_code=False)


def _quiet() -> None:
    """Lightning's advice that does not apply: this project's loaders and loggers are its own."""
    for text in (
        ".*does not have many workers.*",
        ".*The number of training batches.*smaller than the logging interval.*",
        ".*No loss.*",
        ".*module\\(s\\) in eval mode at the start of training.*",
        ".*`training_step` returned `None`.*",
        ".*Consider increasing the value of the `num_workers`.*",
        ".*Found keys that are not in the model state dict.*",
        LEAF_SPEC,
    ):
        warnings.filterwarnings("ignore", text)


def _banner(config: RunConfig, trainer: Trainer, data: SentenceDataModule, checkpoint: Path | None) -> None:
    """What a run is about to do; says how many candidates an anchor meets, which accumulation does not raise."""
    per_device, world = config.data.batch_size, trainer.world_size
    plan = data.plan(world)
    steps = 0 if config.method.idle else planned_steps(config, len(plan))
    if steps < config.trainer.max_steps and not config.method.idle:
        log.warning(
            "max_steps=%d is not reached: max_epochs=%d ends the run after %d. Fix: a larger trainer.max_epochs",
            config.trainer.max_steps, config.trainer.max_epochs, steps,
        )  # fmt: skip
    if config.data.leaves_rows and plan.left:
        log.info("%s of %s rows fit into no batch of an epoch.", f"{plan.left:,}", f"{data.n_rows:,}")
    candidates = ""
    if compared(config):
        met = per_device * (world if getattr(config.method, "gather_negatives", True) else 1)
        candidates = f"{met} in-batch candidates an anchor, "
    log.info(
        "step=%s precision=%s devices=%d steps=%d | batch %d on each device, %s%d sentences an update",
        resolved_step(config), trainer.precision, world, steps, per_device, candidates,
        per_device * world * config.optimizer.accumulate,
    )  # fmt: skip
    if checkpoint is not None:
        log.info("Resumed from step %d (%s).", step_of(checkpoint), checkpoint)
