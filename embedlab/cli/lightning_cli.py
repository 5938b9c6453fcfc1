"""LightningCLI over the classes that `embedlab train` uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from embedlab.cli.permission import check_permission
from embedlab.cli.run_file import add_sections, folder_of, from_file, model
from embedlab.distributed.devices import device_count
from embedlab.run.check import check_run
from embedlab.run.processes import start_ranks, wants_processes
from embedlab.run.run_folder import check_free, check_own, owned

if TYPE_CHECKING:
    from embedlab.run.run import Run


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
        add_sections(parser)

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
        trainer = made["trainer"].as_dict()
        values, extra = from_file(parsed.as_dict() | {"trainer": trainer})
        check_permission(values, self.command_line)
        folder = folder_of(trainer, values)
        if self.subcommand == "fit":
            check_own(folder, "trainer.default_root_dir")
        with owned(folder, "trainer.default_root_dir"):
            self.status = self._begin(values, folder, extra)

    def _begin(self, values: dict[str, Any], folder: Path, extra: dict[str, Any]) -> int:
        from embedlab.cli.train import train_one
        from embedlab.run.parse import parse_run, parse_shared
        from embedlab.run.places import check_places
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
        shared = parse_shared(values)
        check_places(shared, subcommand)
        config = parse_run(values, shared)
        if wants_processes(config):
            check_run(config)
            return start_ranks(command, device_count(config.trainer))
        validate(Run(config, folder, subcommand, extra), subcommand)
        return 0

    def _run_subcommand(self, subcommand: str) -> None:
        """Done with the making: a run is made in the process that trains it."""
