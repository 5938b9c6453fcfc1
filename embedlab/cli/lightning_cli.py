"""`embedlab fit|validate|test|predict --config FILE`: LightningCLI over the classes that `embedlab train` uses."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from embedlab.cli.permission import check_permission
from embedlab.cli.run_file import from_file
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.config.data import DataConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.trainer import CallbacksConfig, LoggerConfig, ScoringConfig
from embedlab.console import show_log
from embedlab.distributed.devices import device_count, launched
from embedlab.errors import UserError
from embedlab.run.check import check_run
from embedlab.run.processes import end_with_starter, start_ranks, wants_processes
from embedlab.run.run_folder import check_free, check_own, owned

if TYPE_CHECKING:
    from embedlab.run.run import Run


def model(
    backbone: BackboneConfig,
    method: dict[str, Any],
    pooling: dict[str, Any],
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008 - frozen
    template: dict[str, Any] | None = None,
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - frozen
    step: str = "auto",
    unpad: bool | str = "auto",
) -> LightningModule:
    """A method around the encoder that it trains; its arguments are the sections of ``conf/``."""
    raise NotImplementedError("the run makes it: a method needs the trainer's precision and the data's kind")


class EmbedlabCLI(LightningCLI):
    """Lightning's parser and subcommands; `Run` makes the objects, as for a Hydra composition."""

    run: Run | None = None
    status = 0

    def __init__(self, subcommand: str, argv: Sequence[str]) -> None:
        self.command_line = list(argv)
        # One line and status 2 for what cannot be parsed, where argparse prints its usage.
        names = self.subcommands()
        quiet: dict[str, Any] = {"exit_on_error": False, **{name: {"exit_on_error": False} for name in names}}
        quiet["prog"] = "embedlab"  # also as `python -m embedlab`
        before, sys.argv = sys.argv, sys.argv[:1]  # which Lightning takes for a second set of arguments
        try:
            super().__init__(
                model,
                LightningDataModule,
                save_config_callback=None,
                parser_kwargs=quiet,
                seed_everything_default=42,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                args=[subcommand, *self.command_line],
            )
        finally:
            sys.argv = before

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({"trainer.max_epochs": 1})
        parser.add_function_arguments(model, "model")
        parser.add_class_arguments(DataConfig, "data")
        parser.add_class_arguments(LoggerConfig, "logger")
        parser.add_class_arguments(CallbacksConfig, "callbacks")
        parser.add_class_arguments(ScoringConfig, "evaluation")
        parser.add_argument("--stages", type=dict[str, Any], default={}, help="Runs before this one.")
        parser.add_argument("--stages_dir", type=str | None, default=None, help="Where their folders are.")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        skip = {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"}
        return dict.fromkeys(("fit", "validate", "test", "predict"), skip)

    def _parse_ckpt_path(self) -> None:
        """The file says what the model is; a checkpoint of another one is refused when it is loaded."""

    def _set_seed(self) -> None:
        """The run seeds itself, so that both commands draw the same."""

    def instantiate_classes(self) -> None:
        parsed = self.config[self.subcommand]
        # Lightning's own objects (callbacks, profilers, strategies) are made; the sections stay plain values.
        parser: Any = self._parser(self.subcommand)
        # jsonargparse 4.49 renamed it.
        made = getattr(parser, "instantiate", parser.instantiate_classes)(parsed)
        content = {k: _plain(v) for k, v in parsed.as_dict().items() if k not in ("config", "trainer")}
        content["trainer"] = {k: _lists(v) for k, v in made["trainer"].as_dict().items()}
        values, extra = from_file(content)
        check_permission(values, self.command_line)
        folder = _folder(content["trainer"].get("default_root_dir"), values, content["ckpt_path"])
        if self.subcommand == "fit":
            check_own(folder, "trainer.default_root_dir")
        with owned(folder, "trainer.default_root_dir"):
            self.status = self._begin(values, folder, extra)

    def _begin(self, values: dict[str, Any], folder: Path, extra: dict[str, Any]) -> int:
        from embedlab.cli.train import train_one
        from embedlab.run.parse import parse_run
        from embedlab.run.run import Run
        from embedlab.run.stages import has_stages, run_stages
        from embedlab.run.validate import validate

        subcommand = str(self.subcommand)
        command = ["embedlab", subcommand, *self.command_line, f"--trainer.default_root_dir={folder}"]
        if subcommand == "fit":
            check_free(folder, values.get("ckpt_path"), "trainer.default_root_dir")
            return train_one(values, folder, extra=extra, command=command)
        if has_stages(values):
            status, values = run_stages(values, folder, lambda stage, place: train_one(stage, place, folder))
            if status:
                return status
        config = parse_run(values)
        if wants_processes(config):
            check_run(config)
            return start_ranks(command, device_count(config.trainer))
        validate(Run(config, folder, subcommand, extra), subcommand)
        return 0

    def _run_subcommand(self, subcommand: str) -> None:
        """Done with the making: a run is made in the process that trains it."""


def main(subcommand: str, argv: Sequence[str]) -> int:
    """Run one of Lightning's subcommands; returns the exit status.

    Raises:
        UserError: a file or an argument that cannot be read, in one line.
    """
    end_with_starter()
    show_log()
    if not argv:
        fix = f"embedlab {subcommand} --config FILE, which embedlab train … --cli-config prints"
        raise UserError(f"{subcommand} reads a run from a file", key="config", fix=fix)
    try:
        return EmbedlabCLI(subcommand, argv).status
    except UserError as error:
        error.key, error.fix = _as_flag(error.key), _KEY.sub(_flag, error.fix)
        raise
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"not UTF-8 (byte 0x{byte:02x} at place {error.start + 1} of the file)",
            key="config",
            fix="a YAML file",
        ) from None
    except argparse.ArgumentError as error:
        text = " ".join(str(error).split())
        raise UserError(text[:400], fix=f"embedlab {subcommand} --help") from None


_OF_MODEL = ("backbone", "adapter", "method", "pooling", "template", "optimizer", "step", "unpad")
_OTHERS = {"seed": "seed_everything", "hydra.run.dir": "trainer.default_root_dir", "ckpt_path": "ckpt_path"}
_CHOICES = {"trainer": "accelerator", "backbone": "source", **dict.fromkeys(("step", "unpad"), "")}
"""The key that a group's choice mostly stands for, where it is not its name."""
_KEY = re.compile(
    rf"(?<![\w.-])((?:{'|'.join((*_OF_MODEL, *_OTHERS, 'trainer', 'data', 'logger', 'callbacks', 'evaluation'))})"
    r"(?:\.\w+)*)=(?=\w|\[)"
)


def _flag(found: re.Match[str]) -> str:
    """A key of `embedlab train` in a message, such as ``trainer.devices`` or ``trainer``, by this command's name."""
    key = found[1]
    if key in ("trainer", "data", *_OF_MODEL):
        key = f"{key}.{_CHOICES.get(key, 'name')}".rstrip(".")
    return f"--{_as_flag(key)}="


def _as_flag(key: str | None) -> str | None:
    if key is None or key in _OTHERS:
        return key and _OTHERS[key]
    return f"model.{key}" if key.partition(".")[0] in _OF_MODEL else key


def _folder(given: Any, values: dict[str, Any], ckpt_path: str | None) -> Path:
    """Where the run is: as given, or the same for all tries of a SLURM job, or a new one."""
    if given is not None:
        return Path(given)
    name = values["method"].get("name", "run")
    if "SLURM_JOB_ID" in os.environ:
        job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ["SLURM_JOB_ID"])
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        return Path("runs") / f"slurm-{job}{'' if task is None else f'-{task}'}-{name}"
    if launched() or ckpt_path in ("last", "auto"):
        why = "ranks need the same folder" if launched() else f"ckpt_path={ckpt_path} is looked for in it"
        raise UserError(f"which folder the run is in: {why}", key="trainer.default_root_dir",
                        fix="--trainer.default_root_dir=DIR")  # fmt: skip
    now = datetime.datetime.now()
    return Path("runs") / now.strftime("%Y-%m-%d") / f"{now:%H-%M-%S}-{name}"


def _plain(section: Any) -> Any:
    """A section as YAML gives it back: no tuples, no enumerations."""
    return yaml.safe_load(yaml.safe_dump(_lists(section)))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(v) for v in value]
    return str(value) if isinstance(value, Path) else value
